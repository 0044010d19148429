"""bench/ops.py: what is cut out of the tree is what answers, and one graph is asked about."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import ops
import pytest

from ..ffi.ggmlcalls import F32, Ggml

I64 = 27


def copied(folder: Path) -> Path:
    """A tree with what the script needs, to be changed."""
    for part in ("include", "src"):
        shutil.copytree(ops.tree() / "ggml" / part, folder / "ggml" / part)
    return folder


def change(tree: Path, file: str, old: str, new: str) -> None:
    path = tree / "ggml" / "src" / file
    text = path.read_text()
    assert old in text, f"{file} has changed; change this test"
    path.write_text(text.replace(old, new))


def test_a_graph_is_asked_about_and_what_is_refused_is_seen(tmp_path: Path) -> None:
    """A backend of the tree that cannot normalize: the chain's graph shows it, there alone."""
    tree = copied(tmp_path)
    change(tree, "ggml-metal/ggml-metal-device.m", "case GGML_OP_RMS_NORM:", "")
    found = ops.ask(tree, "chain, Q8_0 cache", ["qwen35"])
    assert {node.graph for node in found} == {"P", "V", "C"}
    refused = {(node.op, node.graph, node.verdict) for node in found if node.refused}
    norms = {graph for op, graph, verdict in refused if (op, verdict) == ("RMS_NORM", "yyyyyyny")}
    assert norms == {"P", "V", "C"}
    assert {op for op, *_ in refused} == {"RMS_NORM"}
    chain = {node.op for node in found if node.graph == "C"}
    assert {"FLASH_ATTN_EXT", "SET_ROWS", "ARGMAX", "MUL_MAT", "GET_ROWS"} <= chain
    written = [line.split() for line in ops.cases(found)]
    assert all(len(line) == 25 + 9 * int(line[23]) for line in written)
    page = "\n".join(ops.tables(found))
    row = next(line for line in page.splitlines() if line.startswith("| RMS_NORM"))
    assert "C P V of qwen35, chain, Q8_0 cache" in row and "**no**" in row


@pytest.fixture
def asked(tmp_path: Path) -> ctypes.CDLL:
    """The library of the tree as it is."""
    return ops.build(ops.tree(), tmp_path)


def test_a_copy_of_indices_is_refused_by_metal(asked: ctypes.CDLL) -> None:
    """Of I64 a row cannot be made contiguous everywhere; of F32 it can."""
    ggml = Ggml()
    with ggml.context(2**16) as ctx:
        for kind in (F32, I64):
            node = ggml.ggml_cont(ctx, ggml.ggml_new_tensor_2d(ctx, kind, 4, 3))
            asked.ops_graph(f"case {kind}: C".encode())
            address = ctypes.c_void_p(int(ggml.ffi.cast("size_t", node)))
            assert not asked.ops_node(address, True, None)
    verdicts = {node.case: node.verdict for node in ops.read(asked.ops_report().decode())}
    assert verdicts["case 0"] == "y" * 8
    assert verdicts[f"case {I64}"][:7] == "yyyyyyn"


def test_what_the_tree_lacks_is_named() -> None:
    text = "static bool asked(int a,\n    int b) {\n    if (a) {\n    }\n}\n\nint other;\n"
    assert ops.cut_out(text, "asked") == text[: text.index("\n\n")]
    for other in ("bool declared(int a);\nint x() {\n}\n", "    declared(1);\n"):
        with pytest.raises(ops.OpsError, match="must follow upstream"):
            ops.cut_out(other, "declared")


def test_the_smallest_node_of_each_row_and_graph_is_for_upstreams_test() -> None:
    def node(graph: str, size: int, place: str = "device", test: str = "") -> ops.Found:
        shapes = f"f32[{size},1,1,1] -> f32[{size},1,1,1]"
        return ops.Found("", graph, "ADD", shapes, place, "y" * 8, test or f"{graph} {size}")

    found = [node("Pc", 8), node("P0", 6), node("S", 9), node("V", 1, "host"), node("C", 0)]
    assert ops.cases(found) == ["P0 6", "S 9"]
    large = [node("S", ops.LARGE), node("P", 2 * ops.LARGE), node("V", ops.LARGE)]
    assert ops.cases([*found, *large]) == ["P0 6", "S 9"]
    assert ops.cases(large) == [f"S {ops.LARGE}"]


def test_verdicts() -> None:
    assert ops.verdict("yyyyyyn!") == ["yes", "**no**", "**aborts**"]
    assert ops.verdict("nyyyyyyy")[0].startswith("7.5 **no**, 8.0 yes")
    assert ops.worst(["yyyyyyyn", "yyyyyyy!", "ynyyyyyy"]) == "ynyyyyy!"
