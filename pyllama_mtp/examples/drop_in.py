"""llama-cpp-python, unchanged, on the patched library.

    python -m pyllama_mtp.examples.drop_in [--model FILE] [--python PYTHON] [--lib VARIANT]

In a shell: LLAMA_CPP_LIB_PATH=$(pyllama-mtp libdir) python your_script.py. llama-cpp-python must be
of the same release, and needs no build of its own: CMAKE_ARGS=-DLLAMA_BUILD=OFF pip install
llama-cpp-python==0.3.36, in this environment or in that of --python.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from pyllama_mtp.llama import native
from pyllama_mtp.models.demo import demo_path

#: A script that knows nothing of this package.
SCRIPT = """
import sys
import llama_cpp

llama = llama_cpp.Llama(sys.argv[1], n_ctx=256, verbose=False)
print("llama-cpp-python", llama_cpp.__version__, "on", llama_cpp.llama_cpp._lib._name)
answer = llama.create_completion(sys.argv[2], max_tokens=32, temperature=0.0)
print(sys.argv[2] + answer["choices"][0]["text"])
"""

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default=demo_path(), metavar="FILE")
parser.add_argument("--prompt", default="def main")
parser.add_argument("--python", default=sys.executable, help="one that has llama-cpp-python")
parser.add_argument("--lib", default="patched", help="upstream, patched, or a folder")
args = parser.parse_args()

folder, _ = native.locate(args.lib)
environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(folder)}
command = [args.python, "-c", SCRIPT, str(args.model), args.prompt]
raise SystemExit(subprocess.run(command, env=environment).returncode)
