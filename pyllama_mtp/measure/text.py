"""Words and tables that several outputs share: Markdown, tables for a terminal (rich), and the
figures of one generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from pyllama_mtp import Telemetry
    from pyllama_mtp.measure.figures import Ratio

#: Stands in a table where there is no figure.
NONE = "-"
#: Tokens of an answer from which its speed says something.
ENOUGH_TOKENS = 32
#: Of the threads' time: who waited more for a core ran beside other programs.
WAITED_MUCH = 0.03
#: Probability, 0 to 1, that all intervals made together hold the true values.
CONFIDENCE = 0.95
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


def percent(share: float) -> str:
    """A share of 1, in words of a sentence."""
    return f"{100 * share:.0f} %"


def synthetic_warning(rates: Sequence[float]) -> str:
    """The warning that goes with every output made under imposed acceptance."""
    values = ", ".join(f"{rate:g}" for rate in rates)
    return (
        f"SYNTHETIC ACCEPTANCE {values}: the driver accepted drafts at these rates whatever the "
        "model said; speed is meaningful, text and acceptance are not"
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
    grouped: bool = False,
    **options: Any,
) -> Table:
    """A table for a terminal. `words`: as of :func:`to_markdown`; `styles`: of the rows, if any;
    `grouped`: a line where the first column changes."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, **options)
    for left, heading in zip_longest(words, headings, fillvalue=""):
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for row, following, style in zip_longest(rows, rows[1:], styles):
        ends = grouped and following is not None and following[0] != row[0]
        table.add_row(*row, style=style, end_section=ends)
    return table


def width_of(table: Table) -> int:
    """Characters that a table needs per line."""
    return console(None, UNLIMITED).measure(table).maximum


def print_whole(output: Console, table: Table) -> None:
    """Print a table; in a console that is too narrow its lines run over the edge."""
    usual = output.width
    output.width = max(usual, width_of(table))
    output.print(table)
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


def telemetry_lines(telemetry: Telemetry, speed_up: Ratio | None = None) -> list[str]:
    """One generation's figures as lines of text; a line without a figure is left out. `speed_up`:
    against no MTP, if it was measured; else what adaptive depth knows counts."""
    t = telemetry
    cached = f" ({t.n_cached} of them kept from before)" if t.n_cached else ""
    done = f"{t.n_prompt - t.n_left} of " if t.n_left else ""
    stopped = "; then it was interrupted" if t.n_left else ""
    lines = [
        f"prompt     {done}{t.n_prompt} tokens{cached} read in {t.prefill_s:.3f} s, "
        f"{speed_words(t.prefill_tps)} per second{stopped}",
    ]
    if t.n_image_tokens:
        spent = f"encoded in {t.encode_s:.3f} s" if t.encode_s else "encoded before"
        lines.append(f"images     {t.n_image_tokens} tokens of the prompt, {spent}")
    if not t.n_left:
        lines.append(
            f"answer     {t.n_generated} tokens written in {t.decode_s:.3f} s, "
            f"{speed_words(t.decode_tps)} per second; {t.elapsed_s:.3f} s in all"
        )
    if t.drafted or t.looked_up["rounds"] or t.forced:
        lines += _drafts(t)
    if t.why_fewer_drafts:
        lines.append(f"auto       {t.why_fewer_drafts}")
    if speed_up:
        interval = f"{100 * CONFIDENCE:g} %: {speed_up.low or 0:.2f} to {speed_up.high or 0:.2f}"
        lines.append(
            f"speed-up   the answer came {speed_up.value:.2f} times as fast as without MTP "
            f"({interval}), by steps without it that followed"
        )
    elif t.speed_up and t.n_generated >= ENOUGH_TOKENS:
        lines.append(
            f"speed-up   the answer came about {t.speed_up:.1f} times as fast as without MTP, by "
            "what a step cost when the session began"
        )
    if t.waited_s > WAITED_MUCH * t.n_threads * t.elapsed_s > 0:
        share = t.waited_s / (t.n_threads * t.elapsed_s)
        lines.append(
            f"busy       threads waited for a core {100 * share:.0f} % of the time, for other "
            f"programs; {counted(t.n_threads, 'thread')} computed in the end"
        )
    follow = t.draft_vocab
    if follow["tokens"]:
        lines.append(
            f"vocabulary {100 * follow['outside'] / follow['tokens']:.1f} % of the tokens could "
            f"not be drafted; {follow['replaced']} rows replaced in {1e3 * follow['seconds']:.1f} "
            "ms, prompt included"
        )
    if t.near_ties is not None:
        ties = [f"{at.index} ({at.token} or {at.other}, {at.gap:.3f})" for at in t.near_ties]
        lines.append(
            "near ties  " + (", ".join(ties) or "none") + ": tokens whose logits were within "
            "rounding of the second best one's, so that the text may differ without MTP"
        )
    if t.prompt_sync:
        full = t.prompt_sync == "full"
        how = "in a context of its own, as upstream does" if full else "with every decode"
        lines.append(f"MTP head   kept in step {how}")
    if t.output_bytes and t.rounds:
        copied = t.output_bytes / t.rounds
        lines.append(f"outputs    {copied:,.0f} bytes of logits and tokens copied per round")
    spent = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in t.time_s.items())
    return [*lines, f"time       {spent}"] if spent else lines


def _drafts(t: Telemetry) -> list[str]:
    """How many drafts were accepted, by where they came from."""
    drafted, accepted = sum(t.drafted), sum(t.accepted)
    places = ", ".join(f"{hit} of {n}" for hit, n in zip(t.accepted, t.drafted, strict=True))
    lines = [f"passes     {t.rounds} of the model, {t.tokens_per_round:.2f} tokens from each"]
    if drafted:
        lines.append(
            f"drafts     {accepted} of {drafted} accepted ({100 * accepted / drafted:.0f} %); as "
            f"first, second, ... of a pass: {places}"
        )
    if t.looked_up["rounds"]:
        lines.append(
            f"repeats    {t.looked_up['accepted']} of {t.looked_up['drafted']} drafts accepted "
            f"that came from earlier in the text, in {t.looked_up['rounds']} passes"
        )
    if t.forced:
        lines.append(f"forced     {t.forced} tokens that the grammar left no choice for")
    return lines
