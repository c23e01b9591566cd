"""Largest magnitudes on a GPU, by the recipes whose scales depend on whole dims (rowwise, current, delayed): a matrix
is read once, for all the kinds that are asked for.

Legend: L leading dims as one (experts), R rows, C columns, B the side of a program's square, r and c numbers of them.

A program has B x B elements and writes the largest of its rows, of its columns, or of all; of these, which are one in B
or fewer, torch takes the largest.  No program waits for another one, and a maximum depends on no order.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..fp8 import Recipe
from ..fp8.recipes import Tile
from ..fp8.tiles import num_tiles
from ..ops import quantise as op
from ..ops.align_rows import real_rows
from .expressions import TRITON
from .source import load
from .template import fill

SIDE = 128
KINDS = ("rows", "columns", "all")

TEMPLATE = '''"""The largest magnitudes of <kinds> in squares of <dtype>."""

import triton
import triton.language as tl


@triton.jit
def amax(x_ptr, <pointers>, rows, columns, row_squares, column_squares):
    place = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1).to(tl.int64) * <side> + tl.arange(0, <side>)
    column = tl.program_id(0).to(tl.int64) * <side> + tl.arange(0, <side>)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    <real>
    x = tl.load(x_ptr + (place * rows + row[:, None]) * columns + column[None, :], mask=<there>, other=0.0)
    size = tl.abs(x.to(tl.float32))
    size = tl.where(size < float("inf"), size, 0.0)
    <stores>
'''
STORES = {
    "rows": "tl.store(rows_ptr + (place * column_squares + tl.program_id(0)) * rows + row, tl.max(size, 1), "
            "mask=row < rows)",
    "columns": "tl.store(columns_ptr + (place * row_squares + tl.program_id(1)) * columns + column, tl.max(size, 0), "
               "mask=column < columns)",
    "all": "tl.store(all_ptr + (place * row_squares + tl.program_id(1)) * column_squares + tl.program_id(0), "
           "tl.max(tl.max(size, 1), 0))",
}  # fmt: skip


def kind(tile: Tile) -> str:
    """Of tiles without end: ``(1, 0)``, ``(0, 1)`` or ``(0, 0)``."""
    return {(1, 0): "rows", (0, 1): "columns", (0, 0): "all"}[tile]


def pointers(kinds: tuple[str, ...], masked: bool) -> list[str]:
    """The kernel's arguments but for x and the sizes, in order."""
    return [*(["real_ptr"] if masked else []), *(f"{k}_ptr" for k in kinds)]


@cache
def source(kinds: tuple[str, ...], dtype: torch.dtype, masked: bool) -> str:
    """The text of the kernel.  ``masked``: some rows are no expert's."""
    real = ["real = tl.load(real_ptr + row, mask=row < rows, other=0) != 0"]
    return fill(
        TEMPLATE, kinds=" and ".join(kinds), dtype=TRITON[dtype], side=SIDE, stores=[STORES[k] for k in kinds],
        pointers=", ".join(pointers(kinds, masked)), real=real if masked else [],
        there="inside & real[:, None]" if masked else "inside",
    )  # fmt: skip


@cache
def kernel(kinds: tuple[str, ...], dtype: torch.dtype, masked: bool) -> Any:
    return load(source(kinds, dtype, masked), "amax").amax


def launch(x: Tensor, real_R: Tensor | None, kinds: tuple[str, ...]) -> list[Tensor]:
    """fp32, of ``x [L, R, C]``: ``rows`` [L, R, 1], ``columns`` [L, 1, C], ``all`` [L, 1, 1]."""
    x = x.contiguous()
    L, R, C = x.shape
    r, c = num_tiles(R, SIDE), num_tiles(C, SIDE)
    shapes = {"rows": (L, c, R), "columns": (L, r, C), "all": (L, r * c)}
    found = [torch.empty(shapes[k], dtype=torch.float32, device=x.device) for k in kinds]
    if x.numel():
        given = [] if real_R is None else [real_R.to(torch.uint8)]
        kernel(kinds, x.dtype, real_R is not None)[c, r, L](x, *given, *found, R, C, r, c, num_warps=8)
        found = [f.amax(1) for f in found]
    else:
        found = [f.new_zeros((L, *f.shape[2:])) for f in found]
    ends = {"rows": (L, R, 1), "columns": (L, 1, C), "all": (L, 1, 1)}
    return [f.view(ends[k]) for k, f in zip(kinds, found, strict=True)]


def fits(recipe: Recipe, dtype: torch.dtype) -> bool:
    """Whether there is a kernel."""
    return recipe.reads_whole and dtype in TRITON and dtype.itemsize <= 4


def amax(x: Tensor, counts_E: Tensor | None, recipe: str, role: str, transposed: bool) -> Tensor:
    """``moec::amax``."""
    found = Recipe.parse(recipe)
    if not fits(found, x.dtype):
        return op.amax_on_any_device(x, counts_E, recipe, role, transposed)
    real_N = None if counts_E is None else real_rows(counts_E, x.shape[0], found.alignment, "amax")
    shape, tile = op.scale_shape(x, found, role, transposed), found.tile(role, transposed)
    if x.ndim > 1 and x.stride(-2) == 1 and x.stride(-1) != 1 and role in ("weight", "stack"):
        x, tile = x.transpose(-1, -2), (tile[1], tile[0])  # as it lies in memory
    matrix = x.reshape(-1, *x.shape[-2:]) if role in ("weight", "stack") else x.reshape(1, -1, x.shape[-1])
    (most,) = launch(matrix, real_N, (kind(tile),))
    return most.view(shape)


op.amax.register_kernel("cuda")(amax)
