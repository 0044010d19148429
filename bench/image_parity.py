#!/usr/bin/env python3
"""Greedy texts and accepted drafts after images beside upstream's llama-server: are they equal?

    python bench/peers.py && python bench/image_parity.py

Both take the same image encoder, of random weights, and the same pictures. A trial is one prompt at
one draft depth, alone or together with the other prompts in one batch of ours; it is equal when all
tokens and the number of accepted drafts are; see parity.py for near ties, "text only" and the exit
codes.
"""

from __future__ import annotations

import base64
import io
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from parity import (
    ALONE,
    DEPTHS,
    N_TOKENS,
    N_UBATCH,
    TOGETHER,
    Recorded,
    compared,
    rounds_of,
    settings,
    table,
    write_page,
)
from PIL import Image

from pyllama_mtp import BatchSession, Model, Session
from pyllama_mtp.llama.vision import IMAGE_MARKER as HERE
from pyllama_mtp.llama.vision import ImagePrompt, Vision, position
from pyllama_mtp.measure.peers import (
    LlamaServer,
    PeerError,
    PeerOptions,
    completion_request,
    find,
    server_options,
)
from pyllama_mtp.models.demo import demo_path
from pyllama_mtp.models.mmproj import write_synthetic_mmproj
from pyllama_mtp.models.synth import write_synthetic

#: Texts with places for images: first, in the middle, last, several.
TEXTS = (
    f"{HERE}def area(shape):\n    ",
    f"The picture {HERE} shows a list. In Python, ",
    f"# What follows is a screenshot of the module os.path: {HERE}",
    f"First {HERE} and then {HERE}, which are both ",
)
#: Width and height of pictures, by trial: of few tokens, and of more than a graph has.
SIZES = ((96, 64), (64, 128), (160, 224), (320, 256), (448, 96), (384, 352))

WHAT_IT_SAYS = f"""\
A trial: all of {N_TOKENS} tokens after one of {len(SIZES) * len(TEXTS)} prompts with images,
and the number of accepted drafts, at depths {DEPTHS}, {ALONE} and {TOGETHER} (four at
once). Images are first, in the middle, last, or two; of 8 to 132 tokens each, and graphs have
{N_UBATCH}. The encoder has random weights; so has "tiny", whose head drafts well. Near ties are as
in parity.py. Text only: the texts are equal, the accepted drafts are not. Each prompt has a server
of its own: drafts of llama-server after an image depend on the prompt before it."""


def png(seed: int, size: tuple[int, int]) -> bytes:
    """A file with a picture of coarse noise."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (size[1] // 16, size[0] // 16, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(small).resize(size, Image.Resampling.BICUBIC).save(out, "PNG")
    return out.getvalue()


def prompts() -> list[tuple[str, list[bytes]]]:
    """Texts and the files of their images."""
    return [
        (text, [png(10 * i + j, size) for j in range(text.count(HERE))])
        for i, size in enumerate(SIZES)
        for text in TEXTS
    ]


def answers(server: str, vision: Vision, depth: int, asked: list[ImagePrompt]) -> list[Any]:
    """llama-server's, each with the candidates of its drafts; see WHAT_IT_SAYS."""
    given = PeerOptions(settings(depth, "f16"), str(vision.model.path), 0)
    options = [*server_options(given), "--mmproj", str(vision.path), "-lv", "5"]
    found = []
    for prompt, (text, images) in zip(asked, prompts(), strict=True):
        with LlamaServer(server, options) as running:
            said = running.image_prompt(text, [base64.b64encode(one).decode() for one in images])
            request = completion_request(said, N_TOKENS, 1)
            answer = running.complete(request | {"return_tokens": True})
            log = running._program.stderr() + running._program.stdout()
            found.append(answer | {"rounds": rounds_of(log, len(prompt))})
    return found


def trials(vision: Vision, server: str, depth: int, recorded: Recorded) -> list[dict[str, Any]]:
    """All of one model and depth."""
    model, given = vision.model, settings(depth, "f16")
    limits: dict[str, Any] = {"max_tokens": N_TOKENS, "ignore_eos": True, "log_ties": True}
    asked = [vision.prompt(text, images) for text, images in prompts()]
    theirs, alone, drafts = answers(server, vision, depth, asked), [], []
    for prompt in asked:
        recorded.rounds = {}
        with Session(model, given) as session:
            alone.append(session.generate(prompt, **limits).run())
        spare = len(prompt) - position(len(prompt), prompt.images)  # the server counts entries
        drafts.append({at + spare: tokens for at, tokens in recorded.rounds.items()})
    with BatchSession(model, given, 4) as batch:
        together = batch.generate(asked, **limits).run().results
    return [
        {"depth": depth, "way": way, "prompt": len(prompt)} | compared(*three)
        for way, found in ((ALONE, alone), (TOGETHER, together))
        for prompt, *three in zip(asked, found, theirs, drafts, strict=True)
    ]


def main() -> int:
    """Run all trials; write build/results/image-parity.md. The exit code."""
    try:
        server = find("llama-server", gpu=False)
    except PeerError as error:
        print(error, file=sys.stderr)
        return 2
    ended: dict[str, list[dict[str, Any]]] = {}
    recorded = Recorded()
    with tempfile.TemporaryDirectory() as folder:
        tiny = write_synthetic(Path(folder) / "tiny.gguf", "tiny", "q8_0", head_noise=0.05)
        for path in (demo_path(), tiny):
            with Model(path) as model:
                mmproj = Path(folder) / f"encoder-{len(ended)}.gguf"
                write_synthetic_mmproj(mmproj, model.n_embd_inp)
                with Vision(model, mmproj, n_threads=1) as vision:
                    command = server.command[0]
                    runs = (trials(vision, command, depth, recorded) for depth in DEPTHS)
                    ended[path.stem] = [trial for found in runs for trial in found]
            print("\n".join(table({path.stem: ended[path.stem]})), flush=True)
    title = "Texts and accepted drafts after images, beside llama-server"
    write_page("image-parity.md", title, server, table(ended), WHAT_IT_SAYS)
    found = [trial for some in ended.values() for trial in some]
    return int(any(trial["end"] not in ("equal", "near tie") for trial in found))


if __name__ == "__main__":
    raise SystemExit(main())
