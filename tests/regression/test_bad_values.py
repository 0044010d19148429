"""A bad value is an error that names it, shows it and says what is right: a row a call.

The fields of Settings and Sampling by themselves: unit/test_settings.py; bodies of the server:
serve/test_limits.py; words of the command line: cli/test_bad_input.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyllama_mtp
from pyllama_mtp import BatchSession, Model, Session
from pyllama_mtp.errors import UsageError

from .support import settings

PROMPT = [5, 6, 7]
#: What the calls have, beside the public names: a session and a batch on the model `demo`.
NAMES: dict[str, Any] = {
    **{name: getattr(pyllama_mtp, name) for name in pyllama_mtp.__all__},
    **{"np": np, "nan": math.nan, "inf": math.inf, "Path": Path, "settings": settings},
    **{"PROMPT": PROMPT, "ASKS": [{"role": "user", "content": "a"}], "path": "no such model"},
    "NOTHING": dict.fromkeys(range(2048), -math.inf),
    "small": settings(1, n_ctx=64, n_batch=64, n_ubatch=64),
}

GENERATE: dict[str, tuple[Any, ...]] = {
    "stop": ([""], ["a", ""], [5], [None], b"", 5, {"a": 5}),
    "max_tokens": ("3", 2.5, 2.0, None, True, 0, np.float64(2), np.int64(0)),
    "sampling": ({"temperature": 1}, {}, 0.7, "greedy"),
    "ignore_eos": ("no", None),
    "draft": ("no", None, 0),
    "on_progress": (3,),
}
#: Arguments by call, each of which is named and shown: `max_tokens is '3'`.
NAMED: dict[str, dict[str, tuple[Any, ...]]] = {
    "session.generate(PROMPT, {})": {**GENERATE, "log_pairs": ("no",), "log_ties": (1,)},
    "batch.generate([PROMPT], {})": {**GENERATE, "logprobs": (-1,)},
    "session.process(PROMPT, {})": {"draft": ("no",)},
    "session.chat(ASKS, {})": {"thinking": ("yes",), "max_tokens": (0,)},
    "session.save({})": {"path": (5, None, b"a", "")},
    "session.restore({})": {"path": (5, None, b"a", "")},
    "session.hidden_states('import', {})": {"point": ("middle",), "rows": (3,)},
    "list(stream(demo, PROMPT, {}))": dict.fromkeys(("max_tokens", "n_ctx", "top_k"), ("a",)),
    "list(stream(path, PROMPT, {}))": dict.fromkeys(("max_tokens", "n_ctx", "top_k"), ("a",)),
    "ChatOptions({})": {"thinking": (1,), "reasoning_effort": (5,), "budget": (True,)},
    "demo.tokenize({})": {"text": (b"abc", None, 5)},
    "Session(demo, {})": {"settings": ({"n_ctx": 512}, 512, "auto")},
    "BatchSession(demo, small, {})": {"n_sequences": ("2", 2.0, None, True, 0, 257)},
    "RopeScaling({})": {
        **{"rope_scaling": ("ntk",), "rope_freq_base": (0,), "rope_freq_scale": (2, math.nan)},
        **{"yarn_orig_ctx": (0,), "yarn_ext_factor": (-1,), "yarn_beta_fast": (0,)},
        "yarn_beta_slow": ("1",),
    },
    "Model({})": {"path": ("", None, 5, b"a")},
    "Model(demo.path, {})": {
        "n_gpu_layers": ("1", 1.0, None, True, 2**40),
        "rpc_timeout": ("1", 1.0, None, True, -1),
        **{"mtp": ("no", 0), "device": (3,)},
        "tensor_split": (0.5, "1", ("1",), (), (-1.0, 2.0), (0.0, 0.0), (1.0,) * 99, (math.nan,)),
        **{"override_tensor": ("ffn=CPU",), "split_mode": ("tensor",), "main_gpu": (-1,)},
        **{"use_mmap": (2,), "moe_cache_size": (-1,)},
    },
}
#: Prompts, and what is said of them.
PROMPTS: list[tuple[Any, str]] = [
    *((bad, f"prompt is {bad!r}") for bad in (b"abc", bytearray(b"a"), None, 5, 1.5, {5: 6}, {5})),
    *((bad, f"prompt[0] is {bad[0]!r}") for bad in ([1.5], [2.0], ["a"], [None], [True])),
    *(([1, n], f"token id {n} ") for n in (2**40, 2**70, -1)),
]
#: Calls, and words of what is said.
CALLS: dict[str, str] = {
    "session.generate(np.array(5))": "prompt is array(5)",
    "session.generate([5, np.True_])": "prompt[1] is ",
    "session.process(b'abc')": "prompt is b'abc'",
    "list(stream(demo, b'abc'))": "prompt is b'abc'",
    "list(stream(5, PROMPT))": "path is 5, it must be",
    "batch.generate(None)": "prompts is None, it must be a list",
    "batch.generate({'a': 1})": "prompts is {'a': 1}, it must be a list",
    "batch.generate(b'abc')": "prompts is one text",
    "batch.generate(PROMPT)": "prompts[0]: prompt is 5, it must be text",
    "batch.generate(iter([]))": "there is no prompt",
    "batch.generate([[5], []])": "prompts[1]: the prompt is empty",
    "batch.generate([[5], [6] * 257])": "prompts[1]: the prompt has 257 tokens and the context 256",
    "batch.generate([[5], [10**6]])": "prompts[1]: token id 1000000 is not in the vocabulary",
    "batch.generate([PROMPT] * 2, max_tokens=[3, '3'])": "max_tokens is '3', it",
    "batch.generate([PROMPT] * 2, max_tokens=[3])": "max_tokens has 1 values for 2 prompts",
    "batch.generate([PROMPT], sampling=[5])": "sampling is 5, it must",
    "batch.generate([PROMPT] * 2, sampling=[None] * 3)": "sampling has 3 values for 2 prompts",
    "batch.generate([[5]] * 2, sampling=[None, Sampling(logit_bias={10**6: 1})])": "prompts[1]: to",
    "session.chat(ASKS, options={'thinking': True})": "must be",
    "session.chat([{'role': 'user'}])": "template",
    "session.chat(ASKS, thinking=-1)": "budget is -1",
    "session.hidden_states([])": "the prompt is empty",
    "session.hidden_states([5] * 257)": "has 257 tokens and the context 256",
    "session.generate('a', sampling=Sampling(grammar=Grammar.lark('start: <x>')))": "unknown speci",
    "ChatOptions(variables={'messages': []})": "'messages' cannot be set",
    "demo.detokenize([1.5])": "tokens[0] is 1.5",
    "demo.detokenize(5)": "tokens is 5",
    # -- sessions
    "Session('path')": "model is 'path'",
    "Session(Path('path'))": "model is PosixPath('path')",
    "BatchSession(demo, 512)": "settings is 512",
    "BatchSession(demo, small, 33)": "needs at least 66",
    "Session(demo, settings(1, n_ubatch=2))": "at least 3",
    "Session(demo, settings(6, n_batch=7, n_ubatch=7))": "at least 8",
    "Session(demo, settings(3, draft_window=64, prompt_sync='full'))": "draft_window 64 is not ",
    "Session(demo, settings(3, draft_vocab=[2048]))": "draft_vocab: token",
    "Session(demo, settings(3, draft_vocab=[3, 3]))": "draft_vocab: a token",
    "Session(demo, settings(2, draft_vocab='full', draft_head_type='iq1_s'))": "importance matrix",
    "Session(demo, settings(2, draft_vocab=300, draft_head_type='q4_k'))": "a row has 192",
    "Session(Model(demo.path, mtp=False), settings(2))": "without an MTP head; use draft_n_max",
    "settings(3, rope={'rope_freq_base': 0})": "rope is",
    # -- models
    "Model(demo.path, lora=None)": "lora",
    "Model(demo.path, lora='')": "lora",
    "Model(demo.path, lora=[('a', 'x')])": "lora",
    "Model(demo.path, lora=[('a', inf)])": "lora",
    "Model(demo.path, device='CUDA7')": "device 'CUDA7' is not there; there is ",
    "Model(demo.path, device=['a', 'a'])": "'a' is named twice",
    "Model(demo.path, override_tensor={'(': 'CPU'})": "'(' is not a regular expression",
    "Model(demo.path, override_tensor={'blk.77.': 'CPU'})": "has a name with 'blk.77.'",
    "Model(demo.path, override_tensor={'ffn': 'TPU'})": "there is no device 'TPU'; there is CPU",
    "Model(demo.path, split_mode='tensor')": "it must be one of none, layer, row",
    "Model(demo.path, n_cpu_moe=1)": "has no experts",
    "Model(demo.path, cpu_moe=True)": "has no experts",
    "Model(demo.path, moe_cache_size=1)": "has no experts",
    # -- grammars
    """Grammar.json_schema('{"type": "objec"}')""": "JSON schema cannot be used",
    "Grammar.json_schema({'if': {}})": "Unimplemented keys: ",
    "Grammar.json_schema('{')": "JSON schema is not JSON",
    "Grammar.json_schema('5')": "it must be an object",
    "Grammar.json_schema({'a': nan})": "is not JSON",
    "Grammar.json_schema({'minimum': 5, 'maximum': 3, 'type': 'integer'})": "Unsatisf",
    "Grammar.regex('(a')": "regular expression cannot be used",
    "Grammar.regex('')": "must be text, and not empty",
    "Grammar.lark('start: a')": "Lark grammar cannot be used",
    "Grammar('yaml', 'a')": "one of gbnf",
    "Grammar.regex('(' * 501)": "more than 500 parentheses",
    "Sampling(grammar='root ::= ' + '(' * 501)": "more than 500 parentheses",
    "Grammar.regex('a' * 300_000)": "more than 262,144 characters",
}
#: What verification finds nothing to choose in, whatever was drafted.
FAILING = {
    "logits_processors=[lambda ids, logits: logits[:5]]": "must give the",
    "logits_processors=[lambda ids, logits: logits * nan]": "must give the",
    "logits_processors=[lambda ids, logits: None]": "must give the",
    "logits_processors=[lambda ids, logits: np.full_like(logits, -inf)]": "exclude every token",
    "logit_bias=NOTHING": "exclude every token",
}


def rows() -> Iterator[tuple[str, str]]:
    """Each call, and what is said."""
    for call, named in NAMED.items():
        for name, values in named.items():
            for value in values:
                yield call.format(f"{name}={value!r}"), f"{name} is {value!r}"
    for prompt, words in PROMPTS:
        yield f"session.generate({prompt!r})", words
        yield f"batch.generate([PROMPT, {prompt!r}])", f"prompts[1]: {words}"
    yield from CALLS.items()
    for given, words in FAILING.items():
        for t in (0, 1):
            yield f"session.generate(PROMPT, sampling=Sampling({t}, {given})).run()", words
            yield f"drawing.generate(PROMPT, sampling=Sampling({t}, {given})).run()", words


@pytest.fixture(scope="module")
def names(demo: Model) -> Iterator[dict[str, Any]]:
    """What calls may name; the sessions go on after all of it. A number of numpy is a number."""
    with ExitStack() as stack:
        session = stack.enter_context(Session(demo, settings(2, n_ctx=256)))
        drawing = stack.enter_context(Session(demo, settings(2, n_ctx=256, draft_sampling=True)))
        batch = stack.enter_context(BatchSession(demo, NAMES["small"], np.int64(2)))  # type: ignore[arg-type]
        assert type(batch.n_sequences) is int
        yield {**NAMES, "demo": demo, "session": session, "drawing": drawing, "batch": batch}
        for one in (session, drawing):
            assert len(one.generate(PROMPT, max_tokens=9, ignore_eos=True).run().tokens) == 9
        assert batch.generate([PROMPT], max_tokens=2).run().results[0].tokens


def test_it_is_named(names: dict[str, Any]) -> None:
    for call, words in rows():
        with pytest.raises(UsageError, match=re.escape(words)):
            eval(call, names)
