"""A bad value is an error that names it, shows it and says what is right: a row a value.

The fields of Settings and Sampling by themselves: unit/test_settings.py; bodies of the server:
serve/test_limits.py; words of the command line: cli/test_bad_input.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyllama_mtp import (
    BatchSession,
    ChatOptions,
    Grammar,
    Model,
    RopeScaling,
    Sampling,
    Session,
    Settings,
    stream,
)
from pyllama_mtp.errors import UsageError
from pyllama_mtp.settings import DRAFT_LIMIT

from .support import settings

PROMPT, ONE, ASKS = [5, 6, 7], [[5, 6, 7]], [{"role": "user", "content": "a"}]
SMALL = Settings(n_ctx=64, n_batch=64, n_ubatch=64, n_threads=1, draft_n_max=1)
SEEDED = {"n_ctx": 64, "n_threads": 1}
N_VOCAB = 2048

#: What is called, with what, and words of the error.
Row = tuple[str, tuple[Any, ...], dict[str, Any], str]
On = SimpleNamespace

#: By name; the first argument is what there is to call.
CALLS: dict[str, Callable[..., Any]] = {
    "generate": lambda on, *a, **k: on.session.generate(*a, **k).run(),
    "chat": lambda on, *a, **k: on.session.chat(*a, **k).run(),
    "process": lambda on, *a, **k: on.session.process(*a, **k),
    "save": lambda on, *a, **k: on.session.save(*a, **k),
    "restore": lambda on, *a, **k: on.session.restore(*a, **k),
    "hidden_states": lambda on, *a, **k: on.session.hidden_states(*a, **k),
    "batch": lambda on, *a, **k: on.batch.generate(*a, **k).run(),
    "stream": lambda on, *a, **k: list(stream(on.demo, *a, **k)),
    "stream a file": lambda on, *a, **k: list(stream(*a, **k)),
    "Model": lambda on, *a, **k: Model(*(a or (on.demo.path,)), **k),
    "of": lambda on, model: Session(model),
    "Session": lambda on, *a: Session(on.demo, *a),
    "BatchSession": lambda on, *a: BatchSession(on.demo, *a),
    "tokenize": lambda on, *a: on.demo.tokenize(*a),
    "detokenize": lambda on, *a: on.demo.detokenize(*a),
    "ChatOptions": lambda on, **k: ChatOptions(**k),
    "RopeScaling": lambda on, **k: RopeScaling(**k),
    "Settings": lambda on, **k: Settings(**k),
    "Sampling": lambda on, **k: Sampling(**k),
    "Grammar": lambda on, make: make(),
}


def fields(call: str, *arguments: Any, **values: tuple[Any, ...]) -> list[Row]:
    """Keyword arguments that are named and shown."""
    several = ((name, value) for name, each in values.items() for value in each)
    return [(call, arguments, {n: v}, f"{n} is {v!r}") for n, v in several]


def prompts() -> Iterator[Row]:
    """What is no prompt, and which part of it is not."""
    whole = (b"abc", bytearray(b"abc"), None, 5, 1.5, {5: 6}, {5}, np.array(5))
    parts = ([1.5], [2.0], ["a"], [None], [True])
    said = [(bad, f"prompt is {bad!r}") for bad in whole]
    said += [(bad, f"prompt[0] is {bad[0]!r}") for bad in parts]
    said += [([5, np.True_], "prompt[1] is ")]
    said += [([1, n], f"token id {n} ") for n in (2**40, 2**70, -1)]
    for bad, words in said:
        yield "generate", (bad,), {}, words
        yield "batch", ([PROMPT, bad],), {}, f"prompts[1]: {words}"
    for call in ("process", "stream"):
        yield call, (b"abc",), {}, "prompt is b'abc'"


def no_logits(ids: Any, logits: Any) -> Any:
    return logits[:5]


GENERATE: dict[str, tuple[Any, ...]] = {
    "stop": ([""], ["a", ""], [5], [None], b"", 5, {"a": 5}),
    "max_tokens": ("3", 2.5, 2.0, None, True, 0, np.float64(2), np.int64(0)),
    "sampling": ({"temperature": 1}, {}, 0.7, "greedy"),
    "ignore_eos": ("no", None),
    "draft": ("no", None, 0),
    "on_progress": (3,),
}
BAD_PATHS = (5, None, b"a", "")
BAD_ADAPTERS: tuple[Any, ...] = (None, 3, "", [("a", "x")], [("a", math.inf)])
NUMBERS = ("2", 2.0, None, True, 0, 257)
PROCESSED: tuple[tuple[Any, str], ...] = (
    (lambda ids, logits: logits[:5], "must give the"),
    (lambda ids, logits: logits * np.nan, "must give the"),
    (lambda ids, logits: None, "must give the"),
    (lambda ids, logits: np.full_like(logits, -np.inf), "exclude every token"),
)
NOTHING = dict.fromkeys(range(N_VOCAB), -math.inf)

ROWS: list[Row] = [
    # -- texts and their options
    *prompts(),
    *fields("generate", PROMPT, **GENERATE, log_pairs=("no",), log_ties=(1,)),
    *fields("batch", ONE, **GENERATE, logprobs=(-1,)),
    *fields("process", PROMPT, draft=("no",)),
    *(("batch", (bad,), {}, f"prompts is {bad!r}, it must be a list") for bad in (None, 5, {1: 1})),
    ("batch", (b"abc",), {}, "prompts is one text"),
    ("batch", (PROMPT,), {}, "prompts[0]: prompt is 5, it must be text"),
    ("batch", ([],), {}, "there is no prompt"),
    ("batch", (iter([]),), {}, "there is no prompt"),
    ("batch", ([[5], []],), {}, "prompts[1]: the prompt is empty"),
    ("batch", ([[5], [6] * 257],), {}, "prompts[1]: the prompt has 257 tokens and the context 256"),
    ("batch", ([[5], [10**6]],), {}, "prompts[1]: token id 1000000 is not in the vocabulary"),
    ("batch", (ONE * 2,), {"max_tokens": [3, "3"]}, "max_tokens is '3', it"),
    ("batch", (ONE * 2,), {"max_tokens": [3]}, "max_tokens has 1 values for 2 prompts"),
    ("batch", (ONE,), {"sampling": [5]}, "sampling is 5, it must"),
    ("batch", (ONE * 2,), {"sampling": [None] * 3}, "sampling has 3 values for 2 prompts"),
    (
        *("batch", (ONE * 2,), {"sampling": [None, Sampling(logit_bias={10**6: 1})]}),
        "prompts[1]: token id",
    ),
    *(
        ("generate", (PROMPT,), {"sampling": Sampling(t, logits_processors=[f])}, words)
        for f, words in PROCESSED
        for t in (0.0, 1.0)
    ),
    *(
        ("generate", (PROMPT,), {"sampling": Sampling(t, logit_bias=NOTHING)}, "exclude every tok")
        for t in (0.0, 1.0)
    ),
    (
        *("generate", ("a",), {"sampling": Sampling(grammar=Grammar.lark('start: <nothing> "a"'))}),
        "unknown special token",
    ),
    *fields("stream", PROMPT, max_tokens=("a",), n_ctx=("a",), p_min=("a",), top_k=("a",)),
    *fields("stream a file", "no such model", PROMPT, max_tokens=("a",), n_ctx=("a",)),
    ("stream a file", (5, PROMPT), {}, "path is 5, it must be"),
    *fields("chat", ASKS, thinking=("yes", -1), max_tokens=(0,)),
    ("chat", (ASKS,), {"options": {"thinking": True}}, "must be"),
    ("chat", ([{"role": "user"}],), {}, "template"),
    *fields("ChatOptions", thinking=(1,), reasoning_effort=(5,)),
    ("ChatOptions", (), {"budget": True}, "must be"),
    ("ChatOptions", (), {"variables": {"messages": []}}, "'messages' cannot be set"),
    *(("save", (bad,), {}, f"path is {bad!r}") for bad in BAD_PATHS),
    *(("restore", (bad,), {}, f"path is {bad!r}") for bad in BAD_PATHS),
    *fields("hidden_states", "import", point=("middle",), rows=(3,)),
    ("hidden_states", ([],), {}, "the prompt is empty"),
    ("hidden_states", ([5] * 257,), {}, "has 257 tokens and the context 256"),
    *(("tokenize", (bad,), {}, f"text is {bad!r}") for bad in (b"abc", None, 5)),
    ("detokenize", ([1.5],), {}, "tokens[0] is 1.5"),
    ("detokenize", (5,), {}, "tokens is 5"),
    # -- sessions and settings
    *(("of", (bad,), {}, f"model is {bad!r}") for bad in ("path", Path("path"), None)),
    *(("Session", (bad,), {}, f"settings is {bad!r}") for bad in ({"n_ctx": 512}, 512, "auto")),
    *(("BatchSession", (bad,), {}, f"settings is {bad!r}") for bad in ({"n_ctx": 512}, 512)),
    *(("BatchSession", (SMALL, n), {}, f"n_sequences is {n!r}") for n in NUMBERS),
    ("BatchSession", (SMALL, 33), {}, "needs at least 66"),
    *(
        ("Session", (Settings(**SEEDED, draft_n_max=n, **{name: n + 1}),), {}, f"at least {n + 2}")
        for n in (1, 6)
        for name in ("n_ubatch", "n_batch")
    ),
    (
        *("Session", (settings(3, draft_window=64, prompt_sync="full"),), {}),
        "draft_window 64 is not with prompt_sync 'full'",
    ),
    ("Session", (settings(3, draft_vocab=[N_VOCAB]),), {}, "draft_vocab: token"),
    ("Session", (settings(3, draft_vocab=[3, 3]),), {}, "draft_vocab: a token"),
    ("Session", (settings(3, draft_vocab=[-1]),), {}, "draft_vocab: token"),
    *fields(
        "RopeScaling",
        rope_scaling=("ntk",),
        rope_freq_base=(0,),
        rope_freq_scale=(2, math.nan),
        yarn_orig_ctx=(0,),
        yarn_ext_factor=(-1,),
        yarn_beta_fast=(0,),
        yarn_beta_slow=("1",),
    ),
    ("Settings", (), {"draft_n_max": DRAFT_LIMIT, "synthetic_acceptance": (0.5,)}, "each of the"),
    # -- models
    *(("Model", (bad,), {}, f"path is {bad!r}") for bad in ("", None, 5, b"a")),
    *fields(
        "Model",
        n_gpu_layers=("1", 1.0, None, True, 2**40),
        rpc_timeout=("1", 1.0, None, True, -1),
        mtp=("no", 0),
        tensor_split=(0.5, "1", ("1",)),
        device=(3,),
        override_tensor=("ffn=CPU",),
        split_mode=("tensor",),
        main_gpu=(-1,),
        use_mmap=(2,),
        moe_cache_size=(-1,),
    ),
    *(("Model", (), {"lora": bad}, "lora") for bad in BAD_ADAPTERS),
    ("Model", (), {"device": "CUDA7"}, "device 'CUDA7' is not there; there is "),
    ("Model", (), {"device": ["a", "a"]}, "'a' is named twice"),
    ("Model", (), {"override_tensor": {"(": "CPU"}}, "'(' is not a regular expression"),
    ("Model", (), {"override_tensor": {"blk.77.": "CPU"}}, "has a name with 'blk.77.'"),
    ("Model", (), {"override_tensor": {"ffn": "TPU"}}, "there is no device 'TPU'; there is CPU"),
    ("Model", (), {"split_mode": "tensor"}, "it must be one of none, layer, row"),
    *(("Model", (), {name: 1}, "has no experts") for name in ("n_cpu_moe", "moe_cache_size")),
    ("Model", (), {"cpu_moe": True}, "has no experts"),
    # -- grammars
    *(
        ("Grammar", (make,), {}, words)
        for make, words in (
            (lambda: Grammar.json_schema('{"type": "objec"}'), "JSON schema cannot be used"),
            (lambda: Grammar.json_schema({"if": {}}), "Unimplemented keys: "),
            (lambda: Grammar.json_schema("{"), "JSON schema is not JSON"),
            (lambda: Grammar.json_schema("5"), "it must be an object"),
            (lambda: Grammar.json_schema({"a": math.nan}), "is not JSON"),
            (lambda: Grammar.json_schema({"minimum": 5, "maximum": 3, "type": "integer"}), "Unsat"),
            (lambda: Grammar.regex("(a"), "regular expression cannot be used"),
            (lambda: Grammar.regex(""), "must be text, and not empty"),
            (lambda: Grammar.lark("start: a"), "Lark grammar cannot be used"),
            (lambda: Grammar("yaml", "a"), "one of gbnf"),
            (lambda: Grammar.regex("(" * 501), "more than 500 parentheses"),
            (lambda: Grammar.regex("a" * 300_000), "more than 262,144 characters"),
        )
    ),
]


@pytest.fixture(scope="module")
def on(demo: Model) -> Iterator[On]:
    """A session and a batch, which work after all of it; a number of numpy reaches the library."""
    with ExitStack() as stack:
        session = stack.enter_context(Session(demo, settings(2, n_ctx=256)))
        batch = stack.enter_context(BatchSession(demo, SMALL, np.int64(2)))  # type: ignore[arg-type]
        assert type(batch.n_sequences) is int
        wanted = session.generate(PROMPT, max_tokens=9, ignore_eos=True).run().tokens
        yield SimpleNamespace(demo=demo, session=session, batch=batch)
        assert session.generate(PROMPT, max_tokens=9, ignore_eos=True).run().tokens == wanted
        assert batch.generate(ONE, max_tokens=2).run().results[0].tokens == wanted[:2]


@pytest.mark.parametrize(("call", "arguments", "options", "words"), ROWS)
def test_it_is_named(
    on: On, call: str, arguments: tuple[Any, ...], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        CALLS[call](on, *arguments, **options)


@pytest.mark.parametrize("drawn", [False, True])
def test_a_session_goes_on_after_a_text_that_failed(demo: Model, drawn: bool) -> None:
    """Where verification finds nothing to choose, whatever was drafted."""
    with Session(demo, settings(2, draft_sampling=drawn)) as session:
        for sampling in (
            Sampling(1.0, logits_processors=[no_logits]),
            Sampling(0.0, logit_bias=NOTHING),
        ):
            with pytest.raises(UsageError):
                session.generate(PROMPT, max_tokens=9, sampling=sampling).run()
            assert len(session.generate(PROMPT, max_tokens=9, ignore_eos=True).run().tokens) == 9
