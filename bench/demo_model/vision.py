"""Train the demo that sees: an image encoder, and trunk and head to go with it.

    cd bench && python -m demo_model.vision --help

It starts from demo.gguf, whose vocabulary gets two tokens around an image's rows. One step reads
captions of pictures, the same captions after a description in text, and the demo's own
text, so that this stays. Losses are train.py's; of captions, only the answer counts. The card,
MODEL_CARD.md, is condensed by hand from what the stages print.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer
from torch import Tensor

from pyllama_mtp.models.mmproj import MERGE, Tower, write_mmproj

from . import evaluate, export, pictures, tokenizer, tower, train
from .chat import END_OF_TEXT, IM_END
from .net import SHAPE, Model
from .pictures import ANSWER, CELL, GRID, KINDS, Picture

DEMO = Path(__file__).resolve().parents[2] / "pyllama_mtp/models/demo/demo.gguf"
HERE = DEMO.with_name("vision")
MODEL, MMPROJ = "vision-demo.gguf", "mmproj-vision-demo.gguf"
STAGES = ("train", "export", "compare", "measure")
SIDE = GRID * CELL
#: Limits around SIDE * SIDE: whatever its size, a square image is scaled to that.
ENCODER = Tower(
    192, width=64, n_heads=4, n_ff=128, n_blocks=2, patch=CELL // MERGE, image=SIDE,
    min_pixels=(SIDE - 2) ** 2, max_pixels=(SIDE + 2) ** 2,
)  # fmt: skip
IMAGE = -1  # stands for a row of an image among token ids
N_PICTURES, N_DESCRIBED, N_ROWS = 24, 12, 4  # of a step; rows of text have 256 tokens
WARM_UP_MINUTES = 2.5


def extended(path: Path) -> Model:
    """The demo with room for the tokens of tokenizer.VISION."""
    old = export.load(path)
    n_new = len(tokenizer.VISION)
    model = Model(replace(old.c, n_vocab=old.c.n_vocab + n_new))
    state = old.state_dict()
    fresh = torch.randn(n_new, old.c.n_embd, generator=torch.Generator().manual_seed(1))
    embed = state["trunk.embed_tokens.weight"]
    state["trunk.embed_tokens.weight"] = torch.cat([embed, fresh * embed.std()])
    model.load_state_dict(state)
    return model


def with_vision(words: Tokenizer, path: Path) -> Tokenizer:
    """The demo's tokenizer with tokenizer.VISION. Raises ValueError: it is not that of `path`."""
    theirs = export.gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"].contents()
    if sorted(words.get_vocab(), key=words.get_vocab().__getitem__) != theirs:
        raise ValueError(f"the vocabulary trained here is not that of {path}; use its sources")
    words.add_special_tokens(list(tokenizer.VISION))
    return words


class Samples:
    """Token ids of prompts and answers about pictures."""

    def __init__(self, words: Tokenizer) -> None:
        self.words = words
        begin, end = (words.token_to_id(token) for token in tokenizer.VISION)
        self.shown = [begin, *[IMAGE] * GRID**2, end]

    def text(self, picture: Picture, rng: np.random.Generator, image: bool) -> tuple[str, str]:
        """A prompt, in which a zero byte stands for the image, and its answer."""
        shown = "\0" if image else f"{picture.described}\n"
        if rng.random() < 0.2:  # to be gone on with
            return f"{shown}{ANSWER}", f" {picture.caption}.\n{END_OF_TEXT}"
        question = pictures.QUESTIONS[rng.integers(len(pictures.QUESTIONS))]
        first = not image or rng.random() < 0.75
        asked = pictures.prompt(question, shown, first)
        return asked, f"{ANSWER} {picture.caption}.{IM_END}\n"

    def draw(self, n: int, rng: np.random.Generator, image: bool) -> list[tuple[Any, ...]]:
        """`n` samples: token ids of the prompt (IMAGE for each row of its image) and of the answer,
        and the picture."""
        found = []
        for _ in range(n):
            picture = pictures.draw_up(rng)
            asked, answer = self.text(picture, rng, image)
            before, *after = (self.words.encode(part).ids for part in asked.split("\0"))
            ids = before + [i for part in after for i in (*self.shown, *part)]
            found.append((ids, self.words.encode(answer).ids, picture))
        return found


def positions_of(ids: list[int]) -> np.ndarray:
    """(t, y, x) of each entry, shape (3, n): rows of the image, if there is one, share t; text goes
    on after their largest."""
    found = np.tile(np.arange(len(ids)), (3, 1))
    if IMAGE in ids:
        start, cell = ids.index(IMAGE), np.arange(GRID**2)
        found[:, start : start + GRID**2] = start + np.stack([0 * cell, cell // GRID, cell % GRID])
        found[:, start + GRID**2 :] -= GRID**2 - GRID
    return found


class Captions:
    """A batch of samples, padded: all that a pass needs."""

    def __init__(self, samples: list[tuple[Any, ...]], rng: np.random.Generator) -> None:
        longest = max(len(asked) + len(answer) for asked, answer, _ in samples)
        self.tokens = torch.zeros(len(samples), longest, dtype=torch.int64)
        self.positions = torch.zeros(3, len(samples), longest, dtype=torch.int64)
        self.answer = torch.zeros(len(samples), longest - 1, dtype=torch.bool)
        for i, (asked, answer, _) in enumerate(samples):
            ids = asked + answer
            self.tokens[i, : len(ids)] = torch.tensor(ids)
            self.positions[:, i, : len(ids)] = torch.from_numpy(positions_of(ids))
            self.answer[i, len(asked) - 1 : len(ids) - 1] = True
        seen = [picture for asked, _, picture in samples if IMAGE in asked]
        self.pixels = torch.from_numpy(pictures.paint(seen, rng)) if seen else None

    def logits(self, model: Model, weights: tower.Weights) -> list[Tensor]:
        """Of trunk and draft steps 1 and 2, at the rows before an answer's tokens: (1, n, v)."""
        tokens = self.tokens[:, :-1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inputs = model.trunk.embed_tokens(tokens.clamp(min=0))
            if self.pixels is not None:
                rows = tower.encode(ENCODER, weights, self.pixels)
                inputs = inputs.masked_scatter((tokens == IMAGE)[..., None], rows)
            hidden, states = model.run(inputs, self.positions[:, :, :-1], 2)
            return [model.logits(found[self.answer][None]) for found in (hidden, *states)]

    @property
    def targets(self) -> Tensor:
        """The tokens of the answers, (1, n)."""
        return self.tokens[:, 1:][self.answer][None]


def warm_up(minutes: float, seed: int = 1) -> tower.Weights:
    """An encoder whose rows tell a linear layer what is in their cells: which kind, how many of it
    the picture has, and how many other kinds are to be named before it. 40 times faster than to
    learn that through the trunk."""
    weights = tower.draw_weights(ENCODER, seed)
    sizes = len(KINDS) + 1, pictures.MOST_KINDS + 1, len(pictures.NUMBERS) + 1
    probe = torch.nn.Linear(ENCODER.n_embd, sum(sizes))
    adam = torch.optim.AdamW([*weights.values(), *probe.parameters()], lr=2e-3, weight_decay=0.01)
    rng, start, step = np.random.default_rng(seed), time.process_time(), 0
    while (done := (time.process_time() - start) / 60 / minutes) < 1:
        adam.param_groups[0]["lr"] = 3e-3 * min(1, step / 50) * (1 - done)
        drawn = [pictures.draw_up(rng) for _ in range(128)]
        pixels = torch.from_numpy(pictures.paint(drawn, rng))
        said = probe(tower.encode(ENCODER, weights, pixels)).split(sizes, dim=-1)
        wanted = torch.tensor([cells_of(picture) for picture in drawn])
        parts = [
            F.cross_entropy(logits.flatten(0, 1), wanted[..., i].flatten())
            for i, logits in enumerate(said)
        ]
        adam.zero_grad()
        torch.stack(parts).sum().backward()
        adam.step()
        step += 1
        if step % 50 == 0:
            print(step, [round(float(part.detach()), 4) for part in parts], flush=True)
    return weights


def cells_of(picture: Picture) -> list[tuple[int, int, int]]:
    """What :func:`warm_up` teaches of each cell; zeros where it is empty."""
    taught = {None: (0, 0, 0)}
    for place, (kind, n) in enumerate(picture.counts.items(), 1):
        taught[kind] = (KINDS.index(kind) + 1, place, n)
    return [taught[kind] for kind in picture.cells]


class Run(train.Run):
    """A training run of model and encoder, by the time of one core."""

    clock = staticmethod(time.process_time)

    def __init__(
        self, work: Path, words: Tokenizer, plan: train.Plan, stream: np.ndarray, held: np.ndarray
    ) -> None:
        super().__init__(work / "vision.pt", extended(DEMO), plan, stream, held)
        self.samples, self.rows = Samples(words), evaluate.Rows(stream, plan.row, 3)
        if self.file.exists():
            self.weights = tower.draw_weights(ENCODER, plan.seed)
        else:
            self.weights = warm_up(WARM_UP_MINUTES, plan.seed)
            rows = tower.encode(ENCODER, self.weights, self.captions(64, 0).pixels).detach()
            for name in ("mm.2.weight", "mm.2.bias"):  # as large as embeddings
                self.weights[name].data *= (
                    self.model.trunk.embed_tokens.weight.data.std() / rows.std()
                )
        adam = torch.optim.AdamW(self.weights.values(), lr=plan.lr_other, weight_decay=0.0)
        adam.param_groups[0]["base_lr"] = plan.lr_other
        self.optimizers.append(adam)
        self.load()

    def load(self) -> bool:
        """Also the encoder."""
        if found := super().load():
            for name, value in torch.load(self.file, weights_only=True)["tower"].items():
                self.weights[name].data.copy_(value)
        return found

    def save(self, **more: Any) -> None:
        """Also the encoder."""
        super().save(tower={name: value.detach() for name, value in self.weights.items()})

    def captions(self, n_pictures: int, n_described: int) -> Captions:
        """Samples of the next step."""
        rng = np.random.default_rng((1, self.step))
        drawn = self.samples.draw(n_pictures, rng, True)
        return Captions(drawn + self.samples.draw(n_described, rng, False), rng)

    def one_step(self) -> dict[str, float]:
        """One optimizer step."""
        batch = self.captions(N_PICTURES, N_DESCRIBED)
        captions, said = train.losses(batch.logits(self.model, self.weights), batch.targets)
        captions.backward()
        rows = self.rows.batch(self.step, N_ROWS)
        logits = train.all_logits(self.model, rows[:, :-1])
        text, read = train.losses(logits, rows[:, 1:])
        text.backward()
        self.update([*self.model.parameters(), *self.weights.values()])
        return said | {f"text_{name}": value for name, value in read.items()}


def write(work: Path, out: Path, words: Tokenizer) -> None:
    """Write both files of the checkpoint."""
    saved = torch.load(work / "vision.pt", weights_only=True)
    model, weights = extended(DEMO), saved["tower"]
    model.load_state_dict(saved["model"])
    out.mkdir(exist_ok=True)
    export.export(model, words, out / MODEL, {"steps": saved["step"]}, export.Q8_0, "vision-demo")
    write_mmproj(
        out / MMPROJ, ENCODER, lambda name, _: weights[name].numpy(), "pyllama-mtp vision-demo",
        force=True,
    )  # fmt: skip


@torch.no_grad()
def compare(out: Path) -> None:
    """Print the largest difference of an image's rows from llama.cpp's."""
    from pyllama_mtp import Model as Loaded
    from pyllama_mtp.llama.vision import IMAGE_MARKER, Vision

    rng = np.random.default_rng(0)
    pixels = pictures.paint([pictures.draw_up(rng)], rng)
    rows = tower.encode(ENCODER, tower.load(out / MMPROJ), torch.from_numpy(pixels))[0]
    with Loaded(out / MODEL) as model, Vision(model, out / MMPROJ, n_threads=1) as vision:
        (placed,) = vision.prompt(IMAGE_MARKER, [pixels[0]]).images
        print("rows:", float((rows - torch.from_numpy(placed.image.rows)).abs().max()))


def measure(work: Path, out: Path) -> None:
    """Print what the card says of answers and of text."""
    from image_acceptance import measure

    for name, count in zip(("after an image", "after text"), measure(300), strict=True):
        print(f"{name}: {count}")
    for path in (DEMO, out / MODEL):
        print(path.name, evaluate.on_text(export.load(path), np.load(work / "heldout.npy"), 160))


def main() -> None:
    """Run the stages that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m demo_model.vision")
    parser.add_argument("--minutes", type=float, default=20.0, help="of one core (default 20)")
    parser.add_argument("--work", type=Path, default=Path("demo-work"), help="as of the demo")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the files and their card")
    parser.add_argument("--stages", default=",".join(STAGES), help="comma list (default: all)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    words, stream, heldout = tokenizer.prepare(args.work, SHAPE.n_vocab, 1)
    words, stages = with_vision(words, DEMO), args.stages.split(",")
    if "train" in stages:
        rates = {"lr_matrix": 2e-3, "lr_other": 1e-3, "warmup": 0.05}  # it has learned already
        plan = train.Plan(args.minutes, **rates, checkpoint_minutes=1, threads=1)
        Run(args.work, words, plan, stream, heldout).loop()
    if "export" in stages:
        write(args.work, args.out, words)
    if "compare" in stages:
        compare(args.out)
    if "measure" in stages:
        measure(args.work, args.out)


if __name__ == "__main__":
    main()
