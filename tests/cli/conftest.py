"""The command line in this process, on the demo model under other names, its sessions watched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pyllama_mtp
from pyllama_mtp import Generation, Model, Settings

#: A matrix of 8 samples; later options replace these.
SMALL = (
    *("matrix", "--model", "folder/m.gguf", "--prompt-sizes", "24,48"),
    *("--n-ubatch", "64"),  # contexts of the usual size take twice as long to make
    *("--depths", "0,2", "--max-tokens", "6", "--repeat", "2", "--threads", "1"),
)


def interrupt(generation: Generation) -> None:
    """Ctrl-C."""
    raise KeyboardInterrupt


class Watched:
    """What is done with sessions, and what is to happen to them.

    Attributes:
        log: in order: ("open", depth, n_ctx, sessions that are open then), ("generate", prompt,
            options), ("process", depth, tokens), ("reset",), ("close", depth).
        script: by the number of a generation, warm-ups included: what is called with it at its
            beginning.
        refused: by depth: what is raised in place of opening a session.
    """

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.script: dict[int, Callable[[Generation], None]] = {}
        self.refused: dict[int | str, Exception] = {}
        self.n_open = self.n_generations = 0

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        """The entries of this kind, without it."""
        return [rest for found, *rest in self.log if found == kind]  # type: ignore[misc]


def watching(watched: Watched) -> type[pyllama_mtp.Session]:
    """A session that tells `watched` what it does."""

    class Session(pyllama_mtp.Session):
        def __init__(self, model: Model, settings: Settings, **more: Any) -> None:
            if error := watched.refused.get(settings.draft_n_max):
                raise error
            super().__init__(model, settings, **more)
            watched.n_open += 1
            self._is_counted = True
            watched.log.append(("open", settings.draft_n_max, self.n_ctx, watched.n_open))

        def generate(self, prompt: Any, **options: Any) -> Generation:
            watched.log.append(("generate", tuple(prompt), options))
            generation = super().generate(prompt, **options)
            watched.n_generations += 1
            watched.script.get(watched.n_generations - 1, lambda _: None)(generation)
            return generation

        def process(self, prompt: Any, **options: Any) -> Any:
            watched.log.append(("process", self.settings.draft_n_max, len(prompt)))
            return super().process(prompt, **options)

        def reset(self) -> None:
            watched.log.append(("reset",))
            super().reset()

        def close(self) -> None:
            if self.__dict__.pop("_is_counted", False):
                watched.n_open -= 1
                watched.log.append(("close", self.settings.draft_n_max))
            super().close()

    return Session


@pytest.fixture
def folder(demo_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The current folder, with the demo model as m.gguf and b.gguf in a folder below."""
    (tmp_path / "folder").mkdir()
    for name in ("m.gguf", "b.gguf"):
        (tmp_path / "folder" / name).symlink_to(demo_file)
    monkeypatch.setattr("pyllama_mtp.machine.busy_cores", lambda: 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "no-cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def watched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """What commands do with sessions."""
    found = Watched()
    session = watching(found)
    monkeypatch.setattr(pyllama_mtp, "Session", session)
    monkeypatch.setattr("pyllama_mtp.session.Session", session)
    return found


@pytest.fixture
def nothing_loads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads a model or the library fails."""

    def load(*given: object, **options: object) -> None:
        raise AssertionError("nothing may be loaded")

    monkeypatch.setattr(pyllama_mtp, "Model", load)
    monkeypatch.setattr("pyllama_mtp.llama.native.load", load)
