"""The processed text of a place, to a file and back: caches and, in upstream's way, the carry."""

from __future__ import annotations

import json
import os
import time

from . import promptfile
from .engine import Engine, Place
from .errors import PromptFileError, UsageError
from .llama import native
from .promptfile import ProcessedPrompt


def identity(engine: Engine) -> dict[str, str | int]:
    """The identity of a file that fits `engine`; see :class:`.ProcessedPrompt`."""
    settings, head = engine.settings, "apart or none"
    if engine.upstream and engine.upstream.n_blocks < (engine.model.info.most_drafts or 1):
        head = f"apart, {engine.upstream.n_blocks} of its blocks"  # no more drafts were wanted
    # A name that only one side has is a difference: these two are left out where they are empty.
    further = {"lora": engine.model.adapters.names, "rope": json.dumps(settings.rope.given)}
    return {
        **{name: text for name, text in further.items() if text not in ("", "{}")},
        "model": promptfile.fingerprint(engine.model.info),
        "llama.cpp": str(native.load().stamp.get("upstream_commit", "")),
        "cache_type_k": settings.cache_type_k,
        "cache_type_v": settings.cache_type_v,
        "flash_attn": settings.flash_attn,
        "hidden": settings.hidden,
        "mtp": "with the model" if engine.target.options.with_mtp else head,
    }


def save(engine: Engine, place: Place, path: str | os.PathLike[str]) -> None:
    """Write the processed text of a place.

    Raises:
        UsageError: nothing is processed, or a computation was interrupted.
        ContextClosedError: the context is closed.
        PyllamaMtpError: the file cannot be written; see :func:`promptfile.write`.
    """
    if engine.target.handle and not (engine.intact and place.cached):
        raise UsageError("there is no processed prompt to save; process one first")
    draft = engine.upstream.save(place.seq) if engine.upstream else (None, 0, None)
    target = engine.target.save_state(seq=place.seq)
    found = ProcessedPrompt(list(place.cached), target, *draft, identity(engine))
    promptfile.write(path, found)


def restore(engine: Engine, place: Place, path: str | os.PathLike[str]) -> int:
    """Put saved text into a place, instead of its present text: the number of tokens.

    Raises:
        PromptFileError: damaged, or made with another model, library or settings.
        UsageError: longer than the context.
    """
    found = promptfile.read(path, identity(engine))
    engine.model.check_tokens(found.tokens)
    if len(found.tokens) > engine.n_ctx:
        raise UsageError(
            f"{os.fspath(path)} holds {len(found.tokens)} tokens and the context "
            f"{engine.n_ctx}; use a longer n_ctx"
        )
    engine.begin()
    engine.release(place)
    try:
        engine.target.load_state(found.target, seq=place.seq)
        if engine.target.past(place.seq) != len(found.tokens):
            raise PromptFileError(f"{os.fspath(path)}: its state does not match its tokens", path)
        if engine.upstream and found.draft is not None:
            engine.upstream.load(place.seq, found.draft, found.draft_n_past, found.carry)
    except BaseException:
        engine.reset()
        raise
    place.cached, place.used = list(found.tokens), time.monotonic()
    return len(found.tokens)
