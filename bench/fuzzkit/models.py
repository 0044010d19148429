"""Damaged and hostile model files: what is changed, drawn at random from a seed.

The changes know the format, so that most get past the first check: a random byte seldom does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from fuzzkit.document import SCALARS, STRING, Document, Entry, Field, Writer
from fuzzkit.edits import Edit
from pyllama_mtp.models.ggufheader import TENSOR_TYPES

#: Keys that llama.cpp reads of any model, or of these; their types by number.
_U32, _F32, _BOOL, _I32 = 4, 6, 7, 5
_TOKENS = """bos eos eot eom unknown seperator padding mask fim_pre fim_suf fim_mid fim_pad fim_rep
fim_sep prefix suffix middle"""
_KEYS = {
    _U32: """{arch}.embedding_length_out {arch}.pooling_type {arch}.expert_count
        {arch}.expert_used_count {arch}.expert_group_count {arch}.vocab_size
        {arch}.expert_group_used_count {arch}.expert_feed_forward_length
        {arch}.expert_shared_feed_forward_length {arch}.classifier.pooling_type
        {arch}.rope.dimension_count_swa {arch}.attention.key_length_swa
        {arch}.attention.value_length_swa {arch}.attention.sliding_window
        {arch}.rope.scaling.original_context_length general.alignment general.quantization_version
        split.tensors.count general.file_type tokenizer.ggml.token_type_count """
    + " ".join(f"tokenizer.ggml.{name}_token_id" for name in _TOKENS.split()),
    _F32: """{arch}.rope.scaling.factor {arch}.rope.scale_linear {arch}.rope.scaling.attn_factor
        {arch}.rope.scaling.alpha {arch}.attention.layer_norm_epsilon {arch}.attention.scale
        {arch}.attention.clamp_kqv {arch}.logit_scale general.sampling.temp
        {arch}.attention.max_alibi_bias {arch}.rope.scaling.yarn_ext_factor
        {arch}.rope.freq_base""",
    _BOOL: """{arch}.attention.causal {arch}.rope.scaling.finetuned {arch}.expert_weights_norm
        tokenizer.ggml.add_bos_token tokenizer.ggml.add_eos_token tokenizer.ggml.add_sep_token
        tokenizer.ggml.add_space_prefix tokenizer.ggml.remove_extra_whitespaces""",
    STRING: """{arch}.rope.scaling.type tokenizer.ggml.model tokenizer.ggml.pre
        tokenizer.chat_template general.name general.architecture""",
    2: "split.count split.no",
}
READ_KEYS = {key: kind for kind, keys in _KEYS.items() for key in keys.split()}
#: The same of image encoders, below "clip.".
_ENCODER_KEYS = {
    _U32: """head_count_kv vision.attention.head_count_kv vision.attention.head_dim
        vision.projector.scale_factor vision.projector.query_side vision.projector.window_side
        vision.projector.spatial_offsets vision.n_wa_pattern vision.window_size minicpmv_version
        minicpmv_query_num vision.preproc_min_tiles vision.preproc_max_tiles vision.sam.head_count
        vision.preproc_image_size vision.sam.block_count vision.expert_used_count
        vision.image_min_pixels vision.image_max_pixels vision.spatial_merge_size
        vision.image_resize_algo""",
    _F32: "vision.swiglu_clamp vision.attention.layer_norm_epsilon",
    _BOOL: "use_silu use_gelu has_audio_encoder has_vision_encoder",
    STRING: "projector_type vision.projector_type vision.mm_patch_merge_type",
}
ENCODER_KEYS = {f"clip.{key}": kind for kind, keys in _ENCODER_KEYS.items() for key in keys.split()}
ARRAY_KEYS: dict[str, int] = {
    "{arch}.attention.recurrent_layers": _BOOL,
    "{arch}.attention.head_count": _U32,
    "{arch}.attention.head_count_kv": _U32,
    "{arch}.feed_forward_length": _U32,
    "{arch}.expert_used_count": _U32,
    "{arch}.expert_feed_forward_length": _U32,
    "{arch}.rope.dimension_sections": _I32,
    "{arch}.classifier.output_labels": STRING,
    "tokenizer.ggml.scores": _F32,
    "tokenizer.ggml.suppress_tokens": _I32,
    "tokenizer.ggml.precompiled_charsmap": 1,
    "general.tensor_extra.name": STRING,
    "general.tensor_extra.prec_a4": _BOOL,
}
ENCODER_ARRAYS = {
    "clip.vision.feature_layer": _I32,
    "clip.vision.is_deepstack_layers": _BOOL,
    "clip.vision.image_mean": _F32,
    "clip.vision.image_std": _F32,
    "clip.vision.image_grid_pinpoints": _I32,
    "clip.vision.wa_layer_indexes": _I32,
    "clip.vision.projector.spatial_offsets": _I32,
}
WORDS = (
    *("", "none", "linear", "yarn", "longrope", "bogus", "gpt2", "llama", "bert", "t5", "rwkv"),
    *("no_vocab", "gemma4", "qwen2", "qwen35", "qwen35moe", "default", "llama-bpe", "kimi-k2"),
    *("deepseek-llm", "superbpe", "whitespace", "hybriddna", "plamo2", "qwen3next", "clip"),
    *("\0", "a\0b", "\xff\xfe", "\xf0\x9f", "x" * 70, "%s%n%d", "{{ 1/0 }}", "{% for %}", "mamba"),
)
LETTERS = ("", "\0", "a\0b", "\xff", "\xc0\x80", "\xed\xa0\x80", "[EMPTY_7]", "A", " ", "\u0120")
#: Tensors that the loader takes beside those that a file must have.
EXTRA_TENSORS = (
    *("output.weight", "d2t", "rope_freqs.weight", "output.scale", "output.input_scale"),
    *(f"attn_{x}.{y}" for x in ("q", "k", "v", "qkv", "output") for y in ("bias", "scale")),
    *("ffn_up.scale", "ffn_down.scale", "ffn_gate.scale", "ssm_out.scale", "ssm_alpha.scale"),
    *("attn_gate.scale", "attn_qkv.weight", "ssm_in.weight", "attn_q.input_scale"),
    *("nextn.embed_tokens.weight", "nextn.shared_head_head.weight", "nextn.eh_proj.scale"),
    *("nextn.shared_head_head.scale", "nextn.shared_head_norm.weight", "ffn_gate_inp.weight"),
)
WEIGHTS = ("nan", "inf", "-inf", "zero", "large", "small", "noise")


class Mutator:
    """Draws edits of a base document; equal seeds give equal edits."""

    def __init__(self, base: Document) -> None:
        self.base = base
        self.fields: list[Field] = Writer(base).fields
        # Without the elements of arrays, which are most of them.
        self.scalars = [f for f in self.fields if "[" not in f.name]
        self.keys = [e.key.decode() for e in base.entries]
        self.arrays = [e.key.decode() for e in base.entries if e.element is not None]
        arch = base.entry("general.architecture")
        assert arch and isinstance(arch.value, bytes)
        self.arch = arch.value.decode()
        self.size = sum(len(t.data) for t in base.tensors)
        self.header = max(f.at for f in self.fields)

    def edits(self, seed: int) -> list[Edit]:
        """The edits of a case: one change, sometimes two or three."""
        rng = random.Random(seed)
        changes, weights = zip(*_CHANGES.items(), strict=True)
        edits: list[Edit] = []
        for change in rng.choices(changes, weights, k=rng.choice((1, 1, 1, 1, 2, 3))):
            edits += change(self, rng)
        return edits

    def key(self, key: str) -> str:
        """A key with the architecture filled in."""
        return key.replace("{arch}", self.arch)

    def name(self, rng: random.Random) -> str:
        """A tensor's name."""
        return rng.choice(self.base.tensors).name.decode()

    def entry(self, rng: random.Random) -> Entry:
        """An entry; those of the hyper-parameters twice as often."""
        entries = [e for e in self.base.entries if e.key.startswith(self.arch.encode())]
        return rng.choice(rng.choice((entries or self.base.entries, self.base.entries)))


def number(rng: random.Random, code: str, old: float | None = None) -> float:
    """A number that a field of this width may break on."""
    if code in "fd":
        return rng.choice((0.0, -0.0, -1.0, 1.0, 1e-45, 1e30, -1e30, *map(float, ("nan", "inf"))))
    whole = int(old) if isinstance(old, (int, float)) and old == old else 1
    near = (whole + 1, whole - 1, whole * 2, whole // 2, whole * 3, whole ^ 1 << rng.randrange(16))
    small = (0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 33, 63, 64, 100, 127, 128, 255, 256, 513, 1000)
    large = (2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1)
    return rng.choice((*near, *near, rng.choice(small), rng.choice(small), rng.choice(large)))


# --- changes ------------------------------------------------------------------------------------


def _set(rng: random.Random, key: str, kind: int, near: float | None = None) -> Edit:
    """A value of a type for a key."""
    value: Any = rng.choice(WORDS) if kind == STRING else number(rng, SCALARS.get(kind, "I"), near)
    return {"op": "set", "key": key, "type": kind, "value": value}


def _field(m: Mutator, rng: random.Random) -> list[Edit]:
    """A number of the header: a count, a length, a type, a dimension, an offset, a value."""
    field = rng.choice(rng.choice((m.scalars, m.scalars, m.fields)))
    return [{"op": "field", "name": field.name, "value": number(rng, field.code)}]


def _value(m: Mutator, rng: random.Random) -> list[Edit]:
    """Another value, mostly of the same type; or an array."""
    entry = m.entry(rng)
    key, kind = entry.key.decode(), STRING if entry.element is not None else entry.type
    if rng.random() < 0.4:
        kind = rng.choice((*SCALARS, STRING, 13, 99))
    edit = _set(rng, key, kind, None if isinstance(entry.value, (list, bytes)) else entry.value)
    if rng.random() < 0.1:
        edit |= {"element": kind, "value": [edit["value"]] * rng.choice((0, 1, 2, 4, 7, 2048))}
    return [edit]


def _optional(m: Mutator, rng: random.Random) -> list[Edit]:
    """A key that the loader reads where it is there: a value, or an array of mostly a length that
    it takes."""
    encoder = m.arch == "clip"
    if rng.random() < 0.67:
        key, kind = rng.choice(list((ENCODER_KEYS if encoder else READ_KEYS).items()))
        return [_set(rng, m.key(key), kind, 4)]
    key, kind = rng.choice(list((ENCODER_ARRAYS if encoder else ARRAY_KEYS).items()))
    blocks = m.base.entry(f"{m.arch}.block_count")
    n_blocks = blocks.value if blocks and isinstance(blocks.value, int) else 1
    n = rng.choice((n_blocks, n_blocks, 0, 3, 4, 2048))
    values = [_set(rng, key, kind, 4)["value"] for _ in range(4 if "sections" in key else n)]
    if rng.random() < 0.3:
        values = values[:1] * len(values)
    return [{"op": "set", "key": m.key(key), "element": kind, "value": values}]


def _keys(m: Mutator, rng: random.Random) -> list[Edit]:
    """A key goes, is renamed, or comes twice."""
    key = m.entry(rng).key.decode()
    op = rng.choice(("delete", "delete", "rename", "duplicate"))
    names = (rng.choice(m.keys), key + "\0", key[:-1], "", *WORDS[-6:])
    return [{"op": op, "key": key, **({"to": rng.choice(names)} if op == "rename" else {})}]


def _tokens(m: Mutator, rng: random.Random) -> list[Edit]:
    """Elements and lengths of the tokenizer's tables."""
    if not m.arrays:  # a part of a split model
        return _field(m, rng)
    key = rng.choice(m.arrays)
    entry = m.base.entry(key)
    n = len(entry.value) if entry and isinstance(entry.value, list) else 0
    if rng.random() < 0.3:
        length = max(0, min(int(number(rng, "I", n)), 3 * n))
        edits: list[Edit] = [{"op": "resize", "key": key, "length": length}]
        return edits + [{"op": "conform"}] * rng.randrange(2)
    edits = []
    for _ in range(rng.choice((1, 1, 2, 8))):
        edit: Edit = {"op": "element", "key": key, "index": rng.randrange(max(n, 1))}
        if entry and entry.element != STRING:
            edit["value"] = number(rng, SCALARS.get(entry.element or 4, "I"))
        elif rng.random() < 0.33:
            edit["from"] = rng.randrange(max(n, 1))
        else:
            text = rng.choice((*LETTERS, "x" * rng.choice((99, 70000))))
            edit["value"] = text.encode("latin-1", "replace").decode("latin-1")
        edits.append(edit)
    return edits


def _shape(rng: random.Random, shape: list[int]) -> list[int]:
    """Another shape: a number, the order, or the number of dimensions."""
    at = rng.randrange(len(shape))
    other = [*shape[:at], int(number(rng, "Q", shape[at])), *shape[at + 1 :]]
    flat = [shape[0] * (shape[1] if len(shape) > 1 else 1)]
    deep = shape + [1] * rng.choice((1, 2, 3, 9))
    half = [*shape[:-1], shape[-1] // 2, 2]
    return rng.choice((other, other, shape[::-1], flat, deep, half, []))


def _table(m: Mutator, rng: random.Random) -> list[Edit]:
    """Rows of the tensor table: names, shapes, types, offsets, with and without their bytes."""
    name = m.name(rng)
    tensor = m.base.tensor(name)
    assert tensor
    types = (*TENSOR_TYPES, *TENSOR_TYPES, 4, 31, 43, 255, 2**31)
    names = (m.name(rng), name + "\0", name + "x", "", "x" * 63, "x" * 64)
    kind = rng.choice(("type", "type", "shape", "shape", "to", "offset", "drop", "swap", "names"))
    if kind == "drop":
        return [{"op": "drop", "name": name}]
    if kind in ("swap", "names"):
        return [{"op": "swap", "name": name, "with": m.name(rng), "names": kind == "names"}]
    values = {
        "type": int(rng.choice(types)),
        "shape": _shape(rng, list(tensor.shape)),
        "to": rng.choice(names),
        "offset": int(number(rng, "Q", rng.randrange(m.size))),
    }
    return [{"op": "tensor", "name": name, "fit": rng.random() < 0.7, kind: values[kind]}]


def _extra(m: Mutator, rng: random.Random) -> list[Edit]:
    """A tensor more, of those that the loader takes where they are there."""
    extra = rng.choice(EXTRA_TENSORS)
    names = [tensor.name.decode() for tensor in m.base.tensors]
    block = rng.choice([name.split(".")[1] for name in names if name.startswith("blk.")] or ["0"])
    own = extra == "d2t" or extra.startswith(("output.", "rope"))
    to = extra if own else f"blk.{block}.{extra}"
    scale: Edit = {"op": "tensor", "name": to, "fit": True}
    if rng.random() < 0.8:
        scale["shape"] = rng.choice(([1], [192], [192, 2048], [512], [128], [2], [192, 300], [300]))
    if rng.random() < 0.6:
        scale["type"] = rng.choice((0, 0, 1, 8, 26, 27, 24, 28, 2))
    return [{"op": "copy", "name": m.name(rng), "to": to}, scale]


def _dimensions(m: Mutator, rng: random.Random) -> list[Edit]:
    """Other hyper-parameters, and tensors that have the shapes that follow from them."""
    edits: list[Edit] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        entry = m.entry(rng)
        if isinstance(entry.value, (list, bytes)):
            continue
        key, kind = entry.key.decode(), entry.type
        edits.append(_set(rng, key, kind, entry.value))
        if key.endswith(("ssm.state_size", "time_step_rank")) and rng.random() < 0.8:
            other = "time_step_rank" if key.endswith("size") else "state_size"
            factor = m.base.entry(f"{m.arch}.ssm.{other}")
            inner = int(edits[-1]["value"]) * int(factor.value if factor else 1)  # type: ignore
            inner_key = f"{m.arch}.ssm.inner_size"
            edits.append({"op": "set", "key": inner_key, "type": _U32, "value": inner})
    if rng.random() < 0.2:
        edits += _optional(m, rng)
    return [*edits, {"op": "conform"}]


def _bytes(m: Mutator, rng: random.Random) -> list[Edit]:
    """The file ends early or late, bytes are missing or too many, bits are flipped."""
    at: Any = rng.choice((rng.random(), rng.randrange(m.header), rng.randrange(64)))
    text, times = rng.choice(("\0", "\xff", "GGUF")), rng.choice((1, 4, 31, 32, 4096))
    kind = rng.choice(("truncate", "append", "cut", "insert", "flip", "flip"))
    if kind == "flip":
        places = [rng.choice((rng.random(), rng.randrange(m.header))) for _ in range(times // 16)]
        return [{"op": "flip", "at": at, "bit": rng.randrange(8)} for at in [at, *places]]
    if kind == "append":
        return [{"op": "insert", "at": 1.0, "text": text, "times": times}]
    return [{"op": kind, "at": at, "n": times, "text": text, "times": times}]


def _weights(m: Mutator, rng: random.Random) -> list[Edit]:
    """Weights that are not numbers, or too large, in one tensor or in several."""
    edits: list[Edit] = []
    for _ in range(rng.choice((1, 1, 2, 6))):
        edit = {"op": "weights", "name": m.name(rng), "fill": rng.choice(WEIGHTS)}
        edit |= rng.choice(({}, {"at": rng.random(), "n": rng.choice((1, 16, 4096))}))
        edits.append(edit | {"seed": rng.randrange(99)})
    return edits


_CHANGES: dict[Callable[[Mutator, random.Random], list[Edit]], float] = {
    _field: 12,
    _value: 16,
    _optional: 15,
    _keys: 5,
    _tokens: 8,
    _table: 12,
    _extra: 6,
    _dimensions: 12,
    _bytes: 15,
    _weights: 6,
}
