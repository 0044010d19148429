"""Where a prompt's time goes, by kind of operation: its nodes are timed one by one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from pyllama_mtp.arguments import whole
from pyllama_mtp.llama.contextoptions import Cost
from pyllama_mtp.measure.sample import NodeCost, Profile
from pyllama_mtp.measure.text import to_markdown
from pyllama_mtp.settings import MOST_TOKENS

if TYPE_CHECKING:
    from pyllama_mtp.llama.model import Model
    from pyllama_mtp.measure.figures import Cell
    from pyllama_mtp.session import Session
    from pyllama_mtp.settings import Settings

#: Kinds of operation, each with a pattern of "OPERATION tensor"; the first that fits counts.
_KINDS = {
    "products of weights": r"MUL_MAT \S+\.weight",
    "experts' products": r"(MUL_MAT|ADD)_ID ",
    "norms": r"(\w+_)?NORM |MUL \S*norm\S*\.weight",
    "convolution": r"SSM_CONV |\w+ (conv_|cache_r_l)",
    "attention": r"(FLASH_ATTN_EXT|ROPE|SET_ROWS) "
    r"|\w+ ([QKV]cur|kq|gate_(reshaped|sigmoid)|attn_gated|cache_[kv]_l)",
    "delta net": r"(GATED_DELTA_NET(_ROWS)?|SOLVE_TRI|TRI|CUMSUM|MUL_MAT) "
    r"|\w+ ([qkvbg]_|alpha|beta|a_softplus|(gate|z)$|cache_s_l|state_|dnet_|decay_)",
    "rest": "",
}
KINDS = (*_KINDS,)
#: Tokens that a warm-up generates.
WARM_UP_TOKENS = 8

EXPLANATION = (
    "To be timed, each node is computed by itself, so what is otherwise computed together takes "
    "somewhat longer, on small models much longer: the sum may exceed the prompt itself, which is "
    "computed whole, in the same session right before. Copies between devices are in the latter "
    "only."
)


class InterruptedSample(Exception):
    """The user interrupted a generation."""


def kind_of(cost: Cost) -> str:
    """The kind of operation, one of KINDS."""
    text = f"{cost.op} {cost.tensor}"
    return next(kind for kind, pattern in _KINDS.items() if re.match(pattern, text))


def made_profile(n_prompt: int, prompt_s: float, costs: Iterable[Cost]) -> Profile:
    """The profile of a prompt, from the costs of its nodes."""
    nodes = tuple(NodeCost(kind_of(cost), **asdict(cost)) for cost in costs)
    kinds = dict.fromkeys(KINDS, 0.0)
    for node in nodes:
        kinds[node.kind] += node.s
    return Profile(n_prompt, prompt_s, sum(node.s for node in nodes), kinds, nodes)


def profile_prompt(model: Model, settings: Settings, prompt: list[int]) -> Profile:
    """Process a prompt in a session of its own: whole after a warm-up, then node by node.

    Args:
        settings: of the session; with MTP, the nodes of the head count, too.
        prompt: token ids.

    Raises:
        UsageError, InsufficientMemoryError: as :class:`.Session`.
        InterruptedSample: by Ctrl-C.
    """
    from pyllama_mtp.llama import native
    from pyllama_mtp.llama.contextoptions import NodeTimes
    from pyllama_mtp.session import Session

    times = NodeTimes(native.load())
    with Session(model, settings, times=times) as session:
        process_prompt(session, prompt[: session.settings.n_batch], WARM_UP_TOKENS)
        prompt_s = process_prompt(session, prompt)
        times.start()
        process_prompt(session, prompt)
        costs = tuple(times.stop())
    return made_profile(len(prompt), prompt_s, costs)


def profile(
    model: Model | str | os.PathLike[str] | None = None,
    *,
    size: int = 512,
    settings: Settings | None = None,
    n_gpu_layers: int = -1,
) -> Profile:
    """Time each node of a prompt.

    Args:
        model: as of :func:`pyllama_mtp.bench.matrix`.
        size: tokens of the prompt, which is text of Python's standard library.
        settings: of the session; None: the defaults, with MTP if the model has a head;
            ``Settings(draft_n_max=0)``: without MTP. `n_ctx` 0 is what the prompt needs.
        n_gpu_layers: as of :func:`pyllama_mtp.bench.matrix`.

    Returns:
        seconds by kind of operation in `kinds`, and their parts. Nodes are computed one by one,
        which takes somewhat longer than the prompt itself: compare `sum_s` and `prompt_s`.

    Raises:
        UsageError: a bad size, or settings that this library or model cannot do.
    """
    from pyllama_mtp.llama.model import Model
    from pyllama_mtp.measure.prompts import Workload
    from pyllama_mtp.models.demo import demo_path
    from pyllama_mtp.session import usable_settings

    size = whole("size", size, 1, MOST_TOKENS, "1 token or more")
    with ExitStack() as stack:
        if model is None or isinstance(model, str | os.PathLike):
            model = stack.enter_context(Model(model or demo_path(), n_gpu_layers=n_gpu_layers))
        chosen = usable_settings(model, settings)
        room = size + chosen.depth_limit + 16
        chosen = replace(chosen, n_ctx=chosen.n_ctx or min(room, model.n_ctx_train))
        return profile_prompt(model, chosen, Workload(model).prompt(size))


def process_prompt(session: Session, prompt: list[int], max_tokens: int = 1) -> float:
    """Seconds of the prompt in an empty context, the first generated token included."""
    session.reset()
    done = session.generate(prompt, max_tokens=max_tokens, ignore_eos=True).run()
    if done.finish_reason == "interrupted":
        raise InterruptedSample
    return done.telemetry.prefill_s


def profile_markdown(profiles: Mapping[str, Profile]) -> str:
    """A table: per cent of the sum, and milliseconds per token, by kind.

    Args:
        profiles: at least one, by name.
    """
    head = ["", *(cell for name in profiles for cell in (f"{name}: %", "ms per token"))]
    lines: list[list[str]] = []
    for name in (*KINDS, "sum", "the prompt itself"):
        lines.append([name])
        for one in profiles.values():
            s = {**one.kinds, "sum": one.sum_s, "the prompt itself": one.prompt_s}[name]
            lines[-1] += [f"{100 * s / one.sum_s:.1f}", f"{1e3 * s / one.n_prompt:.4f}"]
    return to_markdown(head, lines, [True, *[False] * (len(head) - 1)])


def cell_profiles(cells: Iterable[Cell]) -> str:
    """A table for each size and class of prompts that has profiles; "" without profiles."""
    from pyllama_mtp.measure.figures import Labels

    profiles: dict[str, dict[str, Profile]] = {}
    profiled = [cell for cell in cells if cell.profile]
    label = Labels(profiled, ignored=("class",))
    for cell in profiled:
        assert cell.profile is not None
        what = f"Where the time of a prompt of {cell.n_prompt:,} tokens goes ({cell.prompt_class}):"
        profiles.setdefault(what, {})[label(cell)] = cell.profile
    tables = [part for what, own in profiles.items() for part in (what, profile_markdown(own))]
    return "\n\n".join([*tables, EXPLANATION]) if tables else ""
