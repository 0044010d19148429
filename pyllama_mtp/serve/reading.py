"""From the bytes of a request to its parameters, within the bounds of :mod:`.limits`, and not on
the event loop."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from . import limits
from .bodies import ApiError, bad_request, busy

Parsed = TypeVar("Parsed")

#: nginx's status for a request whose client went away.
GONE = 499
#: Bytes that are counted at once; other threads take turns between two calls of C.
PART = 1 << 18
#: A mark that some clients begin a body with.
BOM = b"\xef\xbb\xbf"
#: For glibc's mallopt(), so that what bodies and images took goes back to the system: M_ARENA_MAX,
#: areas from which threads allocate, since what is freed stays with one; M_MMAP_THRESHOLD, bytes
#: from which an allocation is returned by itself, which would rise to 32 MiB; M_TRIM_THRESHOLD, of
#: free bytes.
ALLOCATION = {-8: 2, -3: 2 << 20, -1: 8 << 20}
_libc = ctypes.CDLL(None)


def decode(data: bytes | bytearray) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        ApiError: 400: the body is no JSON object, has a lone surrogate, or more values than
            allowed.
    """
    _check_size(data)
    try:
        found = msgspec.json.decode(data[len(BOM) :] if data.startswith(BOM) else data)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise bad_request("the body must be a JSON object")
    return found


def _check_size(data: bytes | bytearray) -> None:
    """Raise ApiError: 400: more values, keys or escapes than allowed, or too long a text."""
    n_values = n_keys = n_escapes = 0
    inside, is_text, skip = False, False, 0  # in a string; of more than ASCII; an escape goes on
    n_bytes = 0  # of the string so far
    for start in range(0, len(data), PART):
        part = bytes(data[start + skip : start + PART])
        n_escapes += part.count(b"\\")
        part = part.replace(b"\\\\", b"")
        skip = int(part.endswith(b"\\"))
        pieces = part.replace(b'\\"', b"").split(b'"')
        between = b"".join(pieces[inside::2])
        n_keys += sum(map(between.count, (b"[", b"{", b":")))
        n_values += between.count(b",") + between.count(b"[") + between.count(b"{")
        if inside:
            n_bytes, is_text = n_bytes + len(pieces[0]), is_text or not pieces[0].isascii()
            _bound("bytes in a text", n_bytes if is_text else 0, limits.TEXT)
        inside ^= len(pieces) % 2 == 0
        if len(pieces) > 1:
            n_bytes, is_text = len(pieces[-1]), not pieces[-1].isascii()
        _bound("values", n_values, limits.VALUES)
        _bound("lists, objects and keys", n_keys, limits.KEYS)
        _bound("escapes", n_escapes, limits.ESCAPES)


def _bound(what: str, n: int, most: int) -> None:
    if n > most:
        raise bad_request(f"the body has more than {most:,} {what}", code="body_too_large")


def free_at_once() -> None:
    """Have this process allocate by ALLOCATION from now on."""
    with suppress(AttributeError):  # of glibc only
        for option, value in ALLOCATION.items():
            _libc.mallopt(option, value)


def give_back_memory() -> None:
    """Return what is free to the system, between allocations that are not, too."""
    with suppress(AttributeError):  # of glibc only
        _libc.malloc_trim(0)


class Reader:
    """Reads the bodies of requests. Large ones are parsed one after the other, so that small ones
    find a thread, and the event loop its turn."""

    def __init__(self, most: int) -> None:
        """`most`: bytes of a body."""
        self._most, self._n_bytes = most, 0
        self._small = ThreadPoolExecutor(4, "pyllama-mtp bodies")
        self._large = ThreadPoolExecutor(1, "pyllama-mtp large bodies")

    async def read(self, request: Request, parse: Callable[[dict[str, Any]], Parsed]) -> Parsed:
        """What `parse` makes of a body. Its type must be application/json, which a page in a
        browser cannot send to another origin without permission.

        Raises:
            ApiError: 413, 415, 400, or 503: there is no room for large bodies.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            what = f"the body's Content-Type is {kind!r}" if kind else "there is no Content-Type"
            raise ApiError(415, f"{what}; send the header Content-Type: application/json")
        data = bytearray()
        try:
            async for part in request.stream():
                data += part
                self._n_bytes += len(part)
                if len(data) > self._most:
                    raise ApiError(413, f"the body has more than {self._most} bytes; send less")
                room = limits.BODIES if len(data) > limits.SMALL else 2 * limits.BODIES
                if self._n_bytes > room:
                    raise busy("there are too many large requests; try again later")
            call = asyncio.get_running_loop().run_in_executor
            if len(data) <= limits.SMALL:
                return await call(self._small, lambda: parse(decode(data)))
            try:
                return await call(self._large, lambda: parse(decode(data)))
            finally:
                call(self._large, give_back_memory)
        except ClientDisconnect:
            raise ApiError(GONE, "the client went away before it had sent the body") from None
        finally:
            self._n_bytes -= len(data)
