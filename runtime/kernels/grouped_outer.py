"""Skeleton: gradients of grouped weights, one product over the rows of each group.

Legend: N rows in groups, E experts, P and Q columns of the two operands.

``dw[expert] = Σ_rows a[row]ᵀ b[row]``, in fp32, rounded once; zeros for a group without rows.  Either operand may be
*gathered*: row ``pair // K`` of a tensor [T, ·], so that no permuted copy exists.  A program makes one block
[P, Q] of one expert: no two programs write the same place, and rows are added in order.  The result has the strides
that the caller wants, so a parameter gets its gradient in its own layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .expressions import TRITON, computing
from .source import load
from .template import across, fill, plus, times
from .tiles import Tile

TEMPLATE = '''"""<title>

<about>
"""

import triton
import triton.language as tl


@triton.jit
def <name>(<arguments>):
    tile = tl.program_id(0)
    expert = tile // <tiles>
    p = tile % <tiles> // <tiles_q> * <block_p> + tl.arange(0, <block_p>)
    q = tile % <tiles_q> * <block_q> + tl.arange(0, <block_q>)
    start = tl.load(offset_ptr + expert)
    end = tl.load(offset_ptr + expert + 1)
    total = tl.zeros((<block_p>, <block_q>), <math>)
    for first in range(start, end, <block_r>):
        row = (first + tl.arange(0, <block_r>)).to(tl.int64)
        inside = row < end
        <gather>
        a = tl.load(a_ptr + <row_a>[:, None] * <stride_a> + <place_a>, mask=<ok_a>, other=0.0)
        b = tl.load(b_ptr + <row_b>[:, None] * <stride_b> + <place_b>, mask=<ok_b>, other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
    to = dw_ptr + expert.to(tl.int64) * <stride_e> + <of_p> + <of_q>
    tl.store(to, total.to(<storage>)<ok>)
'''


@dataclass(frozen=True)
class Rows:
    """Columns ``offset : offset + width`` of an operand of ``stride`` columns in all."""

    width: int
    stride: int
    offset: int = 0
    gathered: bool = False


@dataclass(frozen=True)
class GroupedOuter:
    """``tile.m`` columns of a and ``tile.n`` of b make a block, ``tile.k`` rows are added at once.  ``choices``: K,
    where an operand is gathered."""

    title: str
    experts: int
    a: Rows
    b: Rows
    strides: tuple[int, int, int]
    """Of the result [E, P, Q]."""
    dtype: torch.dtype
    tile: Tile
    choices: int = 0
    name: str = "grouped_outer"


def pointers(spec: GroupedOuter) -> list[str]:
    return ["offset_ptr", *(["pair_ptr"] if spec.choices else []), "a_ptr", "b_ptr", "dw_ptr"]


def _tiles(spec: GroupedOuter) -> tuple[int, int]:
    return -(-spec.a.width // spec.tile.m), -(-spec.b.width // spec.tile.n)


def source(spec: GroupedOuter) -> str:
    """The text of the kernel."""
    tile, (of_e, of_p, of_q) = spec.tile, spec.strides
    tiles_p, tiles_q = _tiles(spec)
    inside_p = "" if spec.a.width % tile.m == 0 else f"(p < {spec.a.width})"
    inside_q = "" if spec.b.width % tile.n == 0 else f"(q < {spec.b.width})"
    stored = " & ".join(c for c in (inside_p and f"{inside_p}[:, None]", inside_q and f"{inside_q}[None, :]") if c)
    gather = [f"source = tl.load(pair_ptr + row, mask=inside, other=0) // {spec.choices}"] if spec.choices else []
    about = [
        f"{spec.experts} experts; {spec.a.width} and {spec.b.width} columns; {str(spec.dtype).removeprefix('torch.')}; "
        f"blocks of {tile.m} × {tile.n}, {tile.k} rows at once."
    ]
    return fill(
        TEMPLATE, title=spec.title, about=about, name=spec.name, arguments=", ".join(pointers(spec)),
        tiles=tiles_p * tiles_q, tiles_q=tiles_q, block_p=tile.m, block_q=tile.n, block_r=tile.k,
        math=computing(spec.dtype), gather=gather,
        row_a="source" if spec.a.gathered else "row", row_b="source" if spec.b.gathered else "row",
        stride_a=spec.a.stride, stride_b=spec.b.stride,
        place_a=across(plus("p", spec.a.offset)), place_b=across(plus("q", spec.b.offset)),
        ok_a="inside[:, None]" + (f" & {inside_p}[None, :]" if inside_p else ""),
        ok_b="inside[:, None]" + (f" & {inside_q}[None, :]" if inside_q else ""),
        stride_e=of_e, of_p=times("p[:, None].to(tl.int64)", of_p), of_q=times("q[None, :].to(tl.int64)", of_q),
        storage=TRITON[spec.dtype], ok=f", mask={stored}" if stored else "",
    )  # fmt: skip


@cache
def kernel(spec: GroupedOuter) -> Any:
    """The compiled (or interpreted) kernel of a spec."""
    return getattr(load(source(spec), spec.name), spec.name)


def launch(spec: GroupedOuter, *tensors: Tensor) -> None:
    """Run it on offsets [E + 1], pairs [N] (with ``choices``), a, b and the result."""
    tiles_p, tiles_q = _tiles(spec)
    if grid := spec.experts * tiles_p * tiles_q:
        kernel(spec)[(grid,)](*tensors, num_warps=spec.tile.warps, num_stages=spec.tile.stages)
