"""doctor names what is there and what is wrong, also when nothing can be loaded."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pyllama_mtp.cli import installation
from pyllama_mtp.llama import native
from pyllama_mtp.models import demo

from ..processes import Cli


@pytest.fixture(autouse=True)
def demo_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "demo.gguf"
    path.write_bytes(b"GGUF and so on")
    monkeypatch.setattr(demo, "demo_path", lambda: path)
    return path


def line(result: SimpleNamespace, name: str) -> str:
    return next(text for text in result.out.splitlines() if text[6:21].strip() == name)


def test_all_is_well(fake: ModuleType, cli: Cli) -> None:
    result = cli("doctor", "--no-self-test", "--lib", "upstream")
    assert result.code == 0 and result.out.endswith("everything is in order\n")
    assert ("load", "upstream") in fake.log
    assert line(result, "upstream").startswith("ok") and "0123456789abcdef" in result.out
    assert "feedc0dedead" in line(result, "patches")
    assert "CUDA no" in line(result, "build")
    assert "loaded here: haswell" in line(result, "CPU features")
    assert "CPU (cpu): a fake CPU" in line(result, "device")


def test_without_a_library_the_rest_is_still_checked(fake: ModuleType, cli: Cli) -> None:
    fake.native.library = None
    result = cli("doctor")
    assert result.code == 1 and result.out.endswith("wrong: library\n")
    assert "no native library; tried: here and there" in line(result, "library")
    assert line(result, "machine").startswith("ok")
    assert line(result, "demo model").startswith("ok")
    assert "self-test" not in result.out


def test_an_unexpected_failure_is_a_finding(
    fake: ModuleType, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ImportError("libstdc++.so.6: no such file")

    monkeypatch.setattr(fake.native, "find_libraries", broken, raising=False)
    result = cli("doctor", "--no-self-test")
    assert result.code == 1
    assert "ImportError: libstdc++.so.6" in line(result, "libraries")


@pytest.mark.parametrize("flags", [None, frozenset({"avx2", "fma"})])
def test_the_cpu_features_of_a_build_are_named(
    fake: ModuleType, monkeypatch: pytest.MonkeyPatch, flags: frozenset[str] | None
) -> None:
    monkeypatch.setattr(native, "cpu_flags", lambda: flags)
    (found,) = installation.check_cpu_features(fake.Library(cpu_features="avx2 fma"))
    assert found.detail == ("avx2 fma: this CPU has them all" if flags else "built for avx2 fma")


@pytest.mark.parametrize("content", [None, b"not a model"])
def test_a_demo_model_that_is_missing_or_broken(
    fake: ModuleType, cli: Cli, demo_model: Path, content: bytes | None
) -> None:
    demo_model.unlink()
    if content:
        demo_model.write_bytes(content)
    result = cli("doctor")
    assert result.code == 1 and "wrong: demo model" in result.out


@pytest.mark.parametrize(
    ("here", "cuda", "names", "state", "detail"),
    [
        (True, False, ["CPU"], "note", "has no CUDA; the CPU computes"),
        (True, False, ["Vulkan0", "CPU"], "note", "has no CUDA; Vulkan0 computes"),
        (True, "native", ["CUDA0", "CUDA1", "CPU"], "ok", "has CUDA; CUDA0, CUDA1 compute"),
        (False, False, ["Vulkan0", "CPU"], "ok", "no NVIDIA GPU here; Vulkan0 computes"),
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


def test_no_backend_is_a_fault(fake: ModuleType) -> None:
    states = [f.state for f in installation.check_devices(fake.Library(()))]
    assert "wrong" in states


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


def test_json(fake: ModuleType, cli: Cli) -> None:
    findings = json.loads(cli("doctor", "--no-self-test", "--json").out)
    assert {finding["state"] for finding in findings} <= {"ok", "note"}
    assert {"name", "state", "detail", "remedy"} == set(findings[0])
