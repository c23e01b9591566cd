"""``moec::permute``: one row per (token, choice), sorted by expert.

Legend: T tokens, K choices per token, H hidden, E experts, N = T*K rows.

``permute(x_TH, ids_TK, num_experts) -> (rows_NH, counts_E, row_of_TK)``

* Rows lie in stable order of (expert, token, choice); ``counts_E`` (int64) says how many each expert has and
  ``row_of_TK`` (int64) where the row of a pair lies.
* An id of -1 drops the pair: ``row_of`` is -1 there, and the rows past ``sum(counts_E)`` are zeros.
* Backward: ``permute_backward(grad_rows_NH, row_of_TK)`` adds the K rows of a token in order of k, in fp32
  (fp64 for fp64), so it is bitwise repeatable.

``permute_kept`` is the same without the zeros: exactly ``sum(counts_E)`` rows.  It is for ids most of which are -1
(those of other ranks' experts), at the price of a size that depends on data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MoecError
from .rows import accumulator, sum_of_rows


def sorted_pairs(x_TH: Tensor, ids_TK: Tensor, num_experts: int, op: str) -> tuple[Tensor, Tensor, Tensor]:
    """``(pair of every kept row, counts_E, row_of_TK)``; pair t * K + k is choice k of token t."""
    (T, _), K = x_TH.shape, ids_TK.shape[1]
    if ids_TK.shape[0] != T:
        raise MoecError(f"x has {T} tokens but ids has {ids_TK.shape[0]}", where=f"moec::{op}")
    ids_N = ids_TK.reshape(-1)
    if ids_N.numel():
        low, high = (int(v) for v in ids_N.aminmax())
        if low < -1 or high >= num_experts:
            raise MoecError(
                f"ids lie in [{low}, {high}]; they must lie in [0, {num_experts}), or be -1 to drop the pair",
                where=f"moec::{op}",
            )
    # Dropped pairs sort last, as if they had an expert E.
    key_N = torch.where(ids_N < 0, num_experts, ids_N)
    pair_of_N = key_N.argsort(stable=True)
    counts_E = torch.bincount(key_N, minlength=num_experts + 1)[:num_experts].clone()
    kept = int(counts_E.sum())
    row_of_N = torch.full_like(pair_of_N, -1)
    row_of_N[pair_of_N[:kept]] = torch.arange(kept)
    return pair_of_N[:kept], counts_E, row_of_N.view(T, K)


def _token(pair_N: Tensor, ids_TK: Tensor) -> Tensor:
    return pair_N.div(max(ids_TK.shape[1], 1), rounding_mode="floor")


@torch.library.custom_op("moec::permute", mutates_args=(), device_types="cpu")
def permute(x_TH: Tensor, ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    pair_N, counts_E, row_of_TK = sorted_pairs(x_TH, ids_TK, num_experts, "permute")
    rows_NH = x_TH.new_empty((ids_TK.numel(), x_TH.shape[1]))
    kept = pair_N.numel()
    torch.index_select(x_TH, 0, _token(pair_N, ids_TK), out=rows_NH[:kept])
    rows_NH[kept:].zero_()
    return rows_NH, counts_E, row_of_TK


@torch.library.custom_op("moec::permute_kept", mutates_args=(), device_types="cpu")
def permute_kept(x_TH: Tensor, ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    pair_N, counts_E, row_of_TK = sorted_pairs(x_TH, ids_TK, num_experts, "permute_kept")
    return x_TH.index_select(0, _token(pair_N, ids_TK)), counts_E, row_of_TK


@permute.register_fake
def _(x_TH, ids_TK, num_experts):
    T, K = ids_TK.shape
    rows_NH = x_TH.new_empty((T * K, x_TH.shape[1]))
    return rows_NH, ids_TK.new_empty((num_experts,), dtype=torch.int64), ids_TK.new_empty((T, K), dtype=torch.int64)


@permute_kept.register_fake
def _(x_TH, ids_TK, num_experts):
    rows_NH = x_TH.new_empty((torch.library.get_ctx().new_dynamic_size(), x_TH.shape[1]))
    counts_E = ids_TK.new_empty((num_experts,), dtype=torch.int64)
    return rows_NH, counts_E, ids_TK.new_empty(ids_TK.shape, dtype=torch.int64)


@torch.library.custom_op("moec::permute_backward", mutates_args=(), device_types="cpu")
def permute_backward(grad_rows_NH: Tensor, row_of_TK: Tensor) -> Tensor:
    return sum_of_rows(grad_rows_NH, row_of_TK, None, accumulator(grad_rows_NH.dtype))


@permute_backward.register_fake
def _(grad_rows_NH, row_of_TK):
    return grad_rows_NH.new_empty((row_of_TK.shape[0], grad_rows_NH.shape[1]))


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[2])
    ctx.mark_non_differentiable(output[1], output[2])


def _backward(ctx, grad_rows_NH, _counts, _row_of):
    (row_of_TK,) = ctx.saved_tensors
    return permute_backward(grad_rows_NH, row_of_TK), None, None


permute.register_autograd(_backward, setup_context=_setup)
permute_kept.register_autograd(_backward, setup_context=_setup)
