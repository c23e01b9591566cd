"""Generated kernels over rows, interpreted, against the CPU ops: permute, unpermute, cross entropy and their backwards.

Legend: T tokens, K choices per token, N rows, H hidden, V classes.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from interpreter import repaired
from test_ops_permute import routings

from moec.runtime.kernels import choice_dot, permute, softmax_rows, sum_choices, unpermute, unpermute_backward

ops = torch.ops.moec
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2**-7, "atol": 2**-7}}
SOME = settings(max_examples=settings.default.max_examples // 8)


def same(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.float(), b.float())


@SOME
@given(routings(), st.sampled_from(DTYPES), st.sampled_from([1, 33, 130]), st.sampled_from(["none", "row", "block"]),
       st.sampled_from([1, 4]))  # fmt: skip
def test_permute_is_the_cpu_op_to_the_bit(routing, dtype, H, quantise, alignment):
    ids, E = routing
    x = (torch.randn(len(ids), H) * torch.logspace(-5, 5, len(ids))[:, None]).to(dtype)
    with repaired():
        got = permute.permute(x, ids, E), permute.kept(x, ids, E), permute.aligned(x, ids, E, alignment, quantise)
    same(got[0], ops.permute(x, ids, E))
    same(got[1], ops.permute_kept(x, ids, E))
    same(got[2], ops.permute_aligned(x, ids, E, alignment, quantise))


@pytest.mark.parametrize("H", [1, 132])
def test_bytes_are_permuted_as_they_are(H):
    """An FP8 payload's rows."""
    ids, E = torch.tensor([[2, 0], [0, 3], [-1, 2]]), 5
    x = torch.randint(0, 256, (len(ids), H), dtype=torch.uint8)
    with repaired():
        got = permute.permute(x, ids, E), permute.kept(x, ids, E), permute.aligned(x, ids, E, 16, "none")
    same(got[0], ops.permute(x, ids, E))
    same(got[1], ops.permute_kept(x, ids, E))
    same(got[2], ops.permute_aligned(x, ids, E, 16, "none"))


@SOME
@given(routings(), st.sampled_from(DTYPES), st.sampled_from([1, 33, 2050]), st.integers(0, 2), st.integers(0, 3))
def test_unpermute_is_the_cpu_op(routing, dtype, H, addends, extra):
    ids, E = routing
    T, K = ids.shape
    row_of = ops.permute(torch.zeros(T, 1), ids, E)[2]
    N = int((ids >= 0).sum()) + extra
    rows, weights, grad = torch.randn(N, H).to(dtype), torch.rand(T, K), torch.randn(T, H).to(dtype)
    weights[ids < 0] = torch.nan  # of a pair without a row, whatever its weight
    more = [torch.randn(T, H).to(dtype) for _ in range(addends)]
    with repaired():
        y = unpermute.unpermute_add(more, rows, weights, row_of) if more else unpermute.unpermute(rows, weights, row_of)
        grad_x = unpermute.launch(rows, None, row_of)
        grads = unpermute_backward.launch(grad, rows, weights, row_of)
    want = ops.unpermute_add(more, rows, weights, row_of) if more else ops.unpermute(rows, weights, row_of)
    torch.testing.assert_close(y, want, **TOLERANCE[dtype])
    torch.testing.assert_close(grad_x, ops.permute_backward(rows, row_of), **TOLERANCE[dtype])
    for a, b in zip(grads, ops.unpermute_backward(grad, rows, weights, row_of), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype]["rtol"], atol=2e-4 if H > 99 else 1e-5)


@SOME
@given(st.integers(0, 5), st.sampled_from([1, 7, 130, 4100]), st.sampled_from(DTYPES), st.sampled_from([0.0, 0.1]),
       st.integers(0, 2), st.booleans(), st.integers(0, 99))  # fmt: skip
def test_cross_entropy_is_the_cpu_op(N, V, dtype, smoothing, reduction, sliced, seed):
    gen = torch.Generator().manual_seed(seed)
    x = (torch.randn(N, V + 3, generator=gen) * 4).to(dtype)
    x = x[:, 1 : V + 1] if sliced else x[:, :V].contiguous()  # rows at any distance from each other
    labels = torch.randint(0, V, (N,), generator=gen).masked_fill(torch.rand(N, generator=gen) < 0.3, -100)
    x[labels < 0] = torch.nan
    how = (-100, smoothing, reduction)
    with repaired():
        got = softmax_rows.cross_entropy(x, labels, *how)
    want = ops.cross_entropy(x, labels, *how)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)
    grad = torch.randn(want[0].shape, generator=gen)
    with repaired():
        found = softmax_rows.cross_entropy_backward(grad, x, labels, want[1], *how)
    torch.testing.assert_close(found, ops.cross_entropy_backward(grad, x, labels, want[1], *how), equal_nan=True,
                               rtol=1e-4 if dtype == torch.float32 else 2**-7, atol=1e-6)  # fmt: skip


def test_what_is_out_of_range_is_refused_before_a_kernel_runs():
    with repaired() as traffic:
        with pytest.raises(RuntimeError, match="a label is outside of"):
            softmax_rows.cross_entropy(torch.randn(2, 4), torch.tensor([1, 4]), -100, 0.0, 2)
        with pytest.raises(RuntimeError, match="another row than the 3"):
            unpermute.unpermute(torch.randn(3, 4), torch.ones(1, 2), torch.tensor([[0, 3]]))
    assert not traffic.launches


@SOME
@given(st.integers(1, 3), st.sampled_from([1, 5, 130]), st.sampled_from(DTYPES), st.integers(0, 99))
def test_logsumexp_pick_is_the_cpu_op(blocks, width, dtype, seed):
    gen = torch.Generator().manual_seed(seed)
    V = blocks * width
    x, vocab = (torch.randn(2, 2, V, generator=gen) * 4).to(dtype), torch.arange(7, 7 + V)
    x[0, 0, :width] = -torch.inf
    ids = torch.randint(5, 9 + V, (2, 2, 1), generator=gen)
    want = ops.logsumexp_pick(x, vocab, ids, blocks)
    with repaired():
        got = softmax_rows.logsumexp_pick(x, vocab, ids, blocks)
    grads = [torch.randn(y.shape, generator=gen).to(y.dtype) for y in want]
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
    with repaired():
        found = softmax_rows.logsumexp_pick_backward(*grads, x, vocab, ids, want[0])
    torch.testing.assert_close(found, ops.logsumexp_pick_backward(*grads, x, vocab, ids, want[0]), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)])
def test_traffic(dtype):
    """Every byte that goes in or out goes once."""
    T, K, E, H = 24, 4, 8, 1024
    ids = torch.rand(T, E).argsort(1)[:, :K]
    x, weights = torch.randn(T, H).to(dtype), torch.rand(T, K)
    with repaired() as traffic:
        rows, counts, row_of = permute.permute(x, ids, E)
    assert sum(traffic.unique_bytes()) <= 1.1 * sum(t.nbytes for t in (x, ids, rows, counts, row_of))
    with repaired() as traffic:
        q, scales, counts, row_of_q = permute.aligned(x, ids, E, 16, "block")
    assert sum(traffic.unique_bytes()) <= 1.1 * sum(t.nbytes for t in (x, ids, q, scales, counts, row_of_q))
    with repaired() as traffic:
        y = unpermute.unpermute_add([x], rows, weights, row_of)
    assert sum(traffic.unique_bytes()) <= 1.1 * sum(t.nbytes for t in (x, rows, weights, row_of, y))
    with repaired() as traffic:
        grads = unpermute_backward.launch(y, rows, weights, row_of)
    assert sum(traffic.unique_bytes()) <= 1.1 * sum(t.nbytes for t in (y, rows, weights, row_of, *grads))
    with repaired() as traffic:
        grad_x = unpermute.launch(rows, None, row_of)
    assert sum(traffic.unique_bytes()) <= 1.1 * sum(t.nbytes for t in (rows, row_of, grad_x))
    assert traffic.unique_bytes(rows).loaded == rows.nbytes  # the recorder sees them


def test_traffic_of_a_cross_entropy():
    """The logits are read once forward; read, and their gradient written, once backward."""
    x, labels = torch.randn(6, 5000).bfloat16(), torch.tensor([1, -100, 0, 4999, 3, 7])
    with repaired() as forward:
        loss, lse = softmax_rows.cross_entropy(x, labels, -100, 0.1, 1)
    with repaired() as backward:
        softmax_rows.cross_entropy_backward(torch.ones_like(loss), x, labels, lse, -100, 0.1, 1)
    want = ops.cross_entropy(x, labels, -100, 0.1, 1)  # rows of more than one block
    torch.testing.assert_close((loss, lse), tuple(want), rtol=1e-5, atol=1e-5)
    assert sum(forward.unique_bytes()) <= 1.01 * x.nbytes and sum(backward.unique_bytes()) <= 2.01 * x.nbytes


def test_choices_beyond_32_bits():
    """Pairs times columns past 2³¹ elements, and a bias so far behind: memory that is asked for, and hardly touched."""
    T, K, C = 3, 2, 2**29
    row_of, rows = torch.tensor([[0, 1], [2, -1], [-1, 3]]), torch.empty(T * K, C, dtype=torch.bfloat16)
    y, block = torch.empty(T, C, dtype=torch.bfloat16), sum_choices.block(C)
    rows[:, :block] = torch.randn(T * K, block)
    with repaired(overflow=True) as traffic:
        sum_choices.kernel(K, C, rows.dtype)[(T, 1)](row_of, rows, y)  # the first columns alone
        assert traffic.launches[0].offsets(rows)[0].max() > 2**32
    held, first = row_of >= 0, rows[:, :block].float().view(T, K, block)
    close = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(y[:, :block].float(), (first * held[..., None]).sum(1), **close)

    expert, grad = torch.tensor([[2**21, -1]]), torch.randn(1, 1024).bfloat16()
    bias = torch.empty(2**21 + 1, 1024, dtype=torch.bfloat16)
    bias[-1] = torch.randn(1024)
    with repaired(overflow=True):
        share = choice_dot.launch(expert, grad, bias)
    torch.testing.assert_close(share, torch.stack([grad[0].float() @ bias[-1].float(), torch.tensor(0.0)])[None])
