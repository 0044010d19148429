"""Upstream's way, which is the reference for a context with_mtp: the trunk and the MTP block in
contexts of their own. Hidden rows go over the host, the token at position p with the row of p - 1,
zeros with the first one; the block runs whole, and drafts one step after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from pyllama_mtp import Model, Session
from pyllama_mtp.llama.batch import Batch, Floats, Ints
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.contextoptions import ContextOptions
from pyllama_mtp.llama.drafts import compute_drafts
from pyllama_mtp.llama.native import Owned

from . import kvstate
from .kvstate import KVState
from .support import N_BATCH, N_CTX, N_UBATCH, engine_of, made_up, scaled
from .traced import Node, Traced

Marks = npt.NDArray[np.int8]
#: Logits have a standard deviation of 1 to 3; see support.rounding().
ROUNDING = scaled(0.01)
#: Largest difference of K and V where graphs differ, as a share of the largest entry: exact caches,
#: and quantized ones (a rounding difference may move a value by one step of 1/127).
TOLERANCE = {
    cache: min(scaled(share), 0.05)
    for cache, share in {"f32": 0.003, "f16": 0.005, "q8_0": 0.03}.items()
}
#: Types of the K and of the V cache, flash attention. A quantized V cache needs it; without it V
#: is transposed.
CACHES = [
    *((kind, kind, flash) for kind in ("f16", "f32") for flash in ("on", "off")),
    *((kind, kind, "on") for kind in ("q8_0", "q4_0")),
    ("q8_0", "f16", "off"),
    ("q4_0", "f32", "on"),
    ("f16", "q8_0", "auto"),
]


def context(model: Model, trace: bool = False, **options: object) -> Context:
    """A context with_mtp unless `options` say otherwise; with `trace` one that records nodes."""
    chosen = {"n_ctx": N_CTX, "n_batch": N_BATCH, "n_ubatch": N_UBATCH, "n_threads": 1}
    chosen |= {"n_outputs_max": N_BATCH, "with_mtp": True, **options}
    kind = Traced if trace else Context
    return kind(model, ContextOptions(**chosen))  # type: ignore[arg-type]


def trunk(model: Model, **options: object) -> Context:
    """The same without the MTP block unless `options` say otherwise."""
    return context(model, **{"with_mtp": False, **options})


def none(n: int) -> Marks:
    return np.zeros(n, dtype=np.int8)


def every(n: int) -> Marks:
    return np.ones(n, dtype=np.int8)


def last(n: int) -> Marks:
    """Marks of a batch whose last entry is an output."""
    return (np.arange(n) == n - 1).astype(np.int8)


def some(n: int) -> Marks:
    return (np.arange(n) % 5 == 2).astype(np.int8)


def one_sequence(tokens: Ints, start: int = 0, seq: int = 0, outputs: Marks | None = None) -> Batch:
    """These tokens from position `start` on; the last one is an output."""
    positions = np.arange(start, start + len(tokens), dtype=np.int32)
    marks = last(len(tokens)) if outputs is None else outputs
    return Batch(tokens, positions, np.full(len(tokens), seq), marks)


def in_batches(model: Model, n: int, first: int = 0, seq: int = 0) -> list[Batch]:
    """`n` made-up tokens in batches of N_BATCH; some entries are outputs."""
    tokens = made_up(model, n, first)
    starts = range(0, n, N_BATCH)
    parts = [(tokens[start : start + N_BATCH], start) for start in starts]
    return [one_sequence(part, start, seq, some(len(part))) for part, start in parts]


def turns(
    model: Model, lengths: Sequence[int], size: int, marks: Callable[[int], Marks] = some
) -> list[Batch]:
    """One token of each sequence in turn, until all are used up, in batches of `size`."""
    where = [(p, s) for p in range(max(lengths)) for s in range(len(lengths)) if p < lengths[s]]
    positions, seqs = (np.array(column, dtype=np.int32) for column in zip(*where, strict=True))
    tokens = np.array([made_up(model, 1, 100 * s + p)[0] for p, s in where], dtype=np.int32)
    outputs = marks(len(where))
    parts = [slice(start, start + size) for start in range(0, len(where), size)]
    return [Batch(tokens[part], positions[part], seqs[part], outputs[part]) for part in parts]


def drafts_of(found: Context, newest: int, n: int = 5, seq: int = 0) -> list[int]:
    """[n] drafts of one sequence."""
    drafts = compute_drafts(found, np.array([newest], np.int32), np.array([seq], np.int32), n)
    return [int(token) for token in drafts[:, 0]]


def state(found: Context, seq: int = 0) -> KVState:
    """What the caches of a sequence hold."""
    mrope = found.model.architecture != "qwen3next"
    return kvstate.parse(found.save_state(seq=seq), mrope)


def draft_state(session: Session) -> KVState:
    """What the cache of a session's head holds."""
    engine = engine_of(session)
    if engine.head.contexts:
        return state(engine.head.contexts[0])
    whole = state(engine.target)
    return replace(whole, k=whole.k[-1:], v=whole.v[-1:])


def rows_of(nodes: Sequence[Node], name: str) -> list[int]:
    """Rows of the nodes of that name, or of that name and a layer, in order."""
    return [n.rows for n in nodes if n.name == name or n.name.rpartition("-")[0] == name]


@dataclass
class Steps:
    """Drafts by single steps: tokens, how far each was ahead of the second best, and the logits of
    each, [n_vocab] float32."""

    tokens: list[int] = field(default_factory=list)
    leads: list[float] = field(default_factory=list)
    logits: list[Floats] = field(default_factory=list)


def agree(found: Sequence[int], wanted: Steps) -> bool:
    """Whether drafts are those of the first steps. Where they part, the two best must have been as
    close as rounding.

    After that they are drafts for another text, and cannot be compared.
    """
    assert 0 < len(found) <= len(wanted.tokens)
    for i, (a, b) in enumerate(zip(found, wanted.tokens, strict=False)):
        if a != b:
            lead = wanted.leads[i]
            assert lead < ROUNDING, f"draft {i}: {a} in a chain, {b} alone, lead {lead}"
            return False
    return True


class TwoContexts(Owned):
    """The trunk and the block beside each other, in step."""

    def __init__(self, model: Model, hidden: str = "post-norm", **options: object) -> None:
        common = {"with_mtp": False, "hidden": hidden, **options}
        self.target = context(model, need_embd_pre_norm=True, **common)
        common["n_rs_seq"] = 0
        # Upstream's tap is behind the norm.
        tap = {"need_embd_pre_norm": True} if hidden == "pre-norm" else {"tap": "outputs"}
        self.block = context(model, mtp_head=True, **common, **tap)
        self._rows: dict[tuple[int, int], Floats] = {}
        self._zeros = np.zeros(model.n_embd, dtype=np.float32)

    def close(self) -> None:
        self.block.close()
        self.target.close()

    def row(self, position: int, seq: int = 0) -> Floats:
        """[n_embd] float32: the trunk's hidden row there; before the text it is zeros."""
        return self._rows[seq, position] if position >= 0 else self._zeros

    def decode(self, batch: Batch) -> None:
        """A batch of the trunk, then the same of the block."""
        self.target.decode_batch(batch)
        where = list(zip(batch.seqs.tolist(), batch.positions.tolist(), strict=True))
        rows = self.target.hidden_rows().copy()
        self._rows.update(zip(where, rows, strict=True))
        paired = np.stack([self.row(position - 1, seq) for seq, position in where])
        columns = batch.tokens, batch.positions, batch.seqs, 0 * batch.outputs
        self.block.decode_batch(Batch(*columns, paired))

    def clear(self) -> None:
        self.target.clear()
        self.block.clear()

    def remove(self, start: int, seq: int = 0) -> bool:
        """Both go back; whether the trunk could."""
        return self.target.remove(start, seq) and self.block.remove(start, seq)

    def draft(
        self,
        token: int,
        n: int,
        seq: int = 0,
        ids: Ints | None = None,
        window: tuple[int, int] | None = None,
    ) -> Steps:
        """`n` steps after `token`, which is not decoded yet; nothing of them stays.

        Args:
            ids: the tokens that may be drafted; all.
            window: (first, last): steps attend to so many of the first and last positions. Others
                are removed from the cache, and do not come back.
        """
        start, found = self.block.past(seq), Steps()
        row = self.row(start - 1, seq)[None]
        for position in range(start, start + n):
            if window:
                remove = self.block.library.lib.pyllama_memory_seq_rm
                self.block.call(remove, seq, window[0], position - window[1] + 1)
            newest = np.array([token], dtype=np.int32)
            self.block.decode(newest, position, np.ones(1, dtype=np.int8), row, seq)
            logits = self.block.logits(0).copy()
            allowed = logits if ids is None else logits[ids]
            second, best = np.sort(np.append(allowed, -np.inf))[-2:]
            token = int(allowed.argmax()) if ids is None else int(ids[allowed.argmax()])
            found.tokens.append(token)
            found.leads.append(float(best - second))
            found.logits.append(logits)
            row = self.block.hidden_rows()[:1].copy()
        self.block.remove(start, seq)
        return found


@contextmanager
def beside(
    model: Model, batches: Sequence[Batch] = (), **options: object
) -> Iterator[tuple[Context, TwoContexts]]:
    """A context with_mtp and its reference, after the same batches."""
    with context(model, **options) as found, TwoContexts(model, **options) as wanted:
        for batch in batches:
            found.decode_batch(batch)
            wanted.decode(batch)
        yield found, wanted
