"""Options that several commands share: `Settings`, `Sampling`, `ChatOptions`, `ModelOptions`; and
the model opened as they say."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllama_mtp.arguments import Kind, described
from pyllama_mtp.chats.templates import TEMPLATES
from pyllama_mtp.cli import PROGRAM, parsing, progress
from pyllama_mtp.errors import (
    NoMtpHeadError,
    PyllamaMtpError,
    UnsupportedArchitectureError,
    UsageError,
)
from pyllama_mtp.files import read_text
from pyllama_mtp.llama.modeloptions import ModelOptions
from pyllama_mtp.measure.plan import SWITCHES
from pyllama_mtp.settings import RopeScaling, Sampling, Settings

if TYPE_CHECKING:
    from pyllama_mtp.chats.options import ChatOptions
    from pyllama_mtp.grammar import Grammar
    from pyllama_mtp.llama.model import Model
    from pyllama_mtp.llama.vision import Vision

log = logging.getLogger(__name__)

#: Help of --n-ctx where the default depends on prompt and memory.
USUAL_N_CTX = (
    "context in tokens, for prompt and answer (default: 8192; more if they need it, up to the "
    "model's training length; less if memory is short)"
)


def add_field(
    group: argparse._ActionsContainer, kind: type, name: str, text: str = "", several: bool = False
) -> None:
    """Add the option of a field.

    Args:
        kind: the class that declares it.
        text: help, if not the field's own: the first sentence of its description.
        several: the option takes several values, to be compared.
    """
    one = next(one for one in fields(kind) if one.name == name)
    values, names = one.metadata["kind"], [w for w in one.metadata["usage"] if w.startswith("-")]
    metavar = "".join(word for word in one.metadata["usage"] if not word.startswith("-"))
    text = text or first_sentence(described(kind).get(name, ""))
    how: dict[str, Any] = {"dest": name, "default": one.default, "help": text}
    if values.on_off:
        how["action"] = "store_true" if one.default is False else argparse.BooleanOptionalAction
    elif values.several:
        how |= {"action": "extend", "default": None, "type": checked(one), "metavar": metavar}
    elif several:
        how["type"] = parsing.comma_list(checked(one))
        how["metavar"] = f"{metavar or '|'.join(values.choices)},..."
    elif metavar:
        how["type"], how["metavar"] = checked(one), metavar
    else:
        how["choices"] = values.choices
    action = group.add_argument(*(names or ["--" + name.replace("_", "-")]), **how)
    if one.default is True:
        action.help = f"{text} (default: on)"


def first_sentence(text: str) -> str:
    """The first sentence of a description, as the help of an option."""
    found = re.split(r"""(?<!\.)\.(?: (?=[A-Z0-9("'`])|$)""", text)[0]
    return found.replace("``", "'").replace('"', "'").replace("%", "%%")


def checked(one: Field[Any]) -> Callable[[str], Any]:
    """An argparse type: a value of the field."""
    kind: Kind = one.metadata["kind"]

    @parsing.told
    def parse(text: str) -> Any:
        value: Any = text
        with suppress(ValueError):
            value = parsing.comma_list(kind.read)(text) if kind.several else kind.read(text)
        return kind.check(one.name, value)

    return parse


def _of(kind: type, *parts: str) -> list[str]:
    """The fields whose options belong to these parts."""
    return [one.name for one in fields(kind) if one.metadata["part"] in parts]


def add_settings_options(
    parser: argparse.ArgumentParser, *, compare: bool = False, n_ctx: str = ""
) -> None:
    """Add the options of `Settings`, without the draft depth.

    Args:
        n_ctx: help of --n-ctx, if not the field's own, for commands that answer. Commands that
            measure have the options for research, too.
        compare: --rows, --sync, --hidden and --draft-vocab take several values, to be compared.
    """
    group = parser.add_argument_group("context and speed")
    for name in _of(Settings, "speed"):
        add_field(group, Settings, name, text=n_ctx if name == "n_ctx" else "")
    about = "the defaults are the fast ones; the others are for comparisons"
    if compare:
        about += (
            ". With several values (full,kv), every depth above 0 is measured with each combination"
        )
    group = parser.add_argument_group("what MTP costs", about)
    for name in _of(Settings, "cost", *([] if n_ctx else ["research"])):
        add_field(group, Settings, name, several=compare and name in SWITCHES)
    group = parser.add_argument_group(
        "RoPE scaling",
        "for texts longer than the model was trained for; the defaults are in the model file",
    )
    for name in _of(RopeScaling, "rope"):
        if name == "rope_freq_scale":
            group.add_argument(
                "--rope-scale",
                dest=name,
                type=lambda text: 1 / parsing.real(1)(text),
                metavar="N",
                help="texts N times as long as the model was trained for",
            )
        add_field(group, RopeScaling, name)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `Sampling`."""
    group = parser.add_argument_group("sampling")
    add_parts(group, "sampling", of=Sampling)
    group.add_argument(
        "--dry-sequence-breaker",
        dest="dry_sequence_breakers",
        action="append",
        metavar="TEXT",
        help="DRY: repetitions end at this text; may be given several times (default: newline, "
        "colon, double quote and star)",
    )
    _add_grammar_options(group)
    group.add_argument(
        "--logit-bias",
        type=parsing.bias,
        action="append",
        metavar="ID=BIAS",
        help="add BIAS to the logit of the token ID; -inf excludes it; may be given several times",
    )
    add_parts(group, "sampling")
    add_parts(group, "seed", of=Sampling)


def _add_grammar_options(group: argparse._ArgumentGroup) -> None:
    """Add the options, of which one may be given (argparse cannot wrap so large a group)."""
    group.add_argument(
        "--grammar", metavar="FILE", help="the answer follows this GBNF, with a rule `root`"
    )
    group.add_argument(
        "-j",
        "--json-schema",
        metavar="SCHEMA",
        help="the answer is JSON that fits this schema: JSON text that begins with {, or a file",
    )
    group.add_argument("--json-object", action="store_true", help="the answer is a JSON object")
    group.add_argument(
        "--regex", metavar="PATTERN", help="the whole answer matches a regular expression"
    )
    group.add_argument(
        "--lark",
        metavar="FILE",
        help="the answer follows llguidance's Lark grammar, with a rule `start`",
    )


def add_template_option(parser: argparse._ActionsContainer) -> None:
    """Add --chat-template, which :func:`open_model` follows."""
    parser.add_argument(
        "--chat-template",
        metavar="FILE|NAME",
        help="Jinja file in place of the model file's chat template, or one of llama.cpp's names: "
        + ", ".join(TEMPLATES),
    )


def warn_without_template(model: Model, *, refuse: bool = False) -> None:
    """Say on stderr that no chat is possible, if so; `refuse`: raise UsageError."""
    if not model.chat_template:
        said = (
            f"{Path(model.path).name} has no chat template, so it cannot chat. Give one "
            "with --chat-template; text without a template can be continued: "
        )
        if refuse:
            raise UsageError(f"{said}{PROGRAM} generate")
        log.warning("%s/v1/completions", said)


def add_chat_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ChatOptions`."""
    group = parser.add_argument_group("chat")
    add_template_option(group)
    thinks = group.add_mutually_exclusive_group()
    thinks.add_argument(
        "--reasoning",
        choices=("on", "off", "auto"),
        default="auto",
        help="whether the model thinks before it answers; 'auto' leaves it to the template",
    )
    thinks.add_argument(
        "--no-think",
        dest="reasoning",
        action="store_const",
        const="off",
        help="the same as --reasoning off",
    )
    parsing.add_whole(
        group,
        "--reasoning-budget",
        default=-1,
        least=-1,
        metavar="TOKENS",
        help="most tokens of a thought; then the model must answer; -1 is no limit",
    )
    group.add_argument(
        "--reasoning-effort",
        metavar="LEVEL",
        help="how much the model thinks, if its template asks: low, medium, high; none is off",
    )
    group.add_argument(
        "--chat-template-kwargs",
        type=parsing.json_object,
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
    """Take the defaults of the sampling options from the model file."""
    names = {one.name for one in fields(Sampling)} - {"reasoning_budget"}  # of ChatOptions
    parser.set_defaults(**dict.fromkeys(names))


def add_parts(parser: argparse._ActionsContainer, *parts: str, of: type = Settings) -> None:
    """Add the options that belong to these parts: "depth", "ngram"."""
    for name in _of(of, *parts):
        add_field(parser, of, name)


def settings_from(args: argparse.Namespace, draft_n_max: int | str, **switches: str) -> Settings:
    """The `Settings` of the options; `switches` replace fields by name."""
    given = {one.name: getattr(args, one.name) for one in fields(Settings) if one.name in args}
    given["rope"] = RopeScaling(
        **{one.name: getattr(args, one.name) for one in fields(RopeScaling)}
    )
    if not draft_n_max:
        given["synthetic_acceptance"] = None
    return Settings(**{**given, "draft_n_max": draft_n_max, **switches})


def sampling_from(args: argparse.Namespace) -> Sampling:
    """The `Sampling` of the options. GBNF is read by the native library that they name."""
    if args.grammar and args.lib:
        from pyllama_mtp.llama import native

        native.load(args.lib)
    return Sampling(**sampling_given(args))


def sampling_given(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `Sampling` that were given, by attribute."""
    given = {one.name: getattr(args, one.name, None) for one in fields(Sampling)}
    given["logit_bias"] = dict(args.logit_bias) if args.logit_bias else None
    given["grammar"] = _grammar_from(args)
    del given["reasoning_budget"]  # an option of ChatOptions
    return {name: value for name, value in given.items() if value is not None}


def _grammar_from(args: argparse.Namespace) -> Grammar | str | None:
    """The grammar of the options; GBNF as its text. Raises UsageError for more than one."""
    from pyllama_mtp.grammar import Grammar

    names = ("grammar", "json_schema", "json_object", "regex", "lark")
    given = ["--" + name.replace("_", "-") for name in names if getattr(args, name)]
    if len(given) > 1:
        raise UsageError(f"an answer follows one grammar: use one of {', '.join(given)}")
    if args.json_object:
        return Grammar.json_object()
    if args.regex:
        return Grammar.regex(args.regex)
    if args.json_schema:
        schema: str = args.json_schema
        text = schema if schema.lstrip()[:1] == "{" else read_text(schema, "JSON schema")
        return Grammar.json_schema(text)
    if args.lark:
        return Grammar.lark(read_text(args.lark, "Lark grammar"))
    return read_text(args.grammar, "grammar") if args.grammar else None


# -- the model -----------------------------------------------------------------------------------


def add_model_options(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add --model, --lib, and how the model is loaded, for :func:`open_model` and `placement`.

    Args:
        several: --model may be given several times; `args.model` is then a list.
    """
    group = parser.add_argument_group("model and library")
    add_model_option(group, several)
    parsing.add_lib_option(group)
    add_parts(group, "head", "placement", of=ModelOptions)
    group = parser.add_argument_group("big models, adapters")
    add_parts(group, "big", of=ModelOptions)
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
        "once (default: the bundled demo model; vision-demo is the bundled one that sees)"
        + (". May be given several times, to measure one after the other" if several else ""),
    )


def add_vision_option(parser: argparse._ActionsContainer) -> None:
    """Add --mmproj, for :func:`open_vision`."""
    parser.add_argument(
        "--mmproj",
        metavar="FILE|none",
        help="the model's image encoder (default: the mmproj*.gguf beside the model, if there is "
        "one; of several, the one with the model's name, and F16 before other types)",
    )


@contextmanager
def open_vision(args: argparse.Namespace, model: Model, wanted: bool) -> Iterator[Vision | None]:
    """The image encoder of --mmproj, or the one beside the model; None: there is none, or one that
    nobody asked for cannot be used.

    Raises:
        UsageError: it is `wanted`, and there is none.
    """
    from pyllama_mtp.llama.vision import Vision
    from pyllama_mtp.models.mmproj import find_mmproj

    if args.mmproj != "none" and (wanted or args.mmproj or find_mmproj(model.path)):
        try:
            n_threads = None if args.n_threads == "auto" else args.n_threads
            vision = Vision(model, args.mmproj, n_threads=n_threads)
        except PyllamaMtpError as error:
            if wanted or args.mmproj is not None:
                raise
            log.warning("prompts cannot have images: %s", error)
        else:
            with vision:
                yield vision
            return
    if wanted:
        raise UsageError("images need the model's image encoder, and --mmproj is none")
    yield None


_DEMO = (
    "no model was named, so this is the demo model: 3.9 million parameters that imitate Python "
    "code and its manual. Do not believe what it says. -m FILE.gguf takes your own model"
)
_VISION_DEMO = (
    "no model was named, so this is the demo model that sees: it describes squares, circles and "
    "triangles, drawn as its card says, and nothing else. -m FILE.gguf takes your own model"
)


def model_path(args: argparse.Namespace) -> str | Path:
    """The file of --model, downloaded first if need be; without --model the bundled demo model, and
    with --image the one that sees."""
    if args.model is not None:
        from pyllama_mtp.models.hub import local_file

        args.model = local_file(args.model, getattr(args, "mmproj", None) != "none")
        return str(args.model)
    from pyllama_mtp.models.demo import demo_path, vision_demo_path

    return vision_demo_path() if getattr(args, "image", None) else demo_path()


def placement(args: argparse.Namespace) -> dict[str, Any]:
    """The options about loading that were given, as arguments of `Model`."""
    found = {one.name: getattr(args, one.name, None) for one in fields(ModelOptions)}
    return ModelOptions(**{key: value for key, value in found.items() if value is not None}).given


@contextmanager
def open_model(
    args: argparse.Namespace, mtp: bool | None = None, *, without: str = ""
) -> Iterator[Model]:
    """The model of the options, with a progress bar on stderr while it loads.

    Args:
        mtp: whether to load the MTP head. None: if there is a usable one; says so on stderr if not.
        without: the option that turns MTP off, for the error when the file has no head. "": mtp and
            this option are those of --draft-n-max.
    """
    from pyllama_mtp.llama.model import Model

    if not without:
        mtp = None if args.draft_n_max == "auto" else args.draft_n_max != 0
        without = "--draft-n-max 0"
    template: str = getattr(args, "chat_template", None) or ""
    template = TEMPLATES.get(template) or (template and read_text(template, "chat template"))
    path = model_path(args)
    if args.model is None:
        told = _VISION_DEMO if getattr(args, "image", None) else _DEMO
        print(f"{PROGRAM}: {told}", file=sys.stderr)
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
        then = drafts if ngram else "nothing is drafted"
        print(f"{PROGRAM}: {model.info.why_no_mtp}; {then}", file=sys.stderr)
    if model.info.head and args.head is None:
        print(f"{PROGRAM}: the MTP head is in {model.info.head}", file=sys.stderr)
    with model:
        if template:
            model.chat_template = template
            model.apply_chat_template([{"role": "user", "content": "Hello"}])  # refused now
        yield model
