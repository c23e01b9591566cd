"""The elementwise functions that generated code is made of: one table, one line each.

Arithmetic is that of the *computing* dtype (fp32; fp64 for fp64), whatever dtype tensors are stored in: ``rounded``
says where a value is rounded to the storage dtype in between.  Kinks have PyTorch's gradients: relu 0 at 0, clamp 1 on
its bounds, maximum and minimum one half each where both operands are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Primitive:
    """A function of ``len(derivative)`` operands, each a tensor or a number."""

    name: str
    torch: Callable[..., Tensor]
    """What computes it on a CPU: ``torch(*operands, out=None)``; ``out`` is where the result goes, if given."""
    triton: str
    """The same as an expression of a Triton kernel: ``{0}``, ``{1}`` … are the operands, values of the computing dtype;
    ``{storage}`` and ``{computing}`` are the two dtypes."""
    derivative: tuple[str | None, ...]
    """For each operand an expression of primitives for its gradient, of the operands ``a``, ``b``, ``c``, the result
    ``y`` and its gradient ``g``; None where it has none (a bound, a step)."""


ROUNDED = "rounded"
"""The primitive whose torch function takes the storage dtype as one more operand."""


def _tensors(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``fn`` of two tensors, for operands of which one may be a number."""

    def call(a: Tensor | float, b: Tensor | float, out: Tensor | None = None) -> Tensor:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return fn(a, b, out=out)
        like = a if isinstance(a, Tensor) else b
        a, b = (x if isinstance(x, Tensor) else like.new_full((), x) for x in (a, b))  # type: ignore[union-attr]
        return fn(a, b, out=out)

    return call


def _backward(op, *constants: object, **named: object) -> Callable[..., Tensor]:
    """A gradient operator of PyTorch, whose ``out`` has a name of its own."""

    def call(g: Tensor, a: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            return op.default(g, a, *constants, **named)
        return op.grad_input(g, a, *constants, **named, grad_input=out)

    return call


def _gelu(approximate: str) -> Callable[..., Tensor]:
    def call(a: Tensor, out: Tensor | None = None) -> Tensor:
        return aten.gelu(a, approximate=approximate) if out is None else aten.gelu(a, approximate=approximate, out=out)

    return call


def _silu(a: Tensor, out: Tensor | None = None) -> Tensor:
    return aten.silu(a) if out is None else aten.silu(a, out=out)


def _relu(a: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.relu(a) if out is None else aten.relu(a, out=out)


def _above(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """1 where a > b, one half where both are equal, else 0."""
    return torch.heaviside(torch.sub(a, b), a.new_full((), 0.5), out=out)


def _within(a: Tensor, low: float, high: float, out: Tensor | None = None) -> Tensor:
    """1 where low <= a <= high, else 0."""
    inside = (a >= low).logical_and_(a <= high)
    return inside.to(a.dtype) if out is None else out.copy_(inside)


def _rounded(a: Tensor, storage: torch.dtype, out: Tensor | None = None) -> Tensor:
    near = a.to(storage)
    return near.to(a.dtype, copy=True) if out is None else out.copy_(near)


def _tanh(x: str) -> str:
    return f"(2.0 * tl.sigmoid(2.0 * {x}) - 1.0)"


def _inner(x: str) -> str:
    """Of which gelu_tanh takes the tanh."""
    return f"(0.7978845608028654 * ({x} + 0.044715 * {x} * {x} * {x}))"


_NORMAL = "0.3989422804014327 * tl.exp(-0.5 * {1} * {1})"
_SLOPE = "0.7978845608028654 * (1.0 + 0.134145 * {1} * {1})"
_TANH_SQUARED = f"{_tanh(_inner('{1}'))} * {_tanh(_inner('{1}'))}"

_TABLE = (
    Primitive("add", _tensors(torch.add), "{0} + {1}", ("g", "g")),
    Primitive("sub", _tensors(torch.sub), "{0} - {1}", ("g", "neg(g)")),
    Primitive("mul", _tensors(torch.mul), "{0} * {1}", ("mul(g, b)", "mul(g, a)")),
    Primitive("div", _tensors(torch.div), "{0} / {1}", ("div(g, b)", "neg(mul(g, div(y, b)))")),
    Primitive("neg", torch.neg, "-{0}", ("neg(g)",)),
    Primitive(
        "maximum", _tensors(torch.maximum), "tl.maximum({0}, {1})", ("mul(g, above(a, b))", "mul(g, above(b, a))"),
    ),
    Primitive(
        "minimum", _tensors(torch.minimum), "tl.minimum({0}, {1})", ("mul(g, above(b, a))", "mul(g, above(a, b))"),
    ),
    Primitive("clamp", torch.clamp, "tl.minimum(tl.maximum({0}, {1}), {2})", ("mul(g, within(a, b, c))", None, None)),
    Primitive("abs", torch.abs, "tl.abs({0})", ("mul(g, sign(a))",)),
    Primitive("square", torch.square, "{0} * {0}", ("mul(g, mul(a, 2.0))",)),
    Primitive("exp", torch.exp, "tl.exp({0})", ("mul(g, y)",)),
    Primitive("log", torch.log, "tl.log({0})", ("div(g, a)",)),
    Primitive("sqrt", torch.sqrt, "tl.sqrt({0})", ("div(g, mul(y, 2.0))",)),
    Primitive("rsqrt", torch.rsqrt, "tl.rsqrt({0})", ("mul(mul(g, -0.5), mul(y, square(y)))",)),
    Primitive("erf", torch.erf, "tl.erf({0})", (f"mul(g, mul(exp(neg(square(a))), {2 / math.sqrt(math.pi)!r}))",)),
    Primitive("tanh", torch.tanh, _tanh("{0}"), ("tanh_backward(g, y)",)),
    Primitive("sigmoid", torch.sigmoid, "tl.sigmoid({0})", ("sigmoid_backward(g, y)",)),
    Primitive("silu", _silu, "{0} * tl.sigmoid({0})", ("silu_backward(g, a)",)),
    Primitive("relu", _relu, "tl.maximum({0}, 0.0)", ("relu_backward(g, a)",)),
    Primitive("gelu", _gelu("none"), "0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476))", ("gelu_backward(g, a)",)),
    Primitive(
        "gelu_tanh", _gelu("tanh"), f"0.5 * {{0}} * (1.0 + {_tanh(_inner('{0}'))})", ("gelu_tanh_backward(g, a)",),
    ),
    Primitive(ROUNDED, _rounded, "{0}.to({storage}).to({computing})", ("rounded(g)",)),
    # What derivatives are made of: steps without a gradient, and products that PyTorch computes in one go.
    Primitive("sign", torch.sign, "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))", (None,)),
    Primitive("above", _tensors(_above), "tl.where({0} > {1}, 1.0, tl.where({0} < {1}, 0.0, 0.5))", (None, None)),
    Primitive("within", _within, "tl.where(({0} >= {1}) & ({0} <= {2}), 1.0, 0.0)", (None, None, None)),
    Primitive("tanh_backward", _backward(aten.tanh_backward), "{0} * (1.0 - {1} * {1})", (None, None)),
    Primitive("sigmoid_backward", _backward(aten.sigmoid_backward), "{0} * {1} * (1.0 - {1})", (None, None)),
    Primitive(
        "silu_backward", _backward(aten.silu_backward),
        "{0} * tl.sigmoid({1}) * (1.0 + {1} * (1.0 - tl.sigmoid({1})))", (None, None),
    ),
    Primitive("relu_backward", _backward(aten.threshold_backward, 0), "tl.where({1} > 0, {0}, 0.0)", (None, None)),
    Primitive(
        "gelu_backward", _backward(aten.gelu_backward),
        f"{{0}} * (0.5 * (1.0 + tl.erf({{1}} * 0.7071067811865476)) + {{1}} * {_NORMAL})", (None, None),
    ),
    Primitive(
        "gelu_tanh_backward", _backward(aten.gelu_backward, approximate="tanh"),
        f"0.5 * {{0}} * (1.0 + {_tanh(_inner('{1}'))} + {{1}} * {_SLOPE} * (1.0 - {_TANH_SQUARED}))", (None, None),
    ),
)  # fmt: skip

PRIMITIVES: dict[str, Primitive] = {p.name: p for p in _TABLE}
