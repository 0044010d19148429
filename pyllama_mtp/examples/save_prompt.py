"""A long prompt, processed once and kept in a file for other sessions.

    python -m pyllama_mtp.examples.save_prompt [--model FILE] [--text FILE] [--output FILE]

The file holds the model's state and the MTP head's, so drafts work at once as well.
"""

from __future__ import annotations

import argparse
import tempfile
import textwrap
from pathlib import Path

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.models.demo import demo_path

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default=demo_path(), metavar="FILE")
parser.add_argument("--text", type=Path, metavar="FILE", help="default: a module of Python's")
parser.add_argument("--output", type=Path, metavar="FILE", help="default: a temporary file")
args = parser.parse_args()

path = args.text or Path(textwrap.__file__)
document = path.read_text(encoding="utf-8")[:2000]
question = "\n\n\ndef main"
settings = Settings(n_ctx=2048, draft_n_max=3)
with Model(args.model) as model, tempfile.TemporaryDirectory() as folder:
    saved = args.output or Path(folder) / "document.prompt"
    with Session(model, settings) as session:
        t = session.process(document)
        session.save(saved)
        size = saved.stat().st_size / 2**20
        print(f"{t.n_prompt} tokens in {t.prefill_s:.2f} s, saved as {size:.1f} MiB")
        expected = session.generate(document + question, max_tokens=32).run().text
    with Session(model, settings) as session:  # usually in another process
        session.restore(saved)
        answer = session.generate(document + question, max_tokens=32).run()
        t = answer.telemetry
        print(f"restored; {t.n_prompt - t.n_cached} tokens were left, {t.prefill_s:.2f} s")
        print(f"{sum(t.accepted)} drafts accepted")
        print("the same text" if answer.text == expected else "another text")
