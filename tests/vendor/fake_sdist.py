"""A miniature source archive with the layout of the real one, and its pin file."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

VERSION = "9.9.9"
COMMIT = "c0ffee" + "0" * 34
TOP = f"llama_cpp_python-{VERSION}"
GIT_HEAD = ".git/modules/vendor/llama.cpp/HEAD"

# A build backend inside the archive itself: real pip accepts the archive without a network.
BACKEND = """
import pathlib
def get_requires_for_build_wheel(config_settings=None):
    return []
def prepare_metadata_for_build_wheel(directory, config_settings=None):
    folder = pathlib.Path(directory) / "llama_cpp_python-9.9.9.dist-info"
    folder.mkdir()
    text = "Metadata-Version: 2.1\\nName: llama_cpp_python\\nVersion: 9.9.9\\n"
    (folder / "METADATA").write_text(text)
    return folder.name
"""

NEEDED = {
    "CMakeLists.txt": "project(llama.cpp)\n",
    "LICENSE": "MIT\n",
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
) -> Path:
    """Write a source archive. `files` and `links` are relative to llama.cpp's root."""
    top = f"llama_cpp_python-{version}"
    with tarfile.open(path, "w:gz") as tar:
        project = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        information = f"Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: {version}\n"
        _add(tar, f"{top}/PKG-INFO", information)
        _add(tar, f"{top}/pyproject.toml", project)
        _add(tar, f"{top}/backend.py", BACKEND.replace(VERSION, version))
        _add(tar, f"{top}/{GIT_HEAD}", commit + "\n")
        for name, text in (NEEDED | NOT_NEEDED if files is None else files).items():
            _add(tar, f"{top}/vendor/llama.cpp/{name}", text)
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(f"{top}/vendor/llama.cpp/{name}")
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    return path


def _add(tar: tarfile.TarFile, name: str, text: str) -> None:
    member = tarfile.TarInfo(name)
    data = text.encode()
    member.size = len(data)
    member.mode = 0o755 if text.startswith("#!") else 0o644
    tar.addfile(member, io.BytesIO(data))


def make_pin(path: Path, archive: Path) -> Path:
    """Write the pin file of an archive."""
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    path.write_text(f"# a comment\nllama-cpp-python=={VERSION} --hash=sha256:{digest}\n")
    return path
