"""Make the demo model, from this folder's parent: `python -m demo_model --help`.

Stages: corpus -> tokenizer -> train -> export -> evaluate -> reference. Training resumes from the
checkpoint in the work folder; `--stages` runs a part (export of a running training, say). The card,
MODEL_CARD.md, is condensed by hand from sources.json, characters.json and evaluation.json of the
work folder, the checkpoint's record, and `pyllama-mtp matrix --classes
factual,thinking,code,instruction -n 64 --depths 3 --no-ngram --draft-vocab full`, also with
`--temp 0.8`. `python -m demo_model.vision` then makes the demo that sees.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from . import corpus, evaluate, export, reference, tokenizer, train
from .net import SHAPE, Model

DEMO = Path(__file__).resolve().parents[2] / "pyllama_mtp/models/demo"
STAGES = ("corpus", "train", "export", "evaluate", "reference")


def main() -> None:
    """Run the stages that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m demo_model")
    parser.add_argument("--minutes", type=float, default=60.0, help="training time (default 60)")
    parser.add_argument("--steps", type=int, default=0, help="bound by steps instead of minutes")
    parser.add_argument("--work", type=Path, default=Path("demo-work"), help="what is kept")
    parser.add_argument("--out", type=Path, default=DEMO, help="folder of demo.gguf")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stages", default=",".join(STAGES), help="comma list (default: all)")
    args = parser.parse_args()
    stages = args.stages.split(",")
    work, out = args.work, args.out
    work.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    if "corpus" in stages or not (work / "train.jsonl").exists():
        (work / "characters.json").write_text(json.dumps(corpus.build(work), indent=1) + "\n")
    gguf_file = out / "demo.gguf"
    words, stream, heldout = tokenizer.prepare(work, SHAPE.n_vocab, args.seed)
    if "train" in stages:
        plan = train.Plan(args.minutes, args.steps, args.seed)
        print(json.dumps(asdict(plan)))
        torch.manual_seed(args.seed)
        run = train.Run(work / "checkpoint.pt", Model(), plan, stream, heldout)
        run.load()
        run.loop()
    if "export" in stages:
        saved = torch.load(work / "checkpoint.pt", weights_only=True)
        model = Model()
        model.load_state_dict(saved["model"])
        record = {"steps": saved["step"], "tokens": saved["tokens"], "seed": saved["plan"]["seed"]}
        export.export(model, words, gguf_file, record)
    if "evaluate" in stages:
        evaluate.evaluate(gguf_file, words, work)
    if "reference" in stages:
        reference.write(gguf_file, heldout, work / "demo_reference.npz")


if __name__ == "__main__":
    main()
