"""Write the trained model as GGUF, and read it back.

Matrices are stored as F16 or Q8_0, everything else as F32. Evaluation always works on
`load(file)`, so every figure is about exactly the weights that ship. Names and metadata follow
llama.cpp's qwen35: the MTP block is block `n_layer`, and `block_count` counts it.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer

from .chat import END_OF_TEXT, IM_END
from .net import Config, Model
from .tokenizer import ADDED, SPECIAL, VISION

ARCH = "qwen35"
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
F32, F16, Q8_0 = (getattr(gguf.GGMLQuantizationType, name) for name in ("F32", "F16", "Q8_0"))

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)

#: Sizes of the model, and their keys in the file after the architecture's name.
KEYS = {
    "n_ctx": "context_length",
    "n_embd": "embedding_length",
    "n_ff": "feed_forward_length",
    "n_head": "attention.head_count",
    "n_head_kv": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "eps": "attention.layer_norm_rms_epsilon",
    "rope_base": "rope.freq_base",
    "n_rot": "rope.dimension_count",
    "interval": "full_attention_interval",
    "conv": "ssm.conv_kernel",
    "gdn_dim": "ssm.state_size",
    "gdn_heads": "ssm.time_step_rank",
    "n_vocab": "vocab_size",
}
SHARED = {
    "attn_norm.weight": "attn_norm.weight",
    "post_norm.weight": "post_attention_norm.weight",
    "ffn.gate.weight": "ffn_gate.weight",
    "ffn.up.weight": "ffn_up.weight",
    "ffn.down.weight": "ffn_down.weight",
}
ATTENTION = SHARED | {
    "mixer.wq.weight": "attn_q.weight",
    "mixer.wk.weight": "attn_k.weight",
    "mixer.wv.weight": "attn_v.weight",
    "mixer.wo.weight": "attn_output.weight",
    "mixer.q_norm.weight": "attn_q_norm.weight",
    "mixer.k_norm.weight": "attn_k_norm.weight",
}
DELTA = SHARED | {
    "mixer.qkv.weight": "attn_qkv.weight",
    "mixer.z.weight": "attn_gate.weight",
    "mixer.beta.weight": "ssm_beta.weight",
    "mixer.alpha.weight": "ssm_alpha.weight",
    "mixer.conv": "ssm_conv1d.weight",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.a_log": "ssm_a",  # stored as -exp(a_log)
    "mixer.norm.weight": "ssm_norm.weight",
    "mixer.out.weight": "ssm_out.weight",
}
HEAD = {
    "head.e_norm.weight": "nextn.enorm.weight",
    "head.h_norm.weight": "nextn.hnorm.weight",
    "head.eh_proj.weight": "nextn.eh_proj.weight",
    "head.norm.weight": "nextn.shared_head_norm.weight",
}


def names(config: Config) -> dict[str, str]:
    """Our parameter name -> GGUF tensor name, in the file's order."""
    table = {"embed": "token_embd.weight", "norm.weight": "output_norm.weight"}
    for i in range(config.n_layer):
        attention = (i + 1) % config.interval == 0
        for ours, theirs in (ATTENTION if attention else DELTA).items():
            table[f"blocks.{i}.{ours}"] = f"blk.{i}.{theirs}"
    last = f"blk.{config.n_layer}"
    table |= {f"head.block.{ours}": f"{last}.{theirs}" for ours, theirs in ATTENTION.items()}
    return table | {ours: f"{last}.{theirs}" for ours, theirs in HEAD.items()}


def stored(
    name: str, value: torch.Tensor, matrices: gguf.GGMLQuantizationType
) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """What goes into the file, and its type: `matrices`, and F32 for vectors and convolutions."""
    array = value.detach().float().numpy()
    if name.endswith("a_log"):
        array = -np.exp(array)
    kind = matrices if array.ndim == 2 and not name.endswith("conv") else F32
    return gguf.quants.quantize(np.ascontiguousarray(array), kind), kind


def _dimensions(writer: gguf.GGUFWriter, c: Config) -> None:
    half = c.n_rot // 2  # frequencies are dealt out to the three axes in turn: 8 -> 3, 3, 2
    writer.add_rope_dimension_sections([(half + 2 - axis) // 3 for axis in range(3)] + [0])
    sizes = {key: getattr(c, name) for name, key in KEYS.items()} | {
        "block_count": c.n_layer + 1,
        "nextn_predict_layers": 1,
        "attention.value_length": c.head_dim,
        "ssm.group_count": c.gdn_heads,
        "ssm.inner_size": c.gdn_heads * c.gdn_dim,
    }
    for key, value in sizes.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{ARCH}.{key}", value)


def _vocabulary(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    kinds = dict.fromkeys((*SPECIAL, *VISION), CONTROL) | dict.fromkeys(ADDED, USER_DEFINED)
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list([token for token, _ in by_id])
    writer.add_token_types([kinds.get(token, NORMAL) for token, _ in by_id])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(tokenizer.token_to_id(IM_END))
    writer.add_eot_token_id(tokenizer.token_to_id(IM_END))
    writer.add_pad_token_id(tokenizer.token_to_id(END_OF_TEXT))
    writer.add_bos_token_id(tokenizer.token_to_id(END_OF_TEXT))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def export(
    model: Model,
    tokenizer: Tokenizer,
    path: Path,
    training: dict[str, float],
    matrices: gguf.GGMLQuantizationType = F16,
    name: str = "demo",
) -> None:
    """Write `model` to `path`; `training` (step, tokens, seed) is recorded in the metadata."""
    partial = path.with_suffix(".part")
    writer = gguf.GGUFWriter(partial, ARCH)
    writer.add_type("model")
    writer.add_name(f"pyllama-mtp {name}")
    writer.add_basename(f"pyllama-mtp-{name}")
    writer.add_description("Miniature Qwen3.5 with an MTP head, for tests and demonstrations")
    writer.add_size_label(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M")
    writer.add_license("mit")
    writer.add_languages(["en"])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{matrices.name}"])
    for key, value in training.items():
        writer.add_uint64(f"demo.training.{key}", int(value))
    _dimensions(writer, model.c)
    _vocabulary(writer, tokenizer)
    state = model.state_dict()
    for ours, theirs in names(model.c).items():
        array, kind = stored(ours, state[ours], matrices)
        writer.add_tensor(theirs, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(path)


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """GGUF tensor name -> float32 array with PyTorch's axis order."""
    return {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type)
        .astype(np.float32)
        .reshape([int(n) for n in t.shape[::-1]])
        for t in gguf.GGUFReader(path).tensors
    }


def read_config(path: Path) -> Config:
    """The sizes, from the file's metadata."""
    fields = gguf.GGUFReader(path).fields
    values = {name: fields[f"{ARCH}.{key}"].contents() for name, key in KEYS.items()}
    return Config(**values, n_layer=fields[f"{ARCH}.block_count"].contents() - 1)


def load(path: Path) -> Model:
    """The model in the file, its weights as float32."""
    model = Model(read_config(path))
    tensors = read_tensors(path)
    state = {}
    for ours, theirs in names(model.c).items():
        array = tensors[theirs]
        state[ours] = torch.from_numpy(np.log(-array) if ours.endswith("a_log") else array)
    model.load_state_dict(state)
    return model.eval()
