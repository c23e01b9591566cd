"""Time of one training step beside peers: data parallelism 2 × expert parallelism 2 on two gloo processes.

    python benchmarks/peers.py [--models mixtral qwen3_moe] [--rounds 15] [--json]

Two processes with one thread each train tiny 4-layer models (those of ``collectives.py``, float32, four sequences of
128 tokens a rank).  All contenders live in the same processes and take turns, in an order that moves on by one every
round; a figure is the median over rounds of the slower rank's time.  A step is forward, backward and dropping the
gradients; the optimizer's own work, the same for all, is not in it.  Every contender's loss must be the single
device's.

* ``moec``: ``Plan(dp=2, ep=2)``; ``moec, fsdp``: the same with ``fsdp=True``, the memory of Hugging Face's setup.
* ``Hugging Face``: ``DistributedConfig(fsdp_size=2, ep_size=2)``.
* ``AutoEP``: DeepSpeed, ``autoep_size`` 2, the rest as copies; only where deepspeed is installed (the extra ``bench``),
  null otherwise, with the reason in ``ms``.

The last line with ``--json`` is ``{"setup": …, "cases": [{"model", "ranks", "vs_hf", "vs_autoep", "vs_hf_fsdp",
"ms"}]}``: moec's time over the peer's (``vs_hf_fsdp``: of ``moec, fsdp``).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from collectives import LENGTH, MODELS, TINY, batch_of, build
from contenders import Contender, auto_ep, hugging_face, with_moec

RANKS = 2
CONTENDERS = {
    "moec": partial(with_moec, dp=2, ep=2),
    "moec, fsdp": partial(with_moec, dp=2, ep=2, fsdp=True),
    "Hugging Face": partial(hugging_face, fsdp=2, ep_size=2),
    "AutoEP": partial(auto_ep, ep=2),
}
WARM_UP = 3


def run_rank(a: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    results = {}
    for name in a.models:
        source = build(name, False)
        batch = batch_of(source.config.vocab_size)
        loss = float(source(**batch).loss)
        folder = Path(a.folder, name)
        if dist.get_rank() == 0:
            source.save_pretrained(folder)
        dist.barrier()
        results[name] = measure(source, str(folder), batch, loss, a.rounds)
    if dist.get_rank() == 0:
        Path(a.folder, "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def measure(source, folder: str, batch, loss: float, rounds: int) -> dict[str, Any]:
    """contender -> its median time in ms, or why there is none."""
    out: dict[str, Any] = {}
    ready: dict[str, Contender] = {}
    for title, make in CONTENDERS.items():
        try:
            ready[title] = make(source, folder)
            got = [float(ready[title].step(batch)) for _ in range(WARM_UP)]
        except Exception as e:  # a peer that cannot do it is a result; both ranks run into it alike
            ready.pop(title, None)
            out[title] = f"{type(e).__name__}: {str(e).splitlines()[0][:200] if str(e) else ''}"
            continue
        mean = torch.tensor(got[0])
        dist.all_reduce(mean)  # peers return their own rank's loss
        if abs(float(mean) / RANKS - loss) > 1e-4 * loss:
            raise SystemExit(f"{title}: loss {float(mean) / RANKS}, single device {loss}")
    times: dict[str, list[float]] = {title: [] for title in ready}
    titles = list(ready)
    for i in range(rounds):
        for title in titles[i % len(titles) :] + titles[: i % len(titles)]:
            times[title].append(timed(ready[title], batch))
    return out | {title: 1e3 * median(t) for title, t in times.items()}


def timed(contender: Contender, batch) -> float:
    dist.barrier()
    start = time.perf_counter()
    contender.step(batch)
    contender.model.zero_grad()
    took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


# -- the parent


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    p.add_argument("--folder", help=argparse.SUPPRESS)
    a = p.parse_args()
    if "RANK" in os.environ:
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        run_rank(a)
        return
    results: dict[str, Any] = {}
    for name in a.models:  # processes of its own for each model: what gloo leaves behind slows down what comes after
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
            command += [__file__, "--folder", folder, "--rounds", str(a.rounds), "--models", name]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            results |= json.loads(Path(folder, "results.json").read_text())
    cases = [case(name, rows) for name, rows in results.items()]
    show(results, cases)
    if a.json:
        setup = {
            "torch": torch.__version__, "machine": platform.machine(), "cores": os.cpu_count(), "length": LENGTH,
            "rounds": a.rounds, "sizes": TINY | {n: MODELS[n] for n in a.models},
        }  # fmt: skip
        print(json.dumps({"setup": setup, "cases": cases}))


def case(name: str, rows: dict[str, Any]) -> dict[str, Any]:
    def ratio(ours: str, rival: str) -> float | None:
        return None if isinstance(rows[rival], str) else rows[ours] / rows[rival]

    return {
        "model": name, "ranks": RANKS, "vs_hf": ratio("moec", "Hugging Face"), "vs_autoep": ratio("moec", "AutoEP"),
        "vs_hf_fsdp": ratio("moec, fsdp", "Hugging Face"), "ms": rows,
    }  # fmt: skip


def show(results: dict[str, Any], cases: list[dict[str, Any]]) -> None:
    print(f"torch {torch.__version__}, {RANKS} gloo processes, one thread each; ms of a step, medians\n")
    for name, rows in results.items():
        for title, ms in rows.items():
            print(f"  {name:<12} {title:<14} {ms if isinstance(ms, str) else f'{ms:8.1f}'}")
    print()
    for c in cases:
        figures = {k: c[k] for k in ("vs_hf", "vs_hf_fsdp", "vs_autoep")}
        print(f"  {c['model']:<12}", *(f"{k} {'-' if v is None else f'{v:.2f}'}" for k, v in figures.items()))


if __name__ == "__main__":
    main()
