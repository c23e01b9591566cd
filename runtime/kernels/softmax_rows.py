"""Rows of logits on a GPU: read once for a cross entropy, read and written once for its gradient.

Legend: N rows, V entries.

Two kernels, which ``moec::cross_entropy`` and ``moec::logsumexp_pick`` share; ``ops/softmax_rows.py`` says what they
compute, and why the gradient is not stored in the forward.

* ``row_sums``: a program has a row, and goes over it in blocks of columns with a running maximum and sum.
* ``row_grads``: a program has a block of columns of a row.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..ops import cross_entropy as whole
from ..ops import logsumexp_pick as parts
from ..ops.rows import accumulator
from .expressions import TRITON, computing
from .router_text import pad
from .source import load
from .template import fill

COLUMNS = 4096

TEMPLATE = '''"""Rows of logits of <columns> entries: sums for a cross entropy, and its gradient."""

import triton
import triton.language as tl


@triton.jit
def row_sums(x_ptr, place_ptr, lse_ptr, picked_ptr, total_ptr, stride):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full((), float("-inf"), <math>)
    scaled = tl.zeros((), <math>)
    total = tl.zeros((), <math>)
    for start in range(0, <columns>, <block>):
        column = start + tl.arange(0, <block>)
        real = column < <columns>
        x = tl.load(x_ptr + row * stride + column, mask=real, other=float("-inf")).to(<math>)
        before = largest
        largest = tl.maximum(largest, tl.max(x, 0))
        from_here = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
        scaled = scaled * tl.exp(before - from_here) + tl.sum(tl.exp(x - from_here), 0)
        total += tl.sum(tl.where(real, x, 0.0), 0)
    place = tl.load(place_ptr + row)
    tl.store(picked_ptr + row, tl.load(x_ptr + row * stride + place, mask=place >= 0, other=0.0).to(<math>))
    tl.store(lse_ptr + row, tl.where(tl.abs(largest) == float("inf"), 0.0, largest) + tl.log(scaled))
    tl.store(total_ptr + row, total)


@triton.jit
def row_grads(x_ptr, place_ptr, lse_ptr, a_ptr, b_ptr, c_ptr, out_ptr, stride):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * <block> + tl.arange(0, <block>)
    real = column < <columns>
    x = tl.load(x_ptr + row * stride + column, mask=real, other=0.0).to(<math>)
    lse = tl.load(lse_ptr + row)
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    a = tl.load(a_ptr + row)
    grad = tl.where(a == 0.0, 0.0, a * tl.exp(x - lse)) + tl.load(c_ptr + row)
    grad = tl.where(column == tl.load(place_ptr + row), grad + tl.load(b_ptr + row), grad)
    tl.store(out_ptr + row * <columns> + column, grad.to(<storage>), mask=real)
'''


@cache
def source(columns: int, dtype: torch.dtype) -> str:
    """The text of both kernels."""
    math, storage = computing(dtype), TRITON[dtype]
    return fill(TEMPLATE, columns=columns, block=block(columns), math=math, storage=storage)


def block(columns: int) -> int:
    return min(COLUMNS, pad(columns))


@cache
def kernels(columns: int, dtype: torch.dtype) -> Any:
    return load(source(columns, dtype), "softmax_rows")


def row_sums(x_NV: Tensor, place_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``ops.softmax_rows.row_sums``."""
    N, V = x_NV.shape
    x_NV = x_NV if x_NV.stride(1) == 1 else x_NV.contiguous()
    lse_N, picked_N, total_N = (x_NV.new_empty((N,), dtype=accumulator(x_NV.dtype)) for _ in range(3))
    if N:
        out = lse_N, picked_N, total_N
        kernels(V, x_NV.dtype).row_sums[(N,)](x_NV, place_N.contiguous(), *out, x_NV.stride(0), num_warps=warps(V))
    return lse_N, picked_N, total_N


def row_grads(x_NV: Tensor, place_N: Tensor, lse_N: Tensor, a_N: Tensor, b_N: Tensor, c_N: Tensor) -> Tensor:
    """``ops.softmax_rows.row_grads``."""
    N, V = x_NV.shape
    x_NV = x_NV if x_NV.stride(1) == 1 else x_NV.contiguous()
    grad_NV = x_NV.new_empty((N, V))
    if N:
        given = [x.contiguous() for x in (place_N, lse_N, *(f.to(lse_N.dtype) for f in (a_N, b_N, c_N)))]
        grid = (N, -(-V // block(V)))
        kernels(V, x_NV.dtype).row_grads[grid](x_NV, *given, grad_NV, x_NV.stride(0), num_warps=warps(V))
    return grad_NV


def warps(columns: int) -> int:
    return max(1, min(8, block(columns) // 512))


def cross_entropy(
    logits_NV: Tensor, labels_N: Tensor, ignore_index: int, smoothing: float, reduction: int
) -> tuple[Tensor, Tensor]:
    """``moec::cross_entropy``."""
    whole.check(logits_NV, labels_N)
    counted_N, V = labels_N != ignore_index, logits_NV.shape[1]
    known = (((labels_N >= 0) & (labels_N < V)) | ~counted_N).all()
    torch.ops.aten._assert_async.msg(known, f"moec::cross_entropy: a label is outside of [0, {V})")
    sums = row_sums(logits_NV, labels_N.masked_fill(~counted_N, -1))
    return whole.reduced(*sums, counted_N, V, smoothing, reduction), sums[0]


def cross_entropy_backward(
    grad: Tensor, logits_NV: Tensor, labels_N: Tensor, lse_N: Tensor, ignore_index: int, smoothing: float,
    reduction: int,
) -> Tensor:  # fmt: skip
    """``moec::cross_entropy_backward``."""
    place_N, *factors = whole.grad_factors(grad, labels_N, logits_NV.shape[1], ignore_index, smoothing, reduction)
    return row_grads(logits_NV, place_N, lse_N, *factors)


def logsumexp_pick(x_NV: Tensor, vocab_V: Tensor, ids_N1: Tensor, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """``moec::logsumexp_pick``."""
    parts.check(x_NV, vocab_V, ids_N1, blocks)
    sums = row_sums(parts.by_block(x_NV, blocks), parts.places(vocab_V, ids_N1, blocks))
    return parts.shaped(*sums, x_NV, blocks)


def logsumexp_pick_backward(
    grad_Nb: Tensor, grad_N1: Tensor, grad_N: Tensor, x_NV: Tensor, vocab_V: Tensor, ids_N1: Tensor, lse_Nb: Tensor
) -> Tensor:
    """``moec::logsumexp_pick_backward``."""
    place_M, *factors = parts.grad_factors(grad_Nb, grad_N1, grad_N, vocab_V, ids_N1)
    rows_MV = parts.by_block(x_NV, lse_Nb.shape[-1])
    return row_grads(rows_MV, place_M, lse_Nb.reshape(-1), *factors).view(x_NV.shape)


whole.cross_entropy.register_kernel("cuda")(cross_entropy)
whole.cross_entropy_backward.register_kernel("cuda")(cross_entropy_backward)
parts.logsumexp_pick.register_kernel("cuda")(logsumexp_pick)
parts.logsumexp_pick_backward.register_kernel("cuda")(logsumexp_pick_backward)
