"""Commands that write model files, and draft vocabularies for them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pyllama_mtp.cli import options, parsing, progress
from pyllama_mtp.drafting import vocabulary
from pyllama_mtp.errors import NoMtpHeadError, UsageError
from pyllama_mtp.files import check_target
from pyllama_mtp.models.ggufinfo import read_gguf
from pyllama_mtp.models.hub import local_file
from pyllama_mtp.models.mmproj import write_synthetic_mmproj
from pyllama_mtp.models.quantize import FILE_TYPES, WEIGHT_TYPES, quantize_model
from pyllama_mtp.models.shapes import SHAPES, get_shape
from pyllama_mtp.models.sidecar import NO_HEAD
from pyllama_mtp.models.surgery import drop_head, extract_head, graft_head
from pyllama_mtp.models.synth import TENSOR_TYPES, synthetic_size, write_synthetic
from pyllama_mtp.models.tokenizer import read_tokenizer


class Synth:
    """Write a GGUF model of a published shape with random weights, MTP head included.
    Nothing is downloaded. Its speed is the real model's, its text is nonsense.

    examples:
      pyllama-mtp synth --list
      pyllama-mtp synth --shape qwen3.5-0.8b --type q4_k_m --head-noise 0.05 m.gguf
    """

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("output", nargs="?", metavar="OUT.gguf", help="file to write")
        shapes = ", ".join(SHAPES)
        add("--shape", default="qwen3.5-0.8b", metavar="NAME", help=f"one of: {shapes}")
        about = "file type, the same mixture of tensor types as llama.cpp's: "
        add("--type", default="q8_0", type=str.lower, metavar="TYPE", help=about + _FILE_TYPES)
        _add_head_type(parser, "type of the MTP block's matrices")
        pure = "all matrices in one type, without a mixture's exceptions: "
        add("--pure", action="store_true", help=pure + ", ".join(TENSOR_TYPES))
        add("--seed", type=int, default=0, help="same seed, same file")
        add(
            "--set",
            action="append",
            default=[],
            type=_dimension,
            metavar="KEY=VALUE",
            help="change a dimension, as in --set n_layer=4; may be given several times",
        )
        add(
            "--head-noise",
            type=float,
            metavar="X",
            help="make the MTP head draft well: 0 is nearly always right, more noise less often "
            "(default: random weights, whose drafts are never accepted)",
        )
        add(
            "--empty",
            action="store_true",
            help="leave the weights out, as a hole in the file that takes no room: for 'inspect', "
            "which says what memory such a model needs",
        )
        add("--vocab", metavar="FILE.gguf", help="take tokens and chat template from this file")
        parsing.add_force_option(parser)
        vision = "write a small image encoder (mmproj) for this model instead of a model"
        add("--vision", metavar="MODEL.gguf", help=vision)
        add("--list", action="store_true", help="list the shapes and exit")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Write the file (or list the shapes) and say what was written."""
        if args.list:
            for shape in SHAPES.values():
                size = f"{synthetic_size(shape, 'q8_0') / 1e9:7.2f} GB as q8_0"
                print(f"{shape.name:17} {shape.architecture:10} {size}  {shape.source}")
            return 0
        if args.output is None:
            raise UsageError("give the file to write, as in pyllama-mtp synth model.gguf")
        if args.vocab is not None and (args.vision is not None or "n_vocab" in dict(args.set)):
            raise UsageError("--vocab decides n_vocab, and an image encoder has no tokens")
        if args.vision is not None:
            width = read_gguf(args.vision, NO_HEAD).n_embd
            path = write_synthetic_mmproj(args.output, width, args.seed, force=args.force)
            print(f"{path}: image encoder, random weights, {path.stat().st_size / 1e6:.2f} MB")
            return 0
        shape = get_shape(args.shape, **dict(args.set))
        names = ("seed", "force", "head_noise", "head_type", "pure", "empty", "vocab")
        given = {name: getattr(args, name) for name in names}
        with progress.file(shape.name) as tell:
            path = write_synthetic(args.output, shape, args.type, progress=tell, **given)
        print(f"{path}: {shape.name}, {args.type}, {path.stat().st_size / 1e9:.2f} GB")
        return 0


_FILE_TYPES, _WEIGHT_TYPES = ", ".join(FILE_TYPES), ", ".join(WEIGHT_TYPES)


def _add_head_type(parser: argparse.ArgumentParser, about: str) -> None:
    text = f"{about}: {_WEIGHT_TYPES}"
    parser.add_argument("--head-type", type=str.lower, metavar="TYPE", help=text)


@parsing.told
def _dimension(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"{text!r} is not KEY=VALUE, as in n_layer=4")
    return key.strip().replace("-", "_"), value


class Head:
    """Write a new file with an MTP head alone, with a head put in, or without it.
    Nothing is loaded; the files that are read stay as they are.

    A head's file can be given as --head. A file mtp-NAME.gguf beside the model is
    found by itself. llama-server takes it with -md and --spec-type draft-mtp.

    examples:
      pyllama-mtp head extract NAME.gguf -o mtp-NAME-Q4_0.gguf --type q4_0
      pyllama-mtp head graft TRUNK.gguf mtp-NAME.gguf -o MODEL.gguf
      pyllama-mtp head drop MODEL.gguf -o TRUNK.gguf
    """

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Add the three actions and their options."""
        words: dict[str, Any] = {"metavar": "ACTION", "title": "actions", "dest": "action"}
        actions = parser.add_subparsers(**words, required=True)

        def add(write: Any, text: str, *files: tuple[str, str]) -> argparse.ArgumentParser:
            name = write.__name__.removesuffix("_head")
            action: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
            for file, what in files:
                action.add_argument(file, metavar=file.upper(), help=what)
            output = "file to write"
            action.add_argument("-o", "--output", required=True, metavar="OUT", help=output)
            parsing.add_force_option(action)
            action.set_defaults(write=write, sources=[file for file, _ in files], kind=None)
            return action

        whole = ("file", "a model with an MTP head (.gguf)")
        trunk = ("trunk", "a model (.gguf); its own head, if it has one, is left out")
        add(extract_head, "write the MTP head of a model to a file of its own", whole).add_argument(
            "--type",
            type=parsing.one_of(tuple(WEIGHT_TYPES)),
            dest="kind",
            metavar="TYPE",
            help="type of the head's matrices, embedding and LM head (default: as they are): "
            + _WEIGHT_TYPES,
        )
        add(graft_head, "write a model with this head inside", trunk, ("head", "its MTP head"))
        add(drop_head, "write a model without its MTP head", whole)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Write the file and say what it holds."""
        sources = [getattr(args, name) for name in args.sources]
        kind = [args.kind] if args.kind else []
        with progress.file(Path(args.output).name) as tell:
            path = args.write(*sources, args.output, *kind, progress=tell, force=args.force)
        info = read_gguf(path, NO_HEAD)
        types = ", ".join(f"{kind} {n / 1e6:.1f} MB" for kind, n in info.tensor_types.items())
        print(f"{path}: {len(info.tensors)} tensors ({types})")
        return 0


class Quantize:
    """Quantize a GGUF model, MTP head included, with llama.cpp's own quantizer.

    A type such as q4_k_m is a mixture: llama.cpp chooses a type for each tensor, as
    its llama-quantize does. The chosen types are shown at the end.

    examples:
      pyllama-mtp quantize Qwen3.5-4B-F16.gguf Qwen3.5-4B-Q4_K_M.gguf --type q4_k_m
      pyllama-mtp quantize IN.gguf OUT.gguf --type iq4_xs --head-type q8_0
    """

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Add the files and options."""
        add = parser.add_argument
        source = "a model in F16, BF16 or F32: a file, or hf:OWNER/REPO[:QUANT]"
        add("input", metavar="IN.gguf", help=source)
        add("output", metavar="OUT.gguf", help="file to write")
        about = f"file type: {_FILE_TYPES}"
        add("--type", required=True, type=str.lower, metavar="TYPE", help=about)
        _add_head_type(parser, "another type for the MTP block's matrices")
        again = "also take a model that is quantized already; quantizing twice loses more"
        add("--requantize", action="store_true", help=again)
        parsing.add_whole(parser, "--threads", default=0, help="default: all cores")
        parsing.add_force_option(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Write the file and say what its tensors became."""
        names = ("head_type", "requantize", "force")
        given: dict[str, Any] = {name: getattr(args, name) for name in names}
        given["n_threads"] = args.threads
        with progress.file(args.type) as tell:
            source = local_file(args.input)
            path = quantize_model(source, args.output, args.type, progress=tell, **given)
        info = read_gguf(path)
        total = sum(info.tensor_types.values())
        shares = (f"{kind} {100 * n / total:.0f} %" for kind, n in info.tensor_types.items())
        print(f"{path}: {args.type}, {info.size / 1e9:.2f} GB ({', '.join(shares)})")
        return 0


class DraftVocab:
    """Rank a model's vocabulary by how often its tokens occur in your text, for
    --draft-vocab.

    The LM head makes drafting expensive, so drafts come from a part of the
    vocabulary. The answers do not change: the model verifies over all of it. The
    best texts are like what the model will write: answers, code, your language.
    'generate --stats' says how many tokens could not be drafted.

    examples:
      pyllama-mtp draft-vocab --model FILE --text *.txt -o ranking.json
      pyllama-mtp generate --model FILE --draft-vocab ranking.json --stats "Why?"
    """

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        options.add_model_option(parser)
        parser.add_argument(
            "--text", nargs="+", required=True, metavar="TEXT.txt", help="UTF-8 text files"
        )
        parser.add_argument(
            "-o", "--output", required=True, metavar="FILE.json", help="file to write"
        )
        parsing.add_force_option(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Rank, and write."""
        _check(args)
        path = options.model_path(args)
        info = read_gguf(path)
        if not info.supported:
            raise NoMtpHeadError(
                f"{path}: {info.why_no_mtp}; only a head has a draft vocabulary", path
            )
        tokenizer = read_tokenizer(path)
        default = vocabulary.default_ranking(tokenizer)
        ids, n = vocabulary.measure_ranking(_tokens(path, args.text), default)
        source = f"{n} tokens of {len(args.text)} text files"
        vocabulary.save(args.output, ids, tokenizer, source)
        print(f"{args.output}: {len(ids)} tokens, best first, by {source}")
        return 0


_CHUNK = 1 << 16  # characters that are tokenized at a time


def _check(args: argparse.Namespace) -> None:
    """Refuse at once what would fail after the work."""
    missing = [text for text in args.text if not Path(text).exists()]
    if missing:
        raise UsageError(f"no such text file: {missing[0]}")
    check_target(Path(args.output), args.force, *args.text)


def _tokens(path: str | Path, texts: Sequence[str]) -> Iterator[list[int]]:
    """The token ids of all texts, a chunk at a time."""
    from pyllama_mtp.llama.model import Model

    total = sum(Path(text).stat().st_size for text in texts if Path(text).is_file())
    bar = progress.file("tokenizing", transient=True, disable=not sys.stderr.isatty())
    with Model(path, n_gpu_layers=0, mtp=False) as model, bar as tell:
        done = 0
        for text in texts:
            for chunk in _chunks(text):
                yield model.tokenize(chunk, add_special=False)
                done += len(chunk.encode())
                tell(done, total)


def _chunks(path: str) -> Iterator[str]:
    """A text file in pieces that end with a line, unless a line is longer than a piece. Raises
    UsageError: the file cannot be read or is not UTF-8."""
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            while chunk := file.read(_CHUNK):
                yield chunk + file.readline(_CHUNK)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason}; convert it first") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
