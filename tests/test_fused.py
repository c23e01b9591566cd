"""Fused projections of different numbers of heads: taken apart, cut part by part over tp, exact in every plan."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moec
from moec import compiler
from moec.plan import Plan
from moec.program import Program, op_name

HIDDEN, HEADS, KV, D = 12, 8, 4, 3
SIZES = [HEADS * D, KV * D, KV * D]
X = torch.randn(4, 5, HIDDEN)


def by_split(qkv):
    return qkv.split(SIZES, -1)


def by_slices(qkv):
    return qkv[..., : SIZES[0]], qkv[..., SIZES[0] : SIZES[0] + SIZES[1]], qkv[..., -SIZES[2] :]


class Attention(nn.Module):
    def __init__(self, parts=by_split, bias=True, kv=KV) -> None:
        super().__init__()
        self.parts, self.kv = parts, kv
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * kv) * D, bias=bias)
        self.out = nn.Linear(HEADS * D, HIDDEN)

    def forward(self, x):
        B, S, _ = x.shape
        q, k, v = (p.reshape(B, S, -1, D).transpose(1, 2) for p in self.parts(self.qkv(x)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return (x + self.out(y.transpose(1, 2).reshape(B, S, -1))).square().mean()


def program(model: nn.Module, plan: Plan, world: int) -> Program:
    return compiler.compile_program(model, plan, world, (X[: 4 // plan.dp],), {}, training=True)


@pytest.mark.parametrize("parts", [by_split, by_slices])
@pytest.mark.parametrize("bias", [True, False])
def test_every_rank_computes_its_heads_only(parts, bias) -> None:
    model, plan = Attention(parts, bias), Plan(dp=1, tp=4)
    found = program(model, plan, 4)
    linears = [n for n in found.graph.nodes if n.op == "call_function" and op_name(n) == "aten.linear"]
    tp = found.mesh.role("tp")
    assert [n.meta["types"][a].kind for n in linears[:3] for a in tp] == ["S"] * 3 * len(tp)
    assert linears[-1].meta["types"][tp[0]].kind == "P"
    assert "each rank uses its heads" in found.layout_reasons["qkv.weight"]
    report = moec.check(model, plan, example_inputs=(X,), world_size=4)
    assert report.ok, report


PLANS = {
    "fsdp": Plan(dp=2, tp=2, fsdp=True), "cp": Plan(dp=1, tp=2, cp=2), "more ranks than heads": Plan(dp=1, tp=8),
    "by hand": Plan(dp=1, tp=4, layout={"qkv": "column"}),
}  # fmt: skip


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_exact_in_other_plans(plan) -> None:
    """Sharded by FSDP as well, on a shared sequence, with more ranks than key/value heads, laid out by hand."""
    x = torch.randn(4, 8, HIDDEN)
    report = moec.check(Attention(), plan, example_inputs=(x,), world_size=plan.dp * plan.tp * plan.cp)
    assert report.ok, report


class Latent(nn.Module):
    """Unequal parts that are no heads of one width (a compressed key and its rotary part): one GEMM, as written."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(HIDDEN, 8 + D), nn.Linear(8, HIDDEN)

    def forward(self, x):
        latent, rotary = self.down(x).split([8, D], -1)
        return (self.up(F.layer_norm(latent, (8,))) + rotary.sum(-1, keepdim=True)).square().mean()


def test_other_unequal_parts_stay() -> None:
    found = program(Latent(), Plan(dp=1, tp=2), 2)
    assert found.op_counts()["aten.linear"] == 2
