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
from .rows import accumulator, take_rows


def _check(rows_NH: Tensor, weights_TK: Tensor, row_of_TK: Tensor) -> None:
    if weights_TK.shape != row_of_TK.shape:
        raise MoecError(
            f"weights {tuple(weights_TK.shape)} and row_of {tuple(row_of_TK.shape)} differ in shape",
            where="moec::unpermute",
        )
    if row_of_TK.numel() and int(row_of_TK.max()) >= rows_NH.shape[0]:
        raise MoecError(
            f"row_of names row {int(row_of_TK.max())}, there are {rows_NH.shape[0]}", where="moec::unpermute"
        )


@torch.library.custom_op("moec::unpermute", mutates_args=(), device_types="cpu")
def unpermute(rows_NH: Tensor, weights_TK: Tensor, row_of_TK: Tensor) -> Tensor:
    _check(rows_NH, weights_TK, row_of_TK)
    wide = accumulator(rows_NH.dtype, weights_TK.dtype)
    y_TH = rows_NH.new_zeros((row_of_TK.shape[0], rows_NH.shape[1]), dtype=wide)
    weights_TK = weights_TK.to(wide).masked_fill(row_of_TK < 0, 0)
    for k in range(row_of_TK.shape[1]):
        y_TH.addcmul_(take_rows(rows_NH, row_of_TK[:, k]).to(wide), weights_TK[:, k, None])
    return y_TH.to(rows_NH.dtype, copy=False)


@unpermute.register_fake
def _(rows_NH, weights_TK, row_of_TK):
    return rows_NH.new_empty((row_of_TK.shape[0], rows_NH.shape[1]))


@torch.library.custom_op("moec::unpermute_backward", mutates_args=(), device_types="cpu")
def unpermute_backward(
    grad_TH: Tensor, rows_NH: Tensor, weights_TK: Tensor, row_of_TK: Tensor
) -> tuple[Tensor, Tensor]:
    wide = accumulator(rows_NH.dtype, weights_TK.dtype)
    grad_TH = grad_TH.to(wide)
    grad_rows_NH = rows_NH.new_zeros(rows_NH.shape)
    grad_weights_TK = weights_TK.new_zeros(weights_TK.shape)
    for k in range(row_of_TK.shape[1]):
        row_T = row_of_TK[:, k]
        kept = (row_T >= 0).nonzero().squeeze(1)
        row, grad = row_T[kept], grad_TH[kept]
        grad_rows_NH[row] = (weights_TK[kept, k, None].to(wide) * grad).to(rows_NH.dtype)
        grad_weights_TK[kept, k] = (rows_NH[row].to(wide) * grad).sum(1).to(weights_TK.dtype)
    return grad_rows_NH, grad_weights_TK


@unpermute_backward.register_fake
def _(grad_TH, rows_NH, weights_TK, row_of_TK):
    return rows_NH.new_empty(rows_NH.shape), weights_TK.new_empty(weights_TK.shape)


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_TH):
    grad_rows_NH, grad_weights_TK = unpermute_backward(grad_TH, *ctx.saved_tensors)
    return grad_rows_NH, grad_weights_TK, None


unpermute.register_autograd(_backward, setup_context=_setup)
