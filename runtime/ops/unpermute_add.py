"""``moec::unpermute_add``: ``moec::unpermute`` and what is added to it, in one pass.

Legend: T tokens, K choices per token, N rows (any number), H hidden.

``unpermute_add(addends_TH, rows_NH, weights_TK, row_of_TK) -> y_TH`` is ``unpermute(rows, weights, row_of)``, to which
the addends (at least one: a residual stream, the output of a shared expert) are added in their order.  Every sum is
rounded to the dtype of ``rows``, as the ops that it stands for do, so it is what they compute, to the bit.

Backward: an addend's gradient is that of y; the others' is ``unpermute_backward``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import MoecError
from .rows import accumulator, sum_of_rows
from .unpermute import check, unpermute_backward


@torch.library.custom_op("moec::unpermute_add", mutates_args=(), device_types="cpu")
def unpermute_add(addends_TH: Sequence[Tensor], rows_NH: Tensor, weights_TK: Tensor, row_of_TK: Tensor) -> Tensor:
    check(rows_NH, weights_TK, row_of_TK, "unpermute_add")
    check_addends(addends_TH, rows_NH, row_of_TK)
    y_TH = sum_of_rows(rows_NH, row_of_TK, weights_TK, accumulator(rows_NH.dtype, weights_TK.dtype))
    for x_TH in addends_TH:
        y_TH.add_(x_TH)
    return y_TH


@unpermute_add.register_fake
def _(addends_TH, rows_NH, weights_TK, row_of_TK):
    return rows_NH.new_empty((row_of_TK.shape[0], rows_NH.shape[1]))


def check_addends(addends_TH: Sequence[Tensor], rows_NH: Tensor, row_of_TK: Tensor) -> None:
    want = (row_of_TK.shape[0], rows_NH.shape[1])
    if not addends_TH or any(tuple(x.shape) != want or x.dtype != rows_NH.dtype for x in addends_TH):
        found = [f"{x.dtype}{list(x.shape)}" for x in addends_TH]
        raise MoecError(f"addends {found}, wanted {rows_NH.dtype}{list(want)}", where="moec::unpermute_add")


def _setup(ctx, inputs, output) -> None:
    ctx.addends = len(inputs[0])
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx, grad_TH):
    return [grad_TH] * ctx.addends, *unpermute_backward(grad_TH, *ctx.saved_tensors), None


unpermute_add.register_autograd(_backward, setup_context=_setup)
