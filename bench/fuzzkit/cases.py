"""Uses one damaged file, and judges the outcome; runs in a process of its own.

Any exception but a :class:`PyllamaMtpError` is a finding. So are the end of the process and limits
exceeded, which the pool notices.
"""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fuzzkit import otherfiles
from fuzzkit.document import Document, read_document, split
from fuzzkit.edits import Buffer, Edit, apply
from fuzzkit.models import Mutator
from pyllama_mtp import Model, PyllamaMtpError, Session, Settings
from pyllama_mtp.errors import NoMtpHeadError, PromptFileError
from pyllama_mtp.llama import trial
from pyllama_mtp.llama.vision import IMAGE_MARKER, Vision
from pyllama_mtp.models import draftvocab
from pyllama_mtp.models.ggufinfo import read_gguf, validate_model_file
from pyllama_mtp.models.mmproj import write_synthetic_mmproj
from pyllama_mtp.models.sidecar import NO_HEAD
from pyllama_mtp.models.surgery import drop_head, extract_head

#: Models: in one file, with the MTP head in another file, split into parts. Then files of ours.
MODELS = ("model", "head", "split")
KINDS = (*MODELS, "prompt", "draft-vocab", "mmproj")
REFUSED, NATIVE, ENDED, LATER, WORKS, FINDING = (
    "refused by the validator",
    "refused by llama.cpp, with an error",
    "ended the process that tries it first",
    "loaded, refused later with an error",
    "loaded and generated",
    "finding",
)
OUTCOMES = (REFUSED, NATIVE, ENDED, LATER, WORKS, FINDING)
SETTINGS = Settings(n_ctx=128, n_threads=1, n_batch=32, n_ubatch=32, draft_n_max=2)
PROMPT = "def add(a, b):\n    return"
N_GENERATED = 4
PICTURE = np.random.default_rng(0).integers(0, 255, (64, 96, 3), dtype=np.uint8)
N_PARTS = 2
#: Seconds for the process that first tries a file of another architecture than the demo's.
TRIAL_S = 15.0


@dataclass(frozen=True)
class Result:
    """How a case ended: one of OUTCOMES, and the error's words or the traceback."""

    outcome: str
    detail: str = ""


class Cases:
    """Makes and runs cases on one base model; kept for the life of a process."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.base, self.folder = base, folder

    def edits(self, kind: str, seed: int) -> list[Edit]:
        """The edits of a case; of several files the first edit tells which one is changed."""
        if kind in MODELS:
            mutators = self._mutators[kind]
            which = seed % len(mutators)
            edits = mutators[which].edits(seed)
            return [{"op": "file", "index": which}, *edits] if len(mutators) > 1 else edits
        if kind == "prompt":
            members = otherfiles.members(self._prompt)
            header = json.loads(members.pop(otherfiles.HEADER))
            return otherfiles.prompt_edits(seed, list(members), list(header["identity"]))
        if kind == "mmproj":
            return Mutator(self._encoder).edits(seed)
        return otherfiles.vocab_edits(seed, self._model.n_vocab)

    def run(self, kind: str, edits: list[Edit]) -> Result:
        """Write the file, use it, remove it."""
        written: dict[Path, list[Buffer]] = {}
        if kind in MODELS:
            which = 0
            if edits and edits[0]["op"] == "file":
                which, edits = edits[0]["index"], edits[1:]
            for index, document in enumerate(self._documents[kind]):
                mine = edits if index == which else []
                written[self._path(kind, index)] = apply(document, mine)
        elif kind == "prompt":
            written[self.folder / "case.bin"] = [otherfiles.apply_prompt(self._prompt, edits)]
        elif kind == "mmproj":
            written[self.folder / "case.bin"] = apply(self._encoder, edits)
        else:
            written[self.folder / "case.bin"] = [otherfiles.apply_vocab(self._vocab, edits)]
        for path, data in written.items():
            with path.open("wb") as file:
                file.writelines(data)
        path, *others = written
        try:
            if kind in MODELS:
                return run_model(path, others[0] if kind == "head" else None)
            run = {"prompt": self._run_prompt, "mmproj": self._run_encoder}
            return run.get(kind, self._run_vocab)(path)
        except PyllamaMtpError:
            raise
        except Exception:
            return Result(FINDING, traceback.format_exc(limit=-6))
        finally:
            for path in written:
                path.unlink()

    def _path(self, kind: str, index: int) -> Path:
        part = f"-{index + 1:05}-of-{len(self._documents[kind]):05}" if kind == "split" else ""
        return self.folder / f"case{'-head' * (kind == 'head' and index)}{part}.gguf"

    # -- the base and what belongs to it -------------------------------------------------------

    @cached_property
    def _documents(self) -> dict[str, list[Document]]:
        """The files of each kind, as they are without edits."""
        whole = read_document(self.base)
        found = {"model": [whole], "split": split(whole, N_PARTS)}
        if not read_gguf(self.base).mtp_complete:
            return found
        trunk = drop_head(self.base, self.folder / "good-trunk.gguf", force=True)
        head = extract_head(self.base, self.folder / "good-head.gguf", "q4_0", force=True)
        return {**found, "head": [read_document(trunk), read_document(head)]}

    @cached_property
    def _mutators(self) -> dict[str, list[Mutator]]:
        return {kind: [*map(Mutator, documents)] for kind, documents in self._documents.items()}

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
    def _encoder(self) -> Document:
        """An image encoder of random weights, for the base."""
        path = self.folder / "good-mmproj.gguf"
        return read_document(write_synthetic_mmproj(path, self._model.n_embd_inp, force=True))

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
            with Session(self._model, replace(SETTINGS, draft_vocab=str(path))) as session:
                got = session.generate(PROMPT, max_tokens=N_GENERATED).run().tokens
        except PyllamaMtpError as error:
            return Result(REFUSED, str(error))
        if got != self._expected:
            return Result(FINDING, f"the text is {got}, not {self._expected}")
        return Result(WORKS)

    def _run_encoder(self, path: Path) -> Result:
        """Load it, and go on after an image."""
        trial.LEAST_S = TRIAL_S
        try:
            vision = Vision(self._model, path, n_threads=1)
        except PyllamaMtpError as error:
            ended = "the process that tried to load it" in str(error)
            return Result(ENDED if ended else REFUSED, str(error))
        with vision:
            try:
                prompt = vision.prompt(f"{IMAGE_MARKER} {PROMPT}", [PICTURE])
                if len(prompt) < SETTINGS.n_ctx:
                    self._session.generate(prompt, max_tokens=N_GENERATED).run()
            except PyllamaMtpError as error:
                return Result(LATER, str(error))
        return Result(WORKS)


def run_model(path: Path, head: Path | None = None) -> Result:
    """Check, load, generate a few tokens, with MTP if there is a head."""
    mtp = None
    trial.LEAST_S = TRIAL_S
    try:
        validate_model_file(path, None, head or NO_HEAD)
    except NoMtpHeadError:
        mtp = False
    except PyllamaMtpError as error:
        return Result(REFUSED, str(error))
    try:
        model = Model(path, mtp=mtp, head=head or NO_HEAD)
    except PyllamaMtpError as error:
        ended = "the process that tried to load it" in str(error)
        native = "llama.cpp cannot load it" in str(error) or "cannot be used" in str(error)
        return Result(ENDED if ended else NATIVE if native else REFUSED, str(error))
    with model:
        try:
            return _generate(model)
        except PyllamaMtpError as error:
            return Result(LATER, str(error))


def _generate(model: Model) -> Result:
    settings = SETTINGS if model.has_mtp else replace(SETTINGS, draft_n_max=0)
    prompt: Any = model.tokenize(PROMPT) or [0]
    with Session(model, settings) as session:
        answer = session.generate(prompt, max_tokens=N_GENERATED, ignore_eos=True).run()
    if len(answer.tokens) != N_GENERATED:
        return Result(FINDING, f"{len(answer.tokens)} tokens: {answer.finish_reason}")
    model.check_tokens(np.array(answer.tokens))
    model.detokenize(answer.tokens, special=True)
    return Result(WORKS)
