"""The next token from the target's logits, by llama.cpp's own samplers.

Speculative decoding never samples from the head: each verified row is sampled like a plain decode
step would sample it, and a draft is accepted when it is what came out. The emitted text is
therefore a draw from the target's distribution, whatever the drafts were.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .errors import FatalDecodeError
from .settings import Sampling

if TYPE_CHECKING:
    from .context import Context
    from .model import Model


class Sampler:
    """A sampler chain for one generation; remembers what it drew, for the repetition penalty."""

    def __init__(self, model: Model, sampling: Sampling, history: Sequence[int] = ()) -> None:
        """`history`: the prompt's tokens, which the repetition penalty looks at as well."""
        self.sampling = sampling
        self.seed = secrets.randbelow(2**32 - 1) if sampling.seed is None else sampling.seed
        self._lib = model._lib
        self._chain = None if sampling.plain_greedy else self._build(model, history)

    def _build(self, model: Model, history: Sequence[int]) -> Any:
        lib, s = self._lib, self.sampling
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        add = lib.llama_sampler_chain_add
        if s.repeat_penalty != 1.0 and s.repeat_last_n > 0:
            args = (model.n_vocab, s.repeat_last_n, s.repeat_penalty, 0.0, 0.0)
            add(chain, lib.llama_sampler_init_penalties(*args))
        if s.greedy:
            add(chain, lib.llama_sampler_init_greedy())
        else:
            if s.top_k > 0:
                add(chain, lib.llama_sampler_init_top_k(min(s.top_k, model.n_vocab)))
            if s.top_p < 1:
                add(chain, lib.llama_sampler_init_top_p(s.top_p, 1))
            if s.min_p > 0:
                add(chain, lib.llama_sampler_init_min_p(s.min_p, 1))
            add(chain, lib.llama_sampler_init_temp(s.temperature))
            add(chain, lib.llama_sampler_init_dist(self.seed))
        for token in history[-s.repeat_last_n :] if s.repeat_last_n else ():
            lib.llama_sampler_accept(chain, token)
        return chain

    @property
    def plain_greedy(self) -> bool:
        """True when it takes the best token of a row, and needs no logits."""
        return self._chain is None

    def sample(self, context: Context, row: int) -> int:
        """Draw from batch entry `row` of the last decode, and remember it; rows come in order."""
        if self._chain is None:
            return context.argmax(row)
        context.check_finite(row)  # the samplers would end the process on a NaN
        token = int(self._lib.pyllama_sample(self._chain, context.handle, row))
        if token < 0:
            raise FatalDecodeError("sampling failed: out of memory, or a fault in llama.cpp")
        return token

    def close(self) -> None:
        """Free the chain. May be called again."""
        chain, self._chain = self._chain, None
        if chain is not None:
            self._lib.llama_sampler_free(chain)

    def __del__(self) -> None:
        if getattr(self, "_chain", None) is not None:
            self.close()
