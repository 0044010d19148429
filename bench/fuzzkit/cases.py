"""Uses one damaged file, and judges the outcome; runs in a process of its own.

Any exception but a :class:`PyllamaMtpError` is a finding. So are the end of the process and limits
exceeded, which the pool notices.

Half of the files of processed prompts are damaged: what is accepted of them must go on as the text
that the file names does without it. Of the others the states are edited, with their checksums made
right again, as a forger would. No checksum tells that a state is not the text's, so the text may
then be another, which is counted; the session must give the right text afterwards.
"""

from __future__ import annotations

import io
import random
import traceback
import zipfile
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fuzzkit.document import Document, Edit, apply, apply_bytes, read_document, split
from fuzzkit.models import Mutator, byte_edits, number
from pyllama_mtp import Model, PyllamaMtpError, Session, Settings
from pyllama_mtp.errors import NoMtpHeadError, PromptFileError, UsageError
from pyllama_mtp.images import FORMATS, ImageSource
from pyllama_mtp.llama import trial
from pyllama_mtp.llama.vision import IMAGE_MARKER, Vision
from pyllama_mtp.models.ggufinfo import validate_model_file
from pyllama_mtp.models.mmproj import write_synthetic_mmproj
from pyllama_mtp.models.sidecar import NO_HEAD
from pyllama_mtp.models.surgery import drop_head, extract_head
from pyllama_mtp.promptfile import HEADER

#: Models: in one file, with the MTP head in another file, split into parts. Then files of ours.
MODELS = ("model", "head", "split")
KINDS = (*MODELS, "prompt", "mmproj", "image")
REFUSED, NATIVE, ENDED, LATER, FORGED, WORKS, FINDING = (
    "refused by the validator",
    "refused by llama.cpp, with an error",
    "ended the process that tries it first",
    "loaded, refused later with an error",
    "forged, and another text",
    "loaded and generated",
    "finding",
)
OUTCOMES = (REFUSED, NATIVE, ENDED, LATER, FORGED, WORKS, FINDING)
SETTINGS = Settings(n_ctx=128, n_threads=1, n_batch=32, n_ubatch=32, draft_n_max=2)
PROMPT = "def add(a, b):\n    return"
N_GENERATED = 4
PICTURE = np.random.default_rng(0).integers(0, 255, (64, 96, 3), dtype=np.uint8)
#: Bytes of an image at whose front its size and its tables are.
IMAGE_FRONT = 700
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
        self._known: dict[str, list[Mutator]] = {}

    def edits(self, kind: str, seed: int) -> list[Edit]:
        """The edits of a case; of several files the first edit tells which one is changed."""
        if kind == "prompt":
            return self._prompt_edits(random.Random(seed))
        if kind == "image":
            rng = random.Random(seed)
            return [
                {"op": "format", "name": FORMATS[seed % len(FORMATS)]},
                *byte_edits(rng, IMAGE_FRONT),
            ]
        mutators = self._mutators(kind)
        which = seed % len(mutators)
        edits = mutators[which].edits(seed)
        return [{"op": "file", "index": which}, *edits] if len(mutators) > 1 else edits

    def run(self, kind: str, edits: list[Edit]) -> Result:
        """Write the file, and use it."""
        try:
            return self._use(kind, edits)
        except Exception:
            return Result(FINDING, traceback.format_exc(limit=-6))

    def _use(self, kind: str, edits: list[Edit]) -> Result:
        path = self.folder / "case.bin"
        if kind == "prompt":
            path.write_bytes(self._edited_prompt(edits))
            return self._run_prompt(path, edits)
        if kind == "image":
            path.write_bytes(apply_bytes(self._pictures[edits[0]["name"]], edits[1:]))
            return self._run_image(path)
        which = 0
        if edits and edits[0]["op"] == "file":
            which, edits = edits[0]["index"], edits[1:]
        paths = [self._path(kind, index) for index in range(len(self._mutators(kind)))]
        for index, mutator in enumerate(self._mutators(kind)):
            paths[index].write_bytes(apply(mutator.base, edits if index == which else []))
        if kind == "mmproj":
            return self._run_encoder(paths[0])
        return run_model(paths[0], paths[1] if kind == "head" else None)

    def _path(self, kind: str, index: int) -> Path:
        part = f"-{index + 1:05}-of-{N_PARTS:05}" if kind == "split" else ""
        return self.folder / f"case{'-head' * (kind == 'head' and index)}{part}.gguf"

    def prepare(self, kind: str) -> None:
        """Read and make what all cases of a kind share, before a process is forked for one: a
        model and its sessions are of no use in another process than their own."""
        if kind in ("prompt", "image"):
            assert self._sections and self._pictures and self._encoder
        else:
            self._mutators(kind)

    # -- the base and what belongs to it -------------------------------------------------------

    def _mutators(self, kind: str) -> list[Mutator]:
        """Of the files of a kind."""
        if kind not in self._known:
            self._known[kind] = [*map(Mutator, self._files(kind))]
        return self._known[kind]

    def _files(self, kind: str) -> list[Document]:
        """The files of a kind, as they are without edits."""
        if kind == "head":
            trunk = drop_head(self.base, self.folder / "good-trunk.gguf", force=True)
            head = extract_head(self.base, self.folder / "good-head.gguf", "q4_0", force=True)
            return [read_document(trunk), read_document(head)]
        if kind == "mmproj":
            return [read_document(self._encoder)]
        whole = read_document(self.base)
        return split(whole, N_PARTS) if kind == "split" else [whole]

    @cached_property
    def _model(self) -> Model:
        return Model(self.base)

    @cached_property
    def _session(self) -> Session:
        return Session(self._model, settings_of(self._model))

    @cached_property
    def _encoder(self) -> Path:
        """An image encoder's file that is known to be good."""
        with Model(self.base) as model:
            path = self.folder / "good-mmproj.gguf"
            return write_synthetic_mmproj(path, model.n_embd_inp, force=True)

    @cached_property
    def _sections(self) -> dict[str, bytes]:
        """What a processed prompt's file that is known to be good holds, by name."""
        path = self.folder / "good.prompt"
        with Model(self.base) as model, Session(model, settings_of(model)) as session:
            session.process(PROMPT)
            session.save(path)
        with zipfile.ZipFile(path) as archive:
            return {name: archive.read(name) for name in archive.namelist()}

    # -- processed prompts ---------------------------------------------------------------------

    def _prompt_edits(self, rng: random.Random) -> list[Edit]:
        """Of bytes of the file; or of the states: of bytes or a number, often near the front."""
        if rng.random() < 0.5:
            return byte_edits(rng, 200)

        def one() -> Edit:
            name = rng.choice([name for name in self._sections if name != HEADER])
            edit = byte_edits(rng, 200)[0]
            if rng.random() < 0.7:
                width, at = rng.choice((4, 4, 8)), rng.choice((4 * rng.randrange(64), rng.random()))
                value = int(number(rng, "Q", rng.randrange(256))) & ((1 << 8 * width) - 1)
                text = value.to_bytes(width, "little").decode("latin-1")
                edit = {"op": "bytes", "at": at, "text": text}
            return {"op": "section", "name": name, "edit": edit}

        return [one() for _ in range(rng.choice((1, 1, 2, 3)))]

    def _edited_prompt(self, edits: list[Edit]) -> bytes:
        found = dict(self._sections)
        for edit in edits:
            if edit["op"] == "section":
                found[edit["name"]] = apply_bytes(found[edit["name"]], [edit["edit"]])
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for name, data in found.items():
                archive.writestr(zipfile.ZipInfo(name), data)
        return apply_bytes(file.getvalue(), edits)

    def _generated(self, prompt: str | list[int]) -> list[int]:
        return self._session.generate(prompt, max_tokens=N_GENERATED, ignore_eos=True).run().tokens

    def _run_prompt(self, path: Path, edits: list[Edit]) -> Result:
        """Restore, go on after the tokens that the file names, go back; both again without it."""
        result, expected = Result(WORKS), self._generated(PROMPT)
        try:
            self._session.reset()
            self._session.restore(path)
            with zipfile.ZipFile(path) as archive:
                named = np.frombuffer(archive.read("tokens"), "<i4").tolist()
            prompts = [*named, *self._model.tokenize(PROMPT)], PROMPT
            got, right = [self._generated(prompt) for prompt in prompts], [list[int](), expected]
            self._session.reset()
            right[0] = self._generated(prompts[0])
            if got != right:
                told = f"after the tokens {named} it writes {got}, not {right}"
                forged = any(edit["op"] == "section" for edit in edits)
                result = Result(FORGED if forged else FINDING, told)
        except PromptFileError as error:
            result = Result(REFUSED, str(error))
        except PyllamaMtpError as error:
            result = Result(LATER, str(error))
        self._session.reset()
        if (got := self._generated(PROMPT)) != expected:
            return Result(FINDING, f"afterwards the session gives {got}, not {expected}")
        return result

    # -- images, their encoders, and models ----------------------------------------------------

    @cached_property
    def _pictures(self) -> dict[str, bytes]:
        """PICTURE as a file of each format."""
        files = {name: io.BytesIO() for name in FORMATS}
        for name, file in files.items():
            Image.fromarray(PICTURE).save(file, name)
        return {name: file.getvalue() for name, file in files.items()}

    @cached_property
    def _vision(self) -> Vision:
        return Vision(self._model, self._encoder, n_threads=1)

    def _run_image(self, path: Path) -> Result:
        """Go on after the image."""
        try:
            return self._see(self._vision, path)
        except UsageError as error:
            return Result(REFUSED, str(error))

    def _see(self, vision: Vision, picture: ImageSource) -> Result:
        prompt = vision.prompt(f"{IMAGE_MARKER} {PROMPT}", [picture])
        if len(prompt) < SETTINGS.n_ctx:
            self._session.generate(prompt, max_tokens=N_GENERATED).run()
        return Result(WORKS)

    def _run_encoder(self, path: Path) -> Result:
        """Load it, and go on after an image."""
        trial.LEAST_S = TRIAL_S
        try:
            vision = Vision(self._model, path, n_threads=1)
        except PyllamaMtpError as error:
            return _refused(error)
        with vision:
            try:
                return self._see(vision, PICTURE)
            except PyllamaMtpError as error:
                return Result(LATER, str(error))


def settings_of(model: Model) -> Settings:
    """SETTINGS, with drafts if the model has a head."""
    return SETTINGS if model.has_mtp else replace(SETTINGS, draft_n_max=0)


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
        return _refused(error)
    with model:
        try:
            return _generate(model)
        except PyllamaMtpError as error:
            return Result(LATER, str(error))


def _refused(error: PyllamaMtpError) -> Result:
    """By whom a file was refused, as the error says it."""
    said = str(error)
    native = "llama.cpp cannot load it" in said or "cannot be used" in said
    ended = "the process that tried to load it" in said
    return Result(ENDED if ended else NATIVE if native else REFUSED, said)


def _generate(model: Model) -> Result:
    prompt: Any = model.tokenize(PROMPT) or [0]
    with Session(model, settings_of(model)) as session:
        answer = session.generate(prompt, max_tokens=N_GENERATED, ignore_eos=True).run()
    if len(answer.tokens) != N_GENERATED:
        return Result(FINDING, f"{len(answer.tokens)} tokens: {answer.finish_reason}")
    model.check_tokens(np.array(answer.tokens))
    model.detokenize(answer.tokens, special=True)
    return Result(WORKS)
