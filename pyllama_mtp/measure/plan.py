"""The plan of a matrix: its cells, and the order in which they are measured. Pure.

A *group* is one repeat of one prompt size and class: every cell of these once, on the same text,
side by side. Groups of the first repeat come first, so that a run that is cut short has samples of
all cells.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import fields
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from pyllama_mtp.errors import UsageError
from pyllama_mtp.settings import AUTO_DEPTH, GOLDEN, STORE, Settings, falling_rates

#: What is measured where nothing else is asked for: depths, prompt sizes, those after a context
#: that is filled, tokens to generate, samples of a cell.
DEPTHS: tuple[int | str, ...] = (0, 2, 3, "auto")
SIZES, FILLED_SIZES = (512, 1024, 2048), (512,)
MAX_TOKENS, REPEAT = 256, 7
#: Other programs that can be measured, and whether they can draft with the MTP head.
PEERS = {"llama-server": True, "llama-bench": False}
#: Axes that other programs have, too.
SHARED_AXES = ("n_batch", "n_ubatch", "n_threads", "flash_attn", "cache_type_k", "cache_type_v")
#: Axes that are no fields of `Settings`: sequences that are generated at once, and tokens in the
#: context before the prompt.
OWN_AXES = ("n_sequences", "n_context")
#: Axes of other programs.
PEER_AXES = (*SHARED_AXES, "p_min", "synthetic_acceptance", "n_context")
#: Axes that matter without MTP, too.
PLAIN_AXES = (*SHARED_AXES, "checkpoints", *OWN_AXES)
#: Axes that matter only to drafts, with their defaults, with which no MTP is measured.
DRAFT_AXES: dict[str, Any] = {
    field.name: field.default
    for field in fields(Settings)
    if field.name
    not in ("n_ctx", "rope", "draft_n_max", "synthetic_acceptance", *PLAIN_AXES, *STORE)
}
#: Those of them that have options of their own, for several values, and columns in all records.
SWITCHES = ("prompt_rows", "prompt_sync", "hidden", "draft_vocab")
#: All axes of a plan.
AXES = (*PLAIN_AXES, *DRAFT_AXES, "synthetic_acceptance")

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
#: Tokens of a prompt, and its class.
Kind: TypeAlias = tuple[int, str]

#: The class of prompts that begin with the plan's image.
IMAGE = "image"
#: Classes of plain text, which the model continues; of IMAGE, after the image.
TEXTS = ("text", "source", IMAGE)
#: The class of prompts that ask to write a text again.
COPY = "copy"


class ImageFile(Struct, frozen=True, omit_defaults=True):
    """The image of a plan.

    Attributes:
        name: of its file, without the folder; "": it came from no file.
        sha256: of the pixels; in older records of the file.
        width, height: in pixels, before the encoder scales it.
        n_tokens: that it has in a prompt.
        mmproj, mmproj_sha256: the encoder's file.
    """

    name: str
    sha256: str
    width: int
    height: int
    n_tokens: int = 0
    mmproj: str = ""
    mmproj_sha256: str = ""

    @property
    def words(self) -> str:
        """ "photo.jpg (640 x 480 pixels)"."""
        return f"{self.name or self.sha256[:12]} ({self.width} x {self.height} pixels)"


class Key(Struct, frozen=True):
    """The identity of a cell in its run: what is measured, and of which prompts.

    Attributes:
        build: a name in the run's `builds`: one of the plan's native libraries or peers.
        n_prompt: tokens of the prompt; 0: questions as they are, each of another length.
        n_max: drafts per round, of an adaptive cell the most; 0 is no MTP.
        max_tokens: to generate, the first token included.
        adaptive: the depth is chosen while generating, from 0 to n_max.
        axes: its values of those of the plan's axes that matter to it.
    """

    build: str
    n_prompt: Count
    prompt_class: str
    n_max: Count
    max_tokens: Positive
    adaptive: bool = False
    axes: dict[str, Any] = {}

    def __hash__(self) -> int:
        """Equal for equal keys, whatever the order of their axes."""
        return hash(msgspec.json.encode(self, order="sorted"))

    @property
    def kind(self) -> Kind:
        """The size and class of the prompts."""
        return self.n_prompt, self.prompt_class

    @property
    def depth(self) -> int | str:
        """Drafts per round, or "auto"."""
        return "auto" if self.adaptive else self.n_max

    @property
    def n_sequences(self) -> int:
        """Sequences that are generated at once."""
        return int(self.axes.get("n_sequences", 1))

    @property
    def n_context(self) -> int:
        """Tokens in the context before the prompt."""
        return int(self.axes.get("n_context", 0))

    @property
    def settings(self) -> dict[str, Any]:
        """The axes that are fields of `Settings`."""
        return {name: value for name, value in self.axes.items() if name not in OWN_AXES}

    @property
    def plain(self) -> Key:
        """The key of the cell without MTP that this one is compared with."""
        axes = {name: value for name, value in self.axes.items() if name in PLAIN_AXES}
        return replace(self, n_max=0, adaptive=False, axes=axes)

    def axis(self, name: str) -> str:
        """The value on an axis in words; "" where the axis does not matter, or is none of these."""
        return axis_words(self.axes[name]) if name in self.axes else ""


class Plan(Struct, frozen=True, omit_defaults=True):
    """What to measure: every size and class `repeat` times, with another text each time. A repeat
    measures every variant side by side on the same text. Who makes it checks single values.

    Sizes, classes and libraries are all combined. Every depth above 0 is measured with all
    combinations of the axes, but only "auto" with those of `ngram`; depth 0 with those of
    PLAIN_AXES. Other programs, by their names in `PEERS`, are measured without MTP; those that can
    draft, also at the depths that are numbers.

    Attributes:
        sizes: of prompts, in tokens; 0: questions as they are, without text before them.
        depths: drafts per round; 0 is no MTP, "auto" chosen while generating.
        max_tokens: generated per sample.
        stop_at_end: an answer ends where the model ends it; otherwise end tokens are ignored.
        repeats: of size 0, by class; other sizes have `repeat`.
        axes: values of further fields of :class:`.Settings`, and of OWN_AXES, by name.
        classes: kinds of prompts: "text", "code", "factual", "thinking", "instruction"; "image":
            text after the image.
        libraries, peers: this project's libraries and other programs; names in `builds`.
        prompts: where the text of the prompts came from.
        image: of the class "image", whose prompts begin with it; its tokens are among their size.
        auto_most: most drafts of the depth "auto".
    """

    sizes: tuple[int, ...]
    depths: tuple[int | str, ...]
    max_tokens: int
    repeat: int
    axes: dict[str, tuple[Any, ...]] = {}
    classes: tuple[str, ...] = ("text",)
    libraries: tuple[str, ...] = ("",)
    peers: tuple[str, ...] = ()
    prompts: str = ""
    stop_at_end: bool = False
    repeats: dict[str, int] = {}
    image: ImageFile | None = None
    auto_most: int = AUTO_DEPTH

    def __post_init__(self) -> None:
        """Refuse plans that measure nothing, or the same cell twice."""
        own = {"classes": self.classes, "libraries": self.libraries}
        values_of = {"prompt sizes": self.sizes, "depths": self.depths, **self.axes, **own}
        for name, values in values_of.items():
            if not values:
                raise UsageError(f"no {name} given")
            _check_distinct(name, values)
        _check_distinct("peers", self.peers)
        _check_distinct("libraries and peers", (*self.libraries, *self.peers))
        ways = self.axes.get("prompt_sync", ())
        if len(ways) > 1 and "auto" in ways:
            raise UsageError(
                f"prompt_sync {', '.join(ways)} name one value twice: auto is kv or full; leave it "
                "out"
            )
        if self.peers and "n_sequences" in self.axes:
            raise UsageError("other programs are measured with one sequence; leave n_sequences out")
        if "n_context" in self.axes:
            self._check_contexts()
        if (self.image is not None) != (IMAGE in self.classes):
            raise UsageError(
                "prompts of the class 'image' need an image (--image FILE), and an image needs "
                f"that class; the classes are {', '.join(self.classes)}"
            )

    def _check_contexts(self) -> None:
        """Refuse what cannot be measured after a context that was filled before."""
        for wrong, why in (
            ("n_sequences" in self.axes, "several sequences have empty contexts"),
            (len(self.sizes) > 1, "they are measured with one prompt size (-p)"),
            (
                {*self.classes} - {"text", "source"},
                "they are filled with text that the prompt continues: classes text and source",
            ),
        ):
            if wrong:
                raise UsageError(f"lengths of the context (--at): {why}; leave one of them out")

    @property
    def contexts(self) -> tuple[int, ...]:
        """Tokens in the context before the prompt, ascending."""
        return tuple(sorted(self.axes.get("n_context", (0,))))

    def cells(self, n_prompt: int, prompt_class: str) -> tuple[Key, ...]:
        """The cells of one size and class, in the order of the table."""
        builds: list[tuple[str, tuple[int | str, ...], Container[str]]]
        builds = [(library, self.depths, AXES) for library in self.libraries]
        for name in self.peers:
            depths = (self.fixed_depths or (0,)) if PEERS[name] else (0,)
            builds.append((name, depths, PEER_AXES))
        return tuple(
            Key(
                *(build, n_prompt, prompt_class, self._most(depth, axes), self.max_tokens),
                *(depth == "auto", axes),
            )
            for build, depths, among in builds
            for depth in depths
            for axes in self._combinations(depth, among)
        )

    def _most(self, depth: int | str, axes: dict[str, Any]) -> int:
        """Most drafts per round."""
        if isinstance(depth, int):
            return depth
        rates = axes.get("synthetic_acceptance", range(self.auto_most))
        return AUTO_DEPTH if rates is None else min(AUTO_DEPTH, len(rates))

    def _combinations(self, depth: int | str, among: Container[str]) -> list[dict[str, Any]]:
        """Every combination of values on those axes that matter at this depth."""
        axes = [
            [(name, [*value] if isinstance(value, tuple) else value) for value in self.axes[name]]
            for name in sorted(self.axes, key=AXES.index)
            if name in among and (depth != 0 or name in PLAIN_AXES)
            if name != "ngram" or depth == "auto"
        ]
        return [*map(dict, itertools.product(*axes))]

    @property
    def fixed_depths(self) -> tuple[int, ...]:
        """The depths that are numbers."""
        return tuple(depth for depth in self.depths if isinstance(depth, int))

    def filler(self, key: Key) -> Key:
        """In whose way the context of a cell is filled: without MTP, in that of one with it, if
        there is any that is like it otherwise. A copy leaves out what MTP has in the context."""
        if key.n_max or key.build in self.peers:
            return key
        return next((one for one in self.cells(*key.kind) if one.n_max and one.plain == key), key)

    def kinds(self) -> list[Kind]:
        """(size, class) of every group of one repeat, in their order."""
        return [(size, kind) for kind in self.classes for size in self.sizes]

    def groups(self) -> list[tuple[int, tuple[Key, ...]]]:
        """All groups in the order in which they are measured, the first repeat of all sizes and
        classes first: the number of the repeat, and its cells in the order of their turns."""
        cells = {kind: self.cells(*kind) for kind in self.kinds()}
        most = max(self.repeats_of(*kind) for kind in cells)
        return [
            (repeat, self.order(own, repeat))
            for repeat in range(most)
            for kind, own in cells.items()
            if repeat < self.repeats_of(*kind)
        ]

    def repeats_of(self, size: int, prompt_class: str) -> int:
        """How many repeats a size and class has."""
        return self.repeat if size else self.repeats.get(prompt_class, self.repeat)

    def order(self, cells: Sequence[Key], repeat: int) -> tuple[Key, ...]:
        """The cells of a group in the order in which they take their turns.

        Every pair of repeats begins with another cell, and the second of a pair goes backwards, so
        that no cell gains by being first or by its neighbours. Other programs stay together, before
        or after the libraries. Longer contexts come later.
        """
        order = list[Key]()
        for n_context in self.contexts:
            turned = list[Key]()
            for peer in (False, True):
                block = [
                    one
                    for one in cells
                    if one.n_context == n_context and (one.build in self.peers) == peer
                ]
                start = repeat // 2 % len(block) if block else 0
                turned += block[start:] + block[:start]
            order += turned[::-1] if repeat % 2 else turned
        return tuple(order)

    @property
    def n_samples(self) -> int:
        """Samples of the whole plan."""
        return sum(len(cells) for _, cells in self.groups())

    def label(self, key: Key) -> str:
        """The cell in words, but for its size and class, as far as the plan varies it: "depth 3,
        rows all"."""
        several = len(self.libraries) > 1 or key.build in self.peers
        words = [key.build] if several else []
        words.append(f"depth {key.depth}" if key.n_max else "no MTP")
        for name in key.axes:
            if len(self.axes[name]) > 1:
                words.append(f"{axis_name(name)} {key.axis(name)}")
        return ", ".join(words)

    def context_needed(self, size: int) -> int:
        """Tokens of context that the cells of one size need beside what is before the prompt; the
        same for all variants."""
        adaptive = len(self.fixed_depths) < len(self.depths)
        deepest = max(*self.fixed_depths, AUTO_DEPTH if adaptive else 0, 0)
        return size + self.max_tokens + deepest + 1


def _check_distinct(name: str, values: Sequence[object]) -> None:
    if len(set(map(repr, values))) != len(values):
        raise UsageError(f"{name} {', '.join(map(str, values))} name one value twice")


def axis_name(name: str) -> str:
    """The name of an axis in a table."""
    if name == "synthetic_acceptance":
        return "acceptance"
    return name.removeprefix("prompt_").removeprefix("n_").replace("_", " ")


def axis_words(value: Any) -> str:
    """A value of an axis in words: "on", "q8_0", "0.8^6" (0.8 to the power of the position)."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if not isinstance(value, list | tuple):
        return "none" if value is None else str(value)
    if name := next((name for name, rates in GOLDEN.items() if rates == tuple(value)), None):
        return name
    if len(value) > 1 and list(value) == powers(value[0], len(value)):
        return f"{value[0]:g}^{len(value)}"
    return "/".join(f"{rate:g}" for rate in value)


def axis_value(name: str, word: str) -> Any:
    """The inverse of :func:`axis_words`, for this axis. A word that is no value stays a word."""
    field = Settings.__dataclass_fields__.get(name)
    read: Callable[[str], Any] = field.metadata["kind"].read if field else int
    if name == "synthetic_acceptance":
        read = _rates
    elif field and isinstance(field.default, bool):
        return {"on": True, "off": False, "true": True, "false": False}.get(word.lower(), word)
    try:
        return read(word)
    except ValueError:
        return word


def _rates(word: str) -> tuple[float, ...] | None:
    rate, power, n = word.partition("^")
    if power:
        return tuple(powers(float(rate), int(n)))
    if ":" in word:
        return falling_rates("synthetic_acceptance", word)
    return None if word == "none" else tuple(map(float, word.split("/")))


def powers(rate: float, n: int) -> list[float]:
    """Unconditional acceptance of `n` positions, `rate` being the conditional one at each."""
    return [round(rate**position, 4) for position in range(1, n + 1)]


# -- time ------------------------------------------------------------------------------------------


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """Seconds of "90s", "10m", "1.5h"; a plain number is seconds.

    Raises:
        UsageError: anything else, or nothing above 0.
    """
    words = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([smh]?)", text.strip().lower())
    seconds = float(words[1]) * _UNITS[words[2] or "s"] if words else 0.0
    if seconds <= 0:
        raise UsageError(f"{text!r} is no length of time; give 90s, 10m or 1h")
    return seconds


def duration(seconds: float) -> str:
    """Seconds in words: "8 s", "2 min 05 s", "1 h 10 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
