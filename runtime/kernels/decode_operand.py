"""Payloads as operands of FP8 products on a GPU: numbers and scales as they have travelled, and the other layout,
quantised from what they mean.  The bytes are read once, nothing exists in a wide dtype.

Legend: N rows (all leading dims as one), H numbers and W bytes a row, B the side of a program's square.

A program has B x B numbers.  By the recipes of tiles these are whole tiles of both kinds, so it finds its own scales;
by the others the largest magnitudes of the other layout are given, or found before.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..fp8 import Recipe
from ..fp8.payload import check_width, checked, width
from ..fp8.recipes import E4M3, E8M0, LARGEST
from ..fp8.tiles import num_tiles, scale_of
from ..ops import payload as op
from ..ops.align_rows import real_rows
from ..ops.quantise import carrier as carrier_of
from ..ops.quantise import nothing, scale_shape
from . import amax as largest
from .decode import OF_ROWS, OF_TILES, decode_rows
from .encode import fits
from .expressions import TRITON
from .quantise import EXPONENT, numbers, side, stored_scale, text, warps
from .source import load
from .template import fill

TEMPLATE = '''"""Operands of <columns> numbers a row from a payload of <recipe><layouts>, meant as <dtype>."""

import triton
import triton.language as tl


@triton.jit
def decode_operand(<pointers>, rows):
    row = tl.program_id(1).to(tl.int64) * <block> + tl.arange(0, <block>)
    column = tl.program_id(0).to(tl.int64) * <block> + tl.arange(0, <block>)
    inside = (row < rows)[:, None] & (column < <columns>)[None, :]
    real = <real>
    q = tl.load(data_ptr + row[:, None] * <width> + column[None, :], mask=inside & real[:, None], other=0)
    tl.store(q_ptr + row[:, None] * <columns> + column[None, :], q, mask=inside)
    <scale>
    <transposed>
'''

TRANSPOSED = """
x = (q.to(tl.float8e4nv, bitcast=True).to(tl.float32) * <spread>).to(<dtype>).to(tl.float32)
finite = tl.abs(x) < float("inf")
<scales>
<numbers>
tl.store(qt_ptr + column[None, :] * rows + row[:, None], q, mask=inside)
"""
SCALES = """
largest = tl.max(tl.where(finite, tl.abs(x), 0.0), 0)
<exponent>
tl.store(scalet_ptr + tl.program_id(1).to(tl.int64) * <columns> + column, <stored>, mask=column < <columns>)
"""


def pointers(recipe: Recipe, both: bool, masked: bool) -> list[str]:
    """The kernel's arguments but for the number of rows, in order."""
    return ["data_ptr", *(["real_ptr"] if masked else []), "q_ptr", "scale_ptr",
            *(["qt_ptr", "scalet_ptr"] if both else [])]  # fmt: skip


@cache
def source(payload: str, columns: int, dtype: torch.dtype, both: bool, masked: bool) -> str:
    """The text of the kernel.  ``masked``: some rows are no expert's."""
    recipe = Recipe.parse(payload)
    at, mask = f"row * {width(columns, payload)} + {columns}", "mask={}, other=0"
    if recipe.shared == "tensor":
        scale = ["scale = tl.load(scale_ptr)"] if both else []
    elif recipe.shared == "vector":
        scale = text(OF_ROWS, at=f"({at})", mask=", " + mask.format("real[:, None]"))
        scale += ["tl.store(scale_ptr + row, scale, mask=(row < rows) & (tl.program_id(0) == 0))"]
    else:
        count = num_tiles(columns, recipe.block)
        scale = text(OF_TILES, at=f"{at} + tl.program_id(0)", mask=", " + mask.format("real"))
        stored = "exponent.to(tl.uint8)" if recipe.scales == "e8m0" else "scale"
        scale += [f"tl.store(scale_ptr + row * {count} + tl.program_id(0), {stored}, mask=row < rows)"]
    other = {"tensor": "scale_t = tl.load(scalet_ptr)", "vector": "scale_t = tl.load(scalet_ptr + column, mask=column "
             f"< {columns}, other=1.0)"}.get(recipe.shared)  # fmt: skip
    found = text(SCALES, exponent=text(EXPONENT, largest="largest", scale="scale_t"), columns=columns,
                 stored=stored_scale(recipe, "scale_t"))  # fmt: skip
    transposed = text(
        TRANSPOSED, dtype=TRITON[dtype], spread="scale" if recipe.shared == "tensor" else "scale[:, None]",
        scales=[other] if other else found,
        numbers=numbers("scale_t" if recipe.shared == "tensor" else "scale_t[None, :]"),
    )  # fmt: skip
    real = "tl.load(real_ptr + row, mask=row < rows, other=0) != 0" if masked else "row < rows"
    return fill(
        TEMPLATE, recipe=recipe.name, layouts=", both layouts" if both else "", dtype=TRITON[dtype], columns=columns,
        block=side(recipe), width=width(columns, payload), pointers=", ".join(pointers(recipe, both, masked)),
        real=real, scale=scale, transposed=transposed if both else [],
    )  # fmt: skip


@cache
def kernel(payload: str, columns: int, dtype: torch.dtype, both: bool, masked: bool) -> Any:
    return load(source(payload, columns, dtype, both, masked), "decode_operand").decode_operand


def decode_operand(
    data: Tensor, carrier: Tensor, amax: Tensor | None, amax_T: Tensor | None, counts_E: Tensor | None, payload: str,
    both: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``moec::decode_operand``."""
    if not fits(payload, "rows", carrier.dtype):
        return op.operand_on_any_device(data, carrier, amax, amax_T, counts_E, payload, both)
    recipe, (*_, H) = checked(payload, amax), carrier.shape
    check_width(data, H, payload)
    real_N = None if counts_E is None else real_rows(counts_E, data.shape[0], recipe.alignment, "decode_operand")
    if both and recipe.reads_whole and amax_T is None:
        x_NH = decode_rows(data, carrier, amax, payload, "rows").view(1, -1, H)
        (amax_T,) = largest.launch(x_NH, real_N, (largest.kind(recipe.tile("rows", True)),))
    N = data.numel() // data.shape[-1]
    kept = torch.uint8 if recipe.scales == "e8m0" else torch.float32

    def scales(transposed: bool, given: Tensor | None) -> Tensor:
        if given is not None and recipe.reads_whole:
            return scale_of(given.reshape(1, -1), LARGEST[E4M3], recipe.scales, recipe.margin)
        return data.new_empty(scale_shape(carrier, recipe, "rows", transposed), dtype=kept)

    made = [torch.empty(carrier.shape, dtype=E4M3, device=data.device), scales(False, amax)]
    if both:
        made += [torch.empty_permuted((N, H), (1, 0), dtype=E4M3, device=data.device), scales(True, amax_T)]
    if N and H:
        grid = num_tiles(H, side(recipe)), num_tiles(N, side(recipe))
        given = [data.contiguous()] + ([] if real_N is None else [real_N.to(torch.uint8)])
        tensors = [t.view(torch.uint8) if t is made[0] else t for t in made]
        kernel(payload, H, carrier.dtype, both, real_N is not None)[grid](*given, *tensors, N, num_warps=warps(recipe))
    made = [t.view(E8M0) if t.dtype == torch.uint8 else t for t in made]
    q, scale, q_T, scale_T = made if both else made + nothing(carrier, recipe, "rows")
    return carrier_of(carrier), q, scale, q_T, scale_T


op.decode_operand.register_kernel("cuda")(decode_operand)
