"""hoist: what all uses of a parameter turn to R is turned once, before the ops on it alone; one epilogue sums it."""

from __future__ import annotations

import torch
from torch import nn

import moec
from moec import compiler
from moec.plan import Plan
from moec.program import op_name

X = torch.randn(4, 3, 6)


class Alone(nn.Module):
    """Every parameter passes through ops on it alone; ``twice`` in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.turned, self.twice, self.plain = (nn.Parameter(torch.randn(6, 6)) for _ in range(3))

    def forward(self, x):
        y = x @ self.turned.t().exp() + x @ self.plain
        return (y @ self.twice.t() * self.twice.reshape(36)[:6].sigmoid()).square().mean()


class Mixed(nn.Module):
    """``both`` meets another parameter before it meets the batch, and the batch as well: no use may speak for all."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.other = (nn.Parameter(torch.randn(6, 6)) for _ in range(2))

    def forward(self, x):
        return (x @ (self.both @ self.other) + x @ self.both.t()).square().mean()


def left(model: nn.Module) -> tuple[set[str], int]:
    """Parameters that the epilogue sums, and the sums that stay in the backward."""
    program = compiler.compile_program(model, Plan(dp=2), 2, (X[:2],), {}, training=True)
    names = {program.params[p].name for p in program.grad_reductions}
    return names, sum(op_name(n) == "moec.i_to_r" for n in program.graph.nodes if n.op == "call_function")


def test_ops_on_a_parameter_alone_are_no_obstacle() -> None:
    assert left(Alone()) == ({"turned", "twice", "plain"}, 0)
    report = moec.check(Alone(), Plan(dp=2), example_inputs=(X,), world_size=2)
    assert report.ok, report


def test_a_parameter_that_one_use_keeps_invariant() -> None:
    names, sums = left(Mixed())
    assert "both" not in names and sums == 2
    report = moec.check(Mixed(), Plan(dp=2), example_inputs=(X,), world_size=2)
    assert report.ok, report
