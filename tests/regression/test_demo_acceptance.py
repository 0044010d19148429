"""The bundled model drafts well enough to be worth anything, measured by the driver itself."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.models.demo import demo_path

BAR = 0.60  # first draft accepted, mean over the four classes


def prompts(model: Model) -> list[tuple[str, str]]:
    """(class, prompt text) of every held-out prompt of the demo model."""
    lines = (Path(demo_path()).parent / "prompts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    chat = model.apply_chat_template
    return [
        (
            row["class"],
            chat([{"role": "user", "content": row["prompt"]}]) if row["chat"] else row["prompt"],
        )
        for row in rows
    ]


def test_first_draft_is_accepted_often_enough_in_greedy_decoding() -> None:
    drafted: dict[str, int] = defaultdict(int)
    accepted: dict[str, int] = defaultdict(int)
    with (
        Model(demo_path()) as model,
        Session(model, Settings(n_ctx=1024, draft_n_max=3)) as session,
    ):
        for kind, prompt in prompts(model):
            telemetry = session.generate(prompt, max_tokens=64).run().telemetry
            if telemetry.drafted:
                drafted[kind] += telemetry.drafted[0]
                accepted[kind] += telemetry.accepted[0]
    rates = {kind: accepted[kind] / drafted[kind] for kind in drafted}
    assert set(rates) == {"factual", "thinking", "code", "instruction"}
    assert sum(rates.values()) / len(rates) >= BAR, rates
