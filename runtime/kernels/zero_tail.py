"""Zeros for the rows that belong to no group.

Legend: N rows, E experts, C columns.

Rows past the end of the last group (``offset[E]``) become zeros, the others are not touched.  The host does not know
how many there are: programs of rows inside a group end at once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from .source import load
from .template import fill

ROWS, COLUMNS = 32, 128

TEMPLATE = '''"""Zeros for the rows that belong to no group."""

import triton
import triton.language as tl


@triton.jit
def zero_tail(offset_ptr, y_ptr, num_rows):
    end = tl.load(offset_ptr + <experts>)
    first = tl.program_id(0) * <rows>
    if first + <rows> > end:
        row = first + tl.arange(0, <rows>)
        ok = ((row >= end) & (row < num_rows))[:, None]
        for start in range(0, <columns>, <block>):
            column = start + tl.arange(0, <block>)
            to = y_ptr + row[:, None].to(tl.int64) * <columns> + column[None, :]
            tl.store(to, tl.zeros((<rows>, <block>), y_ptr.dtype.element_ty), mask=ok & (column < <columns>)[None, :])
'''


def source(experts: int, columns: int) -> str:
    """The text of the kernel."""
    return fill(TEMPLATE, experts=experts, columns=columns, rows=ROWS, block=COLUMNS)


@cache
def kernel(experts: int, columns: int) -> Any:
    return load(source(experts, columns), "zero_tail").zero_tail


def launch(offset_E1: Tensor, y_NC: Tensor) -> Tensor:
    """``y_NC`` (contiguous), whose rows from ``offset_E1[-1]`` on are zeros now."""
    N, C = y_NC.shape
    if N and C:
        kernel(offset_E1.shape[0] - 1, C)[(-(-N // ROWS),)](offset_E1, y_NC, N, num_warps=4)
    return y_NC
