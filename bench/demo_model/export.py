"""Write the trained model as GGUF, and read it back.

Matrices are stored as F16 or Q8_0, everything else as F32. Evaluation always works on
`load(file)`, so every figure is about exactly the weights that ship. Names and metadata follow
llama.cpp's qwen35: the MTP block is block `n_layer`, and `block_count` counts it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer

from pyllama_mtp.models.modelinfo import describe
from pyllama_mtp.models.shapes import ModelShape
from pyllama_mtp.models.synth import add_dimensions

from .chat import END_OF_TEXT, IM_END
from .net import SHAPE, Model
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

#: Our parameters' names and the file's, in its order: of a layer, of both kinds, of the head.
LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
ATTENTION = LAYER | {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
}
DELTA = LAYER | {
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",  # stored as a matrix
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",  # stored as -exp(A_log)
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}
HEAD = {
    "e_norm.weight": "nextn.enorm.weight",
    "h_norm.weight": "nextn.hnorm.weight",
    "eh_proj.weight": "nextn.eh_proj.weight",
    "head.norm.weight": "nextn.shared_head_norm.weight",
}


def names(c: ModelShape) -> dict[str, str]:
    """Our parameter name -> GGUF tensor name, in the file's order."""
    table = {"trunk.embed_tokens.weight": "token_embd.weight"}
    table["trunk.norm.weight"] = "output_norm.weight"
    for i in range(c.n_layer):
        for ours, theirs in (DELTA if i in c.recurrent_layers else ATTENTION).items():
            table[f"trunk.layers.{i}.{ours}"] = f"blk.{i}.{theirs}"
    last = f"blk.{c.n_layer}"
    table |= {f"head.layers.0.{ours}": f"{last}.{theirs}" for ours, theirs in ATTENTION.items()}
    return table | {ours: f"{last}.{theirs}" for ours, theirs in HEAD.items()}


def _is_shifted(name: str) -> bool:
    """Whether w is stored as w - 1 by us: all norms but those of the delta net."""
    return name.endswith("norm.weight") and "linear_attn" not in name


def stored(
    name: str, value: torch.Tensor, matrices: gguf.GGMLQuantizationType
) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """What goes into the file, and its type: `matrices`, and F32 for vectors and convolutions."""
    array = value.detach().float().numpy()
    if name.endswith("A_log"):
        array = -np.exp(array)
    elif _is_shifted(name):
        array = array + 1
    kind = matrices if array.ndim == 2 else F32
    array = array[:, 0] if array.ndim == 3 else array
    return gguf.quants.quantize(np.ascontiguousarray(array), kind), kind


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
    add_dimensions(writer, model.c)
    writer.add_vocab_size(model.c.n_vocab)
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


def load(path: Path) -> Model:
    """The model in the file, its weights as float32."""
    model = Model(replace(SHAPE, n_vocab=describe(path).n_vocab))
    tensors = read_tensors(path)
    state = {}
    for ours, theirs in names(model.c).items():
        value = torch.from_numpy(tensors[theirs])
        if ours.endswith("A_log"):
            value = (-value).log()
        elif _is_shifted(ours):
            value = value - 1
        state[ours] = value[:, None] if ours.endswith("conv1d.weight") else value
    model.load_state_dict(state)
    return model.eval()
