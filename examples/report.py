"""What a person sees of a run: a live progress bar, the table at the end, a PNG and a JSON file."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


class Progress:
    """One line that follows the run on a terminal; elsewhere (a log file) a line every tenth step."""

    def __init__(self, title: str, steps: int, tokens_per_step: int) -> None:
        self.title, self.steps, self.tokens = title, steps, tokens_per_step
        self.live = sys.stderr.isatty()
        self.begin = self.warm = time.monotonic()

    def __call__(self, step: int, loss: float, imbalance: float | None) -> None:
        """``step`` counts from 1; ``imbalance`` is max/mean tokens per expert, averaged over the MoE blocks."""
        now = time.monotonic()
        if step == 1:
            self.warm = now  # the first step also warms up: it is no measure of the speed
        rate = (step - 1) * self.tokens / (now - self.warm) if step > 1 else self.tokens / (now - self.begin)
        text = f"{self.title} {step:>{len(str(self.steps))}}/{self.steps}  loss {loss:.4f}  {rate:,.0f} tokens/s"
        if imbalance is not None:
            text += f"  expert load max/mean {imbalance:.2f}"
        if self.live:
            done = 24 * step // self.steps
            end = "\n" if step == self.steps else ""
            print(f"\r\x1b[K{text}  [{'#' * done}{'.' * (24 - done)}]", end=end, file=sys.stderr, flush=True)
        elif step % 10 == 0 or step in (1, self.steps):
            print(text, file=sys.stderr, flush=True)


def largest_difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def loss_table(parallel: list[float], single: list[float], processes: int) -> str:
    """Loss at the first and each tenth step, parallel against single."""
    steps = sorted({1, *range(10, len(single) + 1, 10), len(single)})
    lines = [f"{'step':>6}{f'{processes} processes':>14}{'1 process':>14}{'difference':>14}"]
    for s in steps:
        a, b = parallel[s - 1], single[s - 1]
        lines.append(f"{s:>6}{a:>14.6f}{b:>14.6f}{abs(a - b) / abs(b):>14.1e}")
    worst = largest_difference(parallel, single)
    lines.append(f"largest relative difference over all {len(single)} steps: {worst:.1e}")
    return "\n".join(lines)


def collective_table(rows: list[dict[str, Any]]) -> str:
    """``rows``: one for each phase, collective and group, with its count and tensor bytes of a step on one rank."""
    lines = [f"{'phase':<10}{'collective':<16}{'group':<22}{'ranks':>5}{'per step':>10}{'bytes on a rank':>18}"]
    for r in rows:
        size = f"{'~' if r['estimated'] else ''}{r['bytes']:,}"
        lines.append(f"{r['phase']:<10}{r['collective']:<16}{r['group']:<22}{r['ranks']:>5}{r['count']:>10}{size:>18}")
    lines.append(f"{'a step':<53}{sum(r['count'] for r in rows):>10}{sum(r['bytes'] for r in rows):>18,}")
    if any(r["estimated"] for r in rows):
        lines.append("~ depends on the routing: stated for tokens spread evenly over the experts")
    return "\n".join(lines)


def write(out: Path, numbers: dict[str, Any]) -> None:
    """``numbers.json`` and ``loss.png`` under ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "numbers.json").write_text(json.dumps(numbers, indent=1) + "\n")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    parallel, single = numbers.get("parallel"), numbers["single"]
    fig, axes = plt.subplots(2 if parallel else 1, 1, sharex=True, squeeze=False, figsize=(8, 6 if parallel else 4))
    steps = range(1, len(single["loss"]) + 1)
    top = axes[0, 0]
    top.plot(steps, single["loss"], color="0.6", linewidth=4, label="1 process")
    if parallel:
        top.plot(steps, parallel["loss"], color="C3", linewidth=1.2, label=numbers["title"])
        low = axes[1, 0]
        gap = [abs(a - b) / abs(b) for a, b in zip(parallel["loss"], single["loss"], strict=True)]
        low.semilogy(steps, [max(g, 1e-9) for g in gap], color="C3", linewidth=1.2)
        low.set_ylabel("relative difference")
    top.set_ylabel("loss (nats per byte)")
    top.set_title(numbers["title"])
    top.legend()
    axes[-1, 0].set_xlabel("step")
    fig.tight_layout()
    fig.savefig(out / "loss.png", dpi=120)
    plt.close(fig)
