"""``pyllama-mtp head``: take the MTP head out of a model file, put it into another, or drop it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyllama_mtp.cli import parsing
from pyllama_mtp.cli.synth import writing
from pyllama_mtp.models.ggufinfo import read_gguf
from pyllama_mtp.models.quantize import WEIGHT_TYPES
from pyllama_mtp.models.sidecar import NO_HEAD
from pyllama_mtp.models.surgery import drop_head, extract_head, graft_head

_EPILOG = """\
A head's file can be given as --head, or lie beside the model as mtp-NAME.gguf, and
is found there. llama-server takes it with -md and --spec-type draft-mtp.

examples:
  pyllama-mtp head extract Qwen3.6-27B-Q4_K_M.gguf -o mtp-Qwen3.6-27B-Q4_0.gguf --type q4_0
  pyllama-mtp head graft TRUNK.gguf mtp-NAME.gguf -o MODEL.gguf
  pyllama-mtp head drop MODEL.gguf -o TRUNK.gguf
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``head`` command."""
    parser = subparsers.add_parser(
        "head",
        help="take the MTP head out of a model file, put it into another, or leave it out",
        description="Write a new file with an MTP head alone, with a head put in, or without it. "
        "Nothing is loaded; the files that are read stay as they are.",
        epilog=_EPILOG,
        formatter_class=parsing.HelpFormatter,
    )
    actions = parser.add_subparsers(metavar="ACTION", title="actions", required=True)

    def add(name: str, text: str, *files: tuple[str, str]) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text, description=text)
        for file, what in files:
            action.add_argument(file, metavar=file.upper(), help=what)
        action.add_argument("-o", "--output", required=True, metavar="OUT", help="file to write")
        action.add_argument("--force", action="store_true", help="overwrite an existing file")
        return action

    whole = ("file", "a model with an MTP head (.gguf)")
    action = add("extract", "write the MTP head of a model to a file of its own", whole)
    action.add_argument(
        "--type",
        type=parsing.one_of(tuple(WEIGHT_TYPES)),
        metavar="TYPE",
        help="what its matrices, embedding and LM head become (default: as they are): "
        + ", ".join(WEIGHT_TYPES),
    )
    action.set_defaults(run=_extract)
    trunk = ("trunk", "a model (.gguf); a head that it has is left out")
    action = add("graft", "write a model with this head inside", trunk, ("head", "its MTP head"))
    action.set_defaults(run=_graft)
    add("drop", "write a model without its MTP head", whole).set_defaults(run=_drop)


def _extract(args: argparse.Namespace) -> int:
    kind = args.type
    return _written(args, lambda how: extract_head(args.file, args.output, kind, **how))


def _graft(args: argparse.Namespace) -> int:
    return _written(args, lambda how: graft_head(args.trunk, args.head, args.output, **how))


def _drop(args: argparse.Namespace) -> int:
    return _written(args, lambda how: drop_head(args.file, args.output, **how))


def _written(args: argparse.Namespace, write: Callable[[dict[str, Any]], Path]) -> int:
    """Write the file and say what it holds."""
    with writing(Path(args.output).name) as progress:
        path = write({"progress": progress, "force": args.force})
    info = read_gguf(path, NO_HEAD)
    types = ", ".join(f"{kind} {n / 1e6:.1f} MB" for kind, n in info.tensor_types.items())
    print(f"{path}: {len(info.tensors)} tensors ({types})")
    return 0
