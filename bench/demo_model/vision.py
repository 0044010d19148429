"""Train the demo that sees: an image encoder, and trunk and head to go with it.

    cd bench && python -m demo_model.vision --help

It starts from demo.gguf, whose vocabulary gets two tokens around an image's rows. One step reads
captions of pictures, the same captions after a description in text, and the demo's own
text, so that this stays. Losses are train.py's; of captions, only the answer counts.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import tempfile
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
from .net import Model, image_rope_tables
from .pictures import ANSWER, CELL, GRID, KINDS, Picture

DEMO = Path(__file__).resolve().parents[2] / "pyllama_mtp/models/demo/demo.gguf"
HERE = DEMO.with_name("vision")
MODEL, MMPROJ = "vision-demo.gguf", "mmproj-vision-demo.gguf"
TEMPLATE = Path(__file__).with_name("vision_card.md.in")
STAGES = ("train", "export", "compare", "card")
SIDE = GRID * CELL
#: Limits around SIDE * SIDE: whatever its size, a square image is scaled to that.
ENCODER = Tower(
    192, width=64, n_heads=4, n_ff=128, n_blocks=2, patch=CELL // MERGE, image=SIDE,
    min_pixels=(SIDE - 2) ** 2, max_pixels=(SIDE + 2) ** 2,
)  # fmt: skip
IMAGE = -1  # stands for a row of an image among token ids
N_PICTURES, N_DESCRIBED, N_ROWS = 24, 12, 4  # of a step; rows of text have 256 tokens
WARM_UP_MINUTES = 2.5
SEEDS = {"train": 1, "heldout": 2}


def extended(path: Path) -> Model:
    """The demo with room for the tokens of tokenizer.VISION."""
    old = export.load(path)
    n_new = len(tokenizer.VISION)
    model = Model(replace(old.c, n_vocab=old.c.n_vocab + n_new))
    state = old.state_dict()
    fresh = torch.randn(n_new, old.c.n_embd, generator=torch.Generator().manual_seed(1))
    state["embed"] = torch.cat([state["embed"], fresh * state["embed"].std()])
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
        self.rows = [IMAGE] * GRID**2
        begin, end = (words.token_to_id(token) for token in tokenizer.VISION)
        self.shown = [begin, *self.rows, end]

    def text(self, picture: Picture, rng: np.random.Generator, image: bool) -> tuple[str, str]:
        """A prompt, in which a zero byte stands for the image, and its answer."""
        shown = "\0" if image else f"{picture.described}\n"
        if rng.random() < 0.2:  # to be gone on with
            return f"{shown}{ANSWER}", f" {picture.caption}.\n{END_OF_TEXT}"
        question = pictures.QUESTIONS[rng.integers(len(pictures.QUESTIONS))]
        first = not image or rng.random() < 0.75
        asked = pictures.prompt(question, shown, first)
        return asked, f"{ANSWER} {picture.caption}.{IM_END}\n"

    def ids(self, prompt: str) -> list[int]:
        """Token ids of a prompt of :meth:`text`; IMAGE for each row of its image."""
        parts = [self.words.encode(part).ids for part in prompt.split("\0")]
        return parts[0] + [i for part in parts[1:] for i in (*self.shown, *part)]

    def draw(self, n: int, rng: np.random.Generator, image: bool) -> list[tuple[Any, ...]]:
        """`n` samples: token ids of the prompt and of the answer, and the picture."""
        found = []
        for _ in range(n):
            picture = pictures.draw_up(rng)
            asked, answer = self.text(picture, rng, image)
            found.append((self.ids(asked), self.words.encode(answer).ids, picture))
        return found


def positions_of(ids: list[int]) -> list[tuple[int, int, int]]:
    """(t, y, x) of each entry: rows of an image share t; text goes on after their largest."""
    found: list[tuple[int, int, int]] = []
    place = 0
    for is_image, group in itertools.groupby(ids, key=lambda i: i == IMAGE):
        n = len(list(group))
        if is_image:
            found += [(place, place + i // GRID, place + i % GRID) for i in range(n)]
            place += GRID
        else:
            found += [(p, p, p) for p in range(place, place + n)]
            place += n
    return found


def embedded(model: Model, tokens: Tensor, rows: Tensor) -> Tensor:
    """Embeddings (batch, tokens, n_embd): of tokens, and an image's rows where these are IMAGE."""
    out = F.embedding(tokens.clamp(min=0), model.embed)
    if len(rows):
        out = out.masked_scatter((tokens == IMAGE)[..., None], rows.to(out.dtype))
    return out


class Captions:
    """A batch of samples, padded: all that a pass needs."""

    def __init__(self, samples: list[tuple[Any, ...]], rng: np.random.Generator) -> None:
        longest = max(len(asked) + len(answer) for asked, answer, _ in samples)
        self.tokens = torch.zeros(len(samples), longest, dtype=torch.int64)
        self.positions = torch.zeros(len(samples), longest, 3, dtype=torch.int64)
        self.answer = torch.zeros(len(samples), longest - 1, dtype=torch.bool)
        for i, (asked, answer, _) in enumerate(samples):
            ids = asked + answer
            self.tokens[i, : len(ids)] = torch.tensor(ids)
            self.positions[i, : len(ids)] = torch.tensor(positions_of(ids))
            self.answer[i, len(asked) - 1 : len(ids) - 1] = True
        seen = [picture for asked, _, picture in samples if IMAGE in asked]
        self.pixels = torch.from_numpy(pictures.paint(seen, rng)) if seen else None

    def logits(self, model: Model, weights: tower.Weights) -> list[Tensor]:
        """Of trunk and draft steps 1 and 2, at the rows before an answer's tokens: (1, n, v)."""
        rows = torch.zeros(0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if self.pixels is not None:
                rows = tower.encode(ENCODER, weights, self.pixels)
            tables = image_rope_tables(model.c, self.positions[:, :-1])
            inputs = embedded(model, self.tokens[:, :-1], rows)
            hidden, states = model.run(inputs, *tables, 2)
            return [model.logits(found[self.answer][None]) for found in (hidden, *states)]

    @property
    def targets(self) -> Tensor:
        """The tokens of the answers, (1, n)."""
        return self.tokens[:, 1:][self.answer][None]


@torch.no_grad()
def figures(batch: Captions, model: Model, weights: tower.Weights) -> dict[str, float]:
    """Part of the answers that greedy choice gets wholly right, and agreement of the drafts."""
    trunk, head, second = (x.argmax(-1) for x in batch.logits(model, weights))
    right = torch.ones_like(batch.answer)
    right[batch.answer] = (trunk == batch.targets)[0]
    return {
        "whole": float(right.all(1).float().mean()),
        "agree": float((head == trunk).float().mean()),
        "agree2": float((second == trunk).float().mean()),
    }


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
    counts = picture.counts
    order = list(counts)
    return [
        (KINDS.index(kind) + 1, order.index(kind) + 1, counts[kind]) if kind else (0, 0, 0)
        for kind in picture.cells
    ]


class Run:
    """A training run, which goes on from `work/vision.pt` if there is one."""

    def __init__(self, work: Path, words: Tokenizer, plan: train.Plan) -> None:
        self.file, self.samples, self.plan = work / "vision.pt", Samples(words), plan
        self.model, self.weights = extended(DEMO), tower.draw_weights(ENCODER, plan.seed)
        self.optimizers = train.optimizers(self.model, plan)
        adam = torch.optim.AdamW(self.weights.values(), lr=plan.lr_other, weight_decay=0.0)
        adam.param_groups[0]["base_lr"] = plan.lr_other
        self.optimizers.append(adam)
        self.step, self.seconds = 0, 0.0
        if self.file.exists():
            self._load()
        else:
            self._take(warm_up(WARM_UP_MINUTES, plan.seed))
            rows = tower.encode(ENCODER, self.weights, self.captions("train", 0, 64, 0).pixels)
            for name in ("mm.2.weight", "mm.2.bias"):  # as large as embeddings
                self.weights[name].data *= float(self.model.embed.std() / rows.std())

    def _load(self) -> None:
        saved = torch.load(self.file, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self._take(saved["tower"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.step, self.seconds = saved["step"], saved["seconds"]

    def _take(self, weights: tower.Weights) -> None:
        for name, value in weights.items():
            self.weights[name].data.copy_(value)

    def save(self) -> None:
        """Write the checkpoint; the old one stays until the new one is complete."""
        partial = self.file.with_suffix(".part")
        saved = {
            "model": self.model.state_dict(),
            "tower": {name: value.detach() for name, value in self.weights.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
        }
        torch.save(saved, partial)
        partial.replace(self.file)

    def captions(self, part: str, step: int, n_pictures: int, n_described: int) -> Captions:
        """Samples of a step."""
        rng = np.random.default_rng((SEEDS[part], step))
        drawn = self.samples.draw(n_pictures, rng, True) + self.samples.draw(
            n_described, rng, False
        )
        return Captions(drawn, rng)

    def one_step(self, rows: Tensor) -> dict[str, float]:
        """One optimizer step."""
        factor = train.rate(self.seconds / 60 / self.plan.minutes, self.plan)
        batch = self.captions("train", self.step, N_PICTURES, N_DESCRIBED)
        captions, said = train.losses(batch.logits(self.model, self.weights), batch.targets)
        captions.backward()
        text, read = train.losses(
            train.all_logits(self.model, self.model, rows[:, :-1]), rows[:, 1:]
        )
        text.backward()
        parameters = [*self.model.parameters(), *self.weights.values()]
        train.step(self.optimizers, parameters, factor)
        self.step += 1
        return said | {f"text_{name}": value for name, value in read.items()}

    def loop(self, stream: np.ndarray, heldout: np.ndarray) -> None:
        """Train to the end of the plan; logs to work/vision.jsonl, checkpoints as it goes."""
        rows = train.Rows(stream, self.plan.row, 3)
        mark = saved = time.process_time()
        while self.seconds < 60 * self.plan.minutes:
            said = self.one_step(rows.batch(self.step, N_ROWS))
            now = time.process_time()
            self.seconds, mark = self.seconds + now - mark, now
            if self.step % 10 == 0:
                self._log(said)
            if now - saved > 60:
                saved = now
                self._log(self.checked(heldout))
                self.save()
        self._log(self.checked(heldout))
        self.save()

    def checked(self, heldout: np.ndarray) -> dict[str, float]:
        """Figures on held-out pictures, lists and text."""
        found = {}
        for name, counts in (("image", (64, 0)), ("described", (0, 64))):
            batch = self.captions("heldout", 0, *counts)
            said = figures(batch, self.model, self.weights)
            found |= {f"{name}_{key}": value for key, value in said.items()}
        return found | train.quick_eval(self.model, heldout, 8)

    def _log(self, said: dict[str, float]) -> None:
        record = {"step": self.step, "seconds": round(self.seconds, 1)}
        record |= {key: round(value, 4) for key, value in said.items()}
        with self.file.with_suffix(".jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)


def trained(work: Path) -> tuple[Model, tower.Weights, dict[str, Any]]:
    """Model and encoder of the checkpoint, and its record."""
    saved = torch.load(work / "vision.pt", weights_only=True)
    model = extended(DEMO)
    model.load_state_dict(saved["model"])
    return model, saved["tower"], {"steps": saved["step"], "seconds": saved["seconds"]}


def write(work: Path, out: Path, words: Tokenizer) -> None:
    """Write both files of the checkpoint."""
    model, weights, run = trained(work)
    out.mkdir(exist_ok=True)
    export.export(model, words, out / MODEL, {"steps": run["steps"]}, export.Q8_0, "vision-demo")
    write_mmproj(
        out / MMPROJ, ENCODER, lambda name, _: weights[name].numpy(), "pyllama-mtp vision-demo",
        force=True,
    )  # fmt: skip


@torch.no_grad()
def compare(out: Path, words: Tokenizer) -> None:
    """Print the largest differences from llama.cpp on both files: an image's rows, and logits of
    the trunk after them, in float32."""
    from pyllama_mtp import Model as Loaded
    from pyllama_mtp.llama.context import Context
    from pyllama_mtp.llama.contextoptions import ContextOptions
    from pyllama_mtp.llama.vision import IMAGE_MARKER, Vision
    from pyllama_mtp.models.quantize import quantize_model

    net, weights, rng = export.load(out / MODEL), tower.load(out / MMPROJ), np.random.default_rng(0)
    samples = Samples(words)
    exact = ContextOptions(
        n_ctx=256, n_batch=256, n_ubatch=256, n_threads=1, type_k="f32", type_v="f32",
        flash_attn="off", n_outputs_max=256,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = quantize_model(out / MODEL, Path(folder) / "f32.gguf", "f32", requantize=True)
        with Loaded(path) as model, Vision(model, out / MMPROJ, n_threads=1) as vision:
            picture = pictures.draw_up(rng)
            asked, answer = samples.text(picture, rng, True)
            pixels = pictures.paint([picture], rng)
            text = asked.replace("\0", IMAGE_MARKER) + answer
            prompt = vision.prompt(text, [pixels[0]], add_special=False)
            ids = [max(entry, IMAGE) for entry in prompt.entries]
            assert ids == samples.ids(asked) + words.encode(answer).ids, "other token ids"
            (placed,) = prompt.images
            rows = tower.encode(ENCODER, weights, torch.from_numpy(pixels))
            print("rows:", float((rows[0] - torch.from_numpy(placed.image.rows)).abs().max()))
            tables = image_rope_tables(net.c, torch.tensor([positions_of(ids)]))
            hidden, _ = net.run(embedded(net, torch.tensor([ids]), rows), *tables, 1)
            with Context(model, exact) as context:
                first = placed.start
                context.decode(np.array(ids[:first]), 0, np.zeros(first, np.int8))
                end = first + placed.image.n_positions
                context.decode_rows(placed.image.rows, first + placed.image.positions, end)
                rest = np.array(ids[placed.end :], np.int32)
                context.decode(rest, end, np.ones(len(rest), np.int8))
                found = np.stack([context.logits(row) for row in range(len(rest))])
    print(
        "logits:",
        float((net.logits(hidden)[0, placed.end :] - torch.from_numpy(found)).abs().max()),
    )


def write_card(work: Path, out: Path, n: int = 300) -> None:
    """Write MODEL_CARD.md from what is measured now."""
    from image_acceptance import measure

    net, weights = export.load(out / MODEL), tower.load(out / MMPROJ)
    _, _, run = trained(work)
    plan, example = plan_of(run["seconds"] / 60), pictures.draw_up(np.random.default_rng(4))
    answers = [
        f"| {name} | {count.right} | {count.rates} | {count.tokens / count.rounds:.2f} |"
        for name, count in zip(("after an image", "after text"), measure(n), strict=True)
    ]
    heldout, text = np.load(work / "heldout.npy"), []
    for name, model in (("demo", export.load(DEMO)), ("vision-demo", net)):
        said = evaluate.on_text(model, heldout, 160)
        rates = " / ".join(f"{100 * rate:.1f} %" for rate in said["agreement"])
        text.append(f"| {name} | {said['trunk_loss']:.3f} | {said['head_loss']:.3f} | {rates} |")
    digests = [hashlib.sha256((out / name).read_bytes()).hexdigest() for name in (MODEL, MMPROJ)]
    card = TEMPLATE.read_text().format(
        parameters=sum(p.numel() for p in net.parameters()),
        tower_parameters=sum(w.numel() for w in weights.values()),
        size=(out / MODEL).stat().st_size, tower_size=(out / MMPROJ).stat().st_size,
        sha256=digests[0], tower_sha256=digests[1], n_vocab=net.c.n_vocab, tower=ENCODER,
        rows=GRID**2, grid=GRID, most_kinds=pictures.MOST_KINDS, most_shapes=pictures.MOST_SHAPES,
        colours=", ".join(pictures.COLOURS), example=example.caption, described=example.described,
        warm_up=WARM_UP_MINUTES, steps=run["steps"], minutes=run["seconds"] / 60,
        n_pictures=N_PICTURES, n_described=N_DESCRIBED, n_rows=N_ROWS, lr_matrix=plan.lr_matrix,
        lr_other=plan.lr_other, n=n, answers="\n".join(answers), text="\n".join(text),
    )  # fmt: skip
    (out / "MODEL_CARD.md").write_text(card)


def plan_of(minutes: float) -> train.Plan:
    """Rates for a model that has learned already."""
    return train.Plan(minutes, lr_matrix=2e-3, lr_other=1e-3, warmup=0.05)


def main() -> None:
    """Run the stages that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m demo_model.vision")
    parser.add_argument("--minutes", type=float, default=20.0, help="of one core (default 20)")
    parser.add_argument("--work", type=Path, default=Path("demo-work"), help="as of the demo")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the files and their card")
    parser.add_argument("--stages", default=",".join(STAGES), help="comma list (default: all)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    words, stream, heldout = tokenizer.prepare(args.work, 2048, 1)
    words, stages = with_vision(words, DEMO), args.stages.split(",")
    if "train" in stages:
        Run(args.work, words, plan_of(args.minutes)).loop(stream, heldout)
    if "export" in stages:
        write(args.work, args.out, words)
    if "compare" in stages:
        compare(args.out, words)
    if "card" in stages:
        write_card(args.work, args.out)


if __name__ == "__main__":
    main()
