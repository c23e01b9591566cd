"""How long compiling takes, by number of layers: capture, each pass, and whether the total grows linearly.

    python benchmarks/compile_time.py [--layers 2 4 8 16] [--repeats 3] [--json]
    python benchmarks/compile_time.py --deepseek-1024 [--scaling] [--json]

The second form is ``deepseek_1024.py``: a real model for 1024 ranks in one process.

A Hugging Face Mixtral (8 experts, tiny widths: compile time does not depend on them) is captured and compiled for 4
ranks (dp 2, tp 2, ep 4) in one process.  One small compile first takes imports and torch's own warm-up out of the
figures.  ``seconds_per_layer`` is the slope of the least-squares line, ``linearity`` the largest relative distance of a
measured total from that line.  Medians of ``--repeats`` interleaved runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from itertools import pairwise

import deepseek_1024
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import moec


def model(layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=64,
        )
    )  # fmt: skip


def compile_once(m: torch.nn.Module) -> dict[str, float]:
    """Seconds of capture and of every pass, verification included."""
    ids = torch.zeros(3, 5, dtype=torch.int64)
    marks = [("start", time.perf_counter())]
    moec.compile_program(
        m, moec.Plan(dp=2, tp=2, ep=4), 4, (), {"input_ids": ids, "labels": ids}, training=True,
        observe=lambda name, program: marks.append((name, time.perf_counter())),
    )  # fmt: skip
    return {name: t - before for (_, before), (name, t) in pairwise(marks)}


def line(xs: list[int], ys: list[float]) -> tuple[float, float]:
    mx, my = statistics.fmean(xs), statistics.fmean(ys)
    slope = sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sum((x - mx) ** 2 for x in xs)
    return slope, my - slope * mx


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8, 16])
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    p.add_argument("--deepseek-1024", action="store_true", help="DeepSeek-V3, all of it, for 1024 ranks")
    p.add_argument("--scaling", action="store_true", help="with --deepseek-1024: other numbers of layers and ranks too")
    a = p.parse_args()
    if a.deepseek_1024:
        out = deepseek_1024.main(a.scaling, a.repeats) | {
            "torch": torch.__version__, "threads": torch.get_num_threads(), "cores": os.cpu_count(),
        }  # fmt: skip
        if a.json:
            print(json.dumps(out))
        return
    compile_once(model(1))
    runs: dict[int, list[dict[str, float]]] = {n: [] for n in a.layers}
    for _ in range(a.repeats):
        for n in a.layers:
            runs[n].append(compile_once(model(n)))
    stages = list(runs[a.layers[0]][0])
    medians = {n: {s: statistics.median(r[s] for r in runs[n]) for s in stages} for n in a.layers}
    totals = [statistics.median(sum(r.values()) for r in runs[n]) for n in a.layers]
    slope, start = line(a.layers, totals)
    linearity = max(abs(t - (start + slope * n)) / t for n, t in zip(a.layers, totals, strict=True))

    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {platform.machine()}; "
        "seconds\n"
    )
    print("layers  " + "  ".join(f"{s:>10}" for s in [*stages, "total"]))
    for n, t in zip(a.layers, totals, strict=True):
        print(f"{n:>6}  " + "  ".join(f"{v:>10.2f}" for v in [*medians[n].values(), t]))
    print(f"\n{slope:.2f} s a layer + {start:.2f} s; largest distance from the line {linearity:.0%}")
    if a.json:
        out = {
            "layers": a.layers, "seconds": totals, "stages": {str(n): m for n, m in medians.items()},
            "seconds_per_layer": slope, "linearity": linearity, "torch": torch.__version__,
            "threads": torch.get_num_threads(), "cores": os.cpu_count(),
            "repeats": a.repeats,
        }  # fmt: skip
        print(json.dumps(out))


if __name__ == "__main__":
    main()
