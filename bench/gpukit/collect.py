"""What was measured in a work folder, as rows: one dictionary for each figure, ready for JSON.

Every row has `kind`, `shape` and `n_prompt`; speeds are tokens per second, medians of `samples`.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchkit.paths import ensure_driver
from benchkit.statistics import expected_tokens_per_round

from gpukit.config import Config

Row = dict[str, Any]


def rows(config: Config) -> list[Row]:
    """Everything that the steps have left so far."""
    if config.site.is_dir() and str(config.site) not in sys.path:
        sys.path.insert(0, str(config.site))
    ensure_driver()
    folder = config.work.folder
    found = [*tests(folder / "junit")]
    for kind in ("matrix", "drafting", "handoff"):
        for path in sorted((folder / kind).glob("*.jsonl")):
            found += cells(kind, path)
    for path in sorted((folder / "prefill").glob("*.json")):
        found += pairs(path)
    for path in sorted((folder / "decode").glob("*.json")):
        found += decoded(path)
    for path in sorted((folder / "peers" / "results").glob("*.json")):
        found.append(served(path))
    return found


def shape_of(model: str) -> str:
    """The shape in the name of a model file."""
    return Path(model).stem.removeprefix("synth-").rpartition("-")[0]


def tests(folder: Path) -> Iterator[Row]:
    """Results of the regression suite by file, with the names of what failed."""
    for path in sorted(folder.glob("*.xml")):
        suite = next(ElementTree.parse(path).getroot().iter("testsuite"))
        counts = {
            name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")
        }
        bad = [
            case.get("name")
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ]
        yield {"kind": "tests", "file": path.stem, **counts, "failed": bad}


def cells(kind: str, path: Path) -> Iterator[Row]:
    """The cells of the last run in a file of `pyllama-mtp matrix`."""
    from pyllama_mtp.measure.recordfile import read_file

    runs = [*read_file(path).runs.values()]
    for cell in runs[-1].cells.values() if runs else ():
        if not cell.samples:
            continue
        cell.summarize()
        yield {
            "kind": kind,
            "shape": shape_of(cell.model),
            "model": cell.model,
            "backend": cell.backend,
            "upstream_commit": cell.upstream_commit,
            "series": cell.series,
            "n_prompt": cell.n_prompt,
            "depth": cell.n_max,
            "drafting": cell.settings.get("drafting"),
            "draft_vocab": cell.settings.get("draft_vocab"),
            "handoff": cell.settings.get("handoff"),
            "hidden_to_host": max(s.hidden_bytes.get("to_host", 0) for s in cell.samples),
            "prefill_tps": cell.prefill_tps,
            "decode_tps": cell.decode_tps,
            "tokens_per_round": cell.tokens_per_round,
            "synthetic_acceptance": cell.synthetic_acceptance,
            "samples": [[s.prefill_tps, s.decode_tps] for s in cell.samples],
            "date": cell.time[:10],
        }


def pairs(path: Path) -> Iterator[Row]:
    """Prefill with MTP against prefill without (bench/prefill_pairs.py)."""
    result = json.loads(path.read_text())
    for size, found in result["sizes"].items():
        yield {
            "kind": "prefill",
            "shape": shape_of(result["plan"]["model"]),
            "model": result["plan"]["model"],
            "n_prompt": int(size),
            "plain_tps": found["tokens_per_s"]["no MTP"],
            "mtp_tps": found["tokens_per_s"]["MTP"],
            "ratio": found["ratio"],
            "samples": found["ratios"],
            "date": result["date"],
            "command": result["command"],
        }


def decoded(path: Path) -> Iterator[Row]:
    """Decode side by side at imposed acceptance (bench/decode.py)."""
    result = json.loads(path.read_text())
    for acceptance, by_case in result["samples"].items():
        plain = [sample["decode_tps"] for sample in by_case["0"]]
        for case, samples in by_case.items():
            speeds = [sample["decode_tps"] for sample in samples]
            ratios = [speed / base for speed, base in zip(speeds, plain, strict=True)]
            yield {
                "kind": "decode",
                "shape": shape_of(result["plan"]["model"]),
                "model": result["plan"]["model"],
                "n_prompt": result["plan"]["n_prompt"],
                "acceptance": float(acceptance),
                "depth": case,
                "decode_tps": median(speeds),
                "ratio": median(ratios),
                "samples": speeds,
                "date": result["date"],
                "command": result["command"],
            }


def served(path: Path) -> Row:
    """Upstream's llama-server; its figure is that of exactly the imposed acceptance."""
    result = json.loads(path.read_text())
    plan, samples = result["plan"], result["samples"]
    expected = expected_tokens_per_round(plan["rates"])
    return {
        "kind": "upstream",
        "shape": shape_of(plan["model"]),
        "model": plan["model"],
        "n_prompt": plan["n_prompt"],
        "acceptance": round(plan["rates"][0], 6),
        "depth": plan["depth"],
        "decode_tps": median(s["rounds_per_second"] * expected for s in samples),
        "prefill_tps": median(s["prefill_tps"] for s in samples),
        "samples": [s["decode_tps"] for s in samples],
    }
