"""Copying with edits: tokens per pass and speed of drafts of the head, of n-grams, and of both.

    python bench/copying.py [MODEL.gguf ...]        # the demo model by default

The prompt is a file of 300 lines of Python, and the answer is the same file with five edits. A
logits processor imposes that answer, so that a model that cannot copy does. Drafts know nothing of
it: the head sees the hidden states of the text, and n-grams see the text so far.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from unittest import mock

import numpy as np
from benchkit import results

from pyllama_mtp import Model, Sampling, Session, Settings
from pyllama_mtp.drafting.depth import DepthController
from pyllama_mtp.llama.batch import Floats, Ints
from pyllama_mtp.measure.prompts import stdlib_texts
from pyllama_mtp.models.demo import demo_path
from pyllama_mtp.telemetry import Telemetry

N_LINES, N_EDITS = 300, 5


def edited(lines: list[str]) -> list[str]:
    """A word replaced, a line removed, two lines inserted, a line changed, a name put in."""
    out, at = list(lines), [len(lines) * (2 * i + 1) // (2 * N_EDITS) for i in range(N_EDITS)]
    out[at[4]] = out[at[4]].rstrip("\n") + "  # checked\n"
    out[at[3]] = "        raise NotImplementedError(name)\n"
    out[at[2] : at[2]] = ["        if value is None:\n", "            return default\n"]
    del out[at[1]]
    out[at[0]] = out[at[0]].replace(" ", " new_", 1)
    return out


def imposed(n_prompt: int, tokens: list[int]) -> Sampling:
    """Sampling that gives `tokens` after a prompt of so many, whatever the logits."""

    def only(ids: Ints, logits: Floats) -> Floats:
        row = np.full_like(logits, -np.inf)
        row[tokens[len(ids) - n_prompt]] = 0
        return row

    return Sampling(temperature=0, logits_processors=(only,))


def measure(model: Model, way: str, prompt: list[int], answer: list[int]) -> Telemetry:
    """The figures of one answer, with drafts of the "head", of "n-grams" or of "both"."""
    settings = Settings(n_ctx=len(prompt) + len(answer) + 16, ngram=way != "head")
    no_head = mock.patch.object(DepthController, "choose", lambda *_, **__: 0)
    sampling = imposed(len(prompt), answer)
    with Session(model, settings) as session, no_head if way == "n-grams" else nullcontext():
        run = session.generate(
            prompt, max_tokens=len(answer), sampling=sampling, ignore_eos=True
        ).run()
    assert run.tokens == answer
    return run.telemetry


def main() -> None:
    """Print the table."""
    lines, rows = next(stdlib_texts()).splitlines(keepends=True)[:N_LINES], []
    for path in sys.argv[1:] or [demo_path()]:
        with Model(path) as model:
            prompt = model.tokenize("".join(lines) + "\n# Edited:\n")
            answer = model.tokenize("".join(edited(lines)))
            for way in ("head", "n-grams", "both") if model.has_mtp else ("n-grams",):
                t = measure(model, way, prompt, answer)
                row = [model.info.name or str(path), way, str(t.n_generated)]
                rows.append([*row, f"{t.tokens_per_round:.2f}", f"{t.decode_tps:.0f}"])
    results.show([], ["model", "drafts", "tokens", "tokens per pass", "tokens/s"], rows)


if __name__ == "__main__":
    main()
