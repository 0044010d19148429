"""Models without an MTP head, of other architectures: text, and drafts from it.

They share more with models that have a head: test_architectures.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from pyllama_mtp import (
    Generation,
    Model,
    Session,
    Settings,
    stream,
)
from pyllama_mtp.drafting.ngram import Match, NgramLookup
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.contextoptions import ContextOptions

from ..marks import usual
from ..plain import ARCHITECTURES, WINDOW, write_model
from ..processes import RunPython
from .support import (
    EDGES,
    alone,
    assert_same_tokens,
    computed_by,
    engine_of,
    made_up,
    rounding,
    settings,
)
from .test_lookup import script

pytestmark = pytest.mark.usefixtures("at_once")
AUTO = settings("auto")
PLAIN = settings(0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plain")
    return {arch: write_model(folder / f"{arch}.gguf", arch) for arch in ARCHITECTURES}


@pytest.fixture(
    scope="module", params=usual("llama", "gemma3", "mamba", long=["qwen3", "k2-horizon"])
)
def plain(request: pytest.FixtureRequest, files: dict[str, Path]) -> Iterator[Model]:
    with Model(files[request.param]) as model:
        assert not model.has_mtp
        yield model


@pytest.fixture(scope="module")
def gap(plain: Model) -> float:
    """How far two logits may lie apart and still change places by rounding."""
    return rounding(plain, made_up(plain, 97).tolist())


def run(session: Session, prompt: Sequence[int], n: int) -> Generation:
    return session.generate(prompt, max_tokens=n, ignore_eos=True).run()


def test_prompts_across_batches(plain: Model, gap: float) -> None:
    """The text is that of decoding token by token."""
    for n in EDGES:
        prompt = made_up(plain, n).tolist()
        got = alone(plain, prompt, 12)
        with Context(plain, ContextOptions(512, 1, 1, 1)) as context:
            expected, token = list[int](), -1
            for position in range(n + 11):
                token = prompt[position] if position < n else token
                context.decode(np.array([token]), position, np.ones(1, np.int8))
                token = context.argmax(0)
                expected += [token] if position >= n - 1 else []
        assert_same_tokens(plain, prompt, got, expected, gap)


class Foretold(NgramLookup):
    """Drafts what will come, and after it, as the last draft, something else."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        super().__init__(6)
        self.text = [*prompt, *answer, *[0] * 8]

    def find(self) -> Match:
        return Match(3, 3)

    def drafts(self, match: Match, n: int) -> list[int]:
        at = len(self.tokens)
        return [*self.text[at : at + n - 1], self.text[at + n] + 1][:n]


@pytest.mark.parametrize("rollback", ["auto", "replay"])
def test_drafts_from_the_text_do_not_change_it(plain: Model, gap: float, rollback: str) -> None:
    """Part of them holds, and the rest is taken back; past the sliding window, too."""
    prompt = made_up(plain, 80).tolist()
    expected = alone(plain, prompt, 120)
    with Session(plain, settings("auto", rollback=rollback)) as session:
        told = script(engine_of(session), (0, 6), (0, 0), (0, 2), (0, 5))
        ngrams = engine_of(session).drafting.ngrams
        assert ngrams
        ngrams.texts = [Foretold(prompt, expected)]
        got = run(session, prompt, 120)
        assert_same_tokens(plain, prompt, got.tokens, expected, gap)
    assert not told.asked, "there is no head to ask for drafts"
    looked_up = got.telemetry.looked_up
    assert looked_up["rounds"] == len(told.told_looked_up) > 20
    assert 40 < looked_up["accepted"] < looked_up["drafted"]
    assert got.telemetry.drafted == [] and got.telemetry.prompt_sync == ""


def test_a_conversation_and_a_stream(plain: Model) -> None:
    with Session(plain, AUTO) as session:
        answer = session.chat([{"role": "user", "content": "hello"}], max_tokens=6).run()
        assert answer.text
    assert "".join(stream(plain.path, "hello", max_tokens=6))


def test_a_cache_with_a_window_does_not_go_back_to_what_was_overwritten(
    files: dict[str, Path],
) -> None:
    """Cells beyond the window of one sequence are taken by another, although others are free."""
    with Model(files["gemma3"]) as model:
        options = ContextOptions(512, 512, 512, 1, n_seq_max=2, unified=True)
        none = np.zeros(200, np.int8)
        assert model.n_swa == WINDOW
        with Context(model, options) as context:
            for seq in (0, 1):
                context.decode(made_up(model, 200), 0, none, seq=seq)
            assert context.rewind(1) == 200
            assert context.remove(150, 0)
            context.decode(made_up(model, 80), 150, none[:80], seq=0)
            assert 0 < context.rewind(1) < 200 - WINDOW
            assert not context.remove(20, 1)
            assert context.remove(200 - context.rewind(1), 1)


@pytest.mark.long
def test_text_is_upstreams(files: dict[str, Path], run_python: RunPython) -> None:
    """Greedy, as upstream's library has it with the same driver."""
    code = """
found = []
for path in sys.argv[1:]:
    with Model(path) as model, Session(model, Settings(**SMALL)) as session:
        done = session.generate(made_up(model, 97), max_tokens=32, ignore_eos=True).run()
        found.append(done.tokens)
"""
    texts = [computed_by(v, run_python, code, *files.values()) for v in ("patched", "upstream")]
    for path, got, expected in zip(files.values(), *texts, strict=True):
        with Model(path) as model:
            prompt = made_up(model, 97).tolist()
            assert_same_tokens(model, prompt, got, expected, rounding(model, prompt))


def test_memory_is_llama_cpps_own_figure(plain: Model) -> None:
    with Session(plain, Settings(n_ctx=256)) as session:
        assert session.memory()["target_context"] > 0
    with Session(plain) as session:  # its length is chosen by what there is
        assert session.n_ctx == plain.n_ctx_train
