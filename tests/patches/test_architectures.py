"""The tables of architectures fit the pin and our patches: which heads can draft, and how."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pyllama_mtp.models.architectures import (
    ARCHITECTURES,
    NEVER_DRAFTED,
    NOT_TEXT,
    Architecture,
)


def plain(name: str) -> str:
    """A file's and an architecture's name differ in dashes: glm4-moe.cpp is glm4moe."""
    return re.sub("[-_]", "", name)


@pytest.fixture(scope="module")
def sources(pinned_tree: Path) -> dict[str, str]:
    """The files of upstream's src/models, by plain name."""
    return {
        plain(file.stem): file.read_text(encoding="utf-8")
        for file in (pinned_tree / "src/models").glob("*.cpp")
    }


def test_architectures_with_an_mtp_graph(pinned_tree: Path, sources: dict[str, str]) -> None:
    drafted = {
        name
        for name, text in sources.items()
        if "LLM_GRAPH_TYPE_DECODER_MTP" in text and "NextN graph not implemented" not in text
    }
    assert {plain(name) for name in ARCHITECTURES} == drafted
    loaded = {name for name, text in sources.items() if "LLM_TENSOR_NEXTN_EH_PROJ" in text}
    of_others = {"nemotronh"}  # the file loads the tensors of nemotron_h_moe too
    without = loaded - drafted - of_others
    assert {plain(name) for name in NEVER_DRAFTED} == without
    known = (pinned_tree / "src/llama-arch.cpp").read_text(encoding="utf-8")
    for name in (*ARCHITECTURES, *NEVER_DRAFTED, *NOT_TEXT):
        assert f'"{name}"' in known


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_the_graphs_take(pinned_tree: Path, sources: dict[str, str], name: str) -> None:
    """One block or several, and where in the trunk the hidden state is taken."""
    text, one = sources[plain(name)], ARCHITECTURES[name]
    assert one.several_heads == (not re.search(r"n_layer_nextn == 1\b", text))
    if name == "nemotron_h_moe":
        text = sources["nemotronh"]
    taken = set()
    for before in re.findall(r"((?:.*\n){5}).*cb\([\w>-]+, \"h_nextn\", -1\)", text):
        if "head_norm" not in before and "mtp_" not in before:
            kind = "post-norm" if "build_norm" in before else "pre-norm"
            taken.add("streams" if "n_embd*hc" in before else kind)
    assert one.hidden in taken
    own = [x for x in Architecture("").own if f"LLM_TENSOR_NEXTN_{x.upper()}" in text]
    assert [*one.own] == own


@pytest.mark.parametrize(("name", "one"), ARCHITECTURES.items())
def test_rollback(pinned_tree: Path, name: str, one: Architecture) -> None:
    """By llama.cpp's lists of architectures with a recurrent state, and with snapshots of it, which
    a patch makes longer; and by ours, of those with tokens that are pending."""
    root = Path(__file__).parents[2]
    text = (pinned_tree / "src/llama-arch.cpp").read_text(encoding="utf-8")
    files = "".join(patch.read_text() for patch in sorted(root.glob("patches/*.patch")))
    longer = "".join(f for f in files.split("\ndiff --git ") if "a/src/llama-arch.cpp" in f)
    ours = (root / "bindings/llama/llama-mtp-pending.cpp").read_text(encoding="utf-8")
    has_pending = ours.partition("llm_arch_has_pending_states(")[2].partition("\n}\n")[0]
    found = re.search(rf'(LLM_ARCH_\w+),\s*"{name}"', text)
    assert found

    def listed(function: str) -> bool:
        body = text[text.index(f"bool {function}(") :]
        return f"case {found[1]}:" in body[: body.index("\n}")]

    recurrent = listed("llm_arch_is_hybrid")
    snapshots = listed("llm_arch_supports_rs_rollback") or f"+        case {found[1]}:" in longer
    pending = re.search(rf"\b{found[1]}\b", has_pending) is not None
    assert recurrent == snapshots
    assert one.rollback == ("pending" if pending else "snapshot" if snapshots else "cut")
