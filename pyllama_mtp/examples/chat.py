"""A chat of several turns; each turn processes only what is new.

    python -m pyllama_mtp.examples.chat [--model FILE] [--max-tokens N] [QUESTION ...]

Without questions it asks three of its own. The session keeps what it has processed, for the model
and for the MTP head, so a turn costs what it adds, however long the conversation is.
"""

from __future__ import annotations

import argparse

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.models.demo import demo_path

QUESTIONS = ("What does str.split() do?", "And str.join()?", "Which of them gives a list?")

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("questions", nargs="*", metavar="QUESTION", default=QUESTIONS)
parser.add_argument("--model", default=demo_path(), metavar="FILE")
parser.add_argument("--max-tokens", type=int, default=48)
args = parser.parse_args()

messages: list[dict[str, str]] = []
with Model(args.model) as model, Session(model, Settings(n_ctx=1024)) as session:
    for question in args.questions:
        messages.append({"role": "user", "content": question})
        answer = session.chat(messages, max_tokens=args.max_tokens)
        print(f"> {question}")
        for text in answer:
            print(text, end="", flush=True)
        messages.append({"role": "assistant", "content": answer.text})
        t = answer.telemetry
        print(f"\n[{t.n_prompt} tokens of prompt, {t.n_cached} of them processed before]\n")
