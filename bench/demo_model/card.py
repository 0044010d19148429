"""Write MODEL_CARD.md from measured figures alone: sources, training record, evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .evaluate import CLASSES
from .net import Config

TEMPLATE = Path(__file__).with_name("card.md.in")


def _table(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _percent(values: list[float]) -> str:
    return " / ".join(f"{100 * v:.1f} %" for v in values)


def _figures(result: dict[str, Any]) -> str:
    """The evaluation section."""
    held = result["heldout"]
    rows = [["all", held], *result["by_class"].items()]
    text = _table(
        [
            [
                name,
                f"{r['tokens']:,}",
                f"{r['trunk_loss']:.3f}",
                f"{r['head_loss']:.3f}",
                _percent(r["agreement"]),
            ]
            for name, r in rows
        ]
    )
    out = (
        "\n## Held-out figures\nMeasured in float32 on the weights of the file.\n\n"
        "### On held-out text (teacher-forced, rows of 256 tokens)\n"
        "Losses in nats per token. Agreement: how often the draft's first choice is the trunk's "
        "first choice,\nat draft step 1 / 2 / 3 (steps 2 and 3 are fed the head's own state).\n\n"
        "| text | tokens | trunk loss | head loss | agreement at step 1 / 2 / 3 |\n"
        "|---|---|---|---|---|\n" + text + "\n"
    )
    for key, title in (("greedy", "greedy"), ("sampled", "temperature 0.8")):
        rows_ = [
            [
                name,
                str(r["drafted"][0]),
                _percent(r["rate"]),
                f"{r['tokens_per_round']:.2f}",
            ]
            for name, r in ((n, result[key]["classes"][n]) for n in CLASSES)
        ]
        out += (
            f"\n### Acceptance on held-out prompts, {title}\n"
            "Three tokens drafted greedily each round; a draft counts as accepted when it and all "
            "before it\nin the round equal what the trunk emits. Up to "
            f"{result[key]['n_new']} new tokens for each prompt of `prompts.jsonl`.\n\n"
            "| class | rounds | accepted at position 1 / 2 / 3 | tokens per round |\n"
            "|---|---|---|---|\n" + _table(rows_) + "\n\n"
            "Mean over the classes at the first position: "
            f"{100 * result[key]['mean_first']:.1f} %.\n"
        )
    return out


def _classes(counts: dict[str, int], classes: list[str]) -> str:
    return " / ".join(f"{counts.get(name, 0):,}" for name in classes)


def write(path: Path, facts: dict[str, Any], config: Config) -> None:
    """Write the card. `facts` holds: sources, characters, tokens, plan, run, file, evaluation."""
    classes = ["prose", "code", "factual", "instruction", "thinking"]
    sources = _table(
        [
            [s["name"], s["version"], s["licence"], s["what"], f"`{s['sha256']}`"]
            for s in facts["sources"]
        ]
    )[2:-2]
    attention = ", ".join(str(i) for i in range(config.n_layer) if (i + 1) % config.interval == 0)
    plan, run = facts["plan"], facts["run"]
    fields = {
        "c": config,
        "attention": attention,
        "sources": "| " + sources + " |",
        "classes": " / ".join(classes),
        "train_chars": _classes(facts["characters"]["train"], classes),
        "held_chars": _classes(facts["characters"]["heldout"], classes),
        "train_tokens": facts["tokens"]["train"],
        "held_tokens": facts["tokens"]["heldout"],
        "epochs": run["tokens"] / facts["tokens"]["train"],
        "taken": run["seconds"] / 60,
        "compiled": " --compile" if plan["compile"] else "",
        "long": 1 - plan["long_from"],
        "per_step": plan["tokens_per_step"],
        "figures": _figures(facts["evaluation"]),
    }
    fields |= {"hw": facts["weights"][0], "sw": facts["weights"][1], "tokens": run["tokens"]}
    fields |= {k: plan[k] for k in ("minutes", "seed", "row", "long_row", "lr_matrix", "lr_other")}
    text = TEMPLATE.read_text().format(
        steps=run["step"], n_ctx=config.n_ctx, **fields, **facts["file"]
    )
    path.write_text(text)


def load_json(path: Path) -> Any:
    """Parsed content of a JSON file."""
    return json.loads(path.read_text())
