"""Where the training text comes from: named packages, fetched by apt-get and pip, nothing else.

Every package is recorded with version, sha256 and licence in `sources.json` of the work folder,
from which the model card quotes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
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


def _archive(folder: Path, name: str) -> Path | None:
    """The package's archive in `folder`, if it is already there."""
    found = [*folder.glob(f"{name}_*.deb"), *folder.glob(f"{name}-*.tar.gz")]
    return found[0] if found else None


def _download(folder: Path, package: Package) -> Path:
    """Fetch a package in the pinned version; where apt no longer has that, in its newer one."""
    if have := _archive(folder, package.name):
        return have
    if package.manager == "apt":
        for wanted in (f"{package.name}={package.version}", package.name):
            if subprocess.run(["apt-get", "download", wanted], cwd=folder).returncode == 0:
                break  # else a security update has replaced it
    else:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, f"{package.name}=={package.version}"], cwd=folder)
    if have := _archive(folder, package.name):
        return have
    raise SystemExit(f"{package.name} {package.version} could not be downloaded; see above")


def _unpack(archive: Path, target: Path) -> None:
    """Unpack a .deb or .tar.gz into `target`, once."""
    if target.exists():
        return
    partial = target.with_suffix(".part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if archive.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", archive.resolve(), partial.resolve()], check=True)
    else:
        with tarfile.open(archive) as tar:
            tar.extractall(partial, filter="data")
    partial.rename(target)


def fetch(work: Path) -> dict[str, Path]:
    """Download and unpack every package below `work`; returns package name -> unpacked folder.

    Writes `sources.json`: one record per package with file name, sha256, licence and use.
    """
    folder = work / "downloads"
    folder.mkdir(parents=True, exist_ok=True)
    roots, records = {}, []
    for package in PACKAGES:
        archive = _download(folder, package)
        roots[package.name] = folder / "unpacked" / package.name
        _unpack(archive, roots[package.name])
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        records.append({**asdict(package), "file": archive.name, "sha256": digest})
    (work / "sources.json").write_text(json.dumps(records, indent=1) + "\n")
    return roots
