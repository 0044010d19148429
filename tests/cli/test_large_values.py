"""Options with the largest values, and with dots in their help."""

from __future__ import annotations

from types import ModuleType

from pyllama_mtp.cli.options import first_sentence
from pyllama_mtp.settings import MOST_TOKENS

from ..processes import Cli


def test_as_many_tokens_as_a_number_holds(fake: ModuleType, cli: Cli) -> None:
    fake.script[0] = lambda generation: setattr(generation, "finish_reason", "eos")
    assert cli("generate", "-m", "m.gguf", "-n", str(MOST_TOKENS), "hello").code == 0
    assert [entry[2] for entry in fake.log if entry[0] == "open"] == [MOST_TOKENS]


def test_an_ellipsis_does_not_end_a_sentence() -> None:
    assert (
        first_sentence("Of draft 1, 2, ... (0.8,0.7). And more.") == "Of draft 1, 2, ... (0.8,0.7)"
    )
