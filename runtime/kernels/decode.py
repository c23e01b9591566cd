"""Payloads back on a GPU: a row of bytes is read once, and what it means is written.

Legend: N rows (all leading dims as one), H numbers and W bytes a row, B numbers that share a scale.

A program has a row, as in ``encode.py``.  Every number is that of the CPU op.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..fp8 import Recipe
from ..fp8.payload import check_width, checked, values, width
from ..fp8.recipes import E4M3, LARGEST
from ..fp8.tiles import scale_of
from ..ops import payload as op
from .encode import fits, tiles
from .expressions import TRITON
from .permute import warps
from .quantise import text
from .router_text import pad
from .source import load
from .template import fill

TEMPLATE = '''"""Decode rows of <columns> numbers of a payload of <recipe> to <dtype>."""

import triton
import triton.language as tl


@triton.jit
def decode(data_ptr, scale_ptr, y_ptr):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, <tiles_pad>)
    number = tile[:, None] * <block> + tl.arange(0, <block>)[None, :]
    q = tl.load(data_ptr + row * <width> + number, mask=number < <columns>, other=0)
    <scale>
    y = q.to(tl.float8e4nv, bitcast=True).to(tl.float32) * <spread>
    tl.store(y_ptr + row * <columns> + number, y.to(<dtype>), mask=number < <columns>)
'''

OF_ROWS = """
byte = tl.arange(0, 4)
bits = tl.load(data_ptr + <at>[:, None] + byte[None, :]<mask>).to(tl.int32)
scale = tl.sum(bits << (8 * byte)[None, :], 1).to(tl.float32, bitcast=True)
scale = tl.where(scale == 0.0, 1.0, scale)
"""
"""Zeros are rows that nobody filled, here and below."""
OF_TILES = """
exponent = tl.load(data_ptr + <at><mask>).to(tl.int32)
exponent = tl.where(exponent == 0, 127, exponent)
scale = (exponent << 23).to(tl.float32, bitcast=True)
"""


@cache
def source(payload: str, columns: int, dtype: torch.dtype) -> str:
    """The text of the kernel."""
    recipe = Recipe.parse(payload)
    count, block = tiles(recipe, columns)
    at = f"row * {width(columns, payload)} + {columns}"
    scale, spread = {
        "tensor": (["scale = tl.load(scale_ptr)"], "scale"),
        "vector": (text(OF_ROWS, at=f"({at} + tile)", mask=""), "scale[:, None]"),
        "block": (text(OF_TILES, at=f"{at} + tile", mask=f", mask=tile < {count}, other=0"), "scale[:, None]"),
    }[recipe.shared]
    return fill(
        TEMPLATE, dtype=TRITON[dtype], recipe=recipe.name, block=block, tiles_pad=pad(count), columns=columns,
        width=width(columns, payload), scale=scale, spread=spread,
    )  # fmt: skip


@cache
def kernel(payload: str, columns: int, dtype: torch.dtype) -> Any:
    return load(source(payload, columns, dtype), "decode").decode


def decode_rows(data: Tensor, carrier: Tensor, amax: Tensor | None, payload: str, role: str) -> Tensor:
    """``moec::decode_rows``."""
    H = carrier.shape[-1]
    if not fits(payload, role, carrier.dtype):
        return values(data, H, payload, role, carrier.dtype, amax)
    recipe = checked(payload, amax)
    check_width(data, H, payload)
    y = data.new_empty((*data.shape[:-1], H), dtype=carrier.dtype)
    if y.numel():
        given = data if amax is None else scale_of(amax, LARGEST[E4M3], recipe.scales, recipe.margin)
        kernel(payload, H, y.dtype)[(y.numel() // H,)](data.contiguous(), given, y, num_warps=warps(H))
    return y


op.decode_rows.register_kernel("cuda")(decode_rows)
