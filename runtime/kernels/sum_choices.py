"""The sum over a token's choices, in order of k.

Legend: T tokens, K choices, C columns.

``y[token] = Σ_k rows[token · K + k]``, in fp32, rounded once, over the choices whose pair was not dropped
(``row_of[token, k]`` ≥ 0).  Rows lie by pair, so a token's are neighbours.  Bitwise repeatable.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .expressions import TRITON, computing
from .source import load
from .template import fill

BLOCK = 1024

TEMPLATE = '''"""The sum over a token's <choices> choices, in order."""

import triton
import triton.language as tl


@triton.jit
def sum_choices(row_of_ptr, rows_ptr, y_ptr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * <block> + tl.arange(0, <block>)
    total = tl.zeros((<block>,), <math>)
    for k in range(<choices>):
        pair = token * <choices> + k
        held = tl.load(row_of_ptr + pair) >= 0
        total += tl.load(rows_ptr + pair * <columns> + column, mask=held & (column < <columns>), other=0.0).to(<math>)
    tl.store(y_ptr + token * <columns> + column, total.to(<storage>), mask=column < <columns>)
'''


def source(choices: int, columns: int, dtype: torch.dtype) -> str:
    """The text of the kernel."""
    return fill(
        TEMPLATE, choices=choices, columns=columns, math=computing(dtype), storage=TRITON[dtype], block=block(columns),
    )  # fmt: skip


def block(columns: int) -> int:
    """Columns that a program adds."""
    return min(BLOCK, max(16, 1 << (columns - 1).bit_length()))


@cache
def kernel(choices: int, columns: int, dtype: torch.dtype) -> Any:
    return load(source(choices, columns, dtype), "sum_choices").sum_choices


def launch(row_of_TK: Tensor, rows_PC: Tensor) -> Tensor:
    """``[T, C]`` of rows ``[T · K, C]``."""
    (T, K), C = row_of_TK.shape, rows_PC.shape[1]
    y_TC = rows_PC.new_empty((T, C))
    if T and C:
        kernel(K, C, rows_PC.dtype)[(T, -(-C // block(C)))](row_of_TK, rows_PC, y_TC, num_warps=4)
    return y_TC
