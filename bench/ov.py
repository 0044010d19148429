#!/usr/bin/env python3
"""OpenVINO GenAI beside this package, on the weights of one of its GGUF files, on a CPU.

    python bench/ov.py write FILE.gguf HF      # a checkpoint for Hugging Face's transformers
    optimum-cli export openvino -m HF/text --task text-generation-with-past \\
        --weight-format int4 --group-size-fallback ignore OV/text
    optimum-cli export openvino -m HF/mtp --task image-text-to-text \\
        --weight-format int4 --group-size-fallback ignore OV/mtp
    python bench/ov.py measure OV SAMPLES.jsonl --model FILE.gguf --ours PYTHON --prompt 512

For int8 write `--weight-format int8` alone. `write` needs gguf, torch and safetensors; the export
optimum-intel with transformers 5.2, which exports the MTP block of Qwen3.5 only with a model that
sees images: HF/mtp is one, with a small vision tower of random weights. Use another GGUF file of
the same weights to write from: the quantization of the measured one would be rounded again.

`measure` runs in OpenVINO's environment; PYTHON is an interpreter that has this package. Sides:
`ours:K` with K drafts; `sdpa`, LLMPipeline with stateful attention; `pa`, paged attention, which
MTP needs; `mtp:K`. Each sample is a line of SAMPLES.jsonl, to which other starts add theirs;
medians of all are printed. Each repetition has another prompt, the same for all sides, and every
side decodes greedily. Prefill is up to the first token; decoding from there to the end of the call.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

#: GGUF's names in a block, and transformers'.
BLOCK = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
}
OTHERS = {
    "token_embd.weight": "model.language_model.embed_tokens.weight",
    "output_norm.weight": "model.language_model.norm.weight",
    "output.weight": "lm_head.weight",
}
#: Dimensions: transformers' names, and GGUF's keys.
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_value_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval",
    "mtp_num_hidden_layers": "nextn_predict_layers",
}
#: What splits text before BPE, as Qwen's tokenizer does.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    **{"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2},
    **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
}

#: This package's side: lines of [drafts, prompt, tokens] become lines of results.
WORKER = """
import json, sys
from pyllama_mtp import Model, Session, Settings
plan = json.loads(sys.stdin.readline())
model = Model(plan["model"])
settings = {"n_ctx": plan["n"] + plan["tokens"] + 64, "n_threads": plan["threads"], "ngram": False}
sessions = {d: Session(model, Settings(draft_n_max=d, **settings)) for d in plan["depths"]}
for line in sys.stdin:
    depth, prompt, tokens = json.loads(line)
    run = sessions[depth].generate(prompt, max_tokens=tokens, ignore_eos=True).run()
    t, n = run.telemetry, run.telemetry.n_generated - 1
    found = {"prefill": t.prefill_tps, "decode": t.decode_tps, "per_round": n / (t.rounds or n)}
    found |= {"n_prompt": t.n_prompt - t.n_cached, "n": t.n_generated}
    found |= {"tokens": list(run.tokens), "text": model.detokenize(run.tokens)}
    print(json.dumps(found), flush=True)
"""


def transformers_name(name: str, n_layer: int) -> str:
    """What transformers calls a tensor of a GGUF file."""
    if name in OTHERS:
        return OTHERS[name]
    _, layer, part = name.split(".", 2)
    stem = part.removesuffix(".weight")
    found = BLOCK[stem] + part[len(stem) :]
    if int(layer) < n_layer:
        return f"model.language_model.layers.{layer}.{found}"
    return f"mtp.{found}" if stem.startswith("nextn.") else f"mtp.layers.0.{found}"


def as_stored(name: str, data: Any) -> Any:
    """The values of a tensor before llama.cpp's conversion."""
    if name.endswith("ssm_a"):
        return np.log(-data)
    if name.endswith("conv1d.weight"):
        return data[:, None, :]
    return data - 1 if name.endswith("norm.weight") and "ssm_norm" not in name else data


def write(gguf: str, folder: Path) -> None:
    """Write the two checkpoints, of the text model alone and of the one with the MTP block."""
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    names = {tensor.name for tensor in reader.tensors}

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    text = {name: value(f"qwen35.{key}") for name, key in KEYS.items()}
    if text["linear_num_key_heads"] != text["linear_num_value_heads"]:
        raise SystemExit("ov: conversion has reordered value heads, which this script cannot undo")
    tokens, types = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.token_type")
    text |= {
        "model_type": "qwen3_5_text",
        "vocab_size": len(tokens),
        "num_hidden_layers": value("qwen35.block_count") - text["mtp_num_hidden_layers"],
        "tie_word_embeddings": "output.weight" not in names,
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "dtype": "float32",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": value("qwen35.rope.freq_base"),
            "partial_rotary_factor": value("qwen35.rope.dimension_count") / text["head_dim"],
            "mrope_section": value("qwen35.rope.dimension_sections")[:3],
            "mrope_interleaved": True,
        },
    }
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2}
    images = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {**vision, "out_hidden_size": text["hidden_size"]},
        "tie_word_embeddings": text["tie_word_embeddings"],
        "dtype": "float32",
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    level["trim_offsets"] = False
    split = {"type": "Split", "pattern": {"Regex": PIECES}, "behavior": "Isolated", "invert": False}
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [merge.split(" ") for merge in value("tokenizer.ggml.merges")]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [i for i, kind in enumerate(types) if kind == 3]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": tokens[i], "special": True, **flags} for i in special
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    files = {
        "text/config.json": {"architectures": ["Qwen3_5ForCausalLM"], **text},
        "mtp/config.json": images,
        "mtp/preprocessor_config.json": PROCESSOR,
        "mtp/tokenizer.json": tokenizer,
        "mtp/tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    weights = {}
    for tensor in reader.tensors:
        name, data = tensor.name, dequantize(tensor.data, tensor.tensor_type)
        stored = torch.tensor(as_stored(name, data), dtype=torch.float32).contiguous()
        weights[transformers_name(name, text["num_hidden_layers"])] = stored
    save_file(weights, folder / "mtp" / "model.safetensors", metadata={"format": "pt"})
    link = folder / "text" / "model.safetensors"
    link.unlink(missing_ok=True)
    link.symlink_to("../mtp/model.safetensors")


class Theirs:
    """Pipelines of OpenVINO GenAI for some sides."""

    def __init__(self, folder: Path, sides: list[str], args: argparse.Namespace) -> None:
        import openvino_genai as genai

        self.genai, self.pipelines = genai, {}
        self.tokenizer = genai.Tokenizer(folder / "mtp")
        device = {"INFERENCE_NUM_THREADS": args.threads, "PERFORMANCE_HINT": "LATENCY"}
        if args.precision:
            device["INFERENCE_PRECISION_HINT"] = args.precision
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = sys.maxsize  # as LLMPipeline has it
        for side in sides:
            kind = side.partition(":")[0]
            if kind in self.pipelines:
                continue
            if kind == "sdpa":
                pipeline = genai.LLMPipeline(
                    folder / "text", "CPU", ATTENTION_BACKEND="SDPA", **device
                )
            else:
                more = {}
                if kind == "mtp":
                    draft = genai.draft_model(folder / "mtp", "CPU", mtp_mode=True, **device)
                    more["draft_model"] = draft
                pipeline = genai.ContinuousBatchingPipeline(
                    folder / "mtp", scheduler, "CPU", {**device, **more}
                )
            self.pipelines[kind] = pipeline

    def prompt(self, number: int, n: int) -> tuple[list[int], str]:
        """Tokens that are a word each, and their text: OpenVINO's BPE splits others differently."""
        ids = random.Random(number).choices(range(2000, 240000), k=n)
        text = self.tokenizer.decode(ids)
        if self.tokenizer.encode(text).input_ids.data[0].tolist() != ids:
            raise SystemExit("ov: OpenVINO's tokenizer makes other tokens of the prompt's text")
        return ids, text

    def run(self, side: str, ids: list[int], text: str, tokens: int) -> dict[str, Any]:
        """Speeds, tokens per round, and the answer."""
        import openvino

        kind, _, depth = side.partition(":")
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = tokens, True
        config.do_sample = config.apply_chat_template = False
        if depth:
            config.num_assistant_tokens = int(depth)
        began = time.perf_counter()
        if kind == "sdpa":
            done = self.pipelines[kind].generate(openvino.Tensor(np.array([ids])), config)
            found = {"tokens": list(done.tokens[0])}
        else:  # paged attention takes a model with embeddings of its own only from text
            done = self.pipelines[kind].generate([text], [config])[0]
            found = {"text": done.m_generation_ids[0]}
        seconds, metrics = time.perf_counter() - began, done.perf_metrics
        first = metrics.get_ttft().mean / 1e3
        found["n_prompt"] = metrics.get_num_input_tokens()
        found["n"] = metrics.get_num_generated_tokens()
        after, accepted = found["n"] - 1, 0
        if depth:
            speculative = done.extended_perf_metrics
            accepted = found["accepted"] = speculative.get_num_accepted_tokens()
            found["drafted"] = speculative.get_num_draft_tokens()
        found["per_round"] = after / (after - accepted)
        return {**found, "prefill": len(ids) / first, "decode": after / (seconds - first)}


def measure(args: argparse.Namespace) -> None:
    """One start of all sides; their samples go to the file."""
    lines = args.samples.read_text().splitlines() if args.samples.exists() else []
    samples = [json.loads(line) for line in lines]
    first = max((s["number"] for s in samples if s["prompt"] == args.prompt), default=0) + 1
    depths = [int(side[5:]) for side in args.sides if side.startswith("ours:")]
    plan = {"model": str(args.model.resolve()), "n": args.prompt, "tokens": args.tokens}
    plan |= {"threads": args.threads, "depths": depths}
    pipe = subprocess.PIPE
    command = [args.ours, "-c", WORKER]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd="/") as ours:
        assert ours.stdin and ours.stdout

        def tell(what: Any) -> None:
            ours.stdin.write(json.dumps(what) + "\n")
            ours.stdin.flush()

        tell(plan)
        theirs = Theirs(args.folder, [s for s in args.sides if not s.startswith("ours")], args)
        for number in [0, *range(first, first + args.repeats)]:  # 0: a warm-up
            n, tokens = (args.prompt, args.tokens) if number else (min(args.prompt, 512), 8)
            ids, text = theirs.prompt(number, n)
            for side in args.sides if number % 2 else args.sides[::-1]:
                if side.startswith("ours:"):
                    tell([int(side[5:]), ids, tokens])
                    found = json.loads(ours.stdout.readline())
                else:
                    found = theirs.run(side, ids, text, tokens)
                sample = {"prompt": args.prompt, "number": number, "side": side, **found}
                if number:
                    samples.append(sample)
                    with args.samples.open("a") as file:
                        file.write(json.dumps(sample) + "\n")
        ours.stdin.close()
    report(samples)


def report(samples: list[dict[str, Any]]) -> None:
    """Print medians, and for how many characters the answers agree with this package's."""
    answers = {(s["prompt"], s["number"]): s for s in samples if s["side"] == "ours:0"}
    print("prompt side      samples  prefill  decode  tokens/round  same text as ours:0")
    for prompt, side in sorted({(s["prompt"], s["side"]) for s in samples}):
        found = [s for s in samples if (s["prompt"], s["side"]) == (prompt, side)]
        values = [median(s[k] for s in found) for k in ("prefill", "decode", "per_round")]
        same = [agreement(s, answers.get((prompt, s["number"]), s)) for s in found]
        figures = "{:8.1f} {:7.2f} {:13.2f}".format(*values)
        print(f"{prompt:6} {side:9} {len(found):7} {figures}  {same}")


def agreement(sample: dict[str, Any], ours: dict[str, Any]) -> float:
    """The share of the answer that two samples begin with."""
    key = "tokens" if "tokens" in sample and "tokens" in ours else "text"
    pairs = list(zip(sample[key], ours[key], strict=False))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return round(same / max(len(ours[key]), 1), 2)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = parser.add_subparsers(dest="mode", required=True)
    writes = modes.add_parser("write")
    writes.add_argument("gguf")
    writes.add_argument("folder", type=Path)
    add = modes.add_parser("measure").add_argument
    add("folder", type=Path, help="with the exports text and mtp")
    add("samples", type=Path)
    add("--model", required=True, type=Path)
    add("--ours", required=True, metavar="PYTHON")
    add("--sides", default="ours:0,sdpa,pa,ours:3,mtp:1,mtp:2,mtp:3", type=lambda s: s.split(","))
    add("--prompt", type=int, default=512, metavar="N")
    add("--tokens", type=int, default=128, metavar="N")
    add("--repeats", type=int, default=3, metavar="N")
    add("--precision", choices=("f32", "bf16"), help="of OpenVINO's activations; default: its own")
    add("--threads", type=int, default=2, metavar="N")
    args = parser.parse_args()
    if args.mode == "write":
        write(args.gguf, args.folder)
    else:
        measure(args)


if __name__ == "__main__":
    main()
