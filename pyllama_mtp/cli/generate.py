"""Continue a prompt. With a draft depth above 0 the model's MTP head drafts tokens
that the model then verifies in one pass; the text is the model's own either way.

The text goes to stdout, everything else to stderr. Ctrl-C keeps the text so
far, prints the figures of --stats if they were asked for, and exits with 130.

examples:
  pyllama-mtp generate --chat "What does str.split() do?"
  pyllama-mtp generate --stats --draft-n-max 3 --prompt-file question.txt
  pyllama-mtp generate --model Qwen3.5-4B-Q8_0.gguf --chat "Why is it dark?"
  pyllama-mtp generate --stop $'\\n\\n' --temperature 0.8 --seed 1 "Once upon"
  git diff | pyllama-mtp generate --model FILE --chat --system "Review this." -
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllama_mtp.cli import interrupted, options, parsing, progress
from pyllama_mtp.errors import DecodeAborted, UsageError
from pyllama_mtp.files import decode_text, read_text
from pyllama_mtp.settings import MOST_TOKENS, Settings

if TYPE_CHECKING:
    from pyllama_mtp.llama.model import Model
    from pyllama_mtp.llama.vision import ImagePrompt, Vision
    from pyllama_mtp.measure.intervals import Ratio
    from pyllama_mtp.session import Generation, Session
    from pyllama_mtp.settings import Sampling
    from pyllama_mtp.telemetry import Pair

#: The answer's speed against no MTP: parts of it, plain steps for each, and most seconds of them.
PARTS, STEPS, MOST_S = 4, 4, 4.0


def _max_tokens(text: str) -> int:
    """An argparse type: at least 1, or -1 for as many as there is room for."""
    return parsing.whole(-1)(text) or parsing.whole(1)(text)


def add_options(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text; '-' reads stdin")
    source.add_argument("-p", "--prompt", dest="text", metavar="TEXT", help="the same as PROMPT")
    source.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a UTF-8 file")
    parser.add_argument(
        "--chat", action="store_true", help="put the prompt into the model's chat template"
    )
    options.add_template_option(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message; needs --chat")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="an image before the text; may be given several times",
    )
    options.add_vision_option(parser)
    parser.add_argument(
        *("-n", "--max-tokens"),
        type=_max_tokens,
        default=256,
        metavar="N",
        help="tokens to generate; -1: as many as the context has room for",
    )
    options.add_parts(parser, "depth", "ngram")
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text appears; may be given several times",
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="go on after the model's end-of-text token"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--stats",
        action="store_true",
        help="print to stderr: tokens, seconds, tokens per second, how many drafts were accepted, "
        "and the speed-up over no MTP, measured by some steps without it after the answer (from 32 "
        "tokens on)",
    )
    output.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object at the end instead of the text (seconds, bytes)",
    )
    output.add_argument(
        "--log-pairs",
        metavar="FILE.jsonl",
        help="write each draft with the token that the model chose, one JSON object per line; the "
        "file must not exist",
    )
    options.add_model_options(parser)
    options.add_settings_options(parser, n_ctx=options.USUAL_N_CTX)
    options.add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    """Generate, stream, and report."""
    text = read_prompt(args)
    _check(args)
    settings, sampling = options.settings_from(args, args.draft_n_max), options.sampling_from(args)
    with parsing.new_file(args.log_pairs) as pairs:
        from pyllama_mtp.llama import native
        from pyllama_mtp.session import Session

        library = native.load(args.lib)
        with (
            options.open_model(args) as model,
            options.open_vision(args, model, True) if args.image else nullcontext() as vision,
        ):
            prompt = tokenize(model, text, args, vision)
            n = args.max_tokens
            more = PARTS * (STEPS + 1) if args.stats else 0
            room = min(len(prompt) + n + more, MOST_TOKENS) if n > 0 else 0
            with Session(model, settings, room=room) as session, progress.prompt() as tell:
                generation = session.generate(
                    prompt,
                    max_tokens=args.max_tokens,
                    sampling=sampling,
                    stop=tuple(args.stop),
                    ignore_eos=args.ignore_eos,
                    log_pairs=args.log_pairs is not None,
                    log_ties=args.stats and library.has_tap and not model.same_bits,
                    on_progress=tell,
                )
                marks = [(0, 0.0)]
                stopped = stream(generation, marks, show=not args.json)
                speed_up = None
                if args.stats and not stopped and isinstance(prompt, list):
                    speed_up = _speed_up(session, generation, prompt, marks, sampling)
                settings = dataclasses.replace(settings, n_ctx=session.n_ctx)
                report = _report(generation, settings, session.memory(), library, model)
        if pairs:
            pairs.write(*map(_record, generation.telemetry.pairs or ()))
        if args.json:
            print(json.dumps(report, ensure_ascii=False))
        _say(args, generation, speed_up)
    return interrupted() if stopped else 0


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt from the argument, the file or stdin.

    Raises:
        UsageError: none was given, it is empty, or it is not UTF-8.
    """
    if args.prompt_file is not None:
        return read_text(args.prompt_file)
    text = args.prompt if args.text is None else args.text
    if text is None:
        raise UsageError("no prompt: give it as an argument, with --prompt-file, or '-' for stdin")
    if text == "-":
        return decode_text(sys.stdin.buffer.read(), "the prompt on stdin")
    return decode_text(os.fsencode(text), "the prompt")


def _check(args: argparse.Namespace) -> None:
    """Refuse options that contradict each other."""
    if args.system is not None and not args.chat:
        raise UsageError("--system needs --chat: only a chat template has a system message")
    if args.chat_template is not None and not args.chat:
        raise UsageError("--chat-template needs --chat")
    if "" in args.stop:
        raise UsageError("--stop with an empty text would end every generation at once")
    if args.draft_n_max == 0 and args.log_pairs:
        raise UsageError("--log-pairs needs drafts, but --draft-n-max is 0")


def tokenize(
    model: Model, text: str, args: argparse.Namespace, vision: Vision | None = None
) -> list[int] | ImagePrompt:
    """The prompt's token ids, with --chat after the chat template; or the prompt with images."""
    from pyllama_mtp.chats.options import ChatOptions
    from pyllama_mtp.llama.vision import IMAGE_MARKER

    if not args.chat:
        if vision is None:
            return model.tokenize(text)
        return vision.prompt(IMAGE_MARKER * len(args.image) + text, args.image)
    images = [{"type": "image", "image": file} for file in args.image]
    asked = [*images, {"type": "text", "text": text}] if images else text
    messages: list[dict[str, Any]] = [{"role": "user", "content": asked}]
    if args.system is not None:
        messages.insert(0, {"role": "system", "content": args.system})
    return ChatOptions().turn(model, messages, vision=vision)


def stream(generation: Generation, marks: list[tuple[int, float]], *, show: bool) -> bool:
    """Write the text to stdout as it comes; True if the user interrupted. `marks` gets tokens after
    the first one, and seconds of decode, at each piece of text."""
    t = generation.telemetry
    try:
        for piece in generation:
            marks.append((t.n_generated - 1, t.decode_s))
            if show:
                sys.stdout.write(piece)
                sys.stdout.flush()
    except (KeyboardInterrupt, DecodeAborted):
        return True
    finally:
        if show:
            sys.stdout.write("\n")
            sys.stdout.flush()
    return generation.finish_reason == "interrupted"


def _report(
    generation: Generation, settings: Settings, memory: dict[str, int], library: Any, model: Model
) -> dict[str, Any]:
    telemetry = generation.telemetry.to_dict()
    telemetry.pop("pairs", None)
    return {
        "model": Path(model.path).name,
        "variant": library.variant,
        "upstream_commit": library.stamp.get("upstream_commit"),
        "text": generation.text,
        "tokens": list(generation.tokens),
        "finish_reason": generation.finish_reason or "interrupted",
        "telemetry": telemetry,
        "settings": dataclasses.asdict(settings),
        "memory": memory,
    }


def _speed_up(
    session: Session,
    generation: Generation,
    prompt: list[int],
    marks: list[tuple[int, float]],
    sampling: Sampling,
) -> Ratio | None:
    """Decode speed against no MTP: parts of the answer against steps without drafts that go on from
    its end. None: nothing was drafted, or the answer or the room behind it is too short.

    Args:
        marks: see :func:`stream`.
    """
    from pyllama_mtp.measure.intervals import typical_ratio
    from pyllama_mtp.measure.text import ENOUGH_TOKENS

    t, ids = generation.telemetry, [*prompt, *generation.tokens]
    if not (t.drafted or t.looked_up["rounds"]) or t.n_generated < ENOUGH_TOKENS:
        return None
    if len(ids) + PARTS * (STEPS + 1) > session.n_ctx:
        return None
    total = marks[-1][0]
    ends = [next(m for m in marks if m[0] >= part * total / PARTS) for part in range(PARTS + 1)]
    parts = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(ends)]
    ratios, spent = list[float](), 0.0
    usual = dataclasses.replace(sampling, grammar=None, reasoning_budget=None)
    for n, seconds in filter(all, parts):
        plain = session.generate(
            ids, max_tokens=STEPS + 1, sampling=usual, ignore_eos=True, draft=False
        ).run()
        ids += plain.tokens
        ratios.append(n / seconds / plain.telemetry.decode_tps)
        spent += plain.telemetry.elapsed_s
        if len(ratios) > 1 and spent > MOST_S:
            break
    return typical_ratio(ratios) if len(ratios) > 1 else None


#: Why an answer ended, in words, by `finish_reason`.
ENDS = {
    "eos": "the model ended its text",
    "stop": "a stop string came",
    "length": "as many tokens as asked for, or as there was room for, were written",
}


def _say(args: argparse.Namespace, generation: Generation, speed_up: Ratio | None) -> None:
    """Print figures to stderr, if they were asked for."""
    from pyllama_mtp.measure.text import telemetry_lines

    if args.stats:
        lines = telemetry_lines(generation.telemetry, speed_up)
        if end := ENDS.get(generation.finish_reason or ""):
            lines.append(f"end        {end}")
        print("\n".join(lines), file=sys.stderr)


def _record(pair: Pair) -> dict[str, Any]:
    """A line of --log-pairs."""
    return {**dataclasses.asdict(pair), "accepted": pair.drafted == pair.actual}
