"""Every recipe runs on the demo model, and its output says what it is there to show."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import pyllama_mtp
from pyllama_mtp import Model, Session, Settings, bench
from pyllama_mtp.examples import recipes

from ..processes import environment

FOLDER = Path(pyllama_mtp.__file__).with_name("examples")
PROMPT = "def main"


def one_core() -> None:
    """In the new process: one thread, which is what a recipe then takes by default."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def run(folder: Path, name: str, *arguments: object, python_path: Path | None = None) -> str:
    """What a recipe prints; its current folder is `folder`."""
    path = environment()["PYTHONPATH"] + (f"{os.pathsep}{python_path}" if python_path else "")
    done = subprocess.run(
        [sys.executable, "-m", f"pyllama_mtp.examples.{name}", *map(str, arguments)],
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


def test_stream_text(tmp_path: Path, greedy: Greedy) -> None:
    text, _, figures = run(tmp_path, "stream_text", "--prompt", PROMPT).partition("\n\nprefill ")
    assert text.rstrip("\n") == (PROMPT + greedy(PROMPT, 48)).rstrip("\n")
    found = re.search(r"48 tokens in (\d+) rounds, (\d+) of them drafted", figures)
    assert found and int(found[1]) + int(found[2]) == 47, "the first token is the prompt's"
    assert re.search(r"by position: \d+%, \d+%, \d+%$", figures.strip())


def test_chat(tmp_path: Path) -> None:
    out = run(tmp_path, "chat", "--max-tokens", 24)
    turns = [(int(a), int(b)) for a, b in re.findall(r"\[(\d+) tokens of prompt, (\d+) of", out)]
    assert len(turns) == 3 and turns[0][1] == 0
    for before, (n_prompt, n_cached) in itertools.pairwise(turns):
        assert before[0] <= n_cached < n_prompt, "what the turns share is not processed again"


@pytest.mark.long
def test_matrix(tmp_path: Path) -> None:
    out = run(tmp_path, "matrix", "--sizes", "32,64", "--output", "cells.jsonl")
    rows = re.findall(r"^\| (32|64) \| (no-MTP|MTP [23]) \| ([\d.,]+) \|", out, re.MULTILINE)
    assert len({(size, mode) for size, mode, _ in rows}) == 6
    assert all(float(speed.replace(",", "")) > 0 for _, _, speed in rows)
    assert len(bench.read(tmp_path / "cells.jsonl")) == 6


@pytest.mark.long
def test_choose_depth(tmp_path: Path) -> None:
    out = run(tmp_path, "choose_depth", "--limit", 2)
    table, _, tried = out.partition("\non this prompt:\n")
    assert re.search(r"draft_n_max=\d", table), "there is advice"
    speeds = re.findall(r"draft_n_max=(\S+): decode (\d+) tok/s", tried)
    assert [name for name, _ in speeds][0::2] == ["0", "'auto'"]
    assert all(int(speed) > 0 for _, speed in speeds)


@pytest.mark.long
def test_compare_builds(tmp_path: Path) -> None:
    out = run(tmp_path, "compare_builds", "--repeat", 2)
    found = re.findall(
        r"^(no-MTP|MTP 3), prompt 256, (prefill|decode): ([\d.]+) \(([\d.]+) to ([\d.]+)\), \w+$",
        out,
        re.MULTILINE,
    )
    assert len(found) == 4
    assert all(float(low) <= float(ratio) <= float(high) for _, _, ratio, low, high in found)


@pytest.mark.long
def test_notebook(tmp_path: Path) -> None:
    out = run(tmp_path, "notebook", "--output", "figure.png")
    assert len(re.findall(r"^\d +(?:64|256) +[03] +\d", out, re.MULTILINE)) == 4
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_drop_in(tmp_path: Path, greedy: Greedy, llama_cpp_folder: Path) -> None:
    out = run(tmp_path, "drop_in", "--prompt", PROMPT, python_path=llama_cpp_folder)
    said, _, text = out.partition("\n")
    library = pyllama_mtp.llama.native.locate("patched")[0] / "libllama.so"
    assert re.fullmatch(rf"llama-cpp-python [\d.]+ on {re.escape(str(library))}", said)
    assert text.rstrip("\n") == (PROMPT + greedy(PROMPT, 32)).rstrip("\n")


def test_save_prompt(tmp_path: Path) -> None:
    out = run(tmp_path, "save_prompt", "--output", "document.prompt")
    found = re.search(r"^(\d+) tokens in .*\nrestored; (\d+) tokens were left, .*\n(\d+) dr", out)
    assert found and 0 < int(found[2]) < int(found[1]) / 10
    assert int(found[3]) > 0, "the head's part of the file works too"
    assert out.endswith("the same text\n") and (tmp_path / "document.prompt").stat().st_size > 10**5


def test_draft_vocabulary(tmp_path: Path) -> None:
    out = run(tmp_path, "draft_vocabulary")
    share = re.search(r"the best 512 of 2048 tokens are ([\d.]+)% of the text", out)
    assert share and 50 < float(share[1]) < 100
    rounds = [float(one) for one in re.findall(r"([\d.]+) tokens per round", out)]
    assert len(rounds) == 2 and 1 < rounds[1] <= rounds[0]
    assert out.endswith("the same text\n")


def test_hidden_states(tmp_path: Path) -> None:
    out = run(tmp_path, "hidden_states", "--tokens", 100, "--repeat", 1)
    near, far = (float(one) for one in re.findall(r"cosine (-?[\d.]+)$", out, re.MULTILINE))
    assert far < near < 1, "functions are more alike than a function and an import"
    assert "100 tokens: (100, 192) float32" in out
    assert re.search(r"hidden states [\d.]+ ms, all rows as outputs [\d.]+ ms: [\d.]+ times$", out)


def test_batch(tmp_path: Path, greedy: Greedy) -> None:
    prompts = (PROMPT, "class Reader:\n", "for line in")
    out = run(tmp_path, "batch", *prompts, "--max-tokens", 16)
    for prompt in prompts:
        assert re.search(rf"^{re.escape(repr(prompt))}: \d+ tokens \(\w+\): ", out, re.MULTILINE)
        assert out.count(f": {greedy(prompt, 16)!r}\n") == 1, "the text that it gets alone"
    assert re.search(r"^3 prompts, \d+ rounds, \d+ tok/s$", out, re.MULTILINE)


@pytest.mark.long
def test_rpc(tmp_path: Path) -> None:
    out = run(tmp_path, "rpc")
    assert "the same text:\n" in out and out.count("tokens per round") == 2


@pytest.mark.long
def test_server_client(tmp_path: Path, greedy: Greedy) -> None:
    out = run(tmp_path, "server_client", "--prompt", PROMPT, "--max-tokens", 24)
    assert f"{PROMPT}{greedy(PROMPT, 24)}" in out
    found = re.search(r"(\d+) tokens, (\d+) drafted, (\d+) accepted", out)
    assert found and int(found[1]) == 24 and int(found[3]) <= int(found[2])


@pytest.mark.parametrize("name", recipes())
def test_recipe_says_what_it_shows_and_how_it_is_run(name: str) -> None:
    assert f"test_{name}" in globals(), "nothing checks what it shows"
    text = (FOLDER / f"{name}.py").read_text()
    first, _, rest = text.partition('"""')[2].partition("\n")
    assert 20 < len(first) < 100 and first.endswith(".")
    assert f"python -m pyllama_mtp.examples.{name} [--model FILE]" in rest.partition('"""')[0]


def test_the_list_names_every_recipe(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pyllama_mtp.examples"]
    out = subprocess.check_output(command, text=True, env=environment(), cwd=tmp_path)
    there = {path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_")}
    assert {line.split()[0] for line in out.splitlines()[2:]} == there == set(recipes())
    assert len(there) >= 10
    assert not [line for line in out.splitlines() if len(line) > 100]
