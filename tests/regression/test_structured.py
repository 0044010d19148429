"""Answers that follow a grammar: valid, and the same with MTP and without."""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest

from pyllama_mtp import BatchSession, Grammar, Model, Sampling, Session
from pyllama_mtp import grammar as grammars
from pyllama_mtp.child import Workers
from pyllama_mtp.errors import UsageError
from pyllama_mtp.llama import native
from pyllama_mtp.sampling import sampler
from pyllama_mtp.sampling.sampler import Constraint, Sampler

from ..marks import usual
from .distributions import PLAIN, WAYS, Doubles, Exact, Text, compare
from .support import settings
from .test_thinking import prompt_of

PROMPT = 'config = json.loads("""\n'
#: Of strings.
PATTERNS = ["^[a-z]{2,6}$", r"^\d{3}-\d{2}$", "^(a|bc)+x$"]
WARM = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)
N_SCHEMAS, N_TOKENS, AT_ONCE = 80, 200, 8
PERSON = {
    "type": "object",
    "properties": {
        "name_of_the_person": {"type": "string", "maxLength": 8},
        "age_in_completed_years": {"type": "integer", "minimum": 0, "maximum": 150},
        "is_member_of_the_club": {"type": "boolean"},
    },
    "required": ["name_of_the_person", "age_in_completed_years", "is_member_of_the_club"],
    "additionalProperties": False,
}


def scalar(rng: random.Random) -> dict[str, Any]:
    """A schema of a value without parts."""
    low = rng.randint(-200, 200)
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randint(0, 8)},
            {"type": "string", "minLength": 2, "maxLength": 5},
            {
                "type": "string",
                "pattern": rng.choice(PATTERNS),
            },
            {"type": "string", "format": rng.choice(["date", "ipv4", "uuid", "time"])},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)},
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + 1.5},
            {"type": "integer", "minimum": 0, "maximum": 99, "multipleOf": 3},
            {"type": ["boolean", "null"]},
            {"enum": [low, "word", None, True, [1, 2]]},
            {"const": {"key": low}},
            {"$ref": "#/$defs/node"},
        ]
    )


def value(rng: random.Random, depth: int) -> dict[str, Any]:
    """A schema as in public suites: nested, bounded, alternatives, references."""
    kind = rng.choice(["object", "array", "anyOf", "map", "tuple"]) if depth else "scalar"
    if kind == "scalar" or rng.random() < 0.3:
        return scalar(rng)
    if kind == "anyOf":
        return {"anyOf": [value(rng, depth - 1) for _ in range(rng.randint(2, 3))]}
    if kind == "array":
        least = rng.randint(0, 2)
        bounds = {"minItems": least, "maxItems": least + rng.randint(0, 2)}
        return {"type": "array", "items": value(rng, depth - 1), **bounds}
    if kind == "tuple":
        items = [value(rng, depth - 1) for _ in range(2)]
        return {"type": "array", "prefixItems": items, "minItems": 2, "items": False}
    if kind == "map":
        return {"type": "object", "additionalProperties": scalar(rng), "maxProperties": 2}
    names = rng.sample(["name", "size", "a b", "ключ", "x_1", "items", 'q"uote'], rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: value(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def schemas() -> Iterator[dict[str, Any]]:
    rng = random.Random(7)
    for _ in range(N_SCHEMAS):
        node = {
            "type": "object",
            "properties": {"v": {"type": "boolean"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["v"],
            "additionalProperties": False,
        }
        yield {**value(rng, 3), "$defs": {"node": node}}


@pytest.mark.parametrize(
    ("temperature", "first"), usual((0.0, 0), long=[(0.0, 1), (1.0, 2), (1.0, 3)])
)
def test_json_of_random_schemas(demo: Model, temperature: float, first: int) -> None:
    """Eight sequences at a time, each with a grammar of its own; with MTP and without. Each
    takes every fourth schema."""
    made, found = list(schemas())[first::4], []
    asked = [
        replace(WARM, temperature=temperature, grammar=Grammar.json_schema(one)) for one in made
    ]
    for depth in (0, 3):
        with BatchSession(demo, settings(depth, n_batch=64, n_ubatch=64), AT_ONCE) as session:
            prompts = [PROMPT] * len(made)
            found.append(
                session.generate(prompts, max_tokens=N_TOKENS, sampling=asked).run().results
            )
    done = 0
    for schema, *answers in zip(made, *found, strict=True):
        for answer in answers:
            if answer.finish_reason == "eos":
                jsonschema.validate(json.loads(answer.text), schema)
                done += 1
    assert done > 0.7 * 2 * len(made), "too few answers came to their end"
    if temperature == 0:
        same = sum(a.tokens == b.tokens for a, b in zip(*found, strict=True))
        assert same >= (1.0 if demo.same_bits else 0.97) * len(made)


@pytest.mark.parametrize("depth", [0, 3, "auto"])
def test_forced_tokens_change_nothing_but_the_number_of_passes(
    demo: Model, monkeypatch: pytest.MonkeyPatch, depth: int | str
) -> None:
    sampling = Sampling(grammar=Grammar.json_schema(PERSON))
    with Session(demo, settings(depth)) as session:
        run = session.generate(PROMPT, max_tokens=150, sampling=sampling).run()
        monkeypatch.setattr(Sampler, "forced", lambda sampler, most: [])
        usual = session.generate(PROMPT, max_tokens=150, sampling=sampling).run()
        monkeypatch.undo()
        after = session.generate(PROMPT + run.text, max_tokens=9, ignore_eos=True).run().tokens
        session.reset()
        anew = session.generate(PROMPT + run.text, max_tokens=9, ignore_eos=True).run().tokens
    jsonschema.validate(json.loads(run.text), PERSON)
    assert run.tokens == usual.tokens
    assert run.telemetry.forced > 10 > usual.telemetry.forced
    assert depth == "auto" or run.telemetry.rounds < usual.telemetry.rounds
    assert after == anew, "what was taken along is not in the caches as it should be"


class Masked(Exact):
    """The target's probabilities of texts that follow a grammar."""

    def __init__(self, model: Model, prompt: Sequence[int], grammar: Grammar) -> None:
        super().__init__(model, prompt)
        self._grammar = grammar

    def following(self, text: Text, sampling: Sampling) -> Doubles:
        shares = super().following(text, sampling)
        at = Constraint(self._model, self._grammar)
        for token in text:
            at.add(token)
        shares = np.where(at.allowed(), shares, 0.0)
        return shares / shares.sum()


CALL = 'root ::= "f(" [a-z]+ ("," " "? [a-z]+)* ")"'
BEGUN = re.compile(r"f\([a-z]+(, ?[a-z]+)*\)?|f\(?|f\([a-z, ]*")


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_gbnf_holds_at_any_temperature(
    demo: Model, text: list[int], way: dict[str, object]
) -> None:
    with Session(demo, settings(3, **way)) as session:
        for seed in range(20):
            drawn = replace(PLAIN, grammar=CALL, seed=seed)
            run = session.generate(text[:20], max_tokens=12, sampling=drawn).run()
            assert BEGUN.fullmatch(run.text), run.text
            assert (run.finish_reason == "eos") == run.text.endswith(")")


LINES, WORDS = r"( self\.[a-z_]+ = [a-z]+\n)+", r"( [a-z]{1,8})* +return"


@pytest.mark.long
@pytest.mark.parametrize(
    ("pattern", "way"),
    [(pattern, way) for pattern in (LINES, WORDS) for way in WAYS],
)
def test_frequencies_of_texts_under_a_grammar(demo: Model, pattern: str, way: str) -> None:
    """Some drafts break it, some tokens are forced, and the distribution is the masked one."""
    grammar = Grammar.regex(pattern)
    exact = Masked(demo, demo.tokenize(" self._cmd = cmd\n"), grammar)
    with Session(demo, settings(3, **WAYS[way])) as session:
        found, limit, _ = compare(exact, session, replace(PLAIN, grammar=grammar), 3)
    assert found < limit


SCHEMA, SHORT = Grammar.json_schema(PERSON), 'root ::= "{" [a-z]{3} "}"'


@pytest.mark.parametrize(
    ("grammar", "budget"),
    usual((SCHEMA, 0), (SHORT, 5), (SHORT, None), long=[(SCHEMA, None), (SCHEMA, 5), (SHORT, 0)]),
)
def test_a_grammar_begins_after_the_thought(
    demo: Model, grammar: Grammar | str, budget: int | None
) -> None:
    (close,) = demo.tokenize("</think>", add_special=False, parse_special=True)
    likely = {close: 9.0}  # this model does not always find the end
    sampling = Sampling(grammar=grammar, reasoning_budget=budget, logit_bias=likely)
    with Session(demo, settings(3)) as session:
        prompt = prompt_of(demo, True)
        text = session.generate(prompt, max_tokens=400, sampling=sampling).run()
        shown = demo.detokenize(text.tokens, special=True)
        thought, ending, answer = shown.partition("</think>\n\n")
        assert ending and answer.startswith("{") and text.finish_reason == "eos", shown
        if budget is None:
            plain = Sampling(logit_bias=likely)
            free = session.generate(prompt, max_tokens=400, sampling=plain).run()
            assert thought
            assert demo.detokenize(free.tokens, special=True).startswith(thought + "</think>")
        else:
            assert len(demo.tokenize(thought)) <= budget + 2
        at_once = session.generate(prompt_of(demo, False), max_tokens=9, sampling=sampling).run()
        assert at_once.text.startswith("{")


def test_long_chains_end_nothing(demo: Model) -> None:
    """llguidance recurses along references and rules."""
    n = 2000
    defs = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}, "type": "array"} for i in range(n)}
    chain = Grammar.json_schema({"$defs": {**defs, f"a{n}": {}}, "$ref": "#/$defs/a0"})
    rules = "\n".join(f"a{i}: a{i + 1}" for i in range(n))
    for grammar in (chain, Grammar.lark(f'start: a0\n{rules}\na{n}: "x"')):
        with Session(demo, settings(3)) as session:
            session.generate("a", max_tokens=9, sampling=Sampling(grammar=grammar)).run()


BOMB = {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949, 9941)]}


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", json.dumps(BOMB)),
        ("json_schema", json.dumps({"type": "array", "items": {"allOf": BOMB["allOf"][:2]}})),
        ("lark", f"start: <tool_call> <[1-9000]> x\nx: %json {json.dumps(BOMB)}"),
        ("gbnf", "root ::= <tool_call> | " + '"a" | ' * 30_000 + '"b"'),
    ],
    ids=["allOf", "in items", "behind tokens", "GBNF"],
)
def test_a_grammar_that_computes_without_end(
    kind: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance's own limits do not hold while it reads a grammar."""
    workers = Workers("pyllama_mtp.grammar:check_here", 0.3)
    monkeypatch.setattr(grammars, "workers", workers)
    with pytest.raises(UsageError, match=r"cannot be used: it computes for more than 0\.[35] s"):
        Grammar(kind, source)
    assert Grammar.lark(f'start: <tool_call> "{kind}"')
    workers.close()


def test_a_grammar_that_holds_others_up(demo: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its own answer ends."""
    monkeypatch.setattr(sampler, "MOST_STEP_S", 0.0)
    monkeypatch.setattr(sampler, "MOST_GBNF_STEP_S", 0.0)
    with Session(demo, settings(3)) as session:
        for grammar in (SCHEMA, SHORT):
            with pytest.raises(UsageError, match="computes for more than 0 ms for each token"):
                session.generate("a", max_tokens=9, sampling=Sampling(grammar=grammar)).run()
        assert session.generate("a", max_tokens=9).run().tokens


def test_a_token_that_gbnf_computes_without_end(demo: Model) -> None:
    """Each of its characters can be one of forty optional ones."""
    if not native.load().has_tap:
        pytest.skip("upstream's library has no limit")
    began, bomb = time.process_time(), Grammar.gbnf("root ::= " + '" "? ' * 40 + '"x"')
    slow = pytest.raises(UsageError, match="computes for more than 1 s for a token")
    with Session(demo, settings(3)) as session, slow:
        session.generate("a", max_tokens=9, sampling=Sampling(grammar=bomb)).run()
    assert time.process_time() - began < 5


def test_damaged_grammars(demo: Model) -> None:
    """A UsageError, or an answer."""
    rng, refused = random.Random(5), 0
    sources = [
        *(("json_schema", json.dumps(one)) for one in list(schemas())[:40]),
        *(("regex", one) for one in (r"(a|b)*[^c-e]{2,7}\d+", r"\p{L}+(?i:x)\x41?", "a{3}|.*")),
        ("lark", 'start: "a" b* C\nb: "x" | /[0-9]+/ start\nC: ("q" | D){2,3}\nD: /z/\n'),
        ("gbnf", 'root ::= "f(" [a-z]+ ("," w)* ")"\nw ::= " "? [^x\\n]{1,3}'),
    ]
    with Session(demo, settings(3)) as session:
        for number in range(250):
            kind, source = sources[number % len(sources)] if number % 3 else sources[-1]
            text = list(source)
            for _ in range(rng.randint(1, 3)):
                at = rng.randrange(len(text))
                text[at : at + rng.randint(0, 2)] = rng.choice('{}[]()"\\*+?|:,~&^$-0\x00é\n')
            try:
                sampling = replace(WARM, grammar=Grammar(kind, "".join(text)), seed=number)
                session.generate(PROMPT, max_tokens=5, sampling=sampling).run()
            except UsageError:
                refused += 1
    assert 20 < refused < 240


def test_llguidance_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match=r"need the package llguidance.*pyllama-mtp\[structured\]"):
        Grammar.json_object()
    Grammar.gbnf('root ::= "a"')


@pytest.mark.parametrize("rollback", ["snapshot", "replay"])
def test_imposed_acceptance_and_a_grammar(demo: Model, rollback: str) -> None:
    """Forced tokens are drafts like others then: the imposed rates reject some of them."""
    grammar = Grammar.regex('"(abcdefgh|ijklmnop)" "[a-z]{3}" "the end of this text is forced"')
    chosen = settings(3, synthetic_acceptance=(0.6, 0.4, 0.2), rollback=rollback)
    with Session(demo, chosen) as session:
        got = session.generate("def f", max_tokens=60, sampling=Sampling(grammar=grammar)).run()
    assert got.text.endswith('is forced"') and got.finish_reason == "eos"
    assert 0 < sum(got.telemetry.accepted) < sum(got.telemetry.drafted)
