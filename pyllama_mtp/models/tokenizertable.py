"""Faults of a file's tokenizer that would end the process in the native code.

The native code itself handles tables that are too short, missing or of another type, and special
tokens that do not exist: it raises an error, or does without them.
"""

from __future__ import annotations

from pyllama_mtp.models.ggufheader import ArraySummary
from pyllama_mtp.models.modelinfo import GGUFInfo

_STRING = 8  # element type of an array
#: Pre-tokenizers that leave spaces as they are: the search for merges ends the process on two.
_NOT_BYTES = ("whitespace",)


def tokenizer_problems(info: GGUFInfo) -> list[str]:
    """What is wrong with the tokenizer; [] if nothing is known to be wrong."""
    tokens = info.metadata.get("tokenizer.ggml.tokens")
    texts = tokens if isinstance(tokens, ArraySummary) and tokens.type == _STRING else None
    if not info.tokenizer_model or texts is None or not texts.length:
        return ["the file has no tokenizer (tokenizer.ggml.model and tokenizer.ggml.tokens)"]
    if texts.n_distinct not in (None, texts.length):
        n = texts.length - (texts.n_distinct or 0)
        return [f"tokenizer.ggml.tokens: the vocabulary has {n} duplicate tokens"]
    if not info.validated:
        return []
    if info.tokenizer_model != "gpt2":
        return [
            f"tokenizer {info.tokenizer_model[:40]!r}; these architectures have byte-level BPE "
            "(gpt2)"
        ]
    if info.tokenizer_pre in _NOT_BYTES:
        return [
            f"tokenizer.ggml.pre is {info.tokenizer_pre!r}, which leaves spaces in words; these "
            "architectures have byte-level BPE"
        ]
    if "tokenizer.ggml.merges" not in info.metadata:
        return ["the tokenizer has no merges (tokenizer.ggml.merges)"]
    return []
