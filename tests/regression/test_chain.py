"""Drafting in one graph: the tokens that single steps draft, the same cache, graphs used again.

A step of a chain runs the same operations on one row as a single step does, so on an AVX-512
machine tokens, K and V agree to the bit, across a padding edge of the cache too. Elsewhere the
attention may add up in another order there, because all steps of a chain see the same length of
cache. A difference is therefore accepted where the two best logits of the single step are closer
than ROUNDING; most chains must agree all the same. Steps of two sequences at once do take other
kernels.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from pyllama_mtp.hidden import Hidden, HostRows, TapRows

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.batch import Batch
from pyllama_mtp.context import Context, ContextOptions
from pyllama_mtp.drafthead import head_rows
from pyllama_mtp.errors import InvalidBatchError, UsageError
from pyllama_mtp.settings import DRAFT_LIMIT
from pyllama_mtp.speculative.drafter import Drafter, top_probability
from pyllama_mtp.trace import Node

from ..workers import worker
from . import kvstate
from .support import (
    N_BATCH,
    N_CTX,
    N_UBATCH,
    OneSequence,
    assert_same_tokens,
    greedy,
    made_up,
    scaled,
    settings,
)

RunPython = Callable[..., "CompletedProcess[str]"]
Drafts = list[list[int]]

#: Logits have a standard deviation of 1 to 3; see support.rounding().
ROUNDING = scaled(0.01)
ONE = np.ones(1, dtype=np.int8)
#: Type of both caches, flash attention. A quantized V cache needs it; without it V is transposed.
CACHES = [("f16", "on"), ("f16", "off"), ("f32", "off"), ("q8_0", "on"), ("q4_0", "on")]


def none(n: int) -> npt.NDArray[np.int8]:
    return np.zeros(n, dtype=np.int8)


def in_step(drafter: Drafter | None) -> bytes:
    """The draft cache up to where it is in step; what single steps leave above it is dropped."""
    assert drafter
    drafter.context.remove(drafter.sequences[0].n_past)
    return bytes(drafter.context.save_state())


def context(model: Model, target: Context | None = None, **options: object) -> Context:
    chosen = {"n_ctx": N_CTX, "n_batch": N_BATCH, "n_ubatch": N_UBATCH, "n_threads": 1}
    chosen |= {"need_embd_pre_norm": True, "n_outputs_max": N_BATCH, **options}
    return Context(model, ContextOptions(**chosen), target)  # type: ignore[arg-type]


@dataclass
class Start:
    """Where drafting begins: the newest token, its position, the hidden row that pairs with it."""

    token: int
    position: int
    hidden: Hidden


def after_prompt(target: Context, draft: Context, n: int, device: bool = True) -> Start:
    """Both caches at the end of a prompt of `n` tokens, which differs from length to length."""
    target.clear()
    draft.clear()
    tokens = made_up(target.model, n + 1, 3 * n)
    assert target.tap
    carry: Hidden = target.tap.zero()
    for start in range(0, n, target.n_batch):
        part = tokens[start : min(start + target.n_batch, n)]
        target.decode(part, start, none(len(part)))
        rows = target.tap.rows(len(part))
        paired = rows.part(0, len(rows) - 1).after(carry)
        draft.decode(part, start, none(len(part)), paired)
        carry = rows.part(len(rows) - 1, len(rows)).keep(0)
    return Start(int(tokens[n]), n, carry if device else HostRows(carry.to_host().copy()))


def stepwise(draft: Context, at: Start, n: int, seq: int = 0) -> tuple[list[int], list[float]]:
    """Drafts by single steps, and how far each was ahead of the second best."""
    draft.set_greedy(False)
    token, hidden, found, leads = at.token, at.hidden, [], []
    for position in range(at.position, at.position + n):
        draft.decode(np.array([token], dtype=np.int32), position, ONE, hidden, seq)
        second, best = np.sort(draft.logits(0))[-2:]
        token = draft.argmax(0)
        found.append(token)
        leads.append(float(best - second))
        hidden = draft.hidden(on_device=isinstance(at.hidden, TapRows))
    return found, leads


def agree(found: Sequence[int], wanted: Sequence[int], leads: Sequence[float]) -> bool:
    """Whether drafts are equal. Where they part, the two best must have been as close as rounding.

    After that they are drafts for another text, and cannot be compared.
    """
    assert len(found) == len(wanted)
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if a != b:
            assert leads[i] < ROUNDING, f"draft {i}: {a} in a chain, {b} alone, lead {leads[i]}"
            return False
    return True


class Tally:
    """Counts chains that agree; most must."""

    def __init__(self) -> None:
        self.n, self.equal, self.drafts = 0, 0, set[tuple[int, ...]]()

    def check(self, draft: Context, at: Start, depth: int) -> None:
        """The same drafts from a chain as from single steps, before and after them."""
        wanted, leads = stepwise(draft, at, depth)
        for _ in range(2):
            draft.remove(at.position)
            found = draft.draft_chain(at.token, at.position, at.hidden, depth)
            assert draft.n_past == at.position + depth
            self.n += 1
            self.equal += agree(found, wanted, leads)
        draft.remove(at.position)
        assert stepwise(draft, at, depth)[0] == wanted
        draft.remove(at.position)
        self.drafts.add(tuple(found))

    def conclude(self) -> None:
        assert self.equal >= 0.9 * self.n, f"{self.equal} of {self.n} chains agree"
        assert len(self.drafts) > 1, "the drafts are always the same"


# -- the same drafts -------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [True, False], ids=["device", "host"])
@pytest.mark.parametrize("hidden", ["post-norm", "pre-norm"])
def test_depths(model: Model, hidden: str, device: bool) -> None:
    """Every depth, after prompts of several lengths; both hand-offs, both places of the tap."""
    tally = Tally()
    with (
        context(model, hidden=hidden) as target,
        context(model, target, mtp_head=True, hidden=hidden) as draft,
    ):
        for n in (1, 2, 17, N_BATCH + 1):
            at = after_prompt(target, draft, n, device)
            for depth in range(1, 9):
                tally.check(draft, at, depth)
    tally.conclude()


def test_two_threads(model: Model) -> None:
    """Threads share the steps, one after the other."""
    tally = Tally()
    with (
        context(model, n_threads=2) as target,
        context(model, target, mtp_head=True, n_threads=2) as draft,
    ):
        for n in (2, 17):
            tally.check(draft, after_prompt(target, draft, n), 4)
    tally.conclude()


@pytest.mark.parametrize(("cache", "flash_attn"), CACHES)
def test_cache_types(model: Model, cache: str, flash_attn: str) -> None:
    """With a rotation of K and V where they are quantized."""
    options = {"type_k": cache, "type_v": cache, "flash_attn": flash_attn}
    tally = Tally()
    with (
        context(model, **options) as target,
        context(model, target, mtp_head=True, **options) as draft,
    ):
        for n in (5, 33, 70):
            tally.check(draft, after_prompt(target, draft, n), 6)
    tally.conclude()


@pytest.mark.parametrize(("cache", "flash_attn"), CACHES)
def test_across_a_padding_edge_of_the_cache(model: Model, cache: str, flash_attn: str) -> None:
    """Graphs see a multiple of 256 entries; the first steps of a chain see more than they would
    alone when the last ones need them."""
    options = {"type_k": cache, "type_v": cache, "flash_attn": flash_attn}
    options |= {"n_batch": 512, "n_ubatch": 512}
    tally = Tally()
    with (
        context(model, **options) as target,
        context(model, target, mtp_head=True, **options) as draft,
    ):
        for n in (248, *range(250, 263)):
            tally.check(draft, after_prompt(target, draft, n), 8)
    tally.conclude()


@pytest.mark.parametrize("size", [37, 700])
def test_with_a_draft_head(model: Model, size: int) -> None:
    """Ids are those of the whole vocabulary, from step to step too."""
    drawn = np.random.default_rng(0).choice(model.n_vocab, size, replace=False)
    ids = np.sort(drawn).astype(np.int32)
    tally = Tally()
    with context(model) as target, context(model, target, mtp_head=True) as draft:
        draft.set_draft_head(head_rows(model.info, ids), ids)
        for n in (1, 17, 33):
            at = after_prompt(target, draft, n)
            for depth in (1, 2, 5, 8):
                tally.check(draft, at, depth)
        assert {token for drafts in tally.drafts for token in drafts} <= set(ids.tolist())
    tally.conclude()


def k_and_v(draft: Context) -> npt.NDArray[np.float32]:
    """Rows of the draft cache, as shares of the largest entry."""
    found = kvstate.parse(bytes(draft.save_state()))
    rows = np.concatenate([found.k[0], found.v[0]], axis=1)
    return rows / np.abs(rows).max()


@pytest.mark.parametrize("hidden", ["post-norm", "pre-norm"])
def test_k_and_v_of_a_chain(model: Model, hidden: str) -> None:
    """What each step stores is what a single step stores; see test_draft_cache.py for 0.003."""
    options = {"type_k": "f32", "type_v": "f32", "hidden": hidden}
    with (
        context(model, **options) as target,
        context(model, target, mtp_head=True, **options) as draft,
    ):
        at = after_prompt(target, draft, 20)
        wanted, leads = stepwise(draft, at, 7)
        rows = k_and_v(draft)
        draft.remove(at.position)
        found = draft.draft_chain(at.token, at.position, at.hidden, 7)
        assert agree(found, wanted, leads), "take another prompt"
        assert len(rows) == 27 and np.abs(k_and_v(draft) - rows).max() < scaled(0.003)
        assert np.abs(rows[20:-1] - rows[21:]).max(axis=1).min() > 0.03, "steps are alike"


def test_switches_act_on_the_next_chain(demo: Model) -> None:
    """Of one shape, whose graph would be used again if nobody looked: heads, place of the tap."""
    heads = [np.arange(first, demo.n_vocab, 3, dtype=np.int32) for first in range(3)]
    exact = {"type_k": "f32", "type_v": "f32"}
    with (
        context(demo, **exact) as target,
        context(demo, target, mtp_head=True, **exact) as draft,
    ):
        at = after_prompt(target, draft, 20)
        drafts, states = set(), []
        lib = draft.library.lib
        for ids, pre_norm in itertools.product((*heads, *heads), (False, True)):
            draft.set_draft_head(head_rows(demo.info, ids), ids)
            lib.llama_set_embeddings_pre_norm_point(draft.handle, pre_norm)
            wanted, leads = stepwise(draft, at, 4)
            rows = k_and_v(draft)
            draft.remove(at.position)
            found = draft.draft_chain(at.token, at.position, at.hidden, 4)
            assert agree(found, wanted, leads)
            states.append(k_and_v(draft))
            assert np.abs(states[-1] - rows).max() < scaled(0.003)
            draft.remove(at.position)
            drafts.add(tuple(found))
    assert len(drafts) >= 3
    for one, other in itertools.combinations(states[:6], 2):
        assert np.abs(one - other).max() > 0.01, "a switch has no effect"


def test_the_entries_after_the_first_step_are_not_looked_at(demo: Model) -> None:
    """Neither their tokens nor their hidden rows; positions are."""
    rng, n = np.random.default_rng(3), 5
    positions, seqs = np.arange(20, 20 + n, dtype=np.int32), np.zeros(n, dtype=np.int32)
    ones = np.ones(n, dtype=np.int8)
    with context(demo) as target, context(demo, target, mtp_head=True) as draft:
        at = after_prompt(target, draft, 20, device=False)
        wanted = draft.draft_chain(at.token, 20, at.hidden, n)
        for _ in range(3):
            tokens = rng.integers(0, demo.n_vocab, n, dtype=np.int32)
            rows = rng.standard_normal((n, demo.n_embd)).astype(np.float32)
            tokens[0], rows[0] = at.token, at.hidden.to_host()[0]
            draft.remove(20)
            draft.decode_batch(Batch(tokens, positions, seqs, ones, rows, chain=n))
            assert [draft.argmax(row) for row in range(n)] == wanted
        rows[0] = 0
        draft.remove(20)
        draft.decode_batch(Batch(tokens, positions, seqs, ones, rows, chain=n))
        assert [draft.argmax(row) for row in range(n)] != wanted


def test_what_a_chain_leaves(model: Model) -> None:
    """Ids and nothing else: no hidden rows, no logits, four bytes a step."""
    with context(model) as target, context(model, target, mtp_head=True) as draft:
        at = after_prompt(target, draft, 20)
        before = draft.output_bytes
        draft.draft_chain(at.token, 20, at.hidden, 5)
        assert draft.output_bytes == before + 4 * 5
        with pytest.raises(UsageError, match="greedy tokens only"):
            draft.logits(0)
        assert draft.tap
        with pytest.raises(UsageError, match="no hidden rows"):
            draft.tap.rows(5)
        null = draft.library.ffi.NULL
        for i in range(-1, 6):
            pointer = draft.library.lib.llama_get_embeddings_pre_norm_ith(draft.handle, i)
            assert pointer == null
        with pytest.raises(UsageError, match="not marked as an output"):
            draft.argmax(5)


def per_step(nodes: Sequence[Node], name: str) -> list[int]:
    """Rows of the nodes of that name, step by step."""
    return [n.rows for n in nodes if n.name == name or n.name.rpartition("-")[0] == name]


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
def test_the_graph_runs_the_block_once_a_step(model: Model, depth: int, part: bool) -> None:
    """On one row each time; what the steps share is built once."""
    with context(model) as target, context(model, target, mtp_head=True, trace=True) as draft:
        if part:
            ids = np.arange(0, model.n_vocab, 7, dtype=np.int32)
            draft.set_draft_head(head_rows(model.info, ids), ids)
        at = after_prompt(target, draft, 20)
        draft.draft_chain(at.token, 20, at.hidden, depth)
        nodes = draft.nodes()
        for name in ("mtp_attn_norm", "mtp_attn_residual", "mtp_ffn_out", "mtp_shared_head_norm"):
            assert per_step(nodes, name) == [1] * depth, name
        assert per_step(nodes, "result_output") == [1] * depth
        searches = [n.shape for n in nodes if n.name == "mtp_argmax" and n.op == "CUSTOM"]
        assert searches == [(1, 1, 1, 1)] * depth
        assert not any(n.name == "mtp_tap_store" for n in nodes)
        assert sum(n.name == "mtp_hidden" for n in nodes) == 1


# -- drafts of the driver --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompts(demo: Model, demo_prompts: list[str]) -> list[list[int]]:
    return [demo.tokenize(prompt, parse_special=True) for prompt in demo_prompts]


#: Settings of a session that chains.
DRIVER: dict[str, dict[str, object]] = {
    "auto": {},
    "host": {"handoff": "host"},
    "pre-norm": {"hidden": "pre-norm"},
    "full sync": {"prompt_sync": "full"},
    "part": {"draft_vocab": 700},
    "part, host, q8_0": {
        "draft_vocab": 300,
        "handoff": "host",
        "cache_type_k": "q8_0",
        "cache_type_v": "q8_0",
    },
    "q4_0": {"cache_type_k": "q4_0", "cache_type_v": "q4_0"},
    "no flash attention": {"flash_attn": "off"},
}


@pytest.mark.parametrize("options", DRIVER.values(), ids=DRIVER)
def test_drafts_after_real_prompts(
    demo: Model, prompts: list[list[int]], options: dict[str, object]
) -> None:
    """Of the driver, which chains, steps, or is asked for one step after the other here."""
    n_equal = 0
    for depth, prompt in zip(itertools.cycle(range(1, 9)), prompts, strict=False):
        found = []
        for drafting in ("chain", "stepwise", "stepwise"):
            engine = OneSequence(demo, settings(depth, drafting=drafting, **options))
            row = engine.process(prompt)
            token, drafter = engine.target.argmax(row), engine.drafter
            assert drafter and drafter.chained is (drafting == "chain")
            if len(found) < 2:
                found.append(engine.draft(token, depth).tokens)
            else:
                assert drafter.sequences[0].carry is not None
                at = Start(token, drafter.sequences[0].n_past, drafter.sequences[0].carry)
                wanted, leads = stepwise(drafter.context, at, depth)
            engine.close()
        n_equal += agree(found[0], wanted, leads) and agree(found[1], wanted, leads)
    assert n_equal >= 0.9 * len(prompts)


@pytest.mark.parametrize("options", [{}, {"draft_vocab": 300}], ids=["whole", "part"])
@pytest.mark.parametrize("depth", [1, 3, 8])
@pytest.mark.parametrize("rollback", ["snapshot", "replay"])
def test_generations(
    demo: Model,
    prompts: list[list[int]],
    gap: float,
    rollback: str,
    depth: int,
    options: dict[str, object],
) -> None:
    """Text, drafts, acceptance and cache of either way; the text is that of plain greedy.

    The second prompt goes on from the first and its answer, the third parts from it half way.
    """
    runs = []
    for drafting in ("chain", "stepwise"):
        chosen = settings(depth, drafting=drafting, rollback=rollback, **options)
        with Session(demo, chosen) as session:
            found = runs.append([]) or runs[-1]
            for prompt in prompts[:3]:
                session.reset()
                texts = [prompt]
                for _ in range(3):
                    run = session.generate(
                        texts[-1], max_tokens=20, ignore_eos=True, log_pairs=True
                    ).run()
                    assert run.telemetry.n_cached > 0 or len(texts) == 1
                    texts.append([*texts[-1], *run.tokens, *prompt[:5]])
                    if len(texts) == 3:
                        texts[-1] = [*texts[-1][: len(texts[-1]) // 2], *prompt[:9]]
                    pairs = [(p.position, p.drafted, p.actual) for p in run.telemetry.pairs or ()]
                    cache = in_step(session._engine.drafter)
                    found.append((texts[-2], run.tokens, pairs, run.telemetry.accepted, cache))
    assert runs[0] == runs[1]
    with Session(demo, settings(0)) as plain:
        for prompt, tokens, *_ in runs[0]:
            plain.reset()
            expected = plain.generate(prompt, max_tokens=20, ignore_eos=True).run().tokens
            assert_same_tokens(demo, prompt, tokens, expected, gap)


def test_generations_of_a_mixture_of_experts(moe: Model) -> None:
    """Its head predicts nothing, so acceptance is imposed."""
    runs: list[list[Any]] = []
    for drafting in ("chain", "stepwise"):
        chosen = settings(3, drafting=drafting, synthetic_acceptance=(0.75, 0.5, 0.25))
        with Session(moe, chosen) as session:
            runs.append([])
            for n in (1, 17, 49):
                run = greedy(session, made_up(moe, n).tolist(), 24)
                pairs = [(p.position, p.drafted, p.actual) for p in run.telemetry.pairs or ()]
                cache = in_step(session._engine.drafter)
                runs[-1].append((run.tokens, pairs, run.telemetry.accepted, cache))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("rollback", ["snapshot", "replay"])
@pytest.mark.parametrize(("cache", "flash_attn"), [("f16", "off"), *CACHES[3:]])
def test_the_cache_after_a_sync(model: Model, cache: str, flash_attn: str, rollback: str) -> None:
    """Byte by byte, round by round. What is verified, and how much of it is kept, is decreed, so
    the drafts play no part; nothing of them stays."""
    depth, n = 4, 30
    options = {"cache_type_k": cache, "cache_type_v": cache, "flash_attn": flash_attn}
    states: list[list[bytes]] = []
    for drafting in ("chain", "stepwise"):
        engine = OneSequence(
            model, settings(depth, drafting=drafting, rollback=rollback, **options)
        )
        engine.process(made_up(model, n).tolist())
        assert engine.drafter
        states.append([])
        for n_accepted in (0, 4, 1, 3, 2, 0, 4):
            start = len(engine.cached)
            verified = made_up(model, depth + 1, start).tolist()
            assert len(engine.draft(verified[0], depth).tokens) == depth
            assert engine.drafter.context.n_past == start + depth
            engine.verify(verified[0], verified[1:])
            engine.keep(n_accepted)
            own = engine.drafter.sequences[0]
            assert own.n_past == len(engine.cached) == start + n_accepted + 1
            if drafting == "chain":
                assert engine.drafter.context.n_past == own.n_past
            states[-1].append(in_step(engine.drafter))
        engine.close()
    assert states[0] == states[1]
    assert len(set(states[0])) == len(states[0])


def test_to_the_end_of_the_context(demo: Model, text: list[int], gap: float) -> None:
    """Drafts become fewer where room does."""
    with Session(demo, settings(0, n_ctx=64)) as plain:
        wanted = greedy(plain, text[:40], 999)
    for depth in (1, 5, 8):
        with Session(demo, settings(depth, n_ctx=64, drafting="chain")) as session:
            run = greedy(session, text[:40], 999)
        assert run.finish_reason == wanted.finish_reason == "length"
        assert_same_tokens(demo, text[:40], run.tokens, wanted.tokens, gap)


@pytest.mark.parametrize("depth", [16, 33, 41, DRAFT_LIMIT])
@pytest.mark.parametrize("tight", [False, True])
def test_every_depth_that_settings_allow(model: Model, depth: int, tight: bool) -> None:
    """With the usual batch sizes, and with the smallest ones that go with the depth. A graph may
    have no room for all of the steps; then they are single ones, unless a chain is insisted on."""
    small = {"n_batch": depth + 2, "n_ubatch": depth + 2} if tight else {}
    chosen = Settings(n_ctx=N_CTX, n_threads=1, draft_n_max=depth, **small)  # type: ignore[arg-type]
    prompt = made_up(model, 9).tolist()
    runs, chained = [], []
    for drafting in ("auto", "stepwise"):
        with Session(model, replace(chosen, drafting=drafting)) as session:
            drafter = session._engine.drafter
            assert drafter
            chained.append(drafter.chained)
            run = session.generate(prompt, max_tokens=2 * depth, ignore_eos=True, log_pairs=True)
            run.run()
            assert len(run.telemetry.drafted) == depth
            pairs = [(p.position, p.drafted, p.actual) for p in run.telemetry.pairs or ()]
            runs.append((run.tokens, run.telemetry.drafted, pairs, in_step(drafter)))
    assert runs[0] == runs[1]
    assert chained in ([True, False], [False, False])
    if chained[0]:
        Session(model, replace(chosen, drafting="chain")).close()
    else:
        assert depth > 32
        with pytest.raises(UsageError, match=f"a chain of {depth} drafts has no room in a graph"):
            Session(model, replace(chosen, drafting="chain"))


def test_on_a_device(demo: Model, demo_file: Path, prompts: list[list[int]], gap: float) -> None:
    """On a worker, with the whole vocabulary and with a part of it."""
    with worker() as address, Model(demo_file, rpc_servers=address) as remote:
        for options in ({}, {"draft_vocab": 700}):
            for drafting in ("chain", "stepwise"):
                chosen = settings(3, drafting=drafting, **options)
                with Session(demo, chosen) as here, Session(remote, chosen) as there:
                    wanted = greedy(here, prompts[0], 24)
                    run = greedy(there, prompts[0], 24)
                if assert_same_tokens(demo, prompts[0], run.tokens, wanted.tokens, gap):
                    assert run.telemetry.accepted == wanted.telemetry.accepted


# -- probabilities ---------------------------------------------------------------------------------


@pytest.mark.parametrize("drafting", ["chain", "stepwise"])
def test_a_least_probability_cuts(demo: Model, prompts: list[list[int]], drafting: str) -> None:
    """The drafts are the same up to the first one that is less probable."""
    depth, lengths = 6, set()
    for prompt in prompts[:12]:
        chain = OneSequence(demo, settings(depth))
        row = chain.process(prompt)
        token, drafter = chain.target.argmax(row), chain.drafter
        assert drafter and drafter.chained and drafter.sequences[0].carry is not None
        carry = HostRows(drafter.sequences[0].carry.to_host().copy())
        whole = chain.draft(token, depth).tokens
        # How probable each of them is, by single steps.
        drafter.context.remove(len(prompt))
        with context(demo, chain.target, mtp_head=True, n_batch=512) as other:
            other.load_state(drafter.context.save_state())
            hidden: Hidden = carry
            shares = []
            drafter.context.set_greedy(False)
            for position, known in enumerate([token, *whole[:-1]], len(prompt)):
                other.decode(np.array([known], dtype=np.int32), position, ONE, hidden)
                shares.append(top_probability(other.logits(0)))
                hidden = other.hidden()
        chain.close()
        p_min = 0.5
        if min(abs(share - p_min) for share in shares) < 0.01:
            continue
        cut = next((i for i, share in enumerate(shares) if share < p_min), depth)
        steps = OneSequence(demo, settings(depth, p_min=p_min, drafting=drafting))
        steps.process(prompt)
        assert steps.drafter and steps.drafter.chained == (drafting == "chain")
        assert steps.draft(token, depth).tokens == whole[:cut]
        steps.close()
        lengths.add(cut)
    assert len(lengths) > 2


# -- refusals: an exception each, and the context goes on ------------------------------------------


def chain_batch(at: Start, n: int, **changes: Any) -> Batch:
    """A chain of `n` steps after `at`, with fields that are replaced."""
    rows = at.hidden
    for _ in range(n - 1):
        rows = rows.after(at.hidden)
    fields = {
        "tokens": np.full(n, at.token, dtype=np.int32),
        "positions": np.arange(at.position, at.position + n, dtype=np.int32),
        "seqs": np.zeros(n, dtype=np.int32),
        "outputs": np.ones(n, dtype=np.int8),
        "hidden": rows,
        "chain": n,
    }
    return Batch(**{**fields, **changes})


@pytest.fixture
def unharmed(model: Model) -> Iterator[tuple[Context, Start]]:
    """A draft context that keeps greedy tokens, and where it would draft. Whatever was refused, it
    drafts what it drafted before, in a chain and step by step, from the same cache."""
    with context(model) as target, context(model, target, mtp_head=True) as draft:
        at = after_prompt(target, draft, 20)
        steps, leads = stepwise(draft, at, 6)
        draft.remove(20)
        before = bytes(draft.save_state())
        chained = draft.draft_chain(at.token, 20, at.hidden, 6)
        draft.remove(20)
        yield draft, at
        assert bytes(draft.save_state()) == before, "what was refused has changed the cache"
        assert draft.draft_chain(at.token, 20, at.hidden, 6) == chained
        draft.remove(20)
        assert stepwise(draft, at, 6)[0] == steps
        assert agree(chained, steps, leads)


WHOLE_STEPS = "a chain is whole steps, every entry an output, and at most n_ubatch = 16"


@pytest.mark.parametrize(("n", "chain"), [(6, 4), (6, 5), (6, 7), (1, 2), (5, -1), (6, -3)])
def test_entries_that_are_no_whole_steps(
    unharmed: tuple[Context, Start], n: int, chain: int
) -> None:
    draft, at = unharmed
    with pytest.raises(UsageError, match=WHOLE_STEPS):
        draft.decode_batch(chain_batch(at, n, chain=chain))


@pytest.mark.parametrize("marks", [[0, 0, 0, 0], [1, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 0]])
def test_entries_that_are_no_outputs(unharmed: tuple[Context, Start], marks: list[int]) -> None:
    draft, at = unharmed
    outputs = np.array(marks, dtype=np.int8)
    with pytest.raises(UsageError, match=WHOLE_STEPS):
        draft.decode_batch(chain_batch(at, 4, outputs=outputs))


def test_more_steps_than_a_graph_takes_tokens(unharmed: tuple[Context, Start]) -> None:
    draft, at = unharmed
    for n in (N_UBATCH + 1, N_BATCH):
        with pytest.raises(UsageError, match=WHOLE_STEPS):
            draft.decode_batch(chain_batch(at, n))
    draft.decode_batch(chain_batch(at, N_UBATCH))
    draft.remove(at.position)


def test_a_context_that_leaves_logits(unharmed: tuple[Context, Start]) -> None:
    draft, at = unharmed
    draft.set_greedy(False)
    with pytest.raises(UsageError, match="a chain belongs to a draft context that keeps greedy"):
        draft.decode_batch(chain_batch(at, 4))


def test_a_target_context(model: Model) -> None:
    with context(model) as target:
        target.set_greedy(True)
        target.decode(made_up(model, 20), 0, none(20))
        before = bytes(target.save_state())
        at = Start(7, 20, HostRows(np.zeros((1, model.n_embd), dtype=np.float32)))
        with pytest.raises(UsageError, match="a chain belongs to a draft context"):
            target.decode_batch(chain_batch(at, 4, hidden=None))
        assert bytes(target.save_state()) == before
        target.decode(made_up(model, 3, 20), 20, np.ones(3, dtype=np.int8))
        assert all(target.argmax(row) >= 0 for row in range(3))


# -- refusals of the native side -------------------------------------------------------------------


@pytest.mark.parametrize("n_steps", [-1, -(2**31), 10**6, 2**31 - 1])
def test_an_absurd_number_of_steps(unharmed: tuple[Context, Start], n_steps: int) -> None:
    """Refused, and nothing is armed then, not even what was before."""
    draft, at = unharmed
    lib = draft.library.lib
    draft.set_greedy(True)
    assert not lib.llama_mtp_set_chain(draft.handle, n_steps)
    assert lib.llama_mtp_set_chain(draft.handle, 3)
    assert not lib.llama_mtp_set_chain(draft.handle, n_steps)
    draft.decode_batch(chain_batch(at, 4, chain=0))
    draft.remove(at.position)


def test_no_steps_mean_no_chain(unharmed: tuple[Context, Start], model: Model) -> None:
    """On any context, and after another number."""
    draft, at = unharmed
    lib = draft.library.lib
    draft.set_greedy(True)
    assert lib.llama_mtp_set_chain(draft.handle, 3) and lib.llama_mtp_set_chain(draft.handle, 0)
    draft.decode_batch(chain_batch(at, 4, chain=0))
    draft.remove(at.position)
    with context(model) as target:
        assert lib.llama_mtp_set_chain(target.handle, 0)


def test_whether_a_context_can_chain(unharmed: tuple[Context, Start], model: Model) -> None:
    """It is only asked."""
    draft, at = unharmed
    assert [draft.can_chain(n) for n in (1, 8, 10**6, -1)] == [True, True, False, False]
    draft.decode_batch(chain_batch(at, 5, chain=0))
    draft.remove(at.position)
    with context(model) as target, context(model, mtp_head=True, n_seq_max=2) as several:
        assert not target.can_chain(1) and not several.can_chain(1)


def test_native_calls_that_are_refused(unharmed: tuple[Context, Start], model: Model) -> None:
    """Greedy tokens off, a target context, caches of sequences that are apart. What was refused is
    not armed: the next decode is no chain."""
    draft, at = unharmed
    lib = draft.library.lib
    draft.set_greedy(False)
    assert not lib.llama_mtp_set_chain(draft.handle, 3)
    plain = chain_batch(at, 4, chain=0)
    draft.decode_batch(plain)
    assert draft.argmax(3) >= 0
    draft.remove(at.position)
    apart = {"mtp_head": True, "n_seq_max": 2}
    with context(model) as target, context(model, **apart) as several:
        for found in (target, several):
            found.set_greedy(True)
            assert not lib.llama_mtp_set_chain(found.handle, 1)
            hidden = HostRows(np.zeros((5, model.n_embd), dtype=np.float32))
            given = hidden if found is several else None
            found.decode(made_up(model, 5), 0, np.ones(5, dtype=np.int8), given)
            assert all(found.argmax(row) >= 0 for row in range(5))


#: Batches that are no chain of 3 steps: entries, marks.
NO_CHAIN_OF_3 = {
    "4 entries": [1, 1, 1, 1],
    "a single one": [1],
    "not every one an output": [1, 1, 0],
    "no output": [0, 0, 0],
    "two graphs": [1] * 18,
}


@pytest.mark.parametrize("marks", NO_CHAIN_OF_3.values(), ids=NO_CHAIN_OF_3)
def test_a_decode_that_does_not_fit_the_chain(
    unharmed: tuple[Context, Start], marks: list[int]
) -> None:
    """It fails, leaves the cache alone, and uses the setting up."""
    draft, at = unharmed
    n = len(marks)
    batch = chain_batch(at, n, outputs=np.array(marks, dtype=np.int8), chain=0)
    draft.set_greedy(True)
    before = bytes(draft.save_state())
    draft.decode_batch(batch)
    wanted = [draft.argmax(row) for row in range(n) if marks[row]]
    for _ in range(2):
        draft.remove(at.position)
        assert draft.library.lib.llama_mtp_set_chain(draft.handle, 3)
        with pytest.raises(
            InvalidBatchError, match=f"{n} tokens and {sum(marks)} outputs"
        ) as error:
            draft.decode_batch(batch)
        assert error.value.code == -1
        assert bytes(draft.save_state()) == before
        draft.decode_batch(batch)
        assert [draft.argmax(row) for row in range(n) if marks[row]] == wanted
    draft.remove(at.position)


def test_the_setting_is_for_one_decode(unharmed: tuple[Context, Start]) -> None:
    """A batch that would fit as a chain is none, unless it is asked for; the last number counts."""
    draft, at = unharmed
    draft.set_greedy(True)
    plain, chain = (chain_batch(at, 4, chain=n) for n in (0, 4))
    found = []
    for batch in (plain, chain, plain, chain):
        draft.decode_batch(batch)
        found.append([draft.argmax(row) for row in range(4)])
        draft.remove(at.position)
    assert found[0] == found[2] != found[1] == found[3]
    lib = draft.library.lib
    assert lib.llama_mtp_set_chain(draft.handle, 3) and lib.llama_mtp_set_chain(draft.handle, 4)
    draft.decode_batch(plain)
    assert [draft.argmax(row) for row in range(4)] == found[1]
    draft.remove(at.position)


def test_greedy_tokens_turned_off_under_a_chain(run_python: RunPython, demo_file: Path) -> None:
    """Between the two native calls: an error of the decode. In a process of its own, which a fault
    would end."""
    code = """
import sys
import numpy as np
from pyllama_mtp import Model
from pyllama_mtp.context import Context, ContextOptions
from pyllama_mtp.errors import DecodeError
options = dict(n_ctx=64, n_batch=8, n_ubatch=8, n_threads=1, mtp_head=True, n_outputs_max=3)
with Model(sys.argv[1]) as model, Context(model, ContextOptions(**options)) as draft:
    tokens, ones = np.arange(3, dtype=np.int32), np.ones(3, dtype=np.int8)
    states = np.zeros((3, model.n_embd), dtype=np.float32)
    draft.set_greedy(True)
    assert draft.library.lib.llama_mtp_set_chain(draft.handle, 3)
    draft.set_greedy(False)
    try:
        draft.decode(tokens, 0, ones, states)
    except DecodeError:
        pass
    draft.clear()
    draft.decode(tokens, 0, ones, states)
    print(draft.logits(2).shape)
"""
    done = run_python(code, demo_file, env={"GGML_NO_BACKTRACE": "1"})
    assert (done.returncode, done.stdout) == (0, "(2048,)\n"), done.stderr


def test_a_nan_in_a_chain(run_python: RunPython, demo_file: Path, tmp_path: Path) -> None:
    """Damaged weights of the MTP block are an exception, as they are without a chain, and not the
    end of the process."""
    code = """
import sys
import numpy as np
from gguf import GGUFReader
from pathlib import Path
from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.errors import FatalDecodeError
data = bytearray(Path(sys.argv[1]).read_bytes())
(norm,) = (t for t in GGUFReader(sys.argv[1]).tensors if "shared_head_norm" in t.name)
np.frombuffer(data, "<f4", int(norm.n_elements), int(norm.data_offset))[:] = np.nan
Path(sys.argv[2]).write_bytes(data)
with Model(sys.argv[2]) as model:
    for drafting in ("stepwise", "chain"):
        chosen = Settings(n_ctx=64, n_threads=1, draft_n_max=3, drafting=drafting)
        with Session(model, chosen) as session:
            try:
                session.generate([5, 6, 7], max_tokens=8).run()
            except FatalDecodeError as error:
                print(drafting, str(error).split(":")[0])
"""
    env = {"GGML_NO_BACKTRACE": "1"}
    done = run_python(code, demo_file, tmp_path / "nan.gguf", env=env)
    said = [f"{drafting} the model's logits are NaN" for drafting in ("stepwise", "chain")]
    assert (done.returncode, done.stdout.splitlines()) == (0, said), done.stderr


#: Model file; prints what the upstream variant makes of a chain.
CODE = """
import json, sys

from pyllama_mtp import Model, Session, Settings, native
from pyllama_mtp.errors import UsageError

with Model(sys.argv[1]) as model:
    with Session(model, Settings(n_ctx=64, n_threads=1)) as session:
        drafter = session._engine.drafter
        lib = drafter.context.library.lib
        found = [drafter.chained, lib.llama_mtp_set_chain(drafter.context.handle, 1)]
        found.append(session.generate([5, 6, 7], max_tokens=8).run().tokens)
    try:
        Session(model, Settings(n_ctx=64, drafting="chain"))
    except UsageError as error:
        found.append(str(error))
print(json.dumps([native.load().variant, *found]))
"""


def test_upstreams_library(run_python: RunPython, demo: Model, demo_file: Path) -> None:
    done = run_python(CODE, demo_file, env={"PYLLAMA_MTP_LIB": "upstream"})
    assert done.returncode == 0, done.stderr
    variant, chained, armed, tokens, said = json.loads(done.stdout)
    assert (variant, chained, armed) == ("upstream", False, False)
    assert "drafting 'chain' is not in upstream's library" in said
    with Session(demo, settings(3)) as session:
        assert session.generate([5, 6, 7], max_tokens=8).run().tokens == tokens


# -- several sequences -----------------------------------------------------------------------------


class Unified(ContextOptions):
    """Sequences in one cache."""

    def fill(self, lib: Any, params: Any) -> None:
        super().fill(lib, params)
        params.kv_unified = True


LENGTHS = (7, 12)


def two_starts(draft: Context) -> list[Start]:
    """Two sequences of unequal lengths in the cache; hidden rows are any."""
    rng, model, starts = np.random.default_rng(5), draft.model, []
    for seq, n in enumerate(LENGTHS):
        states = rng.standard_normal((n + 1, model.n_embd)).astype(np.float32)
        tokens = made_up(model, n + 1, 50 * seq)
        draft.decode(tokens[:n], 0, none(n), HostRows(states[:n]), seq)
        starts.append(Start(int(tokens[n]), n, HostRows(states[n:])))
    return starts


def together(starts: Sequence[Start], order: Sequence[int], n: int) -> Batch:
    """A chain of `n` steps of these sequences, each step in this order."""
    chosen = [starts[seq] for seq in order] * n
    steps = np.repeat(np.arange(n), len(order))
    return Batch(
        np.array([at.token for at in chosen], dtype=np.int32),
        np.array([at.position for at in chosen], dtype=np.int32) + steps.astype(np.int32),
        np.array([*order] * n, dtype=np.int32),
        np.ones(len(chosen), dtype=np.int8),
        np.concatenate([at.hidden.to_host() for at in chosen]),
        chain=n,
    )


def back(draft: Context, starts: Sequence[Start]) -> None:
    """Drop what was drafted."""
    for seq, at in enumerate(starts):
        assert draft.library.lib.llama_memory_seq_rm(draft._memory, seq, at.position, -1)


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_two_sequences_in_one_chain(model: Model, depth: int) -> None:
    """In one cache. Each sequence drafts what it drafts alone."""
    options = Unified(
        n_ctx=N_CTX,
        n_batch=N_BATCH,
        n_ubatch=N_UBATCH,
        n_threads=1,
        mtp_head=True,
        need_embd_pre_norm=True,
        n_outputs_max=N_UBATCH,
        n_seq_max=2,
    )
    with Context(model, options) as draft:
        starts = two_starts(draft)
        alone = []
        for seq, at in enumerate(starts):
            alone.append(stepwise(draft, at, depth, seq))
            back(draft, starts)
        assert alone[0][0] != alone[1][0]
        draft.set_greedy(True)
        n_equal = 0
        for order in ((0, 1), (1, 0), (0,), (1,)):
            draft.decode_batch(together(starts, order, depth))
            for i, seq in enumerate(order):
                found = [draft.argmax(step * len(order) + i) for step in range(depth)]
                n_equal += agree(found, *alone[seq])
                assert draft.past(seq) == starts[seq].position + depth
            back(draft, starts)
        assert n_equal >= 5


def test_caches_that_are_apart_are_refused(model: Model) -> None:
    """One stream of the cache for each sequence: the steps would not be parts of the inputs."""
    with context(model, mtp_head=True, n_seq_max=2) as draft:
        starts = two_starts(draft)
        wanted = [stepwise(draft, at, 3, seq)[0] for seq, at in enumerate(starts)]
        back(draft, starts)
        draft.set_greedy(True)
        for order in ((0, 1), (0,)):
            with pytest.raises(InvalidBatchError, match=r"the chain was refused.*no chain of 3"):
                draft.decode_batch(together(starts, order, 3))
        assert [draft.past(seq) for seq in range(2)] == list(LENGTHS)
        assert [stepwise(draft, at, 3, seq)[0] for seq, at in enumerate(starts)] == wanted


# -- graphs ----------------------------------------------------------------------------------------


@dataclass
class Count:
    """Decodes of one context, and the graphs that were built for them."""

    context: Context
    decodes: int = 0

    def __post_init__(self) -> None:
        real = self.context.decode_batch

        def counted(batch: Batch) -> None:
            self.decodes += 1
            real(batch)

        self.context.decode_batch = counted  # type: ignore[method-assign]
        self.reused = self.context.graphs_reused

    def take(self) -> tuple[int, int]:
        """(decodes, graphs used again) since the last call."""
        found = self.decodes, self.context.graphs_reused - self.reused
        self.decodes, self.reused = 0, self.context.graphs_reused
        return found


def rounds(engine: OneSequence, depth: int, n: int, token: int) -> int:
    """`n` rounds with real acceptance; the newest token."""
    for _ in range(n):
        drafts = engine.draft(token, depth).tokens
        assert len(drafts) == depth
        engine.verify(token, drafts)
        best = [engine.target.argmax(row) for row in range(depth + 1)]
        held = [a == b for a, b in zip(drafts, best, strict=False)]
        n_accepted = held.index(False) if False in held else depth
        engine.keep(n_accepted)
        token = best[n_accepted]
    return token


GRAPHS: dict[str, dict[str, object]] = {
    "auto": {},
    "host": {"handoff": "host"},
    "part": {"draft_vocab": 700},
    "pre-norm": {"hidden": "pre-norm"},
    "q8_0": {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
    "no flash attention": {"flash_attn": "off"},
}


@pytest.mark.parametrize("options", GRAPHS.values(), ids=GRAPHS)
@pytest.mark.parametrize("depth", [1, 3])
def test_no_graph_is_built_in_the_steady_state(
    model: Model, depth: int, options: dict[str, object]
) -> None:
    """A round is a chain and a sync on the draft context, and one pass of the target: three graphs
    of three shapes, whatever was accepted. Each is built once, and once more where the padded
    length of the cache grows."""
    engine = OneSequence(model, settings(depth, **options))
    prompt = made_up(model, 40).tolist()
    token = engine.target.argmax(engine.process(prompt))
    assert engine.drafter and engine.drafter.chained
    draft, target = Count(engine.drafter.context), Count(engine.target)
    token = rounds(engine, depth, 1, token)
    assert (draft.take(), target.take()) == ((2, 0), (1, 0))
    n = 0
    while len(engine.cached) + 2 * (depth + 1) < 256 and n < 40:
        token = rounds(engine, depth, 1, token)
        n += 1
    assert n > 20
    assert (draft.take(), target.take()) == ((2 * n, 2 * n), (n, n))
    n = 0
    while len(engine.cached) < 270:
        token = rounds(engine, depth, 1, token)
        n += 1
    assert (draft.take(), target.take()) == ((2 * n, 2 * n - 2), (n, n - 1))
    engine.close()


def test_another_depth_is_another_graph(demo: Model) -> None:
    """Both graphs of the draft context, and only once each time."""
    engine = OneSequence(demo, settings(5))
    token = engine.target.argmax(engine.process(made_up(demo, 40).tolist()))
    assert engine.drafter
    count = Count(engine.drafter.context)
    for depth in (5, 2, 5, 4):
        token = rounds(engine, depth, 4, token)
        assert count.take() == (8, 6)
    engine.close()


def test_a_block_that_is_run_whole_has_one_kind_of_graph(demo: Model) -> None:
    """With upstream's sync there is nothing to keep apart; it works all the same."""
    engine = OneSequence(demo, settings(3, prompt_sync="full"))
    token = engine.target.argmax(engine.process(made_up(demo, 40).tolist()))
    assert engine.drafter
    count = Count(engine.drafter.context)
    before = engine.memory()["draft_compute"]
    rounds(engine, 3, 8, token)
    decodes, reused = count.take()
    assert decodes >= 8 and reused <= decodes // 2
    assert engine.memory()["draft_compute"] >= before
    engine.close()


def test_a_session_closes_without_complaint(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    """llama.cpp compares a buffer with what was reserved for it when a context ends."""
    with Session(model, settings(3)) as session:
        session.generate(made_up(model, 30).tolist(), max_tokens=8, ignore_eos=True).run()
    assert not [record.getMessage() for record in caplog.records]


def test_memory_of_both_graphs_is_counted(model: Model) -> None:
    """Graphs that store K and V only get buffers of their own, with the first of them."""
    with Session(model, settings(3)) as session:
        before = session.memory()
        session.generate(made_up(model, 30).tolist(), max_tokens=8, ignore_eos=True).run()
        after = session.memory()
    assert after["draft_compute"] > before["draft_compute"]
    for name in ("weights", "target_context", "draft_context", "hidden_rows"):
        assert after[name] == before[name]


#: Batches of one draft context: where they end, and which entries are outputs.
MIXED = [
    (16, ()),
    (48, (31,)),
    (64, ()),
    (80, ()),
    (112, (3,)),
    (128, ()),
    (131, (0, 1, 2)),
    (147, ()),
    (163, (15,)),
    (195, (2, 20)),
    (211, ()),
]
#: Model file, address of a worker or "", whether each batch has a context of its own graphs;
#: prints a checksum of the cache, and the tokens of the outputs.
MIXED_CODE = f"""
import hashlib, json, sys

import numpy as np

from pyllama_mtp import Model
from pyllama_mtp.context import Context, ContextOptions

options = ContextOptions(
    n_ctx=512, n_batch=48, n_ubatch=16, n_threads=1, mtp_head=True, n_outputs_max=48
)
start, tokens = 0, []
with Model(sys.argv[1], rpc_servers=sys.argv[2].split()) as model, Context(model, options) as draft:
    i = np.arange(512, dtype=np.int64)
    ids = ((7 * i * i + 13 * i + 5) % model.n_vocab).astype(np.int32)
    states = np.random.default_rng(0).standard_normal((512, model.n_embd)).astype(np.float32)
    for end, outputs in {MIXED!r}:
        if sys.argv[3] == "apart":  # the switch is turned off and on: nothing is used again
            for on in (False, True):
                draft.library.lib.llama_mtp_set_kv_only(draft.handle, on)
        marks = np.isin(np.arange(end - start), outputs).astype(np.int8)
        draft.decode(ids[start:end], start, marks, states[start:end])
        tokens += [draft.argmax(row) for row in outputs]
        start = end
    print(json.dumps([hashlib.sha256(draft.save_state()).hexdigest(), tokens]))
"""


@pytest.mark.parametrize("where", ["here", "worker"])
def test_batches_with_graphs_of_both_kinds(
    run_python: RunPython, demo_file: Path, where: str
) -> None:
    """A batch whose first graph has no outputs and whose second one has: its graphs must not be
    taken for those that K/V-only batches left. On a worker inputs are copies, so a graph of the
    other scheduler would read old ones. In a process of its own, which a fault would end."""
    with worker() as address:
        outcomes = []
        for graphs in ("apart", "kept"):
            arguments = demo_file, address if where == "worker" else "", graphs
            done = run_python(MIXED_CODE, *arguments, env={"GGML_NO_BACKTRACE": "1"})
            assert done.returncode == 0, done.stderr
            outcomes.append(json.loads(done.stdout))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0][1]) == sum(len(outputs) for _, outputs in MIXED)
