"""``moec::pad_rows`` and ``moec::take_rows``: make the number of rows a multiple, and undo it.

Legend: T rows, M multiple, H width.

``pad_rows(x_TH, multiple, fill) -> y`` appends rows of ``fill`` until ``multiple`` divides the rows (tokens that tp
ranks are to share, padded with id −1).  ``take_rows(x, rows) -> x[:rows]``.  Padded rows get no gradient, taken-away
rows zero gradient: each one's backward is the other.  Every rank pads and takes for itself, whatever shard of a larger
tensor it holds.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("moec::pad_rows", mutates_args=(), device_types=("cpu", "cuda"))
def pad_rows(x_TH: Tensor, multiple: int, fill: float) -> Tensor:
    return _extend(x_TH, -x_TH.shape[0] % multiple, fill)


@torch.library.custom_op("moec::take_rows", mutates_args=(), device_types=("cpu", "cuda"))
def take_rows(x_TH: Tensor, rows: int) -> Tensor:
    return x_TH[:rows].clone()


@torch.library.custom_op("moec::take_rows_backward", mutates_args=(), device_types=("cpu", "cuda"))
def take_rows_backward(grad: Tensor, rows: int) -> Tensor:
    return _extend(grad, rows - grad.shape[0], 0.0)


def _extend(x: Tensor, missing: int, fill: float) -> Tensor:
    return torch.cat([x, x.new_full((missing, *x.shape[1:]), fill)])


@pad_rows.register_fake
def _(x_TH, multiple, fill):
    rows = (x_TH.shape[0] + multiple - 1) // multiple * multiple
    return x_TH.new_empty((rows, *x_TH.shape[1:]))


@take_rows.register_fake
def _(x_TH, rows):
    return x_TH.new_empty((rows, *x_TH.shape[1:]))


@take_rows_backward.register_fake
def _(grad, rows):
    return grad.new_empty((rows, *grad.shape[1:]))


def _setup(ctx, inputs, output) -> None:
    ctx.rows = inputs[0].shape[0]


pad_rows.register_autograd(lambda ctx, g: (take_rows(g, ctx.rows), None, None), setup_context=_setup)
take_rows.register_autograd(lambda ctx, g: (take_rows_backward(g, ctx.rows), None), setup_context=_setup)
