"""The routes of the server, and its run until a signal ends it.

OpenAI's completions, responses and models, a page to chat with, /tokenize, /detokenize, /health and
/metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from pyllama_mtp.errors import UsageError
from pyllama_mtp.llama import native, rpc

from .answers import Reply, Served, log, one_line, refused, to_json, tokenize
from .bodies import (
    ApiError,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    bad_request,
    parse,
)
from .fetch import fetch_images
from .generator import Generator, Metrics
from .responses import ResponsesReply, chat_body

#: Parts of OpenAI's API that this server lacks, by path, and their names in the error.
ABSENT = {
    "embeddings": "embeddings: its model generates text; use a server of an embedding model",
    "images": "images",
    "audio": "audio",
    "moderations": "moderations",
    "responses": "stored responses; send the whole conversation as input",
    "files": "files",
    "batches": "batches",
    "fine_tuning": "fine-tuning",
}
#: The page to chat with, which may reach this server only.
PAGE = Path(__file__).with_name("page.html")
PAGE_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'"
)
#: nginx's status for a request whose client went away.
GONE = 499
#: Most bytes in the body of a request: some million tokens, or an image of 30 MB in base64.
LARGEST_BODY = 48 * 2**20


class EventStream(StreamingResponse):
    """An answer as server-sent events; its choices are cancelled when the client goes away."""

    def __init__(self, reply: Reply) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(reply.chunks(), media_type="text/event-stream", headers=headers)
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._reply.close():
                self._reply.log(GONE, "the client went away")


def log_requests(verbose: int) -> None:
    """Log each request in one line on stderr; `verbose`: its parameters, too."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    log.propagate = False
    log.setLevel(logging.DEBUG if verbose else logging.INFO)


def build_app(
    generator: Generator, served: Served, api_key: str | None = None, origins: Sequence[str] = ()
) -> FastAPI:
    """The application; the generator must have been started.

    Args:
        api_key: the KEY that clients must send as ``Authorization: Bearer KEY``; None: none.
        origins: origins whose pages may use the server from a browser; "*" is all.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        generator.events = asyncio.get_running_loop()
        yield

    async def authorized(request: Request) -> None:
        if api_key is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {api_key}".encode()):
            generator.outcomes["unauthorized"] += 1
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    app = FastAPI(title="pyllama-mtp", lifespan=lifespan, docs_url=None, redoc_url=None)
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=[*origins], allow_methods=["*"], allow_headers=["*"]
        )
    _add_error_handlers(app, generator)
    figures, closed = Metrics(generator).registry, [Depends(authorized)]

    @app.get("/")
    async def page() -> Response:
        policy = {"Content-Security-Policy": PAGE_POLICY}
        return FileResponse(PAGE, media_type="text/html", headers=policy)

    @app.get("/health")
    async def health() -> Response:
        if generator.broken or not generator.is_alive():
            return JSONResponse({"status": "broken", "reason": generator.broken}, 503)
        return JSONResponse(
            {"status": "ok", "running": generator.n_running, "waiting": generator.n_waiting}
        )

    @app.get("/metrics", dependencies=closed)
    async def metrics() -> Response:
        return Response(generate_latest(figures), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models", dependencies=closed)
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_describe(served)]})

    @app.get("/v1/models/{name:path}", dependencies=closed)
    async def model(name: str) -> Response:
        served.check_name(name)
        return JSONResponse(_describe(served))

    async def answer(
        request: Request, body: Body, new_reply: Callable[[Served, Any], Reply] = Reply
    ) -> Response:
        if isinstance(body, ChatBody) and served.image_urls and served.vision:
            with refused("messages"):
                await fetch_images(body.messages)
        reply = await run_in_threadpool(new_reply, served, body)
        reply.start(generator)
        if log.isEnabledFor(logging.DEBUG):
            asked = body.model_dump(exclude={"prompt", "messages"}, exclude_unset=True)
            log.debug("%s %s asks for %s", reply.name, request.url.path, asked)
        if body.stream:
            return EventStream(reply)
        return await _whole(request, reply)

    @app.post("/v1/completions", dependencies=closed)
    async def completions(request: Request) -> Response:
        return await answer(request, parse(CompletionBody, await _read_json(request)))

    @app.post("/v1/chat/completions", dependencies=closed)
    async def chat_completions(request: Request) -> Response:
        return await answer(request, parse(ChatBody, await _read_json(request)))

    @app.post("/v1/responses", dependencies=closed)
    async def responses(request: Request) -> Response:
        asked = await _read_json(request)
        return await answer(request, chat_body(asked), partial(ResponsesReply, asked=asked))

    @app.post("/tokenize", dependencies=closed)
    async def tokenize_text(request: Request) -> Response:
        body = parse(TokenizeBody, await _read_json(request))
        if (body.content is None) == (body.messages is None):
            raise bad_request("give the text as content, or a chat as messages", "content")
        with refused():
            tokens = await run_in_threadpool(tokenize, served, body)
        about = {"count": len(tokens), "max_model_len": served.n_ctx}
        return JSONResponse({"tokens": tokens, **about})

    @app.post("/detokenize", dependencies=closed)
    async def detokenize(request: Request) -> Response:
        body = parse(DetokenizeBody, await _read_json(request))
        with refused("tokens"):
            text = served.model.detokenize(body.tokens, special=True)
        return JSONResponse({"content": text, "prompt": text})

    @app.get("/tokenizer_info", dependencies=closed)
    async def tokenizer_info() -> Response:
        tokens = {name: text or None for name, text in served.model.template_tokens.items()}
        return JSONResponse({**tokens, "chat_template": served.model.chat_template or None})

    async def absent(request: Request) -> Response:
        what = ABSENT[request.url.path.split("/")[2]]
        raise ApiError(501, f"this server does not have {what}", code="unsupported_endpoint")

    for kind in ABSENT:
        for path in (f"/v1/{kind}", f"/v1/{kind}/{{rest:path}}"):
            app.api_route(path, methods=["GET", "POST"], dependencies=closed)(absent)
    return app


def _describe(served: Served) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "pyllama-mtp",
        "max_model_len": served.n_ctx,
    }


def _add_error_handlers(app: FastAPI, generator: Generator) -> None:
    """Answer every error in the API's form."""

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> Response:
        if error.status in (400, 404, 413, 415):
            generator.outcomes["invalid"] += 1
        _log_refusal(request, error.status, error.message)
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        message = f"{error.detail}: {request.method} {request.url.path}"
        body = ApiError(error.status_code, message).body()
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        generator.outcomes["error"] += 1
        _log_refusal(request, 500, str(error))
        return JSONResponse(ApiError(500, f"a fault in the server: {error}").body(), 500)


def _log_refusal(request: Request, status: int, why: str) -> None:
    log.info("- %s %s", request.method, one_line(f"{request.url.path} {status}: {why}"))


async def _read_json(request: Request) -> Any:
    """The body of a request. Its type must be application/json, which a page in a browser cannot
    send to another origin without permission.

    Raises:
        ApiError: 413, 415 or 400.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the body is {kind or 'nothing'}; send Content-Type: application/json")
    data = bytearray()
    try:
        async for part in request.stream():
            data += part
            if len(data) > LARGEST_BODY:
                raise ApiError(413, f"the body has more than {LARGEST_BODY} bytes; send less")
    except ClientDisconnect:
        raise ApiError(GONE, "the client went away before it had sent the body") from None
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None


async def _whole(request: Request, reply: Reply) -> Response:
    """The answer when it is complete, unless the client goes away before."""

    async def collect() -> None:
        async for _ in reply.news():
            pass

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(collect()), asyncio.create_task(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            reply.log(GONE, "the client went away")
            return Response(status_code=GONE)  # nobody reads it
        tasks[0].result()
        reply.log(200)
    finally:
        reply.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Response(to_json(reply.whole()), media_type="application/json")


# -- running it ----------------------------------------------------------------------------------

#: Seconds that connections may stay open after the answers have ended.
CONNECTIONS_S = 5


class Server(uvicorn.Server):
    """Ends in order at the first SIGINT or SIGTERM, and at once at the second signal.

    Attributes:
        signal: the first signal that came, or None.
    """

    def __init__(self, config: uvicorn.Config, generator: Generator, grace_s: float = 0.0) -> None:
        super().__init__(config)
        self._generator, self._grace_s = generator, grace_s
        self.signal: int | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install our own signal handlers: uvicorn's raise the signal again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, self.handle_exit) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: take no more requests, and end the running ones. Second signal: exit."""
        if self.signal is not None:
            os._exit(128 + sig)
        self.signal = sig
        self.should_exit = True
        self._generator.end(self._grace_s)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is a free port. Raises UsageError: the address cannot be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot listen at {host}:{port}: {why}; use another --host or --port"
        ) from None


def serve(
    app: FastAPI,
    generator: Generator,
    listening: socket.socket,
    grace_s: float,
    ready: Callable[[], None] = lambda: None,
) -> int | None:
    """Serve on a socket until a signal comes, wait for the generator, and return the signal.

    Args:
        grace_s: seconds that running answers may go on after the signal.
        ready: called before the first request is taken.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=math.ceil(grace_s) + CONNECTIONS_S,
    )
    server = Server(config, generator, grace_s)
    generator.start()
    try:
        ready()
        server.run(sockets=[listening])
    finally:
        generator.end(0.0)
        rpc.give_up_waiting(native.PATIENCE_S)
        generator.join()
        rpc.give_up_waiting(math.inf)
        sys.stdout.flush()
    return server.signal
