"""The compact table of what was measured, and publishing it below bench/results.

Figures of a dry run say so in their title and in every row, and are never published; nor are
figures that name another backend than CUDA.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchkit.paths import BENCH, RESULTS
from benchkit.results import markdown_table, project_commit

from gpukit.collect import Row, rows
from gpukit.config import DENSE, Config
from gpukit.state import RunbookError

DRY = "DRY RUN"
#: Decode at acceptance 0.8, dense shape, against no MTP.
BAR = 2.5
PUBLISHED = BENCH / "published.csv"


def header(config: Config, found: Sequence[Row]) -> dict[str, Any]:
    """What the results begin with: machine, GPU, driver, commands and date."""
    from pyllama_mtp.measure.machine import describe_machine

    gpu = config.work.facts.get("gpu")
    records = config.work.units
    dates = sorted(record.date for record in records.values())
    return {
        "schema": 1,
        "kind": "header",
        "dry_run": config.dry_run,
        "date": dates[-1] if dates else datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": "python bench/gpu_runbook.py all",
        "machine": describe_machine([gpu["name"]] if gpu else []),
        "gpu": gpu,
        "nvcc": config.work.facts.get("nvcc"),
        "project_commit": config.commit or project_commit(),
        "defines": config.work.facts.get("defines"),
        "tolerance_scale": config.tolerance_scale,
        "commands": {name: record.command for name, record in records.items() if record.command},
        "unfinished": [name for name, record in records.items() if record.status != "done"],
        "n_rows": len(found),
    }


def render(head: dict[str, Any], found: Sequence[Row]) -> str:
    """The page, in Markdown; its tables are what `table` prints last."""
    gpu, machine = head["gpu"], head["machine"]
    title = "Qwen3.6 shapes on one GPU"
    lines = [f"# {f'{DRY}: ' if head['dry_run'] else ''}{title}", ""]
    if head["dry_run"]:
        lines += [f"**{DRY}: tiny models on the CPU. No figure below means anything.**", ""]
    if gpu:
        memory = f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
        lines.append(f"- GPU: {gpu['name']}, {memory}, driver {gpu['driver']}, nvcc {head['nvcc']}")
    lines += [
        f"- Machine: {machine['cpu']}, {machine['cores']} cores, {machine['os']}",
        f"- Date: {head['date']}; commit {head['project_commit']}",
        f"- Command: `{head['command']}`; that of every unit is in the .jsonl",
        "- Models have random weights (`pyllama-mtp synth`); acceptance is imposed, so speeds mean "
        "something and texts do not",
    ]
    if head["unfinished"]:
        lines.append(f"- Not finished: {', '.join(head['unfinished'])}")
    lines.append("")
    for title, part in (
        (f"Regression suite, fixed tolerances times {head['tolerance_scale']:g}", _tests(found)),
        ("Matrix, tokens per second; ratios to no MTP", _matrix(found)),
        ("Prefill with MTP against without, in one session", _prefill(found)),
        ("Hidden states: on the device, and over the host", _handoff(found)),
        ("Decode at imposed acceptance, ratios to no MTP", _decode(found)),
        ("Drafting at depth 3, decode as ratios to no MTP", _drafting(found)),
        ("Beside upstream's llama-server, decode at the same acceptance", _upstream(found)),
    ):
        if part:
            lines += [f"## {title}", "", *part, ""]
    return "\n".join(lines).rstrip() + "\n"


def _of(found: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in found if row["kind"] == kind]


def _groups(found: Sequence[Row]) -> list[tuple[str, int]]:
    """(shape, prompt size), in order."""
    return sorted({(row["shape"], row["n_prompt"]) for row in found})


def _tests(found: Sequence[Row]) -> list[str]:
    files = _of(found, "tests")
    if not files:
        return []
    total = {name: sum(row[name] for row in files) for name in ("tests", "skipped")}
    failed = [f"{row['file']}: {name}" for row in files for name in row["failed"]]
    passed = total["tests"] - total["skipped"] - len(failed)
    lines = [f"{passed} passed, {len(failed)} failed, {total['skipped']} skipped."]
    return [*lines, *([""] if failed else []), *(f"- failed: {name}" for name in failed)]


def _matrix(found: Sequence[Row]) -> list[str]:
    cells = _of(found, "matrix")
    depths = sorted({row["depth"] for row in cells} - {0})
    if not cells:
        return []
    head = ["shape", "prompt", "prefill", *(f"x{d}" for d in depths), "decode"]
    head += [*(f"x{d}" for d in depths), "published decode"]
    published = read_published()
    lines = []
    for shape, size in _groups(cells):
        by = {r["depth"]: r for r in cells if (r["shape"], r["n_prompt"]) == (shape, size)}
        plain = by.get(0)
        words = [shape, f"{size:,}"]
        for figure in ("prefill_tps", "decode_tps"):
            base = plain[figure] if plain else None
            words.append(f"{base:.1f}" if base else "-")
            for depth in depths:
                value = by[depth][figure] if depth in by else None
                words.append(f"{value / base:.2f}" if value and base else "-")
        lines.append([*words, published.get((shape, size), "-")])
    notes = [
        "",
        "`x3` is depth 3 as a ratio to no MTP, prefill first, then decode. Published: no MTP "
        "and the best depth, RTX 3090, IQ4_NL, real text (bench/published.csv).",
    ]
    return [*markdown_table(head, lines), *notes]


def read_published() -> dict[tuple[str, int], str]:
    """Decode without MTP and at the best depth, of the published table for the 35B-A3B: its last
    state ("after"), and at sizes that this lacks the one before."""
    if not PUBLISHED.exists():
        return {}
    speeds: dict[tuple[str, int], dict[str, float]] = {}
    with PUBLISHED.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["source"].startswith("turboquant-147-") and row["decode_tps"]:
                found = speeds.setdefault((row["source"], int(row["n_prompt"])), {})
                kind = "plain" if row["mode"] == "no-mtp" else "mtp"
                found[kind] = max(found.get(kind, 0.0), float(row["decode_tps"]))
    texts = {}
    for (_, size), found in sorted(speeds.items(), key=lambda item: item[0], reverse=True):
        if len(found) == 2:  # "before" comes first, and "after" replaces it
            text = f"{found['plain']:.1f} x{found['mtp'] / found['plain']:.2f}"
            texts["qwen3.6-35b-a3b", size] = text
    return texts


def _prefill(found: Sequence[Row]) -> list[str]:
    lines = [
        [
            *(r["shape"], f"{r['n_prompt']:,}", f"{r['plain_tps']:.1f}", f"{r['mtp_tps']:.1f}"),
            f"{r['ratio']:.3f}",
        ]
        for r in sorted(_of(found, "prefill"), key=lambda r: (r["shape"], r["n_prompt"]))
    ]
    return markdown_table(["shape", "prompt", "no MTP", "MTP", "ratio"], lines) if lines else []


def _handoff(found: Sequence[Row]) -> list[str]:
    lines = []
    for row in _of(found, "handoff"):
        if not row["depth"]:
            continue
        twins = [r for r in _of(found, "handoff") if not r["depth"]]
        same = ("shape", "n_prompt", "handoff")
        plain = next((r for r in twins if all(r[k] == row[k] for k in same)), None)
        ratio = f"{row['prefill_tps'] / plain['prefill_tps']:.3f}" if plain else "-"
        kib = f"{row['hidden_to_host'] / 2**10:,.0f}"
        lines.append([row["shape"], f"{row['n_prompt']:,}", str(row["handoff"]), ratio, kib])
    head = ["shape", "prompt", "hand-off", "prefill to no MTP", "KiB to the host"]
    return markdown_table(head, sorted(lines)) if lines else []


def _decode(found: Sequence[Row]) -> list[str]:
    cells = _of(found, "decode")
    if not cells:
        return []
    cases = sorted({row["depth"] for row in cells} - {"0"})
    lines = []
    for shape, size in _groups(cells):
        here = [r for r in cells if (r["shape"], r["n_prompt"]) == (shape, size)]
        for acceptance in sorted({r["acceptance"] for r in here}, reverse=True):
            by = {r["depth"]: r for r in here if r["acceptance"] == acceptance}
            best = max(by[case]["ratio"] for case in cases if case in by)
            judged = shape == DENSE and acceptance == 0.8
            bar = ("met" if best >= BAR else "missed") if judged else ""
            words = [shape, f"{size:,}", f"{acceptance:g}", f"{by['0']['decode_tps']:.1f}"]
            words += [f"{by[case]['ratio']:.2f}" if case in by else "-" for case in cases]
            lines.append([*words, bar])
    head = ["shape", "prompt", "acceptance", "no MTP", *cases, f"bar {BAR}"]
    return markdown_table(head, lines)


def _drafting(found: Sequence[Row]) -> list[str]:
    cells = _of(found, "drafting")
    kinds = sorted({(r["drafting"], str(r["draft_vocab"])) for r in cells if r["depth"]})
    lines = []
    for shape, size in _groups(cells):
        here = [r for r in cells if (r["shape"], r["n_prompt"]) == (shape, size)]
        plain = next((r["decode_tps"] for r in here if not r["depth"]), None)
        by = {(r["drafting"], str(r["draft_vocab"])): r["decode_tps"] for r in here if r["depth"]}
        ratios = [f"{by[k] / plain:.2f}" if plain and k in by else "-" for k in kinds]
        lines.append([shape, f"{size:,}", *ratios])
    head = ["shape", "prompt", *(f"{drafting}, {vocab}" for drafting, vocab in kinds)]
    return markdown_table(head, lines) if lines else []


def _upstream(found: Sequence[Row]) -> list[str]:
    theirs, ours = _of(found, "upstream"), _of(found, "decode")
    lines = []
    for shape, size in _groups(theirs):
        here = [r for r in theirs if (r["shape"], r["n_prompt"]) == (shape, size)]
        best = max(here, key=lambda r: float(r["decode_tps"]))
        own = [
            r
            for r in ours
            if (r["shape"], r["n_prompt"], r["acceptance"]) == (shape, size, best["acceptance"])
        ]
        mine = max((r["decode_tps"] for r in own), default=None)
        words = [shape, f"{size:,}", f"{best['decode_tps']:.1f} (depth {best['depth']})"]
        ratio = mine / best["decode_tps"] if mine else 0.0
        verdict = ("ahead" if ratio > 1 else "behind") if mine else "-"
        lines.append(
            [*words, f"{mine:.1f}" if mine else "-", f"{ratio:.2f}" if mine else "-", verdict]
        )
    head = ["shape", "prompt", "llama-server, best", "ours, best", "ratio", ""]
    return markdown_table(head, lines) if lines else []


def write(config: Config, publish: bool) -> list[Path]:
    """Print the table and write it in the work folder, and with `publish` below bench/results.

    Raises:
        RunbookError: nothing was measured, or it may not be published.
    """
    found = rows(config)
    if not found:
        raise RunbookError(f"nothing has been measured in {config.work.folder} yet")
    head = header(config, found)
    if config.dry_run:
        found = [{"dry_run": True, **row} for row in found]
    page = render(head, found)
    if publish:
        check_publishable(head, found)
    name = slug(head)
    paths = []
    for folder in (config.work.folder, *([RESULTS] if publish else [])):
        text = "".join(json.dumps(row) + "\n" for row in [head, *found])
        for suffix, content in ((".jsonl", text), (".md", page)):
            path = folder / f"{name}{suffix}"
            path.write_text(content)
            paths.append(path)
    print(page)
    print(f"runbook: wrote {', '.join(path.name for path in paths)}", file=sys.stderr)
    return paths


def slug(head: dict[str, Any]) -> str:
    """Of the file: gpu-nvidia-h100-80gb-hbm3; of a dry run: dry-run."""
    if head["dry_run"] or not head["gpu"]:
        return "dry-run" if head["dry_run"] else "gpu-unknown"
    return "gpu-" + re.sub(r"[^a-z0-9]+", "-", head["gpu"]["name"].lower()).strip("-")


def check_publishable(head: dict[str, Any], found: Sequence[Row]) -> None:
    """Refuse what was not measured on a GPU.

    Raises:
        RunbookError: says why.
    """
    why = ""
    if head["dry_run"] or any(row.get("dry_run") for row in found):
        why = "these are the figures of a dry run, which mean nothing"
    elif not head["gpu"]:
        why = "no GPU was found when they were measured"
    elif odd := sorted({r["backend"] for r in found if "CUDA" not in r.get("backend", "CUDA")}):
        why = f"some were measured on {', '.join(odd)}"
    elif not any("backend" in row for row in found):
        why = "no matrix was measured, so nothing says which backend they ran on"
    if why:
        raise RunbookError(f"not published below bench/results: {why}")
