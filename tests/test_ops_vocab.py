"""lookup, pick and blocked_logsumexp: parts add up to the whole; against torch's own ops, in three dtypes."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import moec.runtime  # noqa: F401  registers the ops
from moec.runtime.errors import MoecError

ops = torch.ops.moec
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def randn(*shape: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def grads(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gen = torch.Generator().manual_seed(0)
    return torch.autograd.grad(y, x, torch.randn(y.shape, generator=gen, dtype=y.dtype))[0]


@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from([-1, 0, 5]), st.integers(0, 99))
def test_lookup_in_parts_is_embedding(n, width, padding, seed):
    V, gen = n * width, torch.Generator().manual_seed(seed)
    w, ids = randn(V, 3), torch.randint(0, V, (2, 4), generator=gen)
    parts = [ops.lookup(w[r : r + width], torch.arange(r, r + width), ids, padding) for r in range(0, V, width)]
    y = torch.stack(parts).sum(0)
    want = F.embedding(ids, w, padding_idx=None if padding < 0 or padding >= V else padding)
    torch.testing.assert_close(y, want, rtol=0, atol=0)
    torch.testing.assert_close(grads(y, w), grads(want, w), rtol=1e-14, atol=1e-14)


@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from([(), (3,), (2, 3)]), st.integers(0, 99))
def test_pick_in_parts_is_gather(n, width, lead, seed):
    V, gen = n * width, torch.Generator().manual_seed(seed)
    x, ids = randn(*lead, V), torch.randint(0, V, (*lead, 2), generator=gen)
    y = sum(ops.pick(x[..., r : r + width], torch.arange(r, r + width), ids) for r in range(0, V, width))
    want = x.gather(-1, ids)
    torch.testing.assert_close(y, want, rtol=0, atol=0)
    torch.testing.assert_close(grads(y, x), grads(want, x), rtol=1e-14, atol=1e-14)


def test_numbers_that_are_not_there_yield_nothing():
    w, numbers = randn(3, 2), torch.tensor([4, 6, 9])
    y = ops.lookup(w, numbers, torch.tensor([6, 5, -100, 9, 10**9]), -1)
    assert torch.equal(y, torch.stack([w[1], 0 * w[1], 0 * w[1], w[2], 0 * w[1]]))
    assert ops.pick(randn(3), numbers, torch.tensor([-100, 5])).tolist() == [0, 0]


@given(st.sampled_from([1, 2, 3, 6, 12]), st.sampled_from([(), (3,), (2, 3)]), st.sampled_from([1.0, 1e3, 1e30]))
def test_blocks_of_logsumexp_make_the_whole(blocks, lead, scale):
    x = (randn(*lead, 12) * scale).detach().requires_grad_()
    y = ops.blocked_logsumexp(x, blocks)
    assert y.shape == (*lead, blocks)
    want = x.logsumexp(-1)
    torch.testing.assert_close(y.logsumexp(-1), want, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(grads(y.logsumexp(-1), x), grads(want, x), rtol=1e-12, atol=1e-13)


def test_a_block_of_nothing_but_minus_infinity():
    """A padded vocabulary, whose last logits are masked: a rank may hold nothing else."""
    x = torch.cat([torch.randn(2, 4, dtype=torch.float64), torch.full((2, 4), -torch.inf).double()], -1)
    x.requires_grad_()
    y = ops.blocked_logsumexp(x, 2).logsumexp(-1)
    torch.testing.assert_close(y, x.logsumexp(-1))
    torch.testing.assert_close(grads(y, x), grads(x.logsumexp(-1), x), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    numbers, ids = torch.arange(4, 8), torch.tensor([[4, 7, 1], [6, 6, 9]])
    torch.library.opcheck(ops.lookup, (randn(4, 3, dtype=dtype), numbers, ids, 6))
    torch.library.opcheck(ops.lookup_backward, (randn(2, 3, 3, dtype=dtype).detach(), numbers, ids, 6))
    torch.library.opcheck(ops.pick, (randn(2, 4, dtype=dtype), numbers, ids))
    torch.library.opcheck(ops.pick_backward, (randn(2, 3, dtype=dtype).detach(), numbers, ids))
    x = randn(2, 3, 4, dtype=dtype)
    torch.library.opcheck(ops.blocked_logsumexp, (x, 2))
    lse = ops.blocked_logsumexp(x, 2).detach()
    torch.library.opcheck(ops.blocked_logsumexp_backward, (torch.randn_like(lse), x.detach(), lse))


def test_low_precision_is_summed_in_fp32():
    x = torch.randn(4, 1000).bfloat16()
    got = ops.blocked_logsumexp(x, 4)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, x.float().unflatten(-1, (4, 250)).logsumexp(-1), rtol=1e-6, atol=1e-6)


def test_shapes_that_do_not_fit():
    for call in (
        lambda: ops.blocked_logsumexp(randn(2, 5), 2),
        lambda: ops.pick(randn(2, 5), torch.arange(4), torch.zeros(2, 1, dtype=torch.int64)),
        lambda: ops.lookup(randn(5, 2), torch.arange(4), torch.zeros(2, dtype=torch.int64), -1),
    ):
        with pytest.raises(MoecError, match="do not"):
            call()
