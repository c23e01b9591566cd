"""Column sums over each group of rows: gradients of biases.

Legend: N rows in groups, E experts, M columns.

``db[expert] = Σ_rows g[row]``, in fp32, rounded once, zeros for a group without rows; with ``choices`` the rows are
those of pairs, ``weight[pair] · g[pair // K]``.  A program makes one block of columns of one expert.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .expressions import TRITON, computing
from .source import load
from .template import fill

BLOCK_ROWS, BLOCK_COLUMNS = 64, 64

TEMPLATE = '''"""moec::grouped_sum: column sums over each group of rows."""

import triton
import triton.language as tl


@triton.jit
def grouped_sum(<arguments>):
    expert = tl.program_id(0)
    column = tl.program_id(1) * <block_columns> + tl.arange(0, <block_columns>)
    start = tl.load(offset_ptr + expert)
    end = tl.load(offset_ptr + expert + 1)
    total = tl.zeros((<block_columns>,), <math>)
    for first in range(start, end, <block_rows>):
        row = (first + tl.arange(0, <block_rows>)).to(tl.int64)
        inside = row < end
        ok = inside[:, None] & (column < <columns>)[None, :]
        <rows>
        total += tl.sum(g, 0)
    to = db_ptr + expert.to(tl.int64) * <columns> + column
    tl.store(to, total.to(<storage>), mask=column < <columns>)
'''


def source(columns: int, dtype: torch.dtype, choices: int = 0) -> str:
    """The text of the kernel; ``choices`` is K, or 0 for rows that lie by expert."""
    math = computing(dtype)
    load_rows = "tl.load(g_ptr + <at>[:, None] * <columns> + column[None, :], mask=ok, other=0.0).to(<math>)"
    load_rows = load_rows.replace("<columns>", str(columns)).replace("<math>", math)
    if choices:
        rows = [
            "pair = tl.load(pair_ptr + row, mask=inside, other=0)",
            f"weight = tl.load(weight_ptr + pair, mask=inside, other=0.0).to({math})",
            f"source = pair // {choices}",
            "g = " + load_rows.replace("<at>", "source"),
            "g *= weight[:, None]",
        ]
    else:
        rows = ["g = " + load_rows.replace("<at>", "row")]
    return fill(
        TEMPLATE, arguments=", ".join(pointers(choices)), columns=columns, rows=rows, math=math,
        storage=TRITON[dtype], block_rows=BLOCK_ROWS, block_columns=BLOCK_COLUMNS,
    )  # fmt: skip


def pointers(choices: int = 0) -> list[str]:
    return ["offset_ptr", *(["pair_ptr", "weight_ptr"] if choices else []), "g_ptr", "db_ptr"]


@cache
def kernel(columns: int, dtype: torch.dtype, choices: int = 0) -> Any:
    return load(source(columns, dtype, choices), "grouped_sum").grouped_sum


def launch(experts: int, columns: int, choices: int, *tensors: Tensor) -> None:
    """Run it on offsets [E + 1] (with ``choices``: pairs [N], weights [pairs]), g [N or T, M] and db [E, M]."""
    if experts and columns:
        grid = (experts, -(-columns // BLOCK_COLUMNS))
        kernel(columns, tensors[-1].dtype, choices)[grid](*tensors, num_warps=4)
