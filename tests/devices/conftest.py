"""A device with memory of its own, and the CPU to compare with.

Any GPU will do, and so does Mesa's lavapipe, a Vulkan device that is a CPU. It is taken only where
it is named:

    GGML_VK_VISIBLE_DEVICES=0 GGML_VK_DISABLE_F16=1 GGML_VK_DISABLE_COOPMAT=1 pytest tests/devices

Without a device these tests are skipped; with PYLLAMA_MTP_REQUIRE_DEVICE set they fail instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from pyllama_mtp import Model, Session
from pyllama_mtp.llama import native
from pyllama_mtp.models.synth import write_synthetic

from ..regression.support import greedy, logits_in_batches, long_text, made_up, settings

N_PROMPT, N_TOKENS = 30, 14


@pytest.fixture(scope="session", autouse=True)
def device() -> native.Device:
    """The first device that is no CPU."""
    for found in native.load().devices():
        if "gpu" in found.kind:
            return found
    if os.environ.get("PYLLAMA_MTP_REQUIRE_DEVICE"):
        pytest.fail("PYLLAMA_MTP_REQUIRE_DEVICE is set, and no device was found")
    pytest.skip("no GPU, nor lavapipe: see tests/devices/conftest.py")


@dataclass
class Pair:
    """A model on the device and on the CPU.

    Attributes:
        gap: how far two logits may lie apart and still change places between the two.
        prompts: after these the CPU's greedy text of N_TOKENS has no such near tie.
        texts: that text, for each of them.
    """

    there: Model
    here: Model
    gap: float
    prompts: list[list[int]]
    texts: list[list[int]]

    @classmethod
    def load(cls, path: Path, text: Sequence[int], n_prompts: int) -> Pair:
        """From a file, with prompts that are parts of `text`."""
        # Prompts are processed 16 tokens at a time: too few for llama.cpp to send them to a device.
        there, here = Model(path), Model(path, n_gpu_layers=0)
        sample = text[:97]
        one, other = (logits_in_batches(model, sample, 8) for model in (here, there))
        worst = float(np.abs(one - other).max())
        assert worst < 0.02 * float(np.ptp(one)), f"CPU and device disagree by {worst}"
        pair = cls(there, here, 4 * worst, [], [])
        for start in range(0, len(text) - N_PROMPT, N_PROMPT // 2):
            if len(pair.prompts) < n_prompts:
                pair._add(list(text[start : start + N_PROMPT]))
        assert len(pair.prompts) == n_prompts, "near ties everywhere"
        return pair

    def _add(self, prompt: list[int]) -> None:
        tokens = plain_text(self.here, prompt)
        rows = np.sort(logits_in_batches(self.here, [*prompt, *tokens], 8)[N_PROMPT - 1 : -1])
        if len(tokens) == N_TOKENS and (rows[:, -1] - rows[:, -2]).min() > self.gap:
            self.prompts.append(prompt)
            self.texts.append(tokens)

    def close(self) -> None:
        """Free both."""
        self.there.close()
        self.here.close()


def plain_text(model: Model, prompt: Sequence[int], **options: object) -> list[int]:
    """Greedy text without MTP."""
    with Session(model, settings(0, **options)) as session:
        return greedy(session, prompt, N_TOKENS).tokens


@pytest.fixture(scope="module")
def demo_pair(demo_file: Path, demo_prompts: list[str]) -> Iterator[Pair]:
    """The demo model, and real text."""
    with Model(demo_file, n_gpu_layers=0) as model:
        text = long_text(model, demo_prompts)
    pair = Pair.load(demo_file, text, 3)
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def moe_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A mixture of experts whose head drafts well; its LM head is not its embeddings. In F32:
    coarser rounding makes it choose other experts."""
    path = tmp_path_factory.mktemp("models") / "moe.gguf"
    write_synthetic(path, "tiny-moe", "f32", head_noise=0.05, tied_embeddings=False)
    with Model(path, n_gpu_layers=0) as model:
        text = made_up(model, 400).tolist()
    pair = Pair.load(path, text, 1)
    yield pair
    pair.close()
