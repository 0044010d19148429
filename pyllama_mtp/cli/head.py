"""Write a new file with an MTP head alone, with a head put in, or without it.
Nothing is loaded; the files that are read stay as they are.

A head's file can be given as --head. A file mtp-NAME.gguf beside the model is
found by itself. llama-server takes it with -md and --spec-type draft-mtp.

examples:
  pyllama-mtp head extract NAME.gguf -o mtp-NAME-Q4_0.gguf --type q4_0
  pyllama-mtp head graft TRUNK.gguf mtp-NAME.gguf -o MODEL.gguf
  pyllama-mtp head drop MODEL.gguf -o TRUNK.gguf
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from pyllama_mtp.cli import parsing, progress
from pyllama_mtp.models.ggufinfo import read_gguf
from pyllama_mtp.models.quantize import WEIGHT_TYPES
from pyllama_mtp.models.sidecar import NO_HEAD
from pyllama_mtp.models.surgery import drop_head, extract_head, graft_head


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the three actions and their options."""
    actions = parser.add_subparsers(metavar="ACTION", title="actions", dest="action", required=True)

    def add(name: str, text: str, *files: tuple[str, str]) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text, description=text)
        for file, what in files:
            action.add_argument(file, metavar=file.upper(), help=what)
        action.add_argument("-o", "--output", required=True, metavar="OUT", help="file to write")
        parsing.add_force_option(action)
        return action

    whole = ("file", "a model with an MTP head (.gguf)")
    trunk = ("trunk", "a model (.gguf); its own head, if it has one, is left out")
    add("extract", "write the MTP head of a model to a file of its own", whole).add_argument(
        "--type",
        type=parsing.one_of(tuple(WEIGHT_TYPES)),
        metavar="TYPE",
        help="type of the head's matrices, embedding and LM head (default: as they are): "
        + ", ".join(WEIGHT_TYPES),
    )
    add("graft", "write a model with this head inside", trunk, ("head", "its MTP head"))
    add("drop", "write a model without its MTP head", whole)


def run(args: argparse.Namespace) -> int:
    """Write the file and say what it holds."""
    if args.action == "extract":
        write = partial(extract_head, args.file, args.output, args.type)
    elif args.action == "graft":
        write = partial(graft_head, args.trunk, args.head, args.output)
    else:
        write = partial(drop_head, args.file, args.output)
    with progress.file(Path(args.output).name) as tell:
        path = write(progress=tell, force=args.force)
    info = read_gguf(path, NO_HEAD)
    types = ", ".join(f"{kind} {n / 1e6:.1f} MB" for kind, n in info.tensor_types.items())
    print(f"{path}: {len(info.tensors)} tensors ({types})")
    return 0
