"""doctor names what is there and what is wrong, also when nothing can be loaded."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyllama_mtp.cli import installation
from pyllama_mtp.errors import LibraryError
from pyllama_mtp.llama import native
from pyllama_mtp.models import demo

from ..processes import Cli


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
        (0, '{"telemetry": {"n_generated": 16, "accepted": [3, 1], "drafted": [4, 4]}}', "", "ok",
         "16 tokens with MTP, 4 of 8 drafts accepted"),
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
    (finding,) = installation.check_generation("upstream")
    assert finding.state == state and detail in finding.detail
    assert bool(finding.remedy) == (state == "wrong")
