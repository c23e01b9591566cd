"""Rows of logits, read once: what a cross entropy is made of, and its gradient (not ops; CPU kernels).

Legend: N rows, V entries, R rows of a block.

``row_sums(x_NV, place_N) -> (lse_N, picked_N, total_N)`` in fp32 (fp64 for fp64): logsumexp of the row, its entry at
``place`` (0 where that is -1), the sum of its entries.

``row_grads(x_NV, place_N, lse_N, a_N, b_N, c_N) -> [N, V]`` in x's dtype, rounded once:

    a · exp(x − lse) where a is not 0  +  b where the column is ``place``  +  c

that is, a softmax's share, a label's and a smoothed label's.  It is formed from the logits anew.  A gradient that the
forward had stored would be written there, read in the backward and, times the loss's own gradient, written again: the
logits' bytes four times in all, against three (read, read, written) here, and a tensor as large as the logits would
live in between.

Both work in blocks of rows that stay in a core's cache: besides the result, nothing of the size [N, V] is made, also
where rows of bf16 are widened.  Rows may have any distance from each other, so that a slice needs no copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rows import accumulator, blocks


def row_sums(x_NV: Tensor, place_N: Tensor, with_total: bool) -> tuple[Tensor, Tensor, Tensor]:
    (N, V), wide = x_NV.shape, accumulator(x_NV.dtype)
    lse_N, picked_N, total_N = (x_NV.new_zeros((N,), dtype=wide) for _ in range(3))
    for at in blocks(N, V * wide.itemsize):
        x_RV, place_R1 = x_NV[at].to(wide), place_N[at, None]
        torch.logsumexp(x_RV, 1, out=lse_N[at])
        picked_N[at] = x_RV.gather(1, place_R1.clamp(min=0)).masked_fill_(place_R1 < 0, 0).squeeze(1)
        if with_total:
            torch.sum(x_RV, 1, out=total_N[at])
    return lse_N, picked_N, total_N


def row_grads(
    x_NV: Tensor, place_N: Tensor, lse_N: Tensor, a_N: Tensor, b_N: Tensor, c_N: Tensor
) -> Tensor:
    (N, V), wide = x_NV.shape, lse_N.dtype
    grad_NV = x_NV.new_empty((N, V))
    # A row of -inf alone has no softmax: exp(-inf - 0) = 0 and not exp(-inf + inf).
    lse_N1 = lse_N.masked_fill(lse_N == -torch.inf, 0)[:, None]
    there_N1 = (place_N >= 0)[:, None]
    some_zero, spread = bool((a_N == 0).any()), bool(c_N.any())
    for at in blocks(N, V * wide.itemsize):
        straight = grad_NV.dtype == wide
        out_RV = grad_NV[at] if straight else grad_NV.new_empty((at.stop - at.start, V), dtype=wide)
        torch.sub(x_NV[at], lse_N1[at], out=out_RV)
        out_RV.exp_().mul_(a_N[at, None])
        if some_zero:  # whatever the logits of an ignored row are
            out_RV.masked_fill_((a_N[at] == 0)[:, None], 0)
        if spread:
            out_RV.add_(c_N[at, None])
        out_RV.scatter_add_(1, place_N[at, None].clamp(min=0), (b_N[at, None] * there_N1[at]).to(wide))
        if not straight:
            grad_NV[at] = out_RV
    return grad_NV
