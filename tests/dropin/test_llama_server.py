"""llama-server, unchanged, on its own libllama and on the patched one: it writes the same text."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from pyllama_mtp import Settings
from pyllama_mtp.llama import native
from pyllama_mtp.measure.peers import VARIABLE, LlamaServer, PeerOptions, server_options

PROMPTS = ("def main", "import os\n\n", "The capital of", "class Reader:\n")
PATH = "LD_LIBRARY_PATH"


@pytest.fixture(scope="module")
def program() -> Path:
    folder = os.environ.get(VARIABLE) or Path(__file__).parents[2] / "build" / "peers" / "bin"
    found = Path(folder) / "llama-server"
    if not found.exists():
        pytest.skip(f"no llama-server in {folder}: python bench/peers.py")
    return found


def libllama(program: Path) -> Path:
    """The libllama that the program would load now, as the loader says (ld.so(8))."""
    environment = {**os.environ, "LD_TRACE_LOADED_OBJECTS": "1"}
    said = subprocess.run([program], env=environment, capture_output=True, text=True).stdout
    found = re.search(r"^\s*libllama\.so\S* => (\S+)", said, re.MULTILINE)
    assert found, "llama-server is not linked against a shared libllama"
    return Path(found[1]).resolve().parent


def test_the_text_is_the_same(
    program: Path, demo_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = native.locate("patched")[0].resolve()
    options = PeerOptions(Settings(n_ctx=512, n_threads=2, draft_n_max=3), str(demo_file), 0)
    texts = []
    for folder in ("", str(ours)):
        monkeypatch.setenv(PATH, folder)
        assert (libllama(program) == ours) == bool(folder)
        with LlamaServer(str(program), server_options(options)) as server:
            asked = ({"prompt": text, "n_predict": 48, "temperature": 0} for text in PROMPTS)
            texts.append([server.complete(request)["content"] for request in asked])
    assert texts[0] == texts[1] and all(texts[0])
