"""Image encoders in files (mmproj): find one beside a model, check it, write one.

The usual encoder is the tower of Qwen3-VL as Qwen3.5 and later models have it, without deepstack;
upstream calls it "qwen3vl_merger" (tools/mtmd/models/qwen3vl.cpp). Upstream's loader trusts a file:
an odd number or shape would end the process in the graph. So files are checked here before; those
of other towers are tried in a child process, see :mod:`..llama.trial`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path, PurePath

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter

from ..errors import ModelFileError, UsageError
from ..files import check_target, complete
from .ggufinfo import read_gguf
from .modelinfo import GGUFInfo
from .sidecar import TYPE_IN_NAME, is_named

PROJECTOR = "qwen3vl_merger"
#: Types of matrices that are read; vectors are F32.
MATRIX_TYPES = (
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q4_K",
    "Q5_K",
    "Q6_K",
)
#: The most tokens that a file may want of an image, and the most blocks and channels of a tower.
MOST_TOKENS, MOST_BLOCKS, MOST_WIDTH = 1 << 16, 256, 1 << 14
#: In the name of a file, and which types are best.
_MARK = re.compile(r"(^|[-._])mmproj([-._]|$)")
_BEST_TYPES = ("f16", "bf16", "f32", "q8_0")
MERGE = 2  # patches of a token's side: upstream's graph knows no other


@dataclass(frozen=True)
class Tower:
    """Dimensions of an image encoder.

    Attributes:
        n_embd: of the text model.
        width, n_heads, n_ff, n_blocks: of the tower.
        patch: pixels of a patch's side; `image`: of the image's that positions were learned for.
        min_pixels, max_pixels: to which images are scaled; 0: upstream's 8 and 4,096 tokens.
    """

    n_embd: int
    width: int = 64
    n_heads: int = 4
    n_ff: int = 128
    n_blocks: int = 2
    patch: int = 16
    image: int = 256
    min_pixels: int = 0
    max_pixels: int = 0

    def problems(self) -> list[str]:
        """What upstream's graph cannot compute."""
        token, heads = (self.patch * MERGE) ** 2, max(self.n_heads, 1)
        most = MOST_TOKENS * token
        wrong = {
            f"{name} is {getattr(self, name)}": not 1 <= getattr(self, name) <= most
            for name, most in (("n_embd", 1 << 20), ("width", MOST_WIDTH), ("n_heads", 1024),
                               ("n_ff", 1 << 20), ("n_blocks", MOST_BLOCKS), ("patch", 256))
        }  # fmt: skip
        wrong |= {
            f"{self.n_heads} heads of {self.width} channels": self.width % (4 * heads) != 0,
            f"an image of {self.image} pixels": not (
                self.patch and 1 <= self.image // self.patch <= 512 and not self.image % self.patch
            ),
            f"images of {self.min_pixels} to {self.max_pixels} pixels": not (
                0 <= self.min_pixels <= (self.max_pixels or 4096 * token) <= most
            ),
        }
        return [what for what, is_wrong in wrong.items() if is_wrong]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor by name, in numpy's order."""
        merged, width = MERGE * MERGE * self.width, self.width
        linear = {"mm.0": (merged, merged), "mm.2": (self.n_embd, merged)}
        norms = ["v.post_ln"]
        for i in range(self.n_blocks):
            block = f"v.blk.{i}"
            linear |= {
                f"{block}.attn_qkv": (3 * width, width),
                f"{block}.attn_out": (width, width),
                f"{block}.ffn_up": (self.n_ff, width),
                f"{block}.ffn_down": (width, self.n_ff),
            }
            norms += [f"{block}.ln1", f"{block}.ln2"]
        patch = width, 3, self.patch, self.patch
        shapes: dict[str, tuple[int, ...]] = {
            "v.patch_embd.weight": patch,  # of two frames, which a picture has twice
            "v.patch_embd.weight.1": patch,
            "v.patch_embd.bias": (width,),
            "v.position_embd.weight": ((self.image // self.patch) ** 2, width),
        }
        for name, (n_out, n_in) in linear.items():
            shapes |= {f"{name}.weight": (n_out, n_in), f"{name}.bias": (n_out,)}
        for name in norms:
            shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
        return shapes


#: Keys of the dimensions in files, below "clip.vision.".
_KEYS = {
    "n_embd": "projection_dim",
    "width": "embedding_length",
    "n_heads": "attention.head_count",
    "n_ff": "feed_forward_length",
    "n_blocks": "block_count",
    "patch": "patch_size",
    "image": "image_size",
    "min_pixels": "image_min_pixels",
    "max_pixels": "image_max_pixels",
}
#: Keys of other encoders, which would change what upstream computes.
_FOREIGN = (
    "feature_layer",
    "head_count_kv",
    "head_dim",
    "n_wa_pattern",
    "wa_layer",
    "grid",
    "silu",
)


def find_mmproj(model: str | os.PathLike[str]) -> Path | None:
    """The image encoder beside a model file, by the rule of :func:`fitting_mmprojs`, or None."""
    path = Path(model)
    try:
        files = sorted(str(file) for file in path.parent.glob("*.gguf") if file.is_file())
    except (OSError, ValueError):  # a folder that cannot be read; a null character
        return None
    return next(map(Path, fitting_mmprojs(path.name, files)), None)


def fitting_mmprojs(model: str, files: Iterable[str]) -> list[str]:
    """The image encoders for a model, by their names, the best first.

    Those with the model's name (``mmproj-NAME-F16.gguf`` for ``NAME-Q4_K_M.gguf``) come first, then
    those without a name (``mmproj-F16.gguf``). Where there is neither, those with another name, if
    it is one name only. Of equals F16 comes before BF16, F32 and Q8_0, and these before other
    types: F16 is quick on every CPU and GPU, and half of F32's size.

    Args:
        model: the name of the model's file, without its folder.
        files: paths of any files.
    """
    stem = model.lower().removesuffix(".gguf")
    named, nameless, others = list[str](), list[str](), list[str]()
    for file in files:
        path = PurePath(file.lower())
        if path.suffix != ".gguf" or not _MARK.search(path.stem):
            continue
        name, _ = _read_name(file)
        (nameless if not name else named if is_named(stem, name) else others).append(file)
    if len({_read_name(file)[0] for file in others}) > 1:
        others = []

    def order(file: str) -> tuple[int, int]:
        name, kind = _read_name(file)
        rank = _BEST_TYPES.index(kind) if kind in _BEST_TYPES else len(_BEST_TYPES)
        return -len(name), rank

    return sorted(named, key=order) + sorted(nameless, key=order) or sorted(others, key=order)


def _read_name(file: str) -> tuple[str, str]:
    """The model's name in the name of an encoder's file, if there is one, and its type."""
    whole = PurePath(file).name.lower().removesuffix(".gguf")
    kind = TYPE_IN_NAME.search(whole)
    name = _MARK.sub("", whole[: kind.start()] if kind else whole)
    return "" if name == "model" else name, kind[0][1:] if kind else ""


def read_mmproj(path: str | os.PathLike[str]) -> Tower | str:
    """The dimensions of an image encoder, checked; of another kind of tower, the kind's name alone.
    Raises ModelFileError: no file, no image encoder, or a damaged one."""
    info = read_gguf(path)
    said = info.metadata

    def refusal(why: str) -> ModelFileError:
        return ModelFileError(f"{path} is no image encoder that works here: {why}", path)

    if info.architecture != "clip":
        raise refusal(f"a model of the architecture {info.architecture}, and not an mmproj file")
    if not said.get("clip.has_vision_encoder"):
        raise refusal("an encoder of audio" if said.get("clip.has_audio_encoder") else "no encoder")
    kind = said.get("clip.projector_type") or said.get("clip.vision.projector_type")
    deep = said.get("clip.vision.is_deepstack_layers", ())
    if kind != PROJECTOR or (isinstance(deep, tuple) and any(deep)):
        return str(kind)
    numbers = {name: said.get(f"clip.vision.{key}", 0) for name, key in _KEYS.items()}
    if not all(type(number) is int for number in numbers.values()):
        raise refusal("dimensions that are not whole numbers")
    tower = Tower(**numbers)  # type: ignore[arg-type]
    if wrong := tower.problems() + _odd_parameters(info) or _odd_tensors(info, tower):
        raise refusal("; ".join(wrong[:4]))
    return tower


def _odd_parameters(info: GGUFInfo) -> list[str]:
    said, wrong = info.metadata, list[str]()
    eps = said.get("clip.vision.attention.layer_norm_epsilon")
    if not (isinstance(eps, float) and 0 < eps < 1):
        wrong.append(f"layer_norm_epsilon is {eps}")
    for name, may_be_0 in (("image_mean", True), ("image_std", False)):
        values = said.get(f"clip.vision.{name}")
        if not (
            isinstance(values, tuple)
            and len(values) == 3
            and all(abs(value) < 100 and (may_be_0 or value != 0) for value in values)
        ):
            wrong.append(f"{name} is {values}")
    merge = said.get("clip.vision.spatial_merge_size", MERGE)
    if merge != MERGE:
        wrong.append(f"spatial_merge_size is {merge}")
    if not isinstance(said.get("clip.vision.is_deepstack_layers", ()), tuple):
        wrong.append("is_deepstack_layers is no list")
    known = {f"clip.vision.{key}" for key in _KEYS.values()}
    for key in said.keys() - known:
        if key.startswith("clip.") and any(part in key for part in _FOREIGN) and said[key]:
            wrong.append(f"the key {key} is not supported")
    return wrong


def _odd_tensors(info: GGUFInfo, tower: Tower) -> list[str]:
    wanted, wrong = tower.tensors(), list[str]()
    there = {tensor.name: tensor for tensor in info.tensors}
    for name in sorted(wanted.keys() | there.keys()):
        tensor, shape = there.get(name), wanted.get(name)
        if tensor is None:
            wrong.append(f"{name} is missing")
        elif shape is None:
            wrong.append(f"{name} is not known")
        elif tensor.shape != shape[::-1]:
            wrong.append(f"{name} has the shape {tensor.shape} and not {shape[::-1]}")
        else:
            kinds: tuple[str, ...] = ("F32",)
            if len(shape) > 1 and "position" not in name:
                kinds = MATRIX_TYPES if len(shape) == 2 else MATRIX_TYPES[:3]
            if tensor.type not in kinds:
                wrong.append(f"{name} is of the type {tensor.type}")
    return wrong


# -- writing ---------------------------------------------------------------------------------------


def write_mmproj(
    path: str | os.PathLike[str],
    tower: Tower,
    tensor: Callable[[str, tuple[int, ...]], npt.NDArray[np.float32]],
    name: str,
    *,
    synthetic: bool = False,
    force: bool = False,
) -> Path:
    """Write an image encoder; matrices are F16, and vectors and positions F32.

    Args:
        tensor: the values of a tensor, by name and shape, in the order of :meth:`Tower.tensors`.
        name: of the encoder, in the metadata.
        synthetic: say in the metadata that the weights are random.
        force: overwrite an existing file.

    Raises:
        UsageError: an existing file, an unusable folder, bad dimensions.
        DiskFullError: not enough free space.
    """
    target = Path(path)
    if wrong := tower.problems():
        raise UsageError(f"no such image encoder: {'; '.join(wrong)}")
    check_target(target, force)
    with complete(target) as part, closing(GGUFWriter(part, "clip")) as writer:
        _add_parameters(writer, tower, name, synthetic)
        for key, shape in tower.tensors().items():
            values = tensor(key, shape)
            small = len(shape) == 1 or "position" in key
            writer.add_tensor(key, values if small else values.astype(np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return target


def write_synthetic_mmproj(
    path: str | os.PathLike[str],
    n_embd: int,
    seed: int = 0,
    *,
    force: bool = False,
    **dimensions: int,
) -> Path:
    """Write an image encoder with random weights for a text model of width `n_embd`.

    The default tower is small, 0.6 MB, and what it sees says nothing; but positions, shapes and
    graph are those of published files. The same seed gives the same bytes.

    Args:
        seed: any non-negative whole number.
        force: overwrite an existing file.
        dimensions: of :class:`Tower`, by name.

    Raises:
        UsageError: an existing file, an unusable folder, bad dimensions.
        DiskFullError: not enough free space.
    """
    unknown = dimensions.keys() - {field.name for field in fields(Tower)}
    if unknown or seed < 0:
        raise UsageError(f"unknown dimension {sorted(unknown)}, or a seed below 0 ({seed})")
    rng = np.random.default_rng(seed)
    return write_mmproj(
        path,
        Tower(n_embd, **dimensions),
        lambda name, shape: _drawn(rng, name, shape),
        "synthetic image encoder, random weights",
        synthetic=True,
        force=force,
    )


def _drawn(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """A tensor's values: norms are 1 and 0, matrices keep the size of what they multiply."""
    if ".ln" in name or "_ln" in name:
        return np.full(shape, name.endswith("weight"), np.float32)
    drawn = rng.standard_normal(shape, dtype=np.float32)
    if "position" not in name:
        drawn *= np.float32(0.1 if len(shape) == 1 else 1 / math.sqrt(math.prod(shape[1:])))
    return drawn


def _add_parameters(writer: GGUFWriter, tower: Tower, name: str, synthetic: bool) -> None:
    """Metadata under the keys that upstream's tools/mtmd/clip.cpp reads."""
    writer.add_type("mmproj")
    writer.add_name(name)
    if synthetic:
        writer.add_bool("pyllama_mtp.synthetic", True)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    writer.add_string("clip.projector_type", PROJECTOR)
    for name, key in _KEYS.items():
        if value := getattr(tower, name):
            writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_uint32("clip.vision.spatial_merge_size", MERGE)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for name in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{name}", [0.5, 0.5, 0.5])
