"""bench/dropin.py: what is made of a run of llama-cpp-python's tests, and the models for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dropin
from benchkit import tinymodels
from dropin import Outcome

from pyllama_mtp.llama import native

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
    missing = both("test_llama::b", PASSED)
    del missing["patched"]["test_llama::b"]
    assert list(dropin.problems(missing)) == ["test_llama::b"]
    assert "1 tests are not as they should be" in dropin.render(missing, ["- Date: today"])


def vocabulary(path: Path) -> Path:
    """A vocabulary file of the usual kind, tiny."""
    from gguf import GGUFWriter, TokenType

    writer = GGUFWriter(path, "llama")
    tokens = [b"<unk>", b"<s>", b"</s>", *(f"<0x{i:02X}>".encode() for i in range(256))]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


GENERATE = """
import itertools, sys
import llama_cpp
for name in sys.argv[1:]:
    llama = llama_cpp.Llama(name, n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False)
    tokens = list(itertools.islice(llama.generate([65, 66, 67], temp=0.0), 4))
    print(len(tokens), llama._is_recurrent)
"""


def test_the_stand_ins_load_and_generate(tmp_path: Path, llama_cpp_folder: Path) -> None:
    tokens = vocabulary(tmp_path / "v.gguf")
    files = [
        tinymodels.transformer(tmp_path / "transformer.gguf", tokens),
        tinymodels.recurrent(tmp_path / "recurrent.gguf", tokens),
    ]
    environment = {
        **os.environ,
        "LLAMA_CPP_LIB_PATH": str(native.locate("patched")[0]),
        "PYTHONPATH": str(llama_cpp_folder),
    }
    command = [sys.executable, "-c", GENERATE, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["4 False", "4 True"]
