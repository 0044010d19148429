"""Who may connect, and how long a request may take to arrive."""

from __future__ import annotations

import ipaddress
import resource
import socket
import time
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

import h11
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from . import limits
from .answers import log, one_line
from .bodies import ApiError

#: Files that a server has use for: connections.
MOST_FILES = 1 << 16
#: Ends of names that no stranger can own: of this machine, its network, and its containers.
LOCAL = (".localhost", ".local", ".internal")


class Guard:
    """Refuses what pages of other sites send.

    A page can give its own name the address of this server (DNS rebinding), and then ask and read
    as one of the server's own pages. The name is in Host. So a request must name the server by a
    number, by a name of this machine, or by one that is allowed. Where a browser says of which
    origin the page is, it must be the same host, a host that is allowed, or an origin that is.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], origins: Collection[str]) -> None:
        """`hosts`: names that are allowed, besides localhost and this machine's; "*" is all.
        `origins`: "*" is all."""
        self._app, self._origins = app, origins
        self._hosts = {name.lower() for name in hosts}
        own = socket.gethostname().lower()
        self._names = {*self._hosts, "localhost", own, own.partition(".")[0]}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403, or let the application answer."""
        asks = scope["type"] == "http" and scope["path"] != "/health"
        why = self._refusal(Headers(scope=scope)) if asks else None
        if why is None:
            await self._app(scope, receive, send)
            return
        log.info("- %s %s", scope["method"], one_line(f"{scope['path']} 403: {why}"))
        body = ApiError(403, why, code="forbidden_host").body(scope["path"])
        await JSONResponse(body, 403)(scope, receive, send)

    def _refusal(self, headers: Headers) -> str | None:
        """Why a request is refused, if it is. Old clients, and none in a browser, send no Host."""
        host, origin = headers.get("host", ""), headers.get("origin", "")
        if host and not self._is_ours(_name(host)):
            return f"the Host {host!r} is no name of this server; allow it by --allowed-hosts"
        if not origin or "*" in self._origins or origin in self._origins:
            return None
        netloc = origin.partition("://")[2]
        if netloc == host or _name(netloc) in self._hosts:
            return None
        return f"pages of the origin {origin!r} are not allowed here; see --cors-origins"

    def _is_ours(self, name: str) -> bool:
        if name in self._names or "*" in self._hosts or name.endswith(LOCAL):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _name(host: str) -> str:
    """The name in a Host header, without port and brackets; "": there is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


class Connection(H11Protocol):
    """A connection that knows since when its client has owed the rest of a request.

    Attributes:
        since: in seconds of :func:`time.monotonic`; None: the request is complete.
        n_bytes: of it, so far.
    """

    since: float | None = None
    n_bytes = 0

    def connection_made(self, transport: object) -> None:
        """The client may begin."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._begin()

    def data_received(self, data: bytes) -> None:
        """More of a request, or of several."""
        if self.since is None:
            self._begin()
        self.n_bytes += len(data)
        super().data_received(data)
        self._note()

    def on_response_complete(self) -> None:
        """The client may begin again."""
        self._begin()
        super().on_response_complete()
        self._note()

    def _begin(self) -> None:
        self.since, self.n_bytes = time.monotonic(), 0

    def _note(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self.since = None


def most_unfinished() -> int:
    """Connections that may wait for the rest of a request: half of the files that this process may
    open, which is raised to what the system allows."""
    n, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if most == resource.RLIM_INFINITY else min(most, MOST_FILES)
    if n < wanted and n != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    return min(wanted // 2, limits.UNFINISHED)


def close_late(connections: Iterable[object], most: int) -> None:
    """Close the connections whose requests take too long to arrive, and the oldest of more than
    `most` that are not complete."""
    now = time.monotonic()
    ours = [one for one in connections if isinstance(one, Connection)]
    unfinished = sorted((one.since, id(one), one) for one in ours if one.since is not None)
    too_many = len(unfinished) - most
    late = [
        one
        for number, (since, _, one) in enumerate(unfinished)
        if number < too_many or now - since > limits.HEADERS_S + one.n_bytes / limits.BYTES_PER_S
    ]
    for one in late:
        one.transport.abort()
    if n := sum(one.n_bytes > 0 for one in late):  # browsers open connections ahead of requests
        log.warning("%d connections closed: their requests did not arrive in time", n)
