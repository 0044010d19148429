#!/usr/bin/env python3
"""Greedy texts and accepted drafts beside upstream's llama-server with draft-mtp: are they equal?

    python bench/peers.py && python bench/parity.py
    python bench/peers.py && python bench/parity.py --images

A trial is one prompt on one small model at one draft depth, in one of three ways: alone, alone with
Q8_0 caches, and together with the other prompts in one batch of ours. The server answers each
prompt alone. A trial is equal when all tokens and the number of accepted drafts are. Text only: the
tokens are equal. Kernels that sum in another order may reverse two tokens whose logits are a near
tie: they are the best two, and differ by at most 1 % of the best one (drafts: by DRAFT_TIE; of
a batch: those of the prompt alone). Such a trial is named, with the gap where the texts part, and
is compared no further. Models other than the demo have random weights and a head that drafts well.
NO_SNAPSHOTS has models whose drafts can only be compared with those of llama-server on our
libllama, which runs for them, too. With --images the prompts have images, for which both sides have
the same encoder, of random weights; each prompt then has a server of its own, because drafts of
llama-server after an image depend on the prompt before it.

Exit codes: 0 equal but for near ties; 1 not so; 2 there is no llama-server.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from benchkit import results
from PIL import Image

from pyllama_mtp import Answer, BatchSession, Model, Session, Settings
from pyllama_mtp.drafting.drafter import HeadDrafter
from pyllama_mtp.drafting.upstream import UpstreamDrafter
from pyllama_mtp.llama import native
from pyllama_mtp.llama.vision import IMAGE_MARKER as HERE
from pyllama_mtp.llama.vision import Vision, position
from pyllama_mtp.measure.peers import (
    LlamaServer,
    PeerError,
    PeerOptions,
    completion_request,
    find,
    server_options,
)
from pyllama_mtp.models.architectures import ARCHITECTURES
from pyllama_mtp.models.demo import demo_path
from pyllama_mtp.models.mmproj import write_synthetic_mmproj
from pyllama_mtp.models.synth import write_synthetic
from tests.architectures import write_model

#: The demo model, experts of Qwen3.5, and small models of other architectures.
OTHERS = ("qwen4exp", "glm5-next", "glm4moe", "deepseek2", "deepseek4", "hy_v3", "qwen3next")
#: Upstream keeps no recurrent states of these to go back to: its server computes a round with a
#: rejected draft again, and its head goes on from the hidden row of that draft.
NO_SNAPSHOTS = ("qwen3next",)
DEPTHS = (1, 2, 3, 4)
N_TOKENS = 48
#: Lengths of prompts: within a graph, at its edge, over several batches.
N_PROMPT = (9, 16, 61, 113)
STEP = 120  #: tokens from the beginning of a prompt to that of the next
N_BATCH, N_UBATCH = 48, 24
HEAD_NOISE = 0.05
DRAFT_TIE = 0.05  #: difference of two logits of the head, by their probabilities
OUR_LIBRARY = "llama-server on our libllama"
ALONE, Q8_0, TOGETHER = "alone", "q8_0 caches", "together"

#: Texts with places for images: first, in the middle, last, several.
TEXTS = (
    f"{HERE}def area(shape):\n    ",
    f"The picture {HERE} shows a list. In Python, ",
    f"# What follows is a screenshot of the module os.path: {HERE}",
    f"First {HERE} and then {HERE}, which are both ",
)
#: Width and height of pictures, by trial: of few tokens, and of more than a graph has.
SIZES = ((96, 64), (64, 128), (160, 224), (320, 256), (448, 96), (384, 352))

Trial = dict[str, Any]
Gap = tuple[str, float]


def write_models(folder: Path) -> dict[str, Path]:
    """Small models by architecture."""
    moe = write_synthetic(folder / "moe.gguf", "tiny-moe", "f16", head_noise=HEAD_NOISE)
    tiny = write_synthetic(folder / "tiny.gguf", "tiny", "q8_0", head_noise=HEAD_NOISE)
    found = {"qwen35": demo_path(), "qwen35, random Q8_0": tiny, "qwen35moe": moe}
    for arch in OTHERS:
        n_blocks = max(DEPTHS) if ARCHITECTURES[arch].several_heads else 1
        found[arch] = write_model(arch, folder / f"{arch}.gguf", n_blocks, noise=HEAD_NOISE)
    return found


def prompts_of(model: Model) -> list[list[int]]:
    """Token ids: text for the demo model, else made up."""
    if Path(model.path) == demo_path():
        lines = map(json.loads, demo_path().with_name("prompts.jsonl").read_text().splitlines())
        ids = model.tokenize("\n\n".join(line["prompt"] for line in lines if not line["chat"]))
    else:
        ids = [(7 * i * i + 13 * i + 5) % model.n_vocab for i in range(STEP * len(N_PROMPT))]
    return [ids[STEP * i : STEP * i + n] for i, n in enumerate(N_PROMPT)]


def png(seed: int, size: tuple[int, int]) -> bytes:
    """A file with a picture of coarse noise."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (size[1] // 16, size[0] // 16, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(small).resize(size, Image.Resampling.BICUBIC).save(out, "PNG")
    return out.getvalue()


def written() -> list[tuple[str, list[bytes]]]:
    """Texts with their images."""
    return [
        (text, [png(10 * i + j, size) for j in range(text.count(HERE))])
        for i, size in enumerate(SIZES)
        for text in TEXTS
    ]


def settings(depth: int, cache_type: str) -> Settings:
    types = {"cache_type_k": cache_type, "cache_type_v": cache_type}
    sizes = {"n_ctx": 512, "n_batch": N_BATCH, "n_ubatch": N_UBATCH, "n_threads": 1}
    return Settings(draft_n_max=depth, draft_vocab="full", **sizes, **types)  # type: ignore[arg-type]


class Recorded:
    """The head's drafts of sessions that run alone, by the position of the newest token."""

    def __init__(self) -> None:
        self.rounds: dict[int, list[int]] = {}
        for kind in (HeadDrafter, UpstreamDrafter):
            kind.draft = self._recording(kind.draft)  # type: ignore[method-assign]

    def _recording(self, draft: Any) -> Any:
        def recording(drafter: Any, *arguments: Any) -> Any:
            is_upstreams = isinstance(drafter, UpstreamDrafter)
            context = drafter._target if is_upstreams else drafter.context
            at, made = context.past(), draft(drafter, *arguments)
            self.rounds[at] = made[0].tokens
            return made

        return recording


def rounds_of(log: str, start: int) -> dict[int, list[dict[int, float]]]:
    """Candidates of each draft with their probabilities, best first, from llama-server's log."""
    rounds: dict[int, list[dict[int, float]]] = {start: []}
    lines = r"draft candidate +(\d+), pos +\d+: +(\d+) \( *([\d.]+)\)|new n_tokens = (\d+)"
    for rank, token, probability, at in re.findall(lines, log):
        if at:
            rounds[int(at)] = []
        else:
            rounds[max(rounds)] += [] if int(rank) else [{}]
            rounds[max(rounds)][-1][int(token)] = float(probability)
    return rounds


def draft_gap(ours: dict[int, list[int]], theirs: dict[int, list[dict[int, float]]]) -> Gap:
    """Where the drafts part first, in words, and how far apart the head sees the two tokens."""
    for at in sorted(ours.keys() & theirs.keys()):
        for i, (token, chances) in enumerate(zip(ours[at], theirs[at], strict=False)):
            best = next(iter(chances))
            if token != best:
                gap = math.log(chances[best] / chances[token]) if chances.get(token) else math.inf
                return f"draft {i + 1} of position {at}: {token} or {best}, {gap:.2g} apart; ", gap
    return "", math.inf


def ask(running: LlamaServer, prompt: Any, n_prompt: int, read: int = 0) -> tuple[Any, int]:
    """llama-server's answer with the candidates of its drafts, and the characters of its log so
    far; those before `read` are of earlier answers."""
    request = completion_request(prompt, N_TOKENS, 1)
    answer = running.complete(request | {"return_tokens": True})
    log = running.said()
    return answer | {"rounds": rounds_of(log[read:], n_prompt)}, len(log)


def answers(server: str, given: Settings, prompts: list[Any], of: Model | Vision) -> list[Any]:
    """llama-server's to prompts of text; or to prompts with images, by a server for each."""
    model, mmproj = (of.model, str(of.path)) if isinstance(of, Vision) else (of, "")
    options = server_options(PeerOptions(given, str(model.path), 0, mmproj=mmproj))
    found, read = [], 0
    if not mmproj:
        with LlamaServer(server, [*options, "-lv", "5"]) as running:
            for prompt in prompts:
                answer, read = ask(running, prompt, len(prompt), read)
                found.append(answer)
    for (text, images), prompt in zip(written(), prompts, strict=True) if mmproj else ():
        with LlamaServer(server, [*options, "-lv", "5"]) as running:
            said = running.image_prompt(text, [base64.b64encode(one).decode() for one in images])
            found.append(ask(running, said, len(prompt))[0])
    return found


def compared(ours: Answer, theirs: Any, drafts: dict[int, list[int]]) -> Trial:
    """How a trial ended.

    Args:
        drafts: of our session, by position.
    """
    told, timings, tokens = ours.telemetry, theirs["timings"], theirs["tokens"]
    accepted, expected = sum(told.accepted), timings.get("draft_n_accepted", 0)
    trial = {"accepted": accepted, "drafted": sum(told.drafted)}
    if ours.tokens == tokens:
        if accepted == expected:
            return trial | {"end": "equal", "said": ""}
        counts = f"{accepted} drafts accepted, the server's {expected}"
        where, gap = draft_gap(drafts, theirs["rounds"])
        end = "near tie" if gap <= DRAFT_TIE else "text only"
        return trial | {"end": end, "said": where + counts}
    pairs = enumerate(zip(ours.tokens, tokens, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(ours.tokens), len(tokens)))
    parted = {*ours.tokens[at : at + 1], *tokens[at : at + 1]}
    for tied in told.near_ties or ():
        if tied.index == at and {tied.token, tied.other} == parted:
            said = f"token {at}: {tied.token} or {tied.other}, {tied.gap:.2g} apart"
            return trial | {"end": "near tie", "said": said}
    return trial | {"end": "different", "said": f"token {at}: {sorted(parted)}, no near tie"}


#: Of every generation of ours.
LIMITS: dict[str, Any] = {"max_tokens": N_TOKENS, "ignore_eos": True, "log_ties": True}


def alone(model: Model, given: Settings, prompt: Any, recorded: Recorded) -> tuple[Answer, Any]:
    """Our answer in a session of its own, and its drafts by the entries before them."""
    recorded.rounds = {}
    with Session(model, given) as session:
        answer = session.generate(prompt, **LIMITS).run()
    images = getattr(prompt, "images", ())  # whose positions are fewer than their entries
    spare = len(prompt) - position(len(prompt), images) if images else 0
    return answer, {at + spare: tokens for at, tokens in recorded.rounds.items()}


def trials(of: Model | Vision, server: str, depth: int, recorded: Recorded) -> list[Trial]:
    """All of one model and depth; of a model with an encoder after images."""
    model, caches, found = of, {"f16": (ALONE, TOGETHER), "q8_0": (Q8_0,)}, []
    if isinstance(of, Vision):
        model, caches = of.model, {"f16": (ALONE, TOGETHER)}
        prompts = [of.prompt(*one) for one in written()]
    else:
        prompts = prompts_of(model)
    for cache_type, ways in caches.items():
        given = settings(depth, cache_type)
        theirs = answers(server, given, prompts, of)
        pairs = [alone(model, given, prompt, recorded) for prompt in prompts]
        ours = [answer for answer, _ in pairs]
        for way in ways:
            if way == TOGETHER:
                with BatchSession(model, given, 4) as batch:
                    ours = [*batch.generate(prompts, **LIMITS).run().results]
            for prompt, mine, its, (_, drafts) in zip(prompts, ours, theirs, pairs, strict=True):
                where = {"depth": depth, "way": way, "prompt": len(prompt)}
                found.append(where | compared(mine, its, drafts))
    return found


def explained(name: str, trial: Trial) -> bool:
    """Whether a trial of a model ended as it should, near ties aside."""
    return trial["end"] == "equal" or (trial["end"] == "text only" and name in NO_SNAPSHOTS)


def table(ended: dict[str, list[Trial]]) -> list[str]:
    """A row per model, and the lines of trials that are not equal."""
    ends = ("equal", "near tie", "text only", "different")
    head = ("model", "trials", *(f"{end}" for end in ends), "accepted", "of drafts")
    rows, named = [], []
    for name, found in [*ended.items(), ("all", [t for one in ended.values() for t in one])]:
        counts = Counter(trial["end"] for trial in found)
        sums = (sum(trial[key] for trial in found) for key in ("accepted", "drafted"))
        figures = (len(found), *(counts[end] for end in ends), *sums)
        rows.append((name, *map(str, figures)))
    for name, found in ended.items():
        for trial in found:
            if not explained(name, trial):
                where = f"{name}, depth {trial['depth']}, {trial['way']}, {trial['prompt']} tokens"
                named.append(f"- {trial['end']}: {where}: {trial['said']}")
    return [*results.markdown_table(head, rows), "", *named]


def of_text(server: str, folder: Path, recorded: Recorded) -> Iterator[tuple[str, list[Trial]]]:
    """The trials of each model, by name."""
    models = write_models(folder)
    models |= {f"{name}, {OUR_LIBRARY}": models[name] for name in NO_SNAPSHOTS}
    for name, path in models.items():
        if name.endswith(OUR_LIBRARY):  # from now on; this process has loaded its own
            os.environ["LD_LIBRARY_PATH"] = str(native.locate("patched")[0])
        with Model(path, mtp=True) as model:
            runs = (trials(model, server, depth, recorded) for depth in DEPTHS)
            yield name, [trial for found in runs for trial in found]


def of_images(server: str, folder: Path, recorded: Recorded) -> Iterator[tuple[str, list[Trial]]]:
    """The same after images."""
    tiny = write_synthetic(folder / "tiny.gguf", "tiny", "q8_0", head_noise=HEAD_NOISE)
    for path in (demo_path(), tiny):
        with Model(path) as model:
            mmproj = folder / f"encoder-{path.stem}.gguf"
            write_synthetic_mmproj(mmproj, model.n_embd_inp)
            with Vision(model, mmproj, n_threads=1) as vision:
                runs = (trials(vision, server, depth, recorded) for depth in DEPTHS)
                yield path.stem, [trial for found in runs for trial in found]


def main(argv: list[str]) -> int:
    """Run all trials, and print."""
    if argv not in ([], ["--images"]):
        sys.exit(__doc__)
    try:
        server = find("llama-server", gpu=False)
    except PeerError as error:
        print(error, file=sys.stderr)
        return 2
    ended: dict[str, list[Trial]] = {}
    with tempfile.TemporaryDirectory() as folder:
        of = of_images if argv else of_text
        for name, found in of(*server.command, Path(folder), Recorded()):
            ended[name] = found
            print("\n".join(table({name: found})), flush=True)
    print(results.heading(f"llama-server: {server.build.upstream_commit}, with draft-mtp; greedy"))
    print("", *table(ended), sep="\n")
    wrong = [
        trial
        for name, found in ended.items()
        for trial in found
        if not explained(name, trial) and trial["end"] != "near tie"
    ]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
