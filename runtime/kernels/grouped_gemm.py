"""Skeleton: grouped matrix products over uneven groups of rows, with whatever comes behind them in the same tile.

Legend: N rows in groups, E experts (one group each), D depth of a product, C columns of a tile's row of tiles.

Programs are persistent: each takes every P-th tile of a list that is never stored; tiles are found by walking the
groups' sizes.  Tiles of a group that share columns follow each other, so a block of a weight stays in the L2 cache
while the group's rows pass by.  A tile

1. finds its expert, its rows and its columns (rows past the end of the group repeat the last one and are not stored);
2. forms its products: rows [N, D], or rows [T, D] of which pair p has row p // K (``gathered``: no permuted copy
   exists), times a weight [E, D, ·] of any strides; several weights share one pass over the rows, and several passes
   may add to one accumulator;
3. goes on with the *epilogue*: lines of the caller, which know ``row`` (int64), ``pair`` (if gathered or asked for),
   ``expert`` (int64), ``column``, ``tile_n``, ``ok`` (what of the tile exists) and the accumulators.

Shapes and strides are literals of the source; offsets into tensors are 64-bit.  Groups are given by offsets [E + 1]
(int32): rows before the first and behind the last belong to nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .expressions import TRITON, computing
from .source import load
from .template import conjunction, fill, identifiers
from .tiles import Tile, programs

TEMPLATE = '''"""<title>

<about>
"""

import triton
import triton.language as tl


@triton.jit
def <name>(<arguments>):
    tile = tl.program_id(0)
    first = 0
    for e in range(<experts>):
        start = tl.load(offset_ptr + e)
        end = tl.load(offset_ptr + e + 1)
        tiles_m = tl.cdiv(end - start, <block_m>)
        while tile < first + tiles_m * <tiles_n>:
            # 1. Where the tile is.
            tile_n = (tile - first) // tiles_m
            row = start + (tile - first) % tiles_m * <block_m> + tl.arange(0, <block_m>)
            column = tile_n * <block_n> + tl.arange(0, <block_n>)
            ok = <ok>
            row = tl.minimum(row, end - 1).to(tl.int64)
            expert = tl.zeros((), tl.int64) + e
            <indices>

            # 2. Products.
            <products>

            # 3. What follows.
            <epilogue>
            tile += tl.num_programs(0)
        first += tiles_m * <tiles_n>
'''
NAMES = identifiers(TEMPLATE) | {"k", "step", "a", "b", "a_tile", "source", "pair", "zero"}


@dataclass(frozen=True)
class Weight:
    """``weight[expert, :, columns]`` -> an accumulator.  ``columns`` is an expression, or of ``step`` 2 the expression
    of twice as many columns (an accumulator twice as wide)."""

    pointer: str
    accumulator: str
    strides: tuple[int, int, int]
    columns: str = "column"
    step: int = 1


@dataclass(frozen=True)
class Product:
    """Rows of ``depth`` columns, times weights that share the pass over them."""

    pointer: str
    depth: int
    weights: tuple[Weight, ...]
    gathered: bool = False


@dataclass(frozen=True)
class GroupedGemm:
    """``arguments``: pointers beside offsets, rows and weights, in the order in which ``launch`` takes them.
    ``choices``: K, where rows are gathered or the epilogue needs ``pair``; else 0."""

    name: str
    title: str
    about: tuple[str, ...]
    experts: int
    columns: int
    dtype: torch.dtype
    tile: Tile
    products: tuple[Product, ...]
    arguments: tuple[str, ...]
    epilogue: tuple[str, ...]
    choices: int = 0


def pointers(spec: GroupedGemm) -> list[str]:
    """The kernel's arguments in order: offsets, pairs (if any), rows and weights of each product, the caller's own."""
    operands = [name for p in spec.products for name in (p.pointer, *(w.pointer for w in p.weights))]
    pairs = ["pair_ptr"] if spec.choices else []
    return list(dict.fromkeys(["offset_ptr", *pairs, *operands, *spec.arguments]))


def source(spec: GroupedGemm) -> str:
    """The text of the kernel."""
    tile = spec.tile
    indices = []
    if spec.choices:
        indices.append("pair = tl.load(pair_ptr + row)")
    if any(p.gathered for p in spec.products):
        indices.append(f"source = pair // {spec.choices}")
    ok = "(row < end)[:, None]"
    if spec.columns % tile.n:
        ok += f" & (column < {spec.columns})[None, :]"
    accumulators = {w.accumulator: w.step for p in spec.products for w in p.weights}
    products = [
        f"{name} = tl.zeros(({tile.m}, {tile.n * step}), {computing(spec.dtype)})"
        for name, step in accumulators.items()
    ]
    for p in spec.products:
        products += _pass(spec, p)
    return fill(
        TEMPLATE, title=spec.title, about=spec.about, name=spec.name, arguments=", ".join(pointers(spec)),
        experts=spec.experts, block_m=tile.m, block_n=tile.n, tiles_n=-(-spec.columns // tile.n), ok=ok,
        indices=indices, products=products, epilogue=spec.epilogue,
    )  # fmt: skip


def _pass(spec: GroupedGemm, product: Product) -> list[str]:
    """One pass over the depth of a product."""
    tile, depth = spec.tile, product.depth
    deep = f"(k < {depth} - step)" if depth % tile.k else ""
    where_a = conjunction(deep and f"{deep}[None, :]")
    out = [f"k = tl.arange(0, {tile.k})"]
    out.append(f"a = {product.pointer} + {'source' if product.gathered else 'row'}[:, None] * {depth} + k[None, :]")
    loop = [f"a_tile = tl.load(a{where_a}{', other=0.0' if where_a else ''})"]
    for n, w in enumerate(product.weights):
        e, d, c = w.strides
        out.append(
            f"b{n} = {w.pointer} + expert * {e} + k[:, None].to(tl.int64) * {d} "
            f"+ ({w.columns})[None, :].to(tl.int64) * {c}"
        )
        there = f"({w.columns} < {spec.columns * w.step})[None, :]" if w.step > 1 else f"(column < {spec.columns})[None, :]"
        where_b = conjunction(deep and f"{deep}[:, None]", there if spec.columns % tile.n else "")
        loop.append(f"b_tile = tl.load(b{n}{where_b}{', other=0.0' if where_b else ''})")
        loop.append(f'{w.accumulator} = tl.dot(a_tile, b_tile, {w.accumulator}, input_precision="ieee")')
    loop.append(f"a += {tile.k}")
    loop += [f"b{n} += {tile.k * w.strides[1]}" for n, w in enumerate(product.weights)]
    return [*out, f"for step in range(0, {depth}, {tile.k}):", *("    " + line for line in loop)]


@cache
def kernel(spec: GroupedGemm) -> Any:
    """The compiled (or interpreted) kernel of a spec."""
    return getattr(load(source(spec), spec.name), spec.name)


def launch(spec: GroupedGemm, num_rows: int, *tensors: Tensor, num_programs: int | None = None) -> None:
    """Run it on tensors in the order of ``pointers``; ``num_rows`` bounds the rows of all groups together.

    ``num_programs`` is how many programs share the tiles: by default what the device holds at once.
    """
    tile = spec.tile
    most = (num_rows // tile.m + spec.experts) * -(-spec.columns // tile.n)
    grid = min(most, num_programs or programs(tensors[0].device, tile))
    if num_rows:
        kernel(spec)[(grid,)](*tensors, num_warps=tile.warps, num_stages=tile.stages)


__all__ = ["NAMES", "TRITON", "GroupedGemm", "Product", "Weight", "kernel", "launch", "pointers", "source"]
