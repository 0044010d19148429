"""The hand-off on a device with memory of its own: no hidden row passes through the host.

The device is a worker on loopback. What the taps count is compared with what is seen on the line to
the worker, where a row can be recognised: it has the bytes that the trunk computed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pyllama_mtp import Model, Sampling, Session, native, rpc
from pyllama_mtp.context import Context, ContextOptions

from ..workers import Line, worker
from .support import assert_same_tokens, greedy, settings

GREEDY = Sampling()
N_TOKENS = 32
N_PROMPT = 120  # several batches of 48, the last one short
#: For the count of bytes: large graphs, whose descriptions weigh little per token.
N_LONG, N_LARGE = 1000, 500
KEPT_OUT = {"checkpoints": 0}  # they copy recurrent states, which are not at stake here


@pytest.fixture(scope="module")
def line() -> Iterator[Line]:
    """A line to a worker."""
    with worker() as address:
        made = Line(address)
        yield made
        made.close()


@pytest.fixture(scope="module")
def remote(demo_file: Path, line: Line) -> Iterator[Model]:
    """The demo model with all its layers on the worker."""
    with Model(demo_file, rpc_servers=line.address) as model:
        yield model


def device_of(session: Session) -> str:
    return native.load().text(session._engine.target.tap.info().device)


def counters(session: Session) -> list[tuple[bool, int, int]]:
    """leaves_device, bytes to the host and from it, of the target's tap and the draft context's."""
    engine = session._engine
    assert engine.drafter
    contexts = (engine.target, engine.drafter.context)  # a chain leaves no rows, and has no tap
    infos = [context.tap.info() for context in contexts if context.tap]
    return [(i.leaves_device, i.n_bytes_to_host, i.n_bytes_from_host) for i in infos]


def settle(line: Line) -> None:
    """Wait until the worker has done everything: ask it for its memory, and wait for the answer."""
    library = native.load()
    device = rpc.connect([line.address])[0]
    rpc.release([line.address])
    free, total = library.ffi.new("size_t *"), library.ffi.new("size_t *")
    library.lib.ggml_backend_dev_memory(device, free, total)


def prefill(model: Model, line: Line, prompt: list[int], depth: int, **options: object) -> Session:
    """A session that has processed `prompt`; `line` holds what passed meanwhile, and no more."""
    session = Session(model, settings(depth, **KEPT_OUT, **options))
    settle(line)
    line.clear()
    session.process([*prompt, 0])
    settle(line)
    return session


def rows_of(model: Model, prompt: list[int], n_batch: int, n_ubatch: int) -> list[bytes]:
    """The trunk's hidden rows, as bytes, computed in the same batches as a session does."""
    options = ContextOptions(
        n_ctx=1024, n_batch=n_batch, n_ubatch=n_ubatch, n_threads=1, need_embd_pre_norm=True
    )
    rows = []
    with Context(model, options) as context:
        for start in range(0, len(prompt), n_batch):
            chunk = np.array(prompt[start : start + n_batch], dtype=np.int32)
            outputs = np.zeros(len(chunk), dtype=np.int8)
            outputs[-1] = start + n_batch >= len(prompt)
            context.decode(chunk, start, outputs)
            rows += [row.tobytes() for row in context.hidden_rows()]
    assert len(set(rows)) == len(prompt)
    return rows


# -- what comes out --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"prompt_sync": "full"}, {"rollback": "replay"}], ids=str)
def test_as_on_the_cpu(
    demo: Model, remote: Model, text: list[int], gap: float, options: dict[str, object]
) -> None:
    equal = 0
    for n in (1, 17, 49, N_PROMPT):
        with Session(demo, settings(3, **options)) as here:
            expected = greedy(here, text[:n], N_TOKENS)
        with Session(remote, settings(3, **options)) as there:
            got = greedy(there, text[:n], N_TOKENS)
            assert device_of(there).startswith("RPC")
            assert counters(there) == [(False, 0, 0)]
        assert got.telemetry.hidden_bytes == {"to_host": 0, "from_host": 0}
        if assert_same_tokens(demo, text[:n], got.tokens, expected.tokens, gap):
            assert got.text == expected.text
            assert got.telemetry.accepted == expected.telemetry.accepted
            drafts = [[pair.drafted for pair in run.telemetry.pairs] for run in (got, expected)]
            assert drafts[0] == drafts[1]
            equal += 1
    assert equal >= 2, "rounding alone does not part that many"


def test_reuse_and_checkpoints(demo: Model, remote: Model, text: list[int], gap: float) -> None:
    """Prompts that continue, repeat, or part from what is cached; each as in a fresh session."""
    branch = [*text[:70], *text[200:206]]
    with Session(remote, settings(3, checkpoints=8)) as session:
        reused = []
        for prompt in (text[:100], text[:100], branch, text[:110], text[:30], text[:100]):
            got = session.generate(prompt, max_tokens=N_TOKENS).run()
            reused.append(got.telemetry.n_cached)
            with Session(demo, settings(3)) as fresh:
                expected = greedy(fresh, prompt, N_TOKENS)
            assert_same_tokens(demo, prompt, got.tokens, expected.tokens, gap)
        assert counters(session) == [(False, 0, 0)]
    assert sum(n > 0 for n in reused[1:]) >= 4, f"next to nothing was reused: {reused}"


# -- what passes -----------------------------------------------------------------------------------


def test_no_hidden_row_is_on_the_line(remote: Model, line: Line, text: list[int]) -> None:
    prompt = text[:N_PROMPT]
    rows = rows_of(remote, prompt, 48, 16)
    with prefill(remote, line, prompt, 3, handoff="device") as session:
        assert counters(session) == [(False, 0, 0)]
    assert not [i for i, row in enumerate(rows) if row in line.up or row in line.down]
    # Rows would be recognised: with the other hand-off each is seen, once in either direction.
    with prefill(remote, line, prompt, 3, handoff="host"):
        pass
    assert [line.down.count(row) for row in rows] == [1] * N_PROMPT
    # The last row pairs with the next token.
    assert [line.up.count(row) for row in rows] == [1] * (N_PROMPT - 1) + [0]


def test_nothing_but_logits_comes_back(remote: Model, line: Line, text: list[int]) -> None:
    """Prompt and generation: of the answers, all that are not a few numbers are logits; and of a
    greedy generation there are none."""
    row = 4 * remote.n_vocab
    warm = Sampling(temperature=0.1, top_k=0, seed=1)

    def answers(handoff: str, sampling: Sampling, **options: object) -> list[int]:
        with Session(remote, settings(3, handoff=handoff, **options, **KEPT_OUT)) as session:
            settle(line)
            line.clear()
            run = session.generate(
                text[:N_PROMPT], max_tokens=N_TOKENS, ignore_eos=True, sampling=sampling
            ).run()
            settle(line)
            telemetry = run.telemetry
            assert telemetry.rounds > 5 and sum(telemetry.accepted) > 0
            found = [size for size in line.answers() if size > 16]
            logits = sum(size for size in found if size % row == 0) // row
            # One row after the prompt, and per pass one more than it had drafts.
            rows = 0 if sampling is GREEDY else 1 + sum(telemetry.drafted) + telemetry.rounds
            assert logits == rows
            ids = 4 * (1 + 2 * sum(telemetry.drafted) + telemetry.rounds)
            assert telemetry.output_bytes == row * rows + ids - 4 * rows
            return [size for size in found if size % row]

    assert answers("device", warm) == answers("device", GREEDY) == []
    hidden = answers("host", GREEDY)
    assert hidden and not [size for size in hidden if size % (4 * remote.n_embd)]


def test_sampling_among_the_best_fetches_no_row(remote: Model, line: Line, text: list[int]) -> None:
    """On a device candidates are ggml_top_k()'s; the text is that of sampling on the host."""
    texts = []
    for depth in (0, 3):
        with Session(remote, settings(depth, **KEPT_OUT)) as session:
            settle(line)
            line.clear()
            sampling = Sampling(temperature=0.5, top_k=20, seed=3)
            run = session.generate(
                text[:N_PROMPT], max_tokens=N_TOKENS, ignore_eos=True, sampling=sampling
            ).run()
            settle(line)
            texts.append(run.tokens)
            assert max(line.answers()) < remote.n_vocab
    assert texts[0] == texts[1]


def test_bytes_per_token(remote: Model, line: Line, text: list[int]) -> None:
    """What MTP adds to a prompt's traffic, per token; and what the way through the host adds."""
    prompt = (text * (N_LONG // len(text) + 1))[:N_LONG]
    batches = {"n_ctx": 1024, "n_batch": N_LARGE, "n_ubatch": N_LARGE}
    row = 4 * remote.n_embd
    up, down = {}, {}
    kinds = [("none", 0, "auto"), ("device", 3, "device"), ("host", 3, "host")]
    for name, depth, handoff in kinds * 2:  # the first time ggml asks for sizes, and keeps them
        prefill(remote, line, prompt, depth, handoff=handoff, **batches).close()
        up[name], down[name] = len(line.up) / N_LONG, len(line.down) / N_LONG
    # Bytes of row numbers (4 per token) and of a few messages are saved by the way through the
    # host: hence not quite 1.
    assert down["host"] - down["device"] > 0.99 * row
    assert up["host"] - up["device"] > 0.97 * row
    # To the worker: llama.cpp looks token embeddings up on the host, so one row goes up per token;
    # but none for the block, where the LM head is tied (patch 20): graphs and indices.
    added = up["device"] - up["none"]
    assert 0 < added < row / 4, f"{added} bytes per token"
    assert abs(down["device"] - down["none"]) < row / 100


# -- two devices -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["two workers", "worker and CPU"])
def test_through_the_host_across_devices(
    demo: Model,
    demo_file: Path,
    line: Line,
    text: list[int],
    gap: float,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    """Layers split so that the output layer is on one device and the MTP block on another."""
    prompt = text[:N_PROMPT]
    with Session(demo, settings(3)) as session:
        expected = greedy(session, prompt, N_TOKENS)
    with worker() as second:
        if where == "two workers":
            # The block is the last layer but the output layer: all but the latter on the first.
            n = demo.info.n_layer + 1
            split = {"rpc_servers": (line.address, second), "tensor_split": (n - 0.5, 1.5)}
        else:
            split = {"rpc_servers": second, "n_gpu_layers": 1}
        with (
            Model(demo_file, **split) as model,
            caplog.at_level(logging.WARNING, "pyllama_mtp.native"),
            Session(model, settings(3)) as session,
        ):
            assert device_of(session).startswith("RPC")
            got = greedy(session, prompt, N_TOKENS)
            target = counters(session)[0]
    warned = [r for r in caplog.records if "they are copied through the host" in r.message]
    assert warned and {record.levelno for record in warned} == {logging.WARNING}
    assert "hidden rows are computed on RPC" in warned[0].message
    leaves, to_host, from_host = target
    row = 4 * demo.n_embd
    assert leaves and to_host >= N_PROMPT * row and to_host % row == 0
    assert from_host == (to_host if where == "two workers" else 0)  # the CPU is the host
    assert got.telemetry.hidden_bytes == {"to_host": to_host, "from_host": from_host}
    if assert_same_tokens(demo, prompt, got.tokens, expected.tokens, gap):
        assert got.text == expected.text
        assert got.telemetry.accepted == expected.telemetry.accepted


def test_two_workers_that_need_no_detour(
    demo: Model, demo_file: Path, line: Line, text: list[int], gap: float
) -> None:
    """Layers on both, output layer and MTP block on the second: rows stay there."""
    prompt = text[:N_PROMPT]
    with Session(demo, settings(3)) as session:
        expected = greedy(session, prompt, N_TOKENS)
    with (
        worker() as second,
        Model(demo_file, rpc_servers=(line.address, second), tensor_split=(1, 1)) as model,
        Session(model, settings(3)) as session,
    ):
        got = greedy(session, prompt, N_TOKENS)
        assert device_of(session).startswith("RPC")
        assert counters(session) == [(False, 0, 0)]
    if assert_same_tokens(demo, prompt, got.tokens, expected.tokens, gap):
        assert got.telemetry.accepted == expected.telemetry.accepted
