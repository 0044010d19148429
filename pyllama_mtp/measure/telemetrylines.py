"""The figures of one generation as plain lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllama_mtp.measure.text import speed_words

if TYPE_CHECKING:
    from pyllama_mtp import Telemetry


def telemetry_lines(telemetry: Telemetry) -> list[str]:
    """One generation's figures as lines of text; a line without a figure is left out."""
    t = telemetry
    cached = f" ({t.n_cached} of them kept from before)" if t.n_cached else ""
    done = f"{t.n_prompt - t.n_left} of " if t.n_left else ""
    stopped = "; then it was interrupted" if t.n_left else ""
    lines = [
        f"prompt     {done}{t.n_prompt} tokens{cached} read in {t.prefill_s:.3f} s, "
        f"{speed_words(t.prefill_tps)} per second{stopped}",
    ]
    if not t.n_left:
        lines.append(
            f"answer     {t.n_generated} tokens written in {t.decode_s:.3f} s, "
            f"{speed_words(t.decode_tps)} per second; {t.elapsed_s:.3f} s in all"
        )
    if t.drafted or t.looked_up["rounds"] or t.forced:
        lines += _drafts(t)
    if t.speed_up:
        lines.append(
            f"speed-up   the answer came {t.speed_up:.2f} times as fast as without MTP, where each "
            f"token takes {1e3 * (t.plain_s or 0):.1f} ms, as was measured meanwhile"
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
