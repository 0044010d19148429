"""The measurements: `prefill`, `decode`, `matrix`, `peers`; all write below the work folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from gpukit.config import Config, rates
from gpukit.memory import fits
from gpukit.units import Unit

#: What is left of a step when a matrix is told to end by itself.
MARGIN_S = 40.0
#: Seconds below which nothing is begun that loads a model of tens of GB.
LEAST_S = 120.0
DEPTH = 3
#: The deepest that a session with adaptive depth may draft.
AUTO_DEPTH = 6


def _least(config: Config) -> float:
    return 5.0 if config.dry_run else LEAST_S


def _matrix_unit(config: Config, name: str, shape: str, size: int, *options: object) -> Unit:
    """One size of one shape through `pyllama-mtp matrix`, which goes on with what its file has."""
    output = (
        config.work.folder / name.split()[0] / f"{name.split(' ', 1)[1].replace(' ', '-')}.jsonl"
    )
    output.parent.mkdir(parents=True, exist_ok=True)

    def command(left_s: float) -> list[str]:
        margin = min(MARGIN_S, left_s / 3)
        return config.driver(
            *("matrix", "--model", config.model(shape), "--prompt-sizes", size),
            *("--repeat", config.repeats(size), "--max-tokens", config.n_decode),
            *("--n-gpu-layers", config.n_gpu_layers, "--output", output),
            *("--resume", "--budget", f"{max(1, int(left_s - margin))}s"),
            *options,
        )

    return Unit(
        name,
        command,
        _least(config),
        missing=lambda: unmeasured(output),
        resumes=True,
        environment=config.environment(),
        cwd=config.work.folder,
    )


def unmeasured(path: Path) -> str:
    """What a file of `pyllama-mtp matrix` lacks of its last run; "" is nothing."""
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        return f"nothing in {path.name} yet ({error})"
    last = next((r["run"] for r in reversed(records) if r.get("kind") == "run"), None)
    if last is None:
        return f"no run in {path.name}"
    own = [record for record in records if record["run"] == last]
    plan = own[0]["plan"]
    switches = ("prompt_rows", "prompt_sync", "hidden", "drafting", "draft_vocab")
    combined = 1
    for switch in switches:
        combined *= len(plan[switch])
    variants = sum(combined if depth else 1 for depth in plan["depths"])
    planned = variants * plan["repeat"] * len(plan["sizes"])
    found = sum(record["kind"] == "sample" for record in own)
    found += sum(plan["repeat"] for record in own if record["kind"] == "skipped")
    return "" if found >= planned else f"{found} of {planned} samples"


def matrix(config: Config) -> list[Unit]:
    """No MTP and every depth at every size, at the first imposed acceptance."""
    config.need_models()
    depths = ",".join(map(str, config.depths))
    imposed = rates(config.acceptance[0], max(config.depths))
    return [
        _matrix_unit(
            config,
            f"matrix {shape} {size}",
            shape,
            size,
            *("--depths", depths, "--synthetic-acceptance", imposed),
        )
        for size in config.sizes
        for shape in config.shapes
        if fits(config, shape, size, len(config.depths), max(config.depths))
    ]


def prefill(config: Config) -> list[Unit]:
    """Prefill with MTP against prefill without, in one session; the hand-off on the device and
    over the host."""
    config.need_models()
    folder = config.work.folder / "prefill"
    folder.mkdir(parents=True, exist_ok=True)
    units = []
    for size in config.contexts:
        for shape in config.shapes:
            name = folder / f"{shape}-{size}"
            options = ["--sizes", size, "--rounds", config.repeats(size), "--depth", DEPTH]
            options += ["--step", min(size, 2048), "--one-session"]
            label = f"prefill {shape} {size}"
            units.append(_script_unit(config, label, "prefill_pairs.py", name, options))
    for size in config.handoff_contexts:
        for shape in config.shapes:
            for way in ("device", "host"):
                imposed = rates(config.acceptance[0], DEPTH)
                options = ["--depths", f"0,{DEPTH}", "--handoff", way]
                options += ["--synthetic-acceptance", imposed]
                name = f"handoff {shape} {size} {way}"
                units.append(_matrix_unit(config, name, shape, size, *options))
    return units


def _script_unit(
    config: Config, name: str, script: str, output: Path, options: list[object]
) -> Unit:
    """A script of bench/ that takes --name, under which it writes .json and .md; a whole path
    keeps them out of bench/results."""
    shape = name.split()[1]
    words = config.script(
        script, *config.threads, "--model", config.model(shape), "--name", output, *options
    )
    result = output.with_name(output.name + ".json")
    return Unit(
        name,
        words,
        _least(config),
        missing=lambda: "" if result.exists() else f"no {result.name}",
        environment=config.environment(),
        cwd=config.work.folder,
    )


def decode(config: Config) -> list[Unit]:
    """Depths side by side at each acceptance; chain against stepwise, and draft vocabularies."""
    config.need_models()
    folder = config.work.folder / "decode"
    folder.mkdir(parents=True, exist_ok=True)
    depths = ",".join(str(depth) for depth in config.depths if depth)
    units = []
    for size in config.contexts:
        for shape in config.shapes:
            if not fits(config, shape, size, len(config.depths) + 1, AUTO_DEPTH):
                continue
            options: list[object] = ["--acceptance", ",".join(map(str, config.acceptance))]
            options += ["--depths", depths, "--server-depths", "", "--rounds", config.repeats(size)]
            options += ["--n-prompt", size, "--n-decode", config.n_decode]
            output = folder / f"{shape}-{size}"
            unit = _script_unit(config, f"decode {shape} {size}", "decode.py", output, options)
            units.append(unit)
    imposed = rates(config.acceptance[0], DEPTH)
    switches = ["--depths", f"0,{DEPTH}", "--drafting", "chain,stepwise"]
    switches += ["--draft-vocab", f"{config.draft_vocab},full", "--synthetic-acceptance", imposed]
    for size in config.contexts:
        for shape in config.shapes:
            if fits(config, shape, size, 5, DEPTH):
                name = f"drafting {shape} {size}"
                units.append(_matrix_unit(config, name, shape, size, *switches))
    return units


def peers(config: Config) -> list[Unit]:
    """Upstream's llama-server at the same acceptance.

    The programs are built without CUDA and get the CUDA backend of the step `build`: backends are
    loaded from beside the program, both builds compile the same ggml sources of it (the build stops
    if the variants differ outside the CPU backend), and compiling it twice would take half a step.
    """
    config.need_models()
    folder, environment = config.work.folder / "peers", config.environment()
    if config.dry_run:
        check = config.script("peers.py", "--check", "--folder", folder)
        units = [Unit("peers build", check, accepted=(0, 1))]
    else:
        words = config.script("peers.py", "--folder", folder, "--jobs", config.jobs)
        words += ["--define", "GGML_CUDA=OFF"]
        source = config.site / "pyllama_mtp" / "lib" / "libggml-cuda.so"
        listed = [str(folder / "bin" / "llama-server"), "--list-devices"]
        units = [
            Unit("peers build", words, 60, resumes=True, environment=environment),
            Unit("peers backend", ["cp", str(source), str(folder / "bin")]),
            Unit("peers devices", listed, missing=_says(config, "peers devices", "CUDA0")),
        ]
    for size in config.contexts:
        for shape in config.shapes:
            for depth in (1, 2, DEPTH) if size == min(config.contexts) else (DEPTH,):
                output = folder / "results" / f"{shape}-{size}-{depth}.json"
                words = config.script("gpukit/serve.py", "--folder", folder)
                words += ["--model", str(config.model(shape)), "--n-prompt", str(size)]
                words += ["--n-decode", str(config.n_decode), "--depth", str(depth)]
                words += ["--acceptance", str(config.acceptance[0]), "--output", str(output)]
                words += ["--rounds", str(config.repeats(size))]
                words += ["--dry-run"] if config.dry_run else []
                unit = f"peers {shape} {size} {depth}"
                units.append(Unit(unit, words, _least(config), environment=environment))
    return units


def _says(config: Config, unit: str, text: str) -> Callable[[], str]:
    """`Unit.missing` for a command whose output must hold a text."""

    def missing() -> str:
        found = config.work.log(unit).read_text(errors="replace")
        return "" if text in found else f"no {text} in its output"

    return missing
