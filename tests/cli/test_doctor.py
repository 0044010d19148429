"""doctor names what is there and what is wrong, also when nothing can be loaded."""

from __future__ import annotations

import json
import subprocess
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyllama_mtp.cli import installation, matrix
from pyllama_mtp.errors import LibraryError
from pyllama_mtp.llama import native
from pyllama_mtp.models import demo

from ..processes import Cli

#: An answer without text.
EMPTY = "at temperature 0, SHA-256 e3b0c44298fc1c14: ''"


def line(result: SimpleNamespace, name: str) -> str:
    return next(text for text in result.out.splitlines() if text[6:21].strip() == name)


def test_all_is_well(cli: Cli) -> None:
    result = cli("doctor", "--no-self-test")
    assert result.code == 0 and result.out.endswith("everything is in order\n")
    stamp = native.load().stamp
    assert line(result, "upstream").startswith("ok") and stamp["upstream_commit"] in result.out
    assert stamp["series"][:12] in line(result, "patches")
    assert "(cpu): " in line(result, "device")
    findings = json.loads(cli("doctor", "--no-self-test", "--json").out)
    assert {finding["state"] for finding in findings} <= {"ok", "note"}
    assert {"name", "state", "detail", "remedy"} == set(findings[0])


def test_without_a_library_the_rest_is_still_checked(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*given: object) -> None:
        raise LibraryError("no native library; tried: here and there")

    def broken() -> None:
        raise ImportError("libstdc++.so.6: no such file")

    monkeypatch.setattr(native, "load", load)
    monkeypatch.setattr(native, "find_libraries", broken)
    result = cli("doctor")
    assert result.code == 1 and result.out.endswith("wrong: libraries, library\n")
    assert "no native library; tried: here and there" in line(result, "library")
    assert "ImportError: libstdc++.so.6" in line(result, "libraries")
    assert line(result, "machine").startswith("ok")
    assert line(result, "demo model").startswith("ok")
    assert "self-test" not in result.out


@pytest.mark.parametrize("content", [None, b"not a model"])
def test_a_demo_model_that_is_missing_or_broken(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None
) -> None:
    monkeypatch.setattr(demo, "demo_path", lambda: tmp_path / "demo.gguf")
    if content:
        (tmp_path / "demo.gguf").write_bytes(content)
    result = cli("doctor")
    assert result.code == 1 and "wrong: demo model" in result.out


@pytest.mark.parametrize(
    ("here", "cuda", "names", "state", "detail"),
    [
        (True, False, ["Vulkan0", "CPU"], "note", "has no CUDA; Vulkan0 computes"),
        (True, False, ["CUDA0", "CPU"], "ok", "has CUDA; CUDA0 computes"),
        (True, "native", ["CUDA0", "CUDA1", "CPU"], "ok", "has CUDA; CUDA0, CUDA1 compute"),
        (False, False, ["CPU"], "ok", "no NVIDIA GPU here; the CPU computes"),
        (False, "75 90", ["CPU"], "ok", "the build has CUDA (75 90); the CPU computes"),
    ],
)
def test_what_computes(
    monkeypatch: pytest.MonkeyPatch,
    here: bool,
    cuda: str | bool,
    names: list[str],
    state: str,
    detail: str,
) -> None:
    """An idle GPU is a note, not a fault."""
    devices = [SimpleNamespace(name=n, kind="cpu" if n == "CPU" else "igpu") for n in names]
    library = SimpleNamespace(stamp={"cuda": cuda}, devices=lambda: devices)
    monkeypatch.setattr(Path, "exists", lambda self: here)
    monkeypatch.setattr(Path, "is_dir", lambda self: False)
    (found,) = installation.check_gpu(library)
    assert found.state == state and detail in found.detail
    assert [f.state for f in installation.check_gpu(None)] == ["note" if here else "ok"]


@pytest.mark.parametrize(
    ("code", "out", "err", "state", "detail"),
    [
        (0, '{"telemetry": {"n_generated": 16, "accepted": [3, 1], "drafted": [4, 4]}, "text": ""}',
         "", "ok", "16 tokens with MTP, 4 of 8 drafts accepted"),
        (-4, "", "", "wrong", "SIGILL"),
        (2, "", "noise\npyllama-mtp: error: no head\n", "wrong", "error: no head"),
    ],
)  # fmt: skip
def test_the_self_test_survives_a_crash(
    monkeypatch: pytest.MonkeyPatch, code: int, out: str, err: str, state: str, detail: str
) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[-3:-1] == ["--lib", "upstream"]
        return subprocess.CompletedProcess(command, code, out, err)

    monkeypatch.setattr(subprocess, "run", run)
    finding, *answer = installation.check_generation("upstream")
    assert [one.detail for one in answer] == [EMPTY] * (code == 0)
    assert finding.state == state and detail in finding.detail
    assert bool(finding.remedy) == (state == "wrong")


@pytest.mark.parametrize(("busy", "state"), [(0.1, "ok"), (1.5, "note")])
def test_a_report_to_send(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, busy: float, state: str
) -> None:
    """Findings, without the user's name, then the matrix of a first look or of a file."""
    asked: list[Namespace] = []

    def run(args: Namespace) -> int:
        asked.append(args)
        print("| the matrix |")
        return 0

    monkeypatch.setattr(matrix, "run", run)
    monkeypatch.setattr("pyllama_mtp.machine.busy_cores", lambda seconds: busy)
    monkeypatch.setattr(Path, "home", lambda: native.load().folder.parent)
    for file in ([], ["m.gguf"]):
        result = cli("doctor", "--no-self-test", "--bench", *file, "--lib", "patched")
        assert result.code == 0 and result.out.endswith("in order\n\n| the matrix |\n")
        assert line(result, "idle").startswith(state) and f"keep {busy} of" in result.out
        assert str(Path.home()) not in result.out and "from ~/" in line(result, "library")
    first, own = asked
    assert all(one.no_output and one.lib == "patched" for one in asked)
    assert first.model is first.prompt_sizes is first.depths is None, "a first look"
    assert own.model == ["m.gguf"] and own.prompt_sizes == (512,) and 0 in own.depths
    refused = cli("doctor", "--bench", "--json")
    assert refused.code == 2 and "leave --json out" in refused.err


def test_nothing_is_measured_with_what_is_broken(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "demo_path", lambda: tmp_path / "demo.gguf")
    monkeypatch.setattr(matrix, "run", lambda args: pytest.fail("measured"))
    monkeypatch.setattr("pyllama_mtp.machine.busy_cores", lambda seconds: 0.0)
    assert cli("doctor", "--bench").code == 1
