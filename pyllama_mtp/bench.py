"""Measurements from Python: run a matrix, read its files, compare, plot, report.

    from pyllama_mtp import bench

    results = bench.read("matrix.jsonl")
    results.frame()  # a pandas data frame
    results.plot("decode")
    results.report("report")
    bench.compare("before.jsonl", "after.jsonl").slower

Plots need matplotlib (``pip install 'pyllama-mtp[report]'``), data frames need pandas.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.compare import THRESHOLD, Change, Comparison, of_variants
from pyllama_mtp.measure.compare import compare as compare_cells
from pyllama_mtp.measure.figures import FIELDS, Cell, sections
from pyllama_mtp.measure.plan import MAX_TOKENS, REPEAT
from pyllama_mtp.measure.records import Records, read_file
from pyllama_mtp.measure.text import counted

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

    from pyllama_mtp.images import ImageSource
    from pyllama_mtp.llama.model import Model
    from pyllama_mtp.measure.run import MatrixEvent
    from pyllama_mtp.settings import Sampling, Settings

__all__ = [
    "Change",
    "Comparison",
    "Results",
    "compare",
    "matrix",
    "read",
]

PathLike = str | os.PathLike[str]
log = logging.getLogger("pyllama_mtp")


@dataclass(frozen=True)
class Results:
    """Cells of speed matrices, as tables, plots, reports and comparisons.

    Attributes:
        cells: as measured, with every sample; see :class:`.figures.Cell` for fields and units.
        commands: the commands that measured the cells, by their `run`, as far as recorded.
    """

    cells: list[Cell] = field(default_factory=list)
    commands: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of cells."""
        return len(self.cells)

    def __iter__(self) -> Iterator[Cell]:
        """The cells."""
        return iter(self.cells)

    def __repr__(self) -> str:
        """One line: the number of cells and their models."""
        models = ", ".join(dict.fromkeys(cell.model for cell in self.cells))
        return f"<Results: {counted(len(self), 'cell')} of {models or 'no model'}>"

    def __str__(self) -> str:
        """The table that ``pyllama-mtp matrix`` prints, as wide as the terminal."""
        from pyllama_mtp.measure.table import print_matrix

        terminal = sys.stdout is not None and sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if terminal else None
        file = io.StringIO()
        print_matrix(self.cells, file, width, plain=True, complete="records()")
        return "\n".join(map(str.rstrip, file.getvalue().split("\n"))).strip("\n")

    def _repr_markdown_(self) -> str:
        """The tables, for a notebook."""
        return self.markdown() or "no cells"

    def select(self, **fields: Any) -> Results:
        """The cells whose attributes have these values: ``select(n_max=3, variant="patched")``.

        Ratios to no MTP need the cells without MTP as well, so select them, too.

        Raises:
            UsageError: cells have no such attribute.
        """
        for name in fields:
            if name not in FIELDS:
                raise UsageError(f"cells have no {name!r}; they have: {', '.join(FIELDS)}")
        wanted = fields.items()
        chosen = [c for c in self.cells if all(getattr(c, name) == value for name, value in wanted)]
        return Results(chosen, self.commands)

    def records(self) -> list[dict[str, Any]]:
        """One flat dict per cell, all with the same keys. None: not measured.

        `prefill_tps` and `decode_tps` are medians in tokens per second, with `_low` and `_high` of
        the samples; `prefill_ratio` and `decode_ratio` are estimates from the paired ratios to no
        MTP, with the bounds of their interval; `elapsed_s` is in seconds; `acceptance_1`, ... are
        accepted / drafted per position; `synthetic` says that the acceptance was imposed.
        """
        from pyllama_mtp.measure.table import records

        return records(self.cells)

    def frame(self) -> pandas.DataFrame:
        """:meth:`records` as a data frame, one row per cell.

        Raises:
            UsageError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise UsageError(
                "a data frame needs pandas, which is not installed: pip install pandas; "
                "records() needs nothing"
            ) from None
        frame: pandas.DataFrame = pandas.DataFrame(self.records())
        return frame

    def plot(self, kind: str, ax: Axes | None = None) -> Axes:
        """Draw one plot and return its axes.

        Args:
            kind: "prefill", "decode" (tokens per second against prompt size), "prefill-ratio",
                "decode-ratio" (to no MTP), "acceptance" (against draft position), or "models".
            ax: matplotlib axes to draw into; None makes a figure with pyplot.

        Raises:
            UsageError: no such plot, nothing to show in it, or matplotlib is not installed.
        """
        from pyllama_mtp.measure import page

        page.require_matplotlib()
        if ax is not None:
            page.draw(ax, self.cells, kind)
            return ax
        from matplotlib import pyplot

        with page.theme():
            figure, ax = pyplot.subplots()
            try:
                page.draw(ax, self.cells, kind)
            except UsageError:
                pyplot.close(figure)
                raise
        return ax

    def report(self, directory: PathLike) -> Path:
        """Write a page with all plots and tables, as ``pyllama-mtp report`` does.

        Returns:
            its ``index.html``.

        Raises:
            UsageError: no cells, matplotlib is not installed, or the folder cannot be written.
        """
        from pyllama_mtp.measure.page import write_report

        return write_report(self.cells, directory, commands=self.commands)[0]

    def markdown(self) -> str:
        """The tables of the report in Markdown, one section per model, machine and prompt class."""
        from pyllama_mtp.measure.page import Section

        parts = sections(self.cells)
        return "\n\n".join(Section(part, self.commands).markdown() for part in parts)

    def compare_variants(self, old: str, new: str, **options: Any) -> Comparison:
        """Compare two library variants measured in one run; options as of :func:`compare`.

        Raises:
            UsageError: a variant has no cells, or as of :func:`compare`.
        """
        return compare_cells(*of_variants(self.cells, old, new), **options)


def read(*paths: PathLike) -> Results:
    """The cells of one or more files that ``pyllama-mtp matrix`` wrote.

    Raises:
        UsageError: no file given, a file cannot be read, or a line is not a cell.
    """
    if not paths:
        raise UsageError("give at least one file of cells")
    results = Results()
    for path in paths:
        file = read_file(path)
        results.cells.extend(file.cells)
        results.commands.update(file.commands)
    return results


def compare(
    old: Results | PathLike,
    new: Results | PathLike,
    *,
    threshold: float = THRESHOLD,
) -> Comparison:
    """Compare `old` and `new` cell by cell.

    Args:
        old, new: results, or files of them.
        threshold: part of the speed, at least 0 and below 1; 0.03 is 3 %.

    Raises:
        UsageError: no cell is on both sides, no cell has two samples, or a bad argument.
    """
    sides = (side if isinstance(side, Results) else read(side) for side in (old, new))
    before, after = (side.cells for side in sides)
    return compare_cells(before, after, threshold=threshold)


def matrix(
    model: Model | PathLike | None = None,
    *,
    sizes: Sequence[int] | int | None = None,
    depths: Sequence[int | str] | int | str | None = None,
    max_tokens: int = MAX_TOKENS,
    repeat: int = REPEAT,
    settings: Settings | None = None,
    sampling: Sampling | None = None,
    text: str | None = None,
    classes: Sequence[str] | str | None = None,
    image: ImageSource | None = None,
    mmproj: PathLike | None = None,
    budget_s: float | None = None,
    n_gpu_layers: int = -1,
    output: PathLike | None = None,
    on_event: Callable[[MatrixEvent], None] = lambda event: None,
    **axes: Any,
) -> Results:
    """Measure a speed matrix in this process, as ``pyllama-mtp matrix`` does.

    Args:
        model: an open model, or a .gguf file, which is loaded and closed again. None: the demo
            model that comes with the package.
        sizes: prompt sizes in tokens. None: 512, 1024 and 2048; 512 after filled contexts.
        depths: drafts per round; 0 is no MTP, with which the others are compared; "auto" is as many
            as pay, and every sample learns acceptance anew. None: 0, 2, 3 and "auto"; 0 and "auto",
            with drafts from the text, for a model without an MTP head.
        max_tokens: tokens generated per sample.
        repeat: samples per cell.
        settings: of every cell; `depths` and `axes` replace its fields. Without `n_threads`,
            there is one thread less for every core that other programs keep busy; the logger
            "pyllama_mtp" says so.
        sampling: of every cell; None is greedy.
        text: to cut prompts from; None takes that of Python's standard library.
        classes: kinds of prompts: "text" and "source" are continued; "factual", "thinking", "code"
            and "instruction" are questions in a chat, with text before them to reach the size;
            "image": text after `image`. None: "text", "source" after filled contexts, or "image"
            if there is one.
        image: what prompts of the class "image" begin with, as :func:`.pixels_of` takes it; its
            tokens are among their size. It is encoded anew for each sample.
        mmproj: the model's image encoder; None: the mmproj*.gguf beside the model.
        budget_s: seconds after which no further repeat begins, above 0. None: no limit.
        n_gpu_layers: layers on the GPU, -1 is all; of an open model, as it was opened.
        output: a file to which every finished sample is appended.
        on_event: called at every step; must not raise.
        axes: values of fields of :class:`Settings` to measure with, by name:
            ``cache_type_k=("f16", "q8_0")``; `n_sequences`, generated at once; and `n_context`,
            tokens in the context before the prompt, filled once per repeat. Fields that matter
            only to drafts (`prompt_rows`, `prompt_sync`, `hidden`, `draft_vocab`, ...) vary at
            depths above 0. `synthetic_acceptance` takes the rates of each position:
            ``((0.8, 0.6), (0.5, 0.3))``.

    A single size, depth, class or value of an axis needs no sequence around it.

    Returns:
        the finished cells; after Ctrl-C those that have samples, and KeyboardInterrupt is raised
        if there are none.

    Raises:
        UsageError: an unknown argument or a value out of range, a plan that measures nothing or a
            cell twice, or settings that this library or model cannot do.
    """
    from pyllama_mtp.llama import native
    from pyllama_mtp.llama.model import Model
    from pyllama_mtp.measure.prompts import Picture
    from pyllama_mtp.measure.request import MatrixRequest
    from pyllama_mtp.measure.run import run_matrix
    from pyllama_mtp.models.demo import demo_path
    from pyllama_mtp.settings import Sampling, Settings

    request = MatrixRequest(
        sizes=sizes,
        depths=depths,
        max_tokens=max_tokens,
        repeat=repeat,
        classes=classes,
        axes=axes,
        settings=Settings() if settings is None else settings,
        sampling=Sampling() if sampling is None else sampling,
        command=["pyllama_mtp.bench.matrix"],
        placement={"n_gpu_layers": n_gpu_layers},
        text=text,
        picture=None if image is None else Picture.read(image, mmproj),
        budget_s=budget_s,
        output=output,
    )
    native.load()
    records = Records()
    with ExitStack() as stack:
        if model is None or isinstance(model, str | os.PathLike):
            path = model or demo_path()
            model = stack.enter_context(Model(path, n_gpu_layers=n_gpu_layers, mtp=request.mtp))
        run = run_matrix(model, request, records, lambda _: nullcontext(on_event), log.warning)
    if run.interrupted and not records.cells:
        raise KeyboardInterrupt
    return Results(records.cells, records.commands)
