"""Applying: the right patches for a variant, nothing touched that need not be, clear failures."""

from __future__ import annotations

import os
import re

import pytest
from pq import apply

PATCH_2, LIBRARY = "0002-llama-return-more.patch", "src/llama.cpp"


def files(queue, folder: str) -> dict[str, bytes]:
    """Those of a tree, without the tools' own notes."""
    found = {name.partition("/")[2]: data for name, data in queue.bytes(folder).items()}
    return {name: data for name, data in found.items() if not name.startswith(".")}


def test_variants_leave_the_pristine_tree_alone(queue):
    pristine = files(queue, "tree")
    for variant, changed in (("upstream", set()), ("patched", {LIBRARY})):
        assert queue.command("apply", "--variant", variant, "--dest", queue.copy) == 0
        copy = files(queue, "copy")
        assert {n for n in copy if copy[n] != pristine[n]} == {"ggml/src/ggml.c"} | changed
    assert copy.keys() == pristine.keys() and b"return 2020;" in copy[LIBRARY]
    assert files(queue, "tree") == pristine


def test_only_files_whose_content_changes_are_written(queue):
    queue.command("apply", "--dest", queue.copy)
    for variant, written in (("patched", set()), ("upstream", {"llama.cpp"})):
        for path in [*queue.copy.rglob("*"), *queue.tree.rglob("*")]:
            os.utime(path, (1, 1))
        queue.command("apply", "--dest", queue.copy, "--variant", variant)
        new = {p.name for p in queue.copy.rglob("*.*") if p.stat().st_mtime > 1}
        assert new - {apply.MARK} == written


def test_a_damaged_copy_is_mended(queue):
    queue.command("apply", "--dest", queue.copy)
    good = files(queue, "copy")
    (queue.copy / "CMakeLists.txt").write_text("")
    (queue.copy / "src/extra.cpp").write_text("")
    (queue.copy / "LICENSE").unlink()
    assert queue.command("apply", "--dest", queue.copy) == 0
    assert files(queue, "copy") == good


CASES = {
    "a patch": rf"{PATCH_2} does not apply:\n.*{LIBRARY}:18\n.*next:\n.* edit --work",
    "foreign": "is not a patched copy made here\nnext:",
    "around": "must be apart\nnext:",
}


@pytest.mark.parametrize("case", CASES)
def test_refusals_change_nothing(queue, case, capsys):
    queue.command("apply", "--dest", queue.copy)
    if case == "a patch":
        path = queue.folder / PATCH_2
        path.write_text(path.read_text().replace("-int f20() { return 20", "-int f20() { return 7"))
    elif case == "foreign":
        (queue.copy / apply.MARK).rename(queue.copy / "thesis.tex")
    before = queue.bytes("copy", "patches")
    dest = queue.root if case == "around" else queue.copy
    assert queue.command("apply", "--dest", dest) == 2
    assert re.search(CASES[case], capsys.readouterr().err, re.S)
    assert queue.bytes("copy", "patches") == before
