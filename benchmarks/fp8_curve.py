"""Training curves in fp32, bf16 and FP8: the demo's Mixtral on the bytes of the standard library, in one process.

    python benchmarks/fp8_curve.py [--json] [--steps 300] [--seeds 6] [--curves fp32 bf16 …] [--write [--anew]]

Seed s: initial weights from seed s, batches from seed s + 1.  All curves of a seed start from the same weights, see the
same batches and are trained by the same AdamW, so that precision is all they differ in.  With ``--json`` the last line
is one object: for every curve the mean over seeds of the mean of its last losses (50 of 300), in nats per byte.

How many seeds: training amplifies any rounding, so a curve's distance to fp32's has noise of its own.  Seed 0, run
twice with fp32 sums in two orders, put its standard deviation at 0.7% of the loss; by that 6 seeds bring the standard
error of a mean distance to 0.3%, a third of the 1% that is asked about.  Beside each mean is the standard error that
its own seeds show (0.2 to 0.8% over those six): a mean below 1% is what they say, not what any further seed will.

``--write``: losses and a plot into ``benchmarks/results``.  Losses are written after every curve, and what is there
already is not computed again: a stopped run goes on, and all curves of a seed come before the next seed.  After a
change of what is computed start with ``--anew``, which forgets the curves that are asked for.
Two layers, hidden 128, experts of 128, 4 of which 2 a token; 8 sequences of 64 bytes a step, lr 3e-3.
"""

from __future__ import annotations

import argparse
import json
import statistics
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
RESULTS = ROOT / "benchmarks" / "results"

RECIPES = ("delayed", "current", "rowwise", "blockwise", "mxfp8")
CURVES: dict[str, moec.Precision | None] = {
    "fp32": None,
    "bf16": moec.Precision(compute="bf16"),
    **{name: moec.Precision(compute="bf16", fp8=name) for name in RECIPES},
}

Losses = dict[str, dict[str, list[float]]]
"""Curve -> seed (as text: a key of JSON) -> the loss of every step."""


def curve(precision: moec.Precision | None, steps: int, text: torch.Tensor, seed: int) -> list[float]:
    """The loss of every step."""
    batches = Batches(text, BATCH, LENGTH, seed + 1)
    torch.manual_seed(seed)
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
        losses.append(round(float(loss.detach()), 5))
    return losses


def last(losses: list[float]) -> float:
    """The mean over the last sixth."""
    return statistics.fmean(losses[-max(len(losses) // 6, 1) :])


def mean_last(found: dict[str, list[float]]) -> float:
    """Over seeds."""
    return statistics.fmean(last(x) for x in found.values())


def distance(found: dict[str, list[float]], fp32: dict[str, list[float]]) -> tuple[float, float]:
    """Of the last losses to fp32's of the same seeds, relative: the mean, and its standard error (nan of one seed)."""
    relative = [last(x) / last(fp32[seed]) - 1 for seed, x in found.items()]
    error = statistics.stdev(relative) / len(relative) ** 0.5 if len(relative) > 1 else float("nan")
    return statistics.fmean(relative), error


def main(arguments: list[str] | None = None) -> Losses:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=6, help="how many")
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES))
    parser.add_argument("--write", action="store_true", help="fp8_curve.json and fp8_curve.png, which it goes on with")
    parser.add_argument("--anew", action="store_true", help="compute what was written again")
    args = parser.parse_args(arguments)
    text = standard_library()
    about = {"steps": args.steps, "text_bytes": len(text), "torch": torch.__version__}
    path = RESULTS / "fp8_curve.json"
    losses = _read(path, about) if args.write else {}
    if args.anew:
        losses = {name: x for name, x in losses.items() if name not in args.curves}
    seeds = [str(seed) for seed in range(args.seeds)]
    for seed in seeds:
        for name in args.curves:
            if seed in losses.setdefault(name, {}):
                continue
            losses[name][seed] = found = curve(CURVES[name], args.steps, text, int(seed))
            print(f"seed {seed} {name:10} {found[0]:.4f} -> {last(found):.4f}", flush=True)
            if args.write:
                path.write_text(json.dumps({**about, "losses": losses}) + "\n")
    asked = {name: {seed: losses[name][seed] for seed in seeds} for name in args.curves}
    for name, found in asked.items():
        against = ""
        if "fp32" in asked:
            mean, error = distance(found, asked["fp32"])
            against = f", {mean:+.2%} of fp32's (standard error {error:.2%})"
        print(f"{name:10} {mean_last(found):.4f}{against}", flush=True)
    if args.write and "fp32" in asked:
        plot(asked)
    if args.json:
        print(json.dumps({name: mean_last(found) for name, found in asked.items()}))
    return asked


def _read(path: Path, about: dict[str, object]) -> Losses:
    """What was written of the same steps, text and torch."""
    found = json.loads(path.read_text()) if path.exists() else {}
    return found["losses"] if about.items() <= found.items() else {}


def plot(losses: Losses) -> None:
    """Means over seeds of ten steps each, and the distance to fp32 with the standard error as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, low) = plt.subplots(2, 1, sharex=True, figsize=(8, 7))
    fp32 = losses["fp32"]
    for name, found in losses.items():
        smooth = {seed: _tens(x) for seed, x in found.items()}
        steps = [10 * i + 5.5 for i in range(len(next(iter(smooth.values()))))]
        mean = [statistics.fmean(at) for at in zip(*smooth.values(), strict=True)]
        (line,) = top.plot(steps, mean, linewidth=1, label=f"{name}: {mean_last(found):.4f} at last")
        if name == "fp32":
            continue
        away = [
            distance({s: [x[i]] for s, x in smooth.items()}, {s: [_tens(x)[i]] for s, x in fp32.items()})
            for i in range(len(steps))
        ]
        low.plot(steps, [m for m, _ in away], linewidth=1, color=line.get_color())
        low.fill_between(
            steps, [m - e for m, e in away], [m + e for m, e in away], alpha=0.15, color=line.get_color(), linewidth=0
        )
    top.set_ylabel("loss (nats per byte)")
    top.legend()
    low.set_ylabel("relative to fp32")
    low.set_xlabel(f"step ({len(fp32)} seeds; bands: standard error)")
    figure.tight_layout()
    figure.savefig(RESULTS / "fp8_curve.png", dpi=100)
    plt.close(figure)


def _tens(losses: list[float]) -> list[float]:
    return [statistics.fmean(losses[i : i + 10]) for i in range(0, len(losses) - 9, 10)]


if __name__ == "__main__":
    main()
