"""Load one variant of the library, generate with MTP, say on which devices; for the step `build`.

Run as a program: ``verify.py VARIANT gpu|cpu|any``. Exit code 1 when the devices are not as asked.
"""

from __future__ import annotations

import sys


def main(argv: list[str]) -> int:
    """Check; returns the exit code."""
    from pyllama_mtp import Model, Sampling, Session, Settings, native
    from pyllama_mtp.models.demo import demo_path

    variant, wanted = argv
    library = native.load(variant)
    devices = [(device.name, device.kind, device.description) for device in library.devices()]
    print(f"{library.variant}: {library.stamp.get('cuda')=}, devices {devices}")
    on_gpu = any(kind == "gpu" for _, kind, _ in devices)
    if wanted != "any" and on_gpu != (wanted == "gpu"):
        print(f"a device of kind {wanted!r} was asked for")
        return 1
    with Model(demo_path()) as model, Session(model, Settings(n_ctx=256, draft_n_max=3)) as session:
        run = session.generate(
            "def add(a, b):", max_tokens=16, sampling=Sampling(temperature=0.0)
        ).run()
    print(f"{run.telemetry.n_generated} tokens, drafted {sum(run.telemetry.drafted)}")
    return 0 if run.telemetry.n_generated else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
