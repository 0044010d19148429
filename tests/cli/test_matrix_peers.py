"""matrix --peers: other programs beside ours in one run, one file and one table; with fakes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp.measure.figures import paired_ratios
from pyllama_mtp.measure.intervals import typical_ratio
from pyllama_mtp.measure.records import read_cells, read_file

from ..marks import usual
from ..processes import Cli, environment, start
from .conftest import SMALL as USUAL
from .conftest import Watched

SMALL = (*USUAL, "--prompt-sizes", "24", "--max-tokens", "9")
BOTH = ("--peers", "llama-server,llama-bench")

pytestmark = pytest.mark.usefixtures("watched")


def found() -> dict[tuple[str, int], Any]:
    return {(cell.program, cell.n_max): cell for cell in read_cells("matrix.jsonl")}


def test_side_by_side_in_one_file_and_table(peers: Any, cli: Cli, watched: Watched) -> None:
    """With the same prompts."""
    result = cli(*SMALL, *BOTH)
    assert result.code == 0, result.err
    cells = found()
    assert [*cells] == [
        *(("pyllama-mtp", 0), ("pyllama-mtp", 2)),
        *(("llama-server", 0), ("llama-server", 2), ("llama-bench", 0)),
    ]
    assert all(cell.repeats == [0, 1] and cell.skipped is None for cell in cells.values())
    server = cells["llama-server", 2]
    assert (server.prefill_tps, server.decode_tps, server.mean_acceptance_length) == (500, 70, 2)
    assert (server.mode, server.upstream_commit, server.variant) == (
        "draft-mtp",
        "0c1e570",
        "0.6.0-dev",
    )
    assert server.prompt_sync_share is None
    rows = {tuple(line.split()[1:4]): line.split() for line in result.out.splitlines()}
    assert rows["llama-server", "MTP", "2"][4:8] == ["500.0", "1.00x", "-", "70.0"]
    assert rows["llama-server", "MTP", "2"][8] == "1.40x", "to its own no-MTP"
    assert "program" in result.out and "library" not in result.out
    for note in ("random ones", "ours to llama-server", "llama-bench: 0.6.0-dev"):
        assert note in result.out, note
    assert "prompt 24, llama-server, depth 2, repeat 1: prefill 500" in result.err
    assert "samples in matrix.jsonl: 10" in result.err
    ours = [list(p) for p, options in watched.of("generate") if options["max_tokens"] == 9]
    sent = [one["prompt"] for one in peers.log("request") if one["n_predict"] == 9]
    assert sent == [ours[0], ours[0], ours[2], ours[2]] and ours[0] != ours[2]


def test_a_depth_is_compared_with_the_same_depth_not_with_adaptive(peers: Any, cli: Cli) -> None:
    result = cli(*SMALL, "--depths", "auto,6", "--peers", "llama-server")
    assert result.code == 0, result.err
    chosen, fixed, theirs = read_cells("matrix.jsonl")
    assert chosen.adaptive and chosen.n_max == fixed.n_max == theirs.n_max == 6
    ratio = typical_ratio(paired_ratios(fixed, theirs, "decode_tps")).value
    (note,) = [line for line in result.out.splitlines() if line.startswith("ours to llama-server")]
    assert note.endswith(f"{ratio:.2f}x")


def test_our_switches_are_not_theirs(peers: Any, cli: Cli) -> None:
    switches = ("--sync", "full,kv", "--draft-vocab", "full", "--synthetic-acceptance", "0.8,0.5")
    result = cli(*SMALL, "--repeat", "1", "--peers", "llama-server", *switches)
    assert result.code == 0
    cells = read_cells("matrix.jsonl")
    assert [c.program for c in cells if c.n_max] == ["pyllama-mtp"] * 2 + ["llama-server"]
    drafting = [line.split() for line in result.out.splitlines() if " MTP 2 " in line]
    found = [(row[1], *row[4:6]) for row in drafting[:3]]
    ours = [("pyllama-mtp", "SYNTHETIC", sync) for sync in ("full", "kv")]
    assert found == [*ours, ("llama-server", "SYNTHETIC", "-")]


def test_what_is_not_installed_is_reported_and_the_rest_measured(no_peers: None, cli: Cli) -> None:
    result = cli(*SMALL, *BOTH)
    assert result.code == 0
    for name in ("llama-server", "llama-bench"):
        text = f"{name} is not installed: `python bench/peers.py`"
        assert text in result.err and text in result.out
    cells = found()
    assert len(cells["pyllama-mtp", 2].samples) == 2
    assert cells["llama-server", 2].skipped.startswith("llama-server is not installed")
    assert cells["llama-server", 2].samples == []


def test_one_that_fails_is_reported_and_the_rest_measured(
    peers: Any, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MODE", "dies")
    result = cli(*SMALL, *BOTH)
    assert result.code == 0
    cells = found()
    assert "unknown model architecture" in cells["llama-server", 0].skipped
    assert "unknown model architecture" in result.out
    assert len(cells["pyllama-mtp", 0].samples) == len(cells["pyllama-mtp", 2].samples) == 2
    assert len(peers.log("arguments")) == 3, "a cell that failed is not tried in every repeat"

    monkeypatch.setenv("FAKE_MODE", "")
    result = cli(*SMALL, *BOTH, "--resume")
    assert result.code == 0, result.err
    assert all(len(cell.samples) == 2 and not cell.skipped for cell in found().values())


@pytest.mark.parametrize("number", usual(signal.SIGINT, signal.SIGKILL, long=[signal.SIGTERM]))
def test_no_server_outlives_an_interrupted_run(
    fake_peers: Any,
    tmp_path: Path,
    ended: Callable[[int], bool],
    number: signal.Signals,
) -> None:
    """The real command and the demo model; the server is in the middle of an answer."""
    process = start(
        *("matrix", "--peers", "llama-server", "--prompt-sizes", "32", "--depths", "0,1"),
        *("--max-tokens", "8", "--repeat", "3", "--threads", "1", "--output", "m.jsonl"),
        cwd=tmp_path,
        env=environment(**fake_peers.environment, FAKE_MODE="slow"),
    )
    deadline = time.monotonic() + 60
    while not fake_peers.log("request") and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = set(fake_peers.log("pid"))
    assert pids and not any(map(ended, pids))
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while not all(map(ended, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(map(ended, pids)), "the server is left running"
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
    assert process.returncode == codes[number], err.decode()
    assert b"Traceback" not in err
    (run,) = read_file(tmp_path / "m.jsonl").runs.values()
    assert len(run.measured) == 2, "ours were finished, and are kept"
    if number != signal.SIGKILL:
        said = b"interrupted" if number == signal.SIGINT else b"terminated"
        assert b"no-MTP" in out and said in err
