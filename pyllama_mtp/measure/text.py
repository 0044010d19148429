"""Words and tables that several outputs share: Markdown, tables for a terminal (rich), and the
figures of one generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import IO, TYPE_CHECKING

from pyllama_mtp.settings import GOLDEN, GOLDEN_SOURCES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from pyllama_mtp.measure.intervals import Ratio
    from pyllama_mtp.telemetry import Telemetry

#: Stands in a table where there is no figure.
NONE = "-"
#: Tokens of an answer from which its speed says something.
ENOUGH_TOKENS = 32
#: Of the threads' time: who waited more for a core ran beside other programs.
WAITED_MUCH = 0.03
#: Characters per line where no terminal sets a limit.
UNLIMITED = 1000


def counted(n: int, noun: str) -> str:
    """ "1 cell" or "3 cells"."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def size_name(n_prompt: int, n_context: int = 0) -> str:
    """The size of a prompt in tokens; 0: a question without text before it. As llama-bench says it,
    "512 @ d4096" comes after a context of 4096 tokens."""
    return (str(n_prompt) if n_prompt else "as is") + (f" @ d{n_context}" if n_context else "")


def speed_words(value: float) -> str:
    """Tokens per second: "68.5" or "1,234"."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def times_words(value: float, low: float | None, high: float | None) -> str:
    """A ratio: "1.71x"; "~1.7x" from one pair; "~0.94x" where noise can be all of the
    difference."""
    if low is None or high is None:
        return f"~{value:.1f}x"
    return f"{'~' if low < value and low <= 1 <= high else ''}{value:.2f}x"


def between(low: float, high: float) -> str:
    """Factors in a sentence: "1.6" or "0.94 to 1.6"."""
    words = [f"{value:.1f}" if value >= 1.095 else f"{value:.2f}" for value in (low, high)]
    return words[0] if words[0] == words[1] else " to ".join(words)


def gain_words(ratio: Ratio) -> str:
    """What a ratio of speeds says, with its interval, and no more than it can say."""
    value = between(ratio.value, ratio.value)
    if ratio.low is None or ratio.high is None:
        return f"about {ratio.value:.1f} times as fast in one sample"
    interval = between(ratio.low, ratio.high)
    if ratio.is_one:
        return f"about as fast as without, {interval} times"
    if ratio.holds_one:
        return f"{interval} times as fast"
    return f"{value} times as fast{'' if interval == value else f', {interval}'}"


def percent(share: float) -> str:
    """A share of 1, in words of a sentence."""
    return f"{100 * share:.0f} %"


def synthetic_warning(rates: Sequence[float]) -> str:
    """The warning that goes with every output made under imposed acceptance. Published rates, also
    the first ones of them, have their name and their source."""
    values, whose = ", ".join(f"{rate:g}" for rate in rates), ""
    for name, published in GOLDEN.items():
        if tuple(rates) == published[: len(rates)]:
            values, whose = f"{name} ({values})", f" ({GOLDEN_SOURCES[name]})"
    return (
        f"SYNTHETIC ACCEPTANCE {values}: the driver accepted drafts at these rates{whose} whatever "
        "the model said; speed is meaningful, text and acceptance are not"
    )


def to_markdown(
    headings: Sequence[str], rows: Iterable[Sequence[str]], words: Iterable[bool] = ()
) -> str:
    """A table in Markdown. `words`: for each column, whether it holds words, which are aligned to
    the left; columns beyond these hold figures."""
    left = zip_longest(words, headings, fillvalue="")
    rule = [":--" if is_left else "--:" for is_left, _ in left]
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return "\n".join("| " + " | ".join(line) + " |" for line in [headings, rule, *escaped])


def terminal_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    words: Iterable[bool],
    styles: Iterable[str] = (),
) -> Table:
    """A table for a terminal, with a line where the first column changes. `words`: as of
    :func:`to_markdown`; `styles`: of the rows, if any."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for left, heading in zip_longest(words, headings, fillvalue=""):
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for row, following, style in zip_longest(rows, rows[1:], styles):
        ends = following is not None and following[0] != row[0]
        table.add_row(*row, style=style, end_section=ends)
    return table


def width_of(table: Table) -> int:
    """Characters that a table needs per line."""
    return console(None, UNLIMITED).measure(table).maximum


def print_whole(output: Console, table: Table) -> None:
    """Print a table and an empty line; in a narrow console its lines run over the edge."""
    usual = output.width
    output.width = max(usual, width_of(table))
    output.print(table, "")
    output.width = usual


def console(file: IO[str] | None, width: int | None = None, plain: bool = False) -> Console:
    """A console that prints text as it is. `width`: None is the terminal's; `plain`: no colours.

    In a notebook rich would show the text there, and leave the file empty.
    """
    from rich.console import Console

    return Console(
        file=file,
        width=width,
        highlight=False,
        markup=False,
        emoji=False,
        force_jupyter=False,
        force_terminal=False if plain else None,
    )


# -- one generation --------------------------------------------------------------------------------


#: Near ties that are listed; of more, only their number.
_TIES = 5


def telemetry_lines(telemetry: Telemetry, speed_up: Ratio | None = None) -> list[str]:
    """One generation's figures as lines of text; a line without a figure is left out. `speed_up`:
    against no drafts, if it was measured; else what adaptive depth knows counts."""
    t, said = telemetry, {"prompt": _prompt(telemetry)}
    if t.n_image_tokens:
        spent = f"encoded in {t.encode_s:.3f} s" if t.encode_s else "encoded before"
        said["images"] = f"{t.n_image_tokens} tokens of the prompt, {spent}"
    if not t.n_left:
        said["answer"] = (
            f"{t.n_generated} tokens written in {t.decode_s:.3f} s, {speed_words(t.decode_tps)} "
            f"per second; {t.elapsed_s:.3f} s in all"
        )
    drafts = bool(t.drafted or t.looked_up["rounds"])
    if drafts or t.forced:
        said |= _drafts(t)
    said["auto"] = t.why_fewer_drafts
    if speed_up:
        known = not speed_up.holds_one and (speed_up.low or 0) > 0.5 * (speed_up.high or 0)
        interval = f"{speed_up.low or 0:.2f} to {speed_up.high or 0:.2f}"
        said["speed-up"] = (
            f"the answer came {speed_up.value:.2f} times as fast as without drafts, {interval}"
            if known
            else f"not known ({interval}): a longer answer and an idle machine tell more"
        )
    elif drafts and t.speed_up and t.n_generated >= ENOUGH_TOKENS:
        said["speed-up"] = (
            f"about {t.speed_up:.1f} times as fast as without drafts, by what a step cost when the "
            "session began"
        )
    if t.waited_s > WAITED_MUCH * t.n_threads * t.elapsed_s > 0:
        waited = f"{t.waited_s / t.elapsed_s:.1f} threads waited for a core on average"
        said["busy"] = f"{waited}; {counted(t.n_threads, 'thread')} computed in the end"
    if n := t.draft_vocab["tokens"]:
        outside = f"{100 * t.draft_vocab['outside'] / n:.1f} % of the tokens could not be drafted"
        said["vocabulary"] = f"{outside}; {t.draft_vocab['replaced']} rows replaced"
    if t.near_ties and drafts:
        ties = [f"token {at.index} ({at.text!r} or {at.other_text!r})" for at in t.near_ties]
        more = [f"{len(ties) - _TIES} more"] if len(ties) > _TIES else []
        said["near ties"] = (
            f"{', '.join([*ties[:_TIES], *more])}: the best two logits were within rounding, so "
            "the text may differ without drafts"
        )
    said["time"] = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in t.time_s.items())
    return [f"{name:<10} {words}" for name, words in said.items() if words]


def _prompt(t: Telemetry) -> str:
    cached = f" ({t.n_cached} of them kept from before)" if t.n_cached else ""
    done = f"{t.n_prompt - t.n_left} of " if t.n_left else ""
    stopped = "; then it was interrupted" if t.n_left else ""
    return (
        f"{done}{t.n_prompt} tokens{cached} read in {t.prefill_s:.3f} s, "
        f"{speed_words(t.prefill_tps)} per second{stopped}"
    )


def _drafts(t: Telemetry) -> dict[str, str]:
    """How many drafts were accepted, by where they came from."""
    drafted, accepted = sum(t.drafted), sum(t.accepted)
    said = {"passes": f"{t.rounds} of the model, {t.tokens_per_round:.2f} tokens from each"}
    if drafted:
        places = ", ".join(f"{hit} of {n}" for hit, n in zip(t.accepted, t.drafted, strict=True))
        said["drafts"] = (
            f"{accepted} of {drafted} accepted ({percent(accepted / drafted)}); as first, second, "
            f"... of a pass: {places}"
        )
    if t.looked_up["rounds"]:
        said["repeats"] = (
            f"{t.looked_up['accepted']} of {t.looked_up['drafted']} drafts accepted that came "
            f"from earlier in the text, in {t.looked_up['rounds']} passes"
        )
    if t.forced:
        said["forced"] = f"{t.forced} tokens that the grammar left no choice for"
    return said
