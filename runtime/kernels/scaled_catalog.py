"""The FP8 products of the list that is compiled ahead of time, where there are any: gfx942 has other FP8 numbers.

Legend: E experts, D depth of a product, C columns, P and Q columns of a weight's gradient, H hidden, I expert width.

Scales lie as ``moec::quantise`` leaves them; a test holds the specs against what ``scaled.py`` launches.
"""

from __future__ import annotations

import torch

from ..fp8 import Recipe
from ..fp8.recipes import E4M3, E5M2
from ..fp8.tiles import num_tiles
from . import scaled_outer, scaled_rows
from .entry import Entry
from .scaled import OUTER_TITLE, ROWS_TITLE, family, how
from .scaled_outer import ScaledOuter
from .scaled_rows import ScaledRows
from .tiles import Shape, default

TARGETS = ("sm_90", "sm_100", "gfx950")
BF16, FP32 = torch.bfloat16, torch.float32
MODELS = {"qwen3_moe": (128, 2048, 1536), "gpt_oss": (32, 2880, 5760)}
"""Experts, in and out features of a first product; 128 does not divide the latter's."""
ROWS = 1024
"""That an expert gets."""
EVERYDAY = ("blockwise qwen3_moe forward", "mxfp8 qwen3_moe wgrad")


def entries(arch: str) -> list[Entry]:
    if arch not in TARGETS:
        return []
    found = []
    for recipe in ("blockwise", "mxfp8", "rowwise", "current"):
        for model, (E, H, A) in MODELS.items():
            name = f"{recipe} {model}"
            found += [
                rows_entry(f"{name} forward", arch, recipe, E, H, A, False),
                rows_entry(f"{name} dgrad", arch, recipe, E, A, H, True),
                outer_entry(f"{name} wgrad", arch, recipe, E, A, H),
            ]
    for recipe in ("blockwise", "mxfp8"):
        found += [
            outer_entry(f"{recipe} linear wgrad", arch, recipe, 1, 7168, 2048, aligned=16),
            rows_entry(f"{recipe} few rows", arch, recipe, 128, 2048, 1536, False, rows=32),
            rows_entry(f"{recipe} fp32", arch, recipe, 128, 2048, 1536, False, FP32),
        ]
    return found


def rows_entry(
    name: str, arch: str, recipe: str, E: int, D: int, C: int, grad: bool, dtype: torch.dtype = BF16, rows: int = ROWS
) -> Entry:
    spec = rows_spec(Recipe.parse(recipe), arch, E, D, C, grad, dtype, rows)
    return _entry(name, Recipe.parse(recipe), spec, scaled_rows.POINTERS, grad)


def rows_spec(
    recipe: Recipe, arch: str, E: int, D: int, C: int, grad: bool, dtype: torch.dtype, rows: int
) -> ScaledRows:
    """``grad``: of the product with gradients, which reads weights along their other dim; of a linear, whose weight
    lies the other way round, of the product with rows."""
    deep = num_tiles(D, recipe.block)
    wide = num_tiles(C, recipe.block) if recipe.square_weights else C
    scales_b = (deep * wide, 1, deep) if grad else (deep * wide, wide, 1)
    if recipe.shared == "tensor":
        scales_b = (1, 1, 0)
    scales_a = (0, 1) if recipe.shared == "tensor" else (deep, 1)
    scales_b = (scales_b[0] if E > 1 else 0, *scales_b[1:])
    tile = default(family(recipe, "rows"), Shape(C, D, rows, E4M3), arch)
    return ScaledRows(
        ROWS_TITLE, E, D, C, how(recipe, arch), recipe.block or D, recipe.square_weights, scales_a, scales_b,
        recipe.scales == "e8m0", dtype, tile,
    )  # fmt: skip


def outer_entry(name: str, arch: str, recipe: str, E: int, P: int, Q: int, aligned: int = 0) -> Entry:
    spec = outer_spec(Recipe.parse(recipe), arch, E, P, Q, aligned)
    return _entry(name, Recipe.parse(recipe), spec, scaled_outer.POINTERS, True)


def outer_spec(
    recipe: Recipe, arch: str, E: int, P: int, Q: int, aligned: int, dtype: torch.dtype = BF16
) -> ScaledOuter:
    tile = default(family(recipe, "outer"), Shape(P, Q, ROWS, E4M3), arch)
    return ScaledOuter(
        OUTER_TITLE, E, P, Q, how(recipe, arch), recipe.block, aligned or recipe.alignment,
        recipe.scales == "e8m0", dtype, tile,
    )  # fmt: skip


def source(spec: ScaledRows | ScaledOuter) -> str:
    return scaled_outer.source(spec) if isinstance(spec, ScaledOuter) else scaled_rows.source(spec)


def _entry(
    name: str, recipe: Recipe, spec: ScaledRows | ScaledOuter, pointers: tuple[str, ...], grad: bool
) -> Entry:
    first = E5M2 if grad and recipe.gradients == E5M2 else E4M3
    scale = "*u8" if spec.exponents else "*fp32"
    types = {
        "offset_ptr": "*i32", "a_ptr": "*fp8e5" if first == E5M2 else "*fp8e4nv", "b_ptr": "*fp8e4nv", "as_ptr": scale,
        "bs_ptr": scale,
    }  # fmt: skip
    result = "*bf16" if spec.dtype == BF16 else "*fp32"
    arguments = tuple((p, types.get(p, result) + ":16") for p in pointers)
    if isinstance(spec, ScaledOuter):
        arguments += (("num_rows", "i32:16"),)
    tile = spec.tile
    return Entry(
        f"scaled {name}", source(spec), spec.name, arguments, warps=tile.warps, stages=tile.stages,
        nightly=name not in EVERYDAY,
    )  # fmt: skip
