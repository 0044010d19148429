"""``pyllama-mtp quantize``: make a smaller model file of an F16 one."""

from __future__ import annotations

import argparse

from pyllama_mtp.cli import parsing
from pyllama_mtp.models.ggufinfo import read_gguf
from pyllama_mtp.models.hub import local_file
from pyllama_mtp.models.quantize import FILE_TYPES, WEIGHT_TYPES, quantize_model

_EPILOG = """\
A type such as q4_k_m is a mixture: llama.cpp chooses a type for each tensor, as
its llama-quantize does. What it chose is shown at the end.

examples:
  pyllama-mtp quantize Qwen3.5-4B-F16.gguf Qwen3.5-4B-Q4_K_M.gguf --type q4_k_m
  pyllama-mtp quantize IN.gguf OUT.gguf --type iq4_xs --head-type q8_0
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``quantize`` command."""
    parser = subparsers.add_parser(
        "quantize",
        help="make a smaller model file of an F16 one, as llama-quantize does",
        description="Quantize a GGUF model, MTP head included, with llama.cpp's own quantizer.",
        epilog=_EPILOG,
        formatter_class=parsing.HelpFormatter,
    )
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
        help="type of the MTP block's matrices, instead of what --type makes of them: "
        + ", ".join(WEIGHT_TYPES),
    )
    parser.add_argument(
        "--requantize",
        action="store_true",
        help="also take a model that is quantized already; it loses more than by quantizing once",
    )
    parser.add_argument(
        "--threads", type=parsing.whole(1), default=0, metavar="N", help="default: all cores"
    )
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the file and say what its tensors became."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(args.type.lower(), total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        path = quantize_model(
            local_file(args.input),
            args.output,
            args.type.lower(),
            head_type=args.head_type and args.head_type.lower(),
            requantize=args.requantize,
            n_threads=args.threads,
            progress=progress,
            force=args.force,
        )
    info = read_gguf(path)
    total = sum(info.tensor_types.values())
    types = ", ".join(f"{kind} {100 * n / total:.0f} %" for kind, n in info.tensor_types.items())
    print(f"{path}: {args.type.lower()}, {info.size / 1e9:.2f} GB ({types})")
    return 0
