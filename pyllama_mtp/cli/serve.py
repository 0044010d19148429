"""``pyllama-mtp serve``: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import signal
import sys
import time

from pyllama_mtp.cli import INTERRUPTED, PROGRAM, loading, options, parsing
from pyllama_mtp.errors import UsageError

log = logging.getLogger(__name__)

#: Name of the environment variable for the API key.
KEY_VARIABLE = "PYLLAMA_MTP_API_KEY"

_EPILOG = """\
Endpoints: /v1/chat/completions, /v1/completions, /v1/models, /tokenize,
/detokenize, /health, /metrics. Of each request a line goes to stderr; with
pyllama-mtp -v serve what it asked for, too.
The first Ctrl-C (or SIGTERM) lets running answers go on for --grace seconds,
and then ends them with an error that says so; the second one ends at once.

Tools are called as in OpenAI's API. An answer follows response_format
(OpenAI's), json_schema or grammar (GBNF; llama-server's). Not supported, and
refused with an error that names it: echo, suffix, best_of, content that is not
text. The model's name for clients is in /v1/models.

examples:
  pyllama-mtp serve
  pyllama-mtp serve --model Qwen3.5-4B-Q8_0.gguf --n-sequences 8 --port 8000
In Python:
  client = openai.OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="any")
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``serve`` command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP, as the OpenAI API does",
        description="Serve a model over HTTP, as the OpenAI API does. Several requests are "
        "decoded together, each with the text that it gets alone; the next turn of a chat is "
        "processed from where the last one ended.",
        epilog=_EPILOG,
        formatter_class=parsing.HelpFormatter,
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="name or address to listen at")
    add(
        "--port",
        type=parsing.whole(0),
        default=8080,
        metavar="N",
        help="port to listen at; 0 is a free one",
    )
    add(
        "--api-key",
        metavar="KEY",
        help=f"what clients must send as their key (default: {KEY_VARIABLE} from the environment, "
        "which other users of this machine do not see; none if that is not set)",
    )
    add("--name", metavar="NAME", help="the model's name for clients (default: the file's)")
    add(
        "--n-sequences",
        type=parsing.whole(1),
        default=4,
        metavar="N",
        help="requests that are decoded together; memory is taken for all of them",
    )
    add(
        "--max-queue",
        type=parsing.whole(0),
        default=64,
        metavar="N",
        help="further requests that may wait; those beyond are told to come back",
    )
    add(
        "--max-tokens",
        type=parsing.whole(1),
        metavar="N",
        help="most tokens that a request gets (default: what its context has room for)",
    )
    add(
        "--grace",
        type=parsing.real(0),
        default=5.0,
        metavar="SECONDS",
        help="that running answers may go on after Ctrl-C or SIGTERM",
    )
    add(
        "--strict-model",
        action="store_true",
        help="refuse requests that name another model; usually any name will do",
    )
    add(
        "--cors-origins",
        type=parsing.comma_list(str),
        default=(),
        metavar="ORIGIN,...",
        help="pages of these origins (http://localhost:3000, or '*') may use the server from a "
        "browser; usually none",
    )
    options.add_chat_options(parser)
    options.add_depth_options(parser)
    loading.add_model_options(parser)
    options.add_settings_options(parser, n_ctx=f"of each sequence: {options.USUAL_N_CTX}")
    parser.set_defaults(run=run, n_batch=512)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    try:
        from pyllama_mtp.serve import server
        from pyllama_mtp.serve.app import build_app, log_requests
        from pyllama_mtp.serve.generator import Generator
        from pyllama_mtp.serve.jobs import Served
    except ImportError as error:
        raise UsageError(
            f"{error}; the server needs more packages: pip install 'pyllama-mtp[serve]'"
        ) from None
    from pyllama_mtp.llama import native

    key = args.api_key or os.environ.get(KEY_VARIABLE) or None
    settings, chat = (
        options.settings_from(args, args.draft_n_max),
        options.chat_options_from(args),
    )
    library = native.load(args.lib)
    listening = server.listen(args.host, args.port)
    mtp = None if args.draft_n_max == "auto" else args.draft_n_max != 0
    with listening, loading.open_model(args, mtp=mtp, without="--draft-n-max 0") as model:
        generator = Generator(model, settings, args.n_sequences, args.max_queue)
        served = Served(
            model,
            args.name or model.name,
            generator.n_ctx,
            args.max_tokens,
            settings.synthetic_acceptance,
            f"fp_{str(library.stamp.get('series', ''))[:12]}",
            int(time.time()),
            chat,
            args.strict_model,
        )
        host, port = listening.getsockname()[:2]

        def say() -> None:
            address = f"[{host}]" if ":" in host else host
            print(f"serving {served.name} at http://{address}:{port}/v1", flush=True)
            if settings.synthetic_acceptance:
                print("acceptance is imposed: the texts are not the model's", flush=True)
            if not key and not ipaddress.ip_address(host).is_loopback:
                log.warning(
                    "%s can be reached from other machines, and nobody is asked for a key; give "
                    "--api-key",
                    host,
                )

        app = build_app(generator, served, key, args.cors_origins)
        log_requests(args.verbose)
        ended = server.serve(app, generator, listening, args.grace, say)
    if ended == signal.SIGINT:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0
