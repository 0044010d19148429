"""bench/ik.py: ik_llama.cpp in a matrix, by fake programs that speak as ik's do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ik
import pytest

from pyllama_mtp.measure.peers import PeerError
from pyllama_mtp.measure.records import read_cells


@pytest.mark.long
@pytest.mark.parametrize("repack", [["-rtr"], []])
def test_a_matrix_beside_ik(
    repack: list[str], fake_peers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The fakes' speeds arrive, with drafts and without, and each program got its own options."""
    (fake_peers.folder / "bin").symlink_to(fake_peers.folder)
    monkeypatch.setenv("FAKE_LOG", fake_peers.environment["FAKE_LOG"])
    monkeypatch.chdir(tmp_path)
    options = ["-p", "32", "-n", "9", "--depths", "0,2", "--repeat", "1", "--threads", "1"]
    assert ik.main([str(fake_peers.folder), *repack, *options]) == 0
    cells = {(cell.program, cell.n_max): cell for cell in read_cells("matrix.jsonl")}
    server, drafting = cells["llama-server", 0], cells["llama-server", 2]
    assert (server.prefill_tps, server.decode_tps) == (500, 50)
    assert (drafting.decode_tps, drafting.tokens_per_round) == (70, 2)
    bench = cells["llama-bench", 0]
    assert (bench.prefill_tps, bench.decode_tps) == (500, 50)
    started = fake_peers.log("arguments")
    servers = [given for given in started if "--host" in given]
    assert [given.count("mtp:n_max=2,p_min=0") for given in servers] == [0, 1]
    for given in started:
        assert ("-rtr" in given) == bool(repack)
        assert not {"--fit", "--no-cache-prompt", "--spec-draft-n-max", "-d"} & {*given}
    assert all(request["stream"] for request in fake_peers.log("request"))


@pytest.mark.parametrize("option", ["-md", "--spec-synth-rates"])
def test_what_ik_has_not_is_refused(option: str) -> None:
    with pytest.raises(PeerError, match=f"has no {option}"):
        ik.server_options(["-m", "file", option, "x"])


def test_a_folder_without_its_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ik.main([str(tmp_path)]) == 2
    assert "bin/llama-server" in capsys.readouterr().err
