"""Talk with a model, by the chat template of its file. The model's thought is
shown dimmed. Tokens are sampled as the model file says, where the options do
not. Each turn processes only what is new. /help lists what can be typed instead
of a question.

Ctrl-C ends an answer, Ctrl-D the conversation. A line that ends with a
backslash goes on in the next line; a pasted text of several lines is one
question. A file or a pipe can ask, too: one question per line.

examples:
  pyllama-mtp chat --model Qwen3.5-4B-Q8_0.gguf
  pyllama-mtp chat --no-think --system "Answer in one sentence."
  pyllama-mtp chat --reasoning-budget 200 --stats
A model that sees takes pictures: /image photo.jpg, and then the question.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from pyllama_mtp.arguments import flag, nearest
from pyllama_mtp.cli import FAILED, go_on, interrupted, on_signal, options, parsing, progress
from pyllama_mtp.errors import DecodeAborted, PyllamaMtpError, UsageError
from pyllama_mtp.files import decode_text
from pyllama_mtp.images import pixels_of

if TYPE_CHECKING:
    from pyllama_mtp.chats.options import ChatOptions
    from pyllama_mtp.llama.vision import Vision
    from pyllama_mtp.session import Generation, Session
    from pyllama_mtp.settings import Sampling

#: Questions that are remembered across conversations.
HISTORY = 1000

#: Attributes of `ChatOptions` that /set changes.
_CHAT = ("thinking", "budget", "reasoning_effort")

_HELP = """\
/help               this list
/reset              forget the conversation
/image FILE         show a picture with the next question; may be repeated
/retry              answer the last question once more
/system TEXT        what the model is told first; forgets the conversation
/set                show the settings
/set NAME VALUE     change one: temperature 0.7, thinking off, budget 200, ...
/stats              figures of the last answer
/exit               end, as Ctrl-D does"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    parsing.add_whole(
        parser,
        "-n",
        "--max-tokens",
        help="most tokens of an answer (default: what the context has room for)",
    )
    parser.add_argument("--stats", action="store_true", help="show figures after each answer")
    options.add_chat_options(parser)
    options.add_parts(parser, "depth", "ngram")
    options.add_model_options(parser)
    options.add_vision_option(parser)
    options.add_settings_options(parser, n_ctx=f"of the conversation: {options.USUAL_N_CTX}")
    options.add_sampling_options(parser)
    options.leave_sampling_to_the_model(parser)


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends."""
    settings, given = options.settings_from(args, args.draft_n_max), options.sampling_given(args)
    chat = options.chat_options_from(args)
    from pyllama_mtp.llama import native
    from pyllama_mtp.session import Session

    native.load(args.lib)
    with contextlib.ExitStack() as encoder, options.open_model(args) as model:
        options.warn_without_template(model, refuse=True)
        session = encoder.enter_context(Session(model, settings))

        def open_vision() -> Vision | None:
            return encoder.enter_context(options.open_vision(args, model, True))

        if args.mmproj not in (None, "none"):  # else when there is an image to see
            session.vision = open_vision()
        sampling = dataclasses.replace(model.sampling, **given)
        talk = Conversation(
            *(session, open_vision, sampling, chat, args.max_tokens, args.stats, args.system)
        )
        with _line_editing():
            return talk.run()


@dataclasses.dataclass
class Conversation:
    """The messages so far, and the settings of the next answer.

    Attributes:
        open_vision: opens the model's image encoder.
        images: parts of the next question.
    """

    session: Session
    open_vision: Callable[[], Vision | None]
    sampling: Sampling
    chat: ChatOptions
    max_tokens: int | None
    stats: bool
    system: str | None
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    images: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    last: Generation | None = None

    def run(self) -> int:
        """Read and answer until the input ends; the exit code."""
        terminal = sys.stdin.isatty()
        code, pressed = 0, False  # pressed: Ctrl-C, at an empty prompt
        if terminal:
            print("/help lists commands; Ctrl-C ends an answer, Ctrl-D the conversation")
        while True:
            reading = True
            try:
                line = _read(terminal).strip()
                reading = pressed = False
                if line.removeprefix("/") in ("exit", "quit"):
                    return code
                if line.startswith("/") and "\n" not in line:
                    self._command(line)
                elif line:
                    self._ask(line)
            except EOFError:
                if terminal:
                    print()
                return code
            except (KeyboardInterrupt, DecodeAborted):
                leave = pressed and reading
                print("" if leave or not reading else "\n(Ctrl-C again, Ctrl-D or /exit: leave)")
                if not go_on() or not terminal or leave:
                    return interrupted()
                pressed = reading
            except PyllamaMtpError as error:
                print(f"error: {error}", file=sys.stderr)
                code = 0 if terminal else FAILED

    def _command(self, line: str) -> None:
        name, _, rest = line[1:].partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "help": lambda rest: print(_HELP),
            "reset": self._reset,
            "image": self._show_image,
            "retry": self._retry,
            "system": self._set_system,
            "set": self._set,
            "stats": self._show_stats,
        }
        if name not in commands:
            near = nearest(name, [*commands, "exit", "quit"])
            hint = f"did you mean /{near}?" if near else "/help lists the commands"
            raise UsageError(f"there is no /{name}; {hint}")
        commands[name](rest.strip())

    # -- turns ---------------------------------------------------------------------------------

    def _ask(self, text: str) -> None:
        """Ask about the images that were given since the last question, if there are any."""
        images, self.images = self.images, []
        self._say([*images, {"type": "text", "text": text}] if images else text)

    def _say(self, content: str | list[dict[str, Any]]) -> None:
        """Ask, show the answer, and remember both; forget a question without an answer."""
        asked: list[dict[str, Any]] = [*self.messages, {"role": "user", "content": content}]
        first = [{"role": "system", "content": self.system}] if self.system else []
        with progress.prompt() as tell:
            self.last = self.session.chat(
                [*first, *asked],
                options=self.chat,
                max_tokens=self.max_tokens,
                sampling=self.sampling,
                on_progress=tell,
            )
            _show(self.last)
        self.messages = [*asked, self.last.message]
        if self.last.finish_reason == "length":
            print("[the answer has no room to go on: see max_tokens, --n-ctx]", file=sys.stderr)
        if self.stats:
            self._show_stats()

    def _reset(self, rest: str = "") -> None:
        self.messages, self.images = [], []
        self.last = None

    def _show_image(self, rest: str) -> None:
        """Take an image into the next question; its file is read now."""
        if not rest:
            raise UsageError("which image? /image FILE")
        pixels = pixels_of(Path(rest.strip("'\"")).expanduser())  # a terminal may put quotes
        if self.session.vision is None:
            self.session.vision = self.open_vision()
        self.images.append({"type": "image", "image": pixels})

    def _retry(self, rest: str) -> None:
        if not self.messages:
            raise UsageError("nothing was asked yet")
        *self.messages, question, _ = self.messages
        self._say(question["content"])

    def _set_system(self, rest: str) -> None:
        self._reset()
        self.system = rest or None

    def _show_stats(self, rest: str = "") -> None:
        from pyllama_mtp.measure.text import telemetry_lines

        if self.last is None:
            raise UsageError("nothing was answered yet")
        print("\n".join(telemetry_lines(self.last.telemetry)), file=sys.stderr)

    # -- settings ------------------------------------------------------------------------------

    def _set(self, rest: str) -> None:
        """Show the settings, or change one."""
        from pyllama_mtp.request import Limits

        if not rest:
            shown = [f"{name:22}{value!s:16} " for name, value in self._settings().items()]
            columns = shown[: -(len(shown) // -2)], shown[-(len(shown) // -2) :]
            print("\n".join("".join(row).rstrip() for row in zip_longest(*columns, fillvalue="")))
            return
        name, _, text = rest.partition(" ")
        name, value = name.replace("-", "_"), _value(text.strip())
        if name not in self._settings():
            raise UsageError(f"there is no setting {name!r}; /set shows them")
        if name == "stats":
            self.stats = flag("stats", value)
        elif name == "max_tokens":
            self.max_tokens = None if value is None else Limits(value).max_tokens
        elif name in _CHAT:
            self.chat = dataclasses.replace(self.chat, **{name: value})
        else:
            self.sampling = dataclasses.replace(self.sampling, **{name: value})

    def _settings(self) -> dict[str, Any]:
        sampling = dataclasses.asdict(self.sampling)
        for other in ("grammar", "logit_bias", "logits_processors", "reasoning_budget"):
            del sampling[other]
        chat = {name: getattr(self.chat, name) for name in _CHAT}
        return {**chat, "max_tokens": self.max_tokens, "stats": self.stats, **sampling}


def _value(text: str) -> Any:
    """The value that a word of /set means; "auto" is None."""
    words = {"on": True, "off": False, "true": True, "false": False, "auto": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


# -- the terminal ----------------------------------------------------------------------------------


def _read(terminal: bool) -> str:
    """The next question: a line, joined with the next one after a backslash; or a pasted text.
    Raises UsageError: it is not UTF-8."""
    lines, prompt = [input("> " if terminal else "")], ". " if terminal else ""
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(prompt))
    text = "\n".join(lines)
    return decode_text(text.encode(errors="surrogateescape"), "the question") if text else ""


def _show(generation: Generation) -> None:
    """Write an answer as it comes, its thought dimmed, or left out if stdout is not a terminal.

    Ctrl-C ends the answer and keeps its text.
    """
    terminal = sys.stdout.isatty()
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    dim, bright = ("", "") if plain else ("\x1b[2m", "\x1b[0m")
    thought = False
    try:
        with _stopped_softly(generation) as stopped:
            for piece in generation:
                if piece.thought != thought and terminal:
                    sys.stdout.write(dim if piece.thought else f"{bright}\n\n")
                    thought = piece.thought
                if terminal or not piece.thought:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
                if stopped:
                    generation.stop()
                    break
    finally:
        sys.stdout.write(f"{bright if thought else ''}\n")
        sys.stdout.flush()


@contextlib.contextmanager
def _stopped_softly(generation: Generation) -> Iterator[list[int]]:
    """A list that Ctrl-C fills, so that the answer can end after its next piece. Before the first
    piece, or pressed twice, Ctrl-C interrupts the computation."""
    stopped: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if stopped or not generation.tokens:
            on_signal(number, frame)
        stopped.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Editing of questions, and a history across conversations, where Python has readline. Bytes
    that are not text reach :func:`_read`, which names them."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    try:
        import readline
    except ImportError:
        readline = None  # type: ignore[assignment]
    if readline is None or not sys.stdin.isatty():
        yield
        return
    readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    file = Path(state) / "pyllama-mtp" / "chat-history"
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(HISTORY)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            readline.write_history_file(file)
            file.chmod(0o600)
