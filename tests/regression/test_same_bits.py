"""On an x86 CPU no bit of a row's logits depends on how many rows, 1 to 8, are
computed beside it.

So the text at temperature 0 with MTP is the text without it by construction: whole models of every
type, dense and with experts, on both sides of the lengths at which upstream's attention changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pyllama_mtp import Model
from pyllama_mtp.engine import Engine
from pyllama_mtp.llama.context import Context
from pyllama_mtp.machine import Threads
from pyllama_mtp.memory import resolve
from pyllama_mtp.models.synth import write_synthetic
from pyllama_mtp.request import Limits, make_request

from ..marks import usual
from .support import Floats, decode, made_up, plain_context, settings

#: File types that need no importance matrix; IQ2 and IQ3 are in tests/ffi/test_products.py.
#: Of each way that products go; every type by itself is in ffi/test_products.py.
TYPES = ("q8_0", "q4_k_m")
MORE = ("q4_0", "q5_k_m", "q6_k", "iq4_xs", "f32", "f16", "bf16", "q5_0", "iq4_nl", "mxfp4_moe")
MORE += ("q3_k_m", "q2_k")
#: How many rows each batch has.
SPLITS = ([2, 2, 2, 2], [3, 5], [4, 4], [6, 2], [7, 1], [8])


@pytest.fixture(scope="module", params=["tiny", "tiny-moe"])
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=usual(*TYPES, long=MORE))
def model(
    request: pytest.FixtureRequest, shape: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    """Rows with room for blocks of 256, and for blocks of 32 beside them."""
    wide = {"n_embd": 256, "n_ff": 544, **({"n_ff_exp": 288} if shape == "tiny-moe" else {})}
    path: Path = tmp_path_factory.mktemp("bits") / "m.gguf"
    write_synthetic(path, shape, request.param, **wide)
    with Model(path, mtp=False, n_gpu_layers=0) as found:
        if not found.same_bits:
            pytest.skip("this CPU has no products of a few columns")
        yield found


def begin(context: Context, n_before: int) -> bytes:
    """The state after so many tokens."""
    context.clear()
    decode(context, made_up(context.model, n_before))
    return bytes(context.save_state())


def rows(context: Context, state: bytes, split: list[int]) -> Floats:
    """[8, n_vocab]: logits of 8 tokens in batches of these sizes, from a state on."""
    context.clear()
    context.load_state(state)
    start, found = context.past(), []
    tokens = made_up(context.model, 8, start)
    for n in split:
        at = len(found)
        context.decode(tokens[at : at + n], start + at, np.ones(n, np.int8))
        found += [context.logits(row).copy() for row in range(n)]
    return np.stack(found)


@pytest.mark.parametrize(
    "options",
    usual({}, long=[{"type_k": "q8_0", "type_v": "q8_0"}, {"flash_attn": "off"}]),
    ids=["f16-cache", "q8_0-cache", "no-flash-attention"],
)
def test_rows_together_are_rows_alone(model: Model, options: dict[str, str]) -> None:
    """After 20 tokens, and after 600: flash attention of one row changes at 512 cells upstream."""
    with plain_context(
        model, n_ctx=1024, n_batch=600, n_outputs_max=8, n_threads=1, **options
    ) as context:
        for n_before in (20, 600):
            state = begin(context, n_before)
            alone = rows(context, state, [1] * 8)
            assert np.ptp(alone) > 0.1 and np.isfinite(alone).all()
            for split in SPLITS:
                together = rows(context, state, split)
                assert together.tobytes() == alone.tobytes(), (n_before, split)


@pytest.mark.parametrize("cache", usual("q8_0", long=["f16"]))
def test_no_bit_depends_on_the_number_of_threads(
    model: Model, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    """Prompts and rounds, and a number that changes after each computation."""

    class Restless(Threads):
        def took(self, kind: object, seconds: float) -> None:
            self.n = self.n % self.most + 1

    monkeypatch.setattr("pyllama_mtp.llama.context.Threads", Restless)
    found, numbers = [], set()
    for options in ({"n_threads": 1}, {"n_threads": 3}, {"n_threads": 3, "auto_threads": True}):
        with plain_context(
            model, n_ctx=1024, n_ubatch=300, n_outputs_max=8, type_k=cache, type_v=cache, **options
        ) as context:
            parts = [decode(context, made_up(model, 300, at), at) for at in (0, 300)]
            for n in (1, 4, 4, 8):
                at = context.past()
                context.decode(made_up(model, n, at), at, np.ones(n, np.int8))
                parts += [context.logits(row).copy() for row in range(n)]
                numbers.add((len(found), context.n_threads))
        found.append(np.stack(parts).tobytes())
    assert numbers == {(0, 1), (1, 3), (2, 1), (2, 2), (2, 3)}
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_a_prompt_has_the_same_bits_in_parts_and_as_a_whole(model: Model, flash_attn: str) -> None:
    """So its answer does not depend on who else is served meanwhile."""
    chosen = settings(0, n_ctx=640, n_batch=256, n_ubatch=256, flash_attn=flash_attn)
    prompt, states = made_up(model, 600).tolist(), []
    for at_most in (None, 0, 130):
        engine = Engine(model, resolve(chosen, model))
        request = make_request(model, prompt, Limits(1))
        sequence = engine.enter(engine.prefixes.find(engine.sequences, request))
        while engine.prefill(sequence, at_most) is None:
            pass
        states.append(bytes(engine.target.save_state()))
        engine.close()
    assert states[0] == states[1] == states[2]
