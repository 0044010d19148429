"""What the regression tests share: prompts at batch edges, plain logits, a rule for divergences."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pyllama_mtp import Answer, BatchSession, Generation, Model, Session, Settings
from pyllama_mtp.drafting.depth import Costs, DepthController, Outcomes
from pyllama_mtp.engine import Engine
from pyllama_mtp.llama import native
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.contextoptions import ContextOptions
from pyllama_mtp.settings import AUTO_DEPTH

from ..processes import RunPython

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

#: Small batches, so that short prompts cross their edges.
N_BATCH, N_UBATCH = 48, 16
EDGES = (1, N_UBATCH - 1, N_UBATCH, N_UBATCH + 1, N_BATCH, N_BATCH + 1, 2 * N_BATCH + 1)
N_CTX = 512
#: Tokens that are asked for after each of the prompts of `ragged` (conftest.py): one ends within a
#: round, one at its first token. So many of the prompts are answered at once.
MOST = (60, 23, 40, 60, 60, 1, 17, 44)
PLACES = 3


def scaled(tolerance: float) -> float:
    """A tolerance that was found on a CPU, times PYLLAMA_TEST_TOLERANCE_SCALE.

    A GPU's kernels for one row and for many differ by more than a CPU's. What `rounding` measures
    on the device itself is not scaled, nor are limits of 1 % and more.
    """
    return tolerance * float(os.environ.get("PYLLAMA_TEST_TOLERANCE_SCALE", "1"))


def settings(depth: int | str, **options: object) -> Settings:
    """Small batches; one thread, which a small model on a shared machine likes best."""
    chosen = {"n_ctx": N_CTX, "n_batch": N_BATCH, "n_ubatch": N_UBATCH, "n_threads": 1, **options}
    return Settings(draft_n_max=depth, **chosen)  # type: ignore[arg-type]


def long_text(model: Model, prompts: Sequence[str]) -> list[int]:
    """Token ids of real text, longer than every edge."""
    text = "\n\n".join(prompt for prompt in prompts if "<|" not in prompt)
    tokens = model.tokenize(text)
    assert len(tokens) > max(EDGES) + 64
    return tokens


def made_up(model: Model, n: int, start: int = 0) -> npt.NDArray[np.int32]:
    """[n] token ids of any model, the same for the same positions start .. start+n-1."""
    i = np.arange(start, start + n, dtype=np.int64)
    return ((7 * i * i + 13 * i + 5) % model.n_vocab).astype(np.int32)


#: What the code of `computed_by` begins and ends with.
BEGIN = f"""
import json, sys
from pathlib import Path
import numpy as np
from pyllama_mtp import BatchSession, Model, Session, Settings
from pyllama_mtp.llama import native, trial
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.contextoptions import ContextOptions

trial.is_child = True  # files are good, and need no child process that tries them
EDGES, SMALL = {EDGES}, dict(n_ctx={N_CTX}, n_batch={N_BATCH}, n_ubatch={N_UBATCH}, n_threads=1)

def made_up(model, n):
    i = np.arange(n, dtype=np.int64)
    return ((7 * i * i + 13 * i + 5) % model.n_vocab).astype(np.int32)
"""
END = "print(json.dumps([native.load().variant, found]))"


def computed_by(variant: str, run: RunPython, code: str, *arguments: object) -> Any:
    """The `found` of some code, computed with a variant in a process of its own: a process loads
    one of them. The code may use what BEGIN has."""
    done = run(f"{BEGIN}{code}\n{END}", *arguments, env={"PYLLAMA_MTP_LIB": variant})
    assert done.returncode == 0, done.stderr
    loaded, found = json.loads(done.stdout)
    assert loaded == variant
    return found


def plain_context(model: Model, **options: object) -> Context:
    """A target context without MTP."""
    chosen = {"n_ctx": N_CTX, "n_batch": N_CTX, "n_ubatch": N_CTX, "n_threads": 1, **options}
    return Context(model, ContextOptions(**chosen))  # type: ignore[arg-type]


def c_call(context: Context, name: str, *arguments: Any, handle: Any = None) -> int:
    """Call a function of llama.h for a context (or another `handle`), past the class; for what
    Python never calls."""
    function = getattr(ctypes.CDLL(str(native.locate()[0] / "libllama.so.0")), name)
    function.restype = ctypes.c_size_t
    of = context.library.ffi.cast("uintptr_t", handle or context.handle)
    return int(function(ctypes.c_void_p(int(of)), *arguments))


def logits_in_batches(model: Model, tokens: Sequence[int], size: int) -> Floats:
    """Logits of every position, [n, n_vocab], evaluated `size` tokens at a time."""
    with plain_context(model, n_batch=size, n_ubatch=size, n_outputs_max=size) as context:
        rows = []
        for start in range(0, len(tokens), size):
            batch = np.array(tokens[start : start + size], dtype=np.int32)
            context.decode(batch, start, np.ones(len(batch), dtype=np.int8))
            rows += [context.logits(row).copy() for row in range(len(batch))]
    return np.stack(rows)


def decode(context: Context, tokens: Sequence[int] | Ints, start: int = 0) -> Floats:
    """Decode a batch; logits of its last token, the only output."""
    outputs = np.zeros(len(tokens), dtype=np.int8)
    outputs[-1] = 1
    context.decode(np.array(tokens, dtype=np.int32), start, outputs)
    return context.logits(len(tokens) - 1).copy()


def last_logits(model: Model, tokens: Sequence[int]) -> Floats:
    """Logits after `tokens`, one batch in a fresh context."""
    with plain_context(model) as context:
        return decode(context, tokens)


def rounding(model: Model, tokens: Sequence[int]) -> float:
    """How far two logits may move apart between batch sizes without anything being wrong.

    The largest difference of one logit over batch sizes 1 to 97, twice because the two best may
    move in opposite directions, and four times that because `tokens` is a sample. On an AVX-512
    machine sizes 1 to 48 agree to the bit, and 97, where flash attention takes another kernel,
    differs by 0.004 (logits have a standard deviation of 3), so the tolerance is 0.03 there.
    """
    one = logits_in_batches(model, tokens, 1)
    sizes = (2, 4, 7, N_UBATCH, N_BATCH, 97)
    worst = max(float(np.abs(logits_in_batches(model, tokens, n) - one).max()) for n in sizes)
    assert worst < 0.01 * float(np.ptp(one)), f"batch sizes disagree by {worst}: not rounding"
    return 8 * max(worst, 1e-4)


def assert_same_tokens(
    model: Model, prompt: Sequence[int], got: Sequence[int], plain: Sequence[int], gap: float
) -> bool:
    """Greedy outputs are equal, or part where the two best logits are closer than `gap`, which is
    0 where they must be equal.

    Returns:
        True when they are equal.
    """
    if list(got) == list(plain):
        return True
    pairs = zip(got, plain, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(plain)))
    assert at < min(len(got), len(plain)), f"one output goes on: {got} and {plain}"
    logits = last_logits(model, [*prompt, *plain[:at]])
    best, second = (int(t) for t in np.argsort(logits)[::-1][:2])
    what = f"token {at}: {got[at]} with MTP, {plain[at]} without"
    assert {got[at], plain[at]} == {best, second}, f"{what}; the best two are {best}, {second}"
    found = float(logits[best] - logits[second])
    assert found < gap, f"{what}; they differ by {found}, rounding is {gap}"
    return False


def compare(
    model: Model,
    prompts: Sequence[Sequence[int]],
    got: Sequence[Answer],
    wanted: Sequence[Answer],
    *,
    exact: bool = False,
    greedy: bool = True,
    least: float = 0.75,
) -> None:
    """The answers to the same prompts are equal; rounding may part a few.

    Args:
        exact: rounding may part none.
        greedy: whether the model's own logits decide, so that near ties can be told.
        least: the part that must be equal in any case.
    """
    n_equal = 0
    for prompt, one, other in zip(prompts, got, wanted, strict=True):
        if one.tokens == other.tokens:
            n_equal += 1
            assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
        elif greedy:
            gap = 0.0 if exact else rounding(model, made_up(model, 97).tolist())
            assert_same_tokens(model, prompt, one.tokens, other.tokens, gap)
    assert n_equal >= least * len(got), f"{n_equal} of {len(got)} texts are equal"


def answers(
    model: Model,
    prompts: Sequence[Sequence[int]],
    chosen: Settings,
    n: int | Sequence[int],
    n_sequences: int = 0,
    **asked: Any,
) -> list[Answer]:
    """The answers of a session, to each prompt in empty caches; or of so many sequences at once."""
    if n_sequences:
        with BatchSession(model, chosen, n_sequences) as batch:
            found = batch.generate(prompts, max_tokens=n, **asked).run()
        assert max(found.telemetry.passes) == min(n_sequences, len(prompts)), "one after the other"
        return list(found.results)
    each = [n] * len(prompts) if isinstance(n, int) else n
    with Session(model, chosen) as session:
        single = list[Answer]()
        for prompt, most in zip(prompts, each, strict=True):
            session.reset()
            single.append(session.generate(prompt, max_tokens=most, **asked).run())
    return single


def same_text(
    model: Model,
    prompts: Sequence[Sequence[int]],
    chosen: Settings,
    n: int | Sequence[int] = 40,
    n_sequences: int = 0,
    *,
    wanted: Sequence[Answer] = (),
    **asked: Any,
) -> list[Answer]:
    """The answers with drafts, of which some are accepted and some are not; their texts are those
    without drafts.

    Args:
        chosen: settings with drafts; those without differ in the depth alone.
        wanted: the answers without drafts; empty: they are computed.
        asked: options of `generate`.
    """
    if not wanted:
        wanted = answers(model, prompts, replace(chosen, draft_n_max=0), n, **asked)
    got = answers(model, prompts, chosen, n, n_sequences, **asked)
    compare(model, prompts, got, wanted, exact=model.same_bits, greedy="sampling" not in asked)
    drafted = sum(one.telemetry.n_drafted for one in got)
    tried = 0 < sum(one.telemetry.n_accepted for one in got) < drafted
    assert tried or chosen.draft_n_max == "auto", "it was not tested"
    return got


def engine_of(session: Session | BatchSession) -> Engine:
    """What a session computes with: the one private member that tests of sessions reach for."""
    return session._engine


def cached(session: Session) -> list[int]:
    """The tokens that are in the caches of a session."""
    return engine_of(session).sequences[0].tokens


def draft_ids(session: Session | BatchSession) -> Ints | None:
    """The tokens that the draft head of a session has; None: it has the whole vocabulary."""
    context = engine_of(session).head.context
    assert context
    return context.draft_ids


def greedy(session: Session, prompt: Sequence[int], n: int) -> Generation:
    """A fresh greedy generation."""
    session.reset()
    return session.generate(prompt, max_tokens=n, log_pairs=True).run()


def written(
    model: Model, prompt: Sequence[int], n: int, depth: int | str, **options: object
) -> Generation:
    """A greedy generation of a session of its own."""
    with Session(model, settings(depth, **options)) as session:
        return greedy(session, prompt, n)


def alone(
    model: Model, prompt: Sequence[int], n: int, depth: int = 0, **options: object
) -> list[int]:
    """The tokens that a session of its own gives, past any end token."""
    with Session(model, settings(depth, **options)) as session:
        return session.generate(prompt, max_tokens=n, ignore_eos=True).run().tokens


#: Of rounds, by depth: some, for what does not depend on them.
COSTS = Costs((0.0, *map(float, range(1, AUTO_DEPTH + 2))), (0.0, *[0.1] * AUTO_DEPTH))


class Scripted(DepthController):
    """Depths by a list, over and over: of the head, or (of the head, of drafts from the text, and
    of drafts from the text behind those of the head).

    Attributes:
        asked: the depths that were chosen.
        told: (sequences, drafts, accepted) of every round of the head.
        told_looked_up: drafts of every round of drafts from the text alone.
        n_behind: drafts from the text behind those of the head.
    """

    def __init__(self, *rounds: int | tuple[int, ...]) -> None:
        super().__init__({1: COSTS})
        self._script = [(*one, 0) if isinstance(one, tuple) else (one, 0, 0) for one in rounds]
        self.asked: list[int] = []
        self.told: list[tuple[int, int, int]] = []
        self.told_looked_up: list[int] = []
        self.n_behind = 0

    @property
    def _now(self) -> tuple[int, ...]:
        return self._script[(len(self.told) + len(self.told_looked_up)) % len(self._script)]

    def choose(self, at_most: int | None = None, n_sequences: int = 1) -> int:
        depth = self._now[0]
        self.asked.append(depth if at_most is None else min(depth, max(at_most, 0)))
        return self.asked[-1]

    def lookup_depth(self, rates: Sequence[float], at_most: int, n_head: int = 0) -> int:
        assert all(0 <= rate <= 1 for rate in rates)
        return min(self._now[2 if n_head else 1], len(rates), max(at_most - n_head, 0))

    def update(self, n_drafted: int, outcomes: Outcomes, total_s: float, n_behind: int = 0) -> None:
        assert total_s > 0
        if n_drafted == n_behind > 0:
            self.told_looked_up.append(n_drafted)
            return
        assert all(0 <= held <= min(usable, n_drafted) for usable, held in outcomes)
        asked = self.asked[-1] if self.asked else 0  # without a head nobody asks
        assert max(n_drafted - n_behind, *(usable for usable, _ in outcomes)) <= asked
        held = sum(held for _, held in outcomes)
        self.told.append((len(outcomes), n_drafted - n_behind, held))
        self.n_behind += n_behind
