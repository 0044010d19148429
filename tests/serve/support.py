"""The expected text: what a session of the driver answers to a prompt alone."""

from __future__ import annotations

import numpy as np

from pyllama_mtp import Answer, Model, Session, Settings
from pyllama_mtp.llama.context import Context, ContextOptions

QUESTIONS = (
    "What does str.split() do?",
    "What is a list?",
    "How do I open a file?",
    "What does the json module do?",
    "What is a generator?",
    "Explain os.path.join.",
    "What is a dictionary?",
    "How do I sort a list?",
)


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def chat_tokens(model: Model, messages: list[dict[str, str]]) -> list[int]:
    text = model.apply_chat_template(messages)
    return model.tokenize(text, add_special=False, parse_special=True)


def alone(model: Model, prompt: list[int], max_tokens: int, **options: object) -> Answer:
    """Plain greedy decoding, without MTP."""
    settings = Settings(draft_n_max=0, n_ctx=512, n_batch=48, n_ubatch=32, n_threads=1)
    with Session(model, settings) as session:
        return session.generate(prompt, max_tokens=max_tokens, **options).run()  # type: ignore[arg-type]


def last_logits(model: Model, tokens: list[int]) -> np.ndarray:
    """[n_vocab] float32: after `tokens`, from a fresh context."""
    options = ContextOptions(n_ctx=512, n_batch=512, n_ubatch=512, n_threads=1)
    with Context(model, options) as context:
        outputs = np.zeros(len(tokens), dtype=np.int8)
        outputs[-1] = 1
        context.decode(np.array(tokens, dtype=np.int32), 0, outputs)
        return context.logits(len(tokens) - 1).copy()


def is_near_tie(model: Model, prompt: list[int], text: str, other: str) -> bool:
    """Whether two texts part where the two best logits are within rounding."""
    ids, others = (model.tokenize(one, add_special=False) for one in (text, other))
    # Where tokens part, which may be before their text does.
    n = next((i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), 0)
    tokens = [*prompt, *ids[:n]]
    best, second = np.sort(last_logits(model, tokens))[:-3:-1]
    return bool(best - second < 0.05)
