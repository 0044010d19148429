"""Damaged and hostile model files: what is changed, drawn at random from a seed.

The changes know the format, so that most get past the first check: a random byte seldom does.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

from gguf import Keys

from fuzzkit.document import SCALARS, STRING, Document, Edit, Entry, written
from pyllama_mtp.models.ggufheader import TENSOR_TYPES


def _keys(group: type) -> Iterator[str]:
    for name, value in vars(group).items():
        if isinstance(value, type):
            yield from _keys(value)
        elif not name.startswith("_"):
            yield value


#: Keys that llama.cpp reads of models, and of image encoders.
_MODEL_KEYS = ["general.alignment", "{arch}.attention.recurrent_layers"]
for _group in (Keys.LLM, Keys.Attention, Keys.Rope, Keys.Split, Keys.Tokenizer):
    _MODEL_KEYS += _keys(_group)
_ENCODER_KEYS = [*_keys(Keys.Clip), *_keys(Keys.ClipVision)]
#: The type of a key's value, by its name.
_U32, _F32, _BOOL, _I32 = 4, 6, 7, 5
_KINDS = {
    r"(scaling\.|projector_)type$|\.(model|pre|chat_template)$": STRING,
    r"scale|epsilon|factor|freq_base|bias|clamp|softcapping|image_(mean|std)|scores": _F32,
    r"causal|finetuned|norm$|add_|remove_|use_|has_|recurrent_layers|deepstack_layers": _BOOL,
    r"split\.(no|count)$": 2,
    r"sections|indexes|token_type$": _I32,
}
_LISTS = r"layers$|sections|head_count|feed_forward_length|used_count|image_|scores|indexes|labels"
WORDS = (
    *("", "none", "linear", "yarn", "longrope", "bogus", "gpt2", "llama", "bert", "t5", "rwkv"),
    *("no_vocab", "gemma4", "qwen2", "qwen35", "qwen35moe", "default", "llama-bpe", "kimi-k2"),
    *("deepseek-llm", "superbpe", "whitespace", "hybriddna", "plamo2", "qwen3next", "clip"),
    *("\0", "a\0b", "\xff\xfe", "\xf0\x9f", "x" * 70, "%s%n%d", "{{ 1/0 }}", "{% for %}", "mamba"),
)
LETTERS = ("", "\0", "a\0b", "\xff", "\xc0\x80", "\xed\xa0\x80", "[EMPTY_7]", "A", " ", "x" * 70000)
#: Tensors that the loader takes beside those that a file must have.
EXTRA_TENSORS = (
    *("output.weight", "d2t", "rope_freqs.weight", "output.scale", "output.input_scale"),
    *(f"attn_{x}.{y}" for x in ("q", "k", "v", "qkv", "output") for y in ("bias", "scale")),
    *("ffn_up.scale", "ssm_out.scale", "attn_qkv.weight", "ssm_in.weight", "attn_q.input_scale"),
    *("nextn.embed_tokens.weight", "nextn.shared_head_head.weight", "nextn.eh_proj.scale"),
    *("nextn.shared_head_head.scale", "nextn.shared_head_norm.weight", "ffn_gate_inp.weight"),
)


class Mutator:
    """Draws edits of a base document; equal seeds give equal edits."""

    def __init__(self, base: Document) -> None:
        self.base = base
        out, self.numbers = written(base)
        self.header = len(out) - sum(len(t.data) for t in base.tensors)
        arch = base.entry("general.architecture")
        assert arch and isinstance(arch.value, bytes)
        self.arch = arch.value.decode()

    def edits(self, seed: int) -> list[Edit]:
        """The edits of a case: one change, sometimes two or three."""
        rng = random.Random(seed)
        changes, weights = zip(*_CHANGES.items(), strict=True)
        edits: list[Edit] = []
        for change in rng.choices(changes, weights, k=rng.choice((1, 1, 1, 1, 2, 3))):
            edits += change(self, rng)
        return edits

    def name(self, rng: random.Random) -> str:
        """A tensor's name."""
        return rng.choice(self.base.tensors).name.decode()

    def entry(self, rng: random.Random) -> Entry:
        """An entry; those of the hyper-parameters twice as often."""
        entries = [e for e in self.base.entries if e.key.startswith(self.arch.encode())]
        return rng.choice(rng.choice((entries or self.base.entries, self.base.entries)))


def number(rng: random.Random, code: str, old: float = 1) -> float:
    """A number that a field of this width may break on."""
    if code in "fd":
        return rng.choice((0.0, -0.0, -1.0, 1.0, 1e-45, 1e30, -1e30, *map(float, ("nan", "inf"))))
    whole = int(old) if old == old and abs(old) < 2**64 else 1
    near = (whole + 1, whole - 1, whole * 2, whole // 2, whole * 3, whole ^ 1 << rng.randrange(16))
    small = (0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 33, 63, 64, 100, 127, 128, 255, 256, 513, 1000)
    large = (2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1)
    return rng.choice((*near, *near, rng.choice(small), rng.choice(small), rng.choice(large)))


def _value(rng: random.Random, kind: int, old: Any = 1) -> Any:
    """A value of a type."""
    old = old if isinstance(old, int | float) else 1
    return rng.choice(WORDS) if kind == STRING else number(rng, SCALARS.get(kind, "I"), old)


# -- changes ---------------------------------------------------------------------------------------


def _number(m: Mutator, rng: random.Random) -> list[Edit]:
    """A number of the header: a count, a length, a type, a dimension, an offset, a value."""
    index = rng.randrange(len(m.numbers))
    return [{"op": "number", "index": index, "value": number(rng, m.numbers[index][1])}]


def _another(m: Mutator, rng: random.Random) -> list[Edit]:
    """Another value, mostly of the same type; or an array."""
    entry = m.entry(rng)
    kind = STRING if entry.element is not None else entry.type
    if rng.random() < 0.4:
        kind = rng.choice((*SCALARS, STRING, 13, 99))
    value = _value(rng, kind, entry.value)
    edit: Edit = {"op": "set", "key": entry.key.decode(), "type": kind, "value": value}
    if rng.random() < 0.1:
        edit |= {"element": kind, "value": [value] * rng.choice((0, 1, 2, 4, 7, 2048))}
    return [edit]


def _optional(m: Mutator, rng: random.Random) -> list[Edit]:
    """A key that the loader reads where it is there: a value, or an array of mostly a length that
    it takes."""
    key = rng.choice(_ENCODER_KEYS if m.arch == "clip" else _MODEL_KEYS)
    kind = next((kind for words, kind in _KINDS.items() if re.search(words, key)), _U32)
    key = key.replace("{arch}", m.arch)
    if not re.search(_LISTS, key) or rng.random() < 0.3:
        return [{"op": "set", "key": key, "type": kind, "value": _value(rng, kind, 4)}]
    blocks = m.base.entry(f"{m.arch}.block_count")
    n_blocks = blocks.value if blocks and isinstance(blocks.value, int) else 1
    n = 4 if "sections" in key else rng.choice((n_blocks, n_blocks, 0, 3, 4, 2048))
    values = [_value(rng, kind, 4) for _ in range(n)]
    if rng.random() < 0.3:
        values = values[:1] * len(values)
    return [{"op": "set", "key": key, "element": kind, "value": values}]


def _entries(m: Mutator, rng: random.Random) -> list[Edit]:
    """A key goes, is renamed, or comes twice."""
    key = m.entry(rng).key.decode()
    op = rng.choice(("delete", "delete", "rename", "duplicate"))
    names = (m.entry(rng).key.decode(), key + "\0", key[:-1], "", *WORDS[-6:])
    return [{"op": op, "key": key, "to": rng.choice(names)}]


def _tokens(m: Mutator, rng: random.Random) -> list[Edit]:
    """Elements and lengths of the tokenizer's tables."""
    arrays = [entry for entry in m.base.entries if isinstance(entry.value, list)]
    if not arrays:  # a part of a split model
        return _number(m, rng)
    entry = rng.choice(arrays)
    key, n = entry.key.decode(), len(entry.value)  # type: ignore[arg-type]
    if rng.random() < 0.3:
        length = max(0, min(int(number(rng, "I", n)), 3 * n))
        return [{"op": "element", "key": key, "length": length}]
    kind, edits = entry.element or 0, []
    for _ in range(rng.choice((1, 1, 2, 8))):
        value = rng.choice(LETTERS) if kind == STRING else _value(rng, kind)
        edits.append({"op": "element", "key": key, "index": rng.randrange(n), "value": value})
    return edits


def _table(m: Mutator, rng: random.Random) -> list[Edit]:
    """A row of the tensor table: name, shape, type or offset, with and without its bytes."""
    name = m.name(rng)
    tensor = m.base.tensor(name)
    assert tensor
    shape, at = tensor.shape, rng.randrange(len(tensor.shape))
    other = [*shape[:at], int(number(rng, "Q", shape[at])), *shape[at + 1 :]]
    deep = shape + [1] * rng.choice((1, 2, 3, 9))
    edit: Edit = {"op": "tensor", "name": name, "fit": rng.random() < 0.7}
    more: dict[str, tuple[Any, ...]] = {
        "type": (*TENSOR_TYPES, *TENSOR_TYPES, 4, 31, 43, 255, 2**31),
        "shape": (other, other, shape[::-1], deep, [*shape[:-1], shape[-1] // 2, 2], []),
        "to": (m.name(rng), name + "\0", name + "x", "", "x" * 63, "x" * 64),
        "offset": (int(number(rng, "Q", rng.randrange(1 << 20))),),
    }
    kind = rng.choice(("type", "type", "shape", "shape", "to", "offset", "drop"))
    return [edit | ({"op": "drop"} if kind == "drop" else {kind: rng.choice(more[kind])})]


def _extra(m: Mutator, rng: random.Random) -> list[Edit]:
    """A tensor more, of those that the loader takes where they are there."""
    extra = rng.choice(EXTRA_TENSORS)
    names = [tensor.name.decode() for tensor in m.base.tensors]
    block = rng.choice([name.split(".")[1] for name in names if name.startswith("blk.")] or ["0"])
    own = extra == "d2t" or extra.startswith(("output.", "rope"))
    to = extra if own else f"blk.{block}.{extra}"
    edit: Edit = {"op": "copy", "name": m.name(rng), "to": to, "fit": True}
    if rng.random() < 0.8:
        edit["shape"] = rng.choice(([1], [192], [192, 2048], [512], [128], [2], [192, 300], [300]))
    if rng.random() < 0.6:
        edit["type"] = rng.choice((0, 0, 1, 8, 26, 27, 24, 28, 2))
    return [edit]


def _dimensions(m: Mutator, rng: random.Random) -> list[Edit]:
    """Other hyper-parameters, and tensors that have the shapes that follow from them."""
    edits: list[Edit] = []
    for entry in [m.entry(rng) for _ in range(rng.choice((1, 1, 2, 3)))]:
        key = entry.key.decode()
        if isinstance(entry.value, list | bytes):
            continue
        value = _value(rng, entry.type, entry.value)
        edits.append({"op": "set", "key": key, "type": entry.type, "value": value})
        if key.endswith(("ssm.state_size", "time_step_rank")) and rng.random() < 0.8:
            other = "time_step_rank" if key.endswith("size") else "state_size"
            factor = m.base.entry(f"{m.arch}.ssm.{other}")
            inner = int(value) * int(factor.value if factor else 1)  # type: ignore[arg-type]
            inner_key = f"{m.arch}.ssm.inner_size"
            edits.append({"op": "set", "key": inner_key, "type": _U32, "value": inner})
    if rng.random() < 0.2:
        edits += _optional(m, rng)
    return [*edits, {"op": "conform"}]


def _weights(m: Mutator, rng: random.Random) -> list[Edit]:
    """Weights that are not numbers, or too large, in a tensor or in a part of it."""
    fill = rng.choice(("nan", "inf", "-inf", "0", "6e4", "6e-8"))
    part = rng.choice(({}, {"at": rng.random(), "n": rng.choice((1, 16, 4096))}))
    return [{"op": "weights", "name": m.name(rng), "fill": fill, **part}]


def byte_edits(rng: random.Random, front: int) -> list[Edit]:
    """The file ends early, bytes are missing or too many, bits are flipped: anywhere, or within the
    first `front` bytes."""
    at: Any = rng.choice((rng.random(), rng.randrange(front), rng.randrange(64)))
    op = rng.choice(("cut", "insert", "flip", "flip"))
    if op == "flip":
        places = [at, *(rng.randrange(front) for _ in range(rng.choice((0, 0, 2, 99))))]
        return [{"op": "flip", "at": at, "bit": rng.randrange(8)} for at in places]
    if op == "cut":
        return [{"op": "cut", "at": at, **rng.choice(({}, {"n": rng.choice((1, 4, 32, 4096))}))}]
    text, times = rng.choice(("\0", "\xff", "[", "GGUF")), rng.choice((1, 4, 31, 32, 4096))
    return [{"op": "insert", "at": rng.choice((at, 1.0)), "text": text, "times": times}]


_CHANGES: dict[Callable[[Mutator, random.Random], list[Edit]], float] = {
    _number: 12,
    _another: 16,
    _optional: 25,
    _entries: 5,
    _tokens: 8,
    _table: 12,
    _extra: 6,
    _dimensions: 12,
    lambda m, rng: byte_edits(rng, m.header): 15,
    _weights: 4,
}
