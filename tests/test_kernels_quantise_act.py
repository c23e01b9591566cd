"""The generated kernels that quantise activations and their derivative, interpreted, against the CPU ops: to the bit.

Legend: N rows, I columns of the body's result.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from interpreter import repaired

from moec.runtime.body import Body
from moec.runtime.fp8 import Recipe
from moec.runtime.kernels import quantise_act
from moec.runtime.kernels.experts_catalog import SEPARATE, SWIGLU

ops = torch.ops.moec
SOME = settings(max_examples=settings.default.max_examples // 8)
# Products and maxima alone: numpy and torch compute these alike.
GATED = "g = chunk(h0, 2, 0); u = chunk(h0, 2, 1); t0 = relu(g); t1 = mul(t0, u); return t1"
TWO = "g = whole(h0); u = whole(h1); t0 = relu(g); t1 = mul(t0, u); return t1"
TURNS = "g = every(h0, 2, 0); u = every(h0, 2, 1); t0 = clamp(g, -1.0, 1.0); t1 = mul(t0, u); return t1"
HALF = "u = chunk(h0, 2, 1); t0 = square(u); return t0"
PARTS = {GATED: [2], TWO: [1, 1], TURNS: [2], HALF: [2], SWIGLU: [2], SEPARATE: [1, 1]}


def drawn(body, I, counts, recipe, dtype, seed):  # noqa: E741
    """``(h, widths, gradient)`` of rows of these experts: numbers of all sizes, some that are not finite."""
    gen, a = torch.Generator().manual_seed(seed), Recipe.parse(recipe).alignment
    N, widths = sum(-(-n // a) * a for n in counts) + a, [I * n for n in PARTS[body]]
    h, g = (torch.randn(N, width, generator=gen) for width in (sum(widths), I))
    h *= torch.logspace(-4, 4, N)[:, None]
    h[0, 0], g[N // 2, -1], g[1:3] = torch.inf, torch.nan, 0
    return h.to(dtype), widths, g.to(dtype)


def same(got, want) -> None:
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, n
        assert a.stride() == b.stride() or min(a.shape) <= 1, n
        assert torch.equal(a.float().isnan(), b.float().isnan()), n
        assert torch.equal(a.float().nan_to_num(7), b.float().nan_to_num(7)), n


@SOME
@given(st.sampled_from(["blockwise", "mxfp8"]), st.sampled_from([GATED, TWO, TURNS, HALF]),
       st.sampled_from([40, 128]), st.lists(st.integers(0, 40), min_size=1, max_size=2), st.booleans(),
       st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]))  # fmt: skip
def test_they_are_the_cpu_ops_to_the_bit(recipe, body, I, counts, both, wide, dtype):  # noqa: E741
    h, widths, g = drawn(body, I, counts, recipe, dtype, I + sum(counts))
    args = (torch.tensor(counts), body, recipe, both)
    with repaired():
        got = quantise_act.quantise_act(h, widths, *args)
        grads = quantise_act.quantise_act_grad(g, h, widths, *args, wide)
    same(got, ops.quantise_act(h, widths, *args))
    same(grads, ops.quantise_act_grad(g, h, widths, *args, wide))


@pytest.mark.parametrize(("body", "recipe"), [(SWIGLU, "mxfp8"), (SEPARATE, "blockwise")])
def test_silu(body, recipe):
    """An exponential that is off in its last bit may round to the neighbouring FP8 number, here and there."""
    h, widths, g = drawn(body, 128, [40, 3], recipe, torch.float32, 1)
    h, g = h.nan_to_num(posinf=1), g.nan_to_num()
    args = (torch.tensor([40, 3]), body, recipe, True)
    with repaired():
        got = [*quantise_act.quantise_act(h, widths, *args), *quantise_act.quantise_act_grad(g, h, widths, *args, True)]
    want = [*ops.quantise_act(h, widths, *args), *ops.quantise_act_grad(g, h, widths, *args, True)]
    for a, b in zip(got, want, strict=True):
        narrow, a, b = a.dtype == torch.float8_e4m3fn, a.float(), b.float()
        assert not narrow or float((a != b).float().mean()) < 2e-3
        torch.testing.assert_close(a, b, rtol=0.126, atol=2**-9)


def test_which_there_are():
    """Columns that are taken alternately have a kernel forward, and blocks of columns that begin inside of a tile."""
    recipe = Recipe.parse("blockwise")

    def there(body, widths, grad):
        return quantise_act.fits(quantise_act.Spec(Body.parse(body), widths, recipe, torch.bfloat16, True, grad))

    assert there(GATED, (256,), True) and there(TWO, (40, 40), True)
    assert there(TURNS, (256,), False) and not there(TURNS, (256,), True)
    assert there(GATED, (80,), False) and not there(GATED, (80,), True)
    spec = quantise_act.Spec(Body.parse(GATED), (256,), Recipe.parse("current"), torch.bfloat16, True)
    assert not quantise_act.fits(spec)


def test_nothing_wide_is_written():
    """Bytes: pre-activations and gradient once, FP8 numbers and scales once."""
    h, widths, g = drawn(GATED, 128, [128, 100], "blockwise", torch.bfloat16, 0)
    args = (torch.tensor([128, 100]), GATED, "blockwise", True)
    with repaired() as traffic:
        made = quantise_act.quantise_act(h, widths, *args)
    assert sum(traffic.unique_bytes()) == h.nbytes + len(h) + sum(t.nbytes for t in made)
    with repaired() as traffic:
        made = quantise_act.quantise_act_grad(g, h, widths, *args, False)
    assert sum(traffic.unique_bytes()) == h.nbytes + g.nbytes + len(h) + sum(t.nbytes for t in made)
