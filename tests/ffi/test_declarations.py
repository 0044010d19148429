"""Every declaration of ``bindings/`` is touched: cffi checks a name when it is first used."""

from __future__ import annotations

import ctypes

import pytest

from pyllama_mtp.llama import native


@pytest.fixture(scope="module")
def library() -> native.Library:
    return native.load()


def test_functions_and_constants(library: native.Library) -> None:
    constants = set()
    for name in dir(library.lib):
        if isinstance(getattr(library.lib, name), int):
            constants.add(name)
        else:
            kind = library.ffi.typeof(library.ffi.addressof(library.lib, name)).kind
            assert kind in ("function", "pointer"), name
    assert {"GGML_TYPE_F32", "PYLLAMA_EXCEPTION"} <= constants
    assert {"llama_model_free", "pyllama_decode", "pyllama_on_log"} <= {
        *dir(library.lib)
    } - constants


def test_structs(library: native.Library) -> None:
    """Those that have members; cffi compares their size with the compiler's."""
    found = set()
    for name in library.ffi.list_types()[1]:
        try:
            library.ffi.sizeof(f"struct {name}")
            found.add(name)
        except library.ffi.error as error:
            assert "don't know the size" in str(error), name
    assert {"llama_context_params", "llama_model_params", "pyllama_batch"} <= found


def test_every_mtp_function_has_its_plain_name(library: native.Library) -> None:
    """The header's functions are exported as C: no mangled name is bound anywhere."""
    exported = ctypes.CDLL(str(next(library.folder.glob("libllama.so.*"))))
    names = [name for name in dir(library.lib) if name.startswith("llama_mtp_")]
    assert len(names) >= 6
    for name in names:
        assert getattr(exported, name)
    assert not [name for name in dir(library.lib) if name.startswith("_Z")]
