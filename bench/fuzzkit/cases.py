"""What is done with one damaged file, and what that comes to; runs in a process of its own.

Only expected errors may come back, :class:`PyllamaMtpError`: anything else raised is a finding, as
is the end of the process, a time limit and a memory limit, which the pool sees to.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fuzzkit import otherfiles
from fuzzkit.document import Document, known_arrays, read_document
from fuzzkit.edits import Buffer, Edit, apply
from fuzzkit.models import Mutator
from pyllama_mtp import Model, PyllamaMtpError, Session, Settings
from pyllama_mtp.errors import NoMtpHeadError, PromptFileError
from pyllama_mtp.models import draftvocab
from pyllama_mtp.models.ggufinfo import validate_model_file

KINDS = ("model", "prompt", "draft-vocab")
REFUSED, NATIVE, LATER, WORKS, FINDING = (
    "refused by the validator",
    "refused by llama.cpp, with an error",
    "loaded, refused later with an error",
    "loaded and generated",
    "finding",
)
OUTCOMES = (REFUSED, NATIVE, LATER, WORKS, FINDING)
SETTINGS = Settings(n_ctx=128, n_threads=1, n_batch=32, n_ubatch=32, draft_n_max=2)
PROMPT = "def add(a, b):\n    return"
N_GENERATED = 4


@dataclass(frozen=True)
class Result:
    """How a case ended: one of OUTCOMES, and the error's words or the traceback."""

    outcome: str
    detail: str = ""


class Cases:
    """Makes and runs cases on one base model; kept for the life of a process."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.base, self.folder = base, folder
        self._run: dict[str, Callable[[Path], Result]] = {
            "model": run_model,
            "prompt": self._run_prompt,
            "draft-vocab": self._run_vocab,
        }

    def edits(self, kind: str, seed: int) -> list[Edit]:
        """The edits of a case."""
        if kind == "model":
            return self._mutator.edits(seed)
        if kind == "prompt":
            header = otherfiles.header(self._prompt)
            sizes = {name: size for name, size, _ in header["sections"]}
            return otherfiles.prompt_edits(seed, sizes, list(header["identity"]))
        return otherfiles.vocab_edits(seed, self._model.n_vocab)

    def run(self, kind: str, edits: list[Edit]) -> Result:
        """Write the file, use it, remove it."""
        data: list[Buffer]
        if kind == "model":
            data = apply(self._document, edits, self._known)
        elif kind == "prompt":
            data = [otherfiles.apply_prompt(self._prompt, edits)]
        else:
            data = [otherfiles.apply_vocab(self._vocab, edits)]
        path = self.folder / f"case.{'gguf' if kind == 'model' else 'bin'}"
        with path.open("wb") as file:
            file.writelines(data)
        try:
            return self._run[kind](path)
        except PyllamaMtpError:
            raise
        except Exception:
            return Result(FINDING, traceback.format_exc(limit=-6))
        finally:
            path.unlink()

    # -- the base and what belongs to it -------------------------------------------------------

    @cached_property
    def _document(self) -> Document:
        return read_document(self.base)

    @cached_property
    def _known(self) -> dict[int, bytes]:
        return known_arrays(self._document)

    @cached_property
    def _mutator(self) -> Mutator:
        return Mutator(self._document)

    @cached_property
    def _model(self) -> Model:
        return Model(self.base)

    @cached_property
    def _session(self) -> Session:
        return Session(self._model, SETTINGS)

    @cached_property
    def _prompt(self) -> bytes:
        self._session.process(PROMPT)
        path = self.folder / "good.prompt"
        self._session.save(path)
        self._session.reset()
        return path.read_bytes()

    @cached_property
    def _vocab(self) -> bytes:
        tokenizer = draftvocab.read_tokenizer(self.base)
        default = draftvocab.default_ranking(tokenizer)
        ranking = draftvocab.measure_ranking([list(range(400))], default)
        path = self.folder / "good.json"
        kept = draftvocab.Ranking(ranking.ids[:600], ranking.counts[:600])
        draftvocab.save(path, kept, tokenizer, "numbers")
        return path.read_bytes()

    @cached_property
    def _expected(self) -> list[int]:
        self._session.reset()
        return self._session.generate(PROMPT, max_tokens=N_GENERATED).run().tokens

    # -- what is done --------------------------------------------------------------------------

    def _run_prompt(self, path: Path) -> Result:
        """Restore and go on; whatever came of it, the session must still give the right text."""
        result = Result(WORKS)
        expected = self._expected
        try:
            self._session.reset()
            self._session.restore(path)
            self._session.generate(PROMPT, max_tokens=N_GENERATED).run()
        except PromptFileError as error:
            result = Result(REFUSED, str(error))
        except PyllamaMtpError as error:
            result = Result(LATER, str(error))
        self._session.reset()
        got = self._session.generate(PROMPT, max_tokens=N_GENERATED).run().tokens
        if got != expected:
            return Result(FINDING, f"afterwards the session gives {got}, not {expected}")
        return result

    def _run_vocab(self, path: Path) -> Result:
        """Draft from it; the text must be the one without it."""
        try:
            spec = Settings(**{**vars(SETTINGS), "draft_vocab": str(path)})
            with Session(self._model, spec) as session:
                got = session.generate(PROMPT, max_tokens=N_GENERATED).run().tokens
        except PyllamaMtpError as error:
            return Result(REFUSED, str(error))
        if got != self._expected:
            return Result(FINDING, f"the text is {got}, not {self._expected}")
        return Result(WORKS)


def run_model(path: Path) -> Result:
    """Check, load, generate a few tokens with MTP; without, where the head is what is missing."""
    mtp = True
    try:
        validate_model_file(path)
    except NoMtpHeadError:
        mtp = False
    except PyllamaMtpError as error:
        return Result(REFUSED, str(error))
    try:
        model = Model(path, mtp=mtp)
    except PyllamaMtpError as error:
        native = "llama.cpp cannot load it" in str(error)
        return Result(NATIVE if native else REFUSED, str(error))
    with model:
        try:
            return _generate(model, mtp)
        except PyllamaMtpError as error:
            return Result(LATER, str(error))


def _generate(model: Model, mtp: bool) -> Result:
    settings = SETTINGS if mtp else Settings(**{**vars(SETTINGS), "draft_n_max": 0})
    prompt: Any = model.tokenize(PROMPT) or [0]
    with Session(model, settings) as session:
        answer = session.generate(prompt, max_tokens=N_GENERATED, ignore_eos=True).run()
    if len(answer.tokens) != N_GENERATED:
        return Result(FINDING, f"{len(answer.tokens)} tokens: {answer.finish_reason}")
    model.check_tokens(np.array(answer.tokens))
    model.detokenize(answer.tokens, special=True)
    return Result(WORKS)
