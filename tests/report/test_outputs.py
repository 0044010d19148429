"""What users read of measurements, word for word: each output has a file in tests/data/outputs.

After a change on purpose, ``OUTPUTS=write python -m pytest tests/report/test_outputs.py`` writes
the files; `git diff` shows what a user will see.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp import bench
from pyllama_mtp.drafting.depth import Costs
from pyllama_mtp.measure import page
from pyllama_mtp.measure.compare import compare, markdown, print_comparison
from pyllama_mtp.measure.figures import Cell
from pyllama_mtp.measure.intervals import Ratio
from pyllama_mtp.measure.plan import ImageFile
from pyllama_mtp.measure.table import (
    llama_bench,
    markdown_table,
    print_matrix,
    records,
    to_csv,
    waiting_note,
)
from pyllama_mtp.measure.text import telemetry_lines
from pyllama_mtp.measure.verdict import slow_verdict, summary
from pyllama_mtp.measure.worth import acceptance_markdown, tune_markdown
from pyllama_mtp.telemetry import NearTie, Telemetry

from .conftest import MEASURED, make_cell, make_matrix

FILES = MEASURED.parent / "outputs"
SLOW = {"Q4_K": 0.6, "Q6_K": 0.27}


def busy(*cells: Cell) -> list[Cell]:
    """The cells, as if other programs had taken a quarter of two threads' time."""
    for sample in (sample for cell in cells for sample in cell.samples):
        sample.waited_s = {"decode": sample.elapsed_s / 2}
    return [*cells]


def everything() -> list[Cell]:
    """Cells of all sorts beside each other, on a busy machine."""
    auto = make_cell(6, adaptive=True, decode=(50, 70, 62))
    for sample in auto.samples:
        sample.looked_up = {"rounds": 10, "drafted": 30, "accepted": 12}
        sample.time_s = {"draft": 0.25}
        sample.drafted[-1], sample.accepted[-1] = 5, 4  # too few for a rate
    image = ImageFile("photo.jpg", "ab", 640, 480, 77, "mmproj.gguf", "cd")
    pictures = [make_cell(n, prompt_class="image", image=image) for n in (0, 3)]
    for sample in (sample for cell in pictures for sample in cell.samples):
        sample.encode_s, sample.time_s = 0.25, {"image": 0.125}
    server = {"program": "llama-server", "variant": "release", "series": ""}
    cells = [make_cell(0), make_cell(3, decode=(60, 63, 56)), auto, *pictures]
    cells += [make_cell(3, 2048, prefill=(), decode=(), skipped="needs 99 GiB")]
    other = {"prompt_sync": "full", "prompt_rows": "all"}
    cells += [make_cell(3, axes=other, synthetic_acceptance=[0.8, 0.7, 0.6])]
    for sample in cells[-1].samples:
        sample.prompt_sync = "full"
    cells += [make_cell(n, **server, decode=(30, 31, 33)) for n in (0, 3)]
    cells += [make_cell(0, **{**server, "program": "llama-bench"})]
    return busy(*cells)


def asked(*rates: tuple[float, ...], pass_s: float = 0.2, n: int = 3) -> list[Cell]:
    """Questions, of a class for each of these acceptances of a first and a second draft. A round of
    40 with two drafts takes 1.5 s and twice `pass_s`."""
    cells = []
    for kind, own in zip(("code", "factual"), rates, strict=False):
        for depth in (0, 2):
            cell = make_cell(depth, 0, [9.0] * n, [40.0] * n, prompt_class=kind)
            for number, sample in enumerate(cell.samples):
                sample.rounds, sample.time_s = 40, {"draft": 0.05 * depth}
                sample.decode_s = 1.5 + pass_s * depth
                sample.drafted = [40, 40][:depth]
                sample.accepted = [round(40 * rate) + number for rate in own][:depth]
                sample.decode_tps = (40 + sum(sample.accepted) if depth else 63) / sample.decode_s
            cells.append(cell)
    return cells


def pasted() -> list[Cell]:
    """Everything, and what published rates gave after a context; older files know no parameters."""
    loaded = {"description": "qwen35 0.8B Q4_K - Medium", "bytes": 536e6, "n_params": 772e6}
    golden = {"synthetic_acceptance": [0.93, 0.8, 0.66], "axes": {"n_context": 4096}}
    large = {"description": "qwen35 27B IQ4_NL", "bytes": 15.5 * 2**30, "n_params": 27.4e9}
    cells = [*everything(), make_cell(3, **golden), make_cell(0, model="n.gguf", backend="CUDA")]
    for cell in cells[1:]:
        cell.loaded = large if cell.backend == "CUDA" else loaded
    return cells


def differing() -> list[Cell]:
    """Seven questions; of four, hardly a draft is accepted."""
    cells = asked((0.9, 0.8), n=7)
    for sample in cells[-1].samples[3:]:
        sample.accepted, sample.decode_tps = [8, 2], 50 / sample.decode_s
    return cells


def accepted() -> str:
    few = asked((0.9, 0.8), n=1)
    few[-1].samples[0].n_generated = 9
    cases = {
        "two classes": asked((0.9, 0.8), (0.5, 0.2)),
        "costs that contradict each other": asked((0.9, 0.8), pass_s=-0.7),
        "no depth pays": asked((0.5, 0.5), pass_s=0.9),
        "prompts that differ": differing(),
        "one sample": asked((0.9, 0.8), n=1),
        "few tokens": few,
        "a broken head": asked((0.2, 0.1)),
        "no drafts": [make_cell(0)],
    }
    return "\n\n".join(f"# {name}\n\n{acceptance_markdown(own)}" for name, own in cases.items())


def headless() -> list[Cell]:
    """A model without an MTP head."""
    drafting = make_cell(6, adaptive=True, decode=(60, 63, 56))
    for sample in drafting.samples:
        sample.prompt_sync, sample.drafted, sample.accepted = "", [], []
        sample.looked_up = {"rounds": 10, "drafted": 30, "accepted": 12}
    return [make_cell(0), drafting]


#: Repeats of no MTP.
FEW, MANY = (40.0, 42.0, 38.0), (40.0, 42.0, 38.0, 41.0, 39.0, 40.0, 40.0)


def gain(*factors: float, plain: tuple[float, ...] = MANY, **changes: Any) -> list[Cell]:
    """No MTP, and depth 3 that is so many times as fast in each repeat, the last one of them in
    all later ones."""
    more = [*factors, *factors[-1:] * len(plain)]
    decode = [speed * factor for speed, factor in zip(plain, more, strict=False)]
    prefill = [200.0 + number for number in range(len(plain))]
    given = {**changes, "decode": decode}
    return [
        make_cell(0, decode=plain, prefill=prefill, max_tokens=given.get("max_tokens", 64)),
        make_cell(3, **{"prefill": [0.95 * speed for speed in prefill], **given}),
    ]


SUMMARIES: dict[str, list[Cell]] = {
    "a gain": gain(1.8, 1.9, 2.0, 1.9),
    "two sizes": [*gain(1.8, 1.9, 2.0, 1.9), make_cell(0, 9, FEW, FEW), make_cell(3, 9, FEW, FEW)],
    "auto is slower than the best": [
        *gain(1.8, 1.9, 2.0, 1.9),
        make_cell(6, adaptive=True, prefill=[200.0] * 7, decode=[50, 57, 51, 56, 50, 52, 53]),
    ],
    "imposed": gain(1.8, 1.9, 2.0, 1.9, synthetic_acceptance=[0.8, 0.7, 0.6]),
    "slower, by the types": gain(0.7, 0.71, 0.69, slow_types=SLOW),
    "as fast": gain(1.01, 0.99, 1.0, 1.02, 0.98),
    "few repeats": gain(0.9, 1.03, 1.2, plain=FEW),
    "few repeats on a busy machine": busy(*gain(0.9, 1.03, 1.2, plain=FEW)),
    "much scatter": gain(0.5, 2.0, 1.0, 3.0, 0.7),
    "two repeats": gain(1.8, 2.0, plain=FEW[:2]),
    "one repeat": gain(1.8, plain=FEW[:1]),
    "a prefill that cannot be told": gain(
        1.8, 1.9, 2.0, 1.9, prefill=[190, 250, 180, 240, 190, 230, 200]
    ),
    "nothing can be told": gain(
        0.5, 2.0, 1.0, 3.0, 0.7, prefill=[190, 250, 180, 240, 190, 230, 200]
    ),
    "few tokens": gain(1.8, max_tokens=16),
    "nothing to compare": [make_cell(3)],
}


def statistics() -> str:
    """Figures of answers, as --stats prints them."""
    full = Telemetry(n_prompt=100, n_cached=40, n_image_tokens=20, n_generated=65)
    full.prefill_s, full.decode_s, full.rounds, full.forced = 0.5, 2.0, 30, 2
    full.drafted, full.accepted = [30, 20], [24, 8]
    full.looked_up = {"rounds": 4, "drafted": 9, "accepted": 5}
    full.draft_vocab = {"tokens": 60, "outside": 3, "replaced": 128, "seconds": 0.01}
    full.n_threads, full.waited_s, full.why_fewer_drafts = 2, 1.0, "2 sequences: drafts do not pay"
    full.near_ties = [NearTie(n, 65, 66, 0.0625, " a", " the") for n in range(8)]
    cut = Telemetry(n_prompt=100, n_left=60, prefill_s=0.25)
    plain = Telemetry(n_prompt=9, n_generated=9, prefill_s=0.1, decode_s=0.2)
    plain.near_ties = full.near_ties
    answers = {
        "everything": telemetry_lines(full, Ratio(1.9, 1.7, 2.12, 4)),
        "a speed-up that noise can be": telemetry_lines(plain, Ratio(1.95, 0.44, 8.62, 4)),
        "a speed-up of wide bounds": telemetry_lines(plain, Ratio(3.0, 1.1, 8.0, 4)),
        "interrupted": telemetry_lines(cut),
    }
    return "\n\n".join("\n".join([f"# {name}", *lines]) for name, lines in answers.items())


def printed(cells: list[Cell], width: int | None) -> str:
    file = io.StringIO()
    print_matrix(cells, file, width)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def compared(show: Callable[..., Any]) -> str:
    """Two builds, the newer of which decodes 8 % slower at depth 3, with a cell of its own."""
    old, new = (make_matrix(2 + n, repeat=7, sizes=(512, 2048), depths=(0, 3)) for n in (0, 1))
    for sample in (sample for cell in new if cell.n_max for sample in cell.samples):
        sample.decode_tps *= 0.92
    new = busy(*new, make_cell(4))
    for cell in new:
        cell.series = "0badcafe00"
    found = compare(old, new)
    if show is markdown:
        return markdown(found, ("old.jsonl", "new.jsonl"))
    file = io.StringIO()
    print_comparison(found, ("old.jsonl", "new.jsonl"), file)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def tuned() -> str:
    cheap, dear = Costs((0, 1, 1.1, 1.2), (0, 0.05, 0.1)), Costs((0, 1, 2.5), (0, 0.5))
    impossible, much = Costs((0, 1, 0.7), (0, 0.1)), Costs((0, 1, 1.7), (0, 0.2))
    return "\n\n".join(
        [
            *map(tune_markdown, (cheap, dear, much, impossible)),
            tune_markdown(dear, SLOW),
            slow_verdict(SLOW),
        ]
    )


def page_of(folder: Path) -> str:
    cells = [*everything(), make_cell(0, model="n.gguf"), make_cell(3, model="n.gguf")]
    page.write_report(cells, folder, command="pyllama-mtp report", commands={"": "typed"})
    text = (folder / "index.html").read_text(encoding="utf-8").partition("<body>")[2]
    return re.sub(r"Made on .* by pyllama-mtp [^ :]*", "Made on DATE by pyllama-mtp", text)


OUTPUTS: dict[str, Callable[[], str]] = {
    "measured.md": lambda: bench.read(MEASURED).markdown(),
    "measured.txt": lambda: printed(bench.read(MEASURED).cells, 80),
    "everything.md": lambda: markdown_table(everything(), per_round=True),
    "everything.txt": lambda: printed(everything(), None),
    "llama-bench.md": lambda: llama_bench(pasted()),
    "everything.csv": lambda: to_csv(records(everything())),
    "headless.md": lambda: markdown_table(headless()),
    "contexts.md": lambda: markdown_table(
        [make_cell(n, axes={"n_context": at}) for at in (16384, 1024) for n in (0, 3)]
    ),
    "one-sample.md": lambda: markdown_table(make_matrix(1, repeat=1, sizes=(512,))),
    "summaries.txt": lambda: "\n\n".join(
        f"# {name}\n{summary(cells)}" for name, cells in SUMMARIES.items()
    ),
    "stats.txt": statistics,
    "compare.md": lambda: compared(markdown),
    "compare.txt": lambda: compared(print_comparison),
    "accept.md": accepted,
    "tune.md": tuned,
}


def check(name: str, text: str) -> None:
    if os.environ.get("OUTPUTS") == "write":
        (FILES / name).write_text(f"{text}\n", encoding="utf-8")
    assert f"{text}\n" == (FILES / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", OUTPUTS)
def test_output(name: str) -> None:
    check(name, OUTPUTS[name]())


def test_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for its pictures."""
    monkeypatch.setattr(page, "picture", lambda cells, kind: b"<svg/>")
    check("page.html", page_of(tmp_path))


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_headline_says_no_more_than_its_interval(name: str) -> None:
    """It names a factor only beside its interval, and a gain only if the interval has none but
    gains."""
    said, bounds = summary(SUMMARIES[name]), r"([\d.]+) to ([\d.]+)"
    for value, low, high in re.findall(rf"(?<!to )([\d.]+) times as fast, {bounds}", said):
        assert float(low) <= float(value) <= float(high) and not float(low) <= 1 <= float(high)
    for low, high, rest in re.findall(rf"(?:decode|Prefill) is {bounds} times as fast(.*)", said):
        assert float(low) <= 1 <= float(high) and "cannot be told" in rest


def test_threads_never_wait_longer_than_there_was_time() -> None:
    """Those that do not compute wait, too."""
    cell = make_cell(3)
    for sample in cell.samples:
        sample.waited_s = {"decode": 9 * sample.elapsed_s}
    (note,) = waiting_note([cell])
    assert "100 % of the time" in note
    answer = Telemetry(n_prompt=9, prefill_s=0.1, decode_s=0.9, waited_s=2.5, n_threads=1)
    assert "2.5 threads waited for a core on average" in "\n".join(telemetry_lines(answer))
