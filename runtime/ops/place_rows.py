"""``moec::place_rows`` and ``moec::add_rows``: tokens to given rows, and the sum of each token's rows.

Legend: T tokens, D rows a token at most, N rows, C columns.

``row_of_TD`` (int64) is what ``permute`` gave for one payload, so that others can follow it; it names a row at most
once, and -1 is no row.

* ``place_rows(x_TC, row_of_TD, rows) -> y_NC``: ``y[row_of[t, d]] = x[t]``, zeros where no token goes; N is ``rows``.
* ``add_rows(y_NC, row_of_TD) -> x_TC``: ``x[t] = sum_d y[row_of[t, d]]``, added in order of d in fp32 (fp64 for fp64).

Each is the other's backward; both are bitwise repeatable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rows import accumulator, take_rows


@torch.library.custom_op("moec::place_rows", mutates_args=(), device_types=("cpu", "cuda"))
def place_rows(x_TC: Tensor, row_of_TD: Tensor, rows: int) -> Tensor:
    y_NC = x_TC.new_zeros((rows, x_TC.shape[1]))
    token, slot = torch.where(row_of_TD >= 0)
    y_NC[row_of_TD[token, slot]] = x_TC[token]
    return y_NC


@place_rows.register_fake
def _(x_TC, row_of_TD, rows):
    return x_TC.new_empty((rows, x_TC.shape[1]))


@torch.library.custom_op("moec::add_rows", mutates_args=(), device_types=("cpu", "cuda"))
def add_rows(y_NC: Tensor, row_of_TD: Tensor) -> Tensor:
    x_TC = y_NC.new_zeros((row_of_TD.shape[0], y_NC.shape[1]), dtype=accumulator(y_NC.dtype))
    for d in range(row_of_TD.shape[1]):
        x_TC += take_rows(y_NC, row_of_TD[:, d])
    return x_TC.to(y_NC.dtype, copy=False)


@add_rows.register_fake
def _(y_NC, row_of_TD):
    return y_NC.new_empty((row_of_TD.shape[0], y_NC.shape[1]))


def _setup_place(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[1])


def _setup_add(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.rows = inputs[0].shape[0]


def _place_backward(ctx, grad_NC):
    return add_rows(grad_NC, *ctx.saved_tensors), None, None


def _add_backward(ctx, grad_TC):
    return place_rows(grad_TC, *ctx.saved_tensors, ctx.rows), None


place_rows.register_autograd(_place_backward, setup_context=_setup_place)
add_rows.register_autograd(_add_backward, setup_context=_setup_add)
