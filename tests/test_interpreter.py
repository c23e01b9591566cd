"""The repaired interpreter against torch; where the stock one of triton 3.6 is wrong, the test says so too."""

import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from interpreter import repaired  # noqa: E402
from traffic import Bytes, Race  # noqa: E402
from triton.runtime.errors import InterpreterError  # noqa: E402

STOCK_IS_WRONG = triton.__version__.startswith("3.6")
bf16 = torch.bfloat16
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


def values(*shape, seed=0, scale=1.0, dtype=torch.float32):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def check(launch, expected, wrong_when_stock=True):
    """``launch(out)`` is bitwise ``expected`` when repaired, and (3.6) something else when not."""
    def right(scope):
        out = torch.zeros_like(expected)
        try:
            with scope, np.errstate(all="ignore"):
                launch(out)
        except InterpreterError:  # what the stock one does not know
            if scope is not stock:
                raise
        return torch.equal(raw(out), raw(expected))

    stock = nullcontext()
    assert right(repaired())
    if STOCK_IS_WRONG and wrong_when_stock:
        assert not right(stock)


def raw(x):
    return torch.nan_to_num(x, nan=7.0) if x.dtype == torch.float32 else x.view(torch.uint8)


@triton.jit
def binary(x, y, out, N: tl.constexpr, OP: tl.constexpr):
    n = tl.arange(0, N)
    a, b = tl.load(x + n), tl.load(y + n)
    if OP == "add":
        c = a + b
    elif OP == "mul":
        c = a * b
    elif OP == "sub":
        c = a - b
    elif OP == "neg":
        c = -a
    elif OP == "maximum":
        c = tl.maximum(a, b)
    elif OP == "minimum":
        c = tl.minimum(a, b)
    elif OP == "less":
        c = tl.where((a < b) & (a > -1.0), a, b)
    elif OP == "plus_number":
        c = a + 1.5
    elif OP == "clamp":
        c = tl.clamp(a, -0.5, 0.5)
    tl.store(out + n, c)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("add", lambda a, b: a + b),
        ("sub", lambda a, b: a - b),
        ("mul", lambda a, b: a * b),
        ("neg", lambda a, b: -a),
        ("maximum", torch.maximum),
        ("less", lambda a, b: torch.where((a < b) & (a > -1), a, b)),
    ],
)
def test_bf16_arithmetic(op, expected):
    a, b = values(64, dtype=bf16), values(64, seed=1, dtype=bf16)
    # Triton itself turns the operands of maximum into fp32.
    check(lambda out: binary[(1,)](a, b, out, 64, op), expected(a, b), wrong_when_stock=op != "maximum")


def test_bf16_constants():
    a = values(64, dtype=bf16)
    with repaired():
        out = torch.zeros_like(a)
        binary[(1,)](a, a, out, 64, "plus_number")
        assert torch.equal(out, a + 1.5)
    if STOCK_IS_WRONG:
        with pytest.raises(InterpreterError, match="get_bf16"):
            binary[(1,)](a, a, out, 64, "plus_number")


def test_maximum_and_clamp_drop_nan():
    a, b = torch.tensor([1.0, torch.nan, 2.0, torch.nan]), torch.tensor([torch.nan, 3.0, 1.0, torch.nan])
    check(lambda out: binary[(1,)](a, b, out, 4, "maximum"), torch.fmax(a, b))
    check(lambda out: binary[(1,)](a, b, out, 4, "minimum"), torch.fmin(a, b))
    check(lambda out: binary[(1,)](a, b, out, 4, "clamp"), torch.tensor([0.5, -0.5, 0.5, -0.5]))


@triton.jit
def fused(x, out, N: tl.constexpr):
    n = tl.arange(0, N)
    a = tl.load(x + n)
    tl.store(out + n, tl.fma(a, a, -(a * a)))


def test_fma_rounds_once():
    a = values(64)
    check(lambda out: fused[(1,)](a, out, 64), (a.double() * a - (a * a).double()).float())


@triton.jit
def convert(x, out, N: tl.constexpr, VIA: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, tl.load(x + n).to(VIA).to(out.dtype.element_ty))


EDGES = [0.0, -0.0, 1e-40, 3e38, -3e38, torch.inf, -torch.inf, torch.nan, 1.00390625, 1.01171875, 65504.0, 65520.0]


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.float16, torch.int32], ids=str)
def test_conversions_to_bf16_round_to_nearest(source):
    x = (values(244, scale=100) if source.is_floating_point else values(244, scale=1e4)).to(source)
    edges = EDGES if source.is_floating_point else range(12)
    x = torch.cat([x, torch.tensor(edges, dtype=source)])
    check(lambda out: convert[(1,)](x, out, 256, tl.bfloat16), x.to(torch.float32).to(bf16))


def test_conversions_from_bf16():
    x = values(64, scale=100, dtype=bf16)
    for target in (torch.float64, torch.float16, torch.int32):
        check(lambda out: convert[(1,)](x, out, 64, tl.float32), x.to(target), wrong_when_stock=False)


@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_fp8_is_bit_equal_to_torch(fp8):
    """Rounding carries into the exponent, subnormals, overflow; back again all 256 codes."""
    largest = torch.finfo(fp8).max
    edges = torch.tensor([0.0, -0.0, torch.nan, 1e9])
    x = torch.cat([values(3072, scale=largest / 8), values(1020, scale=2**-8), edges])
    kind = {
        torch.float8_e4m3fn: tl.float8e4nv,
        torch.float8_e5m2: tl.float8e5,
        torch.float8_e4m3fnuz: tl.float8e4b8,
        torch.float8_e5m2fnuz: tl.float8e5b16,
    }[fp8]
    expected = x.to(fp8)

    @triton.jit
    def bits(x, out, N: tl.constexpr, TO: tl.constexpr):
        n = tl.arange(0, N)
        tl.store(out + n, tl.load(x + n).to(TO).to(tl.uint8, bitcast=True))

    @triton.jit
    def back(x, out, N: tl.constexpr, FROM: tl.constexpr):
        n = tl.arange(0, N)
        tl.store(out + n, tl.load(x + n).to(FROM, bitcast=True).to(tl.float32))

    check(lambda out: bits[(1,)](x, out, 4096, kind), expected.view(torch.uint8))
    codes = torch.arange(256, dtype=torch.uint8)
    check(lambda out: back[(1,)](codes, out, 256, kind), codes.view(fp8).float())


@triton.jit
def reduce(x, out, N: tl.constexpr, OP: tl.constexpr):
    n = tl.arange(0, N)
    a = tl.load(x + n[:, None] * N + n[None, :])
    if OP == "sum":
        tl.store(out + n, tl.sum(a, 1))
    elif OP == "max":
        tl.store(out + n, tl.max(a, 1).to(out.dtype.element_ty))
    elif OP == "argmax":
        best, at = tl.max(a, 1, return_indices=True)
        tl.store(out + n, best.to(out.dtype.element_ty) + at.to(out.dtype.element_ty))
    elif OP == "cumprod":
        tl.store(out + n[:, None] * N + n[None, :], tl.cumprod(a, 1).to(out.dtype.element_ty))
    elif OP == "cumsum":
        tl.store(out + n[:, None] * N + n[None, :], tl.cumsum(a, 1).to(out.dtype.element_ty))


def test_bf16_reductions():
    x = values(16, 16, dtype=bf16)
    check(lambda out: reduce[(1,)](x, out, 16, "sum"), x.double().sum(1).to(bf16))
    # Triton itself turns the operands of these into fp32; what is wrong in the others is how results are rounded.
    check(lambda out: reduce[(1,)](x, out, 16, "max"), x.max(1)[0], wrong_when_stock=False)
    best, at = x.float().max(1)
    check(lambda out: reduce[(1,)](x, out, 16, "argmax"), (best + at).to(bf16))
    check(lambda out: reduce[(1,)](x.abs(), out, 16, "cumsum"), x.abs().float().cumsum(1).to(bf16))
    check(lambda out: reduce[(1,)](x.abs(), out, 16, "cumprod"), x.abs().float().cumprod(1).to(bf16))


@triton.jit
def count(x, out, N: tl.constexpr, BINS: tl.constexpr):
    tl.store(out + tl.arange(0, BINS), tl.histogram(tl.load(x + tl.arange(0, N)), BINS))


def test_histogram_drops_what_is_outside():
    x = torch.tensor([0, 3, 4, 4, 2, -1, 3, 100], dtype=torch.int32)
    check(lambda out: count[(1,)](x, out, 8, 4), torch.tensor([1, 0, 1, 2], dtype=torch.int32))


# -- memory


@triton.jit
def copy(x, out, stride, n_loaded, n_stored, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i * stride, mask=i < n_loaded, other=0), mask=i < n_stored)


def test_out_of_bounds():
    x, out = torch.arange(10.0), torch.zeros(10)
    with repaired():
        copy[(2,)](x, out, 1, 10, 10, 8)  # masked lanes may point anywhere
        assert torch.equal(out, x)
        with pytest.raises(InterpreterError, match=r"load out of bounds, at byte 40 of argument \(10,\)"):
            copy[(2,)](x, out, 1, 11, 10, 8)
        with pytest.raises(InterpreterError, match="store out of bounds"):
            copy[(2,)](x, out, 1, 10, 11, 8)
        with pytest.raises(InterpreterError, match="load out of bounds"):
            copy[(2,)](x, out, -1, 10, 10, 8)
    room = torch.zeros(16)  # the stock interpreter reads and writes past the end of a view and says nothing
    copy[(2,)](torch.ones(16)[:10], room[:10], 1, 11, 11, 8)
    assert room[10] == 1


@triton.jit
def masked_by_both(flag, x, y):
    n = tl.arange(0, 16)
    held = tl.load(flag) >= 0
    tl.store(y + n, tl.load(x + n, mask=held & (n < 1), other=0.0))


def test_a_mask_of_a_scalar_and_a_block():
    x, y = values(1), torch.ones(16)
    with repaired() as traffic:
        masked_by_both[(1,)](torch.zeros(1, dtype=torch.int64), x, y)
        assert torch.equal(y, F.pad(x, (0, 15)))
        assert traffic.unique_bytes(x) == Bytes(4, 0)


def test_gaps_of_a_view_are_out_of_bounds():
    x, out = torch.zeros(8, 8), torch.zeros(16)
    with repaired():
        copy[(1,)](x[:, 2], out, 8, 8, 8, 8)
        copy[(1,)](x.t()[2], out, 8, 8, 8, 8)
        with pytest.raises(InterpreterError, match="load out of bounds"):
            copy[(1,)](x[:, 2], out, 4, 8, 8, 8)
        with pytest.raises(InterpreterError, match="load out of bounds"):
            copy[(1,)](x[:, :5], out, 1, 8, 8, 8)


def test_a_pointer_that_strays_into_another_argument():
    """Also where the distance happens to hit it."""
    both = torch.zeros(32)
    x, out = both[:8], both[16:]
    with repaired(), pytest.raises(InterpreterError, match="load out of bounds"):
        copy[(1,)](x, out, 3, 8, 8, 8)


@triton.jit
def step(x, read: tl.constexpr, write: tl.constexpr):
    p = tl.program_id(0)
    tl.store(x + p // write, tl.load(x + p + read) + 1)


def test_races():
    x = torch.zeros(16)
    with repaired():
        step[(8,)](x, 0, 1)
        step[(8,)](x, 8, 1)
        with pytest.raises(Race, match="one program loads what another one of the launch stores, byte 4"):
            step[(8,)](x, 1, 1)
        with pytest.raises(Race, match="two programs of one launch store to byte 0"):
            step[(8,)](x, 8, 2)
    step[(8,)](x, 1, 2)  # the stock interpreter runs one program after another


@triton.jit
def adds(x):
    tl.atomic_add(x, 1.0)


def test_atomics_are_refused():
    with repaired(), pytest.raises(InterpreterError, match="who comes first"):
        adds[(2,)](torch.zeros(1))


@triton.jit
def asserts(x, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.device_assert(tl.load(x + n) < 3, "three or more", mask=n < 2)


@triton.jit
def multiply(x, out):
    tl.store(out, tl.load(x) * tl.load(x))


def test_device_assert_and_overflow():
    with repaired():
        asserts[(1,)](torch.tensor([1, 2, 3, 4]), 4)
        with pytest.raises(InterpreterError, match="three or more"):
            asserts[(1,)](torch.tensor([1, 3, 1, 1]), 4)
    asserts[(1,)](torch.tensor([9, 9, 9, 9]), 4)  # never fires
    large, out = torch.tensor([1 << 20], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with repaired(overflow=True), pytest.raises(InterpreterError, match="int32 overflow"):
        multiply[(1,)](large, out)
    with repaired():
        multiply[(1,)](large, out)
    assert out.item() == 0


@triton.jit
def loops(x, out, n):
    total = 0.0
    for i in range(0, n, 2):
        total += tl.load(x + i)
    tl.store(out, total)


def test_runtime_bounds_of_a_range():
    """numpy 2.4 refuses what numpy 2.3 warns of: int() of an array with one element."""
    out = torch.zeros(1)
    with repaired(), warnings.catch_warnings():
        warnings.simplefilter("error")
        loops[(1,)](torch.arange(6.0), out, 6)
    assert out == 6


def test_traffic():
    x, out = torch.arange(40.0)[10:20], torch.zeros(16)
    with repaired() as traffic:
        copy[(2,)](x, out, 1, 10, 12, 8)
        copy[(2,)](x, out[2:], 0, 10, 3, 8)
    first, second = traffic.launches
    assert first.name == "copy"
    assert first.unique_bytes(x) == Bytes(40, 0)
    assert first.unique_bytes(out) == Bytes(0, 48)
    assert second.unique_bytes(x) == Bytes(4, 0), "ten loads of one element"
    assert second.unique_bytes(out) == Bytes(0, 12)
    assert second.offsets(out)[1].tolist() == [8, 12, 16]
    assert traffic.unique_bytes(x) == Bytes(44, 0)
    assert traffic.unique_bytes() == Bytes(44, 60)
    assert traffic.unique_bytes(torch.zeros(3)) == Bytes(0, 0)
    assert [t.data_ptr() for t in traffic.written()] == [out.data_ptr()]


def test_the_stock_interpreter_comes_back():
    from triton.runtime import interpreter as stock

    before = (type(stock.interpreter_builder), stock.interpreter_builder.options, stock.GridExecutor, stock.ReduceOps)
    with pytest.raises(ZeroDivisionError), repaired():
        raise ZeroDivisionError
    after = (type(stock.interpreter_builder), stock.interpreter_builder.options, stock.GridExecutor, stock.ReduceOps)
    assert before == after
