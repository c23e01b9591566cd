"""A bias per group of rows, where no product stands before it.

Legend: N rows in groups, E experts, M columns.

``y[row] = x[row] + b[expert]``, in fp32, rounded once; rows behind the last group are copied.  A program finds the
experts of its rows by counting the groups that end at or before them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .expressions import TRITON, computing
from .source import load
from .template import fill

ROWS, COLUMNS = 32, 128

TEMPLATE = '''"""moec::grouped_add: a bias per group of rows."""

import triton
import triton.language as tl


@triton.jit
def grouped_add(offset_ptr, x_ptr, b_ptr, y_ptr, num_rows):
    row = tl.program_id(0) * <rows> + tl.arange(0, <rows>)
    expert = tl.zeros((<rows>,), tl.int64)
    for e in range(1, <experts> + 1):
        expert += (row >= tl.load(offset_ptr + e)).to(tl.int64)
    column = tl.program_id(1) * <block> + tl.arange(0, <block>)
    ok = (row < num_rows)[:, None] & (column < <columns>)[None, :]
    at = row[:, None].to(tl.int64) * <columns> + column[None, :]
    x = tl.load(x_ptr + at, mask=ok, other=0.0).to(<math>)
    owned = ok & (expert < <experts>)[:, None]
    b = tl.load(b_ptr + expert[:, None] * <columns> + column[None, :], mask=owned, other=0.0)
    tl.store(y_ptr + at, (x + b.to(<math>)).to(<storage>), mask=ok)
'''


def source(experts: int, columns: int, dtype: torch.dtype) -> str:
    """The text of the kernel."""
    return fill(
        TEMPLATE, experts=experts, columns=columns, math=computing(dtype), storage=TRITON[dtype], rows=ROWS,
        block=COLUMNS,
    )  # fmt: skip


@cache
def kernel(experts: int, columns: int, dtype: torch.dtype) -> Any:
    return load(source(experts, columns, dtype), "grouped_add").grouped_add


def launch(offset_E1: Tensor, x_NM: Tensor, b_EM: Tensor) -> Tensor:
    """``[N, M]``; both operands contiguous."""
    (N, M), E = x_NM.shape, b_EM.shape[0]
    y_NM = torch.empty_like(x_NM)
    if N and M:
        kernel(E, M, x_NM.dtype)[(-(-N // ROWS), -(-M // COLUMNS))](offset_E1, x_NM, b_EM, y_NM, N, num_warps=4)
    return y_NM
