"""Bodies: text and back, values and derivatives against PyTorch's own functions under autograd, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from moec.runtime.body import ROWSUM, Body, Buffers, Builder, Input, Step
from moec.runtime.errors import MoecError
from moec.runtime.pointwise import PRIMITIVES, ROUNDED

SWIGLU = "g = chunk(h0, 2, 0); u = chunk(h0, 2, 1); t0 = silu(g); t1 = mul(t0, u); return t1"
# What the primitives mean, written down once more.
MEANING = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b,
    "neg": lambda a: -a, "abs": lambda a: a.abs(), "square": lambda a: a**2, "exp": lambda a: a.exp(),
    "log": lambda a: a.log(), "sqrt": lambda a: a**0.5, "rsqrt": lambda a: a**-0.5, "erf": lambda a: a.erf(),
    "tanh": lambda a: a.tanh(), "sigmoid": lambda a: 1 / (1 + (-a).exp()), "silu": lambda a: a * a.sigmoid(),
    "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"), "rounded": lambda a: a * 1,
    "maximum": lambda a, b: torch.maximum(*_both(a, b)), "minimum": lambda a, b: torch.minimum(*_both(a, b)),
    "clamp": lambda a, low, high: a.clamp(low, high),
}  # fmt: skip
POSITIVE = {"log", "sqrt", "rsqrt"}
"""Drawn of the exponential of an operand."""


def _both(a, b):
    like = a if isinstance(a, torch.Tensor) else b
    return [x if isinstance(x, torch.Tensor) else torch.full_like(like, x) for x in (a, b)]


@st.composite
def bodies(draw, rows: int = 2) -> Body:
    """One or two products, cut in one way; every primitive of a model; up to ``rows`` rows among the operands."""
    products = draw(st.integers(1, 2))
    form, parts = draw(st.sampled_from([("whole", 1), ("chunk", 2), ("every", 2), ("chunk", 3)]))
    inputs = [Input(f"x{i}_{j}", form, i, parts, j) for i in range(products) for j in range(parts)]
    inputs += [Input(f"r{i}", "row", i) for i in range(draw(st.integers(0, rows)))]
    build = Builder(*inputs)
    names = [i.name for i in inputs]
    numbers = st.sampled_from([1.702, 7.0, -0.5, 2.0])
    for _ in range(draw(st.integers(0, 6))):
        op = draw(st.sampled_from(sorted(MEANING)))
        operands: list = [draw(st.sampled_from(names))]
        if op in POSITIVE:
            operands = [build.step("exp", build.step("tanh", operands[0]))]
        elif op == "exp":
            operands = [build.step("tanh", operands[0])]
        elif op == "clamp":
            operands += [draw(st.sampled_from([-math.inf, -0.5])), draw(st.sampled_from([math.inf, 0.7]))]
        elif op == "div":
            operands += [build.step("exp", build.step("sigmoid", draw(st.sampled_from(names))))]
        elif len(PRIMITIVES[op].derivative) == 2:
            operands += [draw(st.sampled_from(names) | numbers)]
            if draw(st.booleans()):
                operands.reverse()
        names.append(build.step(op, *operands))
    return build.body(build.step("add", names[0], names[-1]))


def meaning(body: Body, products, rows, grad=None):
    """``body`` in ordinary operations."""
    width = products[0].shape[1] // body.inputs[0].parts
    values = {}
    for i in body.inputs:
        h = products[i.source] if i.form != "row" else None
        if i.form == "row":
            values[i.name] = rows[i.source].unsqueeze(1)
        elif i.form == "every":
            values[i.name] = h.unflatten(1, (width, i.parts))[:, :, i.index]
        else:
            values[i.name] = h.unflatten(1, (i.parts, width))[:, i.index]
    for s in body.steps:
        values[s.name] = MEANING[s.op](*[values[o] if isinstance(o, str) else o for o in s.operands])
    return values[body.results[0]].expand(-1, width)


@given(bodies())
def test_text_and_back(body):
    assert Body.parse(body.text()) == body
    derivative = body.derivative()
    assert Body.parse(derivative.text()) == derivative and len(derivative.results) == len(body.inputs)
    assert body.text().isascii() and body.text() == body.text()


@given(bodies(), st.integers(0, 99), st.booleans())
def test_values_and_derivatives_are_those_of_autograd(body, seed, reuse):
    gen = torch.Generator().manual_seed(seed)
    parts = body.inputs[0].parts
    buffers = Buffers() if reuse else None
    derivative = body.derivative(value=True)
    for N in (3, 0, 2):  # blocks of unequal length may share buffers
        h = [torch.randn(N, 4 * parts, generator=gen, dtype=torch.float64) for _ in range(body.products)]
        r = [torch.randn(N, generator=gen, dtype=torch.float64) for _ in range(body.rows)]
        leaves = [t.clone().requires_grad_() for t in (*h, *r)]
        expected = meaning(body, leaves[: len(h)], leaves[len(h) :])
        dy = torch.randn(N, 4, generator=gen, dtype=torch.float64)
        (y,) = body.run(h, r, buffers=buffers)
        torch.testing.assert_close(y, expected.detach(), rtol=1e-12, atol=1e-12)
        out = [torch.empty(N) if i.form == "row" else torch.empty(N, 8)[:, ::2] for i in (body.inputs[0], *body.inputs)]
        y, *got = derivative.run(h, r, dy, buffers=buffers, out=[o.double() for o in out] if reuse else ())
        torch.testing.assert_close(y, expected.detach(), rtol=1e-12, atol=1e-12)
        wanted = [
            torch.zeros_like(leaf) if g is None else g
            for leaf, g in zip(leaves, torch.autograd.grad(expected, leaves, dy, allow_unused=True), strict=True)
        ]
        for i, g in zip(body.inputs, got, strict=True):
            want = wanted[len(h) + i.source] if i.form == "row" else i.of(wanted[i.source])
            torch.testing.assert_close(g, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("op", sorted(p for p in PRIMITIVES if None not in PRIMITIVES[p].derivative or p == "clamp"))
def test_kinks_have_the_gradients_of_pytorch(op):
    """At ties, at bounds and at 0; and every primitive of a model is among those that the other tests know."""
    assert op in MEANING
    count = len(PRIMITIVES[op].derivative)
    numbers = (-0.5, 0.5) if op == "clamp" else ()
    points = torch.tensor([-1.0, -0.5, 0.0, 0.5, 2.0], dtype=torch.float64)
    if op in POSITIVE | {"div", "abs"}:
        points = points.abs() + 0.25
    inputs = [Input(f"x{i}", "whole", i) for i in range(count - len(numbers))]
    body = Body(tuple(inputs), (Step("y", op, (*[i.name for i in inputs], *numbers)),), ("y",))
    h = [points[:, None].clone().requires_grad_() for _ in inputs]
    dy = torch.full((5, 1), 3.0, dtype=torch.float64)
    wanted = torch.autograd.grad(MEANING[op](*h, *numbers), h, dy)
    got = body.derivative().run([x.detach() for x in h], grad=dy)
    torch.testing.assert_close(got, list(wanted), rtol=1e-14, atol=1e-14)


def test_one_rounding_in_bf16():
    gen = torch.Generator().manual_seed(0)
    h = torch.randn(64, 8, generator=gen).bfloat16()
    (y,) = Body.parse(SWIGLU).run([h])
    g, u = h.double().chunk(2, 1)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, (F.silu(g) * u).float().bfloat16())
    (twice,) = Body.parse(SWIGLU.replace("t1 = mul(t0, u)", "s = rounded(t0); t1 = mul(s, u)")).run([h])
    assert torch.equal(twice, F.silu(h.chunk(2, 1)[0]) * h.chunk(2, 1)[1])


def test_a_gradient_of_a_row_is_a_sum_over_columns():
    body = Body.parse("x = whole(h0); w = row(r0); y = mul(x, w); return y")
    assert body.derivative().text().count(ROWSUM) == 1
    h, w = torch.randn(3, 5), torch.randn(3)
    dh, dw = body.derivative().run([h], [w], torch.ones(3, 5))
    torch.testing.assert_close(dw, h.sum(1))
    torch.testing.assert_close(dh, w[:, None].expand(3, 5))


def test_nothing_is_computed_twice_or_in_vain():
    derivative = Body.parse("x = whole(h0); a = sigmoid(x); b = mul(x, a); c = exp(b); return b").derivative()
    assert [s.op for s in derivative.steps].count("sigmoid") == 1
    assert "exp" not in derivative.text()
    assert ROUNDED in PRIMITIVES


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = whole(h0); y = cosh(x); return y", "'cosh' is no primitive"),
        ("x = whole(h0); y = mul(x); return y", "mul takes 2"),
        ("x = whole(h0); y = mul(x, z); return y", "z not defined before"),
        ("x = whole(h0); y = mul(1.0, 2.0); return y", "has no meaning"),
        ("x = chunk(h0, 2, 2); return x", "has no meaning"),
        ("x = whole(r0); return x", "whole is a part of h0"),
        ("x = whole(h0); y = relu(x)", "no return"),
        ("x = whole(h0); y = relu(x); return z", "z is not defined"),
        ("x = row(r0); return x", "no input is a part of a product"),
        ("x = whole(h0); y = relu(x); u = whole(h1); return y", "after a step"),
        ("x = __import__('os'); return x", "no number"),
        ("x +", "not a body"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused(text, problem):
    with pytest.raises(MoecError, match=problem.replace("(", r"\(")):
        Body.parse(text)


def test_widths_that_do_not_fit_are_refused():
    body = Body.parse(SWIGLU)
    body.check_widths([8], "here")
    for widths in ([7], [8, 8], []):
        with pytest.raises(MoecError, match="do not fit the body"):
            body.check_widths(widths, "here")
