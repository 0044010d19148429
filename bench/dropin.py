#!/usr/bin/env python3
"""llama-cpp-python's own tests, unchanged, on both variants of our libraries.

    python bench/dropin.py            # makes an environment in build/dropin, then runs all tests

The pinned llama-cpp-python is installed from its source archive without the native build, and finds
our libraries by LLAMA_CPP_LIB_PATH. Its tests, and the vocabulary files that they read, are
unpacked from the same archive. Models that the tests would download are replaced: by the demo model
for the hybrid ones, by tiny models with random weights for the others. Tests that want the text of
a particular model cannot pass; EXPLAINED lists them.

Exit codes: 0 every test has the same outcome on both variants, and failures are explained; 1 not
so; 2 the environment cannot be made.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from benchkit import BENCH, RESULTS, ROOT, results
from gguf import GGUFWriter, PoolingType

from pyllama_mtp.errors import PyllamaMtpError
from pyllama_mtp.llama import native
from pyllama_mtp.measure.peers import PeerError
from pyllama_mtp.models.demo import demo_path
from tests import plain, trimmed

sys.path.insert(0, str(ROOT / "vendor"))

import fetch

FOLDER = ROOT / "build" / "dropin"
VARIANTS = ("upstream", "patched")
TIMEOUT_S = 900.0
VOCABULARIES = "vendor/llama.cpp/models/"
#: What the tests need beside llama-cpp-python's own dependencies.
REQUIREMENTS = ("pytest>=7.4", "scipy>=1.10", "huggingface-hub>=0.23")
#: Tests that fail on both variants, and why.
_ITS_TEXT = "wants the text that Qwen3.5-0.8B gives; the demo model stands in for it"
EXPLAINED = {
    "test_llama::test_real_model": "wants the token ids of Qwen3.5-0.8B's vocabulary; the demo "
    "model, which stands in for it, has its own",
    "test_llama::test_real_llama": _ITS_TEXT,
    "test_llama::test_real_llama_repeated_prompt_cache": _ITS_TEXT,
}
#: Tests that fail on ours only, and why.
DIFFERENT = {
    "test_llama::test_real_llama_embeddings": "wants a batch's embeddings to be those of single "
    "texts to 0.01 %. Our attention of 9 and more rows rounds otherwise than that of fewer; "
    "upstream's rounds them all alike",
}


@dataclass(frozen=True)
class Outcome:
    """How a test ended: "passed", "failed", "error" or "skipped", and what it said then."""

    status: str
    said: str = ""


def make_environment(folder: Path, archive: Path) -> Path:
    """Make an environment with the pinned llama-cpp-python and no native library of its own, once;
    returns its interpreter. Raises PeerError."""
    python = folder / "bin" / "python"
    if not (folder / "complete").is_file():
        print("making an environment with llama-cpp-python ...", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)], {})
        without = {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF"}
        _run([str(python), "-m", "pip", "install", "-q", str(archive), *REQUIREMENTS], without)
        (folder / "complete").touch()
    return python


def _run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise PeerError(f"{' '.join(command[:4])} ... failed:\n{said}")


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the tests and the vocabulary files of the archive."""
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(archive) as source:
        for member in source:
            member.name = member.name.partition("/")[2]
            vocabulary = member.name.startswith(VOCABULARIES) and member.name.endswith(".gguf")
            if member.name.startswith("tests/") or member.name == "pyproject.toml" or vocabulary:
                source.extract(member, folder, filter="data")
    return folder


def make_models(vocabularies: Path, folder: Path) -> None:
    """Write the models that the tests ask for, named like their repositories."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("Qwen3.5-0.8B-GGUF", "Falcon-H1-Tiny-90M-Instruct-GGUF"):
        (folder / f"{name}.gguf").unlink(missing_ok=True)
        (folder / f"{name}.gguf").symlink_to(demo_path())

    plain.write_model(folder / "models.gguf", "llama")
    plain.write_model(folder / "mamba-130m-hf-GGUF.gguf", "mamba")
    write_bert(folder / "bge-small-en-v1.5-gguf.gguf", vocabularies / "ggml-vocab-bert-bge.gguf")


def write_bert(path: Path, vocabulary: Path) -> None:
    """A BERT with random weights, and the tokenizer of a vocabulary file."""
    n, n_ff, n_layer, n_ctx = 128, 256, 2, 512
    writer = GGUFWriter(path, "bert")
    writer.add_block_count(n_layer)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(n)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(PoolingType.CLS)
    trimmed.add_metadata(writer, vocabulary, "tokenizer.")
    n_vocab = len(trimmed.read(vocabulary)[0]["tokenizer.ggml.tokens"][0])
    shapes = {"token_embd": (n_vocab, n), "token_types": (2, n), "position_embd": (n_ctx, n)}
    norms = ["token_embd_norm"]
    for i in range(n_layer):
        shapes |= {f"blk.{i}.attn_{part}": (n, n) for part in ("q", "k", "v", "output")}
        shapes |= {f"blk.{i}.ffn_up": (n_ff, n), f"blk.{i}.ffn_down": (n, n_ff)}
        norms += [f"blk.{i}.{part}_norm" for part in ("attn_output", "layer_output")]
    draw = np.random.default_rng(1)
    tensors = {name: draw.normal(0, shape[1] ** -0.5, shape) for name, shape in shapes.items()}
    tensors |= dict.fromkeys(norms, np.ones(n))
    found = {f"{name}.weight": data for name, data in tensors.items()}
    biased = (name for name in tensors if name.startswith("blk.") or name in norms)
    found |= {f"{name}.bias": np.zeros(len(tensors[name])) for name in biased}
    trimmed.finish(writer, {name: data.astype(np.float32) for name, data in found.items()})


def test_names(python: Path, place: Path, environment: Mapping[str, str]) -> list[str]:
    """The names of all tests, as pytest spells them. Raises PeerError."""
    done = _pytest(python, place, environment, "--collect-only", "-q", "tests")
    names = re.findall(r"^tests/\S+::\S+$", done.stdout, re.MULTILINE)
    if done.returncode or not names:
        raise PeerError(f"the tests cannot be collected:\n{done.stdout[-2000:]}")
    return names


def run_tests(python: Path, place: Path, models: Path, variant: str) -> dict[str, Outcome]:
    """The outcome of every test, by name; each runs in a process of its own, which it may abort."""
    environment = {
        **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        "LLAMA_CPP_LIB_PATH": str(native.locate(variant)[0]),
        "PYLLAMA_DROPIN_MODELS": str(models),
        "PYTHONPATH": str(BENCH / "benchkit"),  # for the plugin
        "OMP_WAIT_POLICY": "passive",
    }
    found = {}
    for name in test_names(python, place, environment):
        report = place / f"{variant}.xml"
        report.unlink(missing_ok=True)
        done = _pytest(python, place, environment, f"--junitxml={report}", name)
        if done.returncode in (0, 1):
            found |= outcomes(report)
        else:
            said = re.search(r"^.*(?:GGML_ASSERT|fatal error).*$", done.stdout, re.MULTILINE)
            why = f"ended with {done.returncode}; {said[0] if said else ''}"
            found[name.removeprefix("tests/").replace(".py::", "::")] = Outcome("error", why)
        print(f"  {variant}: {name}: {list(found.values())[-1].status}", flush=True)
    return found


def _pytest(
    python: Path, place: Path, environment: Mapping[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pytest", "-p", "local_models", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *arguments],
        cwd=place,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )


def outcomes(report: Path) -> dict[str, Outcome]:
    """Read a JUnit file."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        module = case.get("classname", "").rpartition(".")[2]
        status, said = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                status = {"failure": "failed"}.get(child.tag, child.tag)
                said = (child.get("message") or "").strip()
        said = re.sub(r"0x[0-9a-f]{6,}", "0x...", said)[:400]  # addresses differ
        found[f"{module}::{case.get('name')}"] = Outcome(status, said)
    return found


def problems(found: Mapping[str, Mapping[str, Outcome]]) -> dict[str, str]:
    """Tests with a wrong outcome, and why it is wrong."""
    upstream, patched = (found[variant] for variant in VARIANTS)
    wrong = {}
    for name in sorted({*upstream, *patched}):
        one, other = upstream.get(name), patched.get(name)
        if name in DIFFERENT and one == Outcome("passed") and other and other.status == "failed":
            continue
        if one != other:
            wrong[name] = f"upstream: {one}; patched: {other}"
        elif one and one.status in ("failed", "error") and name not in EXPLAINED:
            wrong[name] = f"fails on both, and no reason is known: {one.said}"
    return wrong


def render(found: Mapping[str, Mapping[str, Outcome]], header: Sequence[str]) -> str:
    """The Markdown file."""
    counts = {
        variant: Counter(outcome.status for outcome in found[variant].values())
        for variant in VARIANTS
    }
    kinds = ("passed", "failed", "error", "skipped")
    rows = [[variant, *(str(counts[variant][kind]) for kind in kinds)] for variant in VARIANTS]
    wrong, reasons = problems(found), {**EXPLAINED, **DIFFERENT}
    differ = [name for name, end in found["patched"].items() if end != found["upstream"].get(name)]
    verdict = (
        f"**{len(wrong)} tests are not as they should be; see below.**"
        if wrong
        else f"{len(found['patched']) - len(differ)} of {len(found['patched'])} tests end alike on "
        "both variants, down to what the failing ones say."
    )
    lines = [
        "# llama-cpp-python's own tests on both variants",
        "",
        *header,
        "",
        *results.markdown_table(["variant", *kinds], rows),
        "",
        verdict,
        "",
        "The tests are those of the source archive, unchanged; llama-cpp-python is installed from",
        "it without a native library of its own. What the tests would download is replaced: by the",
        "demo model for Qwen3.5-0.8B and Falcon-H1-Tiny, by tiny ones with random weights for the",
        "others (Llama, Mamba, BERT).",
        "",
    ]
    for name, outcome in found["patched"].items():
        if outcome.status != "passed":
            why = wrong.get(name) or reasons.get(name, outcome.said)
            lines.append(f"- {name}, {outcome.status}: {why}")
            if outcome.said and name in reasons:
                lines += [f"  `{outcome.said.splitlines()[0][:160]}`"]
    return "\n".join(lines) + "\n"


def header() -> list[str]:
    """Date, command, machine and builds."""
    stamps = {variant: native.locate(variant)[1] for variant in VARIANTS}
    fields = results.header(stamps["patched"])
    series = ", ".join(f"{name} {stamp['series'][:12]}" for name, stamp in stamps.items())
    return [
        *results.header_lines(fields)[:-1],
        f"- Patch series: {series}; commit {fields['project_commit']}",
        f"- llama-cpp-python {fetch.read_pin(fetch.DROP_IN_PIN_FILE).version}",
    ]


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="llama-cpp-python's tests on both variants.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for the environment")
    parser.add_argument("--archive", type=Path, metavar="FILE", help="source archive of the pin")
    parser.add_argument("--output", type=Path, default=RESULTS / "dropin.md")
    args = parser.parse_args(argv)
    folder = args.folder.resolve()
    try:
        archive = fetch.verified_archive(fetch.read_pin(fetch.DROP_IN_PIN_FILE), args.archive)
        python = make_environment(folder / "venv", archive)
        place = unpack(archive, folder / "sdist")
        make_models(place / VOCABULARIES, folder / "models")
        found = {}
        for variant in VARIANTS:
            print(f"running the tests, {variant} ...", flush=True)
            found[variant] = run_tests(python, place, folder / "models", variant)
        text = render(found, header())
    except (PyllamaMtpError, fetch.FetchError, subprocess.TimeoutExpired) as error:
        print(f"dropin: {error}", file=sys.stderr)
        return 2
    args.output.write_text(text)
    wrong = problems(found)
    for name, why in wrong.items():
        print(f"{name}: {why}")
    print(f"{len(found['patched'])} tests, {len(wrong)} problems; wrote {args.output.name}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
