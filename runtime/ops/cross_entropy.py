"""``moec::cross_entropy``: the loss of rows of logits, read once, and its gradient, written once.

Legend: N rows, V classes.

``cross_entropy(logits_NV, labels_N, ignore_index, smoothing, reduction) -> (loss, lse_N)``: what
``torch.nn.functional.cross_entropy`` computes of ``logits.float()`` and class indices (int64), in fp32 (fp64 for fp64
logits).  With smoothing e a row's loss is

    (1 − e) · (lse − x[label])  +  e/V · (V · lse − sum x),   0 where the label is ``ignore_index``

``reduction`` is torch's number: 0 ``none`` ([N]), 1 ``mean`` over the rows that are not ignored (NaN without any),
2 ``sum``.  Whatever an ignored row holds, it has no part in the loss and no gradient.  ``lse_N`` is kept for the
backward and has no gradient of its own.

Raises MoecError for a label outside of [0, V) that is not ``ignore_index`` (on a GPU, which is not waited for, an
asynchronous assertion stops the device).

Backward: ``cross_entropy_backward(grad, logits, labels, lse, ignore_index, smoothing, reduction) -> [N, V]``;
``softmax_rows`` says why the logits are read again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MoecError
from .rows import accumulator
from .softmax_rows import row_grads, row_sums


@torch.library.custom_op("moec::cross_entropy", mutates_args=(), device_types="cpu")
def cross_entropy(
    logits_NV: Tensor, labels_N: Tensor, ignore_index: int, smoothing: float, reduction: int
) -> tuple[Tensor, Tensor]:
    check(logits_NV, labels_N)
    counted_N, V = labels_N != ignore_index, logits_NV.shape[1]
    if bool((((labels_N < 0) | (labels_N >= V)) & counted_N).any()):
        raise MoecError(f"a label is outside of [0, {V})", where="moec::cross_entropy")
    sums = row_sums(logits_NV, labels_N.masked_fill(~counted_N, -1), smoothing != 0)
    return reduced(*sums, counted_N, V, smoothing, reduction), sums[0]


@cross_entropy.register_fake
def _(logits_NV, labels_N, ignore_index, smoothing, reduction):
    lse_N = logits_NV.new_empty((logits_NV.shape[0],), dtype=accumulator(logits_NV.dtype))
    return (torch.empty_like(lse_N) if reduction == 0 else lse_N.new_empty(())), lse_N


@torch.library.custom_op("moec::cross_entropy_backward", mutates_args=(), device_types="cpu")
def cross_entropy_backward(
    grad: Tensor,
    logits_NV: Tensor,
    labels_N: Tensor,
    lse_N: Tensor,
    ignore_index: int,
    smoothing: float,
    reduction: int,
) -> Tensor:
    place_N, *factors = grad_factors(grad, labels_N, logits_NV.shape[1], ignore_index, smoothing, reduction)
    return row_grads(logits_NV, place_N, lse_N, *factors)


@cross_entropy_backward.register_fake
def _(grad, logits_NV, labels_N, lse_N, ignore_index, smoothing, reduction):
    return logits_NV.new_empty(logits_NV.shape)


def check(logits_NV: Tensor, labels_N: Tensor) -> None:
    if logits_NV.ndim != 2 or labels_N.shape != logits_NV.shape[:1] or labels_N.dtype.is_floating_point:
        raise MoecError(
            f"logits {tuple(logits_NV.shape)} and labels {tuple(labels_N.shape)} of {labels_N.dtype}",
            where="moec::cross_entropy",
        )


def reduced(
    lse_N: Tensor, picked_N: Tensor, total_N: Tensor, counted_N: Tensor, V: int, smoothing: float, reduction: int
) -> Tensor:
    """The loss from the sums of rows."""
    loss_N = lse_N - picked_N if not smoothing else lse_N - (1 - smoothing) * picked_N - smoothing / V * total_N
    loss_N = loss_N.masked_fill(~counted_N, 0)
    if reduction == 0:
        return loss_N
    return loss_N.sum() if reduction == 2 else loss_N.sum() / counted_N.sum()


def grad_factors(
    grad: Tensor, labels_N: Tensor, V: int, ignore_index: int, smoothing: float, reduction: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What ``row_grads`` takes: place, a, b, c."""
    counted_N = labels_N != ignore_index
    if reduction == 1:
        grad = grad / counted_N.sum()
    grad_N = grad.expand(labels_N.shape).masked_fill(~counted_N, 0)
    return labels_N.masked_fill(~counted_N, -1), grad_N, grad_N * (smoothing - 1), grad_N * (-smoothing / V)


def _setup(ctx, inputs, output) -> None:
    logits_NV, labels_N, *ctx.how = inputs
    ctx.save_for_backward(logits_NV, labels_N, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _lse):
    return cross_entropy_backward(grad, *ctx.saved_tensors, *ctx.how), None, None, None, None


cross_entropy.register_autograd(_backward, setup_context=_setup)
