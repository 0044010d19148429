"""Describe a GGUF model file without loading or downloading it: architecture, layers, MTP head,
tensor types, and the memory it needs for a context, against what is available.

examples:
  pyllama-mtp inspect model.gguf
  pyllama-mtp inspect hf:OWNER/REPO:Q4_K_M --n-ctx 32768 --cache-type-k q8_0
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyllama_mtp.cli import options
from pyllama_mtp.errors import LibraryError, ModelFileError, PyllamaMtpError
from pyllama_mtp.measure.verdict import slow_types, slow_verdict, step_shares
from pyllama_mtp.models.architectures import used
from pyllama_mtp.models.ggufinfo import read_gguf, trimmed_head_problems
from pyllama_mtp.models.hub import described
from pyllama_mtp.models.mmproj import find_mmproj, read_mmproj
from pyllama_mtp.models.modelinfo import GGUFInfo
from pyllama_mtp.models.sidecar import NO_HEAD, is_head
from pyllama_mtp.settings import Settings

if TYPE_CHECKING:
    from pyllama_mtp.memory import DeviceMemory

    Needed = dict[str, list[DeviceMemory]]
    SlowTypes = dict[str, float] | None

_PROPERTIES = (
    *("supported", "has_mtp", "mtp_complete", "mtp_missing", "most_drafts"),
    *("tensor_types", "n_params", "step_types"),
)
_PARTS = {
    "weights": "weights",
    "target_context": "caches and states",
    "draft_context": "draft cache",
    "target_compute": "graph buffers",
    "draft_compute": "draft graph buffers",
    "outputs": "rows of logits",
    "checkpoints": "checkpoints",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    file = "a .gguf file, or hf:OWNER/REPO[:QUANT] (default: the bundled demo model)"
    parser.add_argument("model", nargs="?", metavar="FILE", help=file)
    parser.add_argument(
        "--head", metavar="FILE|none", help="a .gguf file with the MTP head; see 'generate --help'"
    )
    parser.add_argument(
        "--n-ctx", type=int, default=8192, metavar="N", help="context length in tokens"
    )
    for name in ("cache_type_k", "cache_type_v"):
        options.add_field(parser, Settings, name)
    parser.add_argument(
        "--depth",
        type=int,
        default=3,
        metavar="K",
        help="drafts per round; room to take them back is part of the memory",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Read the header and print the description."""
    with described(args.model or str(options.model_path(args))) as (file, told):
        return _describe(args, file, told)


def _describe(args: argparse.Namespace, file: str, told: Callable[[str], str]) -> int:
    """`told`: the text for a text that may name the file."""
    info = read_gguf(file, args.head)
    k, v, slow = args.cache_type_k, args.cache_type_v, _slow_types(info)
    settings = Settings(n_ctx=args.n_ctx, cache_type_k=k, cache_type_v=v, draft_n_max=args.depth)
    try:
        (needed, ubatch, costs), why = _needed(info, settings), ""
    except PyllamaMtpError as error:  # a model that cannot be loaded can still be described
        needed, ubatch, costs, why = {}, None, [], told(str(error))
    mmproj, why_blind = _mmproj(info)
    mmproj, why_blind = mmproj and told(mmproj), told(why_blind)
    info = replace(info, path=told(info.path), head=info.head and told(info.head))
    if args.json:
        print(json.dumps(_as_json(info, mmproj, args.n_ctx, needed, ubatch, why, slow), indent=2))
        return 0
    _print_model(info, f"seen with {mmproj}" if mmproj else f"not seen: {why_blind}")
    _print_step(info, slow)
    print(f"memory, context {args.n_ctx}, cache {k}/{v}, draft depth {args.depth}:")
    if why:
        print(f"  unknown: {why}")
    else:
        _print_memory(needed)
    if ubatch:
        print(f"n_ubatch {ubatch[0]}: {ubatch[1]}")
    for cost in costs:
        print(f"cache {k}/{v}: {cost}")
    return 0


def _needed(info: GGUFInfo, settings: Settings) -> tuple[Needed, tuple[int, str], list[str]]:
    """What llama.cpp would allocate in each memory, without MTP and with it; tokens per graph,
    and why so many; and what the types of the caches cost."""
    from pyllama_mtp.llama.cachetypes import cache_costs
    from pyllama_mtp.llama.model import Model
    from pyllama_mtp.memory import resolve, simulate, why_ubatch

    def of(mtp: bool) -> tuple[list[DeviceMemory], tuple[int, str], list[str]]:
        chosen = settings if mtp else replace(settings, draft_n_max=0)
        with Model(info.path, mtp=mtp, no_alloc=True, head=info.head or NO_HEAD) as model:
            resolved = resolve(chosen, model)
            n_ubatch = resolved.settings.ubatch
            costs = cache_costs(model, settings.cache_type_k, settings.cache_type_v)
            return simulate(model, resolved), (n_ubatch, why_ubatch(model, n_ubatch)), costs

    without = of(False)
    drafts = info.has_mtp and info.supported and settings.depth_limit
    with_mtp = of(True) if drafts else without
    return {"no_mtp": without[0], "mtp": with_mtp[0]}, *with_mtp[1:]


def _print_memory(needed: Needed) -> None:
    print(f"  {'':24}{'no MTP':>12}{'MTP':>12}")

    def line(label: str, figures: list[int]) -> None:
        print(f"  {label:24}" + "".join(f" {n / 2**20:.1f} MiB".rjust(12) for n in figures))

    for part, label in _PARTS.items():
        columns = [[one.parts[part] for one in e if part in one.parts] for e in needed.values()]
        if all(columns):
            line(label, [sum(figures) for figures in columns])
        else:
            print(f"  {label:24}{'not known':>12}")
    line("total", [sum(one.total for one in e) for e in needed.values()])
    for without, one in zip(*needed.values(), strict=True):
        line(f"in {one.name}", [without.total, one.total])
        verdict = "enough" if one.total <= one.free else "NOT ENOUGH"
        print(f"  {'    free now':24}{'':12}{one.free / 2**20:8.1f} MiB  ({verdict})")


def _slow_types(info: GGUFInfo) -> SlowTypes:
    """Types without a fast path on this CPU, and their shares of a decode step's bytes; None if the
    native library cannot be loaded."""
    from pyllama_mtp.llama import native

    try:
        return slow_types(info, native.load())
    except LibraryError:
        return None


def _print_step(info: GGUFInfo, slow: SlowTypes) -> None:
    """Print which types a decode step reads, and what that means for MTP on this CPU."""
    active = f", {info.n_expert_used} of {info.n_expert} experts" if info.n_expert else ""
    print(f"a decode step reads (matrices{active}):{'':8}a few rows on this CPU")
    for kind, share in step_shares(info).items():
        size = info.step_types[kind] / 2**20
        fast = "unknown" if slow is None else "no fast path" if kind in slow else "fast"
        print(f"  {kind:24}{size:8.1f} MiB{100 * share:7.1f} %   {fast}")
    if info.has_mtp and info.supported and (why := slow_verdict(slow or {})):
        print(why)


def _mtp_text(info: GGUFInfo) -> str:
    if not info.has_mtp:
        return "none"
    if not info.supported:
        return info.why_no_mtp
    if is_head(info):
        return "the file is an MTP head alone; give it as --head with its model"
    problems = trimmed_head_problems(info)
    if problems:
        return f"MALFORMED, {problems[0]}"
    if info.mtp_complete:
        head = info.trimmed_head
        part = f", trimmed to {head.n_rows} of {info.n_vocab} tokens" if head else ""
        where = f", in {info.head}" if info.head else ""
        blocks = f"{info.n_mtp_layers} block" + ("s" if info.n_mtp_layers > 1 else "")
        return f"complete ({blocks}{part}){where}"
    return f"INCOMPLETE, missing {', '.join(info.mtp_missing[:4])}"


def _drafting_rows(info: GGUFInfo) -> dict[str, str]:
    """How drafts are made, if the head cannot live in the trunk's context."""
    if info.in_trunk or not info.mtp_complete:
        return {}
    most = f", {info.most_drafts} drafts per round at most" if info.most_drafts else ""
    apply, others = used(info.abilities)
    return {
        "drafting": "upstream's way: the head in a context of its own, step by step" + most,
        "  in use": ", ".join(apply),
        "  not in use": f"{', '.join(others)}: the graphs of {info.architecture} are upstream's",
    }


def _mmproj(info: GGUFInfo) -> tuple[str | None, str]:
    """The image encoder that is used for the model; if there is none, why."""
    path = find_mmproj(info.path)
    if not path:
        return None, "no mmproj*.gguf for it beside the file"
    try:
        tower = read_mmproj(path)
    except ModelFileError as error:
        return None, str(error)
    if not isinstance(tower, str) and tower.n_embd != info.n_embd:
        return None, f"{path} is for models of width {tower.n_embd}"
    return str(path), ""


def _print_model(info: GGUFInfo, images: str) -> None:
    kinds = f"{len(info.attention_layers)} full attention, {len(info.recurrent_layers)} recurrent"
    trunk = f" ({kinds})" if info.validated else ""
    types = ", ".join(f"{t} {n / 2**20:.1f} MiB" for t, n in info.tensor_types.items())
    experts = f", {info.n_expert} experts ({info.n_expert_used} used)" if info.n_expert else ""
    rows = {
        "file": f"{info.path} ({info.size / 1e6:.1f} MB, GGUF {info.version})",
        "name": info.name + (" [synthetic: random weights]" if info.synthetic else ""),
        "architecture": info.architecture + ("" if info.supported else " (without MTP)"),
        "layers": f"{info.n_layer}{trunk}",
        "MTP head": _mtp_text(info),
        **_drafting_rows(info),
        "images": images,
        "width": f"{info.n_embd}, {info.n_head} heads ({info.n_head_kv} KV) of "
        f"{info.head_dim_k}{experts}",
        "vocabulary": f"{info.n_vocab} ({info.tokenizer_model}, {info.tokenizer_pre})"
        + (", chat template" if info.has_chat_template else ", no chat template"),
        "trained context": str(info.context_length),
        "parameters": f"{info.n_params / 1e6:.1f} million",
        "tensors": f"{len(info.tensors)} ({types})",
    }
    for label, text in rows.items():
        print(f"{label:16}{text}")


def _as_json(
    info: GGUFInfo,
    mmproj: str | None,
    n_ctx: int,
    needed: Needed,
    ubatch: tuple[int, str] | None,
    why: str,
    slow: SlowTypes,
) -> dict[str, Any]:
    skipped = ["tensors", "metadata", "head_tensors"]
    if not info.validated:  # only the native library knows the kinds of the layers
        skipped += ["attention_layers", "recurrent_layers", "full_attention_interval"]
    head = info.trimmed_head
    return {
        **{k: v for k, v in vars(info).items() if k not in skipped},
        **{name: getattr(info, name) for name in _PROPERTIES},
        "mtp_in_trunk": info.in_trunk,
        "mtp_trimmed_to": head.n_rows if head else None,
        "mmproj": mmproj,
        "n_tensors": len(info.tensors),
        "slow_types": slow,
        "memory": {
            "n_ctx": n_ctx,
            "n_ubatch": ubatch[0] if ubatch else None,
            **{
                kind: {
                    "total": sum(one.total for one in memories),
                    "devices": {
                        one.name: {**one.parts, "total": one.total, "free": one.free}
                        for one in memories
                    },
                }
                for kind, memories in needed.items()
            },
            "unknown": why or None,
        },
    }
