"""Whether this package can run a model file, before the native loader sees the file.

``read_gguf`` describes any GGUF model; ``validate_model_file`` insists on what the native code
needs, because a missing tensor or an odd number would end the process there instead of raising.
"""

from __future__ import annotations

import os

from pyllama_mtp.errors import ModelFileError, NoMtpHeadError, UnsupportedArchitectureError
from pyllama_mtp.models import sidecar
from pyllama_mtp.models.architectures import NOT_TEXT, elsewhere
from pyllama_mtp.models.hyperparameters import hyperparameter_problems
from pyllama_mtp.models.modelinfo import GGUFInfo, describe
from pyllama_mtp.models.tensortable import tensor_problems
from pyllama_mtp.models.tokenizertable import tokenizer_problems
from pyllama_mtp.models.trimmedhead import trimmed_head_problems

_SHOWN = 4  # problems, or missing tensors, that a message lists


def read_gguf(path: str | os.PathLike[str], head: str | os.PathLike[str] | None = None) -> GGUFInfo:
    """Describe a GGUF model of any architecture.

    Args:
        path: the file; of a model that is split into several, the first: the others are read too.
        head: a file with the model's MTP head. None: if the model has none, the head beside it, if
            there is one (see :func:`.sidecar.find_head`); "none": not even that one.

    Raises:
        ModelFileError: see :func:`.ggufheader.read_header`; also metadata of the wrong type, and
            parts of a split model that are missing or do not belong together.
        HeadMismatchError: the head is another model's.
    """
    info = describe(path)
    if head is None and info.supported and not (info.mtp_complete or sidecar.is_head(info)):
        head = sidecar.find_head(path)
    if head is None or head == sidecar.NO_HEAD:
        return info
    return sidecar.join_head(info, describe(head))


def validate_model_file(
    path: str | os.PathLike[str],
    require_mtp: bool | None = True,
    head: str | os.PathLike[str] | None = None,
) -> GGUFInfo:
    """Check that the native code can load and run a file, and describe it.

    Files of an architecture that is not `validated` are checked as far as possible beforehand.

    Args:
        path: the model file.
        require_mtp: True: a complete MTP head of an architecture that this package drives is
            needed, too. None: the file may have no head, or one that is not driven. False: the head
            does not matter, even if it is incomplete.
        head: the model's MTP head in another file; see :func:`read_gguf`. Ignored if `require_mtp`
            is False.

    Raises:
        ModelFileError: as :func:`read_gguf`; also missing or impossible hyper-parameters, missing
            tensors, wrong tensor shapes, a vocabulary or trimmed MTP head that cannot be loaded.
        UnsupportedArchitectureError: the model does not continue text; or `require_mtp` is True,
            and its head is not driven.
        NoMtpHeadError: `require_mtp` is True, and there is no MTP head; or `require_mtp` is not
            False, and the head is incomplete.
    """
    info = read_gguf(path, sidecar.NO_HEAD if require_mtp is False else head)
    if sidecar.is_head(info):
        raise ModelFileError(
            f"{path} is an MTP head alone; give the file of the model, and this one as its head",
            path,
        )
    arch = info.architecture
    if arch in NOT_TEXT:
        raise UnsupportedArchitectureError(
            f"{path}: architecture {arch!r} is {NOT_TEXT[arch]}, which does not continue text"
            + (f"; {elsewhere(arch)}" if arch == "gemma4-assistant" else ""),
            path,
        )
    problems = hyperparameter_problems(info) or tokenizer_problems(info)
    if not problems and require_mtp is not False:
        _check_head(info, path, required=require_mtp is True)
    if info.validated and not problems:
        in_use = require_mtp is not False and info.has_mtp
        problems = tensor_problems(info, in_use)
    elif not problems and require_mtp is not False and info.supported:
        n = info.n_mtp_layers
        if n > 1 and not info.abilities.several_heads:
            problems = [f"{n} MTP blocks; {arch} has one in llama.cpp (mtp=False: none is used)"]
    if info.in_trunk and not problems:
        problems = trimmed_head_problems(info)
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ModelFileError(f"{path}: {'; '.join(problems[:_SHOWN])}{more}", path)
    return info


def _check_head(info: GGUFInfo, path: str | os.PathLike[str], required: bool) -> None:
    """Raise where the MTP head is missing but required, incomplete, or required and not driven."""
    if info.mtp_complete or not (required or (info.supported and info.has_mtp)):
        return
    if info.has_mtp and not info.supported:
        raise UnsupportedArchitectureError(
            f"{path}: the MTP head of architecture {info.architecture!r} is not driven here: "
            f"{elsewhere(info.architecture)}; or load it without (mtp=False)",
            path,
        )
    if not info.supported:
        why = "the model has no MTP head; load it without (mtp=False)"
    elif not info.has_mtp:
        why = (
            "the model has no MTP head; convert it with its MTP layer kept, give the file that it "
            "is published in (head), or load it without (mtp=False)"
        )
    else:
        missing = info.mtp_missing
        why = f"the MTP head is incomplete, {len(missing)} missing: {', '.join(missing[:_SHOWN])}"
    raise NoMtpHeadError(f"{path}: {why}", path, partial=info.has_mtp)
