#!/usr/bin/env python3
"""ik_llama.cpp beside this package, in the places of llama-server and llama-bench in a matrix.

    python bench/ik.py BUILD -m FILE.gguf -p 512 -n 96 --depths 0,1,2,3,auto
    python bench/ik.py BUILD -rtr -m FILE.gguf ...         # ik repacks the weights as it loads them

BUILD is a build folder of ik_llama.cpp (https://github.com/ikawrakow/ik_llama.cpp; `cmake
-DGGML_CUDA=OFF`, targets llama-server and llama-bench). All other options are those of
`pyllama-mtp matrix`. It gets `--peers llama-server,llama-bench` and, as `--peer-dir`, a folder with
two scripts, which start ik's programs with ik's options and report in upstream's terms what these
measure. ik cannot impose acceptance, and takes no MTP head in a file of its own.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pyllama_mtp import cli
from pyllama_mtp.measure.peers import HOST, PROGRAMS, LlamaServer, OutputError, PeerError

#: PeerOptions with a value that the server gets otherwise, or that ik's has not.
OTHERWISE = ("--host", "--port", "--fit", "-md")
REPACK = "-rtr"


def server_options(given: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """PeerOptions of upstream's llama-server as ik's server takes them; and what is said otherwise.

    Raises:
        PeerError: ik has nothing that corresponds.
    """
    rest, named = [], {}
    words = iter(given)
    for word in words:
        if word in OTHERWISE or word.startswith("--spec-"):
            named[word] = next(words)
        elif word != "--no-cache-prompt":
            rest.append(word)
    if wrong := [name for name in ("-md", "--spec-synth-rates") if name in named]:
        raise PeerError(f"ik_llama.cpp has no {wrong[0]}; measure without")
    if depth := named.get("--spec-draft-n-max"):
        rest += ["--spec-type", f"mtp:n_max={depth},p_min={named['--spec-draft-p-min']}"]
    return [*rest, "--log-disable"], named


def in_upstream_terms(response: Any) -> Any:
    """A response of ik's server as upstream's would be.

    ik's speed counts the first token, which comes from the prompt, among the tokens but not in the
    time; and ik does not say what it took from a cache.
    """
    try:
        timings = response["timings"]
        n, ms = int(timings["predicted_n"]), float(timings["predicted_ms"])
        return {"timings": {**timings, "cache_n": 0, "predicted_per_second": 1e3 * (n - 1) / ms}}
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise OutputError(
            f"ik_llama.cpp has no usable timings ({error!r}): {response!r:.200}"
        ) from error


def serve(program: str, repack: Sequence[str], given: Sequence[str]) -> None:
    """Start ik's server, and stand in for upstream's until this process is ended."""
    options, named = server_options(given)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.answer(200, {"status": "ok"})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:  # a stream: else ik's server fails on text that is no UTF-8
                answer = in_upstream_terms(server.complete({**request, "stream": True}))
                self.answer(200, answer)
            except PeerError as error:
                self.answer(500, {"error": str(error)})

        def answer(self, code: int, value: Any) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

    with LlamaServer(program, [*options, *repack]) as server:
        ThreadingHTTPServer((HOST, int(named["--port"])), Handler).serve_forever()


def bench(program: str, repack: Sequence[str], given: Sequence[str]) -> None:
    """Run ik's llama-bench, and print what upstream's would.

    ik's knows no flash attention "auto", and decodes after a prompt with `-gp`.
    """
    words, depth = list(given), 0
    flash = words.index("-fa") + 1
    words[flash] = "0" if words[flash] == "off" else "1"
    if "-d" in words:
        at = words.index("-d")
        depth, n = int(words[at + 1]), words.index("-n") + 1
        words[at : at + 2] = ["-gp", f"{depth},{words[n]}"] if depth else []
        words[n] = "0" if depth else words[n]
    command = [program, *words, *(("-rtr", "1") if repack else ())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    tests = json.loads(done.stdout)
    if depth:
        tests[0] |= {"n_depth": depth, "n_prompt": 0}
    print(json.dumps(tests))


def stand_in(name: str, build: Path, given: list[str]) -> None:
    """Be upstream's program of this name."""
    program = str(build / "bin" / name)
    repack = [REPACK] if given[:1] == [REPACK] else []
    if "--version" in given:  # which llama-bench does not know
        subprocess.run([build / "bin" / "llama-server", "--version"], check=True)
    elif "--list-devices" not in given:
        (serve if name == "llama-server" else bench)(program, repack, given[len(repack) :])


def main(argv: list[str] | None = None) -> int:
    """Run the matrix; returns its exit code."""
    build, *given = sys.argv[1:] if argv is None else argv
    if not all((Path(build) / "bin" / name).is_file() for name in PROGRAMS):
        print(f"ik: {build} has no bin/llama-server and bin/llama-bench", file=sys.stderr)
        return 2
    repack = [word for word in given if word == REPACK]
    with tempfile.TemporaryDirectory() as folder:
        for name in PROGRAMS:
            words = [sys.executable, __file__, "--as", name, str(Path(build).resolve()), *repack]
            script = Path(folder) / name
            script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            script.chmod(0o755)
        peers = ["--peers", ",".join(PROGRAMS), "--peer-dir", folder]
        code = cli.main(["matrix", *peers, *(word for word in given if word != REPACK)])
    print(f"llama-server and llama-bench: ik_llama.cpp's{' with -rtr' if repack else ''}")
    return code


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-h") or sys.argv[1] == "--help":
        raise SystemExit(__doc__)
    if sys.argv[1] == "--as":
        try:
            stand_in(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
        except (PeerError, subprocess.CalledProcessError, ValueError) as error:
            raise SystemExit(f"{sys.argv[2]}: {error}") from None
    else:
        raise SystemExit(main())
