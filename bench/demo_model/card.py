"""Write MODEL_CARD.md from measured figures alone: sources, training record, evaluation."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from . import evaluate
from .corpus import CLASSES
from .net import Model
from .train import HEAD_WEIGHT, SECOND_WEIGHT

TEMPLATE = Path(__file__).with_name("card.md.in")


def _table(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _percent(values: list[float]) -> str:
    return " / ".join(f"{100 * v:.1f} %" for v in values)


def _figures(result: dict[str, Any]) -> str:
    """The evaluation section."""
    losses = ("trunk_loss", "head_loss")
    text = _table(
        [
            [name, f"{r['tokens']:,}", *(f"{r[k]:.3f}" for k in losses), _percent(r["agreement"])]
            for name, r in (("all", result["heldout"]), *result["by_class"].items())
        ]
    )
    out = (
        "\n## Held-out figures\nLosses and agreement: in float32, on the weights of the file. "
        "Acceptance: by this package.\n\n"
        "### On held-out text (teacher-forced, rows of 256 tokens)\n"
        "Losses in nats per token. Agreement: how often the draft's first choice is the trunk's "
        "first choice,\nat draft step 1 / 2 / 3 (steps 2 and 3 are fed the head's own state).\n\n"
        "| text | tokens | trunk loss | head loss | agreement at step 1 / 2 / 3 |\n"
        "|---|---|---|---|---|\n" + text + "\n"
    )
    for key, title in (("greedy", "greedy"), ("sampled", "temperature 0.8")):
        rows_ = [
            [name, str(r["drafted"][0]), _percent(r["rate"]), f"{r['tokens_per_round']:.2f}"]
            for name, r in ((n, result[key]["classes"][n]) for n in evaluate.CLASSES)
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


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def write(
    work: Path, gguf_file: Path, model: Model, run: dict[str, Any], n_train: int, n_heldout: int
) -> None:
    """Write MODEL_CARD.md beside the model.

    Args:
        work: the folder with sources.json, characters.json and evaluation.json.
        run: the record of the training: plan, step, tokens, seconds.
        n_train, n_heldout: tokens of the two parts.
    """
    c, plan, characters = model.c, run["plan"], _read(work / "characters.json")
    keys = ("name", "version", "licence", "what")
    sources = _read(work / "sources.json")
    parameters = sum(p.numel() for p in model.parameters())

    def counts(part: str) -> str:
        return " / ".join(f"{characters[part].get(name, 0):,}" for name in CLASSES)

    fields = {
        "c": c,
        "millions": f"{parameters / 1e6:.1f}",
        "parameters": parameters,
        "head_parameters": sum(p.numel() for p in model.head.parameters()),
        "attention": ", ".join(str(i) for i in range(c.n_layer) if (i + 1) % c.interval == 0),
        "size": gguf_file.stat().st_size,
        "sha256": hashlib.sha256(gguf_file.read_bytes()).hexdigest(),
        "sources": _table([[*(s[key] for key in keys), f"`{s['sha256']}`"] for s in sources]),
        "classes": " / ".join(CLASSES),
        "train_chars": counts("train"),
        "held_chars": counts("heldout"),
        "train_tokens": n_train,
        "held_tokens": n_heldout,
        "steps": run["step"],
        "tokens": run["tokens"],
        "epochs": run["tokens"] / n_train,
        "taken": run["seconds"] / 60,
        "compiled": " --compile" if plan["compile"] else "",
        "long": 1 - plan["long_from"],
        "per_step": plan["tokens_per_step"],
        "hw": HEAD_WEIGHT,
        "sw": SECOND_WEIGHT,
        "n_ctx": c.n_ctx,
        "figures": _figures(_read(work / "evaluation.json")),
    }
    fields |= {k: plan[k] for k in ("minutes", "seed", "row", "long_row", "lr_matrix", "lr_other")}
    gguf_file.with_name("MODEL_CARD.md").write_text(TEMPLATE.read_text().format(**fields))
