"""Bytes that each dispatcher moves: one MoE block, forward and backward, counted on a simulated world and predicted.

    python benchmarks/dispatch.py [--hidden 1024] [--experts 64] [--top-k 8] [--tokens 128] [--json]

A plain block (router, loop over experts) is compiled for dp = ep = 8, with nodes of 4 ranks, and one step runs on a
simulated world, which counts what every rank sends every other (``Event.sent``; what stays on a rank is not counted).
``moec.traffic`` predicts the same from the ids alone; the two must be equal.  Everything that a step moves counts:
rows, ids, weights, counts of rows and all their gradients; the gradients of parameters are not the dispatcher's and are
left out.

*uniform*: a token's experts are drawn uniformly (the router reads independent normal numbers).  *node-limited*: they
are drawn from the experts of one node, each node being as likely: what routing with groups = nodes and one kept group
does. Experts are narrow, which changes no byte of what is measured.

The last line with ``--json`` is one object: ``{"setup": …, "expected": …, "routings": {routing: {dispatcher:
{"forward", "backward", "predicted", "rows", "of_alltoall", "crossing", "crossing_of_alltoall"}}}}``.
"""

from __future__ import annotations

import argparse
import json
from math import comb
from typing import Any

import torch
from torch import Tensor, nn

import moec
from moec import simulate
from moec.runtime.world import Event, LockstepWorld
from moec.traffic import Payload, Traffic, predict

RANKS, PER_NODE, WIDTH = 8, 4, 4
DISPATCHERS = ("alltoall", "allgather", "dedup", "hierarchical")


class Block(nn.Module):
    def __init__(self, hidden: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, WIDTH) * 0.1)
        self.down = nn.Parameter(torch.randn(experts, WIDTH, hidden) * 0.1)
        with torch.no_grad():  # logits are the first numbers of a token, exactly, on whatever rank
            self.router.weight.copy_(torch.eye(experts, hidden))

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        weights, ids = self.router(x).softmax(-1).topk(self.top_k)
        y = torch.zeros_like(x)
        for e in range(len(self.up)):
            token, slot = torch.where(ids == e)
            out = torch.relu(x[token] @ self.up[e]) @ self.down[e]
            y.index_add_(0, token, out * weights[token, slot, None])
        return y.view(shape)


class Model(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.scale, self.moe = nn.Parameter(torch.ones(sizes[0])), Block(*sizes)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x * self.scale)


def tokens(routing: str, number: int, hidden: int, experts: int) -> Tensor:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(number, hidden, generator=gen)
    if routing == "node-limited":
        per_node = experts * PER_NODE // RANKS
        node = torch.randint(0, RANKS // PER_NODE, (number, 1), generator=gen)
        x[:, :experts] -= 20 * (torch.arange(experts) // per_node != node)
    return x.view(RANKS, -1, hidden)


def measure(a: argparse.Namespace, routing: str, name: str) -> tuple[Traffic, Traffic]:
    """(counted, predicted)"""
    torch.manual_seed(0)
    model, x = Model(a.hidden, a.experts, a.top_k), tokens(routing, RANKS * a.tokens, a.hidden, a.experts)
    plan = moec.Plan(dp=RANKS, ep=RANKS, dispatch=name, ranks_per_node=PER_NODE)
    program = moec.compile_program(model, plan, RANKS, (x,), {}, training=True)
    values = dict(model.named_parameters())
    params = {ph: values[s.name] for ph, s in program.params.items()}
    world = LockstepWorld(program.mesh)
    paths = [o.path for o in program.outputs]
    simulate.run(program, params, dict.fromkeys(program.inputs, x), dict.fromkeys(paths, torch.randn_like(x)), world)
    # Router and epilogue move nothing in the graph: every event is the dispatcher's.
    ids = x[..., : a.experts].softmax(-1).topk(a.top_k).indices.unbind()
    payload = Payload(a.hidden * x.itemsize, a.top_k * 4, a.top_k * x.itemsize)
    guess = predict(name, ids, a.experts, payload, ranks_per_node=PER_NODE)
    return Traffic(_sent(world.log, "forward"), _sent(world.log, "backward"), guess.rows), guess


def _sent(log: list[Event], phase: str) -> Tensor:
    return torch.stack([torch.tensor(e.sent) for e in log if e.phase == phase]).sum(0)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--hidden", type=int, default=1024)
    p.add_argument("--experts", type=int, default=64)
    p.add_argument("--top-k", type=int, default=8)
    p.add_argument("--tokens", type=int, default=128, help="of each rank")
    p.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    a = p.parse_args()
    torch.set_num_threads(1)
    share = a.experts // RANKS
    distinct = RANKS * (1 - comb(a.experts - share, a.top_k) / comb(a.experts, a.top_k))
    setting = f"H={a.hidden}, E={a.experts}, K={a.top_k}, {RANKS} ranks in nodes of {PER_NODE}"
    print(f"{setting}, {a.tokens} tokens a rank, fp32")
    print(f"expected: {distinct:.2f} distinct ranks of {a.top_k} choices, {distinct / a.top_k:.3f} of alltoall's rows")
    results: dict[str, dict[str, Any]] = {}
    for routing in ("uniform", "node-limited"):
        heads = ("backward MB", 13), ("rows", 9), ("of alltoall", 13), ("crossing MB", 13), ("of alltoall", 13)
        print(f"\n{routing:<16}{'forward MB':>12}" + "".join(h.rjust(n) for h, n in heads))
        base: Traffic | None = None
        for name in DISPATCHERS:
            counted, guess = measure(a, routing, name)
            base = base or counted
            same = torch.equal(counted.forward, guess.forward) and torch.equal(counted.backward, guess.backward)
            row = {
                "forward": int(counted.forward.sum()), "backward": int(counted.backward.sum()),
                "predicted": guess.bytes, "predicted_equals_counted": same, "rows": int(guess.rows.sum()),
                "of_alltoall": counted.bytes / base.bytes, "crossing": counted.crossing(PER_NODE),
                "crossing_of_alltoall": counted.crossing(PER_NODE) / base.crossing(PER_NODE),
            }  # fmt: skip
            results.setdefault(routing, {})[name] = row
            print(
                f"  {name:<14}{row['forward'] / 1e6:>12.2f}{row['backward'] / 1e6:>13.2f}{row['rows']:>9}"
                f"{row['of_alltoall']:>13.3f}{row['crossing'] / 1e6:>13.2f}{row['crossing_of_alltoall']:>13.3f}"
                f"{'' if same else '  PREDICTED OTHERWISE'}"
            )
    if a.json:
        setup = {
            "hidden": a.hidden, "experts": a.experts, "top_k": a.top_k, "tokens_per_rank": a.tokens, "ranks": RANKS,
            "ranks_per_node": PER_NODE, "dtype": "float32", "torch": torch.__version__,
        }  # fmt: skip
        expected = {"distinct_ranks": distinct, "of_alltoall": distinct / a.top_k}
        print(json.dumps({"setup": setup, "expected": expected, "routings": results}))


if __name__ == "__main__":
    main()
