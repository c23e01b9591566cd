"""Capture of what surrounds MoE blocks: outputs, constants, no_grad, loss functions, refusals."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from capture_models import run
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moec.capture import capture, skeleton
from moec.program import op_name
from moec.runtime import torch_compat
from moec.runtime.errors import MoecError


@dataclass
class Answer:
    y: Tensor
    note: str
    nothing: Tensor | None = None


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.register_buffer("shift", torch.randn(6))
        self.table = torch.arange(6.0)

    def forward(self, x, scale=2.0, position=None):
        with torch.no_grad():
            frozen = self.a(x).relu()
        y = self.b(x) * frozen + self.shift * scale + self.table
        if position is not None:
            y = y + position[:, None].to(y.dtype)
        return Answer(y, note="fine")


def test_outputs_constants_buffers_and_no_grad():
    model = Small()
    program = capture(model, (torch.zeros(3, 5, 6),), {"scale": 3.0}, training=True)
    x = torch.randn(4, 2, 6)
    flat = run(program, model, {"0": x})
    leaves = [flat[o.index] if o.index is not None else o.constant for o in program.outputs]
    got, want = pytree.tree_unflatten(leaves, program.out_spec), model(x, scale=3.0)
    assert isinstance(got, Answer) and got.note == "fine" and got.nothing is None
    torch.testing.assert_close(got.y, want.y)
    got.y.sum().backward()
    assert model.a.weight.grad is None and model.b.weight.grad is not None  # what no_grad covered stays covered
    assert {s.name for s in program.params.values() if s.buffer} == {"shift"}
    assert any(torch.equal(c, model.table) for c in program.constants.values())
    (spec,) = program.inputs.values()
    assert (spec.path, spec.batch_dim, spec.static) == ("0", 0, (None, None, 6))


def test_which_dims_are_the_batch():
    def batch_dims(x, position, inputs=None):
        program = capture(Small(), (x,), {"position": position}, training=True, inputs=inputs)
        return {s.path: s.batch_dim for s in program.inputs.values()}, len(program.batch_symbols)

    x = torch.zeros(3, 5, 6)
    assert batch_dims(x, torch.zeros(5))[0] == {"0": 0, "position": None}
    assert batch_dims(torch.zeros(1, 5, 6), torch.zeros(5)) == ({"0": 0, "position": None}, 1)
    assert batch_dims(x, torch.zeros(5), {"0": 1})[0] == {"0": 1, "position": None}
    with pytest.raises(MoecError, match="no tensor input is called 'positon'"):
        batch_dims(x, torch.zeros(5), {"positon": None})


def test_a_loss_function_is_captured_with_the_model():
    model = Small()
    program = capture(model, (torch.zeros(3, 5, 6),), training=True, loss_fn=lambda out, x: F.mse_loss(out.y, x))
    x = torch.randn(2, 7, 6)
    assert program.outputs[0].path == "loss"
    torch.testing.assert_close(run(program, model, {"0": x})[0], F.mse_loss(model(x).y, x))


def test_skeleton_has_no_storage_and_leaves_the_model_alone():
    model = Small().eval()
    model.b.weight = model.a.weight
    twin, _ = skeleton(model, training=True)
    assert all(torch_compat.is_fake(t) for t in (*twin.parameters(), *twin.buffers()))
    assert twin.a.weight is twin.b.weight and isinstance(twin.a.weight, nn.Parameter)
    assert twin.training and not model.training and not torch_compat.is_fake(model.a.weight)


class Writes(Small):
    def forward(self, x):
        x.mul_(2)
        return self.a(x)


class Draws(Small):
    def forward(self, x):
        return self.a(F.dropout(x, 0.3, self.training))


class Branches(Small):
    def forward(self, x):
        return self.a(x) if x.sum() > 0 else self.b(x)


@pytest.mark.parametrize(
    ("model", "message"),
    [(Writes, "is written to"), (Draws, "p = 0.3"), (Branches, "cannot trace")],
)
def test_refusals(model, message):
    with pytest.raises(MoecError, match=message):
        capture(model(), (torch.zeros(3, 6),), training=True)


def test_no_examples_and_none_to_be_had():
    with pytest.raises(MoecError, match="dummy_inputs"):
        capture(Small(), training=True)


class LossPerSequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 5)

    def forward(self, x, labels):
        each = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="none")
        return each.view(labels.shape).sum(1)


def test_a_loss_that_is_not_reduced_keeps_its_shape():
    """torch 2.13 itself records a scalar here, and then cannot trace the view."""
    model = LossPerSequence()
    program = capture(model, (torch.zeros(3, 4, 6), torch.zeros(3, 4, dtype=torch.long)), training=True)
    (loss,) = (n for n in program.graph.nodes if op_name(n) == "aten.cross_entropy_loss")
    assert loss.meta["val"].dim() == 1
    x, labels = torch.randn(2, 7, 6), torch.randint(0, 5, (2, 7))
    torch.testing.assert_close(run(program, model, {"0": x, "1": labels})[0], model(x, labels))
