"""Published figures: the file that is shipped, and files that are not right."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.published import read_published

HEAD = "source,model,hardware,n_prompt,mode,prefill_tps,decode_tps,elapsed_s\n"


def test_the_shipped_figures() -> None:
    """The original report's, on an RTX 3090."""
    figures = read_published()
    sources = {figure.source for figure in figures}
    assert sources == {"turboquant-147-before", "turboquant-147-after"}
    assert {figure.n_max for figure in figures} == {0, 2, 3, 4}
    (found,) = (
        f for f in figures if (f.source, f.n_prompt, f.n_max) == ("turboquant-147-before", 1024, 4)
    )
    assert (found.hardware, found.prefill_tps, found.decode_tps) == ("RTX 3090", 455.82, 143.21)


def test_the_checkout_shows_the_same_file_beside_the_other_results() -> None:
    link = Path(__file__).parents[2] / "bench" / "published.csv"
    assert read_published(link) == read_published()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no column source, model"),
        (HEAD + "s,m,h,1024,mtp,1,1,1\n", "line 2: not a published figure"),
        (HEAD + "s,m,h,1024,no-mtp,1,1,1\ns,m,h,0,no-mtp,1,1,1\n", "line 3"),
        (HEAD + "s,m,h,1024,no-mtp,0,1,1\n", "line 2"),
        (HEAD + "s,m,h,1024,no-mtp\n", "line 2"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_file_that_is_not_right(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "p.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=message):
        read_published(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_published(tmp_path / "none.csv")
