"""The routes of the server, and its run until a signal ends it.

OpenAI's completions, responses and models, Anthropic's messages, a page to chat with, /tokenize,
/detokenize, /health and /metrics, and llama-server's /props and /slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from anyio.to_thread import current_default_thread_limiter
from fastapi import Depends, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from pyllama_mtp.errors import UsageError
from pyllama_mtp.llama import native, rpc

from . import limits, messages, responses
from .answers import (
    AS_MUCH_AS_FITS,
    Reply,
    Served,
    count_tokens,
    log,
    one_line,
    printable,
    refused,
    to_json,
    tokenize,
)
from .bodies import (
    MESSAGES_PATH,
    ApiError,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    bad_request,
    busy,
    parse,
)
from .connections import Connection, Guard, close_late, most_unfinished
from .fetch import fetch_images
from .generator import Generator, Metrics
from .messages import MessagesReply, read_messages
from .reading import GONE, Reader, free_at_once
from .responses import ResponsesReply, read_responses

#: Parts of OpenAI's API that this server lacks, by path, and their names in the error.
ABSENT = {
    "embeddings": "embeddings: its model generates text; use a server of an embedding model",
    "images": "images",
    "audio": "audio",
    "moderations": "moderations",
    "messages": "batches of messages",
    "responses": "stored responses; send the whole conversation as input",
    "files": "files",
    "batches": "batches",
    "fine_tuning": "fine-tuning",
}
#: Requests that are prepared at once.
THREADS = 200
#: The page to chat with, which may reach this server only.
PAGE = Path(__file__).with_name("page.html")
PAGE_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'"
)


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
    handler.setFormatter(Printable("%(asctime)s %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    log.propagate = False
    log.setLevel(logging.DEBUG if verbose else logging.INFO)
    for other in logging.getLogger().handlers:  # tracebacks may quote a client, too
        other.setFormatter(Printable("%(name)s: %(levelname)s: %(message)s"))


class Printable(logging.Formatter):
    """Escapes what would control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text, in which only line ends are not printable."""
        return "\n".join(map(printable, super().format(record).split("\n")))


def build_app(
    generator: Generator,
    served: Served,
    api_key: str | None = None,
    origins: Collection[str] = (),
    hosts: Collection[str] = (),
    largest_body: int = limits.BODY,
) -> FastAPI:
    """The application; the generator must have been started.

    Args:
        api_key: the KEY that clients must send as ``Authorization: Bearer KEY``, or as
            ``x-api-key: KEY``; None: none.
        origins: origins whose pages may use the server from a browser; "*" is all.
        hosts: names that clients may use for this server, see :class:`.Guard`.
        largest_body: bytes of a request's body.
    """
    reader = Reader(largest_body)
    keys = [f"Bearer {api_key}".encode(errors="surrogateescape")]
    with contextlib.suppress(UnicodeEncodeError):
        keys.append(f"Bearer {api_key}".encode("latin-1"))

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        generator.events = asyncio.get_running_loop()
        # Some wait for a grammar's worker; others must find a thread meanwhile.
        current_default_thread_limiter().total_tokens = THREADS
        yield

    async def authorized(request: Request) -> None:
        if api_key is None:
            return
        # Starlette reads headers as latin-1; clients send a key's letters as that, or as UTF-8.
        sent = (
            request.headers.get("authorization", ""),
            f"Bearer {request.headers.get('x-api-key', '')}",
        )
        given = [one.encode("latin-1") for one in sent]
        if not sum(hmac.compare_digest(one, key) for one in given for key in keys):
            generator.outcomes["unauthorized"] += 1
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY', or as "
                "'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    app = FastAPI(
        title="pyllama-mtp", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=[*origins], allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(Guard, hosts=hosts, origins=origins)
    _add_error_handlers(app, generator)
    figures, closed = Metrics(generator, served.name).registry, [Depends(authorized)]

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

    @app.get("/openapi.json", dependencies=closed, include_in_schema=False)
    async def openapi() -> Response:
        return JSONResponse(_openapi(app))

    async def get_images(body: Body) -> None:
        if isinstance(body, ChatBody) and served.image_urls and served.vision:
            with refused("messages"):
                await fetch_images(body.messages)

    async def answer(
        request: Request, body: Body, new_reply: Callable[[Served, Any], Reply] = Reply
    ) -> Response:
        await get_images(body)
        n_prompts = len(body.prompts) if isinstance(body, CompletionBody) else 1
        generator.check_room(body.n * n_prompts)
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
        return await answer(request, await reader.read(request, partial(parse, CompletionBody)))

    @app.post("/v1/chat/completions", dependencies=closed)
    async def chat_completions(request: Request) -> Response:
        return await answer(request, await reader.read(request, partial(parse, ChatBody)))

    @app.post("/v1/responses", dependencies=closed)
    async def responses(request: Request) -> Response:
        body, repeated = await reader.read(request, read_responses)
        return await answer(request, body, partial(ResponsesReply, repeated=repeated))

    @app.post(MESSAGES_PATH, dependencies=closed)
    async def messages(request: Request) -> Response:
        return await answer(request, await reader.read(request, read_messages), MessagesReply)

    @app.post(f"{MESSAGES_PATH}/count_tokens", dependencies=closed)
    async def count(request: Request) -> Response:
        body = await reader.read(request, read_messages)
        await get_images(body)
        return JSONResponse({"input_tokens": await run_in_threadpool(count_tokens, served, body)})

    @app.post("/tokenize", dependencies=closed)
    async def tokenize_text(request: Request) -> Response:
        body = await reader.read(request, partial(parse, TokenizeBody))
        if (body.content is None) == (body.messages is None):
            raise bad_request("give the text as content, or a chat as messages", "content")
        with refused():
            tokens = await run_in_threadpool(tokenize, served, body)
        about = {"count": len(tokens), "max_model_len": served.n_ctx}
        return JSONResponse({"tokens": tokens, **about})

    @app.post("/detokenize", dependencies=closed)
    async def detokenize(request: Request) -> Response:
        body = await reader.read(request, partial(parse, DetokenizeBody))
        with refused("tokens"):
            text = await run_in_threadpool(served.model.detokenize, body.tokens, special=True)
        return JSONResponse({"content": text, "prompt": text})

    @app.get("/tokenizer_info", dependencies=closed)
    async def tokenizer_info() -> Response:
        return JSONResponse(_texts(served))

    @app.get("/props", dependencies=closed)
    async def props() -> Response:
        return JSONResponse(_props(served, generator))

    @app.get("/slots", dependencies=closed)
    async def slots(fail_on_no_slot: str = "") -> Response:
        found = generator.slots()
        if fail_on_no_slot and all(slot["is_processing"] for slot in found):
            raise busy("no slot is free; try again later")
        return JSONResponse(found)

    async def absent(request: Request) -> Response:
        what = ABSENT[request.url.path.split("/")[2]]
        raise ApiError(501, f"this server does not have {what}", code="unsupported_endpoint")

    for kind in ABSENT:
        for path in (f"/v1/{kind}", f"/v1/{kind}/{{rest:path}}"):
            route = app.api_route(
                path, methods=["GET", "POST"], dependencies=closed, include_in_schema=False
            )
            route(absent)
    return app


def _describe(served: Served) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "pyllama-mtp",
        "max_model_len": served.n_ctx,
    }


def _props(served: Served, generator: Generator) -> dict[str, Any]:
    """llama-server's description of a server, as far as its clients read it; without paths."""
    numbers = {k: v for k, v in asdict(served.model.sampling).items() if type(v) in (int, float)}
    most = served.max_tokens or AS_MUCH_AS_FITS
    params = {**numbers, "max_tokens": most, "n_predict": most}
    return {
        "default_generation_settings": {"n_ctx": served.n_ctx, "params": params},
        "total_slots": generator.n_sequences,
        "model_alias": served.name,
        "model_path": served.name,
        "modalities": {"vision": served.vision is not None, "audio": False},
        **_texts(served),
        "build_info": served.fingerprint,
        "is_sleeping": False,
    }


def _texts(served: Served) -> dict[str, str | None]:
    """The texts of the tokens that begin and end texts, and the chat template; None: none."""
    model = served.model
    texts = {**model.template_tokens, "chat_template": model.chat_template}
    return {name: text or None for name, text in texts.items()}


def _add_error_handlers(app: FastAPI, generator: Generator) -> None:
    """Answer every error in the API's form."""

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> Response:
        if error.status in (400, 404, 413, 415):
            generator.outcomes["invalid"] += 1
        _log_refusal(request, error.status, error.message)
        return JSONResponse(error.body(request.url.path), error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        message = f"{error.detail}: {request.method} {request.url.path}"
        body = ApiError(error.status_code, message).body(request.url.path)
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        generator.outcomes["error"] += 1
        _log_refusal(request, 500, f"{type(error).__name__}: {error}")
        fault = ApiError(500, "a fault in the server; its log says more")
        return JSONResponse(fault.body(request.url.path), 500)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The description of the endpoints, with the bodies that they take."""
    kinds: list[type[BaseModel]] = [CompletionBody, ChatBody, TokenizeBody, DetokenizeBody]
    found = get_openapi(title=app.title, version="1", routes=app.routes)
    names, schemas = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
    )
    found.setdefault("components", {})["schemas"] = schemas["$defs"]
    paths = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
    bodies = {path: names[kind, "validation"] for path, kind in zip(paths, kinds, strict=True)}
    bodies |= {"/v1/responses": responses.SCHEMA, MESSAGES_PATH: messages.SCHEMA}
    bodies[f"{MESSAGES_PATH}/count_tokens"] = messages.SCHEMA
    for path, schema in bodies.items():
        content = {"application/json": {"schema": schema}}
        found["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    return found


def _log_refusal(request: Request, status: int, why: str) -> None:
    log.info("- %s %s", request.method, one_line(f"{request.url.path} {status}: {why}"))


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
    except ApiError as error:  # which the generator has counted
        reply.log(error.status, error.message)
        return JSONResponse(error.body(request.url.path), error.status, error.headers)
    finally:
        reply.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Response(to_json(reply.whole()), media_type="application/json")


# -- running it ----------------------------------------------------------------------------------

#: Seconds that connections may stay open after the answers have ended, and seconds after which the
#: process is ended then, whatever it computes. Processed prompts that are still to be written have
#: PROMPTS_S seconds from the signal on.
CONNECTIONS_S, END_S, PROMPTS_S = 2, 3.5, 9.0


class Server(uvicorn.Server):
    """Ends in order at the first SIGINT or SIGTERM, and at once at the second signal.

    Attributes:
        signal: the first signal that came, or None.
    """

    def __init__(self, app: FastAPI, generator: Generator, grace_s: float = 0.0) -> None:
        """`grace_s`: seconds that running answers may go on after the signal."""
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=math.ceil(grace_s) + CONNECTIONS_S,
        )
        super().__init__(config)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        self._generator, self._grace_s = generator, grace_s
        self._most_unfinished = most_unfinished()
        self.signal: int | None = None

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; closes late connections once a second."""
        if counter % 10 == 0:
            close_late(self.server_state.connections, self._most_unfinished)
        return await super().on_tick(counter)

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
        end_s, code = self._grace_s + END_S, 128 + sig
        _later(end_s, self._end, code, time.monotonic() + PROMPTS_S)
        _later(max(end_s, PROMPTS_S) + 0.5, os._exit, code)  # the log may be a pipe nobody reads

    def _end(self, code: int, last: float) -> None:
        """End the process, when all prompts are written or at the time `last`."""
        while (n := self._generator.prefixes.n_unwritten) and time.monotonic() < last:
            time.sleep(0.1)
        if n:
            log.warning("processed prompts lost, as there was no time to write them: %d", n)
        os._exit(code)


def _later(seconds: float, call: Callable[..., None], *arguments: object) -> None:
    timer = threading.Timer(seconds, call, arguments)
    timer.daemon = True
    timer.start()


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
    free_at_once()
    server = Server(app, generator, grace_s)
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
