"""The comparison as a Markdown table with its definitions; the same text goes to the screen."""

from __future__ import annotations

from typing import Any

from benchkit.results import header_lines, markdown_table

HEAD = ("measurement", "peer", "upstream", "ours", "ours / upstream", "per round")

DEFINITIONS = """\
## Definitions

Every measurement runs in a process of its own on both sides, after a warm-up in that process; the
sides take turns within a round. The rate columns are medians over the rounds, with the lowest and
the highest in brackets; `ours / upstream` is the ratio of the medians, `per round` the lowest and
the highest ratio of a round.

- Plain prefill: {n_prefill} prompt tokens over the time until the logits of the last one are there;
  ours also contains the choice of the first token. llama-bench: `-p {n_prefill} -n 0`.
- Plain decode: {n_decode} single-token steps after {n_prompt} tokens of context. Ours contains the
  greedy choice over the vocabulary and the text of every token; llama-bench
  (`-p 0 -n {n_decode} -d {n_prompt}`) takes its next token at random and makes no text.
- Draft-MTP decode: {n_decode} tokens after the first one, over the time since the first one, prompt
  of {n_prompt} tokens, {depth} drafts per round, greedy, end tokens ignored. llama-server's figure
  is `predicted_per_second` of its response, which excludes HTTP and counts the same tokens; it
  samples with the cheapest greedy chain (top-k 1) and drafts with sampling in the graph (its
  default); its prompt cache and context checkpoints are off, and so are ours.
- Acceptance is imposed on both sides at {rates} (unconditional, per position), so the text means
  nothing. The server draws at random and ours follows a fixed sequence, so the achieved tokens per
  round differ by chance; the line "at equal acceptance" removes that: verification passes per
  second times {expected:.2f}, the tokens per pass that these rates give on average.
- MTP prefill: the prompt of the draft-MTP runs, with the draft cache filled."""


def spread(value: dict[str, float] | None, digits: int = 1) -> str:
    """A median with its range."""
    if value is None:
        return "-"
    low, high = value["low"], value["high"]
    return f"{value['median']:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def row(title: str, peer: str, sides: dict[str, Any]) -> list[str]:
    """One line of the table."""
    ratio = sides.get("ratio")
    quoted = f"{ratio['of_medians']:.3f}" if ratio else "-"
    paired = f"{ratio['paired']['low']:.3f}-{ratio['paired']['high']:.3f}" if ratio else "-"
    return [title, peer, spread(sides["theirs"]), spread(sides["ours"]), quoted, paired]


def table(measures: dict[str, dict[str, Any]]) -> list[str]:
    """The table of all comparisons that have samples."""
    rows = []
    for summary in measures.values():
        rows.append(row(summary["title"], summary["peer"], summary))
        if "equal_acceptance" in summary:
            rows.append(row("... at equal acceptance", "", summary["equal_acceptance"]))
            rows.append(row("MTP prefill, tok/s", summary["peer"], summary["prefill"]))
    return markdown_table(HEAD, rows)


def acceptance_lines(measures: dict[str, dict[str, Any]]) -> list[str]:
    """What was drafted and accepted on each side."""
    achieved = measures.get("mtp", {}).get("tokens_per_round")
    if not achieved:
        return []
    lines = []
    for side, label in (("theirs", "llama-server"), ("ours", "ours")):
        a = achieved[side]
        lines.append(
            f"- {label}: {a['tokens_per_round']:.3f} tokens per round over {a['rounds']} rounds, "
            f"{a['accepted']} of {a['drafted']} drafts accepted ({a['acceptance']:.3f})"
        )
    return ["", "Acceptance achieved:", "", *lines]


def render(result: dict[str, Any]) -> str:
    """The Markdown file."""
    plan = result["plan"]
    filled = dict(plan, rates=", ".join(map(str, plan["rates"])), expected=1 + sum(plan["rates"]))
    settings = ("threads", "n_batch", "n_ubatch", "flash_attn", "cache_type_k", "cache_type_v")
    lines = [
        "# Speed against upstream's own programs",
        "",
        *header_lines(result),
        f"- Model: {plan['model']}",
        "- Settings: " + ", ".join(f"{name} {plan[name]}" for name in settings),
        f"- Rounds: {result['rounds']['done']} of {result['rounds']['planned']}, interleaved",
        *(f"- Note: {note}" for note in result["notes"]),
        "",
        *table(result["measures"]),
        *acceptance_lines(result["measures"]),
        "",
        DEFINITIONS.format(**filled),
    ]
    return "\n".join(lines)
