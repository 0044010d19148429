"""Write a GGUF model of a published shape with random weights, MTP head included.
Nothing is downloaded. Its speed is the real model's, its text is nonsense.

examples:
  pyllama-mtp synth --list
  pyllama-mtp synth --shape qwen3.5-0.8b --type q4_k_m --head-noise 0.05 m.gguf
"""

from __future__ import annotations

import argparse

from pyllama_mtp.cli import parsing, progress
from pyllama_mtp.errors import UsageError
from pyllama_mtp.models.quantize import FILE_TYPES, WEIGHT_TYPES
from pyllama_mtp.models.shapes import SHAPES, get_shape
from pyllama_mtp.models.synth import TENSOR_TYPES, synthetic_size, write_synthetic


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", nargs="?", metavar="OUT.gguf", help="file to write")
    parser.add_argument(
        "--shape",
        default="qwen3.5-0.8b",
        metavar="NAME",
        help="one of: " + ", ".join(SHAPES),
    )
    parser.add_argument(
        "--type",
        default="q8_0",
        metavar="TYPE",
        help="file type, the same mixture of tensor types as llama.cpp's: " + ", ".join(FILE_TYPES),
    )
    parser.add_argument(
        "--head-type",
        metavar="TYPE",
        help="type of the MTP block's matrices: " + ", ".join(WEIGHT_TYPES),
    )
    parser.add_argument(
        "--pure",
        action="store_true",
        help="all matrices in one type, without a mixture's exceptions: " + ", ".join(TENSOR_TYPES),
    )
    parser.add_argument("--seed", type=int, default=0, help="same seed, same file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a dimension, as in --set n_layer=4; may be given several times",
    )
    parser.add_argument(
        "--head-noise",
        type=float,
        metavar="X",
        help="make the MTP head draft well: 0 is nearly always right, more noise less often "
        "(default: random weights, whose drafts are never accepted)",
    )
    parser.add_argument(
        "--empty",
        action="store_true",
        help="leave the weights out, as a hole in the file that takes no room: for 'inspect', "
        "which says what memory such a model needs",
    )
    parsing.add_force_option(parser)
    parser.add_argument("--list", action="store_true", help="list the shapes and exit")


def run(args: argparse.Namespace) -> int:
    """Write the file (or list the shapes) and say what was written."""
    if args.list:
        for shape in SHAPES.values():
            size = synthetic_size(shape, "q8_0") / 1e9
            print(f"{shape.name:17} {shape.architecture:10} {size:7.2f} GB as q8_0  {shape.source}")
        return 0
    if args.output is None:
        raise UsageError("give the file to write, as in pyllama-mtp synth model.gguf")
    shape = get_shape(args.shape, **dict(_assignment(text) for text in args.set))
    with progress.file(shape.name) as tell:
        path = write_synthetic(
            args.output,
            shape,
            args.type.lower(),
            args.seed,
            progress=tell,
            force=args.force,
            head_noise=args.head_noise,
            head_type=args.head_type and args.head_type.lower(),
            pure=args.pure,
            empty=args.empty,
        )
    print(f"{path}: {shape.name}, {args.type.lower()}, {path.stat().st_size / 1e9:.2f} GB")
    return 0


def _assignment(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set {text!r}: expected KEY=VALUE, as in n_layer=4")
    return key.strip().replace("-", "_"), value
