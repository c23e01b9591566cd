"""Payloads are what their definition says, bit for bit; what carries gradients beside them does the dual of the move.

Legend: T tokens, N rows, H numbers and W bytes a row.
"""

import fp8_model as model
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moec.runtime.errors import MoecError
from moec.runtime.fp8 import Recipe, amax
from moec.runtime.fp8.payload import width

ops = torch.ops.moec
NAMES = ("current", "rowwise", "blockwise", "mxfp8")
KINDS = ("normal", "zeros", "tiny", "huge", "equal", "nonfinite")


def rows(kind, T, H, seed):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(T, H, generator=gen)
    match kind:
        case "zeros":
            x[:: 2] = 0
        case "tiny":
            x *= torch.logspace(-44, -30, T)[:, None]
        case "huge":
            x *= torch.logspace(20, 37, T)[:, None]
        case "equal":
            x = x[:, :1].expand(T, H).clone()
        case "nonfinite":
            x[torch.rand(T, H, generator=gen) < 0.2] = torch.inf
            x[torch.rand(T, H, generator=gen) < 0.2] = torch.nan
    return x


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(NAMES), st.sampled_from(KINDS), st.integers(1, 5), st.sampled_from((1, 31, 128, 130, 300)),
    st.sampled_from(("rows", "grad")), st.integers(0, 9),
)  # fmt: skip
def test_a_payload_is_what_the_recipe_says(name, kind, T, H, role, seed):
    x = rows(kind, T, H, seed)
    most = amax(x, (0, 0)) if name == "current" else None
    carrier, data = ops.encode_rows(x, most, name, role)
    assert data.dtype == torch.uint8 and data.shape == (T, width(H, name))
    q, _, each = model.quantised(x.numpy(), name, role, False)
    with np.errstate(over="ignore"):
        want = torch.from_numpy((q * each).astype(np.float32))
    assert torch.equal(ops.decode_rows(data, carrier, most, name, role).nan_to_num(nan=7.0), want.nan_to_num(nan=7.0))


def test_rows_that_nobody_filled_are_zeros():
    for name in NAMES[1:]:
        data = torch.zeros(3, width(130, name), dtype=torch.uint8)
        y = ops.decode_rows(data, torch.zeros(3, 130), None, name, "rows")
        assert torch.equal(y, torch.zeros(3, 130))


@pytest.mark.parametrize("name", ["bf16", *NAMES])
def test_no_rows(name):
    """Of a rank whose experts nobody chose."""
    x = torch.empty(0, 130)
    most = amax(x, (0, 0)) if name == "current" else None
    carrier, data = ops.encode_rows(x, most, name, "rows")
    assert data.shape == (0, width(130, name))
    assert ops.decode_rows(data, carrier, most, name, "rows").shape == (0, 130)


def test_widths():
    assert [width(1024, n) for n in ("bf16", *NAMES)] == [2048, 1024, 1028, 1032, 1056]


@pytest.mark.parametrize("name", NAMES)
def test_an_operand_is_what_travelled(name):
    """The product's layout bit for bit, the other one quantised from what the payload means; rows of none are zeros."""
    x, counts = torch.randn(256, 64), torch.tensor([100, 3])
    most = amax(x, (0, 0)) if name == "current" else None
    carrier, data = ops.encode_rows(x, most, name, "rows")
    made = ops.decode_operand(data, carrier, most, most, counts, name, True)
    values = ops.decode_rows(data, carrier, most, name, "rows")
    want = ops.quantise(x, most, most, counts, name, "rows", False)
    again = ops.quantise(values, most, most, counts, name, "rows", True)
    for a, b in zip(made[1:], (*want[1:3], *again[3:]), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        assert torch.equal(a.float(), b.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["delayed", "delayed+2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_history_is_taken_as_it_is(name, kind, dtype):
    """By past steps' magnitudes, larger or smaller than these rows': both layouts are those of ``moec::quantise``."""
    x, margin = rows(kind, 5, 130, 3).to(dtype), Recipe.parse(name).margin
    for past in (0.0, 0.7, 300.0):
        most = torch.tensor([[past]])
        carrier, data = ops.encode_rows(x, most, name, "rows")
        assert data.shape == (5, 130)
        q, _, each = model.quantised(x.float().numpy(), "delayed", "rows", False, most.numpy(), margin)
        want = torch.from_numpy((q * each).astype(np.float32)).to(dtype)
        got = ops.decode_rows(data, carrier, most, name, "rows")
        assert torch.equal(got.nan_to_num(nan=7.0), want.nan_to_num(nan=7.0))
        made = ops.decode_operand(data, carrier, most, most, None, name, True)
        direct = ops.quantise(x, most, most, None, name, "rows", True)
        for a, b in zip(made[1:], direct[1:], strict=True):
            assert a.dtype == b.dtype and torch.equal(a.float().nan_to_num(nan=7.0), b.float().nan_to_num(nan=7.0))


def test_what_does_not_fit_is_refused():
    x = torch.randn(2, 8)
    carrier, data = ops.encode_rows(x, None, "rowwise", "rows")
    with pytest.raises(MoecError, match="no largest magnitude"):
        ops.encode_rows(x, None, "current", "rows")
    with pytest.raises(MoecError, match="12 bytes are no mxfp8 payload of 8"):
        ops.decode_rows(data, carrier, None, "mxfp8", "rows")
    with pytest.raises(MoecError, match="no FP8 recipe"):
        ops.encode_rows(x, None, "fp4", "rows")


def moves():
    """(what moves rows, what carries their gradient) of values x [T, H]."""
    ids, counts_RE = torch.tensor([[0, 2], [1, -1], [2, 0]]), torch.tensor([[2, 0], [1, 3]])

    def permuted(x):
        rows, _, row_of = ops.permute(x, ids, 3)
        return rows, lambda c: ops.carry_rows(c, rows.detach(), row_of)

    def by(move, carry, *args):
        def run(x):
            y = move(x, *args)
            return y, lambda c: carry(c, y.detach(), *args)

        return run

    yield 3, permuted
    for inverse in (False, True):
        yield 6, by(ops.sort_chunks, ops.carry_sorted, counts_RE, inverse)
    yield 6, by(ops.swap_chunks, ops.carry_swapped, 2, 3)
    yield 6, by(ops.align_rows, ops.carry_aligned, torch.tensor([2, 3]), 4)


def test_carriers_bring_back_what_the_move_would():
    for T, move in moves():
        x = torch.randn(T, 4, dtype=torch.float64, requires_grad=True)
        y, carry = move(x)
        g = torch.randn_like(y)
        (want,) = torch.autograd.grad(y, x, g)
        got = carry(x)
        assert got.shape == y.shape and got.stride() == (0, 0)
        assert torch.equal(torch.autograd.grad(got, x, g)[0], want)


def test_gradients_at_home_are_rounded_once():
    x = torch.randn(5, 40, requires_grad=True)
    carrier, data = ops.encode_rows(x, None, "mxfp8", "rows")
    y = ops.decode_rows(data, ops.carry_home(carrier, data, "mxfp8"), None, "mxfp8", "rows")
    g = torch.randn(5, 40)
    (got,) = torch.autograd.grad(y, x, g)
    q, _, each = model.quantised(g.numpy(), "mxfp8", "grad", False)
    assert torch.equal(got, torch.from_numpy((q * each).astype(np.float32))) and not torch.equal(got, g)


def test_opcheck():
    x = torch.randn(256, 64, requires_grad=True)
    carrier, data = ops.encode_rows(x, None, "mxfp8", "rows")
    carrier = carrier.detach().requires_grad_()
    counts = torch.tensor([100, 3])
    torch.library.opcheck(ops.encode_rows.default, (x, None, "mxfp8", "rows"))
    torch.library.opcheck(ops.decode_rows.default, (data, carrier, None, "mxfp8", "rows"))
    for both in (True, False):
        torch.library.opcheck(
            ops.decode_operand.default, (data, carrier, None, None, counts, "mxfp8", both),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip
    torch.library.opcheck(ops.carry_home.default, (carrier, data, "mxfp8"))


def exchanged(rank, world):
    """Gradients of a carried exchange, wide and in FP8, on real processes and by themselves."""
    from torch.distributed import group

    name = group.WORLD.group_name
    gen = torch.Generator().manual_seed(rank)
    send = (torch.arange(world) + rank) % 3
    recv = torch.tensor([(rank + r) % 3 for r in range(world)])  # rank r sends the same to rank and rank to r
    x = torch.randn(int(send.sum()) + 1, 40, generator=gen, requires_grad=True)
    plain = ops.all_to_all(x, send, recv, world, name)
    plain = torch.ops._c10d_functional.wait_tensor(plain)
    g = torch.randn(plain.shape, generator=gen)
    (want,) = torch.autograd.grad(plain, x, g)
    found = []
    for payload in ("", "mxfp8"):
        carrier, data = ops.encode_rows(x, None, "rowwise", "rows")
        there = torch.ops._c10d_functional.wait_tensor(ops.all_to_all(data, send, recv, world, name))
        carried = ops.carry_exchange(carrier, there, send, recv, payload, world, name)
        y = ops.decode_rows(there, carried, None, "rowwise", "rows")
        found.append(torch.autograd.grad(y, x, g)[0])
    q, _, each = model.quantised(x.detach().numpy(), "rowwise", "rows", False)
    back = torch.from_numpy((q * each).astype(np.float32))
    rounded = ops.all_to_all(back, send, recv, world, name)
    rounded = torch.ops._c10d_functional.wait_tensor(rounded)
    q, _, each = model.quantised(g.numpy(), "mxfp8", "grad", False)
    low = torch.from_numpy((q * each).astype(np.float32))
    low = ops.all_to_all_rows(low, recv, send, x.shape[0], world, name)
    low = torch.ops._c10d_functional.wait_tensor(low)
    return torch.equal(found[0], want), torch.equal(found[1], low), torch.equal(y, rounded), torch.equal(low, want)


@pytest.mark.timeout(180)
def test_exchanged_on_real_processes(gloo4):
    for wide, low, there, same in gloo4.run(exchanged, timeout=150):
        assert wide and low and there and not same
