"""A worker's process that dies or stalls is an error that names it, and another one at its address
can be used. At every kind of message, and what is then refused: test_cut_line.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from pyllama_mtp import Model, Session
from pyllama_mtp.errors import WorkerLostError

from ..marks import usual
from ..workers import PROMPT, SMALL, running_worker, text_of


@pytest.mark.parametrize(
    ("number", "reason"), usual((signal.SIGKILL, ""), long=[(signal.SIGSTOP, "no answer in 2 s")])
)
def test_its_process_is_lost(
    demo: Model, demo_file: Path, number: signal.Signals, reason: str
) -> None:
    with running_worker() as (process, address):
        with (
            Model(demo_file, rpc_servers=address, rpc_timeout=2) as model,
            Session(model, SMALL) as session,
        ):
            generation = session.generate(PROMPT, max_tokens=12)
            next(iter(generation))
            os.killpg(process.pid, number)
            with pytest.raises(WorkerLostError, match=f"{address} is lost .*{reason}"):
                generation.run()
            # A token made of the lost worker's zeros would be another one.
            assert text_of(demo).startswith(generation.text) and generation.text
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with (
            running_worker("--port", address.split(":")[1]) as (_, again),
            Model(demo_file, rpc_servers=again) as model,
        ):
            assert again == address and text_of(model) == text_of(demo)
