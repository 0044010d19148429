"""Write an image encoder (mmproj) with random weights: the Qwen3-VL tower that Qwen3.5 models have.

The file is small, and its images say nothing; but positions, shapes and the way through the graph
are those of published files. The same seed gives the same bytes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter

from ..errors import UsageError
from ..files import check_target, write_error

#: The tower: width, heads, width of the feed-forward part, blocks; pixels of a patch's side, and of
#: the image's that positions were learned for; patches of a token's side.
WIDTH, HEADS, FEED_FORWARD, BLOCKS = 64, 4, 128, 2
PATCH, IMAGE, MERGE = 16, 256, 2
#: Pixels of an image: 8 to 1024 tokens.
TOKEN_PIXELS = (PATCH * MERGE) ** 2
MIN_PIXELS, MAX_PIXELS = 8 * TOKEN_PIXELS, 1024 * TOKEN_PIXELS


def write_synthetic_vision(
    path: str | os.PathLike[str], n_embd: int, seed: int = 0, *, force: bool = False
) -> Path:
    """Write an image encoder for a text model of width `n_embd` and return its path.

    Args:
        seed: any non-negative whole number.
        force: overwrite an existing file.

    Raises:
        UsageError: an existing file, an unusable folder, a bad width or seed.
        DiskFullError: not enough free space.
    """
    target = Path(path)
    if n_embd < 1 or seed < 0:
        raise UsageError(f"n_embd {n_embd} and seed {seed}: at least 1, and at least 0")
    check_target(target, force)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        writer = GGUFWriter(part, "clip")
        try:
            _add_parameters(writer, n_embd)
            for name, array in _tensors(n_embd, np.random.default_rng(seed)).items():
                writer.add_tensor(name, array)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()
        part.replace(target)
    except OSError as error:
        raise write_error(error, target) from error
    finally:
        part.unlink(missing_ok=True)
    return target


def _add_parameters(writer: GGUFWriter, n_embd: int) -> None:
    """Metadata under the keys that upstream's tools/mtmd/clip.cpp reads."""
    writer.add_type("mmproj")
    writer.add_name("synthetic image encoder, random weights")
    writer.add_bool("pyllama_mtp.synthetic", True)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    writer.add_string("clip.projector_type", "qwen3vl_merger")
    numbers = {
        "image_size": IMAGE,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "image_min_pixels": MIN_PIXELS,
        "image_max_pixels": MAX_PIXELS,
        "embedding_length": WIDTH,
        "feed_forward_length": FEED_FORWARD,
        "block_count": BLOCKS,
        "attention.head_count": HEADS,
        "projection_dim": n_embd,
    }
    for name, value in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for name in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{name}", [0.5, 0.5, 0.5])


def _tensors(n_embd: int, rng: np.random.Generator) -> dict[str, npt.NDArray[Any]]:
    """All weights by name, in the order of the shapes' slowest dimension first."""
    tensors: dict[str, npt.NDArray[Any]] = {}

    def matrix(name: str, *shape: int) -> None:
        n_inputs = int(np.prod(shape[1:]))
        drawn = rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(n_inputs))
        tensors[name] = drawn.astype(np.float16)

    def linear(name: str, n_out: int, n_in: int) -> None:
        matrix(f"{name}.weight", n_out, n_in)
        tensors[f"{name}.bias"] = 0.1 * rng.standard_normal(n_out, dtype=np.float32)

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = np.ones(WIDTH, np.float32)
        tensors[f"{name}.bias"] = np.zeros(WIDTH, np.float32)

    for name in ("v.patch_embd.weight", "v.patch_embd.weight.1"):  # of two frames
        matrix(name, WIDTH, 3, PATCH, PATCH)
    tensors["v.patch_embd.bias"] = 0.1 * rng.standard_normal(WIDTH, dtype=np.float32)
    n_places = (IMAGE // PATCH) ** 2
    tensors["v.position_embd.weight"] = rng.standard_normal((n_places, WIDTH), dtype=np.float32)
    for i in range(BLOCKS):
        linear(f"v.blk.{i}.attn_qkv", 3 * WIDTH, WIDTH)
        linear(f"v.blk.{i}.attn_out", WIDTH, WIDTH)
        linear(f"v.blk.{i}.ffn_up", FEED_FORWARD, WIDTH)
        linear(f"v.blk.{i}.ffn_down", WIDTH, FEED_FORWARD)
        norm(f"v.blk.{i}.ln1")
        norm(f"v.blk.{i}.ln2")
    norm("v.post_ln")
    merged = MERGE * MERGE * WIDTH
    linear("mm.0", merged, merged)
    linear("mm.2", n_embd, merged)
    return tensors
