"""Options for `Settings` and `Sampling`, which several commands share, and what becomes of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any

from pyllama_mtp.arguments import Kind
from pyllama_mtp.cli import grammars
from pyllama_mtp.cli.parsing import bias, comma_list, json_object, real, whole
from pyllama_mtp.contextoptions import RopeScaling
from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.plan import SWITCHES
from pyllama_mtp.settings import Sampling, Settings

if TYPE_CHECKING:
    from pyllama_mtp.chats.options import ChatOptions

#: What --n-ctx is where it is a session's.
USUAL_N_CTX = (
    "context in tokens, prompt and answer; 0 is 8192, more where they need it, at most the model's "
    "training length, and less where memory is short"
)


def add_field(
    group: argparse._ActionsContainer,
    one: Field[Any],
    text: str | None = None,
    several: bool = False,
) -> None:
    """The option of a field.

    Args:
        text: of its help, if another than the field's.
        several: it takes several values, to be compared.
    """
    about = one.metadata
    kind, names = about["kind"], [word for word in about["usage"] if word.startswith("-")]
    metavar = "".join(word for word in about["usage"] if not word.startswith("-"))
    how: dict[str, Any] = {"dest": one.name, "default": one.default, "help": text or about["help"]}
    dashed = "--" + one.name.replace("_", "-")
    if isinstance(one.default, bool):
        how["action"] = "store_false" if one.default else "store_true"
        dashed = dashed.replace("--", "--no-") if one.default else dashed
    elif several:
        how["type"] = comma_list(checked(one))
        how["metavar"] = f"{metavar or '|'.join(kind.choices)},..."
    elif metavar:
        how["type"], how["metavar"] = checked(one), metavar
    else:
        how["choices"] = kind.choices
    group.add_argument(*(names or [dashed]), **how)


def checked(one: Field[Any]) -> Callable[[str], Any]:
    """An argparse type: a value that the field takes."""

    def parse(text: str) -> Any:
        kind: Kind = one.metadata["kind"]
        value: Any = text
        with suppress(ValueError):
            value = kind.read(text)
        try:
            return kind.check(one.name, value)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _of(kind: type, *parts: str) -> list[Field[Any]]:
    """Fields whose options are among these."""
    return [one for one in fields(kind) if one.metadata["part"] in parts]


def add_settings_options(
    parser: argparse.ArgumentParser, *, compare: bool = False, n_ctx: str | None = None
) -> None:
    """Every switch of `Settings` but the draft depth, which each command names its own way.

    Args:
        n_ctx: what --n-ctx is, if not as usual.
        compare: --rows, --sync, --hidden and --draft-vocab take several values each, to
            be compared.
    """
    group = parser.add_argument_group("context and speed")
    for one in _of(Settings, "speed"):
        add_field(group, one, text=n_ctx if one.name == "n_ctx" else None)
    about = "the defaults are the fast ones; the others are for before-and-after measurements"
    if compare:
        about += (
            ". They take several values (full,kv): every depth above 0 is then measured with each "
            "combination"
        )
    group = parser.add_argument_group("what MTP costs", about)
    for one in _of(Settings, "cost"):
        add_field(group, one, several=compare and one.name in SWITCHES)
    group = parser.add_argument_group(
        "RoPE scaling",
        "for texts longer than the model was trained for; what is not given is as in the file",
    )
    for one in _of(RopeScaling, "rope"):
        if one.name == "rope_freq_scale":
            group.add_argument(
                "--rope-scale",
                dest=one.name,
                type=lambda text: 1 / real(1)(text),
                metavar="N",
                help="N times the text that it was trained for",
            )
        add_field(group, one)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Every switch of `Sampling`."""
    group = parser.add_argument_group("sampling")
    for one in _of(Sampling, "sampling"):
        add_field(group, one)
    group.add_argument(
        "--dry-sequence-breaker",
        dest="dry_sequence_breakers",
        action="append",
        metavar="TEXT",
        help="no repetition goes across it; may be given several times (default: newline, colon, "
        "double quote and star)",
    )
    grammars.add_options(group)
    group.add_argument(
        "--logit-bias",
        type=bias,
        action="append",
        metavar="ID=BIAS",
        help="added to the logit of a token id; -inf excludes it; may be given several times",
    )
    for one in (*_of(Settings, "sampling"), *_of(Sampling, "seed")):
        add_field(group, one)


def add_chat_options(parser: argparse.ArgumentParser) -> None:
    """Every switch of `ChatOptions`."""
    group = parser.add_argument_group("chat")
    thinks = group.add_mutually_exclusive_group()
    thinks.add_argument(
        "--reasoning",
        choices=("on", "off", "auto"),
        default="auto",
        help="whether the model thinks before it answers; 'auto' is as its template has it",
    )
    thinks.add_argument(
        "--no-think",
        dest="reasoning",
        action="store_const",
        const="off",
        help="the same as --reasoning off",
    )
    group.add_argument(
        "--reasoning-budget",
        type=whole(-1),
        default=-1,
        metavar="TOKENS",
        help="most tokens of a thought, after which the model must answer; -1 is no limit",
    )
    group.add_argument(
        "--reasoning-effort",
        metavar="LEVEL",
        help="how much the model thinks, where its template asks: low, medium, high; none is off",
    )
    group.add_argument(
        "--chat-template-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help="""more variables of the chat template, as '{"name": "value"}'""",
    )


def chat_options_from(args: argparse.Namespace) -> ChatOptions:
    """The `ChatOptions` of the options."""
    from pyllama_mtp.chats.options import ChatOptions

    thinking = {"on": True, "off": False, "auto": None}[args.reasoning]
    budget = None if args.reasoning_budget < 0 else args.reasoning_budget
    return ChatOptions(thinking, budget, args.reasoning_effort, args.chat_template_kwargs)


def leave_sampling_to_the_model(parser: argparse.ArgumentParser) -> None:
    """What is not given is as the model file says, not as the options do."""
    names = {one.name for one in fields(Sampling)} - {"reasoning_budget"}  # of the chat options
    parser.set_defaults(**dict.fromkeys(names))


def add_depth_options(parser: argparse.ArgumentParser) -> None:
    """The draft depth, of commands that have one."""
    for one in _of(Settings, "depth", "ngram"):
        add_field(parser, one)


def add_ngram_option(parser: argparse.ArgumentParser) -> None:
    """Whether "auto" may look drafts up in the text."""
    for one in _of(Settings, "ngram"):
        add_field(parser, one)


def add_profile_option(parser: argparse.ArgumentParser) -> None:
    """Whether the time of a prompt is taken apart."""
    parser.add_argument(
        "--profile",
        action="store_true",
        help="at the end, show where a prompt's time goes, by kind of operation, without MTP and "
        "with it: one more prompt, in a session of its own, is computed node by node, which makes "
        "the sum somewhat longer than the prompt itself; both are shown",
    )


def settings_from(args: argparse.Namespace, draft_n_max: int | str, **switches: str) -> Settings:
    """The `Settings` of the options; `switches` replace those of the same name."""
    given = {one.name: getattr(args, one.name) for one in fields(Settings) if one.name in args}
    given["rope"] = RopeScaling(
        **{one.name: getattr(args, one.name) for one in fields(RopeScaling)}
    )
    if not draft_n_max:
        given["synthetic_acceptance"] = None
    return Settings(**{**given, "draft_n_max": draft_n_max, **switches})


def sampling_from(args: argparse.Namespace) -> Sampling:
    """The `Sampling` of the options."""
    return Sampling(**sampling_given(args))


def sampling_given(args: argparse.Namespace) -> dict[str, Any]:
    """What the options say about `Sampling`: its attributes; those that were not given are left
    out."""
    given = {one.name: getattr(args, one.name, None) for one in fields(Sampling)}
    given["logit_bias"] = dict(args.logit_bias) if args.logit_bias else None
    given["grammar"] = grammars.grammar_from(args)
    del given["reasoning_budget"]  # of the chat options
    return {name: value for name, value in given.items() if value is not None}
