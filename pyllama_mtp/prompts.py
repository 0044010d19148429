"""A session's processed text, to a file and back: both caches and the carry row between them."""

from __future__ import annotations

import json
import os

from . import native, promptfile
from .engine import Engine
from .errors import PromptFileError, UsageError
from .hidden import CARRY_SLOT, HostRows
from .promptfile import ProcessedPrompt


def identity(engine: Engine) -> dict[str, str | int]:
    """What a file must have been made with to fit `engine`: states are copies of caches."""
    settings = engine.settings
    # Names that only one side has differ: these are there only where they mean something.
    further = {"lora": engine.model.adapters.names, "rope": json.dumps(settings.rope.given)}
    return {
        **{name: text for name, text in further.items() if text not in ("", "{}")},
        "model": promptfile.fingerprint(engine.model.info),
        "llama.cpp": str(native.load().stamp.get("upstream_commit", "")),
        "cache_type_k": settings.cache_type_k,
        "cache_type_v": settings.cache_type_v,
        "flash_attn": settings.flash_attn,
        "hidden": settings.hidden,
    }


def save(engine: Engine, path: str | os.PathLike[str]) -> None:
    """Write what `engine` has processed.

    Raises:
        UsageError: nothing is processed, or an interrupted computation left it in doubt.
        PyllamaMtpError: the file cannot be written; see :func:`promptfile.write`.
    """
    if not engine.intact or not engine.cached:
        raise UsageError("there is no processed prompt to save; process one first")
    engine.catch_up()
    draft, n_past, carry = None, 0, None
    drafter = engine.drafter
    if drafter and drafter.n_past:
        n_past = drafter.n_past
        drafter.context.remove(n_past)  # what drafting has left there
        draft = drafter.context.save_state()
        carry = drafter.carry.to_host()[0] if drafter.carry is not None else None
    target = engine.target.save_state()
    found = ProcessedPrompt(list(engine.cached), target, draft, n_past, carry, identity(engine))
    promptfile.write(path, found)


def restore(engine: Engine, path: str | os.PathLike[str]) -> int:
    """Make `engine` hold what was saved, instead of what it holds.

    Returns:
        Number of tokens.

    Raises:
        PromptFileError: damaged, or made with another model, library or settings.
        UsageError: longer than the context.
    """
    found = promptfile.read(path, identity(engine))
    engine.model.check_tokens(found.tokens)
    if len(found.tokens) > engine.target.n_ctx:
        raise UsageError(
            f"{os.fspath(path)} holds {len(found.tokens)} tokens and the context "
            f"{engine.target.n_ctx}; use a longer n_ctx"
        )
    engine.reset()
    try:
        engine.target.load_state(found.target)
        if engine.target.n_past != len(found.tokens):
            raise PromptFileError(f"{os.fspath(path)}: its state does not match its tokens", path)
        drafter = engine.drafter
        if drafter and found.draft is not None:
            drafter.context.load_state(found.draft)
            drafter.n_past = found.draft_n_past
            drafter.carry = None
            if found.carry is not None:
                tap = engine.target.tap if engine.on_device else None
                row = HostRows(found.carry[None, :])
                drafter.carry = tap.write(CARRY_SLOT, found.carry) if tap else row
    except BaseException:
        engine.reset()
        raise
    engine.cached = list(found.tokens)
    return len(found.tokens)
