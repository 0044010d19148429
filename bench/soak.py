#!/usr/bin/env python3
"""Random use for a long time: memory stays flat, and answers stay those of a fresh context.

    python bench/soak.py                       # 30 minutes on the demo model
    python bench/soak.py --minutes 1 --seed 7
    python bench/soak.py --steps 40            # so many steps: memory does not count

Prompts, settings, follow-ups, cancellations, stop strings, saved and restored prompts, several
prompts at once and bad input follow each other at random; the seed decides the order. Every greedy
answer is compared with that of a new session without MTP. Resident memory is read whenever no
session is open. Prints the report. Exit codes: 0 all is well, 1 an answer differed or memory grew.
Needs psutil.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from benchkit import anonymous, growth, parser_of, results

from pyllama_mtp import BatchSession, Model, Sampling, Session, Settings
from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.prompts import CLASSES, prompts_for
from pyllama_mtp.models.demo import demo_path

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
    "ask": 8, "go_on": 10, "go_back": 4, "sample": 3, "cancel": 5, "stop_string": 3,
    "save_and_restore": 2, "batch": 2, "bad_input": 2, "switch": 5,
}  # fmt: skip
WARM_UP = 0.2  # share of the readings that do not count
#: Growth that still counts as flat, because it is the allocator's, in a run of any length.
SLACK = 8 * 2**20


class Different(Exception):
    """A greedy answer differs from the fresh context's; the message has settings and prompt."""


class Soak:
    """A session in random use, checked by fresh sessions. `folder` is for saved prompts."""

    def __init__(self, model: Model, seed: int, threads: int, folder: Path) -> None:
        prompts = prompts_for(model.path, CLASSES)
        self.model, self.prompt_file = model, folder / "soak.prompt"
        self.prompts = [prompt.tokens(model)[: N_CTX // 2] for prompt in prompts]
        self.random = random.Random(seed)
        self.base = Settings(n_ctx=N_CTX, n_batch=48, n_ubatch=48, n_threads=threads)
        self.settings, self.session, self.last = self.base, None, list[int]()
        self.counts: Counter[str] = Counter()

    def step(self, name: str = "") -> str:
        """Do one step, drawn if not named; returns its name. After "switch" no session is open.

        Raises:
            Different: an answer was not the fresh context's.
        """
        name = name or self.random.choices(list(STEPS), list(STEPS.values()))[0]
        if self.session is None and name != "switch":
            self.settings, self.last = self.drawn_settings(), []
            self.session = Session(self.model, self.settings)
        getattr(self, name)()
        self.counts[name] += 1
        return name

    def switch(self) -> None:
        """Close the session that is open, if one is."""
        if self.session:
            self.session.close()
        self.session = None

    def drawn_settings(self) -> Settings:
        chosen = {name: self.random.choice(values) for name, values in CHOICES.items()}
        if chosen["prompt_sync"] == "full":  # which drafts over the whole vocabulary
            chosen["draft_vocab"] = "full"
        return replace(self.base, **chosen)

    def prompt(self) -> list[int]:
        """One of the prompts, sometimes only its beginning."""
        prompt = self.random.choice(self.prompts)
        whole = self.random.random() < 0.7
        return prompt if whole else prompt[: self.random.randint(1, len(prompt))]

    def length(self) -> int:
        return self.random.randint(1, 48)

    # -- steps -----------------------------------------------------------------------------------

    def ask(self, prompt: list[int] | None = None) -> None:
        prompt, n = prompt or self.prompt(), self.length()
        answer = self.session.generate(prompt, max_tokens=n).run()
        self.compare(prompt, answer.tokens, n)
        self.last = [*prompt, *answer.tokens]

    def go_on(self) -> None:
        """The last text again, or longer."""
        longer = [*self.last, *self.random.choice(([], self.prompt()))]
        self.ask(longer if len(longer) < N_CTX - 64 else None)

    def go_back(self) -> None:
        """To a random place of the last text, and on in another way."""
        last = self.last or self.prompt()
        self.ask([*last[: self.random.randint(1, len(last))], *self.prompt()[:9]])

    def sample(self) -> None:
        heat, seed = self.random.choice((0.3, 0.8, 1.5)), self.random.randrange(2**31)
        drawn = Sampling(temperature=heat, top_k=self.random.choice((0, 40)), seed=seed)
        prompt = self.prompt()
        run = self.session.generate(prompt, max_tokens=self.length(), sampling=drawn).run()
        self.last = [*prompt, *run.tokens]

    def cancel(self) -> None:
        """Leave a generation in the middle; what follows must not notice."""
        prompt, n_pieces = self.prompt(), self.random.randint(0, 12)
        generation = self.session.generate(prompt, max_tokens=40)
        for count, _ in enumerate(generation):
            if count >= n_pieces:
                break
        generation._pieces.close()
        self.last = [*prompt, *generation.tokens]
        self.ask(self.last if self.random.random() < 0.5 else None)

    def stop_string(self) -> None:
        """Stop at a piece of the text that a fresh context writes."""
        prompt = self.prompt()
        with self.fresh() as fresh:
            text = fresh.generate(prompt, max_tokens=40).run().text
        at = self.random.randint(1, max(1, len(text) - 4))
        if stop := text[at : at + 3]:
            run = self.session.generate(prompt, max_tokens=40, stop=[stop]).run()
            same = self.compare(prompt, run.tokens, len(run.tokens))
            if same and run.text != text[: text.find(stop)]:
                raise Different(f"stop {stop!r}: {run.text!r} of {text!r}")
            self.last = [*prompt, *run.tokens]

    def save_and_restore(self) -> None:
        """Go on with a saved prompt in another session, and in this one after another prompt."""
        saved = self.last or self.prompt()
        self.session.process(saved)
        self.session.save(self.prompt_file)
        with Session(self.model, self.settings) as other:
            other.restore(self.prompt_file)
            prompt, n = [*saved, *self.prompt()[:20]], self.length()
            self.compare(prompt, other.generate(prompt, max_tokens=n).run().tokens, n)
        self.ask()
        self.session.restore(self.prompt_file)
        self.ask([*saved, *self.prompt()[:20]])

    def batch(self) -> None:
        """Several prompts at once; some answers are sampled."""
        settings = replace(self.drawn_settings(), prompt_rows="last", n_ubatch=48)
        prompts = [self.prompt() for _ in range(self.random.randint(1, 6))]
        lengths = [self.length() for _ in prompts]
        hot = [self.random.random() < 0.25 for _ in prompts]
        sampling = [Sampling(temperature=0.8, seed=i) if h else None for i, h in enumerate(hot)]
        with BatchSession(self.model, settings, self.random.randint(1, 4)) as session:
            if self.random.random() < 0.3:  # and one that is left in the middle
                next(iter(session.generate(prompts, max_tokens=20)), None)
            batch = session.generate(prompts, max_tokens=lengths, sampling=sampling).run()
        for prompt, n, answer, sampled in zip(prompts, lengths, batch.results, hot, strict=True):
            if not sampled:
                self.compare(prompt, answer.tokens, n, settings)

    def bad_input(self) -> None:
        """Refused input leaves the session as it was."""
        for prompt, n in (([1] * 5 * N_CTX, 4), ([], 4), ([self.model.n_vocab], 4), ([1], 0)):
            try:
                self.session.generate(prompt, max_tokens=n).run()
            except UsageError:
                continue
            raise Different(f"a prompt of {len(prompt)} tokens and max_tokens {n} was accepted")
        self.ask(self.last[: N_CTX - 60])

    # -- what is right ---------------------------------------------------------------------------

    def fresh(self, settings: Settings | None = None) -> Session:
        """A new session without MTP; everything but MATTERS has its default."""
        matters = {name: getattr(settings or self.settings, name) for name in MATTERS}
        return Session(self.model, replace(self.base, draft_n_max=0, **matters))

    def compare(
        self, prompt: list[int], got: list[int], n: int, settings: Settings | None = None
    ) -> bool:
        """Whether an answer is the fresh context's; False: it differs after a near tie.

        Raises:
            Different: it differs in another way.
        """
        with self.fresh(settings) as fresh:
            run = fresh.generate(prompt, max_tokens=n, log_ties=True).run()
        pairs = zip(got, run.tokens, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), -1)
        tie = next((tie for tie in run.telemetry.near_ties or () if tie.index == at), None)
        equal = got == run.tokens
        if not equal and not (tie and got[at] == tie.other):
            told = f"{settings or self.settings}\nprompt {prompt}\nanswer {got}"
            raise Different(f"token {at} differs, and not by rounding\n{told}\nfresh  {run.tokens}")
        self.counts["equal" if equal else "near tie"] += 1
        self.counts["tokens"] += len(got)
        return equal


def resident() -> int:
    """Bytes of this process in memory that do not belong to a file.

    The allocator first returns freed memory to the system: how much of it the allocator would keep
    depends on the order of sizes, and would hide or feign growth.
    """
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc
        trim(0)
    return anonymous(psutil.Process())


def soak(work: Soak, minutes: float, steps: int | None) -> list[int]:
    """Step until the time is over or the steps are done; returns the bytes of :func:`resident`
    whenever no session was open."""
    end, readings, count = time.monotonic() + 60 * minutes, [], 0
    while (count < steps) if steps else (time.monotonic() < end):
        count += 1
        if work.step() == "switch":
            readings.append(resident())
    work.switch()
    return [*readings, resident()]


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=30, metavar="M", help="default: %(default)s")
    add("--steps", type=int, metavar="N", help="this many steps instead")
    add("--seed", type=int, default=1, help="default: %(default)s")
    add("--model", type=Path, metavar="FILE", help="GGUF with an MTP head (default: demo)")
    add("--threads", type=int, default=1, metavar="N", help="default: %(default)s")
    args = parser.parse_args(argv)
    if args.minutes <= 0 or args.threads < 1 or (args.steps is not None and args.steps < 1):
        parser.error("minutes, threads and steps must be above 0")
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    different, readings = "", [resident()]
    with tempfile.TemporaryDirectory() as folder, Model(args.model or demo_path()) as model:
        work = Soak(model, args.seed, args.threads, Path(folder))
        try:
            readings = soak(work, args.minutes, args.steps)
        except Different as error:
            different = str(error)
        finally:
            work.switch()
    first, last = growth(readings, WARM_UP)
    results.show([], ["what", "times"], [[name, str(n)] for name, n in work.counts.items()])
    print(f"\nmemory with no session open: {first / 2**20:.1f}, then {last / 2**20:.1f} MiB")
    if different:
        print(f"an answer differs: {different}")
    if grew := not args.steps and last - first > SLACK:
        print("memory grew")
    return int(bool(different) or grew)


if __name__ == "__main__":
    raise SystemExit(main())
