"""What is asked of a matrix: the one place of its defaults and checks, for the command line and for
Python; and what a model can do of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pyllama_mtp.arguments import as_float, as_index, listed, whole
from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.plan import (
    AXES,
    DEPTHS,
    DRAFT_AXES,
    FILLED_SIZES,
    IMAGE,
    MAX_TOKENS,
    PLAIN_AXES,
    REPEAT,
    SIZES,
    TEXTS,
    Plan,
)
from pyllama_mtp.measure.prompts import Picture, Prompt, check_classes, source_of_prompts
from pyllama_mtp.measure.records import check_output, read_file
from pyllama_mtp.measure.runner import split_library
from pyllama_mtp.measure.text import size_name
from pyllama_mtp.settings import AUTO_DEPTH, MOST_TOKENS, Sampling, Settings

if TYPE_CHECKING:
    from pyllama_mtp.llama.model import Model


@dataclass(kw_only=True)
class MatrixRequest:
    """A request for a matrix, checked before anything is loaded. Sizes, depths, classes and the
    values of an axis may be one value or several. None is what is usual.

    Attributes:
        sizes: of prompts, in tokens; see :class:`.Plan`, as for what is not explained here. None:
            SIZES, or with `n_context` FILLED_SIZES.
        fewer_sizes: sizes beyond the model's context are left out, as the usual ones are.
        depths: None: DEPTHS, as far as there are imposed rates for them; without an MTP head 0 and
            "auto", with drafts from the text.
        else_text: without an MTP head, measure these in place of `depths`, too.
        classes: None: the image where there is one; text; for filled contexts source, of which
            there is enough, so that short and long ones hold the same kind.
        axes: values of fields of `Settings` and of OWN_AXES, by name.
        settings, sampling: of every cell. `draft_n_max` is set to the cell's depth, `n_ctx` 0 to
            what the cells of a size need; the axes replace their fields, and imposed rates are cut
            to the depth.
        command: as it was given; paths lose their folders in the records.
        libraries: "upstream", "patched" or folders, with what their processes are given: see
            :func:`.split_library`; "" is the library that is loaded.
        placement: arguments of `Model`, for the processes of further libraries.
        text: to cut prompts from; None: the package's own. text_name: of its file.
        questions: of the user, for classes of their own.
        prompts: where the prompts came from, in words; "": the text says it.
        picture: of the prompts of the class "image".
        budget_s: seconds after which no further repeat begins; None: no limit.
        least_repeats: repeats that are measured whatever the budget.
        output: the file; None: no file.
        resume: go on with the last run in the file.
        plan: of all this.

    Raises:
        UsageError: an unknown name or a value out of range, a plan that measures nothing or a cell
            twice, a file that cannot be written.
    """

    sizes: Any = None
    fewer_sizes: bool = False
    depths: Any = None
    else_text: bool = False
    max_tokens: Any = MAX_TOKENS
    repeat: Any = REPEAT
    classes: Any = None
    axes: Mapping[str, Any] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)
    sampling: Sampling = field(default_factory=Sampling)
    command: Sequence[str] = ()
    libraries: tuple[str, ...] = ("",)
    peers: tuple[str, ...] = ()
    placement: Mapping[str, Any] = field(default_factory=dict)
    stop_at_end: bool = False
    repeats: Mapping[str, int] = field(default_factory=dict)
    text: str | None = None
    text_name: str = "text"
    questions: Sequence[Prompt] = ()
    prompts: str = ""
    picture: Picture | None = None
    budget_s: float | None = None
    least_repeats: int = 0
    output: str | os.PathLike[str] | None = None
    resume: bool = False
    plan: Plan = field(init=False)

    def __post_init__(self) -> None:
        """Make the plan, and refuse what cannot end well."""
        for name, kind in (("settings", Settings), ("sampling", Sampling)):
            if not isinstance(given := getattr(self, name), kind):
                raise UsageError(
                    f"{name} is a {type(given).__name__}; it must be a {kind.__name__}"
                )
        if self.budget_s is not None and not (as_float(self.budget_s) or 0) > 0:
            raise UsageError(
                f"budget_s is {self.budget_s!r}; it must be a number of seconds above 0"
            )
        axes = {name: axis_values(name, given) for name, given in self.axes.items()}
        for name, usual in DRAFT_AXES.items():
            if (value := getattr(self.settings, name)) != usual:
                axes.setdefault(name, (value,))
        #: Draft vocabularies by the names that the plan has for them, without folders.
        self.vocabularies = {without_folders(str(one)): one for one in axes.get("draft_vocab", ())}
        if self.vocabularies:
            axes["draft_vocab"] = (*self.vocabularies,)
        self.plan = self._plan(axes)
        self._check_libraries()
        if self.resume:
            if self.output is None:
                raise UsageError("--resume needs the file of the run; leave --no-output out")
            read_file(self.output)  # which refuses a file that is not there
        if self.output is not None:
            check_output(self.output)

    @property
    def mtp(self) -> bool | None:
        """Whether the model needs an MTP head; None: it is used if there is one."""
        usual = self.depths is None or self.else_text
        if usual or (not any(self.plan.fixed_depths) and "auto" in self.plan.depths):
            return None
        return any(self.plan.depths)

    def _plan(self, axes: dict[str, tuple[Any, ...]]) -> Plan:
        filled, image = "n_context" in axes, self.picture.file if self.picture else None
        usual_class = IMAGE if image else "source" if filled else "text"
        classes = _several("classes", self.classes, (usual_class,), "('text', 'code')")
        own = {question.kind for question in self.questions}
        check_classes([name for name in classes if name not in own], TEXTS)
        sizes = _several("sizes", self.sizes, FILLED_SIZES if filled else SIZES, "(512, 2048)")
        rates = self._rates(axes)
        usual = tuple(d for d in DEPTHS if rates is None or d == "auto" or int(d) <= len(rates))
        depths = tuple(map(_depth, _several("depths", self.depths, usual, "(0, 3, 'auto')")))
        _check_drafts(depths, rates, self.axes)
        least = 0 if self.stop_at_end else 1
        imposed = self.settings.synthetic_acceptance
        return Plan(
            tuple(_whole("sizes", size, least) for size in sizes),
            depths,
            _whole("max_tokens", self.max_tokens),
            _whole("repeat", self.repeat),
            axes,
            classes,
            tuple(map(_label, self.libraries)),
            self.peers,
            self.prompts or source_of_prompts(self.text_name, self.text),
            self.stop_at_end,
            dict(self.repeats),
            image,
            min(AUTO_DEPTH, len(imposed)) if imposed else AUTO_DEPTH,
        )

    def _rates(self, axes: Mapping[str, tuple[Any, ...]]) -> Sequence[float] | None:
        """The fewest imposed rates of acceptance; None: there are none."""
        imposed = axes.get("synthetic_acceptance", (self.settings.synthetic_acceptance,))
        return min(filter(None, imposed), key=len, default=None)

    def _check_libraries(self) -> None:
        """Refuse libraries and other programs that cannot be measured so."""
        variables = [split_library(library)[1] for library in self.libraries]
        if variables[0]:
            raise UsageError(
                f"{self.libraries[0]} is the first of --variants and has no process of its own; "
                "name the plain library first"
            )
        if self.peers and self.placement.get("rpc_servers"):
            raise UsageError(
                "--peers run on this machine alone, and --rpc is for this program only"
            )
        if self.peers and not self.sampling.plain_greedy:
            raise UsageError(
                "--peers measures at temperature 0, by the model's best token; leave the sampling "
                "options out"
            )

    # -- what a model can do of it -----------------------------------------------------------------

    def fitting_sizes(self, n_ctx_train: int) -> tuple[int, ...]:
        """The sizes for a model trained for so many tokens: without usual ones that are too long.

        Raises:
            UsageError: a size that does not fit into the context, with what is generated after it.
        """
        limit, whose = n_ctx_train, "the model's context"
        if 0 < self.settings.n_ctx < limit:
            limit, whose = self.settings.n_ctx, "the context asked for"
        sizes, n, before = self.plan.sizes, self.plan.max_tokens, self.plan.contexts[-1]
        fitting = tuple(size for size in sizes if before + size + n <= limit)
        if fitting != sizes and not (fitting and (self.sizes is None or self.fewer_sizes)):
            filled = f"context {before} + " if before else ""
            raise UsageError(
                f"{filled}prompt {size_name(max(sizes))} + {n} generated: "
                f"{before + max(sizes) + n} tokens exceed {whose}, {limit}"
            )
        return fitting

    def plan_for(self, model: Model, variant: str, say: Callable[[str], None]) -> Plan:
        """The plan of a loaded model: what its context holds, and no depth above its limit, which
        would be measured twice; without an MTP head no MTP and drafts from the text. `variant`: of
        the library that is loaded.

        Raises:
            UsageError: as of :meth:`fitting_sizes`.
        """
        depths: tuple[int | str, ...] = self.plan.depths
        axes = self.plan.axes
        if not model.has_mtp:
            ngram = any(axes.get("ngram", (self.settings.ngram,)))
            if self.depths is None or self.else_text:
                depths = (0, "auto") if ngram else (0,)
            kept = (*PLAIN_AXES, "ngram")
            axes = {name: values for name, values in axes.items() if name in kept}
        if most := model.info.most_drafts:
            possible = tuple(min(one, most) if isinstance(one, int) else one for one in depths)
            if possible != depths:
                say(f"{model.info.fewer_drafts}: deeper is not measured")
            depths = tuple(dict.fromkeys(possible))
        return replace(
            self.plan,
            sizes=self.fitting_sizes(model.n_ctx_train),
            depths=depths,
            axes=axes,
            libraries=(self.plan.libraries[0] or variant, *self.plan.libraries[1:]),
        )


def _check_drafts(
    depths: Sequence[int | str], rates: Sequence[float] | None, axes: Mapping[str, object]
) -> None:
    """Refuse imposed rates and axes of drafting without the drafts for them."""
    deepest = max((depth for depth in depths if isinstance(depth, int)), default=0)
    if rates is not None and deepest > len(rates):
        raise UsageError(
            f"--synthetic-acceptance gives {len(rates)} rates, but depth {deepest} needs one for "
            "each draft"
        )
    if rates is not None and depths and not any(depths):
        raise UsageError("--synthetic-acceptance needs a depth above 0")
    drafts = [name for name in axes if name not in PLAIN_AXES]
    if drafts and depths and not any(depths):
        raise UsageError(
            f"axes of drafting ({', '.join(drafts)}) need a depth above 0; no MTP is measured with "
            "their defaults only"
        )


def _label(library: str) -> str:
    """The name of a library; a folder loses the path to it."""
    name, colon, given = library.partition(":")
    if name not in ("", "upstream", "patched"):
        name = Path(name).resolve().name
    return name + colon + given


def without_folders(word: str) -> str:
    """An argument without the folders of its paths: "--model=m.gguf", "patched,folder"."""
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return option + equals + ",".join(Path(part).name or part for part in value.split(","))


# -- values ----------------------------------------------------------------------------------------


def axis_values(name: str, given: Any) -> tuple[Any, ...]:
    """The values of an axis, given as a sequence or as one value.

    Raises:
        UsageError: there is no such axis, or it does not take a value.
    """
    if name not in AXES:
        raise UsageError(
            f"matrix() has no argument {name!r}; the axes are {', '.join(AXES)}; prompt_sizes "
            "are sizes, draft_n_max is depths; other fields of Settings go into settings=, "
            "those of Sampling into sampling="
        )
    if name == "synthetic_acceptance":
        several = any(rates is None or listed(rates) for rates in listed(given) or ())
        values = tuple(given) if several else (given,)
    elif isinstance(given, bool | float):
        values = (given,)
    else:
        values = _several(name, given, (), f"({getattr(Settings, name, 2)!r},)")
    if name == "n_context":
        return tuple(whole(name, n, 0, MOST_TOKENS, "0 or more tokens") for n in values)
    if name == "n_sequences":
        from pyllama_mtp.session import MOST_SEQUENCES

        return tuple(whole(name, n, 1, MOST_SEQUENCES, f"1 to {MOST_SEQUENCES}") for n in values)
    checked = []
    for value in values:
        if name == "draft_vocab" and not isinstance(value, str | int):
            raise UsageError(f"{name} has {value!r}, which is not a word")
        field_of_settings: dict[str, Any] = {name: value}
        checked.append(getattr(Settings(**field_of_settings), name))  # raises UsageError
    return tuple(checked)


def _several(name: str, given: Any, usual: tuple[Any, ...], example: str) -> tuple[Any, ...]:
    """The values of a sequence; a word or a number is the only value; None: the usual ones."""
    if given is None and usual:
        return usual
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        return tuple(given)
    if isinstance(given, str) or as_index(given) is not None:
        return (given,)
    raise UsageError(f"{name} is {given!r}; it must be a sequence, such as {example}")


def _whole(name: str, value: Any, least: int = 1) -> int:
    return whole(name, value, least, MOST_TOKENS, f"{least} or more")


def _depth(value: Any) -> int | str:
    if isinstance(value, str) and value == "auto":
        return value
    several = "0 or more, or 'auto'; several are given as (0, 3, 'auto')"
    return whole("depths", value, 0, MOST_TOKENS, several)
