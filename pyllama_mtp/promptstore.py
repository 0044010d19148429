"""Processed prompts that have left their places in an engine: in memory, and in files.

A text is stored when another one takes its place, with its states and checkpoints: K and V, the
MTP head's among them. A prompt that begins like a stored text goes on from there. In a folder the
stored texts are files of :mod:`.promptfile`, which other servers may read and write too, and which
a later process finds again. They are conversations: nobody else may read them. Whatever else is
in the folder stays as it is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from . import promptfile
from .checkpoints import TAIL
from .errors import InsufficientMemoryError, PromptFileError, PyllamaMtpError, UsageError
from .machine import available_memory
from .promptfile import Identity, ProcessedPrompt
from .sequence import shared_tokens
from .settings import Settings

if TYPE_CHECKING:
    from .llama.model import Model

log = logging.getLogger("pyllama_mtp")

MIB = 1 << 20
SUFFIX = ".prompt"
#: Of files that a store has written; see :meth:`PromptStore._name`.
OWN_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.prompt")
#: Of files that were not written to the end, and seconds after which nobody goes on with one.
PART, PART_S = re.compile(r"\.[0-9a-f]{16}\.part"), 3600.0
#: Most texts whose files are being written; each is in memory until then.
MOST_WRITES = 2
#: Seconds after a change in which a folder may change again without a new time.
TICK_S = 2.0


@dataclass(eq=False)
class Stored:
    """A stored text.

    Attributes:
        prompt: the text; without states if it is in its file only.
        used: when it was stored or found last.
        in_memory: it has its states.
        written: becomes done when its file is complete, or could not be written.
    """

    prompt: ProcessedPrompt
    name: str
    used: float = field(default_factory=time.monotonic)
    in_memory: bool = True
    written: Future[bool] | None = None

    def reach(self, prompt: list[int], needs_state: bool) -> int:
        """From which token on another prompt can go on from this text.

        Args:
            needs_state: a state goes on from its own end, or from checkpoints, only.
        """
        n, text = shared_tokens(self.prompt, prompt), self.prompt
        if not needs_state or len(text.tokens) == n < len(prompt):
            return min(n, len(prompt) - 1)
        usable = (one for one in text.checkpoints if one.n_past < len(prompt) or one.row)
        return max((one.n_past for one in usable if one.n_past <= n), default=0)


class PromptStore:
    """Stored texts of one engine, the least recently used first out.

    Attributes:
        hits: prompts that went on from a stored text; `n_saved`: tokens of them that were not
            processed again.
    """

    def __init__(
        self, model: Model, n_ctx: int, settings: Settings, identity: Callable[[], Identity]
    ) -> None:
        """Args:
        n_ctx: tokens that a sequence has room for.
        settings: `cache_ram`: most MiB in memory, less where less than twice as much is free;
            `cache_dir`: the folder of the files, made if it does not exist; `cache_disk`: most
            MiB of all its files.
        identity: of the texts; see :class:`.ProcessedPrompt`.

        Raises:
            UsageError: the folder cannot be made, or everybody may write into it.
        """
        self._model, self._n_ctx, self._identity = model, n_ctx, identity
        self._ram, self._disk = settings.cache_ram * MIB, settings.cache_disk * MIB
        self._folder = Path(settings.cache_dir) if settings.cache_dir else None
        self._texts: dict[str, Stored] = {}
        self._seen = 0.0
        self._writer: ThreadPoolExecutor | None = None
        self.hits = self.n_saved = 0
        if self._folder:
            try:
                self._open_folder(self._folder)
            except OSError as error:
                raise UsageError(
                    f"cannot make the folder {self._folder}: {error.strerror}"
                ) from None

    def _open_folder(self, folder: Path) -> None:
        """Make the folder. Close one that was there to others, if there is nothing else in it."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, state in self._files():
            if state.st_uid == os.geteuid() and state.st_mode & 0o077:
                path.chmod(0o600)
        for path in folder.iterdir():
            with suppress(OSError):  # of a process that was ended while it wrote
                if PART.fullmatch(path.name) and time.time() - path.lstat().st_mtime > PART_S:
                    path.unlink()
        state = folder.stat()
        if state.st_mode & stat.S_IWOTH:
            raise UsageError(
                f"everybody may write into {folder}, and stored prompts go to native code: choose "
                "a folder of your own"
            )
        mine, open_to_others = state.st_uid == os.geteuid(), state.st_mode & 0o077
        strange = [one for one in folder.iterdir() if not OWN_NAME.fullmatch(one.name)]
        if mine and open_to_others and not strange:
            folder.chmod(0o700)
            return
        if open_to_others or not mine:
            log.warning("others may look into %s; stored prompts are for their owner only", folder)

    def _files(self, kind: str = "") -> Iterator[tuple[Path, os.stat_result]]:
        """Files that stores have written, of a model and settings, or all; nothing else."""
        assert self._folder
        for path in self._folder.iterdir():
            own = path.name.startswith(kind) and OWN_NAME.fullmatch(path.name)
            if own and (state := promptfile.about(path)):
                yield path, state

    @property
    def on(self) -> bool:
        """Whether texts are stored."""
        return self._ram > 0 or self.has_folder

    @property
    def has_folder(self) -> bool:
        """Whether texts are stored in files."""
        return self._folder is not None

    @property
    def n_bytes(self) -> int:
        """Bytes of memory in use."""
        return sum(one.prompt.n_bytes for one in [*self._texts.values()] if one.in_memory)

    @property
    def n_unwritten(self) -> int:
        """Texts whose files are being written."""
        return sum(not one.written.done() for one in [*self._texts.values()] if one.written)

    def __len__(self) -> int:
        return len(self._texts)

    # -- finding -------------------------------------------------------------------------------

    def find(self, prompt: list[int]) -> tuple[int, Stored | None]:
        """The stored text that most of a prompt can go on from, and the tokens of it."""
        best: tuple[int, Stored | None] = 0, None
        self._look()
        needs_state = self._model.is_recurrent or bool(self._model.n_swa)
        for one in self._texts.values():
            n = one.reach(prompt, needs_state)
            if n > best[0] and len(one.prompt.tokens) <= self._n_ctx:
                best = n, one
        return best

    def take(self, text: Stored, n: int) -> ProcessedPrompt | None:
        """A stored text with its states, for a prompt that shares `n` tokens; None: its file is
        gone or damaged. A text of which little else remains leaves the memory."""
        text.used, prompt = time.monotonic(), text.prompt
        if not text.in_memory:
            if text.written:
                text.written.result()
            path = self._path(text.name)
            try:
                prompt = promptfile.read(path, self._identity())
                prompt.check_tokens(self._model)
                os.utime(path)
            except (OSError, PyllamaMtpError) as error:
                self.drop(text.name, error)
                return None
        elif len(prompt.tokens) - n < TAIL:
            self._forget_states(text)
        return prompt

    def _look(self) -> None:
        """Find files that others have written, or that are gone, if the folder has changed."""
        if not self._folder:
            return
        try:
            changed = self._folder.stat().st_mtime
            if changed == self._seen:
                return
            self._seen = changed if time.time() - changed > TICK_S else 0.0
            names = {path.stem for path, _ in self._files(self._kind())}
        except OSError as error:
            log.warning("cannot read %s: %s", self._folder, error.strerror)
            return
        for name in names - self._texts.keys():
            with suppress(InsufficientMemoryError):
                try:
                    prompt = promptfile.read(self._path(name), self._identity(), states=False)
                except PromptFileError as error:
                    self.drop(name, error)
                else:
                    self._texts[name] = Stored(prompt, name, in_memory=False)
        for name in self._texts.keys() - names:
            text = self._texts[name]
            if not text.in_memory and (text.written is None or text.written.done()):
                del self._texts[name]

    def _kind(self) -> str:
        """The first part of names: texts of another model, or other settings, have another."""
        return _digest(sorted(self._identity().items()))[:16]

    def _name(self, tokens: list[int]) -> str:
        return f"{self._kind()}-{_digest(tokens)[:32]}"

    def _path(self, name: str) -> Path:
        assert self._folder
        return self._folder / f"{name}{SUFFIX}"

    def drop(self, name: str, why: object) -> None:
        """Forget a text that cannot be used, and its file."""
        log.warning("a stored prompt is not used: %s", why)
        self._texts.pop(name, None)
        if self._folder and not isinstance(why, InsufficientMemoryError):
            self._remove(self._path(name))

    def _remove(self, path: Path) -> None:
        """Remove a file that a store has written, if it can be removed."""
        try:
            if promptfile.about(path):
                path.unlink(missing_ok=True)  # another server may have removed it
        except OSError as error:
            log.warning("cannot remove %s: %s", path, error.strerror)

    # -- storing -------------------------------------------------------------------------------

    def wants(self, tokens: list[int]) -> bool:
        """Whether a text is to be stored; one that is there already counts as used."""
        if not (self.on and tokens):
            return False
        self._look()
        text = self._texts.get(name := self._name(tokens))
        if text:
            text.used = time.monotonic()
            if self._folder:
                with suppress(OSError):
                    os.utime(self._path(name))
        return text is None

    def put(self, prompt: ProcessedPrompt) -> None:
        """Store a text with its states. It replaces texts that it begins with."""
        beginnings = [
            one
            for one in self._texts.values()
            if one.prompt.tokens == prompt.tokens[: len(one.prompt.tokens)]
        ]
        for one in beginnings:
            del self._texts[one.name]
        name = self._name(prompt.tokens)
        text = self._texts[name] = Stored(prompt, name)
        if self._folder:
            self._write(text, [self._path(one.name) for one in beginnings])
        self._make_room()

    def _make_room(self) -> None:
        """Have the least recently used texts leave the memory."""
        held = self.n_bytes
        most = min(self._ram, (held + available_memory()) // 2)
        there = [one for one in self._texts.values() if one.in_memory]
        for text in sorted(there, key=lambda one: one.used):
            if held <= most:
                return
            held -= text.prompt.n_bytes
            self._forget_states(text)

    def _forget_states(self, text: Stored) -> None:
        """Have a text leave the memory: it stays if it has a file."""
        text.prompt, text.in_memory = text.prompt.without_states(), False
        if text.written is None:
            self._texts.pop(text.name, None)

    # -- files ---------------------------------------------------------------------------------

    def _write(self, text: Stored, beginnings: list[Path]) -> None:
        """Begin to write a text's file."""
        self._writer = self._writer or ThreadPoolExecutor(1, "pyllama-mtp prompt files")
        pending = [one.written for one in self._texts.values() if one.written]
        while len(open_ := [one for one in pending if not one.done()]) >= MOST_WRITES:
            open_[0].result()
        arguments = self._path(text.name), text.prompt, beginnings
        text.written = self._writer.submit(self._write_file, *arguments)

    def _write_file(self, path: Path, prompt: ProcessedPrompt, beginnings: Iterable[Path]) -> bool:
        """Write a file, remove those that it replaces, and the oldest if there are too many."""
        try:
            if path.is_symlink():
                raise UsageError(f"{path} is a link")
            promptfile.write(path, prompt)
            for one in beginnings:
                self._remove(one)
            self._trim()
        except (OSError, PyllamaMtpError) as error:
            log.warning("a prompt is not stored in a file: %s", error)
            return False
        return True

    def _trim(self) -> None:
        """Remove the files that were used longest ago, until the others have room."""
        files = sorted((state.st_mtime, state.st_size, path) for path, state in self._files())
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= self._disk:
                return
            self._remove(path)
            if not path.exists():
                total -= size

    def forget(self) -> None:
        """Forget all texts that are in memory only."""
        for text in [*self._texts.values()]:
            if text.in_memory:
                self._forget_states(text)

    def close(self) -> None:
        """Wait until files are complete."""
        writer, self._writer = self._writer, None
        if writer:
            writer.shutdown()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
