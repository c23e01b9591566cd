"""Skeleton: grouped matrix products over uneven groups of rows, with whatever comes behind them in the same tile.

Legend: N rows in groups, E experts (one group each), D depth of a product, C columns of a tile's row of tiles.

Programs are persistent: each takes every P-th tile of a list that is never stored; tiles are found by walking the
groups' sizes.  Tiles of a group that share columns follow each other, so a block of a weight stays in the L2 cache
while the group's rows pass by.  A tile

1. finds its expert, its rows and its columns (rows past the end of the group repeat the last one and are not stored);
2. forms its products: rows [N, D], or rows [T, D] of which pair p has row p // K (``gathered``: no permuted copy
   exists), times a weight [E, D, ·] of any strides; several weights share one pass over the rows, and several passes
   may add to one accumulator;
3. goes on with the *epilogue*: lines of the caller, which know ``row`` (int64; in a tile ``top + line``), ``pair``
   (if there are pairs), ``expert`` (int64), ``column``, ``tile_n``, ``inside`` (which rows exist), ``ok`` (what of the
   tile exists; ``wide`` and ``wide_ok`` where an accumulator is twice as wide) and the accumulators.

Shapes and strides are literals of the source; offsets into tensors are 64-bit.  Groups are given by offsets [E + 1]
(int32): rows before the first and behind the last belong to nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .expressions import computing
from .source import load
from .template import across, fill, identifiers, mask, plus, times
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
            top = start + (tile - first) % tiles_m * <block_m>
            line = tl.arange(0, <block_m>)
            inside = top + line < end
            row = tl.minimum(top + line, end - 1).to(tl.int64)
            column = tile_n * <block_n> + tl.arange(0, <block_n>)
            expert = tl.zeros((), tl.int64) + e
            <places>

            # 2. Products.
            <products>

            # 3. What follows.
            <epilogue>
            tile += tl.num_programs(0)
        first += tiles_m * <tiles_n>
'''
NAMES = identifiers(TEMPLATE) | {"k", "step", "a", "a_tile", "b_tile", "source", "pair", "wide", "wide_ok", "ok"}


@dataclass(frozen=True)
class Weight:
    """``weight[expert, :, columns]`` -> an accumulator, where ``columns`` is an expression of ``column``; or ``wide``,
    all of twice as many columns side by side (an accumulator twice as wide)."""

    pointer: str
    accumulator: str
    strides: tuple[int, int, int]
    columns: str = "column"

    @property
    def parts(self) -> int:
        return 2 if self.columns == "wide" else 1


@dataclass(frozen=True)
class Product:
    """Rows ``pointer[:, offset : offset + depth]`` (``stride`` from row to row), times weights that share the pass over
    them."""

    pointer: str
    depth: int
    weights: tuple[Weight, ...]
    stride: int
    offset: int = 0
    gathered: bool = False


@dataclass(frozen=True)
class GroupedGemm:
    """``arguments``: pointers beside offsets, pairs, rows and weights, in the order in which ``launch`` takes them.
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
    tile, even = spec.tile, spec.columns % spec.tile.n == 0
    accumulators = {w.accumulator: w.parts for p in spec.products for w in p.weights}
    places = ["ok = inside[:, None]" + ("" if even else f" & (column < {spec.columns})[None, :]")]
    if 2 in accumulators.values():
        places.append(f"wide = tile_n * {2 * tile.n} + tl.arange(0, {2 * tile.n})")
        places.append("wide_ok = inside[:, None]" + ("" if even else f" & (wide < {2 * spec.columns})[None, :]"))
    if spec.choices:
        places.append("pair = tl.load(pair_ptr + row)")
    if any(p.gathered for p in spec.products):
        places.append(f"source = pair // {spec.choices}")
    products = [
        f"{name} = tl.zeros(({tile.m}, {tile.n * parts}), {computing(spec.dtype)})"
        for name, parts in accumulators.items()
    ]
    for p in spec.products:
        products += _pass(spec, p)
    about = [*spec.about, *([""] if spec.about else [])]
    about.append(
        f"{spec.experts} experts; {' and '.join(str(p.depth) for p in spec.products)} columns in, {spec.columns} out; "
        f"{str(spec.dtype).removeprefix('torch.')}; blocks of {tile.m} rows, {tile.n} columns, depth {tile.k}."
    )
    return fill(
        TEMPLATE, title=spec.title, about=about, name=spec.name, arguments=", ".join(pointers(spec)),
        experts=spec.experts, block_m=tile.m, block_n=tile.n, tiles_n=tiles_n(spec), places=places, products=products,
        epilogue=spec.epilogue,
    )  # fmt: skip


def tiles_n(spec: GroupedGemm) -> int:
    """Tiles beside each other."""
    return -(-spec.columns // spec.tile.n)


def _pass(spec: GroupedGemm, product: Product) -> list[str]:
    """One pass over the depth of a product."""
    block, depth = spec.tile.k, product.depth
    deep = f"(k < {depth} - step)" if depth % block else ""
    rows = "source" if product.gathered else "row"
    out = [
        f"k = tl.arange(0, {block})",
        f"a = {product.pointer} + {rows}[:, None] * {product.stride} + {across(plus('k', product.offset))}",
    ]
    loop = [f"a_tile = tl.load(a{mask(deep and f'{deep}[None, :]')})"]
    for n, w in enumerate(product.weights):
        of_expert, of_k, of_column = w.strides
        out.append(
            f"b{n} = {w.pointer} + expert * {of_expert} + {times('k[:, None].to(tl.int64)', of_k)}"
            f" + {times(across(w.columns, '.to(tl.int64)'), of_column)}"
        )
        name = "wide" if w.parts == 2 else "column"
        there = f"({name} < {spec.columns * w.parts})[None, :]" if spec.columns % spec.tile.n else ""
        loop += [
            f"b_tile = tl.load(b{n}{mask(deep and f'{deep}[:, None]', there)})",
            f'{w.accumulator} = tl.dot(a_tile, b_tile, {w.accumulator}, input_precision="ieee")',
        ]
    loop += [f"a += {block}", *(f"b{n} += {block * w.strides[1]}" for n, w in enumerate(product.weights))]
    return [*out, f"for step in range(0, {depth}, {block}):", *("    " + line for line in loop)]


@cache
def kernel(spec: GroupedGemm) -> Any:
    """The compiled (or interpreted) kernel of a spec."""
    return getattr(load(source(spec), spec.name), spec.name)


def launch(spec: GroupedGemm, num_rows: int, *tensors: Tensor, num_programs: int | None = None) -> None:
    """Run it on tensors in the order of ``pointers``; ``num_rows`` bounds the rows of all groups together.

    ``num_programs`` is how many programs share the tiles: by default what the device holds at once.
    """
    tile = spec.tile
    most = (num_rows // tile.m + spec.experts) * tiles_n(spec)
    grid = min(most, num_programs or programs(tensors[0].device, tile))
    if num_rows:
        kernel(spec)[(grid,)](*tensors, num_warps=tile.warps, num_stages=tile.stages)

