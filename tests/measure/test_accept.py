"""Running an acceptance measurement, on a scripted driver."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import msgspec
import pytest

import pyllama_mtp
from pyllama_mtp.errors import DecodeAborted, UsageError
from pyllama_mtp.measure.acceptance import (
    AcceptancePlan,
    CostResult,
    Measurement,
    Miss,
    PromptResult,
    header,
    limited,
)
from pyllama_mtp.measure.prompts import Prompt, padded_tokens
from pyllama_mtp.measure.records import Build
from pyllama_mtp.settings import Sampling, Settings
from pyllama_mtp.telemetry import Pair, Telemetry

from . import acceptance_fakes as fakes

#: What a round is: its drafts, and what the target chose.
Round = tuple[str, str]
END = "."


class Generation:
    """Emits the script's tokens, logging pairs as the driver does."""

    def __init__(self, rounds: Sequence[Round], failure: BaseException | None) -> None:
        self.telemetry, self.tokens = Telemetry(pairs=[], decode_s=0.5), [ord("a")]
        self.finish_reason: str | None = None
        self._rounds, self._failure = rounds, failure

    def run(self) -> Generation:
        for drafts, chosen in self._rounds:
            self.telemetry.count_round(len(drafts), len(chosen) - 1)
            for i, (drafted, actual) in enumerate(zip(drafts, chosen, strict=False)):
                pair = Pair(i + 1, ord(drafted), ord(actual), drafted, actual)
                self.telemetry.pairs.append(pair)  # type: ignore[union-attr]
            self.tokens += map(ord, chosen)
        self.telemetry.n_generated = len(self.tokens)
        if self._failure:
            raise self._failure
        self.finish_reason = "eos" if self.tokens[-1] == ord(END) else "length"
        return self


@pytest.fixture
def driver(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`driver.rounds` is the script of every generation, by number."""
    costs: Callable[..., Any] = lambda *_: fakes.COSTS  # noqa: E731
    monkeypatch.setattr("pyllama_mtp.measure.acceptance.costs_against_no_mtp", costs)
    fake.rounds, fake.failures, fake.done = {}, {}, 0

    class Session(fake.Session):
        def generate(self, prompt: Any, **options: Any) -> Generation:
            fake.log.append(("generate", len(prompt), options["max_tokens"]))
            number, fake.done = fake.done, fake.done + 1
            rounds = fake.rounds.get(number, [("bc", "bcd")])
            return Generation(rounds, fake.failures.get(number))

    class Model(fake.Model):
        def detokenize(self, tokens: Sequence[int], special: bool = False) -> str:
            return bytes(tokens).decode()

    monkeypatch.setattr(pyllama_mtp, "Session", Session)
    fake.ScriptedModel = Model
    return fake


class Text:
    """Padding of one letter."""

    def prompt(self, n: int, repeat: int = 0) -> list[int]:
        return [ord("p")] * n


PROMPTS = (Prompt("code", "def"), Prompt("text", "Why?", chat=True, thinking=False))


def make_plan(**changes: Any) -> AcceptancePlan:
    usual = {"prompts": PROMPTS, "source": "test", "depth": 2, "max_tokens": 64}
    lengths = {"context_lengths": (), "context_prompts": 2, "cost_repeats": 0}
    return AcceptancePlan(**{**usual, **lengths, **changes})


def measurement(
    driver: ModuleType, on_prompt: Any = lambda *_: None, **options: Any
) -> Measurement:
    settings = options.pop("settings", Settings(n_threads=1))
    model, text = driver.ScriptedModel("folder/m.gguf"), Text()
    return Measurement(model, make_plan(**options), settings, Sampling(), text, on_prompt)  # type: ignore[arg-type]


def only(driver: ModuleType, *rounds: Round) -> PromptResult:
    driver.rounds[0], driver.done = rounds, 0
    *_, result = measurement(driver, prompts=PROMPTS[:1]).run()
    assert isinstance(result, PromptResult)
    return result


@pytest.mark.parametrize(
    ("rounds", "accepted", "ended", "reason"),
    [
        ([("bc", "bcd"), ("ef", "x"), ("yz", "yw")], (2, 0, 1), False, "length"),
        ([("bc", "x"), ("d", "de"), ("", "f")], (0,), False, "length"),  # short ones at the end
        ([("b", "bc")], (), False, "length"),
        ([("bc", "bcd"), (".c", ".")], (2, 1), True, "eos"),  # an end token cuts a round
        ([("bc", "b.")], (1,), False, "eos"),  # one that was not drafted cuts nothing
        ([("b.", "b.")], (2,), False, "eos"),
    ],
)
def test_accepted_drafts_per_round(
    driver: ModuleType, rounds: list[Round], accepted: tuple[int, ...], ended: bool, reason: str
) -> None:
    result = only(driver, *rounds)
    assert (result.accepted, result.ended, result.finish_reason) == (accepted, ended, reason)
    assert result.n_prompt == 3
    assert result.n_generated == 1 + sum(len(chosen) for _, chosen in rounds)


def test_misses_with_what_came_before(driver: ModuleType) -> None:
    driver.rounds[0] = [("bc", "bcd"), ("ef", "x"), ("yz", "yw"), ("b", "c")]
    found = [*measurement(driver, prompts=PROMPTS[:1]).run()]
    assert [msgspec.structs.astuple(miss)[3:] for miss in found if isinstance(miss, Miss)] == [
        (4, 1, ord("e"), ord("x"), "e", "x", "defabcd"),
        (6, 2, ord("z"), ord("w"), "z", "w", "efabcdxy"),
    ]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), DecodeAborted("aborted", 2)])
def test_ctrl_c_keeps_the_rounds_that_are_complete(
    driver: ModuleType, failure: BaseException
) -> None:
    driver.rounds[0], driver.failures[0] = [("bc", "bcd"), ("ef", "x"), ("yz", "y")], failure
    results = measurement(driver).run()
    result = next(result for result in results if isinstance(result, PromptResult))
    assert (result.accepted, result.ended, result.finish_reason) == ((2, 0), False, "interrupted")
    with pytest.raises(KeyboardInterrupt):
        next(results)
    assert driver.done == 1 and driver.state["open_sessions"] == 0


def test_order_sessions_and_costs(driver: ModuleType) -> None:
    seen: list[Any] = []
    lengths = {"context_lengths": (200, 100), "context_prompts": 1}
    run = measurement(driver, lambda *what: seen.append(what), cost_repeats=3, **lengths)
    found = list(run.run())
    assert seen == [
        ("code", 1, None), ("text", 1, None), ("code", 1, 100), ("text", 1, 100),
        ("code", 1, 200), ("text", 1, 200),
    ]  # fmt: skip
    assert [isinstance(each, CostResult) for each in found] == [False, False, True] * 3
    chat = len("<user>Why?<assistant>")
    costs = fakes.COSTS.verify, fakes.COSTS.draft
    assert [each for each in found if isinstance(each, CostResult)] == [
        CostResult(None, chat, *costs), CostResult(100, 100, *costs), CostResult(200, 200, *costs),
    ]  # fmt: skip
    steps = [entry for entry in driver.log if entry[0] in ("open", "reset", "generate", "close")]
    assert steps[:6] == [
        ("open", 2, 256, 1), ("reset",), ("generate", 3, 64), ("reset",), ("generate", chat, 64),
        ("close", 2),
    ]  # fmt: skip
    assert steps[6:10] == [
        ("open", 2, 256, 1), ("generate", 100, 64), ("generate", 100, 64), ("close", 2),
    ]  # fmt: skip
    assert steps[10] == ("open", 2, 512, 1), "200 + 64 tokens and a draft more"


def test_only_the_first_prompts_of_a_class_get_long_contexts(driver: ModuleType) -> None:
    three = tuple(Prompt("code", text) for text in "abc")
    plan = make_plan(prompts=(*three, *PROMPTS[1:]), context_lengths=(50,))
    assert [(n, p.text) for n, p in plan.chosen(50)] == [(1, "a"), (2, "b"), (1, "Why?")]
    assert plan.size == 4 + 3


def test_padding_after_a_leading_bos(driver: ModuleType) -> None:
    model: Any = driver.ScriptedModel("m.gguf", bos=1)

    class WithBos(Text):
        def prompt(self, n: int, repeat: int = 0) -> list[int]:
            return [1, *[ord("p")] * (n - 1)]

    text: Any = WithBos()
    assert bytes(padded_tokens(model, PROMPTS[0], 10, text)) == b"\x01pppp\n\ndef"


def test_a_template_that_changes_the_message(driver: ModuleType) -> None:
    class Upper(driver.ScriptedModel):  # type: ignore[name-defined, misc]
        def apply_chat_template(self, messages: Any, **variables: Any) -> str:
            return str(messages[0]["content"]).replace("PADDING", "")

    model: Any = Upper("m.gguf")
    text: Any = Text()
    assert bytes(padded_tokens(model, PROMPTS[1], 12, text)) == b"pppppp\n\nWhy?"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"context_lengths": (20,)},
            "20 tokens are too few for a text prompt, which has 23 itself",
        ),
        ({"context_lengths": (9000,)}, "a prompt of 9000 tokens leaves no room"),
        ({"context_lengths": (64, 64)}, "give each once"),
        ({"prompts": (Prompt("a", "x" * 4096),)}, "in the model's context, 4096"),
        ({"settings": Settings(n_ctx=8)}, "in --n-ctx, 8"),
    ],
)
def test_refusals_come_before_anything_is_measured(
    driver: ModuleType, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        measurement(driver, **options)
    assert driver.done == 0


def test_prompts_per_class() -> None:
    prompts = [Prompt(kind, str(n)) for n, kind in enumerate("abab")]
    assert [p.text for p in limited(prompts, None)] == ["0", "2", "1", "3"]
    assert [p.text for p in limited(prompts, 1)] == ["0", "1"]


def test_the_header_names_no_folder_and_is_json(driver: ModuleType) -> None:
    build = Build("pyllama-mtp", "patched", "0123", "feed", "CPU")
    settings = Settings(draft_vocab="somewhere/ranked.json")
    sampling = Sampling(logit_bias={3: -math.inf, 4: 1.5})
    model: Any = driver.ScriptedModel("somewhere/m.gguf")
    found = header(model, make_plan(), settings, sampling, build, {"cpu": "a CPU"})
    text = msgspec.json.encode(found).decode()
    assert "somewhere" not in text and found.model == "m.gguf"
    assert found.settings["draft_n_max"] == 2 and found.planned == 2
    assert found.settings["sampling"]["logit_bias"] == {"3": "-inf", "4": 1.5}


def test_costs_are_against_no_mtp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a plain step is the median of generations without drafts, before and after."""
    from pyllama_mtp.measure import tune as costs

    steps = iter([1.0, 2.0, 50.0, 2.0, 3.0, 2.0, 4.0, 1.0])
    order: list[Any] = []

    class Plain:
        def __init__(self, max_tokens: int) -> None:
            self.telemetry, self.max_tokens = Telemetry(n_generated=1), max_tokens

        def __iter__(self) -> Iterator[str]:
            yield "first"
            for number in range(self.max_tokens - 1):
                self.telemetry.n_generated += 1
                self.telemetry.decode_s += next(steps)
                if number != 1:  # half a character is no text yet
                    yield "more"

    class Session:
        def generate(self, prompt: Any, *, max_tokens: int, **options: Any) -> Plain:
            order.append((max_tokens, options))
            return Plain(max_tokens)

    measure: Callable[..., Any] = lambda *_: order.append("rounds") or fakes.COSTS  # noqa: E731
    monkeypatch.setattr(costs, "measure_costs", measure)
    session: Any = Session()
    found = costs.costs_against_no_mtp(session, [1], 1)
    without = (5, {"ignore_eos": True, "draft": False})
    assert order == [without, "rounds", without]
    # 1, 26 twice (no text between them tells 2 from 50), 2; then 3, 3 twice, 1.
    assert found.verify == (0.0, 3.0, *fakes.COSTS.verify[2:]) and found.draft == fakes.COSTS.draft
