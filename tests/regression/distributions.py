"""What `Sampling` documents, computed by numpy from logits, and texts counted and compared with it.

Many short texts of one prompt are counted and compared with their exact probabilities. Each text
comes from a round of the full depth and what must follow it where drafts fail. Seeds are fixed;
with others, a comparison would be red by chance once in 1 / FALSE_ALARM times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pyllama_mtp import Model, Sampling, Session

from .support import Floats, last_logits

Doubles = npt.NDArray[np.float64]
Text = tuple[int, ...]

#: The chance of a red test although nothing is wrong, each time other seeds are drawn.
FALSE_ALARM = 1e-4
FALSE_ALARM_SIGMAS = 3.719  # the same, as a normal quantile
N_TEXTS = 400
#: A text whose beginning is expected so often is told from others by its next token.
EXPANDED = 20
#: The fewest texts that a cell of its own is expected to get.
LEAST = 5
#: Any token that has no cell of its own.
OTHER = -1
#: More texts than this in cells that expect none or one: chance gives them once in a million.
MOST_UNEXPECTED = 8
#: Texts that are searched for tokens which the settings exclude, and so many tokens of each.
SEARCHED, FIRST = 20, 3
PLAIN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
#: How drafts are made and judged.
WAYS = {"best drafts": {}, "drawn drafts": {"draft_sampling": True}}


def softmax(scores: Doubles | Floats) -> Doubles:
    """Probabilities of logits, [n]."""
    weights = np.exp((scores - scores.max()).astype(np.float64))
    found: Doubles = weights / weights.sum()
    return found


def repeated(history: Sequence[int], s: Sampling) -> dict[int, int]:
    """DRY: by token, the longest repetition at the end of `history` that it would continue."""
    found: dict[int, int] = {}
    for at in range(1, len(history)):
        n = 0
        while n < at and history[at - 1 - n] == history[-1 - n]:
            n += 1
        if n >= s.dry_allowed_length:
            found[history[at]] = max(n, found.get(history[at], 0))
    return found


def penalized(scores: Doubles, history: Sequence[int], s: Sampling) -> None:
    """Biases and penalties, in place."""
    for token, bias in (s.logit_bias or {}).items():
        scores[token] += bias
    for token, count in Counter(history[-s.repeat_last_n :]).items():
        scores[token] *= s.repeat_penalty if scores[token] <= 0 else 1 / s.repeat_penalty
        scores[token] -= count * s.frequency_penalty + s.presence_penalty
    if s.dry_multiplier:
        for token, n in repeated(history[-s.dry_penalty_last_n :], s).items():
            scores[token] -= s.dry_multiplier * s.dry_base ** (n - s.dry_allowed_length)


def filtered(scores: Doubles, s: Sampling) -> None:
    """Top-n-sigma, top-k, typical, top-p and min-p, in place: what they exclude is -inf."""

    def keep(tokens: npt.NDArray[np.intp]) -> None:
        scores[np.setdiff1d(np.arange(len(scores)), tokens)] = -np.inf

    if s.top_n_sigma:
        spread = scores[np.isfinite(scores)].std()
        scores[scores < scores.max() - s.top_n_sigma * spread] = -np.inf
    if s.top_k:
        keep(np.argsort(-scores, kind="stable")[: s.top_k])
    if s.typical_p < 1:
        p = softmax(scores)
        with np.errstate(divide="ignore", invalid="ignore"):
            surprise = -np.log(p)
            distance = np.abs(surprise - np.nansum(p * surprise))
        order = np.argsort(np.where(p > 0, distance, np.inf), kind="stable")
        keep(order[: int(np.searchsorted(np.cumsum(p[order]), s.typical_p, side="right")) + 1])
    if s.top_p < 1:
        p = softmax(scores)
        order = np.argsort(-p, kind="stable")
        keep(order[: int(np.searchsorted(np.cumsum(p[order]), s.top_p)) + 1])
    p = softmax(scores)
    keep(np.flatnonzero(p >= s.min_p * p.max()))


def reference(logits: Floats, history: Sequence[int], s: Sampling) -> Doubles:
    """[n_vocab] float64: the distribution that `Sampling` documents, after `history`."""
    scores = logits.astype(np.float64)
    penalized(scores, history, s)
    filtered(scores, s)
    heated = softmax(scores / s.temperature)
    p = softmax(scores)
    above = np.flatnonzero(p >= s.xtc_threshold)
    if s.xtc_probability and len(above) > 1:
        without = scores.copy()
        without[above[above != above[p[above].argmin()]]] = -np.inf
        rest = softmax(without / s.temperature)
        heated = (1 - s.xtc_probability) * heated + s.xtc_probability * rest
    return heated


def chi_square(counts: Sequence[float], expected: Sequence[float]) -> tuple[float, float]:
    """The statistic over cells of at least 5 (the others in one), and its FALSE_ALARM quantile by
    Wilson and Hilferty's approximation."""
    pairs = sorted(zip(expected, counts, strict=True), reverse=True)
    cells = [(e, n) for e, n in pairs if e >= LEAST]
    rest = [sum(column) for column in zip(*[p for p in pairs if p[0] < LEAST], strict=True)]
    if rest and rest[0] >= 1:
        cells.append((rest[0], rest[1]))
    assert len(cells) > 3, "too few cells to compare anything"
    found = sum((n - e) ** 2 / e for e, n in cells)
    k = len(cells) - 1
    limit = k * (1 - 2 / (9 * k) + FALSE_ALARM_SIGMAS * (2 / (9 * k)) ** 0.5) ** 3
    return found, limit


class Exact:
    """The target's probabilities of texts after a prompt. Logits are kept for all samplings."""

    def __init__(self, model: Model, prompt: Sequence[int]) -> None:
        self.prompt = list(prompt)
        self._model = model
        self._logits: dict[Text, Floats] = {}

    def following(self, text: Text, sampling: Sampling) -> Doubles:
        """[n_vocab] float64: of the token after `text`."""
        history = [*self.prompt, *text]
        if text not in self._logits:
            self._logits[text] = last_logits(self._model, history)
        return reference(self._logits[text], history, sampling)

    def cells(
        self, sampling: Sampling, length: int, text: Text = (), share: float = 1.0
    ) -> dict[Text, float]:
        """Probabilities of beginnings of texts, of which every text of `length` has just one.

        A beginning that is likely is told apart by its likely next tokens; the others are OTHER.
        """
        if len(text) == length or share * N_TEXTS < EXPANDED:
            return {text: share}
        shares = share * self.following(text, sampling)
        likely = [int(token) for token in np.flatnonzero(shares * N_TEXTS >= LEAST)]
        found = {(*text, OTHER): share - float(shares[likely].sum())}
        for token in likely:
            found |= self.cells(sampling, length, (*text, token), float(shares[token]))
        return found

    def excludes(self, text: Text, sampling: Sampling) -> bool:
        """Whether one of the text's first tokens cannot be drawn."""
        return any(self.following(text[:i], sampling)[text[i]] == 0 for i in range(FIRST))


def cell(text: Text, cells: dict[Text, float]) -> Text:
    """The one that `text` belongs to."""
    for n in range(len(text), -1, -1):
        for beginning in (text[:n], (*text[:n], OTHER)):
            if beginning in cells:
                return beginning
    raise AssertionError(f"no cell for {text}")


def compare(
    exact: Exact, session: Session, sampling: Sampling, depth: int
) -> tuple[float, float, float]:
    """The chi-square statistic of N_TEXTS texts, its limit, and the share of drafts accepted.

    The statistic is infinite where a token came out that the settings exclude.
    """
    length = depth + 2  # one of the prefill, and a round that is all accepted
    cells = exact.cells(sampling, length)
    texts: Counter[Text] = Counter()
    drafted = accepted = 0
    for seed in range(N_TEXTS):
        run = session.generate(
            exact.prompt,
            max_tokens=length,
            sampling=replace(sampling, seed=seed),
            ignore_eos=True,
        ).run()
        texts[tuple(run.tokens)] += 1
        drafted += sum(run.telemetry.drafted)
        accepted += sum(run.telemetry.accepted)
    counts: Counter[Text] = Counter()
    for text, n in texts.items():
        counts[cell(text, cells)] += n
    rare = [text for text, share in cells.items() if share * N_TEXTS < LEAST]
    if sum(cells[text] for text in rare) * N_TEXTS < 1:  # too few for the chi-square
        assert sum(counts[text] for text in rare) <= MOST_UNEXPECTED
    expected = [N_TEXTS * share for share in cells.values()]
    found, limit = chi_square([counts[text] for text in cells], expected)
    if any(exact.excludes(text, sampling) for text in list(texts)[:SEARCHED]):
        found = float("inf")
    return found, limit, accepted / drafted
