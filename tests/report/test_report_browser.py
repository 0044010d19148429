"""The report's page in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp.measure.page import write_report
from pyllama_mtp.measure.records import read_cells

from .conftest import MEASURED, make_matrix

PHONE, WIDE = 360, 1600

#: What of each picture is there to be seen: its pixels are counted by colour, on a canvas.
PICTURES = """
const hex = (r, g, b) => '#' + [r, g, b].map(v => v.toString(16).padStart(2, '0')).join('');
return Promise.all([...document.querySelectorAll('img')].map(async img => {
  await img.decode();
  const canvas = document.createElement('canvas');
  canvas.width = img.naturalWidth; canvas.height = img.naturalHeight;
  const context = canvas.getContext('2d');
  context.drawImage(img, 0, 0, canvas.width, canvas.height);
  const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
  const colors = {};
  for (let i = 0; i < data.length; i += 4) {
    const color = hex(data[i], data[i + 1], data[i + 2]);
    colors[color] = (colors[color] || 0) + 1;
  }
  const kept = Object.fromEntries(Object.entries(colors).filter(([, n]) => n > 20));
  const box = img.getBoundingClientRect();
  return {plot: img.dataset.plot, natural: img.naturalWidth, shown: box.width, left: box.left,
          right: box.right, alt: img.alt, source: img.currentSrc, colors: kept};
}));
"""


def show(browser: Any, index: Path, width: int) -> None:
    """Open the page in a window of this many CSS pixels."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get_log("browser")  # what earlier pages said
    browser.get(index.as_uri())


def check(browser: Any, width: int, pictures: int) -> list[dict[str, Any]]:
    """What holds for every page at every width; returns its pictures."""
    found: list[dict[str, Any]] = browser.execute_script(PICTURES)
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    assert browser.execute_script("return window.innerWidth") == width
    overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.execute_script(overflow) == 0
    # Only tables and pictures may be wider than the screen, in containers of their own.
    beyond = browser.execute_script(
        "return [...document.querySelectorAll('main *')]"
        ".filter(e => !e.closest('.scroll table, figure > *'))"
        ".filter(e => e.getBoundingClientRect().right > window.innerWidth + 0.5)"
        ".map(e => e.outerHTML)"
    )
    assert beyond == []
    fetched = browser.execute_script("return performance.getEntriesByType('resource')")
    assert [e["name"] for e in fetched if not e["name"].startswith("data:")] == []
    assert len(found) == pictures
    for picture in found:
        assert picture["natural"] > 0 and picture["alt"]
        assert picture["left"] >= 0
    return found


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a matrix that was measured."""
    folder = tmp_path_factory.mktemp("report")
    return write_report(read_cells(MEASURED), folder)[0]


def test_the_plots_are_there_on_a_wide_screen_and_on_a_phone(browser: Any, real: Path) -> None:
    show(browser, real, WIDE)
    wide = check(browser, WIDE, 5)
    assert wide[0]["right"] <= wide[1]["left"]  # side by side
    assert "SYNTHETIC ACCEPTANCE" in browser.find_element("class name", "warning").text
    show(browser, real, PHONE)
    narrow = check(browser, PHONE, 5)
    for picture in (*wide, *narrow):
        # The curves of depths 2 to 4.
        assert {"#ff800e", "#ababab", "#595959"} <= set(picture["colors"]), picture
    assert all(picture["shown"] >= 400 for picture in narrow), "wide enough to be read"


def test_the_table_is_whole_on_a_usual_screen_and_scrolls_by_itself_on_a_phone(
    browser: Any, real: Path
) -> None:
    for width, scrolls in ((1300, False), (PHONE, True)):
        show(browser, real, width)
        (table,) = browser.find_elements("css selector", ".scroll")
        inside, outside = table.get_property("scrollWidth"), table.get_property("clientWidth")
        assert (inside > outside) == scrolls and outside > 0


@pytest.mark.long
@pytest.mark.parametrize("width", [PHONE, WIDE])
def test_long_names_many_series_and_skipped_cells(browser: Any, tmp_path: Path, width: int) -> None:
    long = "a-model-with-a-rather-long-name-and-no-place-to-break-it-" * 3 + ".gguf"
    cells = [
        *make_matrix(1, model=long),
        *make_matrix(2, model=long, variant="upstream"),
        *make_matrix(3, model=long, program="llama-server", depths=(0, 3)),
        *make_matrix(4, repeat=0, skipped="x" * 200),
    ]
    index, *_ = write_report(cells, tmp_path)
    show(browser, index, width)
    check(browser, width, 6)
