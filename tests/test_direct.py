"""Graphs whose operators are called directly: the operators' bits, forward and backward, and what watches operators
misses none."""

import grid
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.profiler import ProfilerActivity, profile

import moec
from moec.runtime.direct import direct
from moec.runtime.torch_compat import WAIT, observed

ops = torch.ops.moec
SWIGLU = "x = whole(h0); g = whole(h1); s = silu(x); y = mul(s, g); return y"


def experts_after_permute() -> fx.GraphModule:
    """Tokens, ids and weights of experts -> what the experts make of the permuted rows."""
    g = fx.Graph()
    x, ids, gate, up, down = (g.placeholder(n) for n in ("x", "ids", "gate", "up", "down"))
    permuted = g.call_function(ops.permute.default, (x, ids, 3))
    rows, counts = (g.call_function(lambda t, i: t[i], (permuted, i)) for i in range(2))
    y = g.call_function(ops.experts_rows.default, (rows, counts, [gate, up], [], down, None, SWIGLU))
    g.output(g.call_function(lambda t: t[0], (y,)))
    return fx.GraphModule(nn.Module(), g)


OPERATORS = experts_after_permute()
DIRECT = direct(OPERATORS)


@given(st.lists(st.booleans(), min_size=4, max_size=4), st.integers(0, 5), st.integers(1, 2))
def test_values_and_gradients_are_the_operators(trained, tokens, times):
    """Some weights frozen, lists of tensors among the operands, a second backward of what one forward recorded."""
    gen = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, 3, generator=gen).argsort(1)[:, :2]
    shapes = ((tokens, 8), (3, 8, 6), (3, 8, 6), (3, 6, 8))
    floats = [torch.randn(n, generator=gen) for n in shapes]
    found = []
    for module in (OPERATORS, DIRECT):
        x, *weights = leaves = [t.clone().requires_grad_(r) for t, r in zip(floats, trained, strict=True)]
        y = module(x, ids, *weights)
        assert y.requires_grad == any(trained)
        for _ in range(times if any(trained) else 0):
            y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape), retain_graph=True)
        found.append([y.detach(), *(t.grad for t in leaves)])
    for want, got in zip(*found, strict=True):
        assert (want is None) == (got is None) and (want is None or torch.equal(want, got))


def test_an_operator_without_a_derivative_says_so():
    """In the backward, as the operator does; its results do not pass for constants."""
    g = fx.Graph()
    args = g.placeholder("h"), [6, 6], g.placeholder("counts"), SWIGLU, "mxfp8", False
    g.output(g.call_function(ops.quantise_act.default, args))
    module = fx.GraphModule(nn.Module(), g)
    for run in (module, direct(module)):
        q, *_ = run(torch.randn(32, 12, requires_grad=True), torch.tensor([3]))
        with pytest.raises(RuntimeError, match="no autograd formula"):
            q.float().sum().backward()


def test_a_wait_waits_and_gives_what_it_was_given(monkeypatch):
    waited = []
    monkeypatch.setattr("moec.runtime.direct.wait", waited.append)
    g = fx.Graph()
    g.output(g.call_function(WAIT, (g.placeholder("x"),)))
    x = 2 * torch.randn(3, requires_grad=True)
    assert direct(fx.GraphModule(nn.Module(), g))(x) is x
    assert len(waited) == 1 and waited[0] is x


def test_operators_are_gone_from_the_graph():
    targets = {n.target for n in DIRECT.graph.nodes}
    assert not targets & {ops.permute.default, ops.experts_rows.default}
    assert {ops.permute.default, ops.experts_rows.default} <= {n.target for n in OPERATORS.graph.nodes}


def test_a_backward_of_a_backward_is_refused_as_the_operators_refuse_it():
    x, gate, up, down = (torch.randn(n, requires_grad=True) for n in ((2, 8), (3, 8, 6), (3, 8, 6), (3, 6, 8)))
    for module in (OPERATORS, DIRECT):
        y = module(x, torch.tensor([[0], [2]]), gate, up, down)
        (once,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd"):
            once.sum().backward()


def test_who_watches_sees_operators():
    """The same loss and gradients under a profiler, which sees moec's operators of the forward; nobody else pays."""
    model = grid.parallelize("plain", grid.build("plain"), moec.Plan(), grid.batch())
    grads, seen = [], []
    for watched in (False, True):
        model.zero_grad()
        assert not observed()
        if watched:
            with profile(activities=[ProfilerActivity.CPU]) as p:
                assert observed()
                model(**grid.batch())["loss"].backward()
            seen = [e.key for e in p.key_averages()]
        else:
            model(**grid.batch())["loss"].backward()
        grads.append([q.grad.clone() for q in model.parameters()])
    assert {"moec::route_counted", "moec::experts", "moec::experts_backward"} <= set(seen)
    assert all(map(torch.equal, *grads))
