"""Draft only tokens that your own text uses: cheaper drafts, the same answers.

    python -m pyllama_mtp.examples.draft_vocabulary [--model FILE] [--text FILE ...] [--size 512]

Tokens outside the draft vocabulary are never drafted, so fewer drafts are accepted where the answer
needs them; the model itself always chooses from all tokens. ``pyllama-mtp draft-vocab`` writes such
a file for ``--draft-vocab FILE``.
"""

from __future__ import annotations

import argparse
import heapq
import tempfile
import textwrap
from pathlib import Path

import numpy as np

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.models import draftvocab
from pyllama_mtp.models.demo import demo_path

PROMPT = "import heapq\n\n\ndef main"

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default=demo_path(), metavar="FILE")
parser.add_argument("--text", nargs="+", default=[textwrap.__file__, heapq.__file__])
parser.add_argument("--size", type=int, default=512, help="tokens that may be drafted")
args = parser.parse_args()

tokenizer = draftvocab.read_tokenizer(args.model)
with Model(args.model) as model, tempfile.TemporaryDirectory() as folder:
    texts = [Path(name).read_text(encoding="utf-8") for name in args.text]
    ids = [model.tokenize(text, add_special=False) for text in texts]
    ranking = draftvocab.measure_ranking(ids, draftvocab.default_ranking(tokenizer))
    counts = np.zeros(tokenizer.n_vocab, np.int64)
    counts[ranking.ids] = ranking.counts
    best = draftvocab.best(ranking.ids, args.size, tokenizer)  # special tokens stay
    share = counts[best].sum() / counts.sum()
    print(f"the best {args.size} of {tokenizer.n_vocab} tokens are {share:.1%} of the text")

    file = Path(folder) / "mine.json"
    kept = draftvocab.Ranking(best, counts[best])
    draftvocab.save(file, kept, tokenizer, f"{len(texts)} files")
    answers = []
    for name, choice in (("all", "full"), (str(args.size), str(file))):
        settings = Settings(n_ctx=512, draft_n_max=3, draft_vocab=choice)
        with Session(model, settings) as session:
            answer = session.generate(PROMPT, max_tokens=64).run()
            t = answer.telemetry
            print(f"drafts from {name} tokens: {t.tokens_per_round:.2f} tokens per round")
            answers.append(answer.text)
print("the same text" if answers[0] == answers[1] else "another text")
