"""Sizes that the model's code branched on: other sizes are refused where the branch would go another way, and served
where it would not."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch import nn

import moec
from moec.capture import capture
from moec.guards import _only_large, size_guards
from moec.plan import Plan
from moec.runtime.errors import MoecError


class Chunked(nn.Module):
    """Sums chunks of four positions, one after another: the loop is unrolled for a number of chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        y = self.up(x)
        padded = nn.functional.pad(y, (0, 0, 0, -y.shape[1] % 4))
        state = torch.zeros_like(padded[:, :4])
        for i in range(padded.shape[1] // 4):
            state = torch.tanh(state + padded[:, 4 * i : 4 * i + 4])
        return state.mean()


class Plain(Chunked):
    def forward(self, x):
        return self.up(x).tanh().mean()


def example(b: int, s: int) -> torch.Tensor:
    return torch.randn(b, s, 8, generator=torch.Generator().manual_seed(s))


def test_other_sizes_are_served_or_refused():
    torch.manual_seed(0)
    program = capture(Chunked(), (example(4, 6),), training=True)
    (name,) = program.inputs
    assert program.size_problems({name: (2, 7, 8)}, 2) == []
    assert program.size_problems({name: (1, 7, 8)}) == [], "a batch of one is no other branch"
    for s in (3, 9, 4096):
        (problem,) = program.size_problems({name: (2, s, 8)}, 2)
        assert f"size 1 of '{program.inputs[name].path}' = {s}" in problem


def test_a_model_without_branches_has_no_guards():
    program = capture(Plain(), (example(4, 6),), training=True)
    assert program.size_guards == size_guards(program.graph) == ()


def test_the_parallel_module_refuses():
    torch.manual_seed(0)
    model = moec.parallelize(Chunked(), Plan(), example_inputs=(example(4, 6),))
    want = Chunked()
    want.load_state_dict(moec.full_state_dict(model))
    for b, s in ((1, 5), (3, 8)):
        torch.testing.assert_close(model(example(b, s)), want(example(b, s)))
    with pytest.raises(MoecError, match=r"size 1 of .* = 9.*pass examples of the sizes"):
        model(example(2, 9))


def test_check_proves_each_number_of_chunks():
    torch.manual_seed(0)
    for s in (3, 6, 11):
        assert moec.check(Chunked(), Plan(dp=2), example_inputs=(example(4, s),), world_size=2).ok


def test_that_a_size_is_not_one_is_no_guard():
    s = sympy.Symbol("s", positive=True)
    assert _only_large(sympy.Ne(8 * s, 1)) and _only_large(s >= 2) and _only_large(s > 1)
    assert not _only_large(sympy.Eq(s, 1)) and not _only_large(s >= 9) and not _only_large(sympy.Ne(s, 7))
    assert not _only_large(s <= 64)
