"""What the sanitizers say is counted, and told apart by whose line it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import findings

UPSTREAM = "one\ntwo\nthree\nfour\n"
PATCHED = "one\nours\ntwo\nchanged\nfour\n"
UBSAN = """\
tree/patched/src/llama-graph.cpp:{line}:7: runtime error: signed integer overflow: 2147483647 + {n}
    #0 0x7f01 in llm_graph::build(int) tree/patched/src/llama-graph.cpp:{line}
    #1 0x7f02 in main /usr/src/main.c:3

"""


@pytest.fixture
def sources(tmp_path: Path) -> findings.Sources:
    """Two trees with one file changed by patches, and a project with sources of its own."""
    for tree, text in (("upstream", UPSTREAM), ("patched", PATCHED)):
        folder = tmp_path / "build" / "tree" / tree / "src"
        folder.mkdir(parents=True)
        (folder / "llama-graph.cpp").write_text(text)
    for name in ("shim/shim.cpp", "llama/llama-mtp.cpp"):
        (path := tmp_path / "bindings" / name).parent.mkdir(parents=True)
        path.write_text("ours\n")
    return findings.Sources(tmp_path / "build", tmp_path)


@pytest.mark.parametrize(("line", "whose"), [(1, "upstream"), (2, "ours"), (3, "upstream"),
                                             (4, "ours"), (5, "upstream")])  # fmt: skip
def test_a_line_is_ours_when_a_patch_wrote_it(
    sources: findings.Sources, line: int, whose: str
) -> None:
    (found,) = findings.parse(UBSAN.format(line=line, n=1), sources)
    assert found.whose == {"ours": findings.TOUCHED, "upstream": findings.UPSTREAM}[whose]
    assert (found.file, found.line) == ("src/llama-graph.cpp", line)
    assert found.function == "llm_graph::build"


def test_values_do_not_make_two_findings_of_one(sources: findings.Sources, tmp_path: Path) -> None:
    logs = [tmp_path / "ubsan.1", tmp_path / "ubsan.2"]
    logs[0].write_text(UBSAN.format(line=2, n=1) + UBSAN.format(line=2, n=77))
    logs[1].write_text(UBSAN.format(line=2, n=5) + UBSAN.format(line=4, n=5))
    found = findings.collect(logs, sources)
    assert sorted((f.line, n) for f, n in found.items()) == [(2, 3), (4, 1)]
    assert {f.kind for f in found} == {"undefined: signed integer overflow: N + N"}
