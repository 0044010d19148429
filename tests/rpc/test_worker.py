"""What a worker survives: rubbish, clients that die or stall, its own death, several clients."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from pyllama_mtp import Model, Session
from pyllama_mtp.llama import rpc

from ..processes import RunPython
from ..workers import (
    PROMPT,
    SMALL,
    TEXT_OF,
    address_of,
    running_worker,
    start_worker,
    text_of,
)

#: Commands and sizes of ggml's protocol (ggml-rpc.cpp).
ALLOC, GET_BASE, SET_TENSOR, GRAPH_COMPUTE = 0, 3, 6, 10
TENSOR = struct.Struct("<QIQ4I4II16ii10QQQQ64si")  # rpc_tensor


@pytest.fixture(scope="module")
def process() -> Iterator[subprocess.Popen[str]]:
    """A worker's process; `address` below says where it listens."""
    started = start_worker()
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


@pytest.fixture(scope="module")
def address(process: subprocess.Popen[str]) -> str:
    return address_of(process)


def received(line: socket.socket, answer: struct.Struct) -> tuple[int, ...]:
    with line.makefile("rb") as file:
        return answer.unpack(file.read(answer.size))


def connected(address: str, *, greeted: bool = True) -> socket.socket:
    line = socket.create_connection(rpc.parse_address(address), 20)
    if greeted:
        line.sendall(rpc.HELLO)
        received(line, rpc.ANSWER)
    return line


def ask(line: socket.socket, command: int, data: bytes, answer: struct.Struct) -> tuple[int, ...]:
    line.sendall(struct.pack("<BQ", command, len(data)) + data)
    return received(line, answer)[1:]


def server_of(process: subprocess.Popen[str]) -> int:
    """The process that serves: the only child of the command's."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def reach(address: str) -> None:
    """Wait until a worker can be used, for 20 seconds at most."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return rpc.check(address)
        except rpc.UsageError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def rubbish(n: int) -> Iterator[bytes]:
    """Messages of random bytes, of random commands, and of sizes that nobody can have."""
    dice = random.Random(n)
    for _ in range(n):
        yield dice.randbytes(dice.randrange(1, 200))
        yield struct.pack("<BQ", dice.randrange(256), dice.randrange(64)) + dice.randbytes(64)
        size = dice.choice([2**40, 2**62, 2**63, 2**64 - 1])
        yield struct.pack("<BQ", dice.choice([SET_TENSOR, GRAPH_COMPUTE]), size) + bytes(64)


@pytest.mark.parametrize("greeted", [False, True])
def test_rubbish_ends_a_connection_only(
    process: subprocess.Popen[str], address: str, greeted: bool
) -> None:
    before = server_of(process)
    for message in rubbish(15):
        with closing(connected(address, greeted=greeted)) as line, suppress(OSError):
            line.sendall(message)
            line.shutdown(socket.SHUT_WR)
            while line.recv(4096):
                pass
    rpc.check(address)
    assert server_of(process) == before


def test_a_tensor_outside_of_its_buffer(process: subprocess.Popen[str], address: str) -> None:
    before = server_of(process)
    with closing(connected(address)) as line:
        buffer, size = ask(line, ALLOC, struct.pack("<IQ", 0, 4096), struct.Struct("<QQQ"))
        (base,) = ask(line, GET_BASE, struct.pack("<Q", buffer), struct.Struct("<QQ"))
        strides, none = (4, 4096, 4096, 4096), [0] * 10
        tensor = TENSOR.pack(
            *(1, 0, buffer, 1024, 1, 1, 1, *strides, 0, *[0] * 16, 0, *none, 0, 0),
            *(base + size, b"t", 0),
        )
        data = tensor + struct.pack("<BQ", 0, 0) + bytes(4096)
        line.sendall(struct.pack("<BQ", SET_TENSOR, len(data)) + data)
        assert line.recv(1) == b"", "a write outside of the buffer was taken"
    rpc.check(address)
    assert server_of(process) == before


def test_clients_that_stall_or_die_keep_it_from_nobody(
    address: str, demo: Model, demo_file: Path
) -> None:
    stalled = [connected(address), connected(address, greeted=False), connected(address)]
    stalled[2].sendall(struct.pack("<BQ", SET_TENSOR, 10000) + bytes(100))
    with Model(demo_file, rpc_servers=address) as model:
        assert text_of(model) == text_of(demo)
    for line in stalled:  # in the middle of a message, with a reset
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        line.close()
    rpc.check(address)


def test_two_processes_at_once(
    run_python: RunPython, address: str, demo: Model, demo_file: Path
) -> None:
    with Model(demo_file, rpc_servers=address) as model, Session(model, SMALL) as session:
        first = session.generate(PROMPT, max_tokens=12)
        begun = next(iter(first))
        done = run_python(TEXT_OF, demo_file, address)
        assert done.stdout == text_of(demo), done.stderr
        assert begun + first.run().text.removeprefix(begun) == text_of(demo)


def test_a_session_that_is_closed_beside_another_one(
    address: str, demo: Model, demo_file: Path
) -> None:
    """Its buffers are freed on the worker, which then forgets the graphs of the other one too."""
    with Model(demo_file, rpc_servers=address) as model, Session(model, SMALL) as session:
        going = session.generate(PROMPT, max_tokens=12)
        tokens = iter(going)
        begun = [next(tokens) for _ in range(6)]
        with Session(model, SMALL) as other:
            other.generate(PROMPT, max_tokens=4).run()
        assert "".join([*begun, *tokens]) == text_of(demo)


def test_more_clients_than_it_serves_are_refused() -> None:
    """The limit is ggml-rpc.cpp's RPC_MAX_CLIENTS."""
    with running_worker() as (_, address):
        lines = [connected(address) for _ in range(64)]
        with pytest.raises(rpc.UsageError, match="serves as many connections as it can"):
            rpc.check(address)
        for line in lines:
            line.close()
        reach(address)


def test_a_server_that_died_is_started_again(demo: Model, demo_file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with running_worker("--port", str(port)) as (process, address):
        before = server_of(process)
        os.kill(before, signal.SIGABRT)
        reach(address)
        assert server_of(process) != before
        with Model(demo_file, rpc_servers=address) as model:
            assert text_of(model) == text_of(demo)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out) == (0, "")
        assert f"{address} died of SIGABRT; it is started again" in err
    # No model uses it any more, so it is greeted again.
    with pytest.raises(rpc.UsageError, match="no worker can be reached"):
        Model(demo_file, rpc_servers=address)


def test_a_server_does_not_outlive_its_command() -> None:
    with running_worker() as (process, address):
        server = server_of(process)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 20
        while Path(f"/proc/{server}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    with pytest.raises(rpc.UsageError, match="no worker can be reached"):
        rpc.check(address)


def test_stopped_and_continued(process: subprocess.Popen[str], address: str) -> None:
    """The stop lasts longer than the wait for signals, after which the worker once ended."""
    before = server_of(process)
    os.killpg(process.pid, signal.SIGSTOP)
    time.sleep(1.3)
    os.killpg(process.pid, signal.SIGCONT)
    time.sleep(0.3)
    rpc.check(address)
    assert server_of(process) == before
