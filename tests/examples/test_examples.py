"""Every recipe runs on the demo model, and its output says what it is there to show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.examples import PROMPT, RECIPES
from pyllama_mtp.llama import native

from ..processes import environment


def one_core() -> None:
    """In the new process: one thread, which is what a recipe then takes by default."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def run(folder: Path, *names: str, python_path: Path | None = None) -> str:
    """What a recipe prints; its current folder is `folder`."""
    path = environment()["PYTHONPATH"] + (f"{os.pathsep}{python_path}" if python_path else "")
    done = subprocess.run(
        [sys.executable, "-m", "pyllama_mtp.examples", *names],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env=environment(PYTHONPATH=path, MPLBACKEND="agg"),
        preexec_fn=one_core,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


Greedy = Callable[[str, int], str]


@pytest.fixture
def greedy(demo: Model) -> Greedy:
    """The model's text, without MTP."""

    def generate(prompt: str, max_tokens: int) -> str:
        settings = Settings(n_ctx=512, n_threads=1, draft_n_max=0)
        with Session(demo, settings) as session:
            return session.generate(prompt, max_tokens=max_tokens).run().text

    return generate


def test_hidden_states(tmp_path: Path) -> None:
    out = run(tmp_path, "hidden_states")
    near, far = (float(one) for one in re.findall(r"cosine (-?[\d.]+)$", out, re.MULTILINE))
    assert far < near < 1, "functions are more alike than a function and an import"
    assert "256 tokens: (256, 192) float32" in out
    assert re.search(r"hidden states [\d.]+ ms, all rows as outputs [\d.]+ ms: [\d.]+ times$", out)


@pytest.mark.long
def test_matrix(tmp_path: Path) -> None:
    out = run(tmp_path, "matrix")
    assert len(re.findall(r"^ *(?:64|256) +(?:no-MTP|MTP 3) +[\d.,]+ ", out, re.MULTILINE)) == 4
    assert len(re.findall(r"^\d +(?:64|256) +[03] +\d", out, re.MULTILINE)) == 4
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_compare_builds(tmp_path: Path) -> None:
    found = re.findall(
        r"^(no-MTP|MTP 3), prompt 256, (prefill|decode): ([\d.]+) \(([\d.]+) to ([\d.]+)\), \w+$",
        run(tmp_path, "compare_builds"),
        re.MULTILINE,
    )
    assert len(found) == 4
    assert all(float(low) <= float(ratio) <= float(high) for _, _, ratio, low, high in found)


def test_drop_in(tmp_path: Path, greedy: Greedy, llama_cpp_folder: Path) -> None:
    said, _, text = run(tmp_path, "drop_in", python_path=llama_cpp_folder).partition("\n")
    library = native.locate("patched")[0] / "libllama.so"
    assert re.fullmatch(rf"llama-cpp-python [\d.]+ on {re.escape(str(library))}", said)
    assert text.rstrip("\n") == (PROMPT + greedy(PROMPT, 32)).rstrip("\n")


@pytest.mark.long
def test_rpc(tmp_path: Path) -> None:
    out = run(tmp_path, "rpc")
    assert "the same text:\n" in out and out.count("tokens per round") == 2


@pytest.mark.long
def test_server_client(tmp_path: Path, greedy: Greedy) -> None:
    out = run(tmp_path, "server_client")
    assert f"{PROMPT}{greedy(PROMPT, 24)}" in out
    found = re.search(r"(\d+) tokens, (\d+) drafted, (\d+) accepted", out)
    assert found and int(found[1]) == 24 and int(found[3]) <= int(found[2])


def test_the_list_names_every_recipe_and_each_has_a_test(tmp_path: Path) -> None:
    out = run(tmp_path)
    names = [recipe.__name__ for recipe in RECIPES]
    assert [line.split()[0] for line in out.splitlines()[2:]] == names
    assert [name for name in names if f"test_{name}" not in globals()] == []
    assert run(tmp_path, "nonsense") == out
