"""Quantize a GGUF model, MTP head included, with llama.cpp's own quantizer.

A type such as q4_k_m is a mixture: llama.cpp chooses a type for each tensor, as
its llama-quantize does. The chosen types are shown at the end.

examples:
  pyllama-mtp quantize Qwen3.5-4B-F16.gguf Qwen3.5-4B-Q4_K_M.gguf --type q4_k_m
  pyllama-mtp quantize IN.gguf OUT.gguf --type iq4_xs --head-type q8_0
"""

from __future__ import annotations

import argparse

from pyllama_mtp.cli import parsing, progress
from pyllama_mtp.models.ggufinfo import read_gguf
from pyllama_mtp.models.hub import local_file
from pyllama_mtp.models.quantize import FILE_TYPES, WEIGHT_TYPES, quantize_model


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the files and options."""
    parser.add_argument(
        "input",
        metavar="IN.gguf",
        help="a model in F16, BF16 or F32: a file, or hf:OWNER/REPO[:QUANT]",
    )
    parser.add_argument("output", metavar="OUT.gguf", help="file to write")
    parser.add_argument(
        "--type", required=True, metavar="TYPE", help="file type: " + ", ".join(FILE_TYPES)
    )
    parser.add_argument(
        "--head-type",
        metavar="TYPE",
        help="another type for the MTP block's matrices: " + ", ".join(WEIGHT_TYPES),
    )
    parser.add_argument(
        "--requantize",
        action="store_true",
        help="also take a model that is quantized already; quantizing twice loses more",
    )
    parsing.add_whole(parser, "--threads", default=0, help="default: all cores")
    parsing.add_force_option(parser)


def run(args: argparse.Namespace) -> int:
    """Write the file and say what its tensors became."""
    kind, head = args.type.lower(), args.head_type and args.head_type.lower()
    with progress.file(kind) as tell:
        path = quantize_model(
            local_file(args.input),
            args.output,
            kind,
            head_type=head,
            requantize=args.requantize,
            n_threads=args.threads,
            progress=tell,
            force=args.force,
        )
    info = read_gguf(path)
    total = sum(info.tensor_types.values())
    types = ", ".join(f"{kind} {100 * n / total:.0f} %" for kind, n in info.tensor_types.items())
    print(f"{path}: {args.type.lower()}, {info.size / 1e9:.2f} GB ({types})")
    return 0
