"""Training curves in fp32, bf16 and FP8: the demo's Mixtral on the bytes of the standard library, in one process.

    python benchmarks/fp8_curve.py [--json] [--steps 300] [--curves fp32 bf16 …] [--write]

Every curve starts from the same weights (seed 0), sees the same batches (seed 1) and is trained by the same AdamW, so
that precision is all they differ in.  With ``--json`` the last line is one object: for every curve the mean of its last
losses (50 of 300), in nats per byte.  ``--write``: losses, seeds and a plot into ``benchmarks/results``.
Two layers, hidden 128, experts of 128, 4 of which 2 a token; 8 sequences of 64 bytes a step, lr 3e-3.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

import moec

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from models import BUILDERS, Sizes  # noqa: E402
from text import VOCAB, Batches, standard_library  # noqa: E402

SIZES = Sizes(vocab=VOCAB, hidden=128, ffn=128, layers=2, heads=4, kv_heads=2, experts=4, top_k=2)
BATCH, LENGTH, LEARNING_RATE = 8, 64, 3e-3
SEEDS = {"weights": 0, "batches": 1}
RESULTS = ROOT / "benchmarks" / "results"

RECIPES = ("delayed", "current", "rowwise", "blockwise", "mxfp8")
CURVES: dict[str, moec.Precision | None] = {
    "fp32": None,
    "bf16": moec.Precision(compute="bf16"),
    **{name: moec.Precision(compute="bf16", fp8=name) for name in RECIPES},
}


def curve(precision: moec.Precision | None, steps: int, batches: Batches) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(SEEDS["weights"])
    source = BUILDERS["mixtral"](SIZES).train()
    model = moec.parallelize(source, moec.Plan(precision=precision), example_kwargs=batches(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**batches(step))["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def last(losses: list[float]) -> float:
    """The mean over the last sixth."""
    end = losses[-max(len(losses) // 6, 1) :]
    return sum(end) / len(end)


def main(arguments: list[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES))
    parser.add_argument("--write", action="store_true", help="write fp8_curve.json and fp8_curve.png")
    args = parser.parse_args(arguments)
    text = standard_library()
    batches = Batches(text, BATCH, LENGTH, SEEDS["batches"])
    losses: dict[str, list[float]] = {}
    for name in args.curves:
        losses[name] = curve(CURVES[name], args.steps, batches)
        against = f", {last(losses[name]) / last(losses['fp32']) - 1:+.2%} of fp32's" if "fp32" in losses else ""
        print(f"{name:10} {losses[name][0]:.4f} -> {last(losses[name]):.4f}{against}", flush=True)
    if args.write:
        write(losses, len(text))
    if args.json:
        print(json.dumps({name: last(found) for name, found in losses.items()}))
    return losses


def write(losses: dict[str, list[float]], text_bytes: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = len(losses["fp32"])
    found = {
        "steps": steps, "seeds": SEEDS, "text_bytes": text_bytes, "torch": torch.__version__,
        "threads": torch.get_num_threads(), "last": {n: last(x) for n, x in losses.items()},
        "losses": {n: [round(v, 5) for v in x] for n, x in losses.items()},
    }  # fmt: skip
    (RESULTS / "fp8_curve.json").write_text(json.dumps(found) + "\n")
    figure, (top, low) = plt.subplots(2, 1, sharex=True, figsize=(8, 6))
    for name, x in losses.items():
        top.plot(range(1, steps + 1), x, linewidth=1, label=f"{name}: {last(x):.4f} at last")
        low.plot(range(1, steps + 1), [a / b - 1 for a, b in zip(x, losses["fp32"], strict=True)], linewidth=1)
    top.set_ylabel("loss (nats per byte)")
    top.legend()
    low.set_ylabel("relative to fp32")
    low.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(RESULTS / "fp8_curve.png", dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
