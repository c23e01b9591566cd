"""Ops of the FP8 recipe ``delayed``: what they read of a history, and what their backward leaves in it."""

from __future__ import annotations

import pytest
import torch

from moec.runtime.errors import MoecError

moec_ops = torch.ops.moec


def test_what_ops_read_and_learn():
    history = torch.tensor([[99.0, 1, 4, 2], [99, 0, 0, 0], [99, 7, 8, 5]], requires_grad=True)
    x, stack = torch.randn(5, 6), torch.randn(3, 6, 7)
    past = moec_ops.past_amax(history, 0, x, "delayed", "rows")
    assert torch.equal(past, torch.tensor([[4.0]])) and not past.requires_grad
    assert torch.equal(moec_ops.past_amax(history, 1, stack, "delayed", "stack"), torch.zeros(3, 1, 1))
    first, second = moec_ops.fan_max(history, 2)
    one = moec_ops.note_amax(first, torch.tensor([[3.0]]), torch.tensor([[[1.0]], [[6.0]], [[2.0]]]))
    two = moec_ops.note_amax(second, torch.tensor([[5.0]]), torch.tensor([[0.5]]))
    assert torch.equal(one, torch.tensor([[8.0]]))
    (grad,) = torch.autograd.grad([one, two], history, [torch.tensor([[0.25]]), torch.tensor([[0.75]])])
    assert torch.equal(grad[:, 0], torch.tensor([5.0, 6.0, 0.75])) and not grad[:, 1:].any()
    with pytest.raises(MoecError, match="history of shape"):
        moec_ops.past_amax(torch.ones(2, 4), 0, x, "delayed", "rows")


@pytest.mark.parametrize("op", ["past_amax", "note_amax", "fan_max"])
def test_ops_keep_their_promises(op):
    history = torch.rand(3, 5).requires_grad_()
    args = {
        "past_amax": (history, 1, torch.randn(2, 3, 4), "delayed", "stack"),
        "note_amax": (history, torch.rand(1, 1), torch.rand(2, 1, 1)),
        "fan_max": (history, 3),
    }[op]
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(moec_ops, op).default, args, test_utils=tests)
