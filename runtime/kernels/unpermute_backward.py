"""The backward of unpermute on a GPU: gradients of the rows and of the weights, in one kernel.

Legend: T tokens, K choices, H hidden, N rows.

The first T programs have a token each: its gradient is read once, each of its K rows is read once, and stored are
``weight · gradient`` for every row and the K products ``row · gradient``.  The other programs store zeros to the rows
that are no pair's (``permute.named``).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..ops import unpermute as unpermute_op
from ..ops.rows import accumulator
from .expressions import TRITON, computing
from .permute import ZERO_ROWS, named
from .router_text import pad
from .source import load
from .template import fill

COLUMNS = 2048

TEMPLATE = '''"""Unpermute, backward: rows of <columns> columns, <choices> choices a token."""

import triton
import triton.language as tl


@triton.jit
def unpermute_backward(
    grad_ptr, rows_ptr, weights_ptr, row_of_ptr, named_ptr, rows_grad_ptr, weights_grad_ptr, num_tokens, num_rows
):
    program = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, <choices_pad>)
    if program < num_tokens:
        dots = tl.zeros((<choices_pad>,), <math>)
        for start in range(0, <columns>, <block>):
            column = start + tl.arange(0, <block>)
            real = column < <columns>
            grad = tl.load(grad_ptr + program * <columns> + column, mask=real, other=0.0).to(<math>)
            for k in range(<choices>):
                row = tl.load(row_of_ptr + program * <choices> + k)
                weight = tl.load(weights_ptr + program * <choices> + k).to(<math>)
                at = row * <columns> + column
                x = tl.load(rows_ptr + at, mask=real & (row >= 0), other=0.0).to(<math>)
                tl.store(rows_grad_ptr + at, (weight * grad).to(<storage>), mask=real & (row >= 0))
                product = tl.sum(tl.where(row >= 0, x * grad, 0.0), 0)
                dots = tl.where(choice == k, dots + product, dots)
        to = weights_grad_ptr + program * <choices> + choice
        tl.store(to, dots.to(<weights>), mask=choice < <choices>)
    else:
        for i in range(<zero_rows>):
            row = (program - num_tokens) * <zero_rows> + i
            empty = tl.load(named_ptr + row, mask=row < num_rows, other=1) == 0
            for start in range(0, <columns>, <block>):
                column = start + tl.arange(0, <block>)
                zeros = tl.zeros((<block>,), <storage>)
                tl.store(rows_grad_ptr + row * <columns> + column, zeros, mask=(column < <columns>) & empty)
'''


@cache
def source(choices: int, columns: int, dtype: torch.dtype, weights: torch.dtype) -> str:
    """The text of the kernel."""
    return fill(
        TEMPLATE, choices=choices, choices_pad=pad(choices), columns=columns, block=min(COLUMNS, pad(columns)),
        math=computing(accumulator(dtype, weights)), storage=TRITON[dtype], weights=TRITON[weights],
        zero_rows=ZERO_ROWS,
    )  # fmt: skip


def warps(columns: int) -> int:
    return max(1, min(4, pad(columns) // 256))


@cache
def kernel(choices: int, columns: int, dtype: torch.dtype, weights: torch.dtype) -> Any:
    return load(source(choices, columns, dtype, weights), "unpermute_backward").unpermute_backward


def launch(grad_TH: Tensor, rows_NH: Tensor, weights_TK: Tensor, row_of_TK: Tensor) -> tuple[Tensor, Tensor]:
    """``(grad_rows_NH, grad_weights_TK)``: ``moec::unpermute_backward``."""
    (T, K), (N, H) = row_of_TK.shape, rows_NH.shape
    grad_rows_NH, grad_weights_TK = rows_NH.new_empty((N, H)), weights_TK.new_empty((T, K))
    if not H or not K:
        return grad_rows_NH.zero_(), grad_weights_TK.zero_()
    if T or N:
        run = kernel(K, H, rows_NH.dtype, weights_TK.dtype)
        inputs = [x.contiguous() for x in (grad_TH, rows_NH, weights_TK, row_of_TK)]
        grid = (T + -(-N // ZERO_ROWS),)
        run[grid](*inputs, named(row_of_TK, N), grad_rows_NH, grad_weights_TK, T, N, num_warps=warps(H))
    return grad_rows_NH, grad_weights_TK


unpermute_op.unpermute_backward.register_kernel("cuda")(launch)
