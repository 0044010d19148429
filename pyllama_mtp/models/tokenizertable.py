"""What is wrong with a file's tokenizer, where the native code would end the process.

Tables that are too short, of another type, or missing, and special tokens that are no tokens, it
answers itself, with an error or by doing without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllama_mtp.models.ggufheader import ArraySummary

if TYPE_CHECKING:
    from pyllama_mtp.models.ggufinfo import GGUFInfo

_STRING = 8  # element type of an array
#: Pre-tokenizers that leave spaces as they are: the search for merges ends the process on two.
_NOT_BYTES = ("whitespace",)


def tokenizer_problems(info: GGUFInfo) -> list[str]:
    """Problems of a tokenizer; [] where there are none, or none that can be known beforehand."""
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
