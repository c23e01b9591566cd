"""normalize: each rewrite gives one spelling and the same values, on the shapes it is for and not on others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moec.capture import capture
from moec.check import check
from moec.passes import manager
from moec.passes.normalize import normalize
from moec.plan import Plan
from moec.program import Program, op_name

X = (torch.randn(4, 6, 8),)
ALL = slice(None)
IDS = (torch.randint(0, 8, (4, 6)),)


def written(x, where, part):
    """A copy of x with ``part`` written to a place in it."""
    out = x.clone()
    out[where] = part
    return out


class Body(nn.Module):
    """A module whose forward is a function of (module, x); with a parameter, so that there is something to train."""

    def __init__(self, body) -> None:
        super().__init__()
        self.body = body
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return self.body(self, x)


def normalized(body, args=X) -> tuple[Program, Program]:
    program = capture(Body(body), args, {}, training=True)
    return program, manager.run(program, Plan(), [normalize])


def ops(program: Program) -> set[str]:
    return set(program.op_counts())


def same_values(body, args=X) -> None:
    model = Body(body)
    program = manager.run(capture(model, args, {}, training=True), Plan(), [normalize])
    values = [model.w if n.name in program.params else args[0] for n in program.placeholders()]
    want = model(*args)
    (got,) = program.module(*values)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


SPELLINGS = {
    "view": (lambda m, x: (x @ m.w).view(-1, 8), {"aten.view"}, {"aten.reshape"}),
    "flatten": (lambda m, x: (x @ m.w).flatten(1), {"aten.flatten", "aten.view"}, {"aten.reshape"}),
    "flatten the batch": (lambda m, x: (x @ m.w).flatten(0, 1), {"aten.flatten", "aten.view"}, {"aten.reshape"}),
    "unflatten": (lambda m, x: (x @ m.w).unflatten(-1, (2, 4)), {"aten.unflatten", "aten.view"}, {"aten.reshape"}),
    "squeeze": (lambda m, x: (x @ m.w)[:, :, :1].squeeze(-1), {"aten.squeeze"}, {"aten.reshape"}),
    "reshape of a transposed tensor": (
        lambda m, x: (x @ m.w).transpose(1, 2).reshape(x.shape[0], -1),
        {"aten._unsafe_view", "aten.clone", "aten.view"},
        {"aten.reshape"},
    ),
    "chunk": (lambda m, x: torch.mul(*(x @ m.w).chunk(2, -1)), {"aten.chunk"}, {"aten.split"}),
    "contiguous and clone": (lambda m, x: (x @ m.w).contiguous().clone(), {"aten.clone", "aten.contiguous"}, set()),
    "pad": (lambda m, x: F.pad(x @ m.w, (1, 2)), {"aten.pad"}, {"aten.constant_pad_nd"}),
    "slice of everything": (lambda m, x: (x @ m.w)[:, :, 0:], {"aten.slice"}, set()),
    "written to one feature of everything": (
        lambda m, x: written(x @ m.w, (ALL, ALL, 2), x[..., 0]),
        {"aten.slice_scatter"},
        {"aten.select_scatter"},
    ),
    "cast to what it is": (lambda m, x: (x @ m.w).to(torch.float32), {"aten._to_copy"}, set()),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_one_spelling(name) -> None:
    body, gone, there = SPELLINGS[name]
    _, program = normalized(body)
    assert not gone & ops(program), program.render()
    assert there <= ops(program), program.render()
    same_values(body)


KEPT = {
    "a slice of a part": (lambda m, x: (x @ m.w)[:, 1:3], "aten.slice"),
    "written to a part of the batch": (lambda m, x: written(x @ m.w, slice(1, None), x[1:]), "aten.slice_scatter"),
    "a cast": (lambda m, x: (x @ m.w).to(torch.float64), "aten._to_copy"),
    "a mean within a token": (lambda m, x: (x @ m.w).mean(-1), "aten.mean"),
    "reflect padding": (lambda m, x: F.pad(x @ m.w, (1, 2), mode="reflect"), "aten.pad"),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_means_something_stays(name) -> None:
    body, op = KEPT[name]
    _, program = normalized(body)
    found = ops(program)
    assert op in found or any("reflection" in o for o in found), program.render()
    same_values(body)


@pytest.mark.parametrize("dims", [(), (0,), ([0, 1],), (0, True)], ids=str)
def test_a_mean_over_the_batch_is_a_sum_over_a_count(dims) -> None:
    def body(m, x):
        return (x @ m.w).mean(*dims)

    _, program = normalized(body)
    assert "aten.mean" not in ops(program) and {"aten.sum", "aten.div"} <= ops(program)
    same_values(body)


def test_a_mean_loss_counts_the_labels_of_the_global_batch() -> None:
    """Ranks with three, one and no valid labels: the mean of means would be another number."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Embedding(8, 8)

        def forward(self, ids, labels):
            return {"loss": F.cross_entropy(self.head(ids).flatten(0, 1), labels.flatten())}

    labels = torch.full((4, 6), -100)
    labels[0, :3], labels[1, 0], labels[3, 1:] = 1, 2, 5
    report = check(Loss(), Plan(4), example_inputs=(IDS[0], labels), world_size=4)
    assert report.ok, report
    program = manager.run(capture(Loss(), (IDS[0], labels), {}, training=True), Plan(), [normalize])
    (loss,) = (n for n in program.graph.nodes if n.op == "call_function" and op_name(n) == "aten.cross_entropy_loss")
    assert loss.args[3] == 2


def test_a_summed_loss_is_left() -> None:
    def body(m, ids):
        return F.cross_entropy(m.w[ids].flatten(0, 1), ids.flatten(), reduction="sum")

    _, program = normalized(body, IDS)
    assert "aten.div" not in ops(program)


@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
def test_a_mean_with_class_weights_is_a_sum_over_the_weights_of_the_labels(loss) -> None:
    def body(m, ids):
        return loss(m.w[ids].flatten(0, 1), ids.flatten(), weight=torch.linspace(0.5, 2, 8), ignore_index=3)

    _, program = normalized(body, IDS)
    assert "aten.div" in ops(program)
    same_values(body, IDS)


def test_an_index_by_arange_over_the_batch_is_no_lookup() -> None:
    class Last(nn.Module):
        """The batch dim is indexed by its own numbers, the sequence by constants."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 8)

        def forward(self, ids):
            x = self.embed(ids)
            return {"loss": x[torch.arange(ids.shape[0])[:, None], torch.arange(2)[None, :]].square().sum()}

    program = manager.run(capture(Last(), IDS, {}, training=True), Plan(), [normalize])
    (index,) = (n for n in program.graph.nodes if n.op == "call_function" and op_name(n) == "aten.index")
    assert index.args[1][0] is None and index.args[1][1] is not None
    assert check(Last(), Plan(2), example_inputs=IDS, world_size=2).ok


def test_normalizing_twice_changes_nothing() -> None:
    _, once = normalized(lambda m, x: torch.mul(*(x @ m.w).chunk(2, -1)).view(-1, 4).mean())
    twice = normalize.run(once.fork(), Plan())
    assert once.op_counts() == twice.op_counts()
    assert [n.args[1:] for n in once.graph.nodes if n.op == "call_function" and "reshape" in n.name] == [
        n.args[1:] for n in twice.graph.nodes if n.op == "call_function" and "reshape" in n.name
    ]
