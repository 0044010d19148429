"""Random use of sessions: draws what to ask, and checks every greedy answer.

Each step draws one action. The sequence of steps depends on the seed alone, not on generated tokens
or a clock.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pyllama_mtp import BatchSession, Model, Sampling, Session, Settings
from pyllama_mtp.errors import UsageError
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.contextoptions import ContextOptions

N_CTX = 512
#: Values of settings to draw from. Batches are small, so that prompts cross their edges.
CHOICES: dict[str, tuple[Any, ...]] = {
    "draft_n_max": (0, 1, 2, 3, 4, 6, "auto"),
    "n_ubatch": (16, 32, 48),
    "rollback": ("auto", "snapshot", "replay"),
    "prompt_sync": ("auto", "kv", "full"),
    "prompt_rows": ("last", "last", "all"),
    "draft_vocab": ("auto", "full", 512),
    "p_min": (0.0, 0.0, 0.3),
    "ngram": (True, False),
    "checkpoints": (0, 1, 4),
    "cache_type_k": ("f16", "f16", "f32", "q8_0"),
    "flash_attn": ("auto", "on", "off"),
}
#: Settings that a fresh context must share to compute the same; no other setting may matter.
MATTERS = ("cache_type_k", "cache_type_v", "flash_attn")
#: Relative probabilities of the steps. A switch closes the session; the next step opens another.
STEPS = {
    "greedy": 8, "continue": 8, "same again": 2, "shortened": 4, "sampled": 3, "cancel": 5,
    "stop string": 3, "save and restore": 2, "batch": 2, "bad input": 2, "switch": 5,
}  # fmt: skip


class Different(Exception):
    """A greedy answer differs from the fresh context's; the message has settings and prompt."""


@dataclass
class Tally:
    """Counts of steps, tokens and comparisons."""

    steps: Counter[str] = field(default_factory=Counter)
    equal: int = 0
    near_ties: int = 0
    tokens: int = 0
    digest: Any = field(default_factory=hashlib.sha256)


class Soak:
    """A session in random use, checked by fresh sessions.

    Args:
        prompts: token ids of the prompts to draw from.
        folder: for saved prompts.
    """

    def __init__(
        self, model: Model, prompts: Sequence[Sequence[int]], seed: int, threads: int, folder: Path
    ) -> None:
        self.model, self._folder = model, folder
        self._prompts = [list(prompt[: N_CTX // 2]) for prompt in prompts]
        self._random = random.Random(seed)
        self._base = Settings(n_ctx=N_CTX, n_batch=48, n_ubatch=48, n_threads=threads)
        self.settings = self._base
        self.session: Session | None = None
        self._last: list[int] = []  # the prompt and answer that came last
        self.tally = Tally()
        self.weights = dict(STEPS)

    def step(self) -> str:
        """Do one step; returns its name. After "switch" no session is open.

        Raises:
            Different: an answer was not the fresh context's.
        """
        name = self._random.choices(list(self.weights), list(self.weights.values()))[0]
        if self.session is None and name != "switch":
            self.settings = self._draw_settings()
            self.session = Session(self.model, self.settings)
            self._last = []
        getattr(self, f"_{name.replace(' ', '_')}")()
        self.tally.steps[name] += 1
        self.tally.digest.update(name.encode())
        return name

    def close(self) -> None:
        """Close the session that is open, if one is."""
        if self.session:
            self.session.close()
        self.session = None

    _switch = close

    def _draw_settings(self) -> Settings:
        chosen = {name: self._random.choice(values) for name, values in CHOICES.items()}
        if chosen["prompt_sync"] == "full":  # which drafts over the whole vocabulary
            chosen["draft_vocab"] = "full"
        return replace(self._base, **chosen)

    def _new(self) -> list[int]:
        """One of the prompts, sometimes only its beginning."""
        prompt = self._random.choice(self._prompts)
        whole = self._random.random() < 0.7
        return prompt if whole else prompt[: self._random.randint(1, len(prompt))]

    def _open(self) -> Session:
        assert self.session
        return self.session

    def _n(self) -> int:
        return self._random.randint(1, 48)

    def _greedy(self) -> None:
        self._ask(self._new())

    def _continue(self) -> None:
        """A follow-up: everything so far and another prompt."""
        prompt = [*self._last, *self._new()]
        self._ask(prompt if len(prompt) < N_CTX - 64 else self._new())

    def _same_again(self) -> None:
        self._ask(self._last or self._new())

    def _shortened(self) -> None:
        """Go back to a random place of the last text, and continue in another way."""
        last = self._last or self._new()
        self._ask([*last[: self._random.randint(1, len(last))], *self._new()[:9]])

    def _ask(self, prompt: list[int]) -> None:
        n = self._n()
        got = self._open().generate(prompt, max_tokens=n).run().tokens
        self._compare(prompt, got, n)
        self._last = [*prompt, *got]

    def _sampled(self) -> None:
        prompt, n = self._new(), self._n()
        heat, seed = self._random.choice((0.3, 0.8, 1.5)), self._random.randrange(2**31)
        drawn = Sampling(temperature=heat, top_k=self._random.choice((0, 40)), seed=seed)
        run = self._open().generate(prompt, max_tokens=n, sampling=drawn).run()
        self.tally.tokens += len(run.tokens)
        self._last = [*prompt, *run.tokens]

    def _cancel(self) -> None:
        """Leave a generation in the middle; what follows must not notice."""
        prompt, pieces = self._new(), self._random.randint(0, 12)
        generation = self._open().generate(prompt, max_tokens=40)
        for count, _ in enumerate(generation):
            if count >= pieces:
                break
        generation._pieces.close()
        self._last = [*prompt, *generation.tokens]
        self._ask(self._last if self._random.random() < 0.5 else self._new())

    def _stop_string(self) -> None:
        """Stop at a piece of the text that a fresh context writes."""
        prompt = self._new()
        with self._fresh() as fresh:
            text = fresh.generate(prompt, max_tokens=40).run().text
        if len(text) < 8:
            return
        at = self._random.randint(1, len(text) - 4)
        stop = text[at : at + 3]
        run = self._open().generate(prompt, max_tokens=40, stop=[stop]).run()
        self._last = [*prompt, *run.tokens]
        if self._compare(prompt, run.tokens, len(run.tokens)) and (
            run.finish_reason != "stop" or run.text != text[: text.find(stop)]
        ):
            raise Different(f"stop {stop!r}: {run.text!r} of {text!r}, {run.finish_reason}")

    def _save_and_restore(self) -> None:
        """Save the prompt; continue in another session with the same settings, then in this one."""
        if not self._last:
            self._ask(self._new())
        path = self._folder / "soak.prompt"
        session, saved = self._open(), self._last
        session.process(saved)
        session.save(path)
        with Session(self.model, self.settings) as other:
            if other.restore(path) < 1:
                raise Different("nothing was restored")
            prompt, n = [*saved, *self._new()[:20]], self._n()
            self._compare(prompt, other.generate(prompt, max_tokens=n).run().tokens, n)
        self._ask(self._new())
        session.restore(path)
        self._ask([*saved, *self._new()[:20]])

    def _batch(self) -> None:
        """Several prompts at once; some answers are sampled."""
        settings = replace(self._draw_settings(), prompt_rows="last", n_ubatch=48)
        places = self._random.randint(1, 4)
        prompts = [self._new() for _ in range(self._random.randint(1, 6))]
        n = [self._n() for _ in prompts]
        hot = [self._random.random() < 0.25 for _ in prompts]
        sampling = [Sampling(temperature=0.8, seed=i) if h else None for i, h in enumerate(hot)]
        with BatchSession(self.model, settings, n_sequences=places) as session:
            if self._random.random() < 0.3:  # and one that is left in the middle
                abandoned = session.generate(prompts, max_tokens=20)
                next(iter(abandoned), None)
            batch = session.generate(prompts, max_tokens=n, sampling=sampling).run()
        for prompt, most, answer, sampled in zip(prompts, n, batch.results, hot, strict=True):
            if not sampled:
                self._compare(prompt, answer.tokens, most, settings)

    def _bad_input(self) -> None:
        """Refused input leaves the session as it was."""
        session = self._open()
        for prompt, n in (
            (list(range(5)) * N_CTX, 4),
            ([], 4),
            ([self.model.n_vocab], 4),
            ([1], 0),
        ):
            try:
                session.generate(prompt, max_tokens=n).run()
            except UsageError:
                continue
            raise Different(f"a prompt of {len(prompt)} tokens and max_tokens {n} was accepted")
        self._ask(self._last[: N_CTX - 60] if self._last else self._new())

    def _fresh(self, settings: Settings | None = None) -> Session:
        """A new session without MTP; everything but MATTERS has its default."""
        given = settings or self.settings
        matters = {name: getattr(given, name) for name in MATTERS}
        return Session(self.model, replace(self._base, draft_n_max=0, **matters))

    def _compare(
        self, prompt: list[int], got: list[int], n: int, settings: Settings | None = None
    ) -> bool:
        """Compare an answer with the fresh context's. True: equal; False: it differs after a place
        where the two best logits are within rounding.

        Raises:
            Different: it differs in another way.
        """
        self.tally.tokens += len(got)
        with self._fresh(settings) as fresh:
            plain = fresh.generate(prompt, max_tokens=n).run().tokens
        if got == plain:
            self.tally.equal += 1
            self.tally.digest.update(np.array(got, dtype=np.int32).tobytes())
            return True
        given = settings or self.settings
        told = f"{given}\nprompt {prompt}\nanswer {got}\nfresh  {plain}"
        pairs = zip(got, plain, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), -1)
        if at < 0:
            raise Different(f"one answer is shorter\n{told}")
        logits = self._logits([*prompt, *plain[:at]], given)
        best, second = np.argsort(logits)[::-1][:2]
        near = float(logits[best] - logits[second]) < 0.01 * float(np.ptp(logits))
        if not near or {got[at], plain[at]} != {int(best), int(second)}:
            raise Different(f"token {at} differs, and not by rounding\n{told}")
        self.tally.near_ties += 1
        return False

    def _logits(self, tokens: list[int], settings: Settings) -> np.ndarray[Any, Any]:
        """Logits after `tokens` in a fresh context, one batch."""
        options = ContextOptions(
            n_ctx=2 * N_CTX,
            n_batch=N_CTX,
            n_ubatch=N_CTX,
            n_threads=1,
            type_k=settings.cache_type_k,
            type_v=settings.cache_type_v,
            flash_attn=settings.flash_attn,
        )
        outputs = np.zeros(len(tokens), dtype=np.int8)
        outputs[-1] = 1
        with Context(self.model, options) as context:
            context.decode(np.array(tokens, dtype=np.int32), 0, outputs)
            return context.logits(len(tokens) - 1).copy()
