"""The shipped demo model, its card, its prompts and its reference file belong together.

That llama.cpp computes what the reference file says is in regression/test_outside_reference.py.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.models.demo import demo_path, vision_demo_path
from pyllama_mtp.models.ggufinfo import validate_model_file
from pyllama_mtp.models.mmproj import find_mmproj

REFERENCE = Path(__file__).parents[1] / "data" / "demo_reference.npz"
PROMPTS = demo_path().with_name("prompts.jsonl")
CLASSES = ("factual", "thinking", "code", "instruction")


@pytest.fixture(scope="module")
def reader() -> GGUFReader:
    return GGUFReader(demo_path())


def value(reader: GGUFReader, key: str):
    assert key in reader.fields, f"the file lacks {key}"
    return reader.fields[key].contents()


@pytest.mark.parametrize(("model", "most"), [(demo_path(), 16e6), (vision_demo_path(), 6e6)])
def test_the_card_is_about_these_very_files(model: Path, most: float) -> None:
    """Of the demo model, and of the one that sees, with its encoder."""
    card, files = model.with_name("MODEL_CARD.md").read_text(), [model]
    if encoder := find_mmproj(model):
        files.append(encoder)
    assert len(files) == (1 if model == demo_path() else 2)
    assert all(hashlib.sha256(file.read_bytes()).hexdigest() in card for file in files)
    assert 1e6 < sum(file.stat().st_size for file in files) < most


def test_the_reference_is_about_this_very_file() -> None:
    with np.load(REFERENCE) as reference:
        assert str(reference["sha256"]) == hashlib.sha256(demo_path().read_bytes()).hexdigest()
    assert REFERENCE.stat().st_size < 1_000_000


def test_the_file_is_a_whole_model_with_a_head(reader: GGUFReader) -> None:
    validate_model_file(demo_path())
    assert value(reader, "general.license") == "mit"
    sections = value(reader, "qwen35.rope.dimension_sections")
    assert 2 * sum(sections) == value(reader, "qwen35.rope.dimension_count")


def test_first_drafts_are_accepted_often_enough(demo: Model, demo_prompts: list[str]) -> None:
    """Greedily, mean of the four classes: the model is worth something for trying MTP out."""
    drafted, accepted = Counter[str](), Counter[str]()
    records = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    assert all(record["prompt"].isascii() for record in records)
    assert all(sum(record["class"] == name for record in records) >= 5 for name in CLASSES)
    with Session(demo, Settings(n_ctx=1024, n_threads=1, draft_n_max=3)) as session:
        for record, prompt in zip(records, demo_prompts, strict=True):
            telemetry = session.generate(prompt, max_tokens=64).run().telemetry
            drafted[record["class"]] += sum(telemetry.drafted[:1])
            accepted[record["class"]] += sum(telemetry.accepted[:1])
    rates = [accepted[name] / drafted[name] for name in CLASSES]
    assert sum(rates) / len(rates) >= 0.60, rates
