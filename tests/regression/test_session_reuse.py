"""A session that reuses its caches gives what a fresh session gives.

The cases: a follow-up prompt, the same prompt again, a prompt that shares only a part (a recurrent
state can go back a few tokens at most), and many of them in a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from pyllama_mtp import Generation, Model, Session

from .support import assert_same_tokens, greedy, settings

N_TOKENS = 14


@pytest.fixture(params=["snapshot", "replay", "plain"])
def session(demo: Model, request: pytest.FixtureRequest) -> Iterator[Session]:
    """With MTP and either rollback, and without MTP."""
    if request.param == "plain":
        chosen = settings(0)
    else:
        chosen = settings(3, rollback=request.param)
    with Session(demo, chosen) as made:
        yield made


def plain_tokens(model: Model, prompt: Sequence[int]) -> list[int]:
    """Plain greedy output of a fresh session."""
    with Session(model, settings(0)) as fresh:
        return greedy(fresh, prompt, N_TOKENS).tokens


def check(session: Session, prompt: Sequence[int], gap: float) -> Generation:
    """Generate with whatever the session has cached; compare with a fresh plain session."""
    run = session.generate(prompt, max_tokens=N_TOKENS).run()
    assert_same_tokens(session.model, prompt, run.tokens, plain_tokens(session.model, prompt), gap)
    assert run.telemetry.n_prompt == len(prompt)
    return run


def test_chat_follow_ups(session: Session, gap: float) -> None:
    model = session.model
    messages = [{"role": "user", "content": "What does `reverse_lazy()` do?"}]
    tokens = model.tokenize(model.apply_chat_template(messages), parse_special=True)
    for question in ("And `reverse()`?", "Write it in Python.", "Thanks."):
        run = check(session, tokens, gap)
        turn = f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        before = len(tokens)
        answer = [token for token in run.tokens if not model.is_end(token)]
        tokens = [*tokens, *answer, *model.tokenize(turn, parse_special=True)]
        follow_up = check(session, tokens, gap)
        assert follow_up.telemetry.n_cached >= before, "the cached prefix was not reused"


def test_the_same_prompt_again(session: Session, text: list[int], gap: float) -> None:
    for prompt in (text[:30], text[:30], text[:49], text[:49], text[:1], text[:1]):
        check(session, prompt, gap)


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5, 9])
def test_only_a_part_is_shared(session: Session, text: list[int], gap: float, cut: int) -> None:
    """The prompt parts `cut` tokens before the end of what is cached, then goes its own way."""
    prompt = text[:40]
    for other in (text[100:104], text[110:112], text[120:121]):
        run = check(session, prompt, gap)
        cached = [*prompt, *run.tokens][: len(prompt) + len(run.tokens) - 1]
        prompt = [*cached[: len(cached) - cut], *other]


def test_shrinking_and_growing(session: Session, text: list[int], gap: float) -> None:
    for n in (60, 59, 57, 20, 21, 97, 96, 48, 2, 1, 33):
        check(session, text[:n], gap)


def test_abandoned_generation(session: Session, text: list[int], gap: float) -> None:
    """A consumer that stops early leaves caches that the next prompt can build on."""
    for n_pieces in (1, 2, 5):
        for index, _ in enumerate(session.generate(text[:25], max_tokens=N_TOKENS)):
            if index + 1 == n_pieces:
                break
        check(session, text[:25], gap)
        check(session, text[:45], gap)
