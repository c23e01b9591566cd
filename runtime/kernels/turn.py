"""``moec::turn`` on a GPU: a matrix of bytes, transposed in squares, so that both sides are read and written in runs.

Legend: L leading dims as one (experts), R rows and C columns of what lies row by row, B the side of a program's square.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..fp8.tiles import num_tiles
from ..ops import turn as op
from ..ops.quantise import as_matrix
from .source import load

SIDE = 64

SOURCE = f'''"""Transpose matrices of bytes."""

import triton
import triton.language as tl


@triton.jit
def turn(x_ptr, y_ptr, rows, columns):
    place = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1).to(tl.int64) * {SIDE} + tl.arange(0, {SIDE})
    column = tl.program_id(0).to(tl.int64) * {SIDE} + tl.arange(0, {SIDE})
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + (place * rows + row[:, None]) * columns + column[None, :], mask=inside, other=0)
    tl.store(y_ptr + (place * columns + column[None, :]) * rows + row[:, None], x, mask=inside)
'''


@cache
def kernel() -> Any:
    return load(SOURCE, "turn").turn


def turn(q: Tensor, role: str) -> Tensor:
    """``moec::turn``."""
    x = as_matrix(q, role, True)
    y = torch.empty_permuted(x.shape, op.order(x.ndim, role), dtype=q.dtype, device=q.device)
    lying, turned = (x.transpose(-1, -2), y) if role == "stack" else (x, y.transpose(-1, -2))
    lying = lying.view(torch.uint8).contiguous()
    R, C = lying.shape[-2:]
    if L := lying.numel() // max(R * C, 1):
        grid = num_tiles(C, SIDE), num_tiles(R, SIDE), L
        kernel()[grid](lying, turned.view(torch.uint8), R, C, num_warps=4)
    return y


op.turn.register_kernel("cuda")(turn)
