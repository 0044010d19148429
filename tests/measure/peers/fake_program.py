"""Speaks as llama-server or llama-bench does, by its name; given "mtp:", as ik_llama.cpp's server.

Exact speeds: prefill 500 tokens per second; decode 50 without MTP, 10 more for each draft. Of each
round's drafts all but the last are accepted. FAKE_LOG: a file to which it says what it was given;
FAKE_MODE: what goes wrong.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

NAME, ARGUMENTS = Path(sys.argv[0]).name, sys.argv[1:]
MODE = os.environ.get("FAKE_MODE", "")
MARKER = "<a marker>"


def log(**said: Any) -> None:
    if path := os.environ.get("FAKE_LOG"):
        with Path(path).open("a") as file:
            file.write(json.dumps({"name": NAME, "pid": os.getpid(), **said}) + "\n")


def option(name: str, default: str) -> str:
    return ARGUMENTS[ARGUMENTS.index(name) + 1] if name in ARGUMENTS else default


def bench() -> None:
    n_prompt, n_gen = int(option("-p", "512")), int(option("-n", "128"))
    if MODE == "garbage":
        print("| model | size |")
        return
    test = {"n_prompt": n_prompt, "n_gen": n_gen}
    if "-d" in ARGUMENTS:
        test["n_depth"] = int(option("-d", "0"))
    rate = float("nan") if MODE == "nan" else 50.0 if n_gen else 500.0
    print(json.dumps([{**test, "samples_ts": [rate]}]))


class Handler(BaseHTTPRequestHandler):
    held: list[int] = []  # noqa: RUF012 - replaced, never changed

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def answer(self, value: Any, code: int = 200) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if MODE == "never ready":
            return self.answer({"error": "Loading model"}, 503)
        if self.path == "/health":
            return self.answer({"status": "ok"})
        if self.path == "/props":
            return self.answer({"media_marker": MARKER} if "--mmproj" in ARGUMENTS else {})
        self.answer({}, 404)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        log(request=request)
        if MODE == "dies later":
            print("GGML_ASSERT failed", file=sys.stderr, flush=True)
            os._exit(134)
        if MODE == "slow":
            time.sleep(60)
        if MODE == "refuses":
            return self.answer({"error": {"message": "the request exceeds the context"}}, 400)
        if MODE == "garbage":
            return self.answer(b"<html>")
        self.answer({"timings": self.timings(request)})

    def timings(self, request: dict[str, Any]) -> dict[str, Any]:
        depth = int(option("--spec-draft-n-max", "0"))
        n = request["n_predict"] - (3 if MODE == "short" else 0)
        prompt = request["prompt"]
        if isinstance(prompt, dict):  # an image has 15 tokens here, text one per character
            n_images = len(prompt["multimodal_data"])
            n_prompt = len(prompt["prompt_string"]) + n_images * (15 - len(MARKER))
        else:
            n_prompt = len(prompt)
        n_cached = 0
        if request["cache_prompt"]:  # goes on from the last prompt, if this one begins with it
            goes_on = prompt[: len(self.held)] == self.held and MODE != "forgets"
            n_cached = len(self.held) if goes_on else 0
            Handler.held = prompt
        found = {"cache_n": n_cached, "prompt_n": n_prompt - n_cached, "prompt_per_second": 500.0}
        found |= {"predicted_n": n, "predicted_per_second": 50.0 + 10 * depth}
        if depth:
            rounds = -(-(n - 1) // depth)
            found |= {"draft_n": depth * rounds, "draft_n_accepted": n - 1 - rounds}
        return found


def serve() -> None:
    try:
        HTTPServer.allow_reuse_address = False
        server = HTTPServer(("127.0.0.1", int(option("--port", "0"))), Handler)
    except OSError:
        print("couldn't bind HTTP server socket, hostname: 127.0.0.1", file=sys.stderr)
        sys.exit(1)
    server.serve_forever()


def main() -> None:
    if "--version" in ARGUMENTS:
        print("version: 0.6.0-dev (build 9999, commit 0c1e570)", file=sys.stderr)
        return
    if "--list-devices" in ARGUMENTS:
        print("Available devices:")
        if MODE == "gpu":
            print("  CUDA0: NVIDIA H100 (80000 MiB, 79000 MiB free)")
        return
    log(arguments=ARGUMENTS)
    if MODE == "dies":
        print("error: unknown model architecture: 'qwen99'", file=sys.stderr)
        sys.exit(3)
    (serve if NAME == "llama-server" else bench)()


main()
