"""A model spread over two workers, MTP included.

    python -m pyllama_mtp.examples.rpc [--model FILE]

This example starts the workers itself, on this machine. In real use each runs on a machine of its
own (``pyllama-mtp rpc-worker --host ADDRESS --port 50052``) and holds its part of the model. The
machine that generates has the file, and needs memory only for the token embeddings.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.errors import WorkerLostError
from pyllama_mtp.models.demo import demo_path


@contextmanager
def worker() -> Iterator[str]:
    """The address of a worker that ends with the block."""
    command = [sys.executable, "-m", "pyllama_mtp", "rpc-worker", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield process.stdout.readline().split()[-1]  # "listening on HOST:PORT"
        finally:
            process.terminate()


def generate(model: Model, prompt: str) -> str:
    """A few tokens with MTP."""
    with Session(model, Settings(n_ctx=512, n_threads=1, draft_n_max=3)) as session:
        run = session.generate(prompt, max_tokens=64).run()
    t = run.telemetry
    print(
        f"  prefill {t.prefill_tps:.0f} tok/s, decode {t.decode_tps:.0f} tok/s, "
        f"{t.tokens_per_round:.2f} tokens per round"
    )
    return run.text


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", type=Path, default=demo_path(), metavar="FILE")
parser.add_argument("--prompt", default='def greet(name):\n    """Say hello."""\n')
args = parser.parse_args()

print("here:")
with Model(args.model) as model:
    here = generate(model, args.prompt)
with ExitStack() as stack:
    workers = [stack.enter_context(worker()) for _ in range(2)]
    print(f"on {' and '.join(workers)}:")
    try:
        # Shares of the layers; without them they go by the workers' free memory.
        with Model(args.model, rpc_servers=workers, tensor_split=(1, 1)) as model:
            there = generate(model, args.prompt)
    except WorkerLostError as error:  # it died, or was silent for rpc_timeout seconds
        raise SystemExit(str(error)) from None
print(f"{'the same text' if here == there else 'another text (rounding)'}:\n{there}")
