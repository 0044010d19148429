"""What bench/publish.py prints of a section: machine, command, speeds and the main ratios."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from benchkit.results import project_commit
from pyllama_mtp import bench
from pyllama_mtp.measure.figures import OURS, Cell, Figure, machine_words, ratio_to
from pyllama_mtp.measure.intervals import Ratio
from pyllama_mtp.measure.records import read_file
from pyllama_mtp.measure.table import above
from pyllama_mtp.measure.text import size_name, speed_words, to_markdown


def best_of(cells: Sequence[Cell]) -> Cell | None:
    """The fastest decoding."""
    measured = [cell for cell in cells if cell.samples]
    return max(measured, key=lambda cell: cell.decode_tps or 0.0, default=None)


def compared(cells: Sequence[Cell]) -> Iterator[tuple[str, Cell | None, Cell | None, Figure]]:
    """What is compared with what among cells of one model, prompt and number of sequences."""
    ours, server, llama_bench = (
        [cell for cell in cells if cell.program == name]
        for name in (OURS, "llama-server", "llama-bench")
    )
    again = [cell for cell in ours if cell.variant != ours[0].variant]
    ours = [cell for cell in ours if cell.variant == ours[0].variant]
    plain = best_of([cell for cell in ours if not cell.n_max])
    same = best_of([cell for cell in again if not cell.n_max])
    fixed = best_of([cell for cell in ours if cell.n_max and not cell.adaptive])
    best = best_of([cell for cell in ours if not cell.adaptive])
    auto = best_of([cell for cell in ours if cell.adaptive])
    alike = best_of([cell for cell in server if not cell.n_max])
    yield "auto to no MTP", auto, plain, "decode_tps"
    yield "best depth to no MTP", fixed, plain, "decode_tps"
    yield "auto to the best depth", auto, best, "decode_tps"
    yield "best depth to llama-server's best", fixed, best_of(server), "decode_tps"
    yield "no MTP to llama-bench", plain, best_of(llama_bench), "decode_tps"
    yield "prompt with MTP to without", fixed, plain, "prefill_tps"
    if not any(cell.image for cell in ours):
        yield "prompt to llama-server's", plain, alike, "prefill_tps"
    yield "prompt to llama-bench's", plain, best_of(llama_bench), "prefill_tps"
    yield "prompt, the same library again", same, plain, "prefill_tps"
    if any(cell.image for cell in ours):
        yield "encoding and prompt to llama-server's", plain, alike, "prompt_tps"


def words(ratio: Ratio, chosen: str) -> str:
    """ "1.71 (1.67-1.73, depth 3)"; a single pair has no interval."""
    known = ratio.low is not None and ratio.high is not None
    about = [f"{ratio.low:.2f}-{ratio.high:.2f}"] if known else []
    return f"{ratio.value:.2f} ({', '.join([*about, *[chosen] * bool(chosen)]) or 'one pair'})"


def ratio_table(cells: Sequence[Cell]) -> str:
    """Speeds and ratios of each group of cells, with their intervals, as Markdown."""

    def group(cell: Cell) -> tuple[str, str, str, str]:
        size = size_name(cell.n_prompt, cell.n_context)
        return cell.model, cell.prompt_class, size, cell.axis("n_sequences")

    order = list(dict.fromkeys(map(group, cells)))
    rows = []
    for key, members in groupby(sorted(cells, key=lambda c: order.index(group(c))), group):
        model, kind, size, sequences = key
        row = {"file": model.removesuffix(".gguf"), "prompt": f"{size} {kind}"}
        row |= {"sequences": sequences} if sequences else {}
        pairs = [*compared([*members])]
        _, auto, plain, _ = pairs[0]
        row |= {
            f"{name}, tok/s": speed_words(cell.decode_tps or 0.0)
            for name, cell in (("no MTP", plain), ("auto", auto))
            if cell
        }
        for name, new, old, figure in pairs:
            ratio = ratio_to(new, old, figure) if new and old and new is not old else None
            if ratio and new:
                row[name] = words(ratio, f"depth {new.n_max}" if name.startswith("best") else "")
        rows.append(row)
    heads = list(dict.fromkeys(head for row in rows for head in row))
    table = [[row.get(head, "-") for head in heads] for row in rows]
    return to_markdown(heads, table, [head in ("file", "prompt") for head in heads])


def part(title: str, records: Path) -> str:
    """A section's part of a page: where its samples are from, then the tables."""
    runs = [run.header for run in read_file(records).runs.values()]
    cells = bench.read(records).cells
    sampled = [cell for cell in cells if cell.samples]
    numbers = sorted({len(cell.samples) for cell in sampled})
    machines = dict.fromkeys(
        f"- Machine: {machine_words(cell)}, {cell.machine['os']}; {cell.time[:10]}"
        for cell in sampled
    )
    about = [
        f"- Samples: {records.name}, {' to '.join(map(str, numbers[:: len(numbers) - 1 or 1]))} "
        f"of each cell; commit {project_commit()}",
        *machines,
        f"- Command: `{shlex.join(runs[0].command)}`; the same for every file",
    ]
    return "\n\n".join([f"## {title}", "\n".join(about), *above(cells), ratio_table(sampled)])
