#!/usr/bin/env python3
"""The server: against the driver used directly, many clients against one, llama-cpp-python's own.

    python bench/serve.py                              # 0.8B shape, Q8_0, synthetic weights
    python bench/serve.py --model FILE.gguf --depth auto --rounds 7
    python bench/serve.py --parts overhead,clients     # without llama-cpp-python

In a round, the driver and the server decode the same prompt, another one each time, one after the
other (the order changes from round to round); then one client, and --clients at once; then
llama-cpp-python's server, plain and with draft-mtp at each of --peer-depths, from its source
distribution and on upstream's libraries. Servers are processes of their own.

Acceptance is real: the synthetic model has a head that drafts well (`pyllama-mtp synth
--head-noise`). With --acceptance it is imposed on ours; llama-cpp-python's server cannot be told
to, so that it is compared at equal acceptance as well: its rounds per second times the tokens of a
round. Writes results/NAME.json and .md after every round.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchkit import openai_client, results, servers
from benchkit.model import HEAD_NOISE, model_file, random_prompt

from pyllama_mtp import Model, PyllamaMtpError, Session, Settings
from pyllama_mtp.cli.parsing import whole_or_auto
from pyllama_mtp.llama import native
from pyllama_mtp.measure.ratios import typical_ratio
from pyllama_mtp.models.ggufinfo import validate_model_file
from pyllama_mtp.models.memory import padded
from pyllama_mtp.settings import available_threads

PARTS = ("overhead", "clients", "peer")
EQUAL = [
    "At equal acceptance, llama-cpp-python is taken to accept drafts at the imposed rates: its",
    "rounds per second, by its own counters, times the tokens of a round at its own depth.",
]
#: Raw samples by what was measured: "driver", "server", "one", "all", and of llama-cpp-python's
#: server "peer plain" and, by depth, "peer mtp 1" and so on.
Samples = dict[str, list[dict[str, Any]]]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What the server costs, and what it gives.")
    add = parser.add_argument
    add("--model", type=Path, metavar="FILE", help="GGUF with an MTP head (default: synthetic)")
    add("--parts", default=",".join(PARTS), metavar="NAME,...", help="default: %(default)s")
    add("--acceptance", default="none", metavar="P,P,...|none", help="default: %(default)s")
    add("--depth", type=whole_or_auto(1), default=3, metavar="N|auto", help="drafts per round")
    add("--peer-depths", default="1,2,3,4", metavar="N,...", help="default: %(default)s")
    add("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    add("--n-prompt", type=int, default=128, metavar="N", help="default: %(default)s")
    add("--n-decode", type=int, default=128, metavar="N", help="default: %(default)s")
    add("--clients", type=int, default=32, metavar="N", help="default: %(default)s")
    add("--n-sequences", type=int, default=8, metavar="N", help="of the server of many clients")
    add("--client-tokens", type=int, default=48, metavar="N", help="that each of them asks for")
    add("--threads", type=int, default=available_threads(), metavar="N")
    add("--peer-libraries", type=Path, metavar="FOLDER", help="default: our upstream variant's")
    add("--peer-folder", type=Path, default=servers.PEER_FOLDER, help="its environment; made once")
    add("--name", default="serve-0.8b", help="of the result files")
    add("--dry-run", action="store_true", help="a few tokens, one round, nothing is written")
    args = parser.parse_args(argv)
    if args.dry_run:
        vars(args).update(rounds=1, n_prompt=16, n_decode=8, clients=3, client_tokens=6)
    args.parts = tuple(filter(None, args.parts.split(",")))
    if not set(args.parts) <= set(PARTS) or not args.parts:
        parser.error(f"--parts: one or more of {', '.join(PARTS)}")
    try:
        none = args.acceptance == "none"
        args.rates = None if none else tuple(float(p) for p in args.acceptance.split(","))
        args.peer_depths = tuple(int(depth) for depth in args.peer_depths.split(","))
    except ValueError:
        parser.error("--acceptance, --peer-depths: numbers, separated by commas")
    counts = (args.rounds, args.n_prompt, args.n_decode, args.clients, *args.peer_depths)
    if min(counts) < 1:
        parser.error("rounds, n-prompt, n-decode, clients and depths must be at least 1")
    most = max(args.peer_depths if args.depth == "auto" else (args.depth, *args.peer_depths))
    if args.rates and len(args.rates) < most:
        parser.error(f"--acceptance: a rate for each of the {most} drafts")
    return args


class Bench:
    """What is measured, and with what."""

    def __init__(self, args: argparse.Namespace, path: Path) -> None:
        self.args, self.path, self.n = args, path, args.n_decode + 1
        self.settings = Settings(
            n_ctx=padded(args.n_prompt + self.n),
            n_batch=512,
            n_threads=args.threads,
            draft_n_max=args.depth,
            ngram=False,  # nothing is looked up: the peers cannot
            synthetic_acceptance=args.rates,
        )
        self.n_vocab = validate_model_file(path).n_vocab
        self.prompt = random_prompt(args.n_prompt, self.n_vocab)  # of this round
        self.options = ["--draft-n-max", str(args.depth), "--no-ngram"]
        if args.rates:
            self.options += ["--synthetic-acceptance", ",".join(map(str, args.rates))]
        self.samples: Samples = {}

    def add(self, name: str, sample: dict[str, Any]) -> None:
        """One more raw sample."""
        self.samples.setdefault(name, []).append(sample)

    @contextlib.contextmanager
    def driver(self) -> Iterator[Session]:
        """A session with the settings that the server has."""
        with Model(self.path) as model, Session(model, self.settings) as session:
            session.generate(self.prompt, max_tokens=8, ignore_eos=True).run()  # warm-up
            yield session

    @contextlib.contextmanager
    def server(self, n_sequences: int, *options: str) -> Iterator[int]:
        """Our server, warm; its port."""
        given = [*self.options, *options]
        with servers.ours(self.path, self.settings, n_sequences, given) as port:
            openai_client.complete(port, self.prompt, 8, ignore_eos=True)
            yield port

    def overhead(self, number: int, session: Session, port: int) -> None:
        """The driver and the server, one after the other."""
        sides = [lambda: self._drive(session), lambda: self.ask(port)]
        for side in sides if number % 2 == 0 else reversed(sides):
            side()

    def _drive(self, session: Session) -> None:
        t = session.generate(self.prompt, max_tokens=self.n, ignore_eos=True).run().telemetry
        found = {"n_generated": self.n, "decode_s": t.decode_s, "rounds": t.rounds}
        self.add("driver", {**found, "accepted": sum(t.accepted), "decode_tps": t.decode_tps})

    def ask(self, port: int) -> None:
        """One completion by our server."""
        stream = openai_client.complete(port, self.prompt, self.n, ignore_eos=True)
        if stream.n_generated != self.n:
            raise openai_client.ClientError(f"{stream.n_generated} tokens instead of {self.n}")
        self.add("server", stream.to_dict())

    def clients(self, number: int, port: int) -> None:
        """One client, then many; each with a prompt that the server has not seen."""
        n, args = self.args.client_tokens, self.args
        prompts = [
            random_prompt(args.n_prompt, self.n_vocab, 1000 * (number + 1) + i)
            for i in range(args.clients + 1)
        ]
        for name, chosen in (("one", prompts[:1]), ("all", prompts[1:])):
            streams, seconds = openai_client.all_at_once(port, chosen, n, ignore_eos=True)
            n_generated = sum(stream.n_generated for stream in streams)
            if n_generated != n * len(chosen):
                raise openai_client.ClientError(f"{n_generated} tokens, {n} are to come from each")
            found = {"clients": len(chosen), "n_generated": n_generated, "seconds": seconds}
            longest = max(stream.first_s for stream in streams)
            self.add(name, {**found, "tps": n_generated / seconds, "longest_first_s": longest})

    def peer(self, peer: servers.Peer, folder: Path) -> None:
        """llama-cpp-python's server: plain, then with draft-mtp at each depth."""
        for depth in (0, *self.args.peer_depths):
            with peer.serve(self.path, self.settings, folder, depth) as port:
                openai_client.complete(port, self.prompt, min(8, self.n), model="peer")  # warm-up
                before = servers.peer_rounds(port)
                stream = openai_client.complete(port, self.prompt, self.n, model="peer")
                rounds, accepted = (
                    now - then for now, then in zip(servers.peer_rounds(port), before, strict=True)
                )
            name = f"peer mtp {depth}" if depth else "peer plain"
            self.add(name, {**stream.to_dict(), "rounds": rounds, "accepted": accepted})


def run(args: argparse.Namespace) -> int:
    """Round after round; the exit code."""
    library = native.load()
    bench = Bench(args, model_file(args.model, None if args.rates else HEAD_NOISE))
    n_sequences = min(args.n_sequences, args.clients)
    plan = {name: getattr(args, name) for name in ("n_prompt", "n_decode", "threads", "rates")}
    fixed = {
        **results.header(library.stamp),
        "plan": {**plan, "model": bench.path.name, "depth": args.depth},
        "clients": {"n": args.clients, "tokens": args.client_tokens, "n_sequences": n_sequences},
    }
    peer = None
    if "peer" in args.parts:
        libraries = args.peer_libraries or library.folder.parent / "upstream"
        peer = servers.make_peer(libraries.resolve(), args.peer_folder.resolve())
    with contextlib.ExitStack() as stack:
        enter, session, many = stack.enter_context, None, None
        one = enter(bench.server(1))
        if "overhead" in args.parts:
            session = enter(bench.driver())
        if "clients" in args.parts:
            many = enter(bench.server(n_sequences, "--max-queue", str(args.clients)))
        folder = Path(enter(tempfile.TemporaryDirectory()))
        for number in range(args.rounds):
            bench.prompt = random_prompt(args.n_prompt, bench.n_vocab, number + 1)  # 0: warm-up
            if session:
                bench.overhead(number, session, one)
            elif peer:
                bench.ask(one)
            if many:
                bench.clients(number, many)
            if peer:
                bench.peer(peer, folder)
            print(f"[{number + 1}/{args.rounds}]", file=sys.stderr)
            rounds = {"done": number + 1, "planned": args.rounds}
            measured = {"samples": bench.samples, "summary": summarize(bench.samples, args.rates)}
            result = {**fixed, "rounds": rounds, **measured}
            if not args.dry_run:
                results.write(result, render(result), args.name)
    print("\n".join(tables(result)))
    return 0


def summarize(samples: Samples, rates: tuple[float, ...] | None) -> dict[str, dict[str, Any]]:
    """Ratios: server over driver, all clients over one, ours over llama-cpp-python."""

    def speeds(name: str, key: str = "decode_tps") -> list[float]:
        return [sample[key] for sample in samples[name]]

    def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
        pairs = zip(ours, theirs, strict=False)  # of the rounds that both have finished
        return asdict(typical_ratio([a / b for a, b in pairs]))

    found: dict[str, dict[str, Any]] = {}
    if "driver" in samples:
        found["server / driver"] = ratio(speeds("server"), speeds("driver"))
    if "one" in samples:
        found["all clients / one"] = ratio(speeds("all", "tps"), speeds("one", "tps"))
    if "peer plain" in samples:
        plain = ratio(speeds("server"), speeds("peer plain"))
        found["server / llama-cpp-python plain"] = plain
    for name in peer_names(samples):
        depth = int(name.split()[-1])
        text = f"server / llama-cpp-python at depth {depth}"
        found[text] = ratio(speeds("server"), speeds(name))
        if rates:  # a round gains a token, and each draft that is accepted
            expected = 1 + sum(rates[:depth])
            equal = [s["rounds"] / s["decode_s"] * expected for s in samples[name]]
            if min(equal) > 0:
                found[f"{text}, at equal acceptance"] = ratio(speeds("server"), equal)
    return found


def peer_names(samples: Samples) -> list[str]:
    """Of llama-cpp-python's server with drafts."""
    return [name for name in samples if name.startswith("peer mtp")]


def tables(result: dict[str, Any]) -> list[str]:
    """Markdown lines: speeds, then ratios."""
    samples: Samples = result["samples"]
    names = {
        "driver": ("the driver, directly", "decode_tps"),
        "server": ("server, one client, decode", "decode_tps"),
        "one": ("server, one client, prompt included", "tps"),
        "all": (f"server, {result['clients']['n']} clients at once, prompts included", "tps"),
        "peer plain": ("llama-cpp-python's server, plain, decode", "decode_tps"),
    }
    for name in peer_names(samples):
        depth = name.split()[-1]
        text = f"llama-cpp-python's server, draft-mtp at depth {depth}, decode"
        names[name] = (text, "decode_tps")
    rows = []
    for name, (text, key) in names.items():
        if name in samples:
            values = [sample[key] for sample in samples[name]]
            spread = f"{min(values):.1f} to {max(values):.1f}"
            rows.append([text, f"{median(values):.1f}", spread, _per_round(samples[name])])
    head = ["tok/s", "median", "range", "tokens per round"]
    lines = results.markdown_table(head, rows)
    rows = [
        [name, f"{r['value']:.3f}", f"{r['low']:.3f} to {r['high']:.3f}"]
        for name, r in result["summary"].items()
    ]
    return [*lines, "", *results.markdown_table(["ratio", "value", "interval"], rows)]


def _per_round(samples: list[dict[str, Any]]) -> str:
    """The verified token and the accepted drafts, where rounds were counted."""
    rounds = sum(sample.get("rounds", 0) for sample in samples)
    accepted = sum(sample.get("accepted", 0) for sample in samples)
    return f"{1 + accepted / rounds:.2f}" if rounds else ""


def render(result: dict[str, Any]) -> str:
    """The Markdown page."""
    plan, clients, rounds = result["plan"], result["clients"], result["rounds"]
    imposed = f"acceptance {plan['rates']} imposed on ours" if plan["rates"] else "real acceptance"
    return "\n".join(
        [
            "# The server",
            "",
            *results.header_lines(result),
            f"- Model: {plan['model']}; prompts of {plan['n_prompt']} tokens, {plan['n_decode']} "
            f"decoded; ours with {plan['depth']} drafts per round (no lookups), {imposed}, "
            f"{plan['threads']} threads; "
            f"{clients['n']} clients on {clients['n_sequences']} sequences, {clients['tokens']} "
            f"tokens each; {rounds['done']} rounds of {rounds['planned']} planned",
            "",
            *tables(result),
            "",
            "Decode speed is that of the tokens after the first: of the driver by its own clock,",
            "of servers from the first chunk to the end of the stream, as the client sees it.",
            "Speeds with prompts included are all tokens over the time until the last client is",
            "done.",
            "Ratios are Hodges-Lehmann estimates of those within a round.",
            "Tokens per round: by the driver's telemetry and by the peer's counters, 1 of the",
            "verification and the accepted drafts.",
            *(EQUAL if plan["rates"] else []),
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parse_arguments(argv)
    try:
        return run(args)
    except (PyllamaMtpError, openai_client.ClientError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; finished rounds are kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
