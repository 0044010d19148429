"""Speeds that others have published, as reference curves.

The columns of ``published.csv``, beside this file, are `source`, `model`, `hardware`, `n_prompt` in
tokens, `mode` ("no-mtp" or "draft-mtp-N"), `prefill_tps` and `decode_tps` in tokens per second, and
`elapsed_s` in seconds.
"""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass
from pathlib import Path

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.cells import DRAFT_MTP, NO_MTP

COLUMNS = ("source", "model", "hardware", "n_prompt", "mode", "prefill_tps", "decode_tps")


@dataclass(frozen=True)
class Published:
    """One published figure: `n_max` drafts per round (0: no MTP), speeds in tokens per second."""

    source: str
    model: str
    hardware: str
    n_prompt: int
    n_max: int
    prefill_tps: float
    decode_tps: float


def read_published(path: str | os.PathLike[str] | None = None) -> list[Published]:
    """Read the figures of a file; None: of the file that the package ships.

    Raises:
        UsageError: the file cannot be read, lacks a column, or has a line that is no figure.
    """
    path = Path(__file__).with_name("published.csv") if path is None else Path(path)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise UsageError(f"{path}: not published figures, no column {', '.join(missing)}")
            return [_figure(path, reader.line_num, line) for line in reader]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"cannot read {path}: {reason}") from None


def _figure(path: Path, number: int, line: dict[str, str]) -> Published:
    try:
        mode = line["mode"]
        n_max = 0 if mode == NO_MTP else int(mode.removeprefix(f"{DRAFT_MTP}-"))
        figure = Published(
            *(line["source"], line["model"], line["hardware"], int(line["n_prompt"]), n_max),
            *(float(line["prefill_tps"]), float(line["decode_tps"])),
        )
        if figure.n_prompt < 1 or min(figure.prefill_tps, figure.decode_tps) <= 0:
            raise ValueError
    except (TypeError, ValueError):
        raise UsageError(
            f"{path}, line {number}: not a published figure; mode is {NO_MTP} or {DRAFT_MTP}-N, "
            "prompt size and speeds are above 0"
        ) from None
    return figure
