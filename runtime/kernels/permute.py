"""Permute on a GPU: every token's row is read once, quantised where asked, and stored to its K places.

Legend: T tokens, K choices, H hidden, N rows, E experts, Q scales of a row, R rows that a program of zeros looks at.

One kernel.  The first T programs have a token each; the others store zeros (and scales of 1) to the rows that are no
pair's: those of dropped pairs, and those that align experts.  A byte for each row (``named_N``) says which these are.
Where the rows lie is found before, from the ids alone (``order.py``), and nothing waits for the host but
``permute_kept``, whose result's size depends on data.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..errors import MoecError
from ..ops import permute as permute_op
from ..ops.permute_aligned import BLOCK, LARGEST, QUANTISE, check_aligned, num_rows, num_scales, permute_aligned, starts
from . import order
from .expressions import TRITON
from .router_text import pad
from .source import load
from .template import fill

__all__ = ["QUANTISE", "aligned", "kept", "launch", "named", "permute", "places", "source", "warps"]

ZERO_ROWS = 16
STORAGE = {**TRITON, torch.uint8: "tl.uint8"}  # bytes: the payloads of FP8 dispatch

TEMPLATE = '''"""Permute rows of <columns> columns, <choices> choices a token, quantise <quantise>."""

import triton
import triton.language as tl


@triton.jit
def permute(x_ptr, row_of_ptr, named_ptr, rows_ptr, scales_ptr, num_tokens, num_rows):
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, <columns_pad>)
    real = column < <columns>
    if program < num_tokens:
        x = tl.load(x_ptr + program * <columns> + column, mask=real, other=0.0)
        <quantise_row>
        for k in range(<choices>):
            row = tl.load(row_of_ptr + program * <choices> + k)
            tl.store(rows_ptr + row * <columns> + column, x, mask=real & (row >= 0))
            <store_scales>
    else:
        for i in range(<zero_rows>):
            row = (program - num_tokens) * <zero_rows> + i
            empty = tl.load(named_ptr + row, mask=row < num_rows, other=1) == 0
            zeros = tl.zeros((<columns_pad>,), tl.float32).to(<storage>)
            tl.store(rows_ptr + row * <columns> + column, zeros, mask=real & empty)
            <store_ones>
'''

ROW = """
wide = x.to(tl.float32)
finite = tl.abs(wide) < float("inf")
largest = tl.max(tl.where(finite, tl.abs(wide), 0.0), 0)
scale = tl.where(largest > 0.0, tl.maximum(tl.div_rn(largest, <largest>), 1.1754943508222875e-38), 1.0)
x = tl.clamp(tl.div_rn(wide, scale), -<largest>, <largest>)
x = tl.where(finite, x, float("nan")).to(tl.float8e4nv)
"""
BLOCKS = """
wide = tl.reshape(x.to(tl.float32), (<blocks_pad>, <block>))
finite = tl.abs(wide) < float("inf")
largest = tl.max(tl.where(finite, tl.abs(wide), 0.0), 1)
bits = largest.to(tl.int32, bitcast=True)  # <largest> is 1.75 times 2 to the 8
exponent = tl.maximum((bits >> 23) - 135 + tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0), -126)
scale = tl.where(largest > 0.0, ((exponent + 127) << 23).to(tl.float32, bitcast=True), 1.0)
x = tl.clamp(tl.div_rn(wide, scale[:, None]), -<largest>, <largest>)
x = tl.reshape(tl.where(finite, x, float("nan")).to(tl.float8e4nv), (<columns_pad>,))
scaled = tl.arange(0, <blocks_pad>)
"""


@cache
def source(choices: int, columns: int, dtype: torch.dtype, quantise: str) -> str:
    """The text of the kernel."""
    columns_pad = max(pad(columns), BLOCK if quantise == "block" else 1)
    names = {"block": BLOCK, "blocks_pad": columns_pad // BLOCK, "largest": LARGEST, "columns_pad": columns_pad}
    Q = num_scales(columns, quantise)
    text, stores, ones = {
        "none": ("", [], []),
        "row": (ROW, ["tl.store(scales_ptr + row, scale, mask=row >= 0)"],
                ["tl.store(scales_ptr + row, 1.0, mask=empty)"]),
        "block": (BLOCKS, [f"tl.store(scales_ptr + row * {Q} + scaled, scale, mask=(scaled < {Q}) & (row >= 0))"],
                  [f"scaled = tl.arange(0, {columns_pad // BLOCK})",
                   f"one = tl.full(({columns_pad // BLOCK},), 1.0, tl.float32)",
                   f"tl.store(scales_ptr + row * {Q} + scaled, one, mask=(scaled < {Q}) & empty)"]),
    }[quantise]  # fmt: skip
    for name, value in names.items():
        text = text.replace(f"<{name}>", str(value))
    return fill(
        TEMPLATE, choices=choices, columns=columns, columns_pad=columns_pad, quantise=quantise, zero_rows=ZERO_ROWS,
        storage=STORAGE[dtype] if quantise == "none" else "tl.float8e4nv",
        quantise_row=text.strip().splitlines(), store_scales=stores, store_ones=ones,
    )  # fmt: skip


@cache
def kernel(choices: int, columns: int, dtype: torch.dtype, quantise: str) -> Any:
    return load(source(choices, columns, dtype, quantise), "permute").permute


def launch(x_TH: Tensor, row_of_TK: Tensor, N: int, quantise: str = "none") -> tuple[Tensor, Tensor]:
    """``(rows_NH, scales_NQ)``."""
    (T, H), K = x_TH.shape, row_of_TK.shape[1]
    rows_NH = x_TH.new_empty((N, H), dtype=x_TH.dtype if quantise == "none" else torch.float8_e4m3fn)
    scales_NQ = x_TH.new_empty((N, num_scales(H, quantise)), dtype=torch.float32)
    if N and H:
        grid = (T + -(-N // ZERO_ROWS),)
        inputs = x_TH.contiguous(), row_of_TK, named(row_of_TK, N)
        kernel(K, H, x_TH.dtype, quantise)[grid](*inputs, rows_NH, scales_NQ, T, N, num_warps=warps(H))
    return rows_NH, scales_NQ


def named(row_of_TK: Tensor, N: int) -> Tensor:
    """uint8 [N]: 1 for rows that are some pair's."""
    place_P = torch.where(row_of_TK < 0, N, row_of_TK).reshape(-1)
    return torch.zeros(N + 1, dtype=torch.uint8, device=row_of_TK.device).scatter_(0, place_P, 1)[:N]


def warps(columns: int) -> int:
    """Threads enough that each holds few of a row's elements."""
    return max(1, min(8, pad(columns) // 256))


def permute(x_TH: Tensor, ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """``moec::permute``."""
    found = _order(x_TH, ids_TK, num_experts, "permute")
    rows_NH, _ = launch(x_TH, found.row_of_TK, ids_TK.numel())
    return rows_NH, found.counts_E, found.row_of_TK


def kept(x_TH: Tensor, ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """``moec::permute_kept``."""
    found = _order(x_TH, ids_TK, num_experts, "permute_kept")
    rows_NH, _ = launch(x_TH, found.row_of_TK, int(found.offset_E1[-1]))
    return rows_NH, found.counts_E, found.row_of_TK


def aligned(
    x_TH: Tensor, ids_TK: Tensor, num_experts: int, alignment: int, quantise: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``moec::permute_aligned``."""
    check_aligned(alignment, quantise)
    counts_E, row_of_TK = places(x_TH, ids_TK, num_experts, alignment, "permute_aligned")
    rows_NH, scales_NQ = launch(x_TH, row_of_TK, num_rows(ids_TK, num_experts, alignment), quantise)
    return rows_NH, scales_NQ, counts_E, row_of_TK


def places(x_TH: Tensor, ids_TK: Tensor, num_experts: int, alignment: int, op: str) -> tuple[Tensor, Tensor]:
    """``(counts_E, row_of_TK)`` of aligned rows."""
    found = _order(x_TH, ids_TK, num_experts, op)
    move_E = starts(found.counts_E, alignment) - found.offset_E1[:-1]
    moved_TK = found.row_of_TK + move_E[ids_TK.clamp(min=0)]
    return found.counts_E, torch.where(ids_TK < 0, -1, moved_TK)


def _order(x_TH: Tensor, ids_TK: Tensor, num_experts: int, op: str) -> order.Order:
    if ids_TK.shape[0] != x_TH.shape[0]:
        raise MoecError(f"x has {x_TH.shape[0]} tokens but ids has {ids_TK.shape[0]}", where=f"moec::{op}")
    return order.of_ids(ids_TK, num_experts, op)


permute_op.permute.register_kernel("cuda")(permute)
permute_op.permute_kept.register_kernel("cuda")(kept)
permute_aligned.register_kernel("cuda")(aligned)
