"""Fails one allocation of a round after the other; see ``test_round.py``.

Arguments: model file, and by what number fewer allocations fail than in the long test. Prints how
many failed, by step of the round.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import numpy as np

from pyllama_mtp import Model
from pyllama_mtp.drafting.head import draft_head, set_draft_head
from pyllama_mtp.errors import ContextClosedError, PyllamaMtpError
from pyllama_mtp.llama.batch import Batch
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.contextoptions import ContextOptions

N, DEPTH = 20, 3
NAMES = ("drafts", "logits", "state")
FAIL = ctypes.CDLL(None).fail_after
FAIL.restype, FAIL.argtypes = ctypes.c_long, [ctypes.c_long]


def batch_of(tokens: list[int], start: int) -> Batch:
    """Tokens of the one sequence from a position on, all of them outputs."""
    n = len(tokens)
    return Batch(tokens, np.arange(start, start + n), np.zeros(n), np.ones(n))  # type: ignore[arg-type]


class Round:
    """A context with a draft head, whose calls are made past the class that would close it."""

    def __init__(self, model: Model) -> None:
        options = ContextOptions(
            n_ctx=256, n_batch=64, n_ubatch=16, n_threads=1, n_outputs_max=64, with_mtp=True,
            n_rs_seq=DEPTH,
        )  # fmt: skip
        self.context = Context(model, options)
        head = draft_head(model.info, 600)
        assert head
        set_draft_head(self.context, head.rows(), head.ids)
        self.context.decode_batch(batch_of([*range(100, 100 + N)], 0))
        self.state = bytes(self.context.save_state())
        self.out = np.full(DEPTH, -1, dtype=np.int32)
        self.wanted = self.seen()

    def draft(self) -> int:
        """Drafts after token 7; the code of the call."""
        lib, ffi = self.context.library.lib, self.context.library.ffi
        one = np.array([7], dtype=np.int32), np.array([0], dtype=np.int32)
        message = ffi.new("char[200]")
        tokens, seqs, drafts = (ffi.from_buffer("int32_t[]", a) for a in (*one, self.out))
        return int(
            lib.pyllama_mtp_draft(
                self.context.handle, tokens, seqs, 1, DEPTH, 0, ffi.NULL, ffi.NULL, drafts,
                message, len(message),
            )
        )  # fmt: skip

    def reserve(self) -> int:
        """Reserve rounds; 0 when done."""
        lib, ffi = self.context.library.lib, self.context.library.ffi
        message = ffi.new("char[200]")
        code = int(lib.pyllama_mtp_reserve(self.context.handle, 1, DEPTH, message, len(message)))
        return 0 if code == 1 else code or -2

    def forget_shapes(self) -> None:
        """Have the next call build and allocate its graphs anew."""
        for on in (True, False):
            self.context.library.lib.llama_mtp_set_slice(self.context.handle, on)

    def seen(self) -> tuple[bytes, bytes, bytes]:
        """The drafts, the logits of a verification, and the state after it."""
        assert self.draft() == 0
        drafts = self.out.tobytes()
        batch = batch_of([7, *self.out.tolist()], N)
        self.context.decode_batch(batch)
        logits = b"".join(self.context.logits(row).tobytes() for row in range(DEPTH + 1))
        after = bytes(self.context.save_state())
        self.context.clear()
        self.context.load_state(self.state)
        return drafts, logits, after

    def fail_everywhere(self, call: Callable[[], int], step: int) -> int:
        """Let each `step`-th allocation of a call fail; afterwards all is as it would have been."""
        n = 0
        while True:
            FAIL(n)
            code = call()
            FAIL(-1)
            if code == 0:
                return n
            assert code <= -2, code
            for what, seen, wanted in zip(NAMES, self.seen(), self.wanted, strict=True):
                assert seen == wanted, f"{what} after failure {n}"
            n += step


def fail_in_verification(model: Model, step: int) -> int:
    """A decode that fails leaves a context that refuses what follows."""
    batch = batch_of([7, 8, 9], N)
    n = 0
    while True:
        context = Round(model).context
        FAIL(n)
        try:
            context.decode_batch(batch)
        except PyllamaMtpError:
            FAIL(-1)
        else:
            FAIL(-1)
            return n
        try:
            context.decode_batch(batch)
        except ContextClosedError:
            n += step
        else:
            raise AssertionError(n)


def fail_in_saving(model: Model, step: int) -> int:
    """A state is saved with all that is pending in it, or not at all."""
    one = Round(model)
    context = one.context

    def verify() -> None:
        context.clear()
        context.load_state(one.state)
        context.decode_batch(batch_of([7, 8, 9], N))
        assert context.remove(N + 2)

    verify()
    wanted = bytes(context.save_state())
    n = 0
    while True:
        verify()
        FAIL(n)
        try:
            saved = bytes(context.save_state())
        except PyllamaMtpError:
            tried = FAIL(-1)
            assert bytes(context.save_state()) == wanted, f"the state, later than failure {n}"
        else:
            tried = FAIL(-1)
            assert saved == wanted, f"the state after failure {n}"
        if tried <= n:
            context.close()
            return n
        n += step


def main(path: str, fewer: int) -> None:
    with Model(path) as model:
        again = Round(model)
        print("draft, steady", again.fail_everywhere(again.draft, 2 * fewer))
        again.context.close()
        for name in ("draft", "reserve"):
            first = Round(model)

            def fresh(first: Round = first, name: str = name) -> int:
                first.forget_shapes()
                return int(getattr(first, name)())

            print(name, "first", first.fail_everywhere(fresh, 5 * fewer))
            first.context.close()
        print("save", fail_in_saving(model, 3 * fewer))
        print("verify", fail_in_verification(model, 29 * fewer))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
