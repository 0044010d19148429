"""Where the training text comes from: named packages, fetched by apt-get and pip, nothing else.

Every package is recorded with version, sha256 and licence in `sources.json` of the work folder,
from which the model card quotes.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """One package that text is taken from; `what` says which of its files are read."""

    name: str
    version: str
    manager: str  # "apt" or "pip"
    licence: str
    what: str


PYTHON, LIBRARY = "3.11.2-6+deb12u8", "the standard library's Python code and docstrings"
# fmt: off
PACKAGES = (
    Package("libpython3.11-stdlib", PYTHON, "apt", "PSF-2.0", LIBRARY),
    Package("libpython3.11-minimal", PYTHON, "apt", "PSF-2.0", LIBRARY),
    Package("python3.11-doc", PYTHON, "apt", "PSF-2.0 (code examples also 0BSD)",
            "the Python manual's source text, without its change log"),
    Package("Django", "5.2", "pip", "BSD-3-Clause",
            "the package's code and docstrings, its manual without the release notes"),
)
# fmt: on


class FetchError(RuntimeError):
    """A package could not be downloaded or unpacked."""


def _run(command: list[str], cwd: Path) -> None:
    """Run a download command; a failure becomes a FetchError with the command's last lines."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise FetchError(f"{command[0]} is needed to fetch the training text") from error
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-5:])
        raise FetchError(f"{' '.join(command)} failed:\n{tail}")


def _find(folder: Path, package: Package) -> Path | None:
    """The package's archive in `folder`, if it is already there."""
    pattern = f"{package.name}_*.deb" if package.manager == "apt" else f"{package.name}-*.tar.gz"
    found = sorted(folder.glob(pattern)) or sorted(folder.glob(pattern.lower()))
    return found[-1] if found else None


def _download(folder: Path, package: Package) -> Path:
    """Fetch a package in the pinned version; where apt no longer has that, in its newer one."""
    have = _find(folder, package)
    if have:
        return have
    if package.manager == "apt":
        try:
            _run(["apt-get", "download", f"{package.name}={package.version}"], folder)
        except FetchError:  # a security update has replaced it
            _run(["apt-get", "download", package.name], folder)
    else:
        wanted = f"{package.name}=={package.version}"
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        _run([*pip, wanted], folder)
    have = _find(folder, package)
    if not have:
        raise FetchError(f"{package.name}: downloaded, but no archive is in {folder}")
    return have


def _unpack(archive: Path, target: Path) -> None:
    """Unpack a .deb or .tar.gz into `target`; does nothing if that was done before."""
    done = target / ".unpacked"
    if done.exists():
        return
    target.mkdir(parents=True, exist_ok=True)
    if archive.suffix == ".deb":
        _run(["dpkg-deb", "-x", str(archive.resolve()), str(target.resolve())], target)
    else:
        with tarfile.open(archive) as tar:
            tar.extractall(target, filter="data")
    done.touch()


def fetch(work: Path) -> dict[str, Path]:
    """Download and unpack every package below `work`; returns package name -> unpacked folder.

    Writes `sources.json`: one record per package with file name, sha256, licence and use.
    """
    folder = work / "downloads"
    folder.mkdir(parents=True, exist_ok=True)
    roots: dict[str, Path] = {}
    records = []
    for package in PACKAGES:
        archive = _download(folder, package)
        roots[package.name] = folder / "unpacked" / package.name
        _unpack(archive, roots[package.name])
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        records.append({**asdict(package), "file": archive.name, "sha256": digest})
    (work / "sources.json").write_text(json.dumps(records, indent=1) + "\n")
    return roots
