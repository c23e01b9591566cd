"""permute and unpermute against dense one-hot algebra in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moec.runtime  # noqa: F401  registers the ops
from moec.runtime.errors import MoecError

moec_ops = torch.ops.moec
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@st.composite
def routings(draw):
    """``(ids_TK, num_experts)``: distinct experts per token, skewed towards low ones, some pairs dropped."""
    T, E = draw(st.integers(0, 9)), draw(st.integers(1, 6))
    K = draw(st.integers(1, E))
    top = draw(st.integers(K, E))  # experts from here on stay empty
    dropped = draw(st.sampled_from((0.0, 0.3, 1.0)))
    gen = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    ids = torch.rand(T, top, generator=gen).argsort(1)[:, :K]
    return torch.where(torch.rand(T, K, generator=gen) < dropped, -1, ids), E


def one_hot_PN(ids_TK: torch.Tensor) -> torch.Tensor:
    """[T*K pairs, T*K rows]: 1 where the pair's row is, by sorting (expert, token, choice) in Python."""
    T, K = ids_TK.shape
    pairs = sorted((int(ids_TK[t, k]), t, k) for t in range(T) for k in range(K) if ids_TK[t, k] >= 0)
    out = torch.zeros(T * K, T * K, dtype=torch.float64)
    for row, (_, t, k) in enumerate(pairs):
        out[t * K + k, row] = 1
    return out


@given(routings())
def test_permute_is_one_hot_algebra(routing):
    ids, E = routing
    T, K = ids.shape
    x = torch.randn(T, 3, dtype=torch.float64, requires_grad=True)
    rows, counts, row_of = moec_ops.permute(x, ids, E)
    hot = one_hot_PN(ids)
    repeat = torch.eye(T, dtype=torch.float64).repeat_interleave(K, 0)  # pair -> its token
    assert torch.equal(rows, hot.T @ repeat @ x)
    assert torch.equal(counts, (ids.reshape(-1, 1) == torch.arange(E)).sum(0))
    expected_row = torch.where(hot.sum(1) > 0, (hot * torch.arange(T * K)).sum(1), -1)
    assert torch.equal(row_of.reshape(-1).double(), expected_row.double())
    g = torch.randn_like(rows)
    (grad,) = torch.autograd.grad(rows, x, g)
    torch.testing.assert_close(grad, repeat.T @ hot @ g, rtol=1e-14, atol=1e-14)


@given(routings(), st.integers(0, 3))
def test_unpermute_is_one_hot_algebra(routing, extra):
    ids, E = routing
    T, K = ids.shape
    hot = one_hot_PN(ids)
    # As many rows as there are kept pairs, and some more that nobody owns.
    N = int(hot.sum()) + extra
    hot = torch.cat([hot, hot.new_zeros(T * K, extra)], 1)[:, :N]
    rows = torch.randn(N, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(T, K, dtype=torch.float64, requires_grad=True)
    row_of = moec_ops.permute(torch.zeros(T, 1), ids, E)[2]
    y = moec_ops.unpermute(rows, w, row_of)
    tokens = torch.eye(T, dtype=torch.float64).repeat_interleave(K, 0)
    expected = tokens.T @ (w.reshape(-1, 1) * (hot @ rows))
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
    g = torch.randn_like(y)
    got, want = (torch.autograd.grad(v, (rows, w), g) for v in (y, expected))
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


def test_gradcheck():
    ids = torch.tensor([[0, 2], [2, -1], [1, 0], [-1, -1]])
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: moec_ops.permute(x, ids, 4)[0], (x,))

    def both(x, w):
        rows, _, row_of = moec_ops.permute(x, ids, 4)
        return moec_ops.unpermute(rows.tanh(), w, row_of)

    assert torch.autograd.gradcheck(both, (x, w))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [0, 5])
def test_opcheck(dtype, T):
    ids = torch.tensor([[0, 2], [2, -1], [1, 0], [-1, -1], [2, 1]])[:T]
    x = torch.randn(T, 3, dtype=dtype, requires_grad=True)
    w = torch.randn(T, 2, requires_grad=True)
    rows, _, row_of = moec_ops.permute(x, ids, 4)
    rows = rows.detach().requires_grad_()
    torch.library.opcheck(moec_ops.permute.default, (x, ids, 4))
    torch.library.opcheck(moec_ops.permute_backward.default, (rows.detach(), row_of))
    torch.library.opcheck(moec_ops.unpermute.default, (rows, w, row_of))
    torch.library.opcheck(moec_ops.unpermute_backward.default, (x.detach(), rows.detach(), w.detach(), row_of))


def test_bf16_sums_are_formed_in_fp32_and_rounded_once():
    # 256 + 1 + 1 + 1 + 1 in bf16 (8 bits of mantissa) would stay 256 if each sum were rounded.
    rows = torch.tensor([[256.0], [1.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16)
    row_of = torch.arange(5).view(1, 5)
    assert moec_ops.unpermute(rows, torch.ones(1, 5), row_of).item() == 260
    assert moec_ops.permute_backward(rows, row_of).item() == 260


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_may_have_another_dtype_than_rows(weights):
    rows = torch.randn(6, 4, dtype=torch.bfloat16, requires_grad=True)
    w = torch.rand(3, 2, dtype=weights, requires_grad=True)
    row_of = torch.tensor([[5, 0], [1, 4], [3, 2]])
    y = moec_ops.unpermute(rows, w, row_of)
    expected = (w.double()[:, :, None] * rows.double()[row_of]).sum(1)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=2**-8)
    y.sum().backward()
    assert (rows.grad.dtype, w.grad.dtype) == (torch.bfloat16, weights)


def test_a_dropped_pair_contributes_nothing_even_if_its_weight_or_row_0_is_not_finite():
    rows = torch.tensor([[float("inf")], [1.0]], requires_grad=True)
    w = torch.tensor([[2.0, float("nan")]], requires_grad=True)
    y = moec_ops.unpermute(rows, w, torch.tensor([[1, -1]]))
    assert y.tolist() == [[2.0]]
    y.sum().backward()
    assert rows.grad.tolist() == [[0.0], [2.0]]
    assert w.grad.tolist() == [[1.0, 0.0]]


def test_bitwise_repeatable():
    ids = torch.rand(300, 8).argsort(1)[:, :3]
    x, w = torch.randn(300, 17, requires_grad=True), torch.rand(300, 3)
    results = []
    for _ in range(3):
        rows, _, row_of = moec_ops.permute(x, ids, 8)
        y = moec_ops.unpermute(rows, w, row_of)
        results.append((rows, y, *torch.autograd.grad(y.sin().sum(), x)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_bad_ids_are_refused():
    for ids in ([[4]], [[-2]]):
        with pytest.raises(MoecError, match=r"\[0, 4\)"):
            moec_ops.permute(torch.zeros(1, 2), torch.tensor(ids), 4)
    with pytest.raises(MoecError, match="names row 3, there are 2"):
        moec_ops.unpermute(torch.zeros(2, 2), torch.ones(1, 1), torch.tensor([[3]]))
