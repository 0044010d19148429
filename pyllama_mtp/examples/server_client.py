"""The OpenAI-compatible server, and the `openai` package as its client.

    python -m pyllama_mtp.examples.server_client [--model FILE] [--prompt TEXT] [--max-tokens N]

This example starts the server itself, on a free port; in real use run ``pyllama-mtp serve --model
FILE``. Needs the `openai` package (pip install openai).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from openai import OpenAI

from pyllama_mtp.models.demo import demo_path


@contextmanager
def serving(model: str) -> Iterator[str]:
    """The address of a server that ends with the block."""
    command = [sys.executable, "-m", "pyllama_mtp", "serve", "--model", model, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            said = process.stdout.readline()  # "serving NAME at http://HOST:PORT/v1"
            if not said:
                raise SystemExit("the server did not start")
            yield said.split()[-1]
        finally:
            process.terminate()


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default=str(demo_path()), metavar="FILE")
parser.add_argument("--prompt", default="def main")
parser.add_argument("--max-tokens", type=int, default=48)
args = parser.parse_args()

with serving(args.model) as address, OpenAI(base_url=address, api_key="any") as client:
    name = client.models.list().data[0].id
    print(f"{name} at {address}\n{args.prompt}", end="")
    chunks = client.completions.create(
        model=name,
        prompt=args.prompt,
        max_tokens=args.max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        if chunk.choices:
            print(chunk.choices[0].text, end="", flush=True)
        if chunk.usage and (details := chunk.usage.completion_tokens_details):
            accepted = details.accepted_prediction_tokens or 0
            drafted = accepted + (details.rejected_prediction_tokens or 0)
            tokens = chunk.usage.completion_tokens
            print(f"\n{tokens} tokens, {drafted} drafted, {accepted} accepted\n")

    answer = client.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": "What does str.split() do?"}],
        max_tokens=args.max_tokens,
        temperature=0,
    )
    print(answer.choices[0].message.content)
