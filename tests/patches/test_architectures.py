"""What is said of other architectures is so at the pin: whose MTP head llama.cpp can draft with."""

from __future__ import annotations

import re
from pathlib import Path

from pyllama_mtp.models.shapes import (
    DRAFTED_LATER,
    DRAFTED_UPSTREAM,
    NEVER_DRAFTED,
    NOT_TEXT,
    SUPPORTED_ARCHITECTURES,
)


def plain(name: str) -> str:
    """A file's and an architecture's name differ in dashes: glm4-moe.cpp is glm4moe."""
    return re.sub("[-_]", "", name)


def test_architectures_with_an_mtp_graph(pinned_tree: Path) -> None:
    sources = {
        plain(file.stem): file.read_text(encoding="utf-8")
        for file in (pinned_tree / "src/models").glob("*.cpp")
    }
    drafted = {
        name
        for name, text in sources.items()
        if "LLM_GRAPH_TYPE_DECODER_MTP" in text and "NextN graph not implemented" not in text
    }
    assert {plain(name) for name in (*SUPPORTED_ARCHITECTURES, *DRAFTED_UPSTREAM)} == drafted
    loaded = {name for name, text in sources.items() if "LLM_TENSOR_NEXTN_EH_PROJ" in text}
    of_others = {"nemotronh"}  # the file loads the tensors of nemotron_h_moe too
    without = loaded - drafted - of_others - {plain(name) for name in DRAFTED_LATER}
    assert {plain(name) for name in NEVER_DRAFTED} == without
    known = (pinned_tree / "src/llama-arch.cpp").read_text(encoding="utf-8")
    for name in (*DRAFTED_UPSTREAM, *DRAFTED_LATER, *NEVER_DRAFTED, "gemma4-assistant"):
        assert f'"{name}"' in known


def test_architectures_that_do_not_continue_text(pinned_tree: Path) -> None:
    """Without a cache, with an encoder, or with text that does not grow at its end."""

    def read(name: str) -> str:
        return (pinned_tree / "src" / name).read_text(encoding="utf-8")

    archs, model = read("llama-arch.cpp"), read("llama-model.cpp")
    names = dict(re.findall(r"\{ (LLM_ARCH_\w+), +\"([^\"]+)\" +\}", archs))
    parts = (
        r"llama_model::create_memory\(.*?res = nullptr;",
        r"llama_model_has_encoder\(.*?return true;",
    )
    found = [re.search(part, model, re.DOTALL) for part in parts]
    found.append(re.search(r"llm_arch_is_diffusion\(.*?return true;", archs, re.DOTALL))
    labels = {label for one in found for label in re.findall(r"LLM_ARCH_\w+", one[0])}  # type: ignore[index]
    assert len(labels) > 15
    assert {names[label] for label in labels} <= NOT_TEXT.keys() <= {*names.values()}
