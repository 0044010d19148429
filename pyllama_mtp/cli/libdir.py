"""Print the folder of libllama.so and libllama.so.0, for programs that load
llama.cpp themselves. The ggml libraries and backends lie one folder up, where
libllama finds them.

llama-cpp-python of the same release as this package's llama.cpp runs on these
libraries unchanged, and needs no build of its own:
  CMAKE_ARGS=-DLLAMA_BUILD=OFF pip install llama-cpp-python==0.3.36
  LLAMA_CPP_LIB_PATH=$(pyllama-mtp libdir) python my_script.py

So do upstream's programs, if they are of the same llama.cpp commit (doctor
names it) and were linked against its shared libraries. Prompts with MTP get
faster:
  export LD_LIBRARY_PATH=$(pyllama-mtp libdir)
  llama-server -m FILE --spec-type draft-mtp

Images and sound need the program's own libmtmd; for llama-cpp-python,
MTMD_CPP_LIB names its folder.

examples:
  pyllama-mtp libdir
  pyllama-mtp libdir --lib upstream
"""

from __future__ import annotations

import argparse

from pyllama_mtp.cli import parsing
from pyllama_mtp.errors import LibraryError

#: The library that such programs load; see ``bindings/shim/dropin.cpp``.
LIBRARY = "libllama.so"


def add_options(parser: argparse.ArgumentParser) -> None:
    parsing.add_lib_option(parser)


def run(args: argparse.Namespace) -> int:
    """Print the folder, if what lies there can be used on this machine."""
    from pyllama_mtp.llama import native

    folder, _ = native.locate(args.lib)
    if not (folder / LIBRARY).is_file():
        raise LibraryError(
            f"{folder} holds no {LIBRARY}: it was built by an older version of this package. "
            "Build it again with `pip install --force-reinstall .`."
        )
    print(folder)
    return 0
