"""FP8 products that moec generates, for every recipe: launchers that put ``scaled_rows`` and ``scaled_outer`` to work.

Legend: N rows, E experts (1: a linear), D depth of a product, C columns, P and Q columns of a weight's gradient, B the
recipe's block (of whole dims: everything).

Operands and scales are those of ``moec::quantise``, of any device: CPU tensors run where Triton interprets.  How scales
are applied follows from the recipe and the GPU (``how``); sums are fp32 in any case.  Nothing waits for the host.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..fp8 import Recipe
from ..fp8.recipes import E4M3, E8M0
from ..fp8.tiles import contiguous_along
from ..ops.align_rows import padded
from . import order, scaled_outer, scaled_rows, zero_tail
from .scaled_outer import ScaledOuter
from .scaled_rows import ScaledRows, Way
from .tiles import NATIVE_E8M0, Shape, Tile, architecture, choose

ROWS_TITLE, OUTER_TITLE = "moec: FP8 rows times weights.", "moec: gradient of a weight, of FP8 operands."


def how(recipe: Recipe, arch: str) -> Way:
    """How scales are applied on a GPU of this architecture (``sm_90``; of none where Triton interprets)."""
    if recipe.reads_whole:
        return "whole"
    return "native" if recipe.scales == "e8m0" and arch in NATIVE_E8M0 else "promoted"


def arch_of(device: torch.device) -> str:
    return architecture(device.index or 0) if device.type == "cuda" else ""


def family(recipe: Recipe, kind: str) -> str:
    """Of tiles; ``kind``: rows or outer."""
    return f"{'whole' if recipe.reads_whole else recipe.name}_{kind}"


def tile_of(recipe: Recipe, kind: str, shape: Shape, way: Way, device: torch.device) -> Tile:
    """The tile of a product: as deep as a block where every block is scaled by itself."""
    found = choose(family(recipe, kind), shape, device)
    return replace(found, k=recipe.block) if way == "promoted" else found


def rows(
    a_ND: Tensor, a_s: Tensor, b_EDC: Tensor, b_s: Tensor, offset_E1: Tensor, recipe: Recipe, dtype: torch.dtype, *,
    tile: Tile | None = None, way: Way | None = None,
) -> Tensor:  # fmt: skip
    """y [N, C] = a · b of every group; a contiguous along D, b too.

    Scales: [N, D / B] (or what expands to [N, 1]), and [E, D / B, C] or [E, D / B, C / B] (what expands to
    [E, 1, C])."""
    (N, D), (E, _, C) = a_ND.shape, b_EDC.shape
    way = way or how(recipe, arch_of(a_ND.device))
    tile = tile or tile_of(recipe, "rows", Shape(C, D, -(-N // max(E, 1)), E4M3), way, a_ND.device)
    if way == "whole":
        a_s, b_s = a_s.expand(N, 1), b_s.expand(E, 1, C)
    of_expert, *others = b_s.stride()
    spec = ScaledRows(
        ROWS_TITLE, E, D, C, way, recipe.block or D, recipe.square_weights, _two(a_s),
        (of_expert if E > 1 else 0, others[0], others[1]), recipe.scales == "e8m0", dtype, tile,
    )  # fmt: skip
    y_NC = torch.empty((N, C), dtype=dtype, device=a_ND.device)
    operands = _plain(contiguous_along(a_ND, -1), a_s, contiguous_along(b_EDC, -2), b_s)
    scaled_rows.launch(spec, N, offset_E1, *operands, y_NC)
    return y_NC


def outer(
    a_NP: Tensor, a_s: Tensor, b_NQ: Tensor, b_s: Tensor, offset_E1: Tensor, aligned: int, recipe: Recipe,
    dtype: torch.dtype, *, tile: Tile | None = None, way: Way | None = None,
) -> Tensor:  # fmt: skip
    """dw [E, P, Q] = aᵀ · b of every group; both contiguous along N, scales [N / B, ·] (or what expands to [1, ·]).
    Groups begin and end at multiples of ``aligned``."""
    (N, P), Q, E = a_NP.shape, b_NQ.shape[1], offset_E1.shape[0] - 1
    way = way or how(recipe, arch_of(a_NP.device))
    tile = tile or tile_of(recipe, "outer", Shape(P, Q, -(-N // max(E, 1)), E4M3), way, a_NP.device)
    if way == "whole":
        a_s, b_s = a_s.expand(1, P), b_s.expand(1, Q)
    exponents = recipe.scales == "e8m0"
    spec = ScaledOuter(OUTER_TITLE, E, P, Q, way, recipe.block, aligned, exponents, dtype, tile)
    dw_EPQ = torch.empty((E, P, Q), dtype=dtype, device=a_NP.device)
    a, s, b, t = _plain(contiguous_along(a_NP, -2), a_s, contiguous_along(b_NQ, -2), b_s)
    scaled_outer.launch(spec, N, offset_E1, a, s.contiguous(), b, t.contiguous(), dw_EPQ)
    return dw_EPQ


def grouped_rows(
    a_ND: Tensor, a_s: Tensor, b_EDC: Tensor, b_s: Tensor, counts_E: Tensor, recipe: Recipe, dtype: torch.dtype
) -> Tensor:
    """``rows`` of experts with these many rows, which begin at multiples of the recipe's alignment; zeros behind."""
    offset_E1 = order.checked_offsets(padded(counts_E, recipe.alignment), a_ND.shape[0], "fp8_grouped_mm")
    return zero_tail.launch(offset_E1, rows(a_ND, a_s, b_EDC, b_s, offset_E1, recipe, dtype))


def grouped_outer(
    a_NP: Tensor, a_s: Tensor, b_NQ: Tensor, b_s: Tensor, counts_E: Tensor, recipe: Recipe, dtype: torch.dtype
) -> Tensor:
    """``outer`` of such experts."""
    offset_E1 = order.offsets(padded(counts_E, recipe.alignment))
    return outer(a_NP, a_s, b_NQ, b_s, offset_E1, recipe.alignment, recipe, dtype)


def linear_rows(a_ND: Tensor, a_s: Tensor, b_CD: Tensor, b_s: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """a · bᵀ, both contiguous along D, scales [N, D / B] and [C, D / B] (or [C / B, D / B])."""
    scales = b_s.transpose(0, 1)[None]
    return rows(a_ND, a_s, b_CD.t()[None], scales, _one_group(a_ND), recipe, dtype)


def linear_outer(a_NP: Tensor, a_s: Tensor, b_NQ: Tensor, b_s: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """aᵀ · b, both contiguous along N."""
    N = a_NP.shape[0]
    aligned = next(n for n in (recipe.alignment, 16, 1) if N % n == 0)
    return outer(a_NP, a_s, b_NQ, b_s, _one_group(a_NP), aligned, recipe, dtype)[0]


def _one_group(a: Tensor) -> Tensor:
    """Offsets 0 and N (int32), made on the device: nothing is copied to it."""
    N = a.shape[0]
    return torch.arange(0, N + 1, max(N, 1), dtype=torch.int32, device=a.device)


def _plain(*tensors: Tensor) -> list[Tensor]:
    """E8M0 is no dtype of Triton's: its bytes are."""
    return [t.view(torch.uint8) if t.dtype == E8M0 else t for t in tensors]


def _two(t: Tensor) -> tuple[int, int]:
    a, b = t.stride()
    return a, b
