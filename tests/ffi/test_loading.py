"""Finding, checking and loading a variant: what does not fit is refused before it is loaded."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from pyllama_mtp.errors import LibraryError
from pyllama_mtp.llama import native

from ..processes import RunPython, environment, start

EXPECTED = {"upstream_commit": "abc", "series": {"patched": "p1", "upstream": "u1"}}


def stamp(**changes: str) -> dict[str, str]:
    """A stamp that fits EXPECTED, but for `changes`."""
    return {"variant": "patched", "upstream_commit": "abc", "series": "p1", **changes}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"upstream_commit": "old"}, "upstream commit old"),
        ({"series": "p0"}, "patch series p0"),
        ({"variant": "upstream"}, "patch series p1"),
        ({"variant": "other"}, "patch series"),
    ],
)
def test_a_stamp_that_does_not_fit(changes: dict[str, str], what: str) -> None:
    with pytest.raises(LibraryError, match=what) as caught:
        native.check_stamp(stamp(**changes), EXPECTED, Path("some/lib"))
    assert "some/lib" in str(caught.value) and "pip install" in str(caught.value)


def write_library(folder: Path, content: bytes) -> Path:
    """A folder that looks like a variant's, with `content` in place of libllama."""
    (folder / native.SHIM).write_bytes(b"")
    (folder / "libllama.so.0").write_bytes(content)
    return folder


def test_a_folder_without_a_library_of_ours(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match="incomplete build"):
        native.read_stamp(tmp_path)
    write_library(tmp_path, b"\x7fELF")
    with pytest.raises(LibraryError, match="carries no stamp"):
        native.read_stamp(tmp_path)
    with pytest.raises(LibraryError, match="cannot be loaded"):
        native._load_shim(tmp_path)


def test_a_backend_of_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel that adds a backend says what it was built from."""
    monkeypatch.setattr(native, "expected_stamp", lambda: EXPECTED)
    (tmp_path / "patched").mkdir()
    library = json.dumps({"pyllama_stamp": 1, **stamp()}).encode()
    folder = write_library(tmp_path / "patched", library)
    note = tmp_path / "libggml-vulkan.json"
    note.write_text(json.dumps(EXPECTED))
    assert native.locate(folder)[0] == folder
    note.write_text(json.dumps({**EXPECTED, "upstream_commit": "old"}))
    with pytest.raises(LibraryError, match="pip uninstall pyllama-mtp-vulkan"):
        native.locate(folder)


def test_the_loaded_variant_fits_its_package() -> None:
    library = native.load()
    assert native.load() is library, "loading again gives the same"
    native.check_stamp(library.stamp, native.expected_stamp(), library.folder)
    assert library.stamp == native.read_stamp(library.folder)
    data = next(library.folder.glob("libllama.so.*")).read_bytes()
    assert library.text(library.lib.pyllama_stamp()) in native.STAMP.search(data)[0].decode()
    assert any(device.kind == "cpu" and device.total > 0 for device in library.devices())
    assert "CPU" in library.backend()
    assert library.system_info()


def test_every_path_tried_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYLLAMA_MTP_LIB", str(tmp_path))
    with pytest.raises(LibraryError, match="PYLLAMA_MTP_LIB") as caught:
        native.locate()
    assert str(tmp_path / native.SHIM) in str(caught.value)
    monkeypatch.delenv("PYLLAMA_MTP_LIB")
    monkeypatch.setattr(native, "_package_folders", lambda: [Path("/a"), Path("/b")])
    with pytest.raises(LibraryError, match="pip install") as caught:
        native.resolve("patched")
    for folder in ("/a", "/b"):
        assert f"{folder}/lib/patched/{native.SHIM}" in str(caught.value)


def test_never_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_package_folders", lambda: [tmp_path])
    with pytest.raises(LibraryError, match=rf"no build_info\.json.*{tmp_path}"):
        native.locate()


def test_features_that_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = {**native.load().stamp, "cpu_features": "avx9000 zz_no_such"}
    monkeypatch.setattr(native, "read_stamp", lambda folder: stamp)
    with pytest.raises(LibraryError, match=r"avx9000, zz_no_such.*PYLLAMA_CPU_ALL"):
        native.locate()


def test_a_second_variant_in_one_process() -> None:
    (other,) = {*native.VARIANTS} - {native.load().variant}
    with pytest.raises(LibraryError, match=f"{other}.*second process"):
        native.load(other)


def test_the_variable_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, or by folder. What a process then loads: regression/support.computed_by()."""
    folders = {name: native.load().folder.parent / name for name in native.VARIANTS}
    for name, folder in folders.items():
        for choice in (name, str(folder)):
            monkeypatch.setenv("PYLLAMA_MTP_LIB", choice)
            assert native.locate()[0] == folder


def test_gbnf_is_read_by_the_library_that_is_named(tmp_path: Path) -> None:
    """In a process of its own, too, which finds no other one here."""
    (tmp_path / "a.gbnf").write_text('root ::= "a"')
    words = ["generate", "x", "-n", "3", "--lib", "upstream", "--grammar"]
    nowhere = environment(PYLLAMA_MTP_LIB=str(tmp_path))
    process = start(*words, tmp_path / "a.gbnf", env=nowhere, text=True)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and out.strip() == "a", err


def test_backends_in_the_current_folder_are_not_ours(run_python: RunPython, tmp_path: Path) -> None:
    """A release of llama.cpp, for one, is a folder with backends for several CPUs."""
    ours = next(native.load().folder.parent.glob("libggml-cpu*.so"))
    (tmp_path / "libggml-cpu-other.so").write_bytes(ours.read_bytes())
    done = run_python(
        "import os, sys; os.chdir(sys.argv[1])\n"
        "from pyllama_mtp.llama import native; native.load()\n"
        "print([line for line in open('/proc/self/maps') if 'ggml-cpu-other' in line])",
        tmp_path,
    )
    assert done.stdout == "[]\n", done.stderr


def test_logs_go_to_logging(run_python: RunPython, demo_file: Path) -> None:
    """All of libllama's lines, where somebody asks for them; nothing on stderr, nor by default."""
    code = """
import logging, sys
from pyllama_mtp import Model

records = []
class Keep(logging.Handler):
    def emit(self, record):
        records.append(record)

Model(sys.argv[1]).close()
log = logging.getLogger("pyllama_mtp.llama.native")
log.addHandler(Keep())
log.propagate = False
log.setLevel(logging.DEBUG)
Model(sys.argv[1]).close()
print(len(records) > 10, {record.name for record in records}, records[0].levelname)
"""
    done = run_python(code, demo_file)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "True {'pyllama_mtp.llama.native'} DEBUG\n"


def test_few_columns_are_what_the_cpu_backend_says() -> None:
    """Compared for every type number, and some that are none. A backend may not say: then none."""
    library = native.load()
    ffi, lib = library.ffi, library.lib
    cpu = lib.ggml_backend_reg_by_name(b"CPU")
    ask = lib.ggml_backend_reg_get_proc_address(cpu, b"ggml_cpu_small_batch_type")
    said = ffi.cast("bool (*)(int32_t)", ask) if ask else lambda number: False
    for number in (-1, *range(64), 2**31 - 1):
        assert library.few_columns(number) is said(number), number


def test_what_is_told_to_stop_has_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """llama.cpp calls it one that a graph was given up."""
    text = native.load().ffi.new("char[]", b"failed to compute graph\n")
    caplog.set_level(logging.DEBUG, "pyllama_mtp.llama.native")
    for exception in (None, KeyboardInterrupt()):
        native.pending.exception = exception
        native.pyllama_on_log(4, text, None)
        native.pending.exception = None
    native.take_recent_errors()
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.DEBUG]
