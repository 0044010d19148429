"""Other programs that are measured beside this project, on the same model file and prompts.

Each sample is a process of its own. :data:`PEERS` says how to get each program, and what it
measures.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyllama_mtp.errors import PyllamaMtpError


class PeerError(PyllamaMtpError):
    """A program is not installed, or failed; the message says what to do, or why."""


@dataclass(frozen=True)
class Peer:
    """A program that can be measured.

    Attributes:
        drafts: it can draft with the MTP head.
        obtain: how to get it.
        note: how it measures.
    """

    name: str
    drafts: bool
    obtain: str
    note: str


_BUILD = (
    "`python bench/peers.py` in a checkout builds it from the pinned tree; one on PATH, in "
    "--peer-dir DIR or in the folder of PYLLAMA_MTP_PEERS is found too"
)

#: By name, in the order of the table.
PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "llama-server",
            drafts=True,
            obtain=_BUILD,
            note="llama-server: its own timings of a completion of the same tokens; how many "
            "drafts it accepted at each position it does not say",
        ),
        Peer(
            "llama-bench",
            drafts=False,
            obtain=_BUILD,
            note="llama-bench: as many tokens, but random ones, and none is sampled",
        ),
        Peer(
            "llama-cpp-python",
            drafts=False,
            obtain="`pip install llama-cpp-python` compiles llama.cpp; installed with "
            "CMAKE_ARGS=-DLLAMA_BUILD=OFF it compiles nothing and runs on the library that "
            "LLAMA_CPP_LIB_PATH names, as in LLAMA_CPP_LIB_PATH=$(pyllama-mtp libdir --lib "
            "upstream). For another Python than this one: --peer-python, or "
            "PYLLAMA_MTP_PEER_PYTHON",
            note="llama-cpp-python: Llama.generate of the same tokens, greedy, with the time that "
            "its Python code takes; flash attention 'auto' is 'on' there",
        ),
    )
}
