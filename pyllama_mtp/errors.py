"""Every exception this package raises on purpose, in one place.

All of them derive from :class:`PyllamaMtpError`; the command line turns any of them into one
line on stderr and exit code 2. Messages say what was given, what is allowed and what to do.
"""

from __future__ import annotations

import os


class PyllamaMtpError(Exception):
    """Base class: ``except PyllamaMtpError`` catches every expected failure of this package."""


class UsageError(PyllamaMtpError, ValueError):
    """A bad argument: negative depth, empty prompt, unknown cache type, existing output file."""


class CopyError(UsageError, TypeError):
    """An object that owns native memory was to be copied or pickled."""


class _FileError(PyllamaMtpError):
    """A file that cannot be used.

    Attributes:
        path: the file as the caller named it, or None when no single file is to blame.
    """

    def __init__(self, message: str, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(message)
        self.path: str | None = None if path is None else os.fspath(path)


class ModelFileError(_FileError):
    """A model file that cannot be used: missing, not a GGUF, truncated, malformed, unknown type."""


class NoMtpHeadError(ModelFileError):
    """MTP was asked for, but the model file has no MTP head, or only part of one.

    Attributes:
        partial: the file has a part of a head, because it was converted wrongly.
    """

    def __init__(
        self, message: str, path: str | os.PathLike[str] | None = None, partial: bool = False
    ) -> None:
        super().__init__(message, path)
        self.partial = partial


class HubError(ModelFileError):
    """A model that cannot be fetched from a Hugging Face hub; subclasses say why."""


class HubRepositoryError(HubError):
    """There is no such repository, or nobody may see it without a token."""


class HubQuantError(HubError):
    """The repository has no such model, or several.

    Attributes:
        models: names of the models that it has.
    """

    def __init__(self, message: str, models: tuple[str, ...]) -> None:
        super().__init__(message)
        self.models = models


class HubTokenError(HubError):
    """The repository is gated or closed, and the token, if there is one, does not open it."""


class HubNetworkError(HubError):
    """The hub cannot be reached or fails, and the model is not in the cache."""


class HeadMismatchError(ModelFileError):
    """A file that should hold the model's MTP head holds another model's, or none."""


class UnsupportedArchitectureError(ModelFileError):
    """A model that does not continue text, a model of an architecture that the library does not
    know, or one whose MTP head was asked for and is not driven here."""


class InsufficientMemoryError(PyllamaMtpError, MemoryError):
    """Weights, caches or buffers do not fit into memory; the message gives needed and available."""


class DiskFullError(PyllamaMtpError, OSError):
    """A file cannot be written completely: no space, a quota or a size limit; nothing is left."""


class PromptFileError(_FileError):
    """A file of a processed prompt that cannot be used: unreadable, damaged, of another model."""


class DraftVocabError(_FileError):
    """A file of a draft vocabulary that cannot be used: unreadable, damaged, of another model."""


class WorkerLostError(PyllamaMtpError):
    """A worker that a model uses died or does not answer; its part of the model is gone.

    Close the model, which ends its sessions. Other models are not affected.

    Attributes:
        address: the worker, "HOST:PORT".
    """

    def __init__(self, message: str, address: str) -> None:
        super().__init__(message)
        self.address = address


class LibraryError(PyllamaMtpError):
    """The native library is missing, has another stamp, or needs CPU features that are absent."""


class DecodeError(PyllamaMtpError):
    """``llama_decode`` (or an entry point of ours beside it) failed; subclasses name the code.

    Attributes:
        code: the native return code, or None when the failure was found before the call.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class NoKVSlotError(DecodeError):
    """Return code 1: the KV cache has no room for the batch; the context is unchanged."""


class DecodeAborted(DecodeError):
    """Return code 2: the abort callback stopped it; ubatches already done stay in the cache."""


class InvalidBatchError(DecodeError):
    """Return code -1: malformed batch (token, position or sequence); the context is unchanged."""


class FatalDecodeError(DecodeError):
    """Return code below -1: allocation or compute failed; close the context, its state is lost."""


class ContextClosedError(DecodeError):
    """A context or model was used after it, or the context's model, was closed; after a failure in
    which its contents were lost; or in a child forked from the process owning it."""


#: Most characters of a value in a message.
SHOWN = 200


def refusal(name: str, value: object, allowed: str) -> UsageError:
    """The exception for an argument with a value that is not allowed."""
    try:
        shown = repr(value)
    except Exception:  # a whole number of many thousand digits, among others
        shown = f"a value of type {type(value).__name__}"
    if len(shown) > SHOWN:
        shown = f"{shown[:SHOWN]}..."
    return UsageError(f"{name} is {shown}, it must be {allowed}")
