"""What the package does to the memory of its process."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from ..processes import RunPython

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")

#: glibc raises the size from which allocations are mappings of their own when one is freed, unless
#: a program has set that size. Prints whether a second array is a mapping.
ARRAYS = """
import ctypes
import numpy as np
from pyllama_mtp.llama import native

class Info(ctypes.Structure):  # mallinfo2(3)
    _fields_ = [(f"field_{i}", ctypes.c_size_t) for i in range(10)]
    mapped = property(lambda self: self.field_4)

native.load()
info = ctypes.CDLL(None).mallinfo2
info.restype = Info
np.ones(2**20)
before = info().mapped
array = np.ones(2**20)
print(info().mapped - before >= array.nbytes)
"""

#: Prints how many bytes of memory that was freed and kept closing a session gives back.
CLOSE = """
import ctypes, sys
from pathlib import Path
from pyllama_mtp import Model, Session, Settings

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: what follows is in one piece
libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: freed, it is kept
with Model(sys.argv[1]) as model:
    session = Session(model, Settings(n_ctx=256, n_threads=1))
    memory = libc.malloc(ctypes.c_size_t(2**26))
    ctypes.memset(memory, 1, 2**26)
    libc.free(memory)
    before = resident()
    session.close()
    print(before - resident())
"""


def test_numpy_allocates_as_without_the_package(run_python: RunPython) -> None:
    assert run_python(ARRAYS).stdout == "False\n"


def test_a_closed_session_gives_freed_memory_back(run_python: RunPython, demo_file: Path) -> None:
    done = run_python(CLOSE, demo_file)
    assert done.stdout and json.loads(done.stdout) >= 2**26, done.stderr
