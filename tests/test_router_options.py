"""Plan.router on models as users have them: routers that ``raise_router`` found, blocks under every kind of plan."""

from __future__ import annotations

import pytest
import torch

import moec
from moec.hf import build
from moec.router import Router

LOSSES = {"aux_loss": {"micro_batch": 0.1, "sequence": 0.2, "global": 0.3}, "z_loss": 0.01, "expert_bias": 1e-3}
CASES = {
    "mixtral": (moec.Plan(dp=2, tp=2, ep=4), {**LOSSES, "capacity_factor": 1.0}),
    "deepseek_v3": (moec.Plan(dp=2, tp=2, ep=2, sequence_parallel=True), LOSSES),
    "qwen3_moe": (moec.Plan(dp=2, cp=2, ep=2), {**LOSSES, "capacity_factor": 0.8, "level": "dp_shard"}),
    "gpt_oss": (moec.Plan(dp=4, ep=2, fsdp=True), {"force_balance": "random", "dtype": "float32"}),
}


def batch(vocabulary: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (4, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 6:] = mask[3, :2] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


@pytest.mark.nightly
@pytest.mark.parametrize("family", CASES)
def test_families(family):
    plan, options = CASES[family]
    torch.manual_seed(0)
    model = build(family, 2)
    plan = moec.Plan(**{**plan.to_dict(), "router": Router(**options)})
    report = moec.check(model, plan, example_kwargs=batch(model.config.vocab_size), world_size=4)
    assert report.ok, str(report)
    assert [p.name for p in report.passes if p.oracle] == ["configure_router"]


@pytest.mark.nightly
def test_equal_layers():
    """The buffers, losses and counts of layers that were copied are their own."""
    torch.manual_seed(0)
    model = build("mixtral", 6)
    plan = moec.Plan(dp=2, ep=2, router=Router(**LOSSES))
    report = moec.check(model, plan, example_kwargs=batch(model.config.vocab_size), world_size=2)
    assert report.ok, str(report)
    assert report.passes[-1].name == "expand"
    assert sum("aux_counts" in name for name in report.passes[-1].outputs) == 6
