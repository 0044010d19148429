"""Commands that serve until they are ended: a model over HTTP, this machine's devices over TCP."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import signal
import sys
import time

from pyllama_mtp.child import end_with_parent
from pyllama_mtp.cli import FAILED, INTERRUPTED, PROGRAM, options, parsing
from pyllama_mtp.errors import UsageError


class Serve:
    """Serve a model over HTTP, as the OpenAI API does. Several requests are decoded
    together, each with the text that it gets alone; the next turn of a chat is
    processed from where the last one ended.

    Endpoints: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models,
    /tokenize, /detokenize, /health, /metrics; / is a page to chat with. Each
    request is one line on stderr; pyllama-mtp -v serve also logs its parameters.
    The first Ctrl-C (or SIGTERM) lets running answers go on for --grace seconds,
    and then ends them with an error that says so; the second one ends the server
    at once.

    Tools work as in OpenAI's API. Answers follow response_format (OpenAI's), or
    json_schema or grammar (GBNF; llama-server's). echo, suffix, best_of and
    content other than text and images are refused by name. /v1/models has the
    model's name for clients.

    examples:
      pyllama-mtp serve
      pyllama-mtp serve --model Qwen3.5-4B-Q8_0.gguf --n-sequences 8 --port 8000
    In Python:
      client = openai.OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="any")
    """

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--host", default="127.0.0.1", help="name or address to listen at")
        parsing.add_whole(
            parser, "--port", default=8080, least=0, help="port to listen at; 0 is a free one"
        )
        add(
            "--api-key",
            metavar="KEY",
            help=f"key that clients must send (default: {KEY_VARIABLE} from the environment, which "
            "other users of this machine cannot see, or no key)",
        )
        add(
            "--name",
            metavar="NAME",
            help="the model's name for clients (default: the file's, - for spaces)",
        )
        parsing.add_whole(
            parser,
            "--n-sequences",
            default=4,
            help="requests that are decoded together; the memory for all of them is taken at once",
        )
        parsing.add_whole(
            parser,
            "--max-queue",
            default=64,
            least=0,
            help="further requests that may wait; others are told to come back",
        )
        parsing.add_whole(
            parser,
            "--max-tokens",
            help="most tokens that a request gets (default: what its context has room for)",
        )
        add(
            "--grace",
            type=parsing.real(0),
            default=5.0,
            metavar="SECONDS",
            help="time for running answers after Ctrl-C or SIGTERM",
        )
        add(
            "--strict-model",
            action="store_true",
            help="refuse requests that name another model",
        )
        add(
            "--cors-origins",
            type=parsing.comma_list(str),
            default=(),
            metavar="ORIGIN,...",
            help="let pages of these origins (http://localhost:3000, or '*') use the server from a "
            "browser",
        )
        add(
            "--allowed-hosts",
            type=parsing.comma_list(str),
            default=(),
            metavar="NAME,...",
            help="names by which clients may call this server, or '*' (default: localhost, this "
            "machine's name and --host; addresses in numbers always work)",
        )
        parsing.add_whole(
            parser, "--max-body", default=32, metavar="MIB", help="most MiB of a request"
        )
        options.add_chat_options(parser)
        options.add_parts(parser, "depth", "ngram")
        options.add_model_options(parser)
        options.add_vision_option(parser)
        add(
            "--allow-image-urls",
            action="store_true",
            help="fetch images of http(s) URLs for clients, from public addresses only, up to 32 "
            "MiB and 20 s for a request (default: only data URLs)",
        )
        options.add_settings_options(parser, n_ctx=f"of each sequence: {options.USUAL_N_CTX}")
        options.add_parts(parser.add_argument_group("stored prompts"), "cache")
        parser.set_defaults(n_batch=512, cache_ram=8192)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Serve until a signal comes."""
        try:
            from pyllama_mtp.serve import app as server
            from pyllama_mtp.serve.answers import Served
            from pyllama_mtp.serve.app import build_app, log_requests
            from pyllama_mtp.serve.generator import Generator
        except ImportError as error:
            raise UsageError(
                f"{error}; the server needs more packages: pip install 'pyllama-mtp[serve]'"
            ) from None
        from pyllama_mtp.llama import native

        key = args.api_key or os.environ.get(KEY_VARIABLE) or None
        settings = options.settings_from(args, args.draft_n_max)
        chat = options.chat_options_from(args)
        library = native.load(args.lib)
        listening = server.listen(args.host, args.port)
        with (
            listening,
            options.open_model(args) as model,
            options.open_vision(args, model, wanted=False) as vision,
        ):
            generator = Generator(model, settings, args.n_sequences, args.max_queue)
            if vision:
                try:
                    generator.check_images()
                except UsageError as error:
                    if args.mmproj is not None:
                        raise
                    log.warning("prompts cannot have images: %s", error)
                    vision = None
            limits = (generator.n_ctx, args.max_tokens)
            fingerprint, now = f"fp_{str(library.stamp.get('series', ''))[:12]}", int(time.time())
            name = args.name or "-".join(model.name.split())
            served = Served(
                *(model, name, *limits, fingerprint, now, chat, args.strict_model, vision),
                image_urls=args.allow_image_urls,
            )
            host, port = listening.getsockname()[:2]

            def say() -> None:
                address = f"[{host}]" if ":" in host else host
                print(f"serving {name} at http://{address}:{port}/v1", flush=True)
                print(f"a page to chat with: http://{address}:{port}", flush=True)
                options.warn_without_template(model)
                if not key and not ipaddress.ip_address(host).is_loopback:
                    log.warning(
                        "%s can be reached from other machines, and no key is required; give "
                        "--api-key",
                        host,
                    )

            hosts = (args.host, *args.allowed_hosts)
            app = build_app(generator, served, key, args.cors_origins, hosts, args.max_body << 20)
            served.most_text  # noqa: B018 - takes a moment, so before the first request
            log_requests(args.verbose)
            ended = server.serve(app, generator, listening, args.grace, say)
        if ended == signal.SIGINT:
            print(f"{PROGRAM}: interrupted", file=sys.stderr)
            return INTERRUPTED
        return 0


log = logging.getLogger(__name__)

#: The environment variable for the API key.
KEY_VARIABLE = "PYLLAMA_MTP_API_KEY"


class RpcWorker:
    """Lend the devices of this machine, its GPUs or else its CPU, to models in other
    processes, here or on other machines. Print the address, and serve until Ctrl-C
    or SIGTERM.

    There is no authentication and no encryption: whoever reaches the port can run
    native code here. Loopback and trusted networks only.

    examples:
      pyllama-mtp rpc-worker
      pyllama-mtp rpc-worker --host 192.168.0.7 --port 50052
    On the machine that has the model file:
      pyllama-mtp generate --rpc 192.168.0.7:50052 --model FILE "Once upon a time"
      Model(path, rpc_servers=("192.168.0.7:50052",))     # in Python
    The first line on stdout is "listening on HOST:PORT", with the numbers in use.
    """

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--host", default="127.0.0.1", help="name or IPv4 address to listen at")
        parsing.add_whole(
            parser,
            "--port",
            default=0,
            least=0,
            help="port to listen at; 0 is a free one (default: 0)",
        )
        parsing.add_whole(parser, "--threads", help="CPU threads (default: all cores)")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Serve until a signal comes, in a child process.

        Garbage from a client, on which ggml aborts, or a fault in a driver ends the child. Its
        clients lose their models, but a new child serves at the same address.
        """
        port, address = args.port, ""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
        while True:
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                end_with_parent()
                os.close(reader)
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                _serve(args, port, writer, quiet=bool(address))
            os.close(writer)
            with os.fdopen(reader) as pipe:
                address = pipe.readline()  # "" if the process ends before it listens
            status = _ended(pid)
            if not address or os.WIFEXITED(status):
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                return os.WEXITSTATUS(status) if os.WIFEXITED(status) else FAILED
            name = signal.Signals(os.WTERMSIG(status)).name
            log.error("the worker at %s died of %s; it is started again", address, name)
            port = int(address.rpartition(":")[2])
            time.sleep(PAUSE_S)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Seconds before a process that died is started again.
PAUSE_S = 0.2


def _ended(pid: int) -> int:
    """Pass signals on to the process until it ends; return its status."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        got = signal.sigwait({*STOP_SIGNALS, signal.SIGCHLD})
        if got in STOP_SIGNALS:
            os.kill(pid, got)


def _serve(args: argparse.Namespace, port: int, pipe: int, *, quiet: bool) -> None:
    """Serve until a signal comes, then end the process: see :class:`pyllama_mtp.llama.rpc.Worker`.
    `pipe` gets the address when the server listens; `quiet`: it is not printed."""
    from pyllama_mtp.llama import rpc
    from pyllama_mtp.settings import available_threads

    # ggml prints about each connection; stdout is for our one line.
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    worker = rpc.Worker(args.host, port, args.threads or available_threads())
    if not worker.loopback and not quiet:
        log.warning(
            "%s can be reached from other machines, and there is no authentication: whoever "
            "reaches it can run native code here",
            worker.address,
        )
    os.write(pipe, worker.address.encode())
    os.close(pipe)
    if not quiet:
        print(f"listening on {worker.address}", file=out, flush=True)
    code = 0
    if worker.wait() == signal.SIGINT:
        print(f"{PROGRAM}: interrupted", file=sys.stderr, flush=True)
        code = INTERRUPTED
    os._exit(code)
