"""Train a plain MoE model in parallel, and show that it is the same training as on one process.

    torchrun --standalone --nproc-per-node 4 examples/train.py --model mixtral --dp 2 --tp 2 --ep 4
    python examples/train.py --model plain --single        # only the untouched model in eager PyTorch

The model (``models.py``) is built as for one device, ``moec.parallelize`` shards it by the plan, and AdamW trains it on
the bytes of the Python standard library.  Then rank 0 alone trains the same model, untouched, on the same global
batches, and prints the losses side by side with the collectives of a step.  Curves and numbers go to ``runs/``.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
from models import BUILDERS, Sizes
from text import VOCAB, Batches, standard_library
from torch import nn

import moec

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", choices=sorted(BUILDERS), default="mixtral")
    p.add_argument("--dp", type=int, help="data parallel degree (default: what the processes leave)")
    p.add_argument("--tp", type=int, default=1, help="tensor parallel degree of the dense part")
    p.add_argument("--ep", type=int, default=1, help="expert parallel degree, over the same ranks as dp and tp")
    p.add_argument("--etp", type=int, help="tensor parallel degree of the experts (default: tp if ep is 1, else 1)")
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--batch", type=int, default=8, help="sequences of a global batch")
    p.add_argument("--seq", type=int, default=128)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    p.add_argument("--layers", type=int, default=Sizes.layers)
    p.add_argument("--hidden", type=int, default=Sizes.hidden)
    p.add_argument("--experts", type=int, default=Sizes.experts)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--single", action="store_true", help="only the single-process reference")
    p.add_argument("--out", type=Path, help="folder for numbers.json and loss.png (default: runs/MODEL-PLAN)")
    return p.parse_args()


def build(a: argparse.Namespace) -> nn.Module:
    """The plain model; the same seed gives the same weights in every process."""
    torch.manual_seed(a.seed)
    sizes = Sizes(vocab=VOCAB, hidden=a.hidden, ffn=2 * a.hidden, layers=a.layers, experts=a.experts)
    return BUILDERS[a.model](sizes).train()


def train(
    model: nn.Module,
    a: argparse.Namespace,
    batches: Callable[[int], dict[str, torch.Tensor]],
    progress: report.Progress | None,
) -> dict[str, Any]:
    """AdamW with clipping: nothing here knows whether the model is parallel."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.lr)
    numbers: dict[str, Any] = {"loss": [], "imbalance": [], "seconds": []}
    for step in range(a.steps):
        begin = time.monotonic()
        optimizer.zero_grad()
        loss = model(**batches(step))["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), a.clip)
        optimizer.step()
        numbers["loss"].append(loss.item())
        numbers["imbalance"].append(imbalance(model))
        numbers["seconds"].append(time.monotonic() - begin)
        if progress:
            progress(step + 1, numbers["loss"][-1], numbers["imbalance"][-1])
    return numbers


def imbalance(model: nn.Module) -> float | None:
    """Tokens of the busiest expert over the mean, averaged over the MoE blocks; the reference does not count them."""
    if not hasattr(model, "expert_load"):
        return None
    loads = [tokens.double() for tokens in model.expert_load().values()]
    return sum((t.max() / t.mean()).item() for t in loads) / len(loads)


def collectives(model: nn.Module, sizes: dict[str, tuple[int, ...]]) -> list[dict[str, Any]]:
    """Collectives of one training step by phase, operation and group, with their tensor bytes on one rank.

    ``sizes``: shapes of the inputs that one rank passes.  The bytes of an exchange depend on the routing; they are
    stated for uniform routing (``estimated``).
    """
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for c in moec.explain(model, sizes).collectives:
        new = {"phase": c.phase, "collective": c.primitive, "group": c.group, "ranks": c.ranks, "count": 0, "bytes": 0}
        row = rows.setdefault((c.phase, c.primitive, c.group), new | {"estimated": False})
        row["count"] += 1
        row["bytes"] += c.bytes
        row["estimated"] |= c.estimated
    return list(rows.values())


def main() -> None:
    a = arguments()
    batches = Batches(standard_library(), a.batch, a.seq, a.seed)
    tokens = a.batch * a.seq
    degrees = [f"{n}{v}" for n in ("dp", "tp", "ep", "etp") if (v := getattr(a, n)) is not None]
    plan_text = "single" if a.single else "-".join(degrees)
    numbers: dict[str, Any] = {
        "title": f"{a.model}, " + ("1 process" if a.single else f"{PROCESSES} processes: {' '.join(degrees)}"),
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(a).items()},
        "text_bytes": len(batches.text),
        "torch": torch.__version__,
    }
    out = a.out or Path("runs") / f"{a.model}-{plan_text}"

    if not a.single:
        # clip_grad_norm_ sums the norm over one mesh axis after another; torch warns that one step would be faster.
        logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
        if PROCESSES > 1:
            # The other ranks wait at a barrier while rank 0 trains the reference.
            dist.init_process_group("gloo", timeout=timedelta(hours=2))
        say(f"{a.model} on {len(batches.text):,} bytes of text, {tokens} tokens a step, {numbers['title']}")
        begin = time.monotonic()
        plan = moec.Plan(dp=a.dp, tp=a.tp, ep=a.ep, etp=a.etp)
        model = moec.parallelize(build(a), plan, example_kwargs=batches(0))
        say(f"parallelized in {time.monotonic() - begin:.1f} s")

        def mine(step: int) -> dict[str, torch.Tensor]:
            return {k: moec.shard_batch(v, model) for k, v in batches(step).items()}

        bar = report.Progress(f"{PROCESSES} processes", a.steps, tokens) if RANK == 0 else None
        numbers["parallel"] = train(model, a, mine, bar)
        numbers["collectives"] = collectives(model, {k: tuple(v.shape) for k, v in mine(0).items()})

    if RANK == 0:
        numbers["single"] = train(build(a), a, batches, report.Progress("1 process", a.steps, tokens))
        if not a.single:
            parallel, single = numbers["parallel"]["loss"], numbers["single"]["loss"]
            numbers["largest_relative_difference"] = report.largest_difference(parallel, single)
            print("\n" + report.loss_table(parallel, single, PROCESSES))
            print("\n" + report.collective_table(numbers["collectives"]))
        report.write(out, numbers)
        print(f"\nwrote {out}/loss.png and {out}/numbers.json")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def say(text: str) -> None:
    if RANK == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
