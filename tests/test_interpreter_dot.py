"""Products in the repaired interpreter against torch: narrow floats, scales, TF32."""

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from interpreter import repaired  # noqa: E402
from test_interpreter import STOCK_IS_WRONG, bf16, check, values  # noqa: E402


@triton.jit
def product(a, b, out, N: tl.constexpr, PRECISION: tl.constexpr):
    n = tl.arange(0, N)
    at = n[:, None] * N + n[None, :]
    c = tl.dot(tl.load(a + at), tl.load(b + at), input_precision=PRECISION)
    tl.store(out + at, c)


@pytest.mark.parametrize("dtype", [bf16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_dot_of_narrow_floats(dtype):
    a, b = values(32, 32).to(dtype), values(32, 32, seed=1).to(dtype)
    out = torch.empty(32, 32)
    with repaired():
        product[(1,)](a, b, out, 32, None)
    exact = a.double() @ b.double()
    assert (out - exact).abs().max() < 1e-5
    if STOCK_IS_WRONG and dtype == bf16:
        product[(1,)](a, b, out, 32, None)
        assert not (out - exact).abs().max() < 1


@triton.jit
def matmul_scaled(a, a_scale, b, b_scale, c, N: tl.constexpr):
    m, n, s = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :], tl.arange(0, N // 32)[None, :]
    scales = tl.load(a_scale + m * (N // 32) + s), tl.load(b_scale + m * (N // 32) + s)
    d = tl.dot_scaled(tl.load(a + m * N + n), scales[0], "e4m3", tl.load(b + m * N + n), scales[1], "e4m3")
    tl.store(c + m * N + n, d)


def test_dot_scaled():
    """Scales of b lie by its columns, as those of a by its rows."""
    a, b = (values(64, 64, seed=n).to(torch.float8_e4m3fn) for n in (1, 2))
    exponents = [torch.randint(-8, 9, (64, 2), generator=torch.Generator().manual_seed(n)) for n in (3, 4)]
    powers = [(2.0**e).repeat_interleave(32, 1) for e in exponents]
    # Products and their sums are exact in fp32: few numbers, each with four bits.
    a, b = (torch.where(torch.arange(64) % 16 == 0, t.float(), 0).to(t.dtype) for t in (a, b))
    want = (a.float() * powers[0]) @ (b.float() * powers[1].t())
    scales = [(e + 127).to(torch.uint8) for e in exponents]
    check(lambda out: matmul_scaled[(1,)](a, scales[0], b, scales[1], out, N=64), want)


def test_dot_of_fp32_loses_what_tf32_loses():
    a, b = values(32, 32), values(32, 32, seed=1)
    exact = a.double() @ b.double()
    with repaired():
        error = {}
        for precision in ("tf32", "ieee"):
            product[(1,)](a, b, out := torch.empty(32, 32), 32, precision)
            error[precision] = (out - exact).abs().max()
    assert error["ieee"] < 1e-5 < 1e-3 < error["tf32"] < 1e-1
    product[(1,)](a, b, out, 32, "tf32")
    assert (out - exact).abs().max() < 1e-5, "the stock interpreter shows full precision"
