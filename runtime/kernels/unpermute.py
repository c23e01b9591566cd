"""Unpermute on a GPU: the K rows of a token, weighted or not, added in order of k, and what is added to that.

Legend: T tokens, K choices, H hidden, N rows.

A program has some columns of one token.  Sums are formed in fp32 (fp64 for fp64) and rounded to the dtype of the rows,
then once more for every addend, as ``moec::unpermute_add`` says.  Without weights it is the backward of a permute.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..ops import permute as permute_op
from ..ops import unpermute as unpermute_op
from ..ops import unpermute_add as add_op
from ..ops.rows import accumulator
from .expressions import TRITON, computing
from .router_text import pad
from .source import load
from .template import fill

COLUMNS = 2048

TEMPLATE = '''"""Unpermute rows of <columns> columns, <choices> choices a token, <addends> addends."""

import triton
import triton.language as tl


@triton.jit
def unpermute(rows_ptr, weights_ptr, row_of_ptr, <pointers>y_ptr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * <block> + tl.arange(0, <block>)
    real = column < <columns>
    total = tl.zeros((<block>,), <math>)
    for k in range(<choices>):
        row = tl.load(row_of_ptr + token * <choices> + k)
        x = tl.load(rows_ptr + row * <columns> + column, mask=real & (row >= 0), other=0.0).to(<math>)
        <weigh>
        total += x
    y = total.to(<storage>)
    <add>
    tl.store(y_ptr + token * <columns> + column, y, mask=real)
'''


@cache
def source(
    choices: int, columns: int, dtype: torch.dtype, weights: torch.dtype | None = None, addends: int = 0
) -> str:
    """The text of the kernel; ``weights`` is their dtype, None without any."""
    math = computing(accumulator(dtype, weights or dtype))
    weigh = [
        f"weight = tl.load(weights_ptr + token * {choices} + k, mask=row >= 0, other=0.0).to({math})",
        "x = x * weight",
    ]
    add = [
        f"y = (y.to({math}) + tl.load(addend_{i}_ptr + token * {columns} + column, mask=real, other=0.0).to({math}))"
        f".to({TRITON[dtype]})"
        for i in range(addends)
    ]
    return fill(
        TEMPLATE, choices=choices, columns=columns, addends=addends, block=block(columns), math=math,
        storage=TRITON[dtype], pointers="".join(f"addend_{i}_ptr, " for i in range(addends)),
        weigh=weigh if weights else [], add=add,
    )  # fmt: skip


def block(columns: int) -> int:
    return min(COLUMNS, pad(columns))


def warps(columns: int) -> int:
    return max(1, min(4, block(columns) // 256))


@cache
def kernel(choices: int, columns: int, dtype: torch.dtype, weights: torch.dtype | None, addends: int) -> Any:
    return load(source(choices, columns, dtype, weights, addends), "unpermute").unpermute


def launch(
    rows_NH: Tensor, weights_TK: Tensor | None, row_of_TK: Tensor, addends_TH: Sequence[Tensor] = ()
) -> Tensor:
    """``y_TH``."""
    (T, K), H = row_of_TK.shape, rows_NH.shape[1]
    y_TH = rows_NH.new_empty((T, H))
    if T and H:
        run = kernel(K, H, rows_NH.dtype, None if weights_TK is None else weights_TK.dtype, len(addends_TH))
        weights_TK = row_of_TK if weights_TK is None else weights_TK.contiguous()
        inputs = rows_NH.contiguous(), weights_TK, row_of_TK.contiguous(), *(x.contiguous() for x in addends_TH)
        run[(T, -(-H // block(H)))](*inputs, y_TH, num_warps=warps(H))
    return y_TH


def check_rows(rows_NH: Tensor, row_of_TK: Tensor) -> None:
    N = rows_NH.shape[0]
    torch.ops.aten._assert_async.msg((row_of_TK < N).all(), f"moec::unpermute: another row than the {N} is named")


def unpermute(rows_NH: Tensor, weights_TK: Tensor, row_of_TK: Tensor) -> Tensor:
    """``moec::unpermute``."""
    unpermute_op.check_shapes(weights_TK, row_of_TK)
    check_rows(rows_NH, row_of_TK)
    return launch(rows_NH, weights_TK, row_of_TK)


def unpermute_add(addends_TH: Sequence[Tensor], rows_NH: Tensor, weights_TK: Tensor, row_of_TK: Tensor) -> Tensor:
    """``moec::unpermute_add``."""
    unpermute_op.check_shapes(weights_TK, row_of_TK, "unpermute_add")
    add_op.check_addends(addends_TH, rows_NH, row_of_TK)
    check_rows(rows_NH, row_of_TK)
    return launch(rows_NH, weights_TK, row_of_TK, addends_TH)


unpermute_op.unpermute.register_kernel("cuda")(unpermute)
add_op.unpermute_add.register_kernel("cuda")(unpermute_add)
permute_op.permute_backward.register_kernel("cuda")(lambda grad, row_of: launch(grad, None, row_of))
