"""The figures of one generation as plain lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyllama_mtp import Telemetry


def telemetry_lines(telemetry: Telemetry) -> list[str]:
    """One generation's figures as lines of text; drafts one line per position."""
    cached = f", {telemetry.n_cached} of them cached" if telemetry.n_cached else ""
    lines = [
        f"prompt     {telemetry.n_prompt} tokens{cached}; prefill {telemetry.prefill_s:.3f} s, "
        f"{_speed(telemetry.prefill_tps)} tok/s",
        f"generated  {telemetry.n_generated} tokens; decode {telemetry.decode_s:.3f} s, "
        f"{_speed(telemetry.decode_tps)} tok/s; elapsed {telemetry.elapsed_s:.3f} s",
    ]
    looked_up = telemetry.looked_up
    if telemetry.drafted or looked_up["rounds"]:
        lines.append(
            f"rounds     {telemetry.rounds}; {telemetry.tokens_per_round:.2f} tokens per round, "
            f"{telemetry.mean_accepted_length:.2f} accepted drafts per round"
        )
        counts = zip(telemetry.drafted, telemetry.accepted, strict=True)
        for position, (drafted, accepted) in enumerate(counts, start=1):
            rate = f"{accepted / drafted:.2f}" if drafted else "-"
            lines.append(f"draft {position}    {rate} = {accepted} accepted of {drafted}")
    if looked_up["rounds"]:
        lines.append(
            f"looked up  {looked_up['accepted']} accepted of {looked_up['drafted']} drafts from "
            f"earlier in the text, in {looked_up['rounds']} rounds"
        )
    follow = telemetry.draft_vocab
    if follow["tokens"]:
        lines.append(
            f"vocabulary {100 * follow['outside'] / follow['tokens']:.1f} % of the tokens could "
            f"not be drafted; {follow['replaced']} rows replaced in {1e3 * follow['seconds']:.1f} "
            "ms, prompt included"
        )
    if telemetry.near_ties is not None:
        ties = [f"{t.index} ({t.token} or {t.other}, {t.gap:.3f})" for t in telemetry.near_ties]
        lines.append(
            "near ties  " + (", ".join(ties) or "none") + ": tokens whose logits were within "
            "rounding of the second best one's, so that the text may differ without MTP"
        )
    if telemetry.prompt_sync:
        full = telemetry.prompt_sync == "full"
        how = "in a context of its own, as upstream does" if full else "with every decode"
        lines.append(f"MTP head   kept in step {how}")
    if telemetry.output_bytes and telemetry.rounds:
        per_round = telemetry.output_bytes / telemetry.rounds
        lines.append(f"outputs    {per_round:,.0f} bytes of logits and tokens copied per round")
    spent = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in telemetry.time_s.items())
    return [*lines, f"time       {spent}"] if spent else lines


def _speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"
