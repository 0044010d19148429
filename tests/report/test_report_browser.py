"""The report's page in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp.measure.page import write_report
from pyllama_mtp.measure.records import read_cells

from .conftest import MEASURED

PHONE, WIDE = 360, 1600

#: Where each picture is; one that cannot be drawn ends the script with an error.
PICTURES = """
return Promise.all([...document.querySelectorAll('img')].map(async img => {
  await img.decode();
  const box = img.getBoundingClientRect();
  return {natural: img.naturalWidth, shown: box.width, left: box.left, right: box.right,
          alt: img.alt};
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


def test_plots_and_table_are_there_on_a_wide_screen_and_on_a_phone(
    browser: Any, real: Path
) -> None:
    show(browser, real, WIDE)
    wide = check(browser, WIDE, 5)
    assert wide[0]["right"] <= wide[1]["left"]  # side by side
    assert "SYNTHETIC ACCEPTANCE" in browser.find_element("class name", "warning").text
    show(browser, real, PHONE)
    narrow = check(browser, PHONE, 5)
    assert all(picture["shown"] >= 400 for picture in narrow), "wide enough to be read"
