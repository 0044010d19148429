"""The real pin: its tree is laid out, and the comment names the right build."""

from __future__ import annotations

import re

import fetch
from sdist import read_pin


def test_the_pinned_tree():
    tree = fetch.ensure_tree()
    assert fetch.check_tree(tree.path, read_pin(fetch.PIN_FILE)) == tree
    written = re.search(r"^# llama.cpp (\S+) \((\S+)\)$", fetch.PIN_FILE.read_text(), re.M)
    assert written and written.groups() == (tree.commit, tree.date)
    for name in ("ggml/CMakeLists.txt", "include/llama.h", "tools/llama-bench/CMakeLists.txt"):
        assert (tree.path / name).is_file()
    # llama-server's build generates an empty web interface from these
    for name in ("scripts/ui-assets.cmake", "tools/ui/ui.h.in", "tools/ui/ui.cpp.in"):
        assert (tree.path / name).is_file()
    assert any((tree.path / "licenses").iterdir())
