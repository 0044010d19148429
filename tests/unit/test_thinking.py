"""Thought and answer told apart, however the text is cut into pieces."""

from __future__ import annotations

import pytest

from pyllama_mtp.chats.thinking import Splitter


def split(text: str, size: int, thinking: bool = False) -> tuple[str, str]:
    """(thought, answer) of a text that comes in pieces of `size` characters."""
    splitter, found = Splitter(thinking), {True: "", False: ""}
    for at in range(0, len(text), size):
        for piece in splitter.feed(text[at : at + size]):
            assert piece, "an empty piece"
            found[piece.thought] += piece
    for piece in splitter.feed("", final=True):
        found[piece.thought] += piece
    assert splitter.n_taken == len(text)
    return found[True], found[False]


@pytest.mark.parametrize(
    ("text", "thinking", "thought", "answer"),
    [
        ("<think>\nlet me\n\nsee\n</think>\n\n So. ", False, "let me\n\nsee", "So. "),
        ("let me see\n</think>\n\nSo.", True, "let me see", "So."),
        ("\n\n<think>a</think>b", False, "a", "b"),
        ("<think>\n\n</think>\n\nSo.", False, "", "So."),
        ("</think>So.", True, "", "So."),
        ("  So.\n", False, "", "  So.\n"),
        ("<thin ice", False, "", "<thin ice"),
        ("use <think>x</think> tags", False, "", "use <think>x</think> tags"),
        ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("<think>x < y </thin> z", False, "x < y </thin> z", ""),
        ("<think>no end </th", False, "no end </th", ""),
        ("<think>", False, "", ""),
        ("<thi", False, "", "<thi"),
        ("", True, "", ""),
    ],
)
def test_split(text: str, thinking: bool, thought: str, answer: str) -> None:
    for size in (1, 2, 3, 7, 100):
        assert split(text, size, thinking) == (thought, answer), size


def test_text_comes_as_soon_as_it_is_sure() -> None:
    splitter = Splitter(True)
    assert splitter.feed("one <") == ["one"], "white space may be the thought's end"
    assert splitter.feed(" two</think") == [" < two"]
    assert splitter.thinking and not splitter.answering
    (piece,) = splitter.feed(">\nSo")
    assert piece == "So" and not piece.thought and splitter.answering
