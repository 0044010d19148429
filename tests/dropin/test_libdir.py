"""`libdir`, and its libraries: any program can load them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pyllama_mtp.cli import installation
from pyllama_mtp.llama import native

from ..processes import Cli

#: Prints the devices that are there for a program that loads the library by ctypes.
PROGRAM = """
import ctypes, sys
from ctypes import c_char_p, c_size_t, c_void_p

library = ctypes.CDLL(sys.argv[1])
library.ggml_backend_dev_get.restype = c_void_p
library.ggml_backend_dev_name.restype = c_char_p
for index in range(library.ggml_backend_dev_count()):
    device = c_void_p(library.ggml_backend_dev_get(c_size_t(index)))
    print(library.ggml_backend_dev_name(device).decode())
"""


@pytest.mark.parametrize("variant", native.VARIANTS)
def test_it_prints_a_folder_with_what_programs_ask_for(cli: Cli, variant: str) -> None:
    result = cli("libdir", "--lib", variant)
    assert result.code == 0 and not result.err
    folder = Path(result.out.removesuffix("\n"))
    assert folder.is_absolute() and folder.name == variant
    assert {"libllama.so", "libllama.so.0"} <= {path.name for path in folder.iterdir()}
    beside = {path.name for path in folder.parent.iterdir()}
    assert {"libggml.so.0", "libggml-base.so.0"} <= beside
    assert any(name.startswith("libggml-cpu") for name in beside)


def test_libraries_that_do_not_belong_here_are_refused(cli: Cli, tmp_path: Path) -> None:
    folder, _ = native.locate("patched")
    for path in folder.iterdir():
        if path.name != installation.LIBRARY:
            (tmp_path / path.name).symlink_to(path)
    older = cli("libdir", "--lib", str(tmp_path))
    assert older.code == 2 and "holds no libllama.so" in older.err and "pip install" in older.err
    (tmp_path / "libllama.so.0").unlink()
    (tmp_path / "libllama.so.0").write_bytes(b"\x7fELF")
    other = cli("libdir", "--lib", str(tmp_path))
    assert other.code == 2 and "carries no stamp" in other.err and not other.out


@pytest.mark.parametrize("variant", native.VARIANTS)
@pytest.mark.parametrize("through_a_link", [False, True], ids=["", "link"])
def test_a_program_without_this_package_finds_the_backends(
    variant: str, through_a_link: bool, tmp_path: Path
) -> None:
    folder, _ = native.locate(variant)
    if through_a_link:
        (tmp_path / "libraries").symlink_to(folder)
        folder = tmp_path / "libraries"
    command = [sys.executable, "-I", "-c", PROGRAM, folder / "libllama.so"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env={"PATH": ""}
    )
    assert done.returncode == 0, done.stderr
    assert "+".join(done.stdout.splitlines()) == native.load().backend()
    assert not done.stderr, "whoever imports it asked for no log"


def test_the_help_names_the_release_that_is_pinned(cli: Cli) -> None:
    pin = (Path(__file__).resolve().parents[2] / "vendor" / "drop-in.pin").read_text()
    requirement = re.search(r"^llama-cpp-python==\S+", pin, re.MULTILINE)
    assert requirement and requirement[0] in (installation.Libdir.__doc__ or "")
