"""What ``two_hosts.py`` runs on both hosts: one case, its contenders taking turns in the same processes.

Started by torchrun: ``two_hosts_cases.py CASE FOLDER ROUNDS``.  The first rank writes ``FOLDER/CASE.json``: the median
seconds of every contender's step in each of ``REPEATS`` repeats, forward and backward, of the slower rank.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import moec

REPEATS, WARM_UP = 3, 2
CALIBRATIONS = ("before", "after")
"""Cases that measure the lab itself, and write ``FOLDER/CASE.yaml``."""

# EP: sequences of a rank and tokens of each, hidden size, width of an expert, experts, choices, layers.
SEQUENCES, LENGTH, HIDDEN, WIDTH, EXPERTS, CHOICES, LAYERS = 16, 256, 512, 384, 8, 2, 4
# Dense: tokens of a rank, hidden size, layers; every layer is 8 H² parameters.
TOKENS, DENSE_HIDDEN, DENSE_LAYERS = 384, 512, 16

Step = Callable[[], object]
Inputs = dict[str, Tensor]


def mixtral() -> tuple[nn.Module, Inputs]:
    """Experts and little else: narrow attention, a small vocabulary."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=CHOICES,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=1024,
        max_position_embeddings=LENGTH, tie_word_embeddings=False,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    ids = torch.randint(0, 1024, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(_rank()))
    return model, {"input_ids": ids, "labels": ids.clone()}


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x_TH: Tensor) -> Tensor:
        return x_TH + self.down(F.gelu(self.up(self.norm(x_TH))))


class Dense(nn.Module):
    """A deep stack of wide layers: many parameters for its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(DENSE_HIDDEN) for _ in range(DENSE_LAYERS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


def dense() -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    model, g = Dense(), torch.Generator().manual_seed(_rank())
    return model, {k: torch.randn(TOKENS, DENSE_HIDDEN, generator=g) for k in ("x", "y")}


MODELS = {"ep": mixtral, "fsdp": dense, "fsdp_kept": dense, "grad_reduction": dense, "plans": mixtral}
OPTIONS: dict[str, dict[str, Any]] = {
    "ep": {"ep": 2, "router": moec.Router(force_balance="round_robin")},
    "fsdp": {"fsdp": True},
    "fsdp_kept": {"fsdp": True, "reshard_after_forward": False},
    "grad_reduction": {},
}


def plans(case: str, cluster: str) -> dict[str, moec.Plan]:
    """``unscheduled`` and ``scheduled`` of a case; six that one could choose from for ``plans``."""
    if case == "plans":
        return _six(cluster)
    overlap = moec.Overlap(chunks="auto" if case == "ep" else 1, cluster=cluster)
    ways = {"unscheduled": None, "scheduled": overlap}
    return {name: moec.Plan(dp=2, overlap=o, **OPTIONS[case]) for name, o in ways.items()}


def _six(cluster: str) -> dict[str, moec.Plan]:
    balanced = moec.Router(force_balance="round_robin")

    def plan(chunks: int | None, **degrees: Any) -> moec.Plan:
        overlap = None if chunks is None else moec.Overlap(chunks=chunks, cluster=cluster)
        return moec.Plan(dp=2, router=balanced, overlap=overlap, **degrees)

    return {
        "dp": plan(None), "dp, scheduled": plan(1), "fsdp, scheduled": plan(1, fsdp=True),
        "ep": plan(None, ep=2), "ep, 2 chunks": plan(2, ep=2), "ep, 4 chunks": plan(4, ep=2),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------- contenders


def _loss(out: object) -> Tensor:
    return out if isinstance(out, Tensor) else out.loss  # type: ignore[attr-defined]


def step_of(model: nn.Module, inputs: Inputs) -> Step:
    def run() -> None:
        _loss(model(**inputs)).backward()
        model.zero_grad(set_to_none=True)

    return run


def within(context: Callable[[], contextlib.AbstractContextManager], step: Step) -> Step:
    def run() -> None:
        with context():
            step()

    return run


@contextlib.contextmanager
def nothing_sent() -> Iterator[None]:
    """Inside, moec's collectives return at once, with this rank's own data in the place of the others'.

    Everything else runs as always, on values of the same shapes: under balanced routing a rank's own tokens stand for
    those that the other would have sent.  What remains in a step is its compute (and a local copy where data would
    have arrived), which is what ``compute_only`` means."""

    def exchanged(out: Tensor, x: Tensor, *_: object) -> list[object]:
        n = min(len(out), len(x))
        out[:n].copy_(x[:n])
        return []

    def gathered(out: Tensor, x: Tensor, *_: object) -> list[object]:
        out.view(-1, *x.shape).copy_(x) if out.numel() else None
        return []

    def scattered(out: Tensor, x: Tensor, *_: object) -> list[object]:
        out.copy_(x.view(-1, *out.shape)[0])
        return []

    ops = "moec.runtime.ops"
    changes = {
        f"{ops}.exchange.start_all_to_all": exchanged, f"{ops}.convert.start_all_to_all": exchanged,
        "torch.distributed.all_reduce": lambda *_, **__: None,
        f"{ops}.convert.start_all_gather": gathered, f"{ops}.convert.start_reduce_scatter": scattered,
        f"{ops}.convert.on_wait": lambda *_: None, f"{ops}.exchange.on_wait": lambda *_: None,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, change in changes.items():
            stack.enter_context(patch(name, change))
        yield


def contenders(case: str, cluster: str) -> dict[str, Step]:
    source, inputs = MODELS[case]()
    found: dict[str, Step] = {}
    for name, plan in plans(case, cluster).items():
        model = moec.parallelize(source, plan, example_kwargs=inputs)
        found[name] = step_of(model, inputs)
        if name == "unscheduled":
            found["compute_only"] = within(nothing_sent, found[name])
            found["forward_only"] = within(nothing_sent, lambda model=model: model(**inputs))
    if case not in ("ep", "plans"):
        ddp = DistributedDataParallel(MODELS[case]()[0])
        found["ddp"], found["torch_compute_only"] = step_of(ddp, inputs), within(ddp.no_sync, step_of(ddp, inputs))
        sharded, reshard = MODELS[case]()[0], OPTIONS[case].get("reshard_after_forward", True)
        for module in (*sharded.layers, sharded):
            fully_shard(module, reshard_after_forward=reshard)
        found["fully_shard"] = step_of(sharded, inputs)
    return found


# ------------------------------------------------------------------------------------------- measuring


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def timed(step: Step) -> float:
    dist.barrier()
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def measure(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Median of every contender in each repeat, of the slower rank; they take turns, in another order every round."""
    names = list(steps)
    for name in names:
        for _ in range(WARM_UP):
            timed(steps[name])
    found: dict[str, list[float]] = {n: [] for n in names}
    for _ in range(REPEATS):
        times: dict[str, list[float]] = {n: [] for n in names}
        for r in range(rounds):
            for name in names[r % len(names) :] + names[: r % len(names)]:
                times[name].append(timed(steps[name]))
        table = torch.tensor([times[n] for n in names], dtype=torch.float64)
        dist.all_reduce(table, dist.ReduceOp.MAX)
        for name, row in zip(names, table.tolist(), strict=True):
            found[name].append(median(row))
    return found


def main() -> None:
    case, folder, rounds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    cluster = folder / f"{CALIBRATIONS[0]}.yaml"
    if case in CALIBRATIONS:
        found = moec.calibrate("two hosts", ("float32",))
        if _rank() == 0:
            (folder / f"{case}.yaml").write_text(found.to_yaml())
    else:
        seconds = measure(contenders(case, str(cluster)), rounds)
        if _rank() == 0:
            (folder / f"{case}.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
