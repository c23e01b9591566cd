"""Routers under every way of sharding tokens: who competes for places, and who draws what, is that of the global batch.

Legend: B batch, S sequence, T = B*S tokens, H hidden, E experts, K choices per token.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from witness import witness

import moec
from moec.program import op_name
from moec.runtime.route_spec import RouteSpec

E, K, H = 6, 2, 8


class Router(nn.Module):
    """An embedding, a router written with ``moec::route``, and experts that are one vector each."""

    def __init__(self, spec: RouteSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = nn.Embedding(12, H)
        self.up = nn.Linear(H, 4 * H)
        self.down = nn.Linear(4 * H, H)
        self.gate = nn.Linear(H, E)
        self.experts = nn.Parameter(torch.randn(E, H))
        self.register_buffer("bias", torch.randn(E) * 0.1)

    def forward(self, ids_BS, valid_BS, labels_BS):
        x_BSH = self.embed(ids_BS)
        x_BSH = x_BSH + self.down(F.gelu(self.up(x_BSH)))
        x_TH = x_BSH.reshape(-1, H)
        B, S = ids_BS.shape
        token_T = (torch.arange(B)[:, None] * S + torch.arange(S)).reshape(-1)
        w_TK, ids_TK = torch.ops.moec.route(
            self.gate(x_TH), self.bias, valid_BS.reshape(-1), token_T, self.spec.text()
        )
        hot_TKE = F.one_hot(ids_TK.clamp(min=0), E).to(x_TH.dtype)
        y_TH = torch.einsum("tk,tke,eh->th", w_TK, hot_TKE, self.experts)
        logits_TV = (x_TH + y_TH) @ self.embed.weight.t()
        return F.cross_entropy(logits_TV, labels_BS.reshape(-1), ignore_index=-100)


def build(**fields) -> Router:
    torch.manual_seed(0)
    model = Router(RouteSpec(E, K, **{"score": "sigmoid", "normalize": True, **fields}))
    with torch.no_grad():
        model.gate.bias[0] += 1.0  # skewed, so that places run out
    return model


def batch(B=4, S=6):
    gen = torch.Generator().manual_seed(5)
    ids, labels = (torch.randint(0, 12, (B, S), generator=gen) for _ in range(2))
    valid = torch.rand(B, S, generator=gen) < 0.8
    return ids, valid, labels


PLANS = {
    "dp": moec.Plan(dp=4),
    "dp-tp": moec.Plan(dp=2, tp=2),
    "sequence": moec.Plan(dp=2, tp=2, sequence_parallel=True),
    "context": moec.Plan(dp=2, cp=2),
}
SHARED = ("sequence", "context")
SPECS = {
    "probs": {"capacity_factor": 0.7},
    "position": {"capacity_factor": 0.7, "drop": "position"},
    "free": {"score": "softmax_pre"},
    "random": {"force": "random", "capacity_factor": 1.0},
    "round_robin": {"force": "round_robin", "score": "sqrtsoftplus"},
}


BY_DAY = {("dp-tp", "probs"), ("context", "position"), ("sequence", "random")}


def case(*names: str):
    return pytest.param(*names, marks=[] if names in BY_DAY else pytest.mark.nightly)


@pytest.mark.parametrize(("plan", "spec"), [case(p, s) for p in PLANS for s in SPECS])
def test_the_global_batch_is_routed(plan, spec):
    report = moec.check(build(**SPECS[spec]), PLANS[plan], example_inputs=batch(), world_size=4)
    assert report.ok, str(report)


@pytest.mark.parametrize("plan", ["dp-tp", *(pytest.param(p, marks=pytest.mark.nightly) for p in ("dp", *SHARED))])
def test_each_dp_rank_drops_for_itself(plan):
    """One device computes it too: as many runs of tokens as there are dp ranks."""
    dp = PLANS[plan].dp
    model = build(capacity_factor=0.7, level="dp_shard", shards=dp)
    report = moec.check(model, PLANS[plan], example_inputs=batch(), world_size=4)
    assert report.ok, str(report)
    assert model(*batch()) != build(capacity_factor=0.7)(*batch()), "all tokens together would drop the same"


@pytest.mark.parametrize(("plan", "spec"), [case(p, s) for p in PLANS for s in ("probs", "dp_shard")])
def test_what_travels(plan, spec):
    fields = SPECS.get(spec) or {"capacity_factor": 0.7, "level": "dp_shard", "shards": PLANS[plan].dp}
    stages = {}
    moec.compile_program(build(**fields), PLANS[plan], 4, batch(), {}, training=True,
                         observe=lambda name, p: stages.setdefault(name, p))  # fmt: skip
    program = stages["shard"]
    if plan not in SHARED:  # the library has no packed shards
        witness(program)
    drop = next(n for n in program.graph.nodes if op_name(n) == "moec.drop")
    kinds = {a: t.kind for a, t in drop.args[0].meta["types"].items()}
    assert not drop.args[0].meta["grad"], "gathered weights would owe a gradient"
    dp = program.mesh.role("dp")
    assert all(k == "S" if spec == "dp_shard" and a in dp else k in "IR" for a, k in kinds.items()), kinds
