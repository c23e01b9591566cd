"""Ops that make FP8 operands of experts, against the ops that they stand for; what they keep, and refuse.

Legend: E experts, K features in, M columns of a first product.
"""

from __future__ import annotations

import pytest
import torch

from moec.check import _relative
from moec.runtime.errors import MoecError
from moec.runtime.fp8 import Recipe
from moec.runtime.kernels.experts_catalog import SEPARATE, SWIGLU

ops = torch.ops.moec
NOW = ["current", "rowwise", "blockwise", "mxfp8"]
E, K, M = 3, 40, 48


class Block:
    """Aligned rows, quantised, and first products' weights and biases."""

    def __init__(self, recipe, body, biased, dtype=torch.float64, rows=(3, 0, 5)):
        gen = torch.Generator().manual_seed(1)
        self.recipe, self.body, self.a = recipe, body, Recipe.parse(recipe).alignment
        self.counts = torch.tensor(rows)
        number = 1 if body is SWIGLU else 2
        draw = lambda *shape: torch.randn(*shape, generator=gen, dtype=dtype).requires_grad_()  # noqa: E731
        self.x = draw(sum(rows), K)
        self.w = [draw(E, K, 2 * M // number) for _ in range(number)]
        self.b = [draw(E, 2 * M // number) for _ in range(number)] if biased else []
        self.leaves = [self.x, *self.w, *self.b]

    def operands(self):
        rows = ops.align_rows(self.x, self.counts, self.a)
        self.q = ops.quantise(rows, None, None, self.counts, self.recipe, "rows", True)
        self.w_q = [ops.quantise(w, None, None, None, self.recipe, "stack", True) for w in self.w]
        return self.q, self.w_q

    def fused(self):
        q, w_q = self.operands()
        x, x_q, x_s, x_qT, x_sT = q
        w, w_n, w_s, w_nT, w_sT = zip(*w_q, strict=True)
        args = (x, w, self.b, self.counts, x_q, x_s, w_n, w_s, x_qT, x_sT, w_nT, w_sT, self.body, self.recipe, True)
        return args, ops.fp8_grouped_act(*args)

    def apart(self):
        q, w_q = self.operands()
        h = [ops.fp8_grouped_mm(q[0], w[0], self.counts, *q[1:3], *w[1:3], *q[3:], *w[3:], None, self.recipe, False)[0]
             for w in w_q]  # fmt: skip
        whole = (self.counts + self.a - 1) // self.a * self.a
        h = [ops.grouped_add(y, b, whole) for y, b in zip(h, self.b, strict=True)] if self.b else h
        gate, up = h if len(h) == 2 else h[0].chunk(2, 1)
        return ops.quantise(torch.nn.functional.silu(gate) * up, None, None, self.counts, self.recipe, "rows", True)

    def gradient(self, carrier):
        real = ops.align_rows(torch.ones(len(self.x), 1, dtype=carrier.dtype), self.counts, self.a)
        gen = torch.Generator().manual_seed(2)
        return torch.randn(carrier.shape, generator=gen, dtype=carrier.dtype) * real


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("body", [SWIGLU, SEPARATE])
@pytest.mark.parametrize("recipe", NOW)
def test_fp8_grouped_act_is_the_ops_that_it_replaces(recipe, body, biased):
    """Numbers and scales to the bit; gradients are made of equal FP8 numbers."""
    block = Block(recipe, body, biased)
    got, want = block.fused()[1], block.apart()
    for a, b in zip(got[1:5], want[1:], strict=True):
        assert a.dtype == b.dtype and torch.equal(a.float(), b.float())
    grads = [torch.autograd.grad(y[0], block.leaves, block.gradient(y[0])) for y in (got, want)]
    for a, b in zip(*grads, strict=True):
        assert a.stride() == b.stride() and _relative(a, b) < 1e-12


def kept(compute):
    """Bytes that autograd keeps, each memory once, and whether any of it has this shape."""
    memory = {}

    def pack(t):
        memory[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = compute()
    return y, sum(memory.values())


def test_what_is_kept():
    """Pre-activations in the wide dtype and FP8 numbers: no activation, nor anything on the way to it."""
    block = Block("mxfp8", SWIGLU, False, torch.float32, (64, 64, 64))
    (_, out), fused = kept(lambda: block.fused())
    _, apart = kept(block.apart)
    q = [*block.q[3:], *(t for w in block.w_q for t in w[3:])]  # transposed: rows, and weights
    exactly = out[5].nbytes + sum(t.nbytes for t in q) + 2 * block.counts.nbytes  # of align_rows too
    assert fused <= exactly + 64
    assert apart - fused == out[5].nbytes // 2, "silu(gate)"


@pytest.mark.parametrize("recipe", ["mxfp8"])
def test_opcheck(recipe):
    tests = ("test_faketensor", "test_autograd_registration")  # others compute with what they get, which fp8 cannot
    block = Block(recipe, SEPARATE, True, torch.float32)
    args, out = block.fused()
    args = tuple([t.detach() for t in a] if isinstance(a, tuple) else a.detach() if isinstance(a, torch.Tensor) else a
                 for a in args)  # fmt: skip
    torch.library.opcheck(ops.fp8_grouped_act.default, args, test_utils=tests)
    h, g = out[5].detach(), torch.randn(out[0].shape)
    how = (block.counts, SEPARATE, recipe, True)
    torch.library.opcheck(ops.quantise_act.default, (h, [M, M], *how), test_utils=tests)
    torch.library.opcheck(ops.quantise_act_grad.default, (g, h, [M, M], *how, True), test_utils=tests)
    x, ids = torch.randn(3, 4, requires_grad=True), torch.tensor([[0, 2], [2, -1], [1, 0]])
    torch.library.opcheck(ops.permute_quantised.default, (x, ids, 3, None, None, recipe, True), test_utils=tests)


def test_what_does_not_fit_is_refused():
    args, _ = Block("mxfp8", SWIGLU, True).fused()
    for at, wrong, what in ((2, [torch.zeros(E, M)], "biases"), (4, args[4][:-1], "x .* quantised"),
                            (12, SEPARATE, "do not fit the body")):  # fmt: skip
        with pytest.raises(MoecError, match=what):
            ops.fp8_grouped_act(*args[:at], wrong, *args[at + 1 :])
