"""Token bytes to text: characters split over tokens, stop strings split over pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from pyllama_mtp.answer import TextStream


def pieces(data: Iterable[bytes], stop: Sequence[str] = ()) -> tuple[list[str], bool]:
    """All pieces that come out, the last one included, and whether a stop string was seen."""
    stream = TextStream(stop)
    out = []
    for chunk in data:
        out.append(stream.feed(chunk))
        if stream.stopped:
            return out, True
    return [*out, stream.feed(b"", final=True)], False


def each_byte(text: str) -> list[bytes]:
    return [bytes([byte]) for byte in text.encode()]


@pytest.mark.parametrize("text", ["naïve", "日本語", "a🙂b"])
def test_a_character_comes_whole(text: str) -> None:
    out, _ = pieces(each_byte(text))
    assert "".join(out) == text
    assert "\ufffd" not in "".join(out)


def test_bytes_that_are_no_text() -> None:
    assert "".join(pieces([b"a\xffb"])[0]) == "a\ufffdb"
    assert "".join(pieces(["é".encode()[:1]])[0]) == "\ufffd", "half a character at the end"


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize(
    ("text", "stop", "wanted"),
    [
        ("one two\n\nUser: three", "\n\nUser:", "one two"),
        ("aaab!", "aab", "a"),
        ("ja, 終わり mehr", "終わり", "ja, "),
    ],
)
def test_stop_string_across_pieces(text: str, stop: str, wanted: str, size: int) -> None:
    data = text.encode()
    out, stopped = pieces([data[i : i + size] for i in range(0, len(data), size)], [stop])
    assert ("".join(out), stopped) == (wanted, True)


def test_what_may_become_a_stop_string_is_held_and_then_given() -> None:
    stream = TextStream(["END"])
    assert stream.feed(b"abE") == "ab"
    assert stream.feed(b"N") == ""
    assert stream.feed(b"X") == "ENX"
    assert stream.feed(b"EN") == ""
    assert stream.feed(b"", final=True) == "EN"
    assert not stream.stopped


def test_the_first_of_several_stop_strings_counts() -> None:
    assert pieces([b"a##b**c"], ["**", "##"]) == (["a"], True)
    assert pieces([b"xaab"], ["aab", "ab"]) == (["x"], True)
