"""update_expert_bias: the bias moves towards the mean load of an optimizer step, on one rank and on four alike."""

from __future__ import annotations

import pytest
import torch
from spmd import Batch, Shape, build

import moec
from moec.plan import Plan
from moec.router import Router
from moec.runtime.errors import MoecError

pytestmark = pytest.mark.timeout(300)  # four processes compile on what may be two busy cores

RATE = 0.125
PLAN = Plan(router=Router(expert_bias=RATE))


def parts(n: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A batch of eight sequences in ``n`` micro-batches."""
    ids, labels = Batch(8, 4, 5).tensors()
    return list(zip(ids.chunk(n), labels.chunk(n), strict=True))


def stepped(source, n: int) -> tuple[torch.Tensor, moec.MoEStats]:
    """The bias and the statistics after one step in ``n`` micro-batches."""
    model = moec.parallelize(source, PLAN, example_inputs=parts(n)[0])
    for part in parts(n):
        model(*part)["loss"].backward()
    moec.update_expert_bias(model)
    (stats,) = moec.moe_stats(model).values()
    return model.get_buffer("layers.0.moe.expert_bias"), stats


def test_one_step_whatever_the_micro_batches() -> None:
    source = build(Shape(), 3, 2.0)
    bias, stats = stepped(source, 1)
    loads = stats.tokens_per_expert.double()
    assert loads.unique().numel() > 2
    assert torch.equal(bias, (RATE * torch.sign(loads.mean() - loads)).float())
    bias_of_4, stats_of_4 = stepped(source, 4)
    assert torch.equal(bias_of_4, bias)
    assert torch.equal(stats_of_4.tokens_per_expert, stats.tokens_per_expert)
    assert stats_of_4.tokens == stats.tokens and stats_of_4.entropy == pytest.approx(stats.entropy, rel=1e-12)


def test_only_training_forwards_of_this_step_count() -> None:
    (first, second), source = parts(2), build(Shape(), 3, 2.0)
    model = moec.parallelize(source, PLAN, example_inputs=first)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    bias = model.get_buffer("layers.0.moe.expert_bias")
    moec.update_expert_bias(model)
    assert not bias.any()  # nothing ran
    model(*first)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()  # a step without an update: its counts are gone
    model.eval()(*first)
    model.train()(*second)["loss"].backward()
    moec.update_expert_bias(model)
    (load,) = model.expert_load().values()
    assert torch.equal(bias, (RATE * torch.sign(load.double().mean() - load)).float())
    moved = bias.clone()
    moec.update_expert_bias(model)
    assert torch.equal(bias, moved)  # a second time: nothing ran since


def test_a_plan_without_a_bias() -> None:
    model = moec.parallelize(build(Shape(), 3), Plan(), example_inputs=parts(1)[0])
    with pytest.raises(MoecError, match=r"gives routers no bias"):
        moec.update_expert_bias(model)


def on_ranks(rank: int, world: int) -> tuple[list[float], list[int], float, int]:
    source, (ids, labels) = build(Shape(), 3, 2.0), Batch(8, 4, 5).tensors()
    plan = Plan(dp=2, tp=2, ep=2, router=Router(expert_bias=RATE))
    model = moec.parallelize(source, plan, example_inputs=(ids[:4], labels[:4]))
    mine = moec.shard_batch({"ids": ids, "labels": labels}, model)
    model(mine["ids"], mine["labels"])["loss"].backward()
    moec.update_expert_bias(model)
    (stats,) = moec.moe_stats(model).values()
    state = moec.full_state_dict(model)
    return state["layers.0.moe.expert_bias"].tolist(), stats.tokens_per_expert.tolist(), stats.entropy, stats.tokens


def test_four_ranks_are_one(gloo4) -> None:
    results = gloo4.run(on_ranks, timeout=280)
    bias, stats = stepped(build(Shape(), 3, 2.0), 1)
    for got_bias, loads, entropy, tokens in results:
        assert got_bias == bias.tolist()
        assert loads == stats.tokens_per_expert.tolist()
        assert tokens == stats.tokens and entropy == pytest.approx(stats.entropy, rel=1e-5)
