"""Models of other architectures, most drafted for in upstream's way: text, reuse, drafts, refusals;
and models without a head.

The models are small, with random weights, and a head that is right in about half of all cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from pyllama_mtp import Grammar, Model, Sampling, Session, Settings
from pyllama_mtp.drafting.drafter import HeadDrafter
from pyllama_mtp.drafting.ngram import Match, NgramLookup
from pyllama_mtp.drafting.upstream import UpstreamDrafter
from pyllama_mtp.errors import UsageError
from pyllama_mtp.llama import native
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.contextoptions import ContextOptions
from pyllama_mtp.models.architectures import ARCHITECTURES
from pyllama_mtp.models.surgery import drop_head, extract_head, graft_head
from pyllama_mtp.sequence import Drafts

from .. import plain
from ..architectures import architectures, write_model
from ..marks import usual
from ..processes import RunPython
from .support import (
    N_BATCH,
    N_CTX,
    alone,
    answers,
    assert_same_tokens,
    compare,
    computed_by,
    engine_of,
    made_up,
    rounding,
    settings,
)
from .test_lookup import script

pytestmark = pytest.mark.usefixtures("at_once")
OTHERS = [name for name, one in ARCHITECTURES.items() if not one.validated]
#: MTP blocks of those that have several.
N_BLOCKS = 3
N_ANSWER = 40


@pytest.fixture(scope="module", params=architectures(OTHERS))
def other(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    """A model of each architecture."""
    path = tmp_path_factory.mktemp("architectures") / f"{request.param}.gguf"
    if request.param in OTHERS:
        n_blocks = N_BLOCKS if ARCHITECTURES[request.param].several_heads else 1
        write_model(request.param, path, n_blocks, noise=0.05)
    else:
        plain.write_model(path, request.param)
    with Model(path) as model:
        yield model


WITHOUT_HEADS = usual("llama", "gemma3", "mamba", long=["qwen3", "k2-horizon"])
#: Models with a head, and without.
of_every_kind = pytest.mark.parametrize(
    "other", [*architectures(OTHERS), *WITHOUT_HEADS], indirect=True
)
in_upstreams_way = pytest.mark.parametrize(
    "other",
    architectures(name for name in OTHERS if not ARCHITECTURES[name].in_trunk),
    indirect=True,
)


def prompt_of(model: Model, n: int) -> list[int]:
    return [int(token) for token in made_up(model, n)]


def test_text_is_that_without_drafts(other: Model) -> None:
    """At every depth, after a prompt of several batches; some drafts are accepted, some are not."""
    prompts, most = [prompt_of(other, 2 * N_BATCH + 9)], other.info.most_drafts
    wanted = answers(other, prompts, settings(0), N_ANSWER, ignore_eos=True)
    for depth in (1, 2, 3, 4):
        (got,) = answers(other, prompts, settings(depth), N_ANSWER, ignore_eos=True)
        compare(other, prompts, [got], wanted, exact=True)
        told = got.telemetry
        assert told.prompt_sync == ("kv" if other.info.in_trunk else "full")
        assert len(told.drafted) == min(depth, most or depth)
        assert 0 < told.accepted[0] < told.drafted[0]


def depth_of(model: Model) -> int | str:
    """Drafts of the head, or from the text."""
    return 3 if model.has_mtp else "auto"


@of_every_kind
def test_a_saved_prompt(other: Model, tmp_path: Path) -> None:
    text, chosen = prompt_of(other, 90), settings(depth_of(other))
    with Session(other, chosen) as session:
        session.process(text)
        session.save(tmp_path / "prompt")
    with Session(other, chosen) as session:
        assert session.restore(tmp_path / "prompt") >= 89
        got = session.generate(text, max_tokens=16, ignore_eos=True).run()
    assert got.telemetry.n_cached == 89 and (got.telemetry.n_accepted or not other.has_mtp)
    wanted = answers(other, [text], settings(0), 16, ignore_eos=True)
    compare(other, [text], [got], wanted, exact=other.has_mtp, least=0)


@of_every_kind
def test_sampling(other: Model) -> None:
    """Drawn tokens are those without drafts of the same seed; drawn drafts are accepted too."""
    drawn = Sampling(temperature=0.8, seed=3, grammar=Grammar.regex("[a-z]{12,40}"))
    prompts = [prompt_of(other, 20)]
    texts = [
        answers(other, prompts, settings(depth), 16, sampling=drawn)[0].text
        for depth in (0, depth_of(other))
    ]
    assert texts[0] == texts[1] and texts[0].isalpha()
    if other.has_mtp:
        chosen = settings(3, draft_sampling=True)
        free = Sampling(temperature=0.7, seed=3)
        (got,) = answers(other, prompts, chosen, 30, sampling=free, ignore_eos=True)
        assert sum(got.telemetry.accepted) > 0


def target_of(drafter: HeadDrafter) -> Context:
    return drafter._target if isinstance(drafter, UpstreamDrafter) else drafter.context


class Recorded:
    """The drafts of every round of the sessions that follow, of their first sequence.

    Attributes:
        rounds: the drafts of each.
        starts: the position of the newest token, in each.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rounds: list[list[int]] = []
        self.starts: list[int] = []
        for kind in (HeadDrafter, UpstreamDrafter):
            monkeypatch.setattr(kind, "draft", self._recording(kind.draft))

    def _recording(self, draft: Callable[..., list[Drafts]]) -> Callable[..., list[Drafts]]:
        def recording(drafter: HeadDrafter, *arguments: object) -> list[Drafts]:
            self.starts.append(target_of(drafter).past())
            made = draft(drafter, *arguments)
            self.rounds.append(list(made[0].tokens))
            return made

        return recording


@in_upstreams_way
def test_best_tokens_picked_in_the_graph(other: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the drafts that logits on the host give, with a least probability and without."""
    prompt = prompt_of(other, 20)
    for p_min in (0.0, 0.15):
        recorded = Recorded(monkeypatch)
        with Session(other, settings(3, p_min=p_min)) as session:
            session.generate(prompt, max_tokens=24, ignore_eos=True).run()
            found, recorded.rounds = recorded.rounds, []
            n_bytes = engine_of(session).head.contexts[0].output_bytes
        with Session(other, settings(3, p_min=p_min)) as session:
            drafter = engine_of(session).head
            assert isinstance(drafter, UpstreamDrafter)
            drafter.patched = False
            session.generate(prompt, max_tokens=24, ignore_eos=True).run()
        lengths = {*map(len, found)}
        assert found == recorded.rounds and (len(lengths) > 1 if p_min else 3 in lengths)
        if native.load().has_tap:
            assert n_bytes <= (4 + 80) * 3 * len(found)


@in_upstreams_way
@pytest.mark.parametrize("option", [{"prompt_sync": "kv"}, {"hidden": "pre-norm"}])
def test_options_that_do_not_apply(other: Model, option: dict[str, object]) -> None:
    name = next(iter(option))
    message = f"{name} .* is not there for models of architecture '{other.architecture}'"
    with pytest.raises(UsageError, match=message):
        Session(other, settings(2, **option))
    Session(other, settings(0, **option)).close()


@pytest.mark.parametrize(
    "other", usual("glm4moe", long=[name for name in OTHERS if name != "glm4moe"]), indirect=True
)
def test_a_head_in_a_file_of_its_own(other: Model, tmp_path: Path) -> None:
    """Beside the trunk, and grafted to it again; with weights, an LM head too, of another type."""
    head, trunk, whole = (tmp_path / name for name in ("h.gguf", "t.gguf", "w.gguf"))
    small = tmp_path / "q8_0.gguf"
    extract_head(other.path, head)
    extract_head(other.path, small, "q8_0")
    drop_head(other.path, trunk)
    graft_head(trunk, head, whole)
    prompt = prompt_of(other, 20)

    def drafts(model: Model) -> tuple[list[int], list[int]]:
        with Session(model, settings(2)) as session:
            run = session.generate(prompt, max_tokens=16, ignore_eos=True).run()
        return run.tokens, run.telemetry.accepted

    wanted = drafts(other)
    with Model(trunk, head=head, mtp=True) as beside, Model(whole, mtp=True) as grafted:
        assert drafts(beside) == wanted == drafts(grafted)
    with Model(trunk, head=small, mtp=True) as model:
        text, accepted = drafts(model)
    assert text == wanted[0] and accepted[0] > 0


def test_depth_is_chosen(other: Model) -> None:
    """ "auto" drafts no more than there are blocks."""
    with Session(other, Settings(n_ctx=N_CTX, n_threads=1, ngram=False)) as session:
        most = engine_of(session).depth
        assert most == (other.info.most_drafts or Settings().depth_limit)
        run = session.generate(prompt_of(other, 20), max_tokens=30, ignore_eos=True).run()
    assert run.tokens == alone(other, prompt_of(other, 20), 30)
    assert len(run.telemetry.drafted) <= most
    assert np.isfinite(run.telemetry.decode_s)


def test_a_session_without_mtp_copies_from_one_with_it(other: Model) -> None:
    text = made_up(other, 90)
    with (
        Session(other, settings(2)) as drafting,
        Session(other, settings(0)) as fresh,
        Session(other, settings(0)) as session,
    ):
        drafting.process(text)
        fresh.process(text)
        assert session.copy_from(drafting) == 89
        wanted = engine_of(fresh).target.save_state()
        assert engine_of(session).target.save_state() == wanted


# -- models without a head -------------------------------------------------------------------------


class Foretold(NgramLookup):
    """Drafts what will come, and after it, as the last draft, something else."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        super().__init__(6)
        self.text = [*prompt, *answer, *[0] * 8]

    def find(self, drafts: Sequence[int] = ()) -> Match:
        return Match(3, 3)

    def drafts(self, match: Match, n: int, before: Sequence[int] = ()) -> list[int]:
        at = len(self.tokens)
        return [*self.text[at : at + n - 1], self.text[at + n] + 1][:n]


@pytest.mark.parametrize("rollback", ["auto", "replay"])
@pytest.mark.parametrize("other", WITHOUT_HEADS, indirect=True)
def test_drafts_from_the_text_do_not_change_it(other: Model, rollback: str) -> None:
    """Part of them holds, and the rest is taken back; past the sliding window, too."""
    prompt = prompt_of(other, 80)
    (wanted,) = answers(other, [prompt], settings(0), 120, ignore_eos=True)
    with Session(other, settings("auto", rollback=rollback)) as session:
        told = script(engine_of(session), (0, 6), (0, 0), (0, 2), (0, 5))
        ngrams = engine_of(session).drafting.ngrams
        assert ngrams and not other.has_mtp
        ngrams.texts = [Foretold(prompt, wanted.tokens)]
        got = session.generate(prompt, max_tokens=120, ignore_eos=True).run()
    compare(other, [prompt], [got], [wanted], least=0)
    assert not told.asked, "there is no head to ask for drafts"
    looked_up = got.telemetry.looked_up
    assert looked_up["rounds"] == len(told.told_looked_up) > 20
    assert 40 < looked_up["accepted"] < looked_up["drafted"]
    assert got.telemetry.drafted == [] and got.telemetry.prompt_sync == ""


@pytest.mark.parametrize("other", ["gemma3"], indirect=True)
def test_a_cache_with_a_window_does_not_go_back_to_what_was_overwritten(other: Model) -> None:
    """Cells beyond the window of one sequence are taken by another, although others are free."""
    none = np.zeros(200, np.int8)
    assert other.n_swa == plain.WINDOW
    with Context(other, ContextOptions(512, 512, 512, 1, n_seq_max=2, unified=True)) as context:
        for seq in (0, 1):
            context.decode(made_up(other, 200), 0, none, seq=seq)
        assert context.rewind(1) == 200
        assert context.remove(150, 0)
        context.decode(made_up(other, 80), 150, none[:80], seq=0)
        assert 0 < context.rewind(1) < 200 - plain.WINDOW
        assert not context.remove(20, 1)
        assert context.remove(200 - context.rewind(1), 1)


@pytest.mark.long
@pytest.mark.parametrize("other", plain.ARCHITECTURES, indirect=True)
def test_text_is_upstreams(other: Model, run_python: RunPython) -> None:
    """Greedy, as upstream's library has it with the same driver."""
    code = """
with Model(sys.argv[1]) as model, Session(model, Settings(**SMALL)) as session:
    found = session.generate(made_up(model, 97), max_tokens=32, ignore_eos=True).run().tokens
"""
    expected = computed_by("upstream", run_python, code, other.path)
    prompt, got = prompt_of(other, 97), alone(other, prompt_of(other, 97), 32)
    assert_same_tokens(other, prompt, got, expected, rounding(other, prompt))
