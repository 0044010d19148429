"""bench/dropin.py: what is made of a run of llama-cpp-python's tests."""

from __future__ import annotations

from pathlib import Path

import dropin
from dropin import Outcome

PASSED = Outcome("passed")
REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_llama" name="test_a" time="0.1" />
<testcase classname="tests.test_llama" name="test_b[x-True]" time="0.1">
<failure message="at 0x7f12abcd9900: no"/></testcase>
<testcase classname="tests.test_llama" name="test_c"><skipped message="nothing there"/></testcase>
</testsuite></testsuites>"""


def test_outcomes_are_read_without_addresses(tmp_path: Path) -> None:
    (tmp_path / "r.xml").write_text(REPORT)
    assert dropin.outcomes(tmp_path / "r.xml") == {
        "test_llama::test_a": PASSED,
        "test_llama::test_b[x-True]": Outcome("failed", "at 0x...: no"),
        "test_llama::test_c": Outcome("skipped", "nothing there"),
    }


def both(name: str, outcome: Outcome) -> dict[str, dict[str, Outcome]]:
    return {variant: {"test_llama::a": PASSED, name: outcome} for variant in dropin.VARIANTS}


def test_what_is_a_problem() -> None:
    explained = next(iter(dropin.EXPLAINED))
    assert not dropin.problems(both("test_llama::b", PASSED))
    assert not dropin.problems(both(explained, Outcome("failed", "wants 1")))
    assert (
        "no reason is known"
        in dropin.problems(both("test_llama::b", Outcome("error", "7")))["test_llama::b"]
    )
    differ = both(explained, Outcome("failed", "wants 1"))
    differ["patched"][explained] = Outcome("failed", "wants 2")
    assert list(dropin.problems(differ)) == [explained], "failing in another way counts too"
    different = next(iter(dropin.DIFFERENT))
    rounded = both(different, PASSED)
    rounded["patched"][different] = Outcome("failed", "wants 3")
    assert not dropin.problems(rounded)
    page = dropin.render(rounded, [])
    assert "1 of 2 tests end alike" in page and dropin.DIFFERENT[different] in page
    assert list(dropin.problems(both(different, Outcome("failed", "wants 3")))) == [different]
    missing = both("test_llama::b", PASSED)
    del missing["patched"]["test_llama::b"]
    assert list(dropin.problems(missing)) == ["test_llama::b"]
    assert "1 tests are not as they should be" in dropin.render(missing, ["- Date: today"])
