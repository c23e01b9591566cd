"""Skeleton: products of FP8 rows with FP8 weights of uneven groups, whose elements share scales.

Legend: N rows in groups, E experts (one group each), D depth of the product, C columns, B elements along the depth that
share a scale.

``y[row] = Σ_b (a[row, block b] · w[expert, block b]) · scale of the row's block · scale of the weight's block``: tiles
are found as in ``grouped_gemm.py``, whose text this fills in, and a program walks along the depth of its tile.  Three
ways to apply scales:

``promoted``  the products of one block are added up by the tensor cores and then, scaled, to fp32 sums in registers.
              An H100 keeps some 14 bits while it adds up FP8: blocks of 128 are as long as it may do so.
``native``    ``tl.dot_scaled``: tensor cores that know E8M0 scales (sm_100, gfx950).
``whole``     scales do not depend on the depth: the sums are scaled, once.

Scales of rows have any strides [N, D / B], of weights [E, D / B, C], or for ``square`` weights [E, D / B, C / B].
Shapes and strides are literals of the source; offsets into tensors are 64-bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from .expressions import TRITON
from .grouped_gemm import TEMPLATE
from .source import load
from .template import fill, mask, times
from .tiles import Tile, programs

Way = Literal["promoted", "native", "whole"]
POWER = "({}.to(tl.int32) << 23).to(tl.float32, bitcast=True)"
"""A power of two by its exponent, which is at least -126."""
PROMISE = 128
"""Products that an H100's tensor cores may add up before they are added to sums in registers."""


@dataclass(frozen=True)
class ScaledRows:
    """Rows [N, D] and weights [E, C, D], both contiguous; y [N, C] in ``dtype``.  ``block``: B (``whole``: D)."""

    title: str
    experts: int
    depth: int
    columns: int
    way: Way
    block: int
    square: bool
    scales_a: tuple[int, int]
    """Strides of [N, D / B]."""
    scales_b: tuple[int, int, int]
    """Strides of [E, D / B, C]."""
    exponents: bool
    """Scales are E8M0, else fp32."""
    dtype: torch.dtype
    tile: Tile
    name: str = "scaled_rows"


POINTERS = ("offset_ptr", "a_ptr", "as_ptr", "b_ptr", "bs_ptr", "y_ptr")


def source(spec: ScaledRows) -> str:
    """The text of the kernel."""
    tile, C = spec.tile, spec.columns
    even = C % tile.n == 0
    return fill(
        TEMPLATE, title=spec.title,
        about=[
            f"{spec.experts} experts; {spec.depth} columns in, {C} out; FP8 into "
            f"{str(spec.dtype).removeprefix('torch.')}, scales of {spec.block} ({spec.way}); blocks of {tile.m} rows, "
            f"{tile.n} columns, depth {tile.k}."
        ],
        name=spec.name, arguments=", ".join(POINTERS), experts=spec.experts, block_m=tile.m, block_n=tile.n,
        tiles_n=-(-C // tile.n), places=["ok = inside[:, None]" + ("" if even else f" & (column < {C})[None, :]")],
        products=[f"y = tl.zeros(({tile.m}, {tile.n}), tl.float32)", *_products(spec)],
        epilogue=[f"tl.store(y_ptr + row[:, None] * {C} + column[None, :], y.to({TRITON[spec.dtype]}), mask=ok)"],
    )  # fmt: skip


def _products(spec: ScaledRows) -> list[str]:
    """The pass over the depth."""
    tile, D, C = spec.tile, spec.depth, spec.columns
    deep = f"(k < {D} - step)" if D % tile.k else ""
    exists = f"(column < {C})" if C % tile.n else ""
    out = [
        f"k = tl.arange(0, {tile.k})",
        f"a = a_ptr + row[:, None] * {D} + k[None, :]",
        f"b = b_ptr + expert * {C * D} + k[:, None] + column[None, :].to(tl.int64) * {D}",
    ]
    loop = [
        f"a_tile = tl.load(a{mask(deep and f'{deep}[None, :]')})",
        f"b_tile = tl.load(b{mask(deep and f'{deep}[:, None]', exists and f'{exists}[None, :]')})",
    ]
    more, scaled = {"promoted": _promoted, "native": _native, "whole": _whole}[spec.way](spec, exists)
    out += more
    loop += scaled
    loop += [f"a += {tile.k}", f"b += {tile.k}"]
    out += [f"for step in {steps('0', D, tile)}:", *("    " + line for line in loop)]
    return out + (_sums(spec, exists) if spec.way == "whole" else [])


def steps(start: str, end: str | int, tile: Tile) -> str:
    """A loop whose scales are fetched ahead of time too: of an ordinary one Triton fetches what it multiplies."""
    return f"tl.range({start}, {end}, {tile.k}, num_stages={tile.stages})"


def _promoted(spec: ScaledRows, exists: str) -> tuple[list[str], list[str]]:
    """Lines before the pass, and in it: a block of the depth at a time."""
    tile, (of_row, of_a), (of_expert, of_b, of_column) = spec.tile, spec.scales_a, spec.scales_b
    wide = POWER if spec.exponents else "{}"
    a, before = wide.format("tl.load(a_s)"), [f"a_s = as_ptr + {times('row', of_row)}"]
    if spec.square and spec.block % tile.n == 0:  # one number for the tile
        place = f"(tile_n * {tile.n} // {spec.block}).to(tl.int64)"
        before.append(f"b_s = bs_ptr + expert * {of_expert} + {times(place, of_column)}")
        scale = [f"scale = {a} * {wide.format('tl.load(b_s)')}"]
        product = "y += tl.dot(a_tile, b_tile) * scale[:, None]"
    else:
        place = f"(column // {spec.block}).to(tl.int64)" if spec.square else "column.to(tl.int64)"
        before.append(f"b_s = bs_ptr + expert * {of_expert} + {times(place, of_column)}")
        b = wide.format(f"tl.load(b_s{f', mask={exists}, other=0' if exists else ''})")
        scale = [f"scale_a = {a}", f"scale_b = {b}"]
        product = "y += tl.dot(a_tile, b_tile) * (scale_a[:, None] * scale_b[None, :])"
    return before, [*scale, product, f"a_s += {of_a}", f"b_s += {of_b}"]


def _native(spec: ScaledRows, exists: str) -> tuple[list[str], list[str]]:
    tile, (of_row, of_a), (of_expert, of_b, of_column) = spec.tile, spec.scales_a, spec.scales_b
    blocks, each = -(-spec.depth // spec.block), tile.k // spec.block
    deep = f"(s < {blocks} - step // {spec.block})[None, :]" if spec.depth % tile.k else ""
    before = [
        f"s = tl.arange(0, {each})",
        f"a_s = as_ptr + {times('row[:, None]', of_row)} + {times('s[None, :]', of_a)}",
        f"b_s = bs_ptr + expert * {of_expert} + {times('column[:, None].to(tl.int64)', of_column)}"
        f" + {times('s[None, :]', of_b)}",
    ]
    masks = [" & ".join(m for m in (deep, of) if m) for of in ("", exists and f"{exists}[:, None]")]
    a, b = (f", mask={m}, other=127" if m else "" for m in masks)
    return before, [
        f"scale_a = tl.load(a_s{a})",
        f"scale_b = tl.load(b_s{b})",
        'y = tl.dot_scaled(a_tile, scale_a, "e4m3", b_tile, scale_b, "e4m3", y)',
        f"a_s += {each * of_a}",
        f"b_s += {each * of_b}",
    ]


def _whole(spec: ScaledRows, exists: str) -> tuple[list[str], list[str]]:
    return [], [f"y = tl.dot(a_tile, b_tile, y, max_num_imprecise_acc={min(PROMISE, spec.tile.k)})"]


def _sums(spec: ScaledRows, exists: str) -> list[str]:
    (of_row, _), (of_expert, _, of_column) = spec.scales_a, spec.scales_b
    return [
        f"scale_a = tl.load(as_ptr + {times('row', of_row)})",
        f"scale_b = tl.load(bs_ptr + expert * {of_expert} + {times('column.to(tl.int64)', of_column)}"
        f"{f', mask={exists}, other=0.0' if exists else ''})",
        "y = y * scale_a[:, None] * scale_b[None, :]",
    ]


@cache
def kernel(spec: ScaledRows) -> Any:
    """The compiled (or interpreted) kernel of a spec."""
    return getattr(load(source(spec), spec.name), spec.name)


def launch(spec: ScaledRows, num_rows: int, *tensors: Tensor) -> None:
    """Run it on tensors in the order of ``POINTERS``; ``num_rows`` bounds the rows of all groups together."""
    tile = spec.tile
    most = (num_rows // tile.m + spec.experts) * -(-spec.columns // tile.n)
    if num_rows and spec.columns:
        grid = min(most, programs(tensors[0].device, tile))
        kernel(spec)[(grid,)](*tensors, num_warps=tile.warps, num_stages=tile.stages)
