"""Models of the Hugging Face hub: which files a name stands for, and downloading them.

Files lie in the cache of `huggingface_hub`, so other programs share them. That package also lists
repositories, knows tokens and mirrors (HF_TOKEN, HF_ENDPOINT) and draws the progress bar. Its
version 1.18 and later starts interrupted downloads anew; here the next call continues them.
"""

from __future__ import annotations

import fcntl
import fnmatch
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from ..errors import (
    DiskFullError,
    HubNetworkError,
    HubQuantError,
    HubRepositoryError,
    HubTokenError,
    UsageError,
)
from ..files import check_room, write_error
from .demo import VISION_DEMO, vision_demo_path
from .ggufheader import PART_NAME, Parser
from .ggufinfo import read_gguf
from .mmproj import fitting_mmprojs
from .modelinfo import D2T
from .sidecar import PREFIX as HEAD_PREFIX
from .sidecar import fitting_heads

#: Begins a name that stands for a repository, not for a file.
PREFIX = "hf:"
USUAL_QUANT = "Q4_K_M"
_ETAG = re.compile(r"[\w-]+")  # becomes a file's name
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_NO_MODEL = re.compile(rf"(^|[-._])(mmproj|imatrix|eagle3|dflash|dspark)[-._]|^{HEAD_PREFIX}", re.I)

log = logging.getLogger("pyllama_mtp")


def local_file(name: str, images: bool = True) -> str:
    """The file that a name stands for; "hf:OWNER/REPO[:QUANT]" is fetched if it is not there, see
    :func:`fetch`, and "vision-demo" is the bundled demo model that sees."""
    if name == VISION_DEMO:
        return str(vision_demo_path())
    if not name.startswith(PREFIX):
        return name
    repository, _, quant = name.removeprefix(PREFIX).partition(":")
    return str(fetch(repository, quant or None, images))


@contextmanager
def described(name: str) -> Iterator[tuple[str, Callable[[str], str]]]:
    """A file with the header of a model, and a function that puts its name in place of the file's
    in a text. Of the hub only headers are read, see :func:`fetch`; they go with the block."""
    if not name.startswith(PREFIX):
        yield local_file(name), str
        return
    repository, _, quant = name.removeprefix(PREFIX).partition(":")
    with TemporaryDirectory(prefix="pyllama-mtp-") as folder:
        file = fetch(repository, quant or None, headers=Path(folder))
        yield str(file), lambda text: text.replace(folder, f"{PREFIX}{repository}")


def fetch(
    repository: str, quant: str | None = None, images: bool = True, headers: Path | None = None
) -> Path:
    """Download a model of a repository into the hub's cache, unless it is there already.

    All parts of a split model are fetched; so are an MTP head in a file of its own, if the model
    has none, and its image encoder, one of them by the rule of :func:`.mmproj.fitting_mmprojs`.
    Without a network, only the cache is searched.

    Args:
        repository: "OWNER/REPO".
        quant: the end of the model's name, such as "Q8_0", or the whole name, or a pattern for the
            names of its files, such as "*-Q8_0*". None: Q4_K_M, or the only model.
        images: False: without the image encoder.
        headers: a folder for files with the headers only, and as long as the whole ones (sparse);
            the headers are read by ranges. None: whole files, in the cache.

    Returns:
        The file to open; of a split model the first.

    Raises:
        HubRepositoryError: no such repository. HubQuantError: no such model in it, or several.
        HubTokenError: a token is needed. HubNetworkError: the hub cannot be reached, or fails.
        DiskFullError: no room for the file.
        UsageError: `repository` is no such name, or `huggingface_hub` is not installed.
    """
    if not isinstance(repository, str) or not _REPOSITORY.fullmatch(repository):
        raise UsageError(f"{repository!r} is not OWNER/REPO, as in {PREFIX}OWNER/REPO:Q8_0")
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise UsageError(
            f"{error}; models of a hub need one more package: pip install 'pyllama-mtp[hub]'"
        ) from None
    try:
        with _errors_told(repository):
            about = hub.model_info(repository, timeout=hub.constants.HF_HUB_ETAG_TIMEOUT)
    except HubNetworkError as error:
        return _cached(repository, quant, error)
    names = [file.rfilename for file in about.siblings or ()]
    parts = choose(repository, names, quant)
    get = partial(_download, repository, str(about.sha), headers)
    first, *_ = [get(name) for name in parts]
    if (head := head_of(parts[0], names)) and not read_gguf(first).has_mtp:
        _link_beside(first, get(head))
    if images and (mmproj := mmproj_of(parts[0], names)):
        _link_beside(first, get(mmproj))
    return first


def choose(repository: str, names: Sequence[str], quant: str | None) -> list[str]:
    """The files of the model that `quant` means, in order.

    Args:
        names: all files of the repository.

    Raises:
        HubQuantError: there is no such model, or several; the message lists the models.
    """
    models, name = _models(names), quant or USUAL_QUANT
    named = _of_quant(models, name)
    meant = named or ([] if quant else list(models))
    if len(meant) == 1:
        return models[meant[0]]
    if not models:
        raise HubQuantError(f"{repository} has no .gguf model", ())
    raise HubQuantError(
        f"{repository} has {'several' if named else 'no'} {name}; name one of these by its last "
        f"part or all of it, as {PREFIX}{repository}:QUANT (quant= in Python):\n  "
        + "\n  ".join(models),
        tuple(models),
    )


def _models(names: Sequence[str]) -> dict[str, list[str]]:
    """The files of each model, in order, by its name without ".gguf" and the part's number."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        if path.suffix == ".gguf" and not _NO_MODEL.search(path.name):
            part = PART_NAME.fullmatch(name)
            models.setdefault(part[1] if part else name.removesuffix(".gguf"), []).append(name)

    def is_complete(files: list[str]) -> bool:
        part = PART_NAME.fullmatch(files[0])
        return len(files) == (int(part[3]) if part else 1)

    return {name: files for name, files in models.items() if is_complete(files)}


def _of_quant(models: Mapping[str, Sequence[str]], quant: str) -> list[str]:
    """The models with a file whose name `quant` is, or matches as a pattern; else those whose name
    ends with it.

    If several do, those of another mixture are left out (UD-Q4_K_M for Q4_K_M).
    """
    matching = [name for name, files in models.items() if fnmatch.filter(files, quant)]
    if matching:
        return matching
    end = re.compile(rf"(^|[-._/]){re.escape(quant.removesuffix('.gguf'))}$", re.I)
    ending = [name for name in models if end.search(name)]
    plain = [name for name in ending if not name.upper().endswith(f"UD-{quant.upper()}")]
    return plain or ending


def head_of(model: str, names: Sequence[str]) -> str | None:
    """The file with the MTP head for a model, by the rule of :func:`.sidecar.fitting_heads`.

    It lies in the model's folder, above, or in a folder ``MTP`` there. None: there is none.
    """
    near = _in_reach(model, names, "MTP")
    return next(iter(fitting_heads(PurePosixPath(model).name, near)), None)


def mmproj_of(model: str, names: Sequence[str]) -> str | None:
    """The file with the image encoder for a model, by the rule of :func:`.mmproj.fitting_mmprojs`.

    It lies in the model's folder, or above. None: there is none.
    """
    return next(iter(fitting_mmprojs(PurePosixPath(model).name, _in_reach(model, names))), None)


def _in_reach(model: str, names: Sequence[str], within: str = "") -> list[str]:
    """The files in a model's folder and above, and in the folders named `within` there."""
    folder = PurePosixPath(model).parent

    def is_near(name: str) -> bool:
        place = PurePosixPath(name).parent
        return folder.is_relative_to(place.parent if within and place.name == within else place)

    return [name for name in sorted(names) if is_near(name)]


# -- the cache -------------------------------------------------------------------------------------


def _folder(repository: str) -> Path:
    """The folder of a repository in the hub's cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"))


def _cached(repository: str, quant: str | None, reason: HubNetworkError) -> Path:
    """The model's newest version in the cache. Raises `reason` if there is none."""
    snapshots = _folder(repository) / "snapshots"
    newest = sorted(snapshots.glob("*"), key=lambda folder: folder.stat().st_mtime, reverse=True)
    for snapshot in newest:
        files = [str(file.relative_to(snapshot)) for file in snapshot.rglob("*.gguf")]
        with suppress(HubQuantError):
            return snapshot / choose(repository, files, quant)[0]
    raise reason


def _download(repository: str, commit: str, headers: Path | None, name: str) -> Path:
    """Download a file into the cache, or what is missing of it; or its header into a folder.
    Returns its path."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.file_download import get_hf_file_metadata, hf_hub_url

    cached = try_to_load_from_cache(repository, name, revision=commit)
    if isinstance(cached, str):
        if headers:
            _link_beside(headers / "any", Path(cached))
            return headers / Path(cached).name
        return Path(cached)
    with _errors_told(repository):
        url = hf_hub_url(repository, name, revision=commit)
        about = get_hf_file_metadata(url)
        etag, size = about.etag or "", about.size or math.inf
        if headers:
            return _read_header(url, headers / PurePosixPath(name).name, about.size or 0)
        if _ETAG.fullmatch(etag) and size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            blob = _folder(repository) / "blobs" / etag
            blob.parent.mkdir(parents=True, exist_ok=True)
            if not blob.exists():
                _resume(url, blob, int(size), name)
        # This finds the blob, and links the file's name to it.
        return Path(hf_hub_download(repository, name, revision=commit))


def _read_header(url: str, path: Path, size: int) -> Path:
    """Write a file of this size with the header only, and the token ids of a trimmed head; both are
    read by ranges. Raises ModelFileError: see :func:`.ggufheader.read_header`."""
    utils: Any = import_module("huggingface_hub.utils")  # which exports not all that others use
    with path.open("w+b") as file:

        def read(n: int) -> bytes:
            at = file.tell()
            part = {"Range": f"bytes={at}-{min(at + n, size) - 1}"}
            options = {"headers": {**utils.build_hf_headers(), **part}, "follow_redirects": True}
            with utils.get_session().stream("GET", url, **options) as answer:
                utils.hf_raise_for_status(answer)
                if answer.status_code != 206:
                    raise HubNetworkError(f"{url}: the hub sends whole files only; download it")
                data: bytes = answer.read()
            file.write(data)
            return data

        file.truncate(size)
        ranges: Any = SimpleNamespace(read=read, seek=file.seek, fileno=file.fileno)
        for tensor in Parser(ranges, str(path)).parse().tensors:
            if tensor.name == D2T:
                file.seek(tensor.offset)
                read(tensor.nbytes)
    return path


def _resume(url: str, blob: Path, size: int, name: str) -> None:
    """Continue the download of a file after the bytes that are there; one process at a time."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    part = blob.with_name(f"{blob.name}.part")
    with part.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("another process downloads %s; waiting for it", name)
            fcntl.flock(file, fcntl.LOCK_EX)
        if blob.exists():
            return
        if (done := file.seek(0, os.SEEK_END)) > size:
            done = file.truncate(0)
        check_room(part, size - done)
        # http_get rewinds and truncates where a server begins anew.
        headers = build_hf_headers()
        http_get(url, file, resume_size=done, headers=headers, expected_size=size)
    part.replace(blob)


def _link_beside(model: Path, other: Path) -> None:
    """Link a head or an image encoder into the model's folder, where it is looked for."""
    link = model.with_name(other.name)
    if not link.exists():
        link.symlink_to(os.path.relpath(other, link.parent))


# -- errors ----------------------------------------------------------------------------------------


@contextmanager
def _errors_told(repository: str) -> Iterator[None]:
    """Turn errors of the hub's package into those that :func:`fetch` raises."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repository}"
    token = "log in with `hf auth login`, or set HF_TOKEN"
    local = "a file that is here needs no network: give its path"
    try:
        yield
    except DiskFullError:
        raise
    except errors.GatedRepoError:
        raise HubTokenError(f"{page} is gated: accept its terms there, then {token}") from None
    except errors.RepositoryNotFoundError:
        raise HubRepositoryError(
            f"no repository {page}; check how it is written. If it is private, {token}"
        ) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise HubTokenError(f"{page}: access denied ({status}); {token}") from None
        raise HubNetworkError(
            f"{page}: the hub answers {status}; try again later, {local}"
        ) from None
    except errors.OfflineModeIsEnabled:
        raise HubNetworkError(
            f"{page} is not in the cache, and HF_HUB_OFFLINE is set; unset it, {local}"
        ) from None
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
        if isinstance(error, OSError) and error.errno:
            raise write_error(error, _folder(repository)) from error
        raise HubNetworkError(
            f"{page} cannot be reached ({error or type(error).__name__}). The same command goes on "
            f"where it stopped; {local}"
        ) from None
