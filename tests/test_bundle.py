"""bundle: independent small all-reduces become one, dependent and large ones stay; values and gradients stay too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import moec
from moec import compiler
from moec.passes.bundle import SMALL, _sort
from moec.plan import Plan
from moec.program import Program
from moec.runtime.collectives import collective

X = torch.randn(4, 3, 6)


class Sums(nn.Module):
    """Sums over the batch: two that know nothing of each other, one that needs the first, and a large one."""

    def __init__(self, large: int = 8) -> None:
        super().__init__()
        self.w = nn.Linear(6, 6)
        self.up = nn.Linear(6, large)

    def forward(self, x):
        y = self.w(x)
        first, other = y.sum((0, 1)), y.square().sum((0, 1))
        behind = (y * first.sigmoid()).sum((0, 1))
        wide = self.up(y).sum((0, 1))
        return first.cos().sum() + other.sqrt().sum() + behind.sin().sum() + wide.tanh().mean()


def sums(program: Program) -> list[int]:
    """Elements of every all-reduce, in order."""
    found = [(n, collective(n.target)) for n in program.graph.nodes if n.op == "call_function"]
    return [n.meta["val"].numel() for n, c in found if c is not None and c.kind in ("p_to_i", "p_to_r")]


@pytest.mark.parametrize("large", [8, SMALL + 1])
def test_independent_sums_are_one(large) -> None:
    model = Sums(large)
    program = compiler.compile_program(model, Plan(dp=2), 2, (X[:2],), {}, training=True)
    assert sorted(sums(program)) == ([6, 6 + 6 + large] if large <= SMALL else [6, 6 + 6, large])
    report = moec.check(model, Plan(dp=2), example_inputs=(X,), world_size=2)
    assert report.ok, report


@pytest.mark.nightly
def test_the_balancing_loss_of_all_layers_costs_two() -> None:
    """Mixtral's: probabilities and counts of each of two layers."""
    pytest.importorskip("transformers")
    from moec import hf

    model = hf.build("mixtral", 2, output_router_logits=True)
    ids = torch.zeros(2, 4, dtype=torch.int64)
    program = compiler.compile_program(
        model, Plan(dp=4, fsdp=True), 4, (), {"input_ids": ids, "labels": ids}, training=True
    )
    E = model.config.num_local_experts
    assert sorted(sums(program)) == [1, 2 * E, 2 * E + 1]  # labels; counts; probabilities and the loss


@settings(deadline=None)
@given(st.data())
def test_sort_moves_only_what_must(data) -> None:
    """Random graphs of sums whose nodes lie in any order: operands first, and what is in order stays."""
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(2)]
    for _ in range(data.draw(st.integers(1, 12))):
        args = tuple(data.draw(st.sampled_from(nodes)) for _ in range(2))
        nodes.append(graph.call_function(torch.add, args))
    graph.output(nodes[-1])
    before = [n for n in graph.nodes if n.op == "call_function"]
    _sort(graph)
    assert [n for n in graph.nodes if n.op == "call_function"] == before
    moved = data.draw(st.sampled_from(before))
    nodes[0].append(moved)  # now perhaps before its operands
    _sort(graph)
    graph.lint()
    after = [n for n in graph.nodes if n.op == "call_function"]
    assert len(after) == len(before)
