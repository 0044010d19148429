"""`echo` with `logprobs`: the prompt's tokens are scored, as lm-eval's loglikelihood tasks ask."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from pyllama_mtp import Model

from ..regression.support import last_logits
from .conftest import NAME, Running

TEXT = 'import os\n\nprint("naïve", os.path.join("a", "b"))'


#: Tasks of lm-eval that bring their documents along: which text goes on best, and a last word.
TASKS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "choice": (
        {
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
        },
        [
            {
                "text": "for name in os.listdir(path):\n    ",
                "choices": ["))((", "print(name)"],
                "answer": 1,
            },
            {
                "text": "def add(a, b):\n    return",
                "choices": [" a + b", " purple"],
                "answer": 1,
            },
        ],
    ),
    "word": (
        {
            "output_type": "loglikelihood",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{word}}",
            "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
        },
        [
            {"text": "import json\n\ndata = json.load", "word": "(file)"},
            {"text": "for i in", "word": " range"},
        ],
    ),
}


def log_softmax(logits: Any) -> Any:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted, dtype=np.float64).sum())


def score(server: Running, prompt: object, **options: Any) -> Any:
    """The choices of the request that lm-eval sends."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    got = server.post("/v1/completions", {"model": NAME, **body, "echo": True, **options})
    assert got.status_code == 200, got.text
    return got.json()["choices"]


def test_the_prompts_tokens_are_scored(shared: Running, demo: Model) -> None:
    """Each has the log probability that the text before it gives it, also those in the cache."""
    tokens = demo.tokenize(TEXT)
    assert len(tokens) > 16, "more than one part"
    rows = [log_softmax(last_logits(demo, tokens[:i])) for i in range(1, len(tokens) + 1)]
    for prompt in (TEXT, tokens):
        shared.complete(tokens[:12], max_tokens=1)
        (choice,) = score(shared, prompt, logprobs=2)
        found = choice["logprobs"]
        assert choice["text"].startswith(TEXT) and len(choice["text"]) > len(TEXT)
        assert len(found["tokens"]) == len(tokens) + 1
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        for i, wanted in enumerate(rows, start=1):
            token = tokens[i] if i < len(tokens) else int(wanted.argmax())
            assert found["token_logprobs"][i] == pytest.approx(wanted[token], abs=0.02)
            best = max(found["top_logprobs"][i].values())
            assert best == pytest.approx(wanted.max(), abs=0.02)
        pieces = [demo.piece(token, special=True) for token in tokens]
        ends = [len(b"".join(pieces[:i]).decode("utf-8", "ignore")) for i in range(len(tokens) + 1)]
        assert found["text_offset"] == ends


def test_prompts_are_scored_beside_other_answers(shared: Running) -> None:
    """Prompts of a batch, and a conversation that goes on, change nothing."""
    texts = [TEXT, "A list is", "x"]
    alone = [score(shared, text)[0] for text in texts]
    stream = shared.complete("def", max_tokens=200, stream=True, extra_body={"ignore_eos": True})
    next(stream)
    for one, other in zip(alone, score(shared, texts), strict=True):
        assert one["text"] == other["text"]
        logprobs = [choice["logprobs"]["token_logprobs"][1:] for choice in (one, other)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=0.02)
    assert len(list(stream)) > 10


@pytest.mark.parametrize("more", [{}, {"return_progress": True}])
def test_a_stream_begins_with_the_prompt(shared: Running, more: dict[str, Any]) -> None:
    (whole,) = score(shared, TEXT, max_tokens=8)
    got = shared.complete(TEXT, max_tokens=8, logprobs=1, echo=True, stream=True, extra_body=more)
    chunks = [chunk.choices[0] for chunk in got]
    assert "".join(chunk.text for chunk in chunks) == whole["text"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        told = [one for chunk in chunks for one in getattr(chunk.logprobs, name)]
        assert (
            told == pytest.approx(whole["logprobs"][name], abs=0.02)
            if name != "tokens"
            else (told == whole["logprobs"][name])
        )


def test_echo_alone_and_an_answer_without_text(shared: Running, demo: Model) -> None:
    assert shared.complete("A list", max_tokens=4, echo=True).choices[0].text.startswith("A list")
    end = demo.detokenize([demo.eos], special=True)
    options = {"logit_bias": {str(demo.eos): 100.0}}
    (choice,) = score(shared, "A list", **options)
    assert choice["text"] == "A list" and choice["logprobs"]["tokens"][-1] == end


def test_what_the_tokenizer_is(shared: Running, demo: Model) -> None:
    """What lm-eval's remote tokenizer reads."""
    info = httpx.get(f"{shared.url}/tokenizer_info").json()
    assert info["eos_token"] == demo.detokenize([demo.eos], special=True)
    assert info["chat_template"] == demo.chat_template
    got = shared.post("/tokenize", {"prompt": TEXT, "add_special_tokens": False}).json()
    assert got["tokens"] == demo.tokenize(TEXT, add_special=False)


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("lm_eval"), reason="lm-eval[api] is not installed")
def test_lm_eval_runs_its_tasks(shared: Running, demo: Model, tmp_path: Path) -> None:
    """Its results are those of the log probabilities that the model itself gives."""

    def likelihood(text: str, target: str) -> tuple[float, bool]:
        before, tokens = len(demo.tokenize(text)), demo.tokenize(text + target)
        rows = [log_softmax(last_logits(demo, tokens[:i])) for i in range(before, len(tokens))]
        pairs = list(zip(rows, tokens[before:], strict=True))
        best = all(row.argmax() == token for row, token in pairs)
        return float(sum(row[token] for row, token in pairs)), best

    for name, (task, documents) in TASKS.items():
        data = tmp_path / f"{name}.jsonl"
        data.write_text("\n".join(map(json.dumps, documents)))
        files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        usual = {"task": name, "test_split": "test", "target_delimiter": "", **files}
        (tmp_path / f"{name}.yaml").write_text(json.dumps({**usual, **task}))
    server = f"base_url={shared.url}/v1/completions,model={NAME},num_concurrent=2"
    command = ["lm_eval", "run", "--model", "local-completions", "--model_args", server]
    options = ["--tasks", ",".join(TASKS), "--include_path", tmp_path, "--output_path", tmp_path]
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
    env = {**os.environ, **offline, "HF_HOME": str(tmp_path)}
    done = subprocess.run([*command, *options], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.rglob("results*.json")
    found = json.loads(path.read_text())["results"]
    choices, words = (documents for _, documents in TASKS.values())
    right = [
        np.argmax([likelihood(one["text"], text)[0] for text in one["choices"]]) == one["answer"]
        for one in choices
    ]
    assert found["choice"]["acc,none"] == np.mean(right) == 0.5, "one of them is wrong on purpose"
    scores = [likelihood(one["text"], one["word"]) for one in words]
    perplexity = np.exp(-np.mean([logprob for logprob, _ in scores]))
    assert found["word"]["perplexity,none"] == pytest.approx(perplexity, rel=0.05)
    assert found["word"]["acc,none"] == np.mean([best for _, best in scores])
