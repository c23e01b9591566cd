"""Models that compute with the number of tokens, blocks that are not raised, and expert parallelism without experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moec
from moec.hf import build
from moec.preflight import Report, _verdict
from moec.program import EQUAL_LENGTHS


def labelled(**more):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 96, (4, 9), generator=g)
    labels = ids.clone()
    labels[0] = -100
    return {"input_ids": ids, "labels": labels, **more}


@pytest.mark.parametrize("padded", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_the_models_own_balancing_loss_is_that_of_the_global_batch(padded):
    torch.manual_seed(0)
    mask = torch.ones(4, 9, dtype=torch.int64)
    mask[0, 6:] = mask[3, :2] = 0
    batch = labelled(output_router_logits=True, **({"attention_mask": mask} if padded else {}))
    model = build("mixtral", 1)
    report = moec.check(model, moec.Plan(dp=2, tp=2, ep=4), example_kwargs=batch, world_size=4)
    assert report.ok, str(report)
    assert any("aux_loss" in path for path in report.passes[-1].outputs)


@pytest.mark.nightly
def test_only_a_program_that_uses_the_token_count_ties_lengths_together():
    torch.manual_seed(0)
    model, plan = build("mixtral", 1), moec.Plan(dp=2)
    counts = moec.compile_program(model, plan, 2, (), labelled(output_router_logits=True), training=True)
    plain = moec.compile_program(model, plan, 2, (), labelled(), training=True)
    assert EQUAL_LENGTHS in counts.facts and EQUAL_LENGTHS not in plain.facts


@pytest.mark.parametrize("tied", [False, True])
def test_other_lengths_on_another_rank_are_refused_when_lengths_are_tied(tied):
    reports = [Report("call", shapes={"ids": (2, s)}, batch={"ids": 2}, equal_lengths=tied) for s in (5, 7)]
    # What ranks compare first: unequal vectors lead to the verdict.
    assert (reports[0].vector()[2] != reports[1].vector()[2]) is tied
    if tied:
        assert "computes with the number of tokens" in str(_verdict(reports, ((0,), (1,)), "tp"))


class Elsewhere(nn.Module):
    """An expert that joins two parameters before it uses them, which capture does not follow."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.randn(4, 8, 8) * 0.3) for _ in range(2))

    def forward(self, e: int, x):
        left, right = (x @ torch.cat([self.w[e], self.v[e]], 1)).chunk(2, -1)
        return left * right


class Unraised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), Elsewhere()

    def forward(self, x):
        weights, ids = F.softmax(self.gate(x), -1).topk(2)
        out = torch.zeros_like(x)
        for e in range(4):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, self.experts(e, x[t]) * weights[t, k, None])
        return out


def test_a_block_that_is_not_raised_runs_on_one_rank_as_it_is():
    torch.manual_seed(0)
    model, x = Unraised(), torch.randn(6, 8)
    one = moec.parallelize(model, moec.Plan(), example_inputs=(x,))
    assert not one.program.blocks
    for rows in (6, 9):
        y = torch.randn(rows, 8)
        got, want = one(y), model(y)
        torch.testing.assert_close(got, want)
    got.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(moec.full_grads(one)["experts.w"], model.experts.w.grad)


def test_expert_parallelism_without_a_block_is_refused():
    with pytest.raises(moec.MoecError, match="MoE block not raised: no output equals"):
        moec.check(Unraised(), moec.Plan(ep=2), example_inputs=(torch.randn(6, 8),), world_size=2)
