"""Skeleton: gradients of grouped weights in FP8, one product over the rows of each group, whose elements share scales.

Legend: N rows in groups, E experts, P and Q columns of the two operands, B rows that share a scale.

``dw[expert] = Σ_b (a[rows of block b]ᵀ · b[rows of block b]) · scales of the columns of both``: zeros for a group
without rows.  Operands are [N, P] and [N, Q] contiguous along N, as tensor cores read FP8, their scales [N / B, P] and
[N / B, Q]; ways to apply them are those of ``scaled_rows.py``.  Groups begin at multiples of ``aligned``.  A program
makes one block [P, Q] of one expert: no two write the same place, and rows are added in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .expressions import TRITON
from .scaled_rows import POWER, PROMISE, Way, steps
from .source import load
from .template import fill, mask
from .tiles import Tile

TEMPLATE = '''"""<title>

<about>
"""

import triton
import triton.language as tl


@triton.jit
def <name>(offset_ptr, a_ptr, as_ptr, b_ptr, bs_ptr, dw_ptr, num_rows):
    tile = tl.program_id(0)
    expert = tile // <tiles>
    p = tile % <tiles> // <tiles_q> * <block_p> + tl.arange(0, <block_p>)
    q = tile % <tiles_q> * <block_q> + tl.arange(0, <block_q>)
    start = <start>
    end = <end>
    r = tl.arange(0, <block_r>)
    a = a_ptr + p[:, None].to(tl.int64) * num_rows + (start + r)[None, :]
    b = b_ptr + q[None, :].to(tl.int64) * num_rows + (start + r)[:, None]
    <scales>
    total = tl.zeros((<block_p>, <block_q>), tl.float32)
    for first in <steps>:
        a_tile = tl.load(a<ok_a>)
        b_tile = tl.load(b<ok_b>)
        <products>
        a += <block_r>
        b += <block_r>
    <sums>
    to = dw_ptr + expert.to(tl.int64) * <of_expert> + p[:, None].to(tl.int64) * <width_q> + q[None, :]
    tl.store(to, total.to(<storage>)<ok>)
'''
POINTERS = ("offset_ptr", "a_ptr", "as_ptr", "b_ptr", "bs_ptr", "dw_ptr")


@dataclass(frozen=True)
class ScaledOuter:
    """``tile.m`` columns of a and ``tile.n`` of b make a block, ``tile.k`` rows are added at once.  Results [E, P, Q]
    are contiguous, in ``dtype``."""

    title: str
    experts: int
    width_a: int
    width_b: int
    way: Way
    block: int
    aligned: int
    exponents: bool
    """Scales are E8M0, else fp32."""
    dtype: torch.dtype
    tile: Tile
    name: str = "scaled_outer"


def _tiles(spec: ScaledOuter) -> tuple[int, int]:
    return -(-spec.width_a // spec.tile.m), -(-spec.width_b // spec.tile.n)


def source(spec: ScaledOuter) -> str:
    """The text of the kernel."""
    tile, P, Q = spec.tile, spec.width_a, spec.width_b
    tiles_p, tiles_q = _tiles(spec)
    deep = "(r < end - first)" if spec.aligned % tile.k else ""
    there = (f"(p < {P})" if P % tile.m else "", f"(q < {Q})" if Q % tile.n else "")
    in_p, in_q = there
    stored = " & ".join(c for c in (in_p and f"{in_p}[:, None]", in_q and f"{in_q}[None, :]") if c)
    scales, products, sums = {"promoted": _promoted, "native": _native, "whole": _whole}[spec.way](spec, there)
    about = [
        f"{spec.experts} experts; {P} and {Q} columns; FP8 into {str(spec.dtype).removeprefix('torch.')}, scales of "
        f"{spec.block or 'all'} rows ({spec.way}); blocks of {tile.m} × {tile.n}, {tile.k} rows at once."
    ]
    start, end = "tl.load(offset_ptr + expert)", "tl.load(offset_ptr + expert + 1)"
    if spec.aligned > 1:
        start, end = (f"tl.multiple_of({x}, {spec.aligned})" for x in (start, end))
    return fill(
        TEMPLATE, title=spec.title, about=about, name=spec.name, tiles=tiles_p * tiles_q, tiles_q=tiles_q,
        block_p=tile.m, block_q=tile.n, block_r=tile.k, start=start, end=end, scales=scales, products=products,
        sums=sums, steps=steps("start", "end", tile),
        ok_a=mask(deep and f"{deep}[None, :]", in_p and f"{in_p}[:, None]"),
        ok_b=mask(deep and f"{deep}[:, None]", in_q and f"{in_q}[None, :]"), of_expert=P * Q, width_q=Q,
        storage=TRITON[spec.dtype], ok=f", mask={stored}" if stored else "",
    )  # fmt: skip


def _promoted(spec: ScaledOuter, there: tuple[str, str]) -> tuple[list[str], list[str], list[str]]:
    """Lines before the pass, in it and behind it: a block of rows at a time."""
    wide = POWER if spec.exponents else "{}"
    a, b = (wide.format(f"tl.load({x}_s{mask(ok)})") for x, ok in zip("ab", there, strict=True))
    return (
        [
            f"a_s = as_ptr + (start // {spec.block}).to(tl.int64) * {spec.width_a} + p",
            f"b_s = bs_ptr + (start // {spec.block}).to(tl.int64) * {spec.width_b} + q",
        ],
        [
            f"scale_a = {a}",
            f"scale_b = {b}",
            "total += tl.dot(a_tile, b_tile) * (scale_a[:, None] * scale_b[None, :])",
            f"a_s += {spec.width_a}",
            f"b_s += {spec.width_b}",
        ],
        [],
    )


def _native(spec: ScaledOuter, there: tuple[str, str]) -> tuple[list[str], list[str], list[str]]:
    each = spec.tile.k // spec.block
    deep = f"(s * {spec.block} < end - first)[None, :]" if spec.aligned % spec.tile.k else ""
    before, inside = [f"s = tl.arange(0, {each})"], []
    for x, c, width, ok in (("a", "p", spec.width_a, there[0]), ("b", "q", spec.width_b, there[1])):
        before.append(f"{x}_s = {x}s_ptr + (start // {spec.block} + s)[None, :].to(tl.int64) * {width} + {c}[:, None]")
        masks = " & ".join(m for m in (deep, ok and f"{ok}[:, None]") if m)
        inside.append(f"scale_{x} = tl.load({x}_s{f', mask={masks}, other=127' if masks else ''})")
    inside.append('total = tl.dot_scaled(a_tile, scale_a, "e4m3", b_tile, scale_b, "e4m3", total)')
    return before, [*inside, f"a_s += {each * spec.width_a}", f"b_s += {each * spec.width_b}"], []


def _whole(spec: ScaledOuter, there: tuple[str, str]) -> tuple[list[str], list[str], list[str]]:
    a, b = (f"tl.load({x}s_ptr + {c}{mask(ok)})" for x, c, ok in zip("ab", "pq", there, strict=True))
    product = f"total = tl.dot(a_tile, b_tile, total, max_num_imprecise_acc={min(PROMISE, spec.tile.k)})"
    return [], [product], [f"scale_a = {a}", f"scale_b = {b}", "total = total * scale_a[:, None] * scale_b[None, :]"]


@cache
def kernel(spec: ScaledOuter) -> Any:
    """The compiled (or interpreted) kernel of a spec."""
    return getattr(load(source(spec), spec.name), spec.name)


def launch(spec: ScaledOuter, num_rows: int, *tensors: Tensor) -> None:
    """Run it on tensors in the order of ``POINTERS``; operands have ``num_rows`` rows."""
    tiles_p, tiles_q = _tiles(spec)
    if grid := spec.experts * tiles_p * tiles_q:
        kernel(spec)[(grid,)](*tensors, num_rows, num_warps=spec.tile.warps, num_stages=spec.tile.stages)
