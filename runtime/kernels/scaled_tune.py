"""What ``moec tune`` times of FP8 experts: the generated products of one block's step (``scaled.py``).

Legend: T tokens, K choices per token, E experts, N rows as the recipe aligns them, H hidden, I expert width, A columns
of the first product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..fp8 import Recipe, quantised
from ..fp8.recipes import E4M3
from ..ops.align_rows import padded
from ..ops.permute_aligned import aligned_size
from . import order, scaled
from .tiles import Shape, Tile

SIZES = ((128, 128, 8), (128, 128, 4), (128, 64, 4), (64, 128, 4), (128, 256, 8), (256, 128, 8))

Tensors = tuple[Tensor, Tensor]
"""Numbers and scales."""


def candidates(recipe: Recipe, device: torch.device) -> tuple[Tile, ...]:
    """Tiles worth a try: as deep as a block where every block is scaled by itself."""
    depths = (recipe.block,) if scaled.how(recipe, scaled.arch_of(device)) == "promoted" else (64, 128, 256)
    return tuple(
        Tile(m, n, k, warps, stages, programs=2 if warps == 4 else 1)
        for m, n, warps in SIZES for k in depths for stages in (2, 3, 4, 5)
    )  # fmt: skip


def problems(
    E: int, H: int, width: int, pairs: int, dtype: torch.dtype, recipe: Recipe, device: torch.device
) -> list[tuple[str, Shape, Callable[[Tile], Any]]]:
    """``(family, shape, run)`` of the products of a step whose shapes differ; ``pairs``: T · K."""
    I, A = width, 2 * width  # noqa: E741
    counts_E = torch.full((E,), -(-pairs // E), dtype=torch.int64, device=device)
    N = aligned_size(int(counts_E[0]) * E, E, recipe.alignment)
    offset = order.offsets(padded(counts_E, recipe.alignment))
    each = -(-N // E)

    def operand(role: str, transposed: bool, *shape: int) -> Tensors:
        return quantised(torch.randn(shape, device=device, dtype=dtype), recipe, role, transposed)

    found: list[tuple[str, Shape, Callable[[Tile], Any]]] = []
    for D, C, role in ((H, A, "rows"), (I, H, "rows"), (H, I, "grad"), (A, H, "grad")):
        if role == "rows":
            weight = operand("stack", False, E, D, C)
        else:
            q, s = operand("stack", True, E, C, D)
            weight = q.transpose(1, 2), s.transpose(1, 2)
        rows = operand(role, False, N, D)

        def product(tile: Tile, a: Tensors = rows, b: Tensors = weight) -> Any:
            return scaled.rows(a[0], a[1], b[0], b[1], offset, recipe, dtype, tile=tile)

        found.append((scaled.family(recipe, "rows"), Shape(C, D, each, E4M3), product))
    for P, Q in ((A, H), (H, I)):
        grad, rows = operand("grad", True, N, P), operand("rows", True, N, Q)

        def gradient(tile: Tile, a: Tensors = grad, b: Tensors = rows) -> Any:
            return scaled.outer(a[0], a[1], b[0], b[1], offset, recipe.alignment, recipe, dtype, tile=tile)

        found.append((scaled.family(recipe, "outer"), Shape(P, Q, each, E4M3), gradient))
    return found
