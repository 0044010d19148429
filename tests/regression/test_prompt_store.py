"""Nothing is computed twice: prompts that come again, that part, that share a beginning, that have
left their places, and that an earlier process has read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pyllama_mtp import Answer, BatchSession, Generation, Model, Sampling, Session
from pyllama_mtp.checkpoints import ALIKE
from pyllama_mtp.errors import PromptFileError, UsageError
from pyllama_mtp.llama.vision import IMAGE_MARKER, Vision

from ..marks import usual
from .support import assert_same_tokens, cached, engine_of, settings

N = 24
DRAWN = Sampling(temperature=0.9, seed=7)


def run(session: Session, prompt: Sequence[int], **options: object) -> Generation:
    given = {"max_tokens": N, "ignore_eos": True, "log_pairs": True, **options}
    return session.generate(prompt, **given).run()  # type: ignore[arg-type]


def assert_same(got: Answer, wanted: Answer) -> None:
    """Text and drafts, bit for bit: what both have computed is the same."""
    assert got.tokens == wanted.tokens
    assert got.telemetry.pairs == wanted.telemetry.pairs
    assert got.telemetry.drafted == wanted.telemetry.drafted
    assert got.logprobs == wanted.logprobs


@pytest.fixture(scope="module")
def texts(demo: Model, text: list[int]) -> list[list[int]]:
    """Prompts of 150 tokens that differ from the first token on."""
    return [[1000 + i, *text[3 * i : 3 * i + 149]] for i in range(20)]


# -- again, and with another end -------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sampling": DRAWN},
        {"sampling": Sampling(temperature=0.9, top_k=0, seed=7)},  # all logits
        {"sampling": Sampling(repeat_penalty=1.3)},
        {"logprobs": 2},
        {"draft": False},
        {"log_ties": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("sync", usual("kv", long=["full"]))
def test_a_prompt_that_comes_again_costs_no_step(
    demo: Model, text: list[int], options: dict[str, object], sync: str
) -> None:
    with Session(demo, settings(3, prompt_sync=sync)) as session:
        first = run(session, text[:100], **options)
        again = run(session, text[:100], **options)
        assert again.telemetry.n_cached == 100
        assert_same(again, first)
        more = run(session, [*text[:100], *again.tokens, *text[110:120]], **options)
        assert more.telemetry.n_cached >= 100


def test_a_row_that_does_not_serve_is_computed_anew(
    demo: Model, text: list[int], gap: float
) -> None:
    """The greedy token says nothing of the others."""
    with Session(demo, settings(3)) as session:
        run(session, text[:100])
        got = run(session, text[:100], sampling=DRAWN)
        assert got.telemetry.n_cached < 100
    with Session(demo, settings(3)) as session:
        assert_same_tokens(
            demo, text[:100], got.tokens, run(session, text[:100], sampling=DRAWN).tokens, gap
        )


def test_another_last_message(demo: Model) -> None:
    """A chat goes on from before its last message, or from the end of the turn before."""
    system = {"role": "system", "content": "def f(x): return x + 1. " * 40}
    asked = [{"role": "user", "content": f"{word} is a list?"} for word in ("What", "How", "Why")]
    with Session(demo, settings(3, n_ctx=1024, n_batch=512, n_ubatch=512)) as session:

        def ask(*messages: object) -> Generation:
            return session.chat(list(messages), max_tokens=N, sampling=Sampling()).run()

        n_system = len(demo.tokenize(demo.apply_chat_template([system]), parse_special=True))
        ask(system, asked[0])
        other = ask(system, asked[1])
        assert n_system - 12 <= other.telemetry.n_cached <= n_system + 4
        second = ask(system, asked[1], other.message, asked[2])
        assert second.telemetry.n_cached >= other.telemetry.n_prompt
        third = ask(system, asked[1], other.message, asked[0])
        assert third.telemetry.n_cached >= other.telemetry.n_prompt


def test_another_message_after_a_long_answer(demo: Model, text: list[int]) -> None:
    """The end of a turn is a place to go back to."""
    with Session(demo, settings(3)) as session:
        run(session, text[:100], max_tokens=90)
        held = cached(session)
        for question in (text[200:230], text[250:290], text[300:320]):
            got = run(session, [*held, *question])
            assert got.telemetry.n_cached == len(held)


# -- beginnings that sequences share ---------------------------------------------------------------


def test_beginnings_are_copied(demo: Model, text: list[int], gap: float) -> None:
    """Several answers to a prompt, and prompts with one beginning, on empty places and in place of
    other texts: the beginning is processed once, is in the caches once, and every text is the one
    that it gets alone."""
    chosen = settings(3, n_batch=512, n_ubatch=512)
    ends = [text[200:240], text[250:280], text[300:310], text[320:350]]
    with BatchSession(demo, chosen, 4) as session:
        same = session.generate([text[:150]] * 4, max_tokens=N, ignore_eos=True).run()
        assert [one.telemetry.n_cached for one in same.results] == [0, 150, 150, 150]
        assert len({tuple(one.tokens) for one in same.results}) == 1
        session.generate([end[::-1] for end in ends], max_tokens=2, ignore_eos=True).run()
        prompts = [[*text[:150], *end] for end in ends]
        got = session.generate(prompts, max_tokens=N, ignore_eos=True).run().results
        assert [one.telemetry.n_cached for one in got] == [0, 0, 150 - ALIKE, 150 - ALIKE]
        again = session.generate(prompts, max_tokens=N, ignore_eos=True).run().results
        assert [one.telemetry.n_cached for one in again] == [*map(len, prompts)]
    for prompt, one, other in zip(prompts, got, again, strict=True):
        with Session(demo, chosen) as alone:
            wanted = alone.generate(prompt, max_tokens=N, ignore_eos=True).run().tokens
        for tokens in (one.tokens, other.tokens):
            assert_same_tokens(demo, prompt, tokens, wanted, gap)


# -- texts that have left their places -------------------------------------------------------------


QUANTIZED = {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
LEFT = [(3, {}), (0, {}), (3, {"prompt_sync": "full"}), (3, QUANTIZED), (3, {"rollback": "replay"})]
PLACES = ("memory", "files")


@pytest.mark.parametrize(
    ("depth", "options", "where"),
    usual(
        *((*case, PLACES[i % 2]) for i, case in enumerate(LEFT)),
        long=[(*case, PLACES[i % 2 - 1]) for i, case in enumerate(LEFT)],
    ),
    ids=str,
)
def test_a_conversation_that_comes_back_goes_on(
    demo: Model,
    texts: list[list[int]],
    tmp_path: Path,
    depth: int,
    options: dict[str, object],
    where: str,
) -> None:
    """Text and drafts are those of a session in which nothing came between."""
    cache = {"cache_ram": 64} if where == "memory" else {"cache_dir": str(tmp_path / "new")}
    with Session(demo, settings(depth, **options)) as session:
        run(session, texts[0])
        held = cached(session)
        goes_on = [*held, *texts[5][:40]]
        wanted = [run(session, prompt) for prompt in (goes_on, [*goes_on[:170], *texts[6][:9]])]
    with Session(demo, settings(depth, **options, **cache)) as session:
        run(session, texts[0])
        for other in texts[1:4]:
            assert run(session, other).telemetry.n_cached == 0
        store = engine_of(session).prefixes.store
        assert (store.hits, len(store)) == (0, 3)
        got = run(session, goes_on)
        assert got.telemetry.n_cached == len(held)
        assert (store.hits, store.n_saved) == (1, len(held))
        assert_same(got, wanted[0])
        assert_same(run(session, [*goes_on[:170], *texts[6][:9]]), wanted[1])
        assert run(session, texts[2]).telemetry.n_cached == 150
        assert (store.n_bytes > 0) == (where == "memory")
        assert session.memory()["stored_prompts"] == store.n_bytes


def test_the_least_recently_used_text_makes_way(demo: Model, texts: list[list[int]]) -> None:
    with Session(demo, settings(0, cache_ram=8)) as session:
        run(session, texts[0])
        store = engine_of(session).prefixes.store
        sizes = list[int]()
        for other in texts[1:12]:
            run(session, other)
            sizes.append(store.n_bytes)
        assert sizes[-1] == sizes[-2] <= 8 << 20, "no more than is allowed"
        kept = len(store)
        assert 2 <= kept < 10
        assert run(session, texts[0]).telemetry.n_cached == 0
        assert run(session, texts[10]).telemetry.n_cached == 150


def test_what_is_stored(demo: Model, texts: list[list[int]], tmp_path: Path) -> None:
    """Not a text that goes on or gets another end, nor one of a few tokens; a long answer to a
    short prompt is, and what comes from a file."""
    with Session(demo, settings(0, cache_ram=64)) as session:
        store = engine_of(session).prefixes.store
        run(session, texts[0])
        run(session, [*cached(session), *texts[5][:20]])
        run(session, [*cached(session)[:-30], *texts[6][:20]])
        assert len(store) == 0
        run(session, texts[1][:30])
        assert len(store) == 1
        run(session, texts[2][:30], max_tokens=90)
        assert len(store) == 1
        run(session, texts[3])
        assert len(store) == 2
        session.save(tmp_path / "prompt")
        session.reset()
        session.restore(tmp_path / "prompt")
        run(session, texts[4])
        assert len(store) == 1


def test_a_text_that_is_not_that_of_its_states_is_tried_once(
    demo: Model, texts: list[list[int]], tmp_path: Path
) -> None:
    """Its states have seen a token less. What is not intact at the end is in no file."""
    with Session(demo, settings(0, cache_ram=64, cache_dir=str(tmp_path))) as session:
        run(session, texts[0])
        text = session.copy()
        wrong = replace(text, tokens=[*text.tokens, 5])
        engine_of(session).prefixes.store.put(wrong)
        run(session, texts[1])
        goes_on = [*wrong.tokens, *texts[5][:20]]
        with pytest.raises(PromptFileError, match="its state does not match its tokens"):
            run(session, goes_on)
        assert run(session, goes_on).telemetry.n_cached == len(text.tokens)
        engine_of(session).prefixes.store.close()
        engine_of(session).intact, stored = False, files(tmp_path)
    assert files(tmp_path) == stored and len(stored) == 2


# -- in files --------------------------------------------------------------------------------------


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)


@pytest.mark.parametrize("sync", ["kv", "full"])
def test_a_later_process_goes_on(
    demo: Model, texts: list[list[int]], tmp_path: Path, sync: str
) -> None:
    """What was in use when a session ended, and what had left its place before."""
    chosen = settings(3, prompt_sync=sync, cache_dir=str(tmp_path))
    held = list[list[int]]()
    with Session(demo, chosen) as session:
        for one in texts[:3]:
            run(session, one)
            held.append(cached(session))
        wanted = run(session, [*held[2], *texts[5][:40]])
    assert len(files(tmp_path)) == 3
    for i in (2, 0):
        with Session(demo, chosen) as session:
            first = run(session, texts[i])
            assert first.telemetry.n_cached == 150, "the row of its end is in the file"
            got = run(session, [*held[i], *texts[5][:40]])
            assert got.telemetry.n_cached == len(held[i])
            if i == 2:
                assert_same(got, wanted)


def test_sessions_share_a_folder(demo: Model, texts: list[list[int]], tmp_path: Path) -> None:
    """A session finds what another one stores beside it; one with other settings does not."""
    chosen = settings(0, cache_dir=str(tmp_path))
    with (
        Session(demo, chosen) as one,
        Session(demo, chosen) as two,
        Session(demo, settings(0, cache_dir=str(tmp_path), cache_type_k="q8_0")) as other,
    ):
        run(two, texts[5])
        run(one, texts[0])
        run(one, texts[1])
        engine_of(one).prefixes.close(intact=True)
        assert run(two, texts[0]).telemetry.n_cached == 150
        assert run(other, texts[0]).telemetry.n_cached == 0
        engine_of(two).prefixes.close(intact=True)
        assert len(files(tmp_path)) == 3
        for path in files(tmp_path):
            path.unlink()  # as the other one does when there is no more room
        assert run(two, texts[1]).telemetry.n_cached == 0


def test_damaged_files_are_found_and_removed(
    demo: Model, texts: list[list[int]], tmp_path: Path
) -> None:
    chosen = settings(0, cache_dir=str(tmp_path))
    with Session(demo, chosen) as session:
        for one in texts[:3]:
            run(session, one)
    first, second, _ = files(tmp_path)
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 1
    first.write_bytes(data)
    second.write_bytes(second.read_bytes()[:-9])
    (tmp_path / "mine.txt").write_text("not a prompt")
    with Session(demo, chosen) as session:
        assert [run(session, one).telemetry.n_cached for one in texts[:3]] == [0, 0, 150]
    assert (tmp_path / "mine.txt").exists()
    with Session(demo, chosen) as session:
        assert [run(session, one).telemetry.n_cached for one in texts[:3]] == [150] * 3


@pytest.mark.parametrize("with_others", [False, True])
def test_nobody_else_can_read_stored_prompts(
    demo: Model, texts: list[list[int]], tmp_path: Path, with_others: bool
) -> None:
    """Also if the folder was there. If others' files are in it, it stays as it is."""
    tmp_path.chmod(0o755)
    if with_others:
        (tmp_path / "mine.txt").touch()
    for text in texts[:2]:
        with Session(demo, settings(0, cache_dir=str(tmp_path))) as session:
            run(session, text)
        stored = list(tmp_path.glob("*.prompt"))
        assert {one.stat().st_mode & 0o777 for one in stored} == {0o600}
        stored[0].chmod(0o644)  # as older versions have left it
    assert tmp_path.stat().st_mode & 0o777 == (0o755 if with_others else 0o700)
    tmp_path.chmod(0o777)
    with pytest.raises(UsageError, match="everybody may write into"):
        Session(demo, settings(0, cache_dir=str(tmp_path)))


def test_what_else_is_in_the_folder_stays(
    demo: Model, texts: list[list[int]], tmp_path: Path
) -> None:
    """The store removes the files that it has written, whatever else bears such a name."""
    folder, target = tmp_path / "cache", tmp_path / "target"
    target.write_text("mine")
    folder.mkdir()
    own = f"{'0' * 16}-{'a' * 31}"
    (folder / f"{own}0.prompt").mkdir()
    (folder / f"{own}1.prompt").symlink_to(target)
    (folder / f"{own}2.prompt").write_bytes(bytes(9 << 20))
    (folder / "mine.prompt").write_bytes(bytes(9 << 20))
    before = {*folder.iterdir()}
    with Session(demo, settings(0, cache_dir=str(folder), cache_disk=8)) as session:
        for one in texts[:12]:
            run(session, one)
    assert before < {*folder.iterdir()} and target.read_text() == "mine"
    stored = {*folder.iterdir()} - before
    assert 2 <= len(stored) < 12 and sum(one.stat().st_size for one in stored) <= 8 << 20
    with Session(demo, settings(0, cache_dir=str(folder))) as session:
        cached = [run(session, texts[i]).telemetry.n_cached for i in (11, 0)]
    assert cached == [150, 0], "the oldest ones have made way"


# -- images ----------------------------------------------------------------------------------------


def test_images_are_stored_by_what_they_show(
    demo: Model, texts: list[list[int]], vision: Vision, tmp_path: Path
) -> None:
    pictures = [np.full((96, 160, 3), value, dtype=np.uint8) for value in (20, 200)]
    about = demo.detokenize(texts[3][1:90])
    chosen = settings(3, cache_ram=64, cache_dir=str(tmp_path))

    def ask(session: Session, picture: int, question: str) -> Generation:
        prompt = f"{about} {IMAGE_MARKER} {question}"
        shown = session.generate(prompt, images=[pictures[picture]], max_tokens=N, ignore_eos=True)
        return shown.run()

    with Session(demo, chosen, vision=vision) as session:
        wanted = ask(session, 0, "What is this?")
        n = wanted.telemetry.n_prompt
        run(session, texts[0])
        assert_same(ask(session, 0, "What is this?"), wanted)
        run(session, texts[1])
    with Session(demo, chosen, vision=vision) as session:
        other = ask(session, 1, "What is this?")
        assert other.telemetry.n_cached < n - 20, "another picture is another text"
        run(session, texts[2])
        again = ask(session, 0, "What is this?")
        assert again.telemetry.n_cached == n
        assert_same(again, wanted)


@pytest.mark.parametrize(("n_sequences", "grows"), [(2, 3), (3, 2), (3, 3)])
def test_where_many_texts_part_stays_a_checkpoint(
    demo: Model, texts: list[list[int]], n_sequences: int, grows: int
) -> None:
    """Though a text goes on for long after it: one in the place of another, one from which the
    beginning was copied, or the copy."""
    begin = texts[0][:100]
    with BatchSession(demo, settings(0, n_batch=512, n_ubatch=512), n_sequences) as session:

        def ask(prompt: list[int]) -> Answer:
            return session.generate([prompt], max_tokens=2, ignore_eos=True).run().results[0]

        cached = [ask([*begin, *other[:80]]).telemetry.n_cached for other in texts[1:4]]
        assert cached == [0, 0, 100 - ALIKE]
        goes_on = [*begin, *texts[grows][:80]]
        for i in range(8):
            goes_on += [*ask(goes_on).tokens, *texts[4 + i][:30]]
        for other in texts[15 : 14 + n_sequences]:
            ask(other)  # takes the place of another text with this beginning
        assert ask([*begin, *texts[17][:80]]).telemetry.n_cached == 100 - ALIKE
