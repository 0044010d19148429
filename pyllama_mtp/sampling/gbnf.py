"""GBNF is read in a worker first: see :class:`.Workers`."""

from __future__ import annotations

import re

from ..llama import native

#: Texts, sets of characters and comments, and what names a token of the vocabulary.
_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^]\\])*\]|#[^\n]*|!?<[^>\n]*>', re.DOTALL)
_library = native.load()


def check_here(source: str) -> str:
    """Have llama.cpp read a grammar, with a text for each token that it names. "": that ends, and a
    generation will say whether it is a grammar."""
    plain = _PARTS.sub(lambda part: '"x"' if part[0][0] in "<!" else part[0], source)
    lib, message = _library.lib, _library.ffi.new("char[256]")
    text = plain.encode(errors="replace")
    sampler = lib.pyllama_sampler_init_grammar(_library.ffi.NULL, text, message, len(message))
    if sampler:
        lib.llama_sampler_free(sampler)
    return ""
