"""``moec::split_tokens`` and ``moec::join_tokens``: values, gradients, registration."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import moec.runtime  # noqa: F401  registers the ops
from moec.runtime.errors import MoecError

ops = torch.ops.moec


def by_token(x: Tensor, lead: int, blocks: int) -> list[Tensor]:
    """Token for token, what a chunk has of it: x itself, or its places in every block."""
    if lead == 1:
        return list(x.unflatten(0, (-1, blocks)))
    length = x.shape[1] // blocks
    return [x[b, [g * length + s for g in range(blocks)]] for b in range(x.shape[0]) for s in range(length)]


@given(st.integers(0, 4), st.integers(1, 4), st.sampled_from([1, 1, 2, 3]), st.integers(1, 5), st.sampled_from([1, 2]))
def test_chunks_are_the_tokens_in_order(B, S, blocks, count, lead):
    shape = (B * S * blocks, 3) if lead == 1 else (B, blocks * S, 3)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    chunks = ops.split_tokens(x, count, lead, blocks)
    want, sizes = by_token(x.detach(), lead, blocks), [len(c) // (blocks if lead == 1 else 1) for c in chunks]
    assert sum(sizes) == B * S and max(sizes) - min(sizes) <= 1
    tokens = [t for c in chunks for t in (c.unflatten(0, (-1, blocks)) if lead == 1 else c)]
    for got, one in zip(tokens, want, strict=True):
        assert torch.equal(got.reshape(one.shape), one)

    joined = ops.join_tokens(chunks, shape[:lead], blocks)
    assert torch.equal(joined, x) and joined.shape == x.shape
    weights = torch.randn(shape, dtype=torch.float64)
    joined.backward(weights)
    assert torch.equal(x.grad, weights)


def test_a_chunk_that_nobody_reads_gets_no_gradient():
    x = torch.randn(5, 2, requires_grad=True)
    ops.split_tokens(x, 2, 1, 1)[1].sum().backward()
    assert x.grad.tolist() == [[0, 0]] * 2 + [[1, 1]] * 3


def test_what_is_no_chunks():
    with pytest.raises(MoecError, match="dim 1 of shape"):
        ops.split_tokens(torch.zeros(2, 5, 1), 2, 2, 2)
    with pytest.raises(MoecError, match="7 rows do not consist of blocks of 2"):
        ops.split_tokens(torch.zeros(7, 1), 2, 1, 2)
    with pytest.raises(MoecError, match=r"\[2, 1\] are not the tokens of equal chunks"):
        ops.join_tokens([torch.zeros(2, 1), torch.zeros(1, 1)], [3], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_opcheck(dtype):
    x = torch.arange(24).reshape(2, 4, 3).to(dtype)
    if dtype.is_floating_point:
        x.requires_grad_()
    for blocks in (1, 2):
        torch.library.opcheck(ops.split_tokens, (x, 3, 2, blocks))
        chunks = [c.detach().requires_grad_(dtype.is_floating_point) for c in ops.split_tokens(x, 3, 2, blocks)]
        torch.library.opcheck(ops.join_tokens, (chunks, [2, 4], blocks))
    torch.library.opcheck(ops.join_tokens, ([x[0, :1].detach(), x[0, :2].detach()], [3], 1))
    torch.library.opcheck(ops.split_tokens, (x[0], 2, 1, 2))
