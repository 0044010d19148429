"""One measurement of one side, in the same terms for llama-bench, llama-server and our driver."""

from __future__ import annotations

from pyllama_mtp.measure.peers.output import Figures as Sample

__all__ = ["Sample"]
