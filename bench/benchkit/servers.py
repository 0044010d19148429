"""The servers that are compared, each a process of its own: ours and llama-cpp-python's."""

from __future__ import annotations

import contextlib
import json
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyllama_mtp
from benchkit import ROOT, environment, openai_client
from pyllama_mtp import Settings
from pyllama_mtp.measure.peers import PeerError
from pyllama_mtp.measure.peers.llama_server import free_port
from pyllama_mtp.measure.peers.process import Program

START_TIMEOUT_S = 300
#: What llama-cpp-python's server imports, and its package does not ask for.
PEER_NEEDS = ("fastapi", "uvicorn", "openai", "pydantic", "safetensors", "websockets", "jinja2")
PEER_FOLDER = ROOT / "build" / "bench" / "llama-cpp-python"


@contextlib.contextmanager
def started(
    command: Sequence[str], port: int, variables: Mapping[str, str], health: str
) -> Iterator[int]:
    """A running server, which has answered at the path `health`; yields its port."""
    # Elsewhere: in the checkout `python -m` would import its sources.
    given = ["env", "-C", tempfile.gettempdir(), *(f"{k}={v}" for k, v in variables.items())]
    with Program(Path(command[0]).name, [*given, *command]) as program:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(port, health):
            if program.exit_code is not None or time.monotonic() > deadline:
                raise PeerError(f"{program.name} does not start: {program.last_words()}")
            time.sleep(0.1)
        yield port


def _answers(port: int, path: str) -> bool:
    try:
        openai_client.get(port, path)
    except OSError:
        return False
    return True


def ours(
    model: Path, settings: Settings, n_sequences: int, options: Sequence[str]
) -> contextlib.AbstractContextManager[int]:
    """``pyllama-mtp serve`` with these settings."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "pyllama_mtp", "serve", "--port", str(port)),
        *("--model", str(model), "--threads", str(settings.threads)),
        *("--n-ctx", str(settings.n_ctx), "--n-batch", str(settings.n_batch)),
        *("--n-ubatch", str(settings.n_ubatch), "--n-sequences", str(n_sequences)),
        *options,
    ]
    root = str(Path(pyllama_mtp.__file__).parents[1])  # as this process has it
    return started(command, port, {"PYTHONPATH": root}, "/health")


# -- llama-cpp-python ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """llama-cpp-python: an interpreter that has it, its server, and the libraries to load."""

    python: Path
    server: Path
    libraries: Path

    def serve(
        self, model: Path, settings: Settings, folder: Path, depth: int
    ) -> contextlib.AbstractContextManager[int]:
        """Its server with these settings, and draft-mtp with `depth` drafts; 0: plain."""
        port = free_port()
        config = {
            "server": {"host": openai_client.HOST, "port": port},
            "model": peer_model(model, settings, depth),
        }
        path = folder / f"config-{depth}.json"
        path.write_text(json.dumps(config))
        launcher = Path(__file__).with_name("without_mtmd.py")
        command = [*map(str, (self.python, launcher, self.server)), "-C", str(path)]
        return started(command, port, {"LLAMA_CPP_LIB_PATH": str(self.libraries)}, "/v1/models")


def peer_model(path: Path, settings: Settings, depth: int) -> dict[str, Any]:
    """The section "model" of its configuration; it keeps no logits."""
    model = {
        "path": str(path),
        "alias": "peer",
        "n_ctx": settings.n_ctx,
        "n_seq_max": 1,
        "n_batch": settings.n_batch,
        "n_ubatch": settings.n_ubatch,
        "threads": settings.threads,
        "threads_batch": settings.threads,
        "store_logits": False,
    }
    if depth:
        model |= {"draft_model": "draft-mtp", "draft_model_num_pred_tokens": depth}
        model |= dict.fromkeys(
            ("draft_model_threads", "draft_model_threads_batch"), settings.threads
        )
    return model


def make_peer(libraries: Path, folder: Path = PEER_FOLDER) -> Peer:
    """Install the pinned llama-cpp-python in an environment of its own, once.

    Raises:
        PeerError: it cannot be made. FetchError: its source archive cannot be had.
    """
    folder = folder.absolute()
    python, server = folder / "bin" / "python", folder / "server.py"
    if not server.exists():
        archive = environment.source_archive()
        environment.make(folder, archive, PEER_NEEDS)
        with tarfile.open(archive) as tar:
            name = next(n for n in tar.getnames() if n.endswith("/examples/server/server.py"))
            found = tar.extractfile(name)
            assert found
            server.write_bytes(found.read())
    return Peer(python, server, libraries)


def peer_rounds(port: int) -> tuple[int, int]:
    """Rounds with drafts, and accepted drafts, as llama-cpp-python's server has counted them."""
    counts = {}
    for line in openai_client.get(port, "/metrics").splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            counts[name.partition("{")[0]] = float(value)
    verified, accepted = (
        int(counts.get(f"batch_server:draft_{name}_total", 0))
        for name in ("batches_verified", "tokens_accepted")
    )
    return verified, accepted
