"""Every declaration of ``bindings/cdef/`` is touched: cffi checks a name when it is first used.

The declarations are read from the checkout; where there is none (only the installed package), these
tests are skipped, since the compiled extension does not list what it should have.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from pyllama_mtp.llama import native

CDEF = Path(__file__).parents[2] / "bindings" / "cdef"
SOURCES = sorted(CDEF.glob("*.h"))
if not SOURCES:
    pytest.skip("no bindings/cdef here", allow_module_level=True)


def declarations() -> str:
    """All declarations, without comments."""
    return "\n".join(re.sub(r"//.*", "", path.read_text()) for path in SOURCES)


TEXT = declarations()
#: Bodies of braces removed, so that members are not taken for functions.
FLAT = re.sub(r"\{[^{}]*\}", "{}", TEXT)
STRUCTS = dict(re.findall(r"struct\s+(\w+)\s*\{([^{}]*)\}", TEXT))
ENUMS = dict(re.findall(r"enum\s+(\w+)\s*\{([^{}]*)\}", TEXT))
MACROS = re.findall(r"#define\s+(\w+)", TEXT)
CALLBACKS = re.findall(r'extern "Python"[^;(]*?(\w+)\(', FLAT)
FUNCTIONS = [
    name
    for statement in re.sub(r"#define.*", "", FLAT).split(";")
    if "typedef" not in statement and 'extern "Python"' not in statement
    for name in re.findall(r"\b((?:ggml|llama|pyllama)_\w+)\s*\(", statement)[:1]
]


@pytest.fixture(scope="module")
def library() -> native.Library:
    return native.load()


def test_the_declarations_were_understood() -> None:
    assert len(SOURCES) >= 8
    assert {"llama_context_params", "llama_model_params", "pyllama_batch"} <= STRUCTS.keys()
    assert {"ggml_type", "llama_context_type"} <= ENUMS.keys()
    assert {"llama_free", "pyllama_decode", "llama_mtp_get_memory"} <= set(FUNCTIONS)
    assert "pyllama_on_log" in CALLBACKS and "PYLLAMA_EXCEPTION" in MACROS
    assert len(FUNCTIONS) > 60


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS)))
def test_function(library: native.Library, name: str) -> None:
    address = library.ffi.addressof(library.lib, name)
    assert address
    assert library.ffi.typeof(address).kind in ("function", "pointer")


@pytest.mark.parametrize("name", sorted(CALLBACKS))
def test_callback(library: native.Library, name: str) -> None:
    assert getattr(library.lib, name)


@pytest.mark.parametrize("name", sorted(MACROS))
def test_macro(library: native.Library, name: str) -> None:
    assert isinstance(getattr(library.lib, name), int)


@pytest.mark.parametrize("name", sorted(ENUMS))
def test_enum(library: native.Library, name: str) -> None:
    constants = re.findall(r"\b([A-Z]\w+)\s*=", ENUMS[name])
    assert constants
    kind = library.ffi.typeof(f"enum {name}")
    values = {constant: getattr(library.lib, constant) for constant in constants}
    assert set(constants) <= set(kind.relements)
    assert len(set(values.values())) == len(values)
    assert library.ffi.sizeof(kind) == 4


@pytest.mark.parametrize("name", sorted(STRUCTS))
def test_struct(library: native.Library, name: str) -> None:
    """Members lie in order, do not overlap, and fill the struct (less where ``...`` stands)."""
    ffi = library.ffi
    kind = ffi.typeof(f"struct {name}")
    size, end = ffi.sizeof(kind), 0
    members = sorted(kind.fields, key=lambda field: field[1].offset)
    for member, field in members:
        assert field.offset >= end, member
        end = field.offset + ffi.sizeof(field.type)
    assert end <= size
    if "..." not in STRUCTS[name]:
        assert members
        assert size - end < 8, "nothing but padding may follow the last member"
    assert ffi.new(f"struct {name} *")


def test_every_mtp_function_has_its_plain_name(library: native.Library) -> None:
    """The header's functions are exported as C: no mangled name is bound anywhere."""
    path = next(library.folder.glob("libllama.so.*"))
    exported = ctypes.CDLL(str(path))
    names = [name for name in FUNCTIONS if name.startswith("llama_mtp_")]
    assert len(names) >= 6
    for name in names:
        assert getattr(exported, name)
    assert not [name for name in FUNCTIONS if name.startswith("_Z")]
