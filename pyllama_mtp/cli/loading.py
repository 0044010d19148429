"""Options that say which model, library and devices; the model opened as they say."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from pyllama_mtp.cli import PROGRAM
from pyllama_mtp.cli.parsing import comma_list, real, whole, worker
from pyllama_mtp.errors import NoMtpHeadError

if TYPE_CHECKING:
    from pathlib import Path

    from pyllama_mtp import Model


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """--model, --lib, and where the layers go: what :func:`open_model` and `placement` read."""
    group = parser.add_argument_group("model and library")
    group.add_argument(
        "-m", "--model", metavar="FILE", help="a .gguf file (default: bundled demo model)"
    )
    group.add_argument(
        "--lib",
        metavar="upstream|patched|DIR",
        help="native library: llama.cpp as it is, with our patches, or a folder that holds one "
        "(default: PYLLAMA_MTP_LIB from the environment, else patched)",
    )
    group.add_argument(
        "--n-gpu-layers",
        type=whole(-1),
        default=-1,
        metavar="N",
        help="layers to put on the GPU; -1 is all, 0 is none; without a GPU or a worker it has no "
        "effect",
    )
    group.add_argument(
        "--rpc",
        type=comma_list(worker),
        default=(),
        metavar="HOST:PORT,...",
        help="spread the layers over these workers ('pyllama-mtp rpc-worker' starts one), and over "
        "the GPUs of this machine after them. Neither authentication nor encryption: trusted "
        "networks only",
    )
    group.add_argument(
        "--rpc-timeout",
        type=whole(0),
        metavar="SECONDS",
        help="give a worker up that is silent for so long; it must have computed --n-batch tokens "
        "by then; 0 is never (default: 600)",
    )
    group.add_argument(
        "--tensor-split",
        type=comma_list(real(0)),
        metavar="N,...",
        help="shares of the layers: of the workers in their order, then of this machine's GPUs "
        "(default: by their free memory)",
    )


def model_path(args: argparse.Namespace) -> str | Path:
    """The file of --model, or the bundled demo model."""
    if args.model is not None:
        return str(args.model)
    from pyllama_mtp.models.demo import demo_path

    return demo_path()


def placement(args: argparse.Namespace) -> dict[str, Any]:
    """Where the layers go: the arguments of `Model` for it; what was not given is left out."""
    given = {"n_gpu_layers": args.n_gpu_layers}
    if args.rpc:
        given["rpc_servers"] = args.rpc
    if args.rpc_timeout is not None:
        given["rpc_timeout"] = args.rpc_timeout
    if args.tensor_split is not None:
        given["tensor_split"] = args.tensor_split
    return given


@contextmanager
def open_model(args: argparse.Namespace, *, mtp: bool | None, without: str) -> Iterator[Model]:
    """The model of the options, with a progress bar on stderr while a big one loads.

    Args:
        mtp: whether the MTP head is wanted; None: if the file has one; it is said if not.
        without: the option that does without MTP, to be named when the file has no head.
    """
    from pyllama_mtp import Model

    path = model_path(args)
    with _loading_bar() as progress:
        load = partial(Model, path, **placement(args), progress=progress)
        try:
            model = load(mtp=mtp is not False)
        except NoMtpHeadError as error:
            if mtp is not None or error.partial:
                raise NoMtpHeadError(
                    f"{error}\nto use this model without MTP, give {without}"
                ) from None
            print(f"{PROGRAM}: the model has no MTP head; nothing is drafted", file=sys.stderr)
            model = load(mtp=False)
    with model:
        yield model


@contextmanager
def _loading_bar() -> Iterator[Callable[[float], None]]:
    """A bar that vanishes when the model is loaded; nothing where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda fraction: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading the model", total=1.0)
        yield lambda fraction: bar.update(task, completed=fraction)
