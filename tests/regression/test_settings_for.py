"""Settings by the model: "auto" without a head, a context beyond its training."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from pyllama_mtp import BatchSession, Model, Session, Settings
from pyllama_mtp.errors import UsageError

PROMPT = "import os\n"


@pytest.mark.parametrize("kind", [Session, BatchSession])
def test_auto_needs_no_head(
    demo: Model, demo_file: Path, kind: type[Session] | type[BatchSession]
) -> None:
    small = Settings(n_ctx=256, n_threads=1)
    with Session(demo, small) as session:
        expected = session.generate(PROMPT, max_tokens=12).run().text
    with Model(demo_file, mtp=False) as model:
        with kind(model, small) as made:
            if isinstance(made, Session):
                assert made.generate(PROMPT, max_tokens=12).run().text == expected
            else:
                (answer,) = made.generate([PROMPT], max_tokens=12).run().results
                assert answer.text == expected
        with pytest.raises(UsageError, match="without an MTP head; use draft_n_max=0 or 'auto'"):
            kind(model, replace(small, draft_n_max=2))


def test_a_context_longer_than_the_model_knows(
    demo: Model, caplog: pytest.LogCaptureFixture
) -> None:
    for n_ctx in (demo.n_ctx_train, demo.n_ctx_train + 256):
        assert not caplog.records
        Session(demo, Settings(n_ctx=n_ctx, n_threads=1)).close()
    (record,) = [record for record in caplog.records if "trained for" in record.getMessage()]
    assert record.levelno == logging.WARNING and "4352 tokens is longer" in record.getMessage()
