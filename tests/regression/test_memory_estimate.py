"""What is said to be needed beforehand is what is allocated, memory by memory, within 5 %."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama_mtp import BatchSession, Model, Session, Settings, machine, memory
from pyllama_mtp.errors import InsufficientMemoryError
from pyllama_mtp.llama import native
from pyllama_mtp.llama.contextoptions import padded
from pyllama_mtp.memory import (
    LARGE_N_UBATCH,
    LEAST_N_CTX,
    USUAL_N_CTX,
    DeviceMemory,
    resolve,
    simulate,
)
from pyllama_mtp.models.synth import write_synthetic
from pyllama_mtp.settings import RopeScaling

from ..adapters import trunk, write_adapter
from ..marks import usual
from ..trimmed import write_trimmed
from ..workers import worker
from .support import engine_of, made_up

TOLERANCE = 0.05
#: Made when somebody samples, and when a session is used for a while.
LATER = ("outputs", "checkpoints")

#: (file, type of its weights, settings, sequences)
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("demo", {"n_ctx": 2048, "draft_n_max": 3}, 1),
    ("demo", {"n_ctx": 2048, "draft_n_max": 0}, 1),
    ("demo", {"n_ctx": 8192, "draft_n_max": 6, "cache_type_k": "q8_0", "cache_type_v": "q8_0"}, 1),
    ("demo", {"n_ctx": 2048, "draft_n_max": 2, "flash_attn": "off"}, 1),
    ("demo", {"n_ctx": 1024, "draft_n_max": 3, "n_batch": 256, "n_ubatch": 64}, 4),
    ("demo", {"n_ctx": 2048, "draft_n_max": 3, "rollback": "replay", "draft_vocab": 512}, 1),
    ("demo", {"n_ctx": 2048, "draft_n_max": 3, "prompt_sync": "full"}, 1),
    ("demo", {"n_ctx": 2048, "draft_n_max": 3, "prompt_sync": "full", "prompt_rows": "all"}, 1),
    ("moe", {"n_ctx": 4096, "draft_n_max": 4, "cache_type_k": "f32", "n_ubatch": 128}, 1),
    ("moe", {"n_ctx": 512, "draft_n_max": "auto"}, 3),
    ("quantized", {"n_ctx": 1024, "draft_n_max": 3, "draft_head_type": "q8_0"}, 1),
    ("quantized", {"n_ctx": 16384, "draft_n_max": 1, "cache_type_k": "q4_0"}, 2),
    ("trimmed", {"n_ctx": 512, "draft_n_max": 3}, 1),
]


@pytest.fixture(scope="module")
def quantized_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, in 4 bits."""
    path = tmp_path_factory.mktemp("m") / "m.gguf"
    return write_synthetic(path, "tiny", "q4_0")


@pytest.fixture(scope="module")
def trimmed_file(demo_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a head over a part of the vocabulary."""
    ids = np.arange(1, 2048, 3)
    return write_trimmed(demo_file, tmp_path_factory.mktemp("m") / "t.gguf", ids, ids)


def used(model: Model, settings: Settings, n_sequences: int) -> dict[Any, dict[str, int]]:
    """Bytes allocated, by memory, after prompts and drafts."""
    prompt = made_up(model, 200).tolist()
    with BatchSession(model, settings, n_sequences) as session:
        engine = engine_of(session)
        session.generate([prompt[i:] for i in range(n_sequences)], max_tokens=12).run()
        if n_sequences == 1:
            session.generate([prompt[:150]], max_tokens=12).run()
        devices = (native.load().ffi.NULL, *model.used_devices)
        found = {device: engine.memory(device) for device in devices}
        everything = engine.memory()
        for name in everything.keys() - {"checkpoints"}:  # nothing is elsewhere
            assert everything[name] == sum(parts[name] for parts in found.values())
    return found


def compare(estimates: list[DeviceMemory], found: dict[Any, dict[str, int]]) -> None:
    for one, parts in zip(estimates, found.values(), strict=True):
        wanted = {name: n for name, n in parts.items() if name not in LATER}
        said = {name: n for name, n in one.parts.items() if name not in LATER}
        message = f"{one.name}: {said} estimated, {wanted} allocated"
        assert sum(said.values()) == pytest.approx(sum(wanted.values()), rel=TOLERANCE), message
        for name in wanted.keys() - {"weights"}:  # those are mapped, which is a little more
            assert said[name] == pytest.approx(wanted[name], rel=TOLERANCE, abs=2**16), message


def check(model: Model, settings: Settings, n_sequences: int = 1) -> list[dict[str, int]]:
    """The estimate is what is allocated; returns that, memory by memory."""
    with model.without_memory() as twin:
        estimates = simulate(twin, resolve(settings, twin, n_sequences))
    assert [one.name.startswith("RPC") for one in estimates] == [False, True][: len(estimates)]
    assert all(one.total > 2**20 < one.free for one in estimates[1:])
    found = used(model, settings, n_sequences)
    compare(estimates, found)
    return list(found.values())


@pytest.mark.parametrize(("name", "options", "n_sequences"), usual(*CASES[::2], long=CASES[1::2]))
def test_on_the_cpu(
    request: pytest.FixtureRequest, name: str, options: dict[str, Any], n_sequences: int
) -> None:
    with Model(request.getfixturevalue(f"{name}_file"), n_gpu_layers=0) as model:
        check(model, Settings(n_threads=1, **options), n_sequences)


@pytest.mark.parametrize(
    ("name", "options", "n_sequences", "placed"),
    usual(
        (*CASES[0], {}),
        (*CASES[2], {"n_gpu_layers": 3}),
        (*CASES[8], {"n_cpu_moe": 2, "use_mmap": False}),  # mapped is more than is used
        long=[
            (*CASES[4], {}),
            (*CASES[5], {"n_gpu_layers": 1}),
            (*CASES[9], {"cpu_moe": True, "use_mmap": False}),
            (*CASES[10], {}),
        ],
    ),
)
def test_on_a_device(
    request: pytest.FixtureRequest,
    name: str,
    options: dict[str, Any],
    n_sequences: int,
    placed: dict[str, Any],
) -> None:
    path = request.getfixturevalue(f"{name}_file")
    with worker() as address, Model(path, rpc_servers=address, **placed) as model:
        assert len(check(model, Settings(n_threads=1, **options), n_sequences)) == 2


@pytest.mark.parametrize("layers", usual(3, long=[0, -1]))
def test_adapters_count_with_the_weights(
    demo_file: Path, demo: Model, tmp_path: Path, layers: int
) -> None:
    """Where the matrices lie that they change."""
    adapter = write_adapter(tmp_path / "a.gguf", demo.info, trunk(demo.info), rank=64)
    settings = Settings(n_ctx=512, draft_n_max=3, n_threads=1)
    weights = []
    with worker() as address:
        for lora in ((), adapter):
            placed = {"rpc_servers": address, "n_gpu_layers": layers, "use_mmap": False}
            with Model(demo_file, lora=lora, **placed) as model:
                weights.append([parts["weights"] for parts in check(model, settings)])
    more = [after - before for before, after in zip(*weights, strict=True)]
    assert sum(more) == pytest.approx(adapter.stat().st_size, rel=TOLERANCE)
    assert [n > 2**18 for n in more] == [layers != -1, layers != 0][: len(more)]


def test_the_work_buffer_of_the_cpu_counts(demo: Model) -> None:
    """It grows with threads; nothing else of an estimate does."""
    settings = [Settings(n_ctx=2048, draft_n_max=3, n_threads=n) for n in (1, 64)]
    with demo.without_memory() as twin:
        few, many = (simulate(twin, resolve(one, twin))[0].parts for one in settings)
    assert {name for name in few if few[name] != many[name]} == {"target_compute"}
    assert many["target_compute"] > few["target_compute"] + 2**20


def test_nothing_is_allocated_for_an_estimate(demo: Model) -> None:
    before = machine._fields(Path("/proc/self/status"))["VmSize"] << 10
    with demo.without_memory() as twin:
        [needed] = simulate(twin, resolve(Settings(n_ctx=2**22, draft_n_max=0), twin))
        after = machine._fields(Path("/proc/self/status"))["VmSize"] << 10
    assert needed.parts["target_context"] > 2**31 > 4 * abs(before - after)


@pytest.fixture(params=[0, 1], ids=["host", "device"])
def placed(request: pytest.FixtureRequest, demo_file: Path) -> Iterator[tuple[int, Model]]:
    """The demo model on the host or on a device: which memory of an estimate that is, and it."""
    with worker() as address:
        options = {"rpc_servers": address} if request.param else {"device": "none"}
        with Model(demo_file, **options) as model:
            yield request.param, model


def needed(model: Model, settings: Settings, n_ctx: int, where: int) -> tuple[str, int]:
    """The name of a memory, and the bytes of it that are needed beside the loaded weights."""
    with model.without_memory() as twin:
        found = simulate(twin, resolve(replace(settings, n_ctx=n_ctx), twin))[where]
    return found.name, found.total - found.parts["weights"]


def chosen(model: Model, settings: Settings, room: int) -> int:
    """The context length for a prompt and answer of `room` tokens."""
    return resolve(settings, model, room=room).settings.n_ctx


def squeezed(monkeypatch: pytest.MonkeyPatch, where: int, n: int) -> None:
    """Leave `n` bytes free in this memory."""
    if where:
        both = (n, 2**40)
        monkeypatch.setattr(native.Library, "device_memory", lambda self, device: both)
    else:
        monkeypatch.setattr(memory, "available_memory", lambda: n)


def test_what_does_not_fit_is_refused_with_the_numbers(
    placed: tuple[int, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(n_ctx=8192, draft_n_max=3, n_threads=1)
    where, model = placed
    name, rest = needed(model, settings, 8192, where)
    squeezed(monkeypatch, where, rest - 1)
    with pytest.raises(InsufficientMemoryError) as caught:
        Session(model, settings)
    for part in (name, "8192 tokens", "are available", "target context 0.0"):
        assert part in str(caught.value)
    squeezed(monkeypatch, where, rest)
    Session(model, settings).close()


def test_the_length_of_its_own_fits_the_memory_that_holds_the_caches(
    placed: tuple[int, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = Settings(n_ctx=0, draft_n_max=3, n_threads=1)
    monkeypatch.setattr(memory, "LEAST_N_CTX", 256)
    where, model = placed
    with Session(model, chosen) as session:  # there is enough
        assert session.n_ctx == padded(model.n_ctx_train)
    _, rest = needed(model, chosen, 1024, where)
    share = (memory.HOST_SHARE, memory.SHARE)[where]
    for free, n_ctx in ((int(rest / share) + 1, 1024), (int(rest / share) - 1, 512)):
        squeezed(monkeypatch, where, free)
        with Session(model, chosen) as session:
            assert session.n_ctx == n_ctx
    assert LEAST_N_CTX > 256


LONG = RopeScaling(rope_scaling="yarn", rope_freq_scale=1 / 16)  # of the demo model: 65,536


def test_a_length_that_nobody_asked_for_is_no_model_of_a_quarter_million(demo: Model) -> None:
    """Session and BatchSession choose the same length."""
    settings = Settings(rope=LONG, draft_n_max=3, n_threads=1)
    with Session(demo, settings) as session, BatchSession(demo, settings, 2) as batch:
        assert session.n_ctx == batch.n_ctx == USUAL_N_CTX == 8192
    for n_prompt, n_ctx in ((10, 8192), (9000, 9472), (90_000, 65_536)):
        assert chosen(demo, settings, n_prompt + 256) == n_ctx
    assert chosen(demo, replace(settings, n_ctx=512), 9256) == 512


def test_what_prompt_and_answer_need_is_not_cut_for_a_share(
    placed: tuple[int, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    where, model = placed
    settings = Settings(rope=LONG, draft_n_max=3, n_threads=1)
    _, rest = needed(model, settings, 4096, where)
    squeezed(monkeypatch, where, rest)  # 4096 tokens take all of it
    assert chosen(model, settings, 2740) == 2816
    assert chosen(model, settings, 50) < 4096


def test_graphs_are_larger_where_experts_on_a_gpu_have_room(
    moe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(n_ctx=4096, draft_n_max=3, n_threads=1)

    def n_ubatch(**options: Any) -> int | str:
        return resolve(replace(settings, **options), model).settings.n_ubatch

    with Model(moe_file, device="none") as model:
        assert n_ubatch() == n_ubatch(n_ctx=0) == 512
        monkeypatch.setattr(model, "on_gpu", True)
        monkeypatch.setattr(model, "devices", [])
        assert n_ubatch() == n_ubatch(n_ctx=0) == LARGE_N_UBATCH
        assert n_ubatch(n_ubatch=256) == 256
        _, rest = needed(model, replace(settings, n_ubatch=LARGE_N_UBATCH), 4096, 0)
        squeezed(monkeypatch, 0, int(rest / memory.HOST_SHARE) - 1)
        assert n_ubatch() == 512


def test_places_count_with_their_checkpoints(demo: Model) -> None:
    with demo.without_memory() as twin:
        plain = simulate(twin, resolve(Settings(n_ctx=512, checkpoints=0), twin, 3))[0]
        more = simulate(twin, resolve(Settings(n_ctx=512, checkpoints=2), twin, 3))[0]
    with Session(demo, Settings(n_ctx=512, n_threads=1)) as session:
        session.process(made_up(demo, 100).tolist())
        state = len(engine_of(session).target.save_state(recurrent_only=True))
    assert more.total - plain.total == pytest.approx(6 * state, rel=TOLERANCE, abs=2**12)
