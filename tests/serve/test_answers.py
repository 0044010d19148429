"""Answers through the real `openai` client: the driver's own text, in the API's form."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from itertools import pairwise
from typing import Any

import pytest

from pyllama_mtp import Model, Sampling
from pyllama_mtp.serve.answers import Reply, make_choices
from pyllama_mtp.serve.bodies import CompletionBody, parse

from .conftest import NAME, Running, Start
from .support import QUESTIONS, alone, chat, chat_tokens

PROMPT = "import os\n\ndef"
N = 40


def test_models(shared: Running) -> None:
    found = shared.client.models.list().data
    assert [model.id for model in found] == [NAME]
    assert shared.client.models.retrieve(NAME).object == "model"


def test_chat_is_what_the_driver_says(shared: Running, demo: Model) -> None:
    prompt = chat_tokens(demo, chat(QUESTIONS[0]))
    wanted = alone(demo, prompt, N)
    got = shared.answer(chat(QUESTIONS[0]), max_completion_tokens=N)
    (choice,) = got.choices
    assert choice.message.content == wanted.text and choice.message.role == "assistant"
    assert choice.finish_reason == ("length" if wanted.finish_reason == "length" else "stop")
    assert got.object == "chat.completion" and got.model == NAME
    assert got.usage.prompt_tokens == len(prompt)
    assert got.usage.completion_tokens == len(wanted.tokens)
    assert got.usage.total_tokens == len(prompt) + len(wanted.tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_what_became_of_the_drafts(shared: Running, stream: bool) -> None:
    """vLLM's form; what AIPerf checks of it holds (its SpecDecodeAcceptanceRecord)."""
    total = shared.generator.total
    before = total.rounds, sum(total.drafted), sum(total.accepted)
    options = {"stream_options": {"include_usage": True}} if stream else {}
    got = shared.complete(PROMPT, max_tokens=60, stream=stream, **options)
    chunks = [chunk.to_dict() for chunk in got] if stream else [got.to_dict()]
    assert [("metrics" in chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    found = chunks[-1]["metrics"]["speculative_decoding"]
    held, n_steps = found["acceptance_histogram"], found["num_spec_steps"]
    accepted, drafted = found["num_accepted_draft_tokens"], found["num_draft_tokens"]
    after = total.rounds, sum(total.drafted), sum(total.accepted)
    n_rounds, *counts = (new - old for new, old in zip(after, before, strict=True))
    assert [drafted, accepted] == counts and drafted > accepted > 0
    usage = chunks[-1]["usage"]
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == accepted
    assert details["rejected_prediction_tokens"] == drafted - accepted
    # One token for each round, the accepted drafts, and the first token of the prompt.
    assert usage["completion_tokens"] == 1 + n_rounds + accepted
    assert stream or "metrics" not in shared.complete(PROMPT, max_tokens=4, n=2).to_dict()
    assert 0 < n_steps <= n_rounds and sum(held) == n_steps
    assert len(held) == found["num_spec_tokens"] + 1 == 4
    assert sum(n * count for n, count in enumerate(held)) == accepted
    assert found["mean_acceptance_length"] == pytest.approx(1 + accepted / n_steps)
    assert found["draft_acceptance_rate"] == pytest.approx(accepted / drafted)


def test_usage_so_far(shared: Running) -> None:
    """Each chunk has that of its own round, also where the answer is further than the stream."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "stream": True}
    body = parse(CompletionBody, {**asked, "stream_options": options})

    async def late() -> list[bytes]:
        reply = Reply(shared.served, body)
        reply.start(shared.generator)
        shared.wait_until_idle()  # the event loop waits, too
        return [event async for event in reply.chunks()]

    assert shared.generator.events
    *events, _ = asyncio.run_coroutine_threadsafe(late(), shared.generator.events).result(99)
    usages = [json.loads(event.removeprefix(b"data: "))["usage"] for event in events]
    told = [
        (one["completion_tokens"], one["completion_tokens_details"]["accepted_prediction_tokens"])
        for one in usages
    ]
    *rounds, last = told
    assert rounds[-1] == last and last[0] == 30 and rounds[0] == (1, 0)
    for (n, accepted), (m, more) in pairwise(rounds):
        assert m - n == 1 + more - accepted


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_adds_up_to_the_answer(shared: Running, include_usage: bool) -> None:
    whole = shared.answer(chat(QUESTIONS[3]), max_tokens=N)
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks = list(shared.answer(chat(QUESTIONS[3]), max_tokens=N, stream=True, **options))
    last = chunks.pop() if include_usage else None
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len({chunk.id for chunk in chunks}) == 1 and len(chunks) > 5
    if last:
        assert last.choices == []
        assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks)


def test_prompts_of_all_kinds_and_n(shared: Running, demo: Model) -> None:
    texts = ["def main(", "The list of"]
    tokens = [demo.tokenize(text) for text in texts]
    wanted = [alone(demo, prompt, 12).text for prompt in tokens]
    for prompt, said in ((texts, wanted), (tokens, wanted), (tokens[1], wanted[1:])):
        assert [c.text for c in shared.complete(prompt, max_tokens=12).choices] == said
    got = shared.complete(texts, n=2, max_tokens=12)
    assert [choice.text for choice in got.choices] == [wanted[0]] * 2 + [wanted[1]] * 2
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    assert got.usage.prompt_tokens == sum(map(len, tokens))
    usual, more = (shared.complete(texts[0], **n).choices[0].text for n in ({}, {"max_tokens": 64}))
    assert len(usual) < len(more), "16 tokens are what the API gives"


def test_a_seed_is_a_text(start: Start) -> None:
    """Of one sequence: two may have got the prompt in other parts, which decides on rounding."""
    server = start(n_sequences=1)

    def text(**options: object) -> str:
        got = server.answer(chat(QUESTIONS[1]), max_tokens=24, temperature=1.5, **options)
        return str(got.choices[0].message.content)

    assert text(seed=7) == text(seed=7)
    assert len({text(seed=seed) for seed in (1, 2, 3, -4)}) > 1
    assert len({text() for _ in range(4)}) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_the_models_own(shared: Running, demo: Model, stream: bool) -> None:
    """Every token, accepted drafts too, has the log probability that the driver gives."""
    wanted = alone(demo, chat_tokens(demo, chat(QUESTIONS[0])), 20, logprobs=3)
    asked = {"max_tokens": 20, "logprobs": True, "top_logprobs": 3, "stream": stream}
    got = shared.answer(chat(QUESTIONS[0]), **asked)
    if stream:
        chunks = list(got)
        found = [e for c in chunks for e in (c.choices[0].logprobs.content or [])]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        choice = got.choices[0]
        found, text = choice.logprobs.content, choice.message.content
    assert b"".join(bytes(entry.bytes) for entry in found).decode() == text
    for entry, own in zip(found, wanted.logprobs, strict=True):
        assert entry.logprob == pytest.approx(own.logprob, abs=0.02)
        top = [other.logprob for other in entry.top_logprobs]
        assert top == pytest.approx([logprob for _, logprob in own.top], abs=0.02)
    assert len(found) >= 15


def test_logprobs_of_a_completion(shared: Running) -> None:
    """Log probabilities end where a stop string ends the text."""
    whole = shared.complete(PROMPT, max_tokens=30).choices[0].text
    stops = ["never so", whole[14:17]]
    got = shared.complete(PROMPT, max_tokens=30, logprobs=2, stop=stops).choices[0]
    assert (got.text, got.finish_reason) == (whole.partition(stops[1])[0], "stop")
    alike = list(shared.complete(PROMPT, max_tokens=30, stop=stops[1], stream=True))
    assert "".join(chunk.choices[0].text for chunk in alike) == got.text
    found = got.logprobs
    assert found.tokens
    assert "".join(found.tokens).startswith(got.text) and found.text_offset[-1] < len(got.text)
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(len(found.tokens))]
    entries = zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True)
    for token, logprob, top in entries:
        assert len(top) == 2 and max(top.values()) == pytest.approx(top[token]) == logprob


def test_the_next_turn_of_a_chat_goes_on(shared: Running, demo: Model) -> None:
    """Its history is not processed again, and the text is that of the whole prompt."""
    first = shared.answer(chat(QUESTIONS[0]), max_tokens=N)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    messages = [*chat(QUESTIONS[0]), said, *chat(QUESTIONS[4])]
    got = shared.answer(messages, max_tokens=N)
    assert got.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    assert got.choices[0].message.content == alone(demo, chat_tokens(demo, messages), N).text


def test_sampling_is_the_model_files_unless_the_request_says(
    start: Start, demo: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that asks for top_k 1 is answered greedily; every parameter reaches the sampler."""
    monkeypatch.setitem(demo.__dict__, "sampling", Sampling(temperature=0.8, top_k=1))
    server = start()
    got = server.client.completions.create(model=NAME, prompt=PROMPT, max_tokens=20)
    assert got.choices[0].text == alone(demo, demo.tokenize(PROMPT), 20).text
    given: dict[str, Any] = {
        **{"top_k": -1, "top_n_sigma": -1, "min_p": 0.1, "typical_p": 0.5, "top_p": 0.5},
        **{"xtc_probability": 0.5, "xtc_threshold": 0.2, "repetition_penalty": 1.5},
        **{"repeat_last_n": 9, "frequency_penalty": 1, "presence_penalty": -1, "temperature": 2},
        **{"dry_multiplier": 1, "dry_base": 2, "dry_allowed_length": 3, "dry_penalty_last_n": 4},
        **{"dry_sequence_breakers": ["a"], "logit_bias": {"5": -1}, "seed": 7},
    }
    body = parse(CompletionBody, {"prompt": PROMPT, **given})
    (choice,) = make_choices(server.served, body)
    found = dataclasses.asdict(choice.request.sampler.sampling)
    given["repeat_penalty"] = given.pop("repetition_penalty")
    given |= {"top_k": 0, "top_n_sigma": 0, "logit_bias": {5: -1}, "dry_sequence_breakers": ("a",)}
    assert found == {
        **given,
        **{"grammar": None, "reasoning_budget": None, "logits_processors": ()},
    }
