"""Miniature source archives with the layouts of the real ones, and their pin files."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

VERSION = "9.9.9"
COMMIT = "c0ffee" + "0" * 34
TOP = f"llama_cpp_python-{VERSION}"
FOLDERS = {"llama-cpp-python": "vendor/llama.cpp", "xllamacpp": "thirdparty/llama.cpp"}
GIT = ".git/modules/vendor/llama.cpp"
GIT_LOG = f"""{"0" * 40} {COMMIT} name <name@host> 1790833447 +0000\tclone: from somewhere
{COMMIT} {COMMIT} name <name@host> 1790933449 +0000\tcheckout: moving to {COMMIT}
"""  # the second is of 2026-10-02
MADE = 1791646182  # 2026-10-10, when all files of an archive of xllamacpp were written

# A build backend inside the archive itself: real pip accepts the archive without a network.
BACKEND = """
import pathlib
def get_requires_for_build_wheel(config_settings=None):
    return []
def prepare_metadata_for_build_wheel(directory, config_settings=None):
    folder = pathlib.Path(directory) / "{top}.dist-info"
    folder.mkdir()
    text = pathlib.Path("PKG-INFO").read_text()
    (folder / "METADATA").write_text(text)
    return folder.name
"""


def versions(what: str, *numbers: int) -> str:
    """The lines of a CMakeLists.txt that say llama.cpp's version, or ggml's."""
    parts = zip(("MAJOR", "MINOR", "PATCH"), numbers, strict=True)
    return "".join(f"set({what}_VERSION_{part} {number})\n" for part, number in parts)


NEEDED = {
    "CMakeLists.txt": versions("LLAMA", 0, 5, 2),
    "LICENSE": "MIT\n",
    "cmake/run.sh": "#!/bin/sh\n",
    "ggml/CMakeLists.txt": versions("GGML", 0, 25, 3),
    "ggml/src/ggml.c": "int one = 1;\nint two = 2;\nint three = 3;\nint four = 4;\nint five = 5;\n",
    "ggml/src/ggml-cuda/convert.cu": "// device code\n",
    "include/llama.h": "int llama(void);\n",
    "src/CMakeLists.txt": "add_library(llama\n    llama.cpp\n    model.cpp\n)\n",
    "src/llama.cpp": "".join(f"int f{i}() {{ return {i}; }}\n" for i in range(40)),
    "scripts/ui-assets.cmake": "# assets\n",
    "tests/test-batch-alloc.cpp": "int main() {}\n",
    "tools/server/server.cpp": "int main() {}\n",
    "tools/ui/CMakeLists.txt": "# interface\n",
    "vendor/nlohmann/json.hpp": "// json\n",
}
NOT_NEEDED = {
    "README.md": "read me\n",
    "docs/build.md": "documentation\n",
    "ggml/src/ggml-sycl/sycl.cpp": "// a backend we never build\n",
    "models/vocab.gguf": "weights\n",
    "scripts/sync.sh": "#!/bin/sh\n",
    "tests/test-opt.cpp": "int main() {}\n",
    "tools/mtmd/test-1.jpeg": "picture\n",
    "tools/server/tests/unit.py": "pass\n",
    "tools/ui/src/app.ts": "// interface\n",
}


def make_sdist(
    path: Path,
    files: dict[str, str] | None = None,
    commit: str = COMMIT,
    links: dict[str, str] | None = None,
    version: str = VERSION,
    package: str = "llama-cpp-python",
    made: int = MADE,
) -> Path:
    """Write a source archive. `files` and `links` are relative to llama.cpp's root."""
    name_in_paths = package.replace("-", "_")
    top, folder = f"{name_in_paths}-{version}", FOLDERS[package]
    with tarfile.open(path, "w:gz") as tar:
        project = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        information = f"Metadata-Version: 2.1\nName: {name_in_paths}\nVersion: {version}\n"
        _add(tar, f"{top}/PKG-INFO", information)
        _add(tar, f"{top}/pyproject.toml", project)
        _add(tar, f"{top}/backend.py", BACKEND.replace("{top}", top))
        if package == "llama-cpp-python":
            _add(tar, f"{top}/{GIT}/HEAD", commit + "\n")
            _add(tar, f"{top}/{GIT}/logs/HEAD", GIT_LOG)
        for name, text in (NEEDED | NOT_NEEDED if files is None else files).items():
            _add(tar, f"{top}/{folder}/{name}", text, made if package == "xllamacpp" else 0)
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(f"{top}/{folder}/{name}")
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    return path


def _add(tar: tarfile.TarFile, name: str, text: str, time: int = 0) -> None:
    member = tarfile.TarInfo(name)
    member.mtime = time
    data = text.encode()
    member.size = len(data)
    member.mode = 0o755 if text.startswith("#!") else 0o644
    tar.addfile(member, io.BytesIO(data))


def make_pin(path: Path, archive: Path, requirement: str = f"llama-cpp-python=={VERSION}") -> Path:
    """Write the pin file of an archive."""
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    path.write_text(f"# a comment\n{requirement} --hash=sha256:{digest}\n")
    return path
