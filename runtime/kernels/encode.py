"""Rows as payloads on a GPU: a row is read once, and written as its bytes, numbers and scales.

Legend: N rows (all leading dims as one), H numbers and W bytes a row, B numbers that share a scale.

A program has a row: whoever needs its largest magnitudes has all of it.  What lies where is ``fp8/payload.py``'s, how
numbers are rounded ``fp8/recipes.py``'s, and every byte is that of the CPU op.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..fp8 import Recipe
from ..fp8.payload import BF16, checked, packed, width
from ..fp8.recipes import E4M3, LARGEST
from ..fp8.tiles import num_tiles, scale_of
from ..ops import payload as op
from ..ops.quantise import carrier
from .expressions import TRITON
from .permute import warps
from .quantise import EXPONENT, known, numbers, text
from .router_text import pad
from .source import load
from .template import fill

TEMPLATE = '''"""Encode rows of <columns> numbers of <dtype> as a payload of <recipe>."""

import triton
import triton.language as tl


@triton.jit
def encode(x_ptr, scale_ptr, data_ptr):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, <tiles_pad>)
    number = tile[:, None] * <block> + tl.arange(0, <block>)[None, :]
    x = tl.load(x_ptr + row * <columns> + number, mask=number < <columns>, other=0.0).to(tl.float32)
    finite = tl.abs(x) < float("inf")
    <scale>
    <numbers>
    tl.store(data_ptr + row * <width> + number, q.to(tl.uint8, bitcast=True), mask=number < <columns>)
    <store>
'''

LARGEST_OF = "largest = tl.max(tl.where(finite, tl.abs(x), 0.0), 1)"
OF_ROW = f"""
{LARGEST_OF}
scale = tl.where(largest > 0.0, tl.maximum(tl.div_rn(largest, {LARGEST[E4M3]}), 1.1754943508222875e-38), 1.0)
"""
STORE_ROW = """
byte = tl.arange(0, 4)
bits = scale.to(tl.int32, bitcast=True)[:, None] >> (8 * byte)[None, :]
tl.store(data_ptr + row * <width> + <columns> + (4 * tile)[:, None] + byte[None, :], (bits & 0xFF).to(tl.uint8))
"""
"""A row of bytes may begin anywhere, and so may a number in it."""
STORE_TILES = """
tl.store(data_ptr + row * <width> + <columns> + tile, (exponent + 127).to(tl.uint8), mask=tile < <tiles>)
"""


def tiles(recipe: Recipe, columns: int) -> tuple[int, int]:
    """``(tiles of a row, numbers of one, a power of two)``."""
    return (num_tiles(columns, recipe.block), recipe.block) if recipe.block else (1, pad(columns))


@cache
def source(payload: str, columns: int, dtype: torch.dtype) -> str:
    """The text of the kernel."""
    recipe = Recipe.parse(payload)
    count, block = tiles(recipe, columns)
    sizes = {"width": width(columns, payload), "columns": columns}
    scale, spread, store = {
        "tensor": (["scale = tl.load(scale_ptr)"], "scale", []),
        "vector": (text(OF_ROW), "scale[:, None]", text(STORE_ROW, **sizes)),
        "block": ([LARGEST_OF, *text(EXPONENT, largest="largest", scale="scale")], "scale[:, None]",
                  text(STORE_TILES, tiles=count, **sizes)),
    }[recipe.shared]  # fmt: skip
    return fill(
        TEMPLATE, dtype=TRITON[dtype], recipe=recipe.name, block=block, tiles_pad=pad(count), scale=scale,
        numbers=numbers(spread), store=store, **sizes,
    )  # fmt: skip


@cache
def kernel(payload: str, columns: int, dtype: torch.dtype) -> Any:
    return load(source(payload, columns, dtype), "encode").encode


def encode_rows(x: Tensor, amax: Tensor | None, payload: str, role: str) -> tuple[Tensor, Tensor]:
    """``moec::encode_rows``."""
    return carrier(x), launch(x, amax, payload, role)


def launch(x: Tensor, amax: Tensor | None, payload: str, role: str) -> Tensor:
    """uint8 [..., W]: what ``packed`` gives."""
    if not fits(payload, role, x.dtype):
        return packed(x, payload, role, amax)
    recipe, H = checked(payload, amax), x.shape[-1]
    data = x.new_empty((*x.shape[:-1], width(H, payload)), dtype=torch.uint8)
    if x.numel():
        given = data if amax is None else scale_of(amax, LARGEST[E4M3], recipe.scales, recipe.margin)
        kernel(payload, H, x.dtype)[(x.numel() // H,)](x.contiguous(), given, data, num_warps=warps(H))
    return data


def fits(payload: str, role: str, dtype: torch.dtype) -> bool:
    """Whether there is a kernel: bf16 is a copy, and E5M2 (gradients of one scale) no payload that a plan has."""
    return known(dtype) and payload != BF16 and Recipe.parse(payload).format(role) == E4M3


op.encode_rows.register_kernel("cuda")(encode_rows)
