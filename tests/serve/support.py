"""The expected text: what a session of the driver answers to a prompt alone."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest

from pyllama_mtp import Answer, Model, Session

from ..regression.support import last_logits, settings

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


def url(seed: int) -> str:
    """The data URL of a picture."""
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(seed).integers(0, 255, (64, 96, 3), dtype=np.uint8)
    out = io.BytesIO()
    image.fromarray(pixels).save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def question(*urls: str) -> list[dict[str, Any]]:
    """A chat with images."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What is this? "}]
    parts += [{"type": "image_url", "image_url": {"url": one}} for one in urls]
    return [{"role": "user", "content": parts}]


def chat_tokens(model: Model, messages: list[dict[str, str]]) -> list[int]:
    text = model.apply_chat_template(messages)
    return model.tokenize(text, add_special=False, parse_special=True)


def alone(model: Model, prompt: list[int], max_tokens: int, **options: Any) -> Answer:
    """Plain greedy decoding, without MTP."""
    with Session(model, settings(0, n_ubatch=32)) as session:
        return session.generate(prompt, max_tokens=max_tokens, **options).run()


def is_near_tie(model: Model, prompt: list[int], text: str, other: str) -> bool:
    """Whether two texts part where the two best logits are within rounding."""
    ids, others = (model.tokenize(one, add_special=False) for one in (text, other))
    # Where tokens part, which may be before their text does.
    n = next((i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), 0)
    tokens = [*prompt, *ids[:n]]
    best, second = np.sort(last_logits(model, tokens))[:-3:-1]
    return bool(best - second < 0.05)
