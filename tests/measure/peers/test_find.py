"""Finding other programs, and saying how to get those that are missing."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.header import Build
from pyllama_mtp.measure.peers import PeerError
from pyllama_mtp.measure.peers.find import check_python, find


def test_one_of_the_folder_of_the_environment(peers: Any) -> None:
    found = find("llama-server")
    assert found.command == (str(peers.folder / "llama-server"),)
    assert found.build == Build("0.6.0-dev", "0c1e570", "", "CPU", {}, "llama-server")


def test_the_folder_given_comes_first_path_last(
    peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    there = Path(shutil.copy(peers.folder / "llama-bench", tmp_path / "bin"))
    assert find("llama-bench", str(tmp_path)).command == (str(there),)
    monkeypatch.setenv("PATH", str(there.parent))
    assert find("llama-bench").command == (str(peers.folder / "llama-bench"),)
    monkeypatch.delenv("PYLLAMA_MTP_PEERS")
    assert find("llama-bench").command == (str(there),)


def test_those_of_the_checkout_say_what_they_are(peers: Any, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    shutil.copy(peers.folder / "llama-bench", tmp_path / "bin")
    info = {"upstream_commit": "0c1e57098bba", "series": "ab12"}
    (tmp_path / "peers.json").write_text(json.dumps(info))
    (tmp_path / "request.json").write_text(json.dumps({"defines": []}))
    found = find("llama-bench", str(tmp_path)).build
    assert found == Build("upstream", "0c1e57098bba", "ab12", "CPU", {}, "llama-bench")


@pytest.mark.parametrize("name", ["llama-server", "llama-bench"])
def test_one_that_is_not_there(no_peers: None, name: str) -> None:
    with pytest.raises(PeerError, match=f"{name} is not installed: `python bench/peers.py`") as why:
        find(name)
    assert "--peer-dir" in str(why.value) and "PYLLAMA_MTP_PEERS" in str(why.value)


@pytest.mark.skipif(find_spec("llama_cpp") is not None, reason="llama-cpp-python is installed")
def test_llama_cpp_python_that_is_not_there() -> None:
    with pytest.raises(PeerError, match="is not installed: `pip install llama-cpp-python`"):
        find("llama-cpp-python")


def test_one_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise OSError('libllama.so: not found')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(PeerError, match=r"llama-cpp-python failed \(1\): [^!]*libllama.so"):
        find("llama-cpp-python")


#: What there is of llama_cpp in a probe; the backends of RPC can be loaded where no GPU is.
LIBRARY = """
import types
__version__ = "1.2.3"
STAMP = b'{"pyllama_stamp": 1, "upstream_commit": "0c1e57098bba", "series": "ab12"}'
def llama_supports_gpu_offload(): return True
def pyllama_stamp(): return STAMP
def ggml_backend_dev_by_type(kind): return 77 if kind == GPU else None
_lib = types.SimpleNamespace(
    pyllama_stamp=pyllama_stamp, ggml_backend_dev_by_type=ggml_backend_dev_by_type
)
llama_cpp = types.SimpleNamespace(_lib=_lib)
GPU = {gpu}
"""


def python_with(folder: Path, module: str) -> str:
    """The path of a Python in which `import llama_cpp` imports `module`."""
    (folder / "site").mkdir()
    (folder / "site" / "llama_cpp.py").write_text(module)
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}/site" exec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    return str(program)


def test_llama_cpp_python_of_another_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = python_with(tmp_path, LIBRARY.replace("{gpu}", "None"))
    found = find("llama-cpp-python", python=python)
    assert found.command[0] == python
    # A backend without a device is no GPU.
    assert found.build == Build("1.2.3", "0c1e57098bba", "ab12", "CPU", {}, "llama-cpp-python")
    monkeypatch.setenv("PYLLAMA_MTP_PEER_PYTHON", python)
    assert find("llama-cpp-python") == found
    monkeypatch.setenv("PYLLAMA_MTP_PEER_PYTHON", "no-such-python")
    assert find("llama-cpp-python", python=python) == found, "what is given comes first"
    with pytest.raises(PeerError, match="llama-cpp-python cannot be started"):
        find("llama-cpp-python")


def test_llama_cpp_python_with_a_gpu(tmp_path: Path) -> None:
    python = python_with(tmp_path, LIBRARY.replace("{gpu}", "1"))
    assert find("llama-cpp-python", python=python).build.backend == "GPU"
    assert find("llama-cpp-python", python=python, gpu=False).build.backend == "CPU"


def test_a_python_that_is_not_there(tmp_path: Path) -> None:
    check_python(None)
    check_python("sh")
    with pytest.raises(UsageError, match=r"--peer-python \S*nope: .* as in venv/bin/python"):
        check_python(str(tmp_path / "nope"))


def test_an_older_one_says_its_version_otherwise(peers: Any) -> None:
    program = peers.folder / "llama-server"
    program.write_text("#!/bin/sh\n[ $1 = --version ] && echo 'version: 6789 (0c1e570)'\ntrue\n")
    build = find("llama-server").build
    assert (build.variant, build.upstream_commit) == ("6789", "0c1e570")


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("echo hello", "does not say its version as llama-server does: 'hello'"),
        ("echo no libggml.so >&2; exit 127", r"llama-server failed \(127\): no libggml.so"),
    ],
)
def test_one_that_is_another_program_or_does_not_start(peers: Any, does: str, message: str) -> None:
    (peers.folder / "llama-server").write_text(f"#!/bin/sh\n{does}\n")
    with pytest.raises(PeerError, match=message):
        find("llama-server")


def test_the_backend_is_what_computes(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MODE", "gpu")
    assert find("llama-server").build.backend == "CUDA"
    assert find("llama-server", gpu=False).build.backend == "CPU"
