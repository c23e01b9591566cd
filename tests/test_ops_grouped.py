"""grouped_mm, grouped_add and sort_chunks against dense one-hot algebra in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moec.runtime  # noqa: F401  registers the ops
from moec.runtime.errors import MoecError

moec_ops = torch.ops.moec
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
counts_lists = st.lists(st.sampled_from((0, 0, 1, 2, 7)), min_size=1, max_size=5)


def owners_NE(counts: list[int], N: int) -> torch.Tensor:
    """[rows, experts]: 1 where the expert owns the row; nobody owns the tail."""
    hot = torch.zeros(N, len(counts), dtype=torch.float64)
    row = 0
    for e, c in enumerate(counts):
        hot[row : row + c, e] = 1
        row += c
    return hot


def randn(*shape: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


@given(counts_lists, st.integers(0, 3), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_grouped_mm_is_one_hot_algebra(counts, tail, K, M, transposed):
    N, E = sum(counts) + tail, len(counts)
    x, w = randn(N, K), randn(E, M, K) if transposed else randn(E, K, M)
    w_EKM = w.transpose(1, 2) if transposed else w
    y = moec_ops.grouped_mm(x, w_EKM, torch.tensor(counts))
    expected = torch.einsum("ne,nk,ekm->nm", owners_NE(counts, N), x, w_EKM)
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
    g = torch.randn_like(y)
    got, want = (torch.autograd.grad(v, (x, w), g) for v in (y, expected))
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


@given(counts_lists, st.integers(0, 3), st.integers(1, 4))
def test_grouped_add_is_one_hot_algebra(counts, tail, M):
    N, E = sum(counts) + tail, len(counts)
    x, b = randn(N, M), randn(E, M)
    y = moec_ops.grouped_add(x, b, torch.tensor(counts))
    expected = x + owners_NE(counts, N) @ b
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
    g = torch.randn_like(y)
    got, want = (torch.autograd.grad(v, (x, b), g) for v in (y, expected))
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_sort_chunks_sorts_by_expert_then_rank_and_back(R, E, seed):
    gen = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 3, (R, E), generator=gen)
    arrived = [(r, e, i) for r in range(R) for e in range(E) for i in range(int(counts[r, e]))]
    x = torch.tensor(arrived, dtype=torch.float64).view(-1, 3).requires_grad_()
    y = moec_ops.sort_chunks(x, counts, False)
    assert [tuple(row) for row in y.tolist()] == sorted(arrived, key=lambda row: (row[1], row[0], row[2]))
    assert torch.equal(moec_ops.sort_chunks(y, counts, True), x)
    (grad,) = torch.autograd.grad(y, x, y.detach())
    assert torch.equal(grad, x)  # the row that came back is the row that left


def test_gradcheck():
    counts = torch.tensor([2, 0, 3])
    x, w, b = randn(6, 2), randn(3, 2, 3), randn(3, 2)
    assert torch.autograd.gradcheck(lambda x, w: moec_ops.grouped_mm(x, w, counts), (x, w))
    assert torch.autograd.gradcheck(lambda x, g: moec_ops.grouped_mm_wgrad(x, g, counts), (x, randn(6, 3)))
    assert torch.autograd.gradcheck(lambda x, b: moec_ops.grouped_add(x, b, counts), (x, b))
    chunks = torch.tensor([[1, 0], [2, 3]])
    assert torch.autograd.gradcheck(lambda x: moec_ops.sort_chunks(x, chunks, False), (x,))
    assert torch.autograd.gradcheck(lambda x: moec_ops.sort_chunks(x, chunks, True), (x,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 0]])
def test_opcheck(dtype, counts):
    N, counts = sum(counts) + 1, torch.tensor(counts)
    x, w, b = randn(N, 4, dtype=dtype), randn(3, 5, 4, dtype=dtype), randn(3, 4, dtype=dtype)
    g = torch.randn(N, 5, dtype=dtype)
    torch.library.opcheck(moec_ops.grouped_mm.default, (x, w.transpose(1, 2), counts))
    torch.library.opcheck(moec_ops.grouped_mm.default, (x, randn(3, 4, 5, dtype=dtype), counts))
    torch.library.opcheck(moec_ops.grouped_mm_wgrad.default, (x, g, counts))
    torch.library.opcheck(moec_ops.grouped_add.default, (x, b, counts))
    torch.library.opcheck(moec_ops.grouped_sum.default, (x.detach(), counts))
    chunks = torch.stack([counts, counts.flip(0)])
    x = randn(int(chunks.sum()), 4, dtype=dtype)
    for inverse in (False, True):
        torch.library.opcheck(moec_ops.sort_chunks.default, (x, chunks, inverse))


def test_an_expert_without_rows_gets_a_zero_gradient_not_none():
    w = randn(2, 3, 4)
    moec_ops.grouped_mm(torch.ones(0, 3, dtype=torch.float64), w, torch.tensor([0, 0])).sum().backward()
    assert torch.equal(w.grad, torch.zeros_like(w))


def test_only_the_needed_gradients_are_formed():
    x, w = torch.ones(2, 3, dtype=torch.float64), randn(1, 3, 4)
    moec_ops.grouped_mm(x, w, torch.tensor([2])).sum().backward()
    assert x.grad is None
    assert w.grad is not None


def test_the_weight_gradient_has_the_layout_of_the_stored_parameter():
    stored_EMK = randn(2, 5, 4)
    grads = []
    view = stored_EMK.transpose(1, 2)
    view.register_hook(grads.append)
    moec_ops.grouped_mm(randn(6, 4), view, torch.tensor([2, 4])).sum().backward()
    assert grads[0].transpose(1, 2).is_contiguous()


def test_a_bf16_bias_gradient_is_summed_in_fp32():
    # Many small terms after a large one: a bf16 running sum would not move.
    g = torch.tensor([[256.0]] + [[1.0]] * 4, dtype=torch.bfloat16)
    assert moec_ops.grouped_sum(g, torch.tensor([5])).item() == 260


def test_counts_that_do_not_fit_are_refused():
    for counts in ([2, 2], [-1, 1]):
        with pytest.raises(MoecError, match="do not fit 3 rows"):
            moec_ops.grouped_mm(torch.zeros(3, 2), torch.zeros(2, 2, 2), torch.tensor(counts))
    with pytest.raises(MoecError, match="do not fit"):
        moec_ops.grouped_mm(torch.zeros(3, 2), torch.zeros(2, 3, 2), torch.tensor([1, 1]))
    with pytest.raises(MoecError, match="for 4 rows"):
        moec_ops.sort_chunks(torch.zeros(4, 1), torch.tensor([[1, 2]]), False)
