"""The server of this package, as the scripts start it."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from pyllama_mtp.measure.peers import LlamaServer


class OurServer(LlamaServer):
    """`pyllama-mtp serve`, the installed one. At its end it is given the time to store prompts."""

    def __init__(self, model: Path, threads: int, *options: object) -> None:
        program = Path(sysconfig.get_path("scripts"), "pyllama-mtp")
        words = ["serve", "--model", model, "--threads", threads, *options]
        super().__init__(str(program), [str(word) for word in words])

    def __exit__(self, *raised: object) -> None:
        try:
            self.process.terminate()
            self.process.wait(60)
        finally:
            super().__exit__(*raised)
