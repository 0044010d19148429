"""The source archive: the pin that names it, and pip fetching it."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

#: The packages whose source archives carry a complete llama.cpp, and the folder that it is in.
PACKAGES = {"llama-cpp-python": "vendor/llama.cpp/", "xllamacpp": "thirdparty/llama.cpp/"}
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class FetchError(Exception):
    """A problem the user can mend: what was expected, what was found, what to do."""

    def __init__(self, problem: str, *, expected: str, found: str, todo: str) -> None:
        details = f"  expected: {expected}\n  found:    {found}\n  do:       {todo}"
        super().__init__(f"{problem}\n{details}")
        self.problem, self.expected, self.found, self.todo = problem, expected, found, todo


@dataclass(frozen=True)
class Pin:
    """One pinned release of a package that carries llama.cpp."""

    package: str
    version: str
    sha256: str
    path: Path

    @property
    def requirement(self) -> str:
        """The requirement without its hash."""
        return f"{self.package}=={self.version}"

    @property
    def archive_name(self) -> str:
        """File name of the source archive."""
        return f"{self.package.replace('-', '_')}-{self.version}.tar.gz"


def read_pin(path: Path) -> Pin:
    """Read a pin file: comments, and one requirement line with one sha256."""
    wanted = f"one line '{'|'.join(PACKAGES)}==VERSION --hash=sha256:...'"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FetchError(
            "the pin cannot be read", expected=wanted, found=str(error), todo=f"restore {path}"
        ) from error
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    pattern = r"([a-z-]+)==([0-9A-Za-z.]+) --hash=sha256:([0-9a-f]{64})"
    match = re.fullmatch(pattern, lines[0].strip()) if len(lines) == 1 else None
    if match is None or match.group(1) not in PACKAGES:
        raise FetchError(
            "the pin is not understood",
            expected=wanted,
            found=f"{lines!r} in {path}",
            todo=f"restore {path}",
        )
    return Pin(*match.groups(), path)


def named(release: str, pinned: str) -> str:
    """The requirement of a release: "xllamacpp==1.2.3", or "1.2.3" of what `pinned` requires."""
    package, _, version = release.rpartition("==")
    if package and package not in PACKAGES:
        raise FetchError(
            "the release is of an unknown package",
            expected=f"VERSION, or PACKAGE==VERSION of {' or '.join(PACKAGES)}",
            found=release,
            todo="name another release, or teach vendor/sdist.py the package's layout",
        )
    return f"{package or pinned.partition('==')[0]}=={version}"


def cache_dir() -> Path:
    """Where archives are kept between builds: in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pyllama-mtp"


def sha256_of(path: Path) -> str:
    """sha256 of a file, as 64 hex digits."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def download(pin: Pin, target: Path) -> Path:
    """Let pip fetch and verify the pinned archive, and put it at `target`."""
    print(f"vendor: pip downloads {pin.requirement} (40 to 75 MB)", file=sys.stderr, flush=True)
    return _pip_download(["--require-hashes", "-r", str(pin.path)], pin.requirement, target)


def download_release(requirement: str, folder: Path) -> Path:
    """Let pip fetch the archive of any release to `folder`, unverified (a package alone: its
    newest)."""
    folder.mkdir(parents=True, exist_ok=True)
    return _pip_download([requirement], requirement, folder)


def _pip_download(arguments: list[str], requirement: str, target: Path) -> Path:
    """Run pip and move the one archive it brings to `target`, a file or a folder, in one rename.

    pip cannot fetch a source archive without asking its build backend for metadata, so it also
    installs what the archive asks for (xllamacpp: cython, setuptools, versioneer) into a throw-away
    environment; nothing is compiled.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".download-", dir=target.parent))
    except OSError as error:
        raise FetchError(
            "the cache folder cannot be written",
            expected=f"a folder that can be written: {target.parent}",
            found=str(error),
            todo="mend it, or point XDG_CACHE_HOME somewhere else",
        ) from error
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    package = requirement.partition("==")[0]
    command += ["--no-binary", package, *arguments, "--dest", str(folder)]
    try:
        result = subprocess.run(command, env=_pip_environment(), text=True, errors="replace",
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        archives = [*folder.glob("*.tar.gz")]
        if result.returncode != 0 or len(archives) != 1:
            raise _pip_error(result.stdout, requirement, target)
        return archives[0].replace(target / archives[0].name if target.is_dir() else target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _pip_environment() -> dict[str, str]:
    """The environment for pip: the user's settings, but for what an enclosing pip run added."""
    env = dict(os.environ)
    for name in ("PIP_BUILD_TRACKER", "PIP_REQ_TRACKER"):
        env.pop(name, None)
    env.setdefault("PIP_RETRIES", "2")
    return env


def _pip_error(output: str, requirement: str, target: Path) -> FetchError:
    """Say in our words why pip failed, with the lines of its output that tell."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    signs = ("ERROR", "Error: ", "No module named")
    telling = [line for line in lines if any(sign in line for sign in signs)]
    found = " | ".join((telling or lines or ["no output"])[-3:])
    package = requirement.partition("==")[0]
    by_hand = (
        f"fetch it elsewhere (pip download --no-deps --no-binary {package} {requirement}) "
        f"and give it with --archive or PYLLAMA_MTP_SDIST, or put it at {target}"
    )
    if "No module named pip" in output:
        problem, todo = "pip is missing", f"install pip for {sys.executable}, or {by_hand}"
    elif "No space left on device" in output or "Disk quota exceeded" in output:
        problem = "no space left while downloading"
        todo = f"free about 350 MB in {tempfile.gettempdir()} and 80 MB in {target.parent}"
    elif "DO NOT MATCH THE HASHES" in output:
        got = re.search(r"Got\s+([0-9a-f]{64})", output)
        problem, found = "the downloaded archive is not the pinned one", "another archive"
        found += f", sha256 {got.group(1)}" if got else ""
        todo = f"do not use it; check which package index pip is set to, or {by_hand}"
    else:
        problem = "pip could not download the archive (no network, or an index without it)"
        todo = f"check the network and try again, or {by_hand}"
    return FetchError(problem, expected=requirement, found=found, todo=todo)
