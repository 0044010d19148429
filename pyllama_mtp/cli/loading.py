"""Options that say which model, library and devices; the model opened as they say."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from pyllama_mtp.cli import PROGRAM
from pyllama_mtp.cli.parsing import assignment, comma_list, real, scaled, whole, worker
from pyllama_mtp.errors import NoMtpHeadError, UnsupportedArchitectureError
from pyllama_mtp.llama.modeloptions import SPLIT_MODES, ModelOptions

if TYPE_CHECKING:
    from pathlib import Path

    from pyllama_mtp import Model


def add_model_options(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """--model, --lib, and how it is loaded: what :func:`open_model` and `placement` read.

    Args:
        several: --model may be given several times; `args.model` is then a list.
    """
    group = parser.add_argument_group("model and library")
    add_model_option(group, several)
    group.add_argument(
        "--head",
        metavar="FILE|none",
        help="a .gguf file with the MTP head (default: the model's own; else mtp-NAME*.gguf beside "
        "it, if there is one; 'none': not even that one)",
    )
    group.add_argument(
        "--lib",
        metavar="upstream|patched|DIR",
        help="native library: llama.cpp as it is, with our patches, or a folder that holds one "
        "(default: PYLLAMA_MTP_LIB from the environment, else patched)",
    )
    group.add_argument(
        *("-ngl", "--n-gpu-layers"),
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

    group.add_argument(
        "--device",
        type=comma_list(str),
        metavar="NAME,...",
        help="devices that may hold layers, in this order; 'none' is the CPU only; 'pyllama-mtp "
        "doctor' lists them (default: workers, then GPUs)",
    )
    group.add_argument(
        "--split-mode",
        choices=SPLIT_MODES,
        help="how several devices share the model: layer by layer, matrices by rows where a device "
        "can, or one of them (--main-gpu) has all (default: layer)",
    )
    group.add_argument(
        "--main-gpu",
        type=whole(0),
        metavar="INDEX",
        help="the device for --split-mode none, or for what 'row' does not split (default: 0)",
    )
    _add_memory_options(parser)


def add_model_option(parser: argparse._ActionsContainer, several: bool = False) -> None:
    """--model: what :func:`model_path` reads."""
    parser.add_argument(
        *("-m", "--model"),
        metavar="FILE",
        action="append" if several else "store",
        help="a .gguf file, or hf:OWNER/REPO[:QUANT] of the Hugging Face hub, which is downloaded "
        "once (default: bundled demo model)"
        + (". May be given several times: one is measured after the other" if several else ""),
    )


def _add_memory_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("big models, adapters")
    group.add_argument(
        "--n-cpu-moe",
        type=whole(0),
        metavar="N",
        help="the experts of the first N layers stay on the CPU, the rest goes to the GPU",
    )
    group.add_argument(
        "--cpu-moe", action="store_true", default=None, help="all experts stay on the CPU"
    )
    group.add_argument(
        "--override-tensor",
        type=comma_list(assignment),
        action="extend",
        metavar="PATTERN=DEVICE,...",
        help="tensors whose name this regular expression finds go to this device, or to CPU; the "
        "first that fits counts",
    )
    group.add_argument(
        "--no-mmap",
        dest="use_mmap",
        action="store_false",
        default=None,
        help="read the model file instead of mapping it into memory",
    )
    group.add_argument(
        "--mlock",
        dest="use_mlock",
        action="store_true",
        default=None,
        help="keep the weights from being swapped out, as far as the system's limits allow",
    )
    group.add_argument(
        "--lora",
        type=comma_list(str),
        action="extend",
        metavar="FILE,...",
        help="LoRA adapters (.gguf) that apply to the model; drafts follow them",
    )
    group.add_argument(
        "--lora-scaled",
        type=comma_list(scaled),
        action="extend",
        dest="lora",
        metavar="FILE:SCALE,...",
        help="the same, with a factor for what each changes",
    )


_DEMO = (
    "no model was named, so this is the demo model: 3.9 million parameters that imitate Python "
    "code and its manual. What it says is not to be believed. -m FILE.gguf takes yours"
)


def model_path(args: argparse.Namespace) -> str | Path:
    """The file of --model, downloaded first if it is a hub's, or the bundled demo model."""
    if args.model is not None:
        from pyllama_mtp.models.hub import local_file

        args.model = local_file(args.model)
        return str(args.model)
    from pyllama_mtp.models.demo import demo_path

    return demo_path()


#: Attributes of `ModelOptions` whose option has another name.
_OPTIONS = {"rpc_servers": "rpc"}


def placement(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `Model` that say how it is loaded; what was not given is left out."""
    names = (field.name for field in dataclasses.fields(ModelOptions))
    found = {name: getattr(args, _OPTIONS.get(name, name), None) for name in names}
    return {name: value for name, value in found.items() if value not in (None, ())}


@contextmanager
def open_model(args: argparse.Namespace, *, mtp: bool | None, without: str) -> Iterator[Model]:
    """The model of the options, with a progress bar on stderr while a big one loads.

    Args:
        mtp: whether the MTP head is wanted; None: if there is one that can be used; it is said if
            not.
        without: the option that does without MTP, to be named when the file has no head.
    """
    from pyllama_mtp import Model

    path = model_path(args)
    if args.model is None:
        print(f"{PROGRAM}: {_DEMO}", file=sys.stderr)
    with _loading_bar() as progress:
        load = partial(Model, path, **placement(args), progress=progress)
        try:
            model = load(mtp=mtp)
        except (NoMtpHeadError, UnsupportedArchitectureError) as error:
            if isinstance(error, UnsupportedArchitectureError) and mtp is not True:
                raise
            raise type(error)(
                f"{error}\nto use this model without MTP, give {without}", error.path
            ) from None
    if mtp is None and not model.has_mtp:
        ngram = getattr(args, "ngram", True)
        drafts = (
            "drafts come from the text itself where that pays" if ngram else "nothing is drafted"
        )
        print(f"{PROGRAM}: {model.info.why_no_mtp}; {drafts}", file=sys.stderr)
    if model.info.head and args.head is None:
        print(f"{PROGRAM}: the MTP head is in {model.info.head}", file=sys.stderr)
    with model:
        yield model


def depth_for(model: Model, depth: int) -> int:
    """As many drafts a round as asked for, or as the model can have: then it is said."""
    most = model.info.most_drafts
    if most is None or depth <= most:
        return depth
    print(f"{PROGRAM}: {model.info.fewer_drafts}", file=sys.stderr)
    return most


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


#: A prompt with fewer tokens to be processed has no bar.
LONG_PROMPT = 512


@contextmanager
def prompt_bar() -> Iterator[Callable[[int, int], None] | None]:
    """What to tell (tokens done, tokens in all) while a long prompt is processed: a bar on stderr
    that vanishes when it is done; None where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("reading the prompt"),
        bars.BarColumn(),
        bars.TextColumn("{task.completed:.0f} of {task.total:.0f} tokens"),
        bars.TimeRemainingColumn(),
    )
    bar = bars.Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("")

    def tell(done: int, total: int) -> None:
        if not bar.live.is_started and total - done >= LONG_PROMPT:
            bar.start()
        bar.update(task, completed=done, total=total)
        if done >= total:
            close()

    def close() -> None:
        if bar.live.is_started:
            bar.stop()

    try:
        yield tell
    finally:
        close()
