"""The plugin for llm, through llm's own API and its command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp import Model, Sampling, Session, Settings

from ..processes import RunPython, environment

pytest.importorskip("llm")

SYSTEM, ASKED = "Be brief.", ("What is a list?", "What is a dictionary?")
PROGRAM = """
import json, llm
model = llm.get_model("pyllama-mtp")
conversation = model.conversation()
options = {"temperature": 0, "max_tokens": 12, "n_ctx": 512}
first = conversation.prompt("What is a list?", system="Be brief.", **options)
parts = list(first)
second = conversation.prompt("What is a dictionary?", stream=False, **options)
seen = {"parts": parts, "second": second.text(), "output": first.usage().output}
print(json.dumps({**seen, "input": second.usage().input}))
"""


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """Only this plugin, and a folder for llm's log."""
    return {"LLM_LOAD_PLUGINS": "pyllama-mtp", "LLM_USER_PATH": str(tmp_path / "llm")}


def test_a_conversation(run_python: RunPython, variables: dict[str, str], demo: Model) -> None:
    """The texts are a session's, and the second turn knows the first."""
    done = run_python(PROGRAM, env=variables)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    answers = []
    with Session(demo, Settings(n_ctx=512, draft_n_max=0)) as session:
        for asked in ASKED:
            messages.append({"role": "user", "content": asked})
            answers.append(session.chat(messages, max_tokens=12, sampling=Sampling()).run())
            messages.append(answers[-1].message)
    first, second = answers
    assert "".join(told["parts"]) == first.text and len(told["parts"]) > 1
    assert told["output"] == len(first.tokens)
    assert (told["second"], told["input"]) == (second.text, second.telemetry.n_prompt)


def test_the_command(variables: dict[str, str], tmp_path: Path, demo_file: Path) -> None:
    """A file by its path, the demo, and a file that is not there."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        options = ("-o", "temperature", "0", "-o", "max_tokens", "8", "What is a list?")
        command = [sys.executable, "-m", "llm", *words, *options]
        env = environment(**variables)
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)

    by_path = run("-m", "pyllama-mtp", "-o", "path", str(demo_file))
    assert by_path.returncode == 0 and by_path.stdout.strip(), by_path.stderr
    assert run("-m", "pyllama-mtp").stdout == by_path.stdout
    missing = run("-m", "pyllama-mtp", "-o", "path", "none.gguf")
    assert missing.returncode == 1 and "no such model file: none.gguf" in missing.stderr
