"""``moec::unpermute``: weighted sum of each token's K rows.

Legend: T tokens, K choices per token, N rows (any number), H hidden.

``unpermute(rows_NH, weights_TK, row_of_TK) -> y_TH``: ``y[t] = sum_k weights[t, k] * rows[row_of[t, k]]``, added in
order of k in fp32 (fp64 if an operand is), rounded once to the dtype of ``rows``.  A pair whose ``row_of`` is -1
contributes nothing, whatever its weight, and gets gradient 0.  ``row_of`` names a row at most once.

Backward: ``unpermute_backward(grad_TH, rows_NH, weights_TK, row_of_TK) -> (grad_rows_NH, grad_weights_TK)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MoecError
from .rows import accumulator, blocks, pair_of_row, sum_of_rows


def check(rows_NH: Tensor, weights_TK: Tensor, row_of_TK: Tensor, op: str = "unpermute") -> None:
    check_shapes(weights_TK, row_of_TK, op)
    if row_of_TK.numel() and int(row_of_TK.max()) >= rows_NH.shape[0]:
        raise MoecError(f"row_of names row {int(row_of_TK.max())}, there are {rows_NH.shape[0]}", where=f"moec::{op}")


def check_shapes(weights_TK: Tensor, row_of_TK: Tensor, op: str = "unpermute") -> None:
    if weights_TK.shape != row_of_TK.shape:
        raise MoecError(
            f"weights {tuple(weights_TK.shape)} and row_of {tuple(row_of_TK.shape)} differ in shape",
            where=f"moec::{op}",
        )


@torch.library.custom_op("moec::unpermute", mutates_args=(), device_types="cpu")
def unpermute(rows_NH: Tensor, weights_TK: Tensor, row_of_TK: Tensor) -> Tensor:
    check(rows_NH, weights_TK, row_of_TK)
    wide = accumulator(rows_NH.dtype, weights_TK.dtype)
    return sum_of_rows(rows_NH, row_of_TK, weights_TK, wide)


@unpermute.register_fake
def _(rows_NH, weights_TK, row_of_TK):
    return rows_NH.new_empty((row_of_TK.shape[0], rows_NH.shape[1]))


@torch.library.custom_op("moec::unpermute_backward", mutates_args=(), device_types="cpu")
def unpermute_backward(
    grad_TH: Tensor, rows_NH: Tensor, weights_TK: Tensor, row_of_TK: Tensor
) -> tuple[Tensor, Tensor]:
    (N, H), (T, K) = rows_NH.shape, row_of_TK.shape
    wide = accumulator(rows_NH.dtype, weights_TK.dtype)
    grad_rows_NH = rows_NH.new_empty((N, H))
    grad_weights_TK = weights_TK.new_zeros((T, K))
    if not T * K:
        return grad_rows_NH.zero_(), grad_weights_TK
    pair_N = pair_of_row(row_of_TK, N)
    none_N1 = (pair_N < 0)[:, None]
    some_none = bool(none_N1.any())
    pair_N.clamp_(min=0)
    token_N = pair_N.div(K, rounding_mode="floor")
    weight_N1 = weights_TK.reshape(-1, 1).index_select(0, pair_N).to(wide)
    dot_N = rows_NH.new_empty((N,), dtype=wide)
    straight = rows_NH.dtype == wide == grad_TH.dtype
    for at in blocks(N, 2 * H * wide.itemsize):  # every row is read once and its gradient written once
        out_BH = grad_rows_NH[at]
        if straight:
            grad_BH = torch.index_select(grad_TH, 0, token_N[at], out=out_BH)
        else:
            grad_BH = grad_TH.index_select(0, token_N[at]).to(wide)
        torch.sum(rows_NH[at] * grad_BH, 1, out=dot_N[at])
        torch.mul(grad_BH, weight_N1[at], out=grad_BH)
        if some_none:
            grad_BH.masked_fill_(none_N1[at], 0)
        if not straight:
            out_BH.copy_(grad_BH)
    there_P = row_of_TK.reshape(-1) >= 0
    dot_P = dot_N.index_select(0, row_of_TK.reshape(-1).clamp(min=0)) if N else dot_N.new_zeros((T * K,))
    return grad_rows_NH, grad_weights_TK.copy_(dot_P.masked_fill(~there_P, 0).view(T, K))


@unpermute_backward.register_fake
def _(grad_TH, rows_NH, weights_TK, row_of_TK):
    return rows_NH.new_empty(rows_NH.shape), weights_TK.new_empty(weights_TK.shape)


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_TH):
    grad_rows_NH, grad_weights_TK = unpermute_backward(grad_TH, *ctx.saved_tensors)
    return grad_rows_NH, grad_weights_TK, None


unpermute.register_autograd(_backward, setup_context=_setup)
