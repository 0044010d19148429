"""A damaged file is an error of ours, or is read: cut anywhere, bytes changed, bytes appended.

One process reads all of it, so what ends a process is seen. Model files by the thousand, with what
was changed put into a form that the next check accepts: bench/fuzz.py, tests/fuzz.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyllama_mtp import Model
from pyllama_mtp.models.mmproj import write_synthetic_mmproj
from pyllama_mtp.models.surgery import drop_head, extract_head

from ..adapters import trunk, write_adapter
from ..processes import RunPython
from .test_parts import write_parts

#: argv: the demo model, and JSON of the files by kind and how many changes of each to try.
READ = """
import json, sys
import numpy as np
from pathlib import Path
from pyllama_mtp import Model
from pyllama_mtp.images import pixels_of
from pyllama_mtp.errors import PyllamaMtpError
from pyllama_mtp.llama.vision import IMAGE_MARKER, Vision
from pyllama_mtp.models.ggufinfo import validate_model_file

demo, files = Path(sys.argv[1]), json.loads(sys.argv[2])
model, picture = Model(demo, mtp=False), np.zeros((40, 90, 3), np.uint8)

def encode(path):
    with Vision(model, path) as vision:
        vision.prompt(IMAGE_MARKER + "x", [picture])

reads = {
    "model": validate_model_file,
    "head": lambda path: validate_model_file(path.with_name("trunk.gguf"), head=path),
    "part": lambda path: validate_model_file(*path.parent.glob("m-00001-of-*.gguf")),
    "adapter": lambda path: Model(demo, lora=path).close(),
    "mmproj": encode,
    "image": lambda path: pixels_of(path.read_bytes()),
}
for kind, name, times in files:
    path, refused, rng = Path(name), 0, np.random.default_rng(1)
    whole, read = path.read_bytes(), reads[kind]
    read(path)  # as it is
    header = min(len(whole), 4000)
    for number in range(times):
        data = bytearray(whole)
        how = ("cut", "cut in the header", "append", "header", "header", "anywhere")[number % 6]
        if how == "append":
            data += rng.bytes(int(rng.integers(1, 99)))
        elif "cut" in how:
            del data[int(rng.integers(0, len(data) if how == "cut" else header)) :]
        else:
            for at in rng.integers(0, header if how == "header" else len(data), rng.integers(1, 9)):
                data[at] = rng.integers(0, 256)
        path.write_bytes(data)
        print(kind, number, how, file=sys.stderr, flush=True)  # the last line, if this ends it
        try:
            read(path)
        except PyllamaMtpError:
            refused += 1
        else:
            assert "cut" not in how or kind == "image", "a part of a file is taken for the whole"
    path.write_bytes(whole)
    print(json.dumps([kind, refused]))
"""


def test_it_is_an_error_or_is_read(
    run_python: RunPython, demo: Model, demo_file: Path, tiny_dense: Path, tmp_path: Path
) -> None:
    image = pytest.importorskip("PIL.Image")
    first, second, *_ = write_parts(tiny_dense, tmp_path, 30)
    drop_head(tiny_dense, tmp_path / "trunk.gguf")
    files = [
        ("model", first, 36),
        ("part", second, 36),
        ("head", extract_head(tiny_dense, tmp_path / "head.gguf"), 36),
        ("adapter", write_adapter(tmp_path / "adapter.gguf", demo.info, trunk(demo.info)), 24),
        ("mmproj", write_synthetic_mmproj(tmp_path / "mmproj.gguf", demo.n_embd_inp), 24),
    ]
    for kind in ("JPEG", "PNG", "GIF"):
        image.effect_noise((80, 60), 90).convert("RGB").save(tmp_path / kind, kind)
        files.append(("image", tmp_path / kind, 36))
    given = json.dumps([(kind, str(path), n) for kind, path, n in files])
    done = run_python(READ, demo_file, given)
    assert done.returncode == 0, done.stderr[-2000:]
    for (kind, _, n), line in zip(files, done.stdout.splitlines(), strict=True):
        found, refused = json.loads(line)
        assert found == kind and n // 6 <= refused < n, (kind, refused)
