"""Options that say which model, library and devices; the model opened as they say."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyllama_mtp.cli import PROGRAM, parsing, progress
from pyllama_mtp.errors import NoMtpHeadError, UnsupportedArchitectureError
from pyllama_mtp.llama.modeloptions import SPLIT_MODES, ModelOptions

if TYPE_CHECKING:
    from pathlib import Path

    from pyllama_mtp import Model


def add_model_options(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add --model, --lib, and how the model is loaded, for :func:`open_model` and `placement`.

    Args:
        several: --model may be given several times; `args.model` is then a list.
    """
    group = parser.add_argument_group("model and library")
    add_model_option(group, several)
    group.add_argument(
        "--head",
        metavar="FILE|none",
        help="a .gguf file with the MTP head; 'none' takes only a head in the model's own file "
        "(default: the model's own head, else that of a file mtp-NAME*.gguf beside the model)",
    )
    parsing.add_lib_option(group)
    parsing.add_whole(
        group,
        "-ngl",
        "--n-gpu-layers",
        default=-1,
        least=-1,
        help="layers to put on the GPU or on workers; -1 is all, 0 is none",
    )
    group.add_argument(
        "--rpc",
        dest="rpc_servers",
        type=parsing.comma_list(parsing.worker),
        default=(),
        metavar="HOST:PORT,...",
        help="spread the layers over these workers ('pyllama-mtp rpc-worker' starts one), then "
        "over the GPUs of this machine. There is no authentication and no encryption: trusted "
        "networks only",
    )
    parsing.add_whole(
        group,
        "--rpc-timeout",
        least=0,
        metavar="SECONDS",
        help="give a silent worker up after so many seconds, which must suffice for --n-batch "
        "tokens; 0 is never (default: 600)",
    )
    group.add_argument(
        "--tensor-split",
        type=parsing.comma_list(parsing.real(0)),
        metavar="N,...",
        help="shares of the layers: of the workers in their order, then of this machine's GPUs "
        "(default: by free memory)",
    )
    group.add_argument(
        "--device",
        type=parsing.comma_list(str),
        metavar="NAME,...",
        help="devices that may hold layers, in this order; 'none' is the CPU only; 'pyllama-mtp "
        "doctor' lists them (default: workers, then GPUs)",
    )
    group.add_argument(
        "--split-mode",
        choices=SPLIT_MODES,
        help="how several devices share the model. 'layer': each has some layers; 'row': matrices "
        "are split by rows, where a device can; 'none': --main-gpu has all (default: layer)",
    )
    parsing.add_whole(
        group,
        "--main-gpu",
        least=0,
        metavar="INDEX",
        help="the device for --split-mode none, and for tensors that 'row' does not split "
        "(default: 0)",
    )
    _add_memory_options(parser)


def add_model_option(parser: argparse._ActionsContainer, several: bool = False) -> None:
    """Add --model, for :func:`model_path`."""
    parser.add_argument(
        *("-m", "--model"),
        metavar="FILE",
        action="append" if several else "store",
        help="a .gguf file, or hf:OWNER/REPO[:QUANT] of the Hugging Face hub, which is downloaded "
        "once (default: the bundled demo model)"
        + (". May be given several times, to measure one after the other" if several else ""),
    )


def _add_memory_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("big models, adapters")
    parsing.add_whole(
        group, "--n-cpu-moe", least=0, help="keep the experts of the first N layers on the CPU"
    )
    group.add_argument(
        "--cpu-moe", action="store_true", default=None, help="keep all experts on the CPU"
    )
    group.add_argument(
        "--moe-cache-mib",
        dest="moe_cache_size",
        type=lambda text: parsing.whole(0)(text) << 20,
        metavar="N",
        help="keep the experts used last in N MiB on the GPUs, where all experts of a layer stay "
        "on the CPU (default: 0, no such cache)",
    )
    group.add_argument(
        "--override-tensor",
        type=parsing.comma_list(parsing.assignment),
        action="extend",
        metavar="PATTERN=DEVICE,...",
        help="put the tensors whose names match this regular expression on this device, or on CPU; "
        "the first match counts",
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
        type=parsing.comma_list(str),
        action="extend",
        metavar="FILE,...",
        help="apply these LoRA adapters (.gguf) to the model; drafts follow them",
    )
    group.add_argument(
        "--lora-scaled",
        type=parsing.comma_list(parsing.scaled),
        action="extend",
        dest="lora",
        metavar="FILE:SCALE,...",
        help="the same, each with a scale",
    )


_DEMO = (
    "no model was named, so this is the demo model: 3.9 million parameters that imitate Python "
    "code and its manual. Do not believe what it says. -m FILE.gguf takes your own model"
)


def model_path(args: argparse.Namespace) -> str | Path:
    """The file of --model, downloaded first if need be; without --model the bundled demo model."""
    if args.model is not None:
        from pyllama_mtp.models.hub import local_file

        args.model = local_file(args.model)
        return str(args.model)
    from pyllama_mtp.models.demo import demo_path

    return demo_path()


def placement(args: argparse.Namespace) -> dict[str, Any]:
    """The options about loading that were given, as arguments of `Model`."""
    found = {one.name: getattr(args, one.name, None) for one in dataclasses.fields(ModelOptions)}
    return {name: value for name, value in found.items() if value not in (None, ())}


@contextmanager
def open_model(
    args: argparse.Namespace, *, mtp: bool | None, without: str, fallback: str = ""
) -> Iterator[Model]:
    """The model of the options, with a progress bar on stderr while it loads.

    Args:
        mtp: whether to load the MTP head. None: if there is a usable one; says so on stderr if not.
        without: the option that turns MTP off, for the error when the file has no head.
        fallback: what the command does without a head, for stderr; empty: drafts from the text.
    """
    from pyllama_mtp import Model

    path = model_path(args)
    if args.model is None:
        print(f"{PROGRAM}: {_DEMO}", file=sys.stderr)
    with progress.loading() as tell:
        try:
            model = Model(path, mtp=mtp, progress=tell, **placement(args))
        except (NoMtpHeadError, UnsupportedArchitectureError) as error:
            if isinstance(error, UnsupportedArchitectureError) and mtp is not True:
                raise
            raise type(error)(
                f"{error}\nto use this model without MTP, give {without}", error.path
            ) from None
    if mtp is None and not model.has_mtp:
        ngram = getattr(args, "ngram", True)
        drafts = "drafts come from the text itself where that pays"
        then = fallback or (drafts if ngram else "nothing is drafted")
        print(f"{PROGRAM}: {model.info.why_no_mtp}; {then}", file=sys.stderr)
    if model.info.head and args.head is None:
        print(f"{PROGRAM}: the MTP head is in {model.info.head}", file=sys.stderr)
    with model:
        yield model


def depth_for(model: Model, depth: int) -> int:
    """The drafts per round: `depth`, or the most of the model; says so on stderr."""
    most = model.info.most_drafts
    if most is None or depth <= most:
        return depth
    print(f"{PROGRAM}: {model.info.fewer_drafts}", file=sys.stderr)
    return most
