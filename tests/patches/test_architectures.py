"""What is said of other architectures is so at the pin: whose MTP head llama.cpp can draft with."""

from __future__ import annotations

import re
from pathlib import Path

from pyllama_mtp.models.shapes import (
    DRAFTED_LATER,
    DRAFTED_UPSTREAM,
    NEVER_DRAFTED,
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
