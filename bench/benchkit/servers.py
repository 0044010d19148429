"""The servers that are compared, each a process of its own: ours and llama-cpp-python's."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchkit import openai_client
from benchkit.paths import ROOT
from benchkit.plan import Plan
from pyllama_mtp.measure.peers.process import child_environment

START_TIMEOUT_S = 300
#: What llama-cpp-python's server imports, and its package does not ask for.
PEER_NEEDS = ("fastapi", "uvicorn", "openai", "pydantic", "safetensors", "websockets", "jinja2")
PEER_FOLDER = ROOT / "build" / "bench" / "llama-cpp-python"


class ServerError(RuntimeError):
    """A server cannot be made, or does not run."""


@contextlib.contextmanager
def started(
    command: Sequence[str], port: int, environment: Mapping[str, str], health: str
) -> Iterator[int]:
    """A server, from the moment that it answers at the path `health`; its port."""
    with tempfile.TemporaryFile() as log:
        # Elsewhere: in the checkout `python -m` would import its sources.
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, cwd=tempfile.gettempdir()
        )
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not _answers(port, health):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    said = log.read().decode(errors="replace")[-2000:]
                    raise ServerError(f"{Path(command[0]).name} does not start: {said}")
                time.sleep(0.1)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(port: int, path: str) -> bool:
    try:
        openai_client.get(port, path)
    except OSError:
        return False
    return True


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server((openai_client.HOST, 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


def ours(plan: Plan, n_sequences: int, options: Sequence[str]) -> contextlib.AbstractContextManager:
    """``pyllama-mtp serve`` with the plan's settings."""
    port = free_port()
    usual = plan.driver_settings(plan.n_prompt + plan.n_decode + 1)
    command = [
        *(sys.executable, "-m", "pyllama_mtp", "serve", "--port", str(port)),
        *("--model", str(plan.model), "--threads", str(plan.threads)),
        *("--n-ctx", str(usual["n_ctx"]), "--n-batch", str(plan.n_batch)),
        *("--n-ubatch", str(plan.n_ubatch), "--n-sequences", str(n_sequences)),
        *options,
    ]
    import pyllama_mtp

    root = str(Path(pyllama_mtp.__file__).parents[1])  # as this process has it
    return started(command, port, {**child_environment(), "PYTHONPATH": root}, "/health")


# -- llama-cpp-python ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """llama-cpp-python: an interpreter that has it, its server, and the libraries that it is to
    load."""

    python: Path
    server: Path
    libraries: Path

    def serve(self, plan: Plan, folder: Path, depth: int) -> contextlib.AbstractContextManager:
        """Its server with the plan's settings, and draft-mtp with so many drafts; 0: plain."""
        port = free_port()
        config = {
            "server": {"host": openai_client.HOST, "port": port},
            "model": peer_model(plan, depth),
        }
        path = folder / f"config-{depth}.json"
        path.write_text(json.dumps(config))
        environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(self.libraries)}
        launcher = Path(__file__).with_name("without_mtmd.py")
        command = [*map(str, (self.python, launcher, self.server)), "-C", str(path)]
        return started(command, port, environment, "/v1/models")


def peer_model(plan: Plan, depth: int) -> dict[str, Any]:
    """The section "model" of its configuration; what it would keep of logits is off."""
    model = {
        "path": str(plan.model),
        "alias": "peer",
        "n_ctx": plan.n_ctx(plan.n_prompt + plan.n_decode + 1),
        "n_seq_max": 1,
        "n_batch": plan.n_batch,
        "n_ubatch": plan.n_ubatch,
        "threads": plan.threads,
        "threads_batch": plan.threads,
        "store_logits": False,
    }
    if depth:
        model |= {"draft_model": "draft-mtp", "draft_model_num_pred_tokens": depth}
        model |= {"draft_model_threads": plan.threads, "draft_model_threads_batch": plan.threads}
    return model


def make_peer(libraries: Path, folder: Path = PEER_FOLDER) -> Peer:
    """Install the pinned llama-cpp-python, without native code of its own, into an environment of
    its own, once. Raises ServerError."""
    folder = folder.absolute()
    python, server = folder / "bin" / "python", folder / "server.py"
    done = folder / "complete"
    if not done.exists():
        print("installing llama-cpp-python ...", file=sys.stderr, flush=True)
        sys.path.insert(0, str(ROOT / "vendor"))
        from fetch import verified_archive
        from sdist import read_pin

        archive = verified_archive(read_pin(ROOT / "vendor" / "llama-cpp.pin"))
        _run([sys.executable, "-m", "venv", str(folder)])
        environment = {**os.environ, "CMAKE_ARGS": "-DLLAMA_BUILD=OFF"}
        _run([str(python), "-m", "pip", "install", "-q", str(archive), *PEER_NEEDS], environment)
        with tarfile.open(archive) as tar:
            name = next(n for n in tar.getnames() if n.endswith("/examples/server/server.py"))
            found = tar.extractfile(name)
            assert found
            server.write_bytes(found.read())
        done.touch()
    return Peer(python, server, libraries)


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ServerError(f"{command[0]} failed: {(done.stdout + done.stderr).strip()[-2000:]}")


def peer_rounds(port: int) -> tuple[int, int]:
    """Rounds with drafts, and drafts accepted, that llama-cpp-python's server has counted."""
    counts = {}
    for line in openai_client.get(port, "/metrics").splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            counts[name.partition("{")[0]] = float(value)
    prefix = "batch_server:draft_"
    return (
        int(counts.get(f"{prefix}batches_verified_total", 0)),
        int(counts.get(f"{prefix}tokens_accepted_total", 0)),
    )
