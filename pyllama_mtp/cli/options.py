"""Options for `Settings` and `Sampling`, which several commands share, and what becomes of them."""

from __future__ import annotations

import argparse
import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pyllama_mtp.cli import grammars
from pyllama_mtp.cli.parsing import (
    bias,
    comma_list,
    json_object,
    one_of,
    real,
    whole,
    whole_or_auto,
)
from pyllama_mtp.contextoptions import ROPE_SCALING, RopeScaling
from pyllama_mtp.settings import (
    CACHE_TYPES,
    FLASH_ATTENTION,
    HEAD_TYPES,
    HIDDEN,
    PROMPT_ROWS,
    PROMPT_SYNC,
    ROLLBACK,
    Sampling,
    Settings,
)

if TYPE_CHECKING:
    from pyllama_mtp.llama.chat import ChatOptions

#: What --n-ctx is where it is a session's.
USUAL_N_CTX = (
    "context in tokens, prompt and answer; 0 is 8192, more where they need it, at most the model's "
    "training length, and less where memory is short"
)


def add_settings_options(
    parser: argparse.ArgumentParser,
    *,
    compare: bool = False,
    n_ctx: str = "context in tokens, rounded up to a multiple of 256; 0 is what prompt and answer "
    "need",
) -> None:
    """Every switch of `Settings` but the draft depth, which each command names its own way.

    Args:
        n_ctx: what --n-ctx is.
        compare: --rows, --sync, --hidden and --draft-vocab take several values each, to
            be compared.
    """
    group = parser.add_argument_group("context and speed")
    group.add_argument(
        *("-c", "--n-ctx"),
        type=whole(0),
        default=0,
        metavar="TOKENS",
        help=n_ctx,
    )
    group.add_argument(
        "--n-batch", type=whole(1), default=2048, metavar="TOKENS", help="tokens per decode call"
    )
    group.add_argument(
        "--n-ubatch", type=whole(1), default=512, metavar="TOKENS", help="tokens per graph"
    )
    group.add_argument(
        *("-t", "--threads"),
        type=whole(1),
        metavar="N",
        help="CPU threads (default: as many as cores)",
    )
    for which in ("k", "v"):
        group.add_argument(
            f"--cache-type-{which}",
            default="f16",
            choices=CACHE_TYPES,
            help=f"type of the {which.upper()} cache",
        )
    group.add_argument(
        "--flash-attn", default="auto", choices=FLASH_ATTENTION, help="flash attention"
    )
    group.add_argument(
        "--p-min",
        type=real(0, 1),
        default=0.0,
        metavar="P",
        help="stop drafting at a token the head gives less probability than this, 0 to 1",
    )
    group.add_argument(
        "--checkpoints",
        type=whole(0),
        default=4,
        metavar="N",
        help="most states of the recurrent layers kept along the text, for prompts that share a "
        "part of it only; 0 keeps none",
    )
    group.add_argument(
        "--rollback",
        default="auto",
        choices=ROLLBACK,
        help="how rejected drafts leave the recurrent state: kept snapshots, or a checkpoint and "
        "a replay; 'auto' is snapshots where possible",
    )
    group.add_argument(
        "--synthetic-acceptance",
        type=comma_list(real(0, 1)),
        metavar="P1,P2,...",
        help="impose these acceptance rates, 0 to 1, on draft 1, 2, ... whatever the model says "
        "(0.8,0.7,0.6), to measure speed at a chosen rate. Text and acceptance then mean nothing, "
        "and every output says so",
    )
    _add_prompt_switches(parser, compare)
    _add_rope_options(parser)


def _add_rope_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "RoPE scaling",
        "for texts longer than the model was trained for; what is not given is as in the file",
    )
    add = group.add_argument
    add("--rope-scaling", choices=ROPE_SCALING, help="how positions are scaled")
    add(
        "--rope-scale",
        dest="rope_freq_scale",
        type=lambda text: 1 / real(1)(text),
        metavar="N",
        help="N times the text that it was trained for",
    )
    add("--rope-freq-scale", type=real(0, 1), metavar="X", help="the same as 1/N")
    add("--rope-freq-base", type=real(0), metavar="X", help="base of the frequencies")
    add("--yarn-orig-ctx", type=whole(1), metavar="TOKENS", help="what the model was trained for")
    add("--yarn-ext-factor", type=real(0), metavar="X", help="mix of extrapolation; 0 is none")
    add("--yarn-attn-factor", type=real(0), metavar="X", help="factor of attention's magnitude")
    text = "rotations above which a dimension stays as it is"
    add("--yarn-beta-fast", type=real(0), metavar="X", help=text)
    text = "rotations below which a dimension is interpolated"
    add("--yarn-beta-slow", type=real(0), metavar="X", help=text)


def _add_prompt_switches(parser: argparse.ArgumentParser, compare: bool) -> None:
    about = "the defaults are the fast ones; the others are for before-and-after measurements"
    if compare:
        about += (
            ". They take several values (full,kv): every depth above 0 is then measured with each "
            "combination"
        )
    group = parser.add_argument_group("what MTP costs", about)

    def add(option: str, name: str, choices: tuple[str, ...], default: str, text: str) -> None:
        if compare:
            how: dict[str, Any] = {"type": comma_list(one_of(choices))}
            how["metavar"] = f"{'|'.join(choices)},..."
        else:
            how = {"choices": choices}
        group.add_argument(option, dest=name, default=default, help=text, **how)

    add(
        *("--rows", "prompt_rows", PROMPT_ROWS, "last"),
        "prompt rows that the LM head runs on: 'all' brings back the slow prefill that this "
        "package exists to avoid",
    )
    add(
        *("--sync", "prompt_sync", PROMPT_SYNC, "auto"),
        "how the MTP head is kept in step: with its K and V, in the model's own context, or in "
        "full, as upstream does, in another context; 'auto' is 'kv' if the library can",
    )
    add(
        *("--hidden", "hidden", HIDDEN, "post-norm"),
        "the hidden state that the block gets: after the model's final norm, as Qwen3.5 and 3.6 "
        "were trained, or before it",
    )
    group.add_argument(
        "--draft-vocab",
        type=comma_list(str) if compare else str,
        default=Settings.draft_vocab,
        metavar="N|FILE|full" + (",..." if compare else ""),
        help="tokens that can be drafted: the N best by the tokenizer, or those of a file made by "
        "'pyllama-mtp draft-vocab'; 'auto' is those of the model file's MTP head if it is trimmed, "
        "else as many as pay by what drafts cost and what the text needs, of more than 65536; "
        "32768 where that is not known",
    )
    group.add_argument(
        "--no-draft-follow",
        dest="draft_follow",
        action="store_false",
        help="leave the draft vocabulary as it is, where otherwise tokens of the text that it "
        "lacks take the rows of its least likely ones",
    )
    group.add_argument(
        "--draft-head-type",
        type=one_of(HEAD_TYPES),
        default=Settings.draft_head_type,
        metavar="TYPE",
        help="type of the rows that drafts come from: 'file' as they are in the model file, or "
        "q8_0, q6_k, q4_k, q4_0, ..., which are quantized at the start. Smaller ones make drafts "
        "cheaper, also with '--draft-vocab full'; 'auto' is 'file' or q4_0, whichever is faster "
        "with as many rows as pay, and 'file' where --draft-vocab is given",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Every switch of `Sampling`."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        *("--temp", "--temperature"),
        dest="temperature",
        type=real(0),
        default=0.0,
        metavar="T",
        help="0 always takes the likeliest token (greedy); higher is more varied",
    )
    group.add_argument(
        "--top-k", type=whole(0), default=40, metavar="K", help="keep the K likeliest; 0 is all"
    )
    group.add_argument(
        "--top-p",
        type=real(0, 1),
        default=0.95,
        metavar="P",
        help="keep the likeliest that sum up to P; 1 is all",
    )
    group.add_argument(
        "--min-p",
        type=real(0, 1),
        default=0.05,
        metavar="P",
        help="keep those with at least P times the probability of the likeliest; 0 is all",
    )
    group.add_argument(
        "--repeat-penalty",
        type=real(0),
        default=1.0,
        metavar="X",
        help="divide the logits of recent tokens by X; 1 is no penalty",
    )
    group.add_argument(
        "--repeat-last-n",
        type=whole(0),
        default=64,
        metavar="TOKENS",
        help="how many tokens back the penalty looks",
    )
    _add_more_sampling(group)
    grammars.add_options(group)
    group.add_argument(
        "--logit-bias",
        type=bias,
        action="append",
        metavar="ID=BIAS",
        help="added to the logit of a token id; -inf excludes it; may be given several times",
    )
    group.add_argument(
        "--draft-sampling",
        action="store_true",
        help="draw drafts from the head's distribution and accept them by rejection sampling: more "
        "are accepted where --temperature is high, and the text is still the model's",
    )
    group.add_argument(
        "--seed", type=whole(0), metavar="N", help="same seed, same text (default: random)"
    )


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
    from pyllama_mtp.llama.chat import ChatOptions

    thinking = {"on": True, "off": False, "auto": None}[args.reasoning]
    budget = None if args.reasoning_budget < 0 else args.reasoning_budget
    return ChatOptions(thinking, budget, args.reasoning_effort, args.chat_template_kwargs)


def leave_sampling_to_the_model(parser: argparse.ArgumentParser) -> None:
    """What is not given is as the model file says, not as the options do."""
    names = {one.name for one in fields(Sampling)} - {"reasoning_budget"}  # of the chat options
    parser.set_defaults(**dict.fromkeys(names))


def _add_more_sampling(group: argparse._ArgumentGroup) -> None:
    """Samplers that are off unless they are asked for."""
    usual = Sampling()

    def add(*names: str, to: str = "", **how: Any) -> None:
        to = to or names[0].removeprefix("--").replace("-", "_")
        group.add_argument(*names, dest=to, default=getattr(usual, to), **how)

    for which, text in (
        ("frequency", "for each time that it is among them"),
        ("presence", "once"),
    ):
        add(
            f"--{which}-penalty",
            type=real(-math.inf),
            metavar="X",
            help=f"subtract X from the logit of a recent token, {text}; 0 is no penalty",
        )
    add(
        *("--top-n-sigma", "--top-nsigma"),
        type=real(0),
        metavar="N",
        help="keep those whose logit is within N standard deviations of the likeliest's; 0 is all",
    )
    add(
        *("--typical", "--typical-p"),
        to="typical_p",
        type=real(0, 1),
        metavar="P",
        help="keep those of the most usual surprise that sum up to P; 1 is all",
    )
    add(
        "--xtc-probability",
        type=real(0, 1),
        metavar="P",
        help="how often the likeliest tokens are dropped, but the last above the threshold",
    )
    add(
        "--xtc-threshold",
        type=real(0, 1),
        metavar="P",
        help="their least probability",
    )
    add(
        "--dry-multiplier",
        type=real(0),
        metavar="X",
        help="penalty for a token that continues a repetition (DRY): X times the base to the power "
        "of the tokens beyond the allowed length; 0 is none",
    )
    add("--dry-base", type=real(1), metavar="X", help="the base")
    text = "tokens that may be repeated"
    add("--dry-allowed-length", type=whole(0), metavar="TOKENS", help=text)
    text = "how many tokens back DRY looks"
    add("--dry-penalty-last-n", type=whole(0), metavar="TOKENS", help=text)
    group.add_argument(
        "--dry-sequence-breaker",
        dest="dry_sequence_breakers",
        action="append",
        metavar="TEXT",
        help="no repetition goes across it; may be given several times (default: newline, colon, "
        "double quote and star)",
    )


def add_depth_options(parser: argparse.ArgumentParser) -> None:
    """The draft depth, of commands that have one."""
    parser.add_argument(
        "--draft-n-max",
        type=whole_or_auto(0),
        default=Settings.draft_n_max,
        metavar="N|auto",
        help="tokens drafted per round; 0 is no MTP; 'auto' is as many as make it fastest, by what "
        "is measured while it generates",
    )
    add_ngram_option(parser)


def add_ngram_option(parser: argparse.ArgumentParser) -> None:
    """Whether "auto" may look drafts up in the text."""
    parser.add_argument(
        "--no-ngram",
        dest="ngram",
        action="store_false",
        help="with 'auto': never draft from earlier occurrences in the text",
    )


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
    names = ("prompt_rows", "prompt_sync", "hidden", "draft_vocab")
    return Settings(
        n_ctx=args.n_ctx,
        n_batch=args.n_batch,
        n_ubatch=args.n_ubatch,
        n_threads=args.threads,
        cache_type_k=args.cache_type_k,
        cache_type_v=args.cache_type_v,
        flash_attn=args.flash_attn,
        rope=RopeScaling(**{one.name: getattr(args, one.name) for one in fields(RopeScaling)}),
        draft_follow=args.draft_follow,
        draft_head_type=args.draft_head_type,
        draft_n_max=draft_n_max,
        ngram=getattr(args, "ngram", True),  # where the depth can be "auto"
        p_min=args.p_min,
        draft_sampling=getattr(args, "draft_sampling", False),  # with the sampling options
        checkpoints=args.checkpoints,
        rollback=args.rollback,
        synthetic_acceptance=args.synthetic_acceptance if draft_n_max else None,
        **{**{name: getattr(args, name) for name in names}, **switches},
    )


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
