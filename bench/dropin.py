#!/usr/bin/env python3
"""llama-cpp-python's own tests, unchanged, on both variants of our libraries.

    python bench/dropin.py            # makes an environment in build/dropin, then runs all tests

The pinned llama-cpp-python is installed from its source archive without the native build, and finds
our libraries by LLAMA_CPP_LIB_PATH. Its tests, and the vocabulary files that they read, are
unpacked from the same archive. Models that the tests would download are replaced: by the demo model
for the hybrid ones, by tiny models with random weights for the others. Tests that want the text of
a particular model cannot pass; EXPLAINED lists them. Writes results/dropin.md.

Exit codes: 0 every failure is explained, and all other tests end alike on both variants; 1 not so;
2 the environment cannot be made.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

from benchkit import BENCH, RESULTS, ROOT, results
from gguf import PoolingType

from pyllama_mtp.errors import PyllamaMtpError
from pyllama_mtp.llama import native
from pyllama_mtp.measure.peers import PeerError
from pyllama_mtp.models.demo import demo_path
from tests import plain

sys.path.insert(0, str(ROOT / "vendor"))

import fetch

FOLDER = ROOT / "build" / "dropin"
VARIANTS = ("upstream", "patched")
ENDS = ("PASSED", "FAILED", "ERROR", "SKIPPED")
VOCABULARIES = "vendor/llama.cpp/models/"
#: What the tests need beside llama-cpp-python's own dependencies.
REQUIREMENTS = ("pytest>=7.4", "scipy>=1.10", "huggingface-hub>=0.23")
#: Tests that fail on both variants.
_ITS_TEXT = "wants Qwen3.5-0.8B's own text"
EXPLAINED = {
    "test_llama::test_real_model": "wants Qwen3.5-0.8B's own tokens",
    "test_llama::test_real_llama": _ITS_TEXT,
    "test_llama::test_real_llama_repeated_prompt_cache": _ITS_TEXT,
}

Outcome = tuple[str, str]  #: one of ENDS, and what was said then


def make_environment(archive: Path) -> Path:
    """Make an environment with the pinned llama-cpp-python and no native library of its own, once;
    returns its interpreter. Raises PeerError."""
    folder = FOLDER / "venv"
    python = folder / "bin" / "python"
    if not (folder / "complete").is_file():
        print("making an environment with llama-cpp-python ...", file=sys.stderr, flush=True)
        pip = [str(python), "-m", "pip", "install", "-q", str(archive), *REQUIREMENTS]
        for command in ([sys.executable, "-m", "venv", "--clear", str(folder)], pip):
            env = {**os.environ, "CMAKE_ARGS": "-DLLAMA_BUILD=OFF"}
            done = subprocess.run(command, capture_output=True, text=True, env=env)
            if done.returncode:
                raise PeerError(f"{' '.join(command[:4])} ... failed:\n{done.stderr[-2000:]}")
        (folder / "complete").touch()
    return python


def unpack(archive: Path) -> Path:
    """Unpack the tests and the vocabulary files of the archive; returns their folder."""
    folder = FOLDER / "sdist"
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(archive) as source:
        for member in source:
            member.name = member.name.partition("/")[2]
            vocabulary = member.name.startswith(VOCABULARIES) and member.name.endswith(".gguf")
            if member.name.startswith("tests/") or member.name == "pyproject.toml" or vocabulary:
                source.extract(member, folder, filter="data")
    return folder


def make_models() -> Path:
    """Write the models that the tests ask for, named like their repositories; returns their folder.
    That for embeddings is of Qwen3's kind, which pools the last token."""
    folder = FOLDER / "models"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("Qwen3.5-0.8B-GGUF", "Falcon-H1-Tiny-90M-Instruct-GGUF"):
        (folder / f"{name}.gguf").unlink(missing_ok=True)
        (folder / f"{name}.gguf").symlink_to(demo_path())
    plain.write_model(folder / "models.gguf", "llama")
    plain.write_model(folder / "mamba-130m-hf-GGUF.gguf", "mamba")
    embeddings = folder / "bge-small-en-v1.5-gguf.gguf"
    plain.write_model(embeddings, "qwen3", n_layer=2, pooling_type=int(PoolingType.LAST))
    return folder


def run_tests(python: Path, place: Path, models: Path, variant: str) -> dict[str, Outcome]:
    """The outcome of every test, by name; each runs in a process of its own, which it may abort.

    Raises:
        PeerError: the tests cannot be collected.
    """
    environment = {
        **os.environ,
        "LLAMA_CPP_LIB_PATH": str(native.locate(variant)[0]),
        "PYLLAMA_DROPIN_MODELS": str(models),
        "PYTHONPATH": str(BENCH / "benchkit"),  # for the plugin
        "OMP_WAIT_POLICY": "passive",
        "COLUMNS": "400",  # pytest's summary has lines of this length
    }
    command = [python, "-m", "pytest", "-p", "local_models", "-p", "no:cacheprovider", "-q"]

    def said(*words: str) -> str:
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        where = {"cwd": place, "env": environment, "timeout": 900}
        return subprocess.run([*command, *words], **pipe, **where).stdout

    collected = said("--collect-only", "tests")
    names = re.findall(r"^tests/\S+::\S+$", collected, re.MULTILINE)
    if not names:
        raise PeerError(f"the tests cannot be collected:\n{collected[-2000:]}")
    outcomes = {}
    for name in names:
        text = said("-rA", "--tb=no", name)
        ended = re.search(rf"^({'|'.join(ENDS)})\b.*?(?:(?: - |: )(.*))?$", text, re.MULTILINE)
        fatal = re.search(r"^.*(?:GGML_ASSERT|fatal error|Fatal Python).*$", text, re.MULTILINE)
        outcome = (ended[1], ended[2] or "") if ended else ("ERROR", fatal[0] if fatal else text)
        why = re.sub(r"0x[0-9a-f]{6,}", "0x...", outcome[1])[:160]  # addresses differ
        outcomes[name.removeprefix("tests/").replace(".py::", "::")] = outcome[0], why
        print(f"  {variant}: {name}: {outcome[0]}", flush=True)
    return outcomes


def problems(found: dict[str, dict[str, Outcome]]) -> dict[str, str]:
    """Tests with a wrong outcome, and why it is wrong."""
    upstream, patched = (found[variant] for variant in VARIANTS)
    wrong = {}
    for name in sorted({*upstream, *patched}):
        theirs, ours = upstream.get(name), patched.get(name)
        if theirs != ours:
            wrong[name] = f"upstream: {theirs}; patched: {ours}"
        elif ours and ours[0] in ("FAILED", "ERROR") and name not in EXPLAINED:
            wrong[name] = f"fails on both, and no reason is known: {ours[1]}"
    return wrong


def render(found: dict[str, dict[str, Outcome]]) -> str:
    """The Markdown file."""
    counts = {name: Counter(end for end, _ in ends.values()) for name, ends in found.items()}
    rows = [[name, *(str(counts[name][end]) for end in ENDS)] for name in VARIANTS]
    wrong, ours = problems(found), found["patched"]
    alike = sum(end == found["upstream"].get(name) for name, end in ours.items())
    upstream = native.locate("upstream")[1]["series"][:12]
    about = f"llama-cpp-python {fetch.read_pin(fetch.DROP_IN_PIN_FILE).version}"
    lines = [
        "# llama-cpp-python's own tests on both variants",
        "",
        f"Do they pass on our library? {alike} of {len(ours)} tests end alike on both variants,",
        "down to what the failing ones say. The tests are unchanged. The demo model and tiny",
        "random models replace downloads.",
        "",
        *results.markdown_table(["variant", *map(str.lower, ENDS)], rows),
        "",
        *(
            f"- {name.partition('::')[2]}, {end.lower()}: "
            f"{wrong.get(name) or EXPLAINED.get(name, said)}"
            for name, (end, said) in ours.items()
            if end != "PASSED" or name in wrong
        ),
        "",
        results.heading(f"Patch series of upstream's variant: {upstream}", about),
    ]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="llama-cpp-python's tests on both variants.")
    parser.add_argument("--archive", type=Path, metavar="FILE", help="source archive of the pin")
    args = parser.parse_args(argv)
    try:
        archive = fetch.verified_archive(fetch.read_pin(fetch.DROP_IN_PIN_FILE), args.archive)
        python, place = make_environment(archive), unpack(archive)
        models = make_models()
        found = {variant: run_tests(python, place, models, variant) for variant in VARIANTS}
    except (PyllamaMtpError, fetch.FetchError, subprocess.TimeoutExpired) as error:
        print(f"dropin: {error}", file=sys.stderr)
        return 2
    (RESULTS / "dropin.md").write_text(render(found))
    for name, why in problems(found).items():
        print(f"{name}: {why}")
    return int(bool(problems(found)))


if __name__ == "__main__":
    raise SystemExit(main())
