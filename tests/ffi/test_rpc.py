"""Workers: addresses, greetings, refusals; the devices of one model are not those of another."""

from __future__ import annotations

import re
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyllama_mtp import Model, Session
from pyllama_mtp.errors import LibraryError, ModelFileError, UsageError
from pyllama_mtp.llama import native, rpc

from ..processes import RunPython
from ..regression.support import engine_of
from ..workers import SMALL, address_of, start_worker, text_of, worker


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """The address of a worker."""
    with worker() as address:
        yield address


@contextmanager
def listener(answer: bytes | None) -> Iterator[str]:
    """Something that answers a greeting so; None: not at all."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak() -> None:
            connection, _ = server.accept()
            with connection:
                if answer is not None:
                    connection.recv(len(rpc.HELLO))
                    connection.sendall(answer)
                else:
                    connection.recv(1000)
                    connection.recv(1000)  # until the other side hangs up

        thread = threading.Thread(target=speak, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(10)


# -- addresses and greetings -----------------------------------------------------------------------


def test_addresses() -> None:
    assert rpc.parse_address("127.0.0.1:50052") == ("127.0.0.1", 50052)
    assert rpc.parse_address("a-machine.lan:1") == ("a-machine.lan", 1)
    assert rpc.check_addresses("host:1") == ("host:1",)
    assert rpc.check_addresses(["host:1", "host:2"]) == ("host:1", "host:2")
    assert rpc.check_addresses(()) == ()
    with pytest.raises(UsageError, match="twice"):
        rpc.check_addresses(("a:1", "b:1", "a:1"))


@pytest.mark.parametrize(
    "bad",
    ["", "host", "host:", ":5", "host:0", "host:65536", "host:x", "::1:5", "a b:5", "a:5,b:6",
     "http://a:5", "a:5 ", "a:-5", "a:5\n"],
)  # fmt: skip
def test_no_address(bad: str, demo_file: Path) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        Model(demo_file, rpc_servers=(bad,))


def test_nothing_listens(demo_file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(UsageError, match=rf"no worker can be reached at {address}.*rpc-worker"):
        Model(demo_file, rpc_servers=address)
    with pytest.raises(UsageError, match="no worker can be reached"):
        rpc.check("no-such-host.invalid:1")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 50])
def test_something_else_listens(answer: bytes) -> None:
    with listener(answer) as address, pytest.raises(UsageError, match="is not a worker"):
        rpc.check(address)


def version(major: int, minor: int) -> bytes:
    """The answer of a worker of that version."""
    return struct.pack("<Q3Bx24x", 28, major, minor, 0)


def test_another_version() -> None:
    major, minor = rpc.PROTOCOL
    for bad in ((major + 1, 0), (major - 1, minor), (major, minor + 1)):
        with (
            listener(version(*bad)) as address,
            pytest.raises(UsageError, match=f"speaks version {bad[0]}.{bad[1]}"),
        ):
            rpc.check(address)
    with listener(version(major, minor)) as address:
        rpc.check(address)


def test_a_busy_worker() -> None:
    with listener(None) as address, pytest.raises(UsageError, match=r"did not answer in 0\.2 s"):
        rpc.check(address, timeout=0.2)


def test_our_protocol_is_the_workers(served: str) -> None:
    """Both come from one build, so this says when a new pin has changed it."""
    host, port = rpc.parse_address(served)
    with socket.create_connection((host, port)) as connection:
        connection.sendall(rpc.HELLO)
        answer = connection.makefile("rb").read(rpc.ANSWER.size)
    size, *found, _ = rpc.ANSWER.unpack(answer)
    assert (size, tuple(found)) == (28, rpc.PROTOCOL)


def test_a_library_without_rpc(monkeypatch: pytest.MonkeyPatch) -> None:
    library = native.load()
    lib = SimpleNamespace(ggml_backend_reg_by_name=lambda name: library.ffi.NULL)
    fake = SimpleNamespace(ffi=library.ffi, lib=lib, folder=library.folder)
    monkeypatch.setattr(native, "load", lambda: fake)
    with pytest.raises(LibraryError, match=r"built without workers.*pip install"):
        rpc.connect(["127.0.0.1:1"])


# -- models ----------------------------------------------------------------------------------------


def test_only_the_model_that_asks_uses_a_worker(demo: Model, demo_file: Path, served: str) -> None:
    before = native.load().devices()
    with Model(demo_file, rpc_servers=served) as remote:
        assert remote.on_gpu and remote.rpc_servers == (served,)
        assert native.load().devices() == before, "a worker was registered for all"
        with Model(demo_file) as local, Session(local, SMALL) as session:
            assert local.on_gpu == demo.on_gpu
            for device in remote.used_devices:
                assert not any(engine_of(session).target.memory(device).values())
        with Model(demo_file, rpc_servers=(served,)) as second:  # one connection serves both
            assert text_of(second) == text_of(remote) == text_of(demo)
        assert text_of(remote) == text_of(demo), "closing one has hung up for both"
    rpc.check(served)  # free again: ggml has hung up


def test_a_model_that_does_not_load_lets_the_worker_go(
    demo_file: Path, served: str, tmp_path: Path
) -> None:
    def stop(share: float) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        Model(demo_file, rpc_servers=served, progress=stop)
    rpc.check(served)
    with pytest.raises(ModelFileError):
        Model(tmp_path / "none.gguf", rpc_servers=served)
    rpc.check(served)


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "code", "said"),
    [(signal.SIGTERM, 0, ""), (signal.SIGINT, 130, "pyllama-mtp: interrupted\n")],
)
@pytest.mark.parametrize("busy", [False, True])
def test_a_worker_says_where_it_is_and_ends(
    stop: signal.Signals, code: int, said: str, busy: bool
) -> None:
    process = start_worker()
    address = address_of(process)
    assert address.startswith("127.0.0.1:")
    host, port = rpc.parse_address(address)
    with socket.create_connection((host, port)) as connection:
        if busy:
            connection.sendall(rpc.HELLO)
            connection.recv(100)
        process.send_signal(stop)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (code, "", said)


def test_where_it_cannot_listen(served: str) -> None:
    taken = ("--port", served.split(":")[1])
    for options in (taken, ("--port", "65536"), ("--host", "no-such-host.invalid")):
        process = start_worker(*options)
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out, err.count("\n")) == (2, "", 1)
        assert "cannot listen at" in err and (options != taken or served in err)


def test_a_warning_when_others_can_reach_it(run_python: RunPython) -> None:
    """Nothing is bound here."""
    code = """
import signal, sys
from types import SimpleNamespace
from pyllama_mtp import cli
from pyllama_mtp.llama import rpc

def fake(host, port, threads):
    return SimpleNamespace(address=f"{host}:7", loopback=rpc.is_loopback(host), wait=lambda: 15)

rpc.Worker = fake
for host in sys.argv[1:]:
    cli.main(["rpc-worker", "--host", host])
"""
    hosts = ("127.0.0.1", "127.1.2.3", "192.0.2.1", "0.0.0.0")
    done = run_python(code, *hosts)
    said = "".join(f"listening on {host}:7\n" for host in hosts)
    assert (done.returncode, done.stdout) == (0, said), done.stderr
    warned = re.findall(r"(\S+):7 can be reached from other machines", done.stderr)
    assert warned == [*hosts[2:]]
