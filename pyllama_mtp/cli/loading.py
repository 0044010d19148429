"""Options that say which model, library and devices; the model opened as they say."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyllama_mtp.cli import PROGRAM, options, parsing, progress
from pyllama_mtp.errors import NoMtpHeadError, UnsupportedArchitectureError
from pyllama_mtp.llama.modeloptions import ModelOptions

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
    parsing.add_lib_option(group)
    options.add_parts(group, "head", "placement", of=ModelOptions)
    group = parser.add_argument_group("big models, adapters")
    options.add_parts(group, "big", of=ModelOptions)
    group.add_argument(
        "--lora-scaled",
        type=parsing.comma_list(parsing.scaled),
        action="extend",
        dest="lora",
        metavar="FILE:SCALE,...",
        help="the same as --lora, each with a scale",
    )


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
    return ModelOptions(**{key: value for key, value in found.items() if value is not None}).given


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
