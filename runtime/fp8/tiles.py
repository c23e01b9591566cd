"""Numbers to float8 and scales, and back, tile by tile (the arithmetic is in ``recipes``).

Legend: L leading dims as one (experts), R rows, C columns, r and c numbers of tiles along them.

A tile is ``(rows, columns)``, 0 for all.  The last tile of a dim may be smaller.  Memory is contiguous along the dim
that the product sums over (``along``: -1 or -2), which is how kernels want both operands.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .recipes import E8M0, LARGEST, Recipe, Tile

SMALLEST = 2.0**-126


def amax(x: Tensor, tile: Tile) -> Tensor:
    """fp32 [..., r, c]: the largest finite magnitude of every tile of ``x [..., R, C]``, 0 where there is none."""
    wide = x.float().abs()
    return _tiled(wide.masked_fill_(~wide.isfinite(), 0), tile).amax((-3, -1))


def scale_of(amax: Tensor, largest: float, kind: str, margin: int = 0) -> Tensor:
    """fp32 scales of tiles with these largest magnitudes."""
    if kind == "fp32":
        found = (amax / largest).clamp(min=SMALLEST) * 2.0**margin
    else:
        mantissa, exponent = torch.frexp(amax)  # amax = mantissa · 2^exponent; both formats' largest is 0.875 · 2^n
        most = {448.0: 9, 57344.0: 16}[largest]
        exponent = (exponent - most + (mantissa > 0.875)).clamp(min=-126)
        found = torch.ldexp(torch.ones_like(amax), exponent)
    return torch.where(amax > 0, found, 1.0)


def quantised(x: Tensor, recipe: Recipe, role: str, transposed: bool, amax_rc: Tensor | None = None
              ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(q, scales)`` of ``x [..., R, C]``: q as x, scales [..., r, c] (E8M0 for ``mxfp8``, else fp32).

    ``amax_rc``: the largest magnitudes, if they are not those of this x (past steps, or all ranks)."""
    tile, dtype = recipe.tile(role, transposed), recipe.format(role)
    largest = LARGEST[dtype]
    scale = scale_of(amax(x, tile) if amax_rc is None else amax_rc, largest, recipe.scales, recipe.margin)
    wide = x.float()
    q = (wide / _spread(scale, x.shape, tile)).clamp(-largest, largest)
    q = torch.where(wide.isfinite(), q, torch.nan).to(dtype)
    along = -2 if transposed != (role == "stack") else -1
    return contiguous_along(q, along), scale.to(E8M0) if recipe.scales == "e8m0" else scale


def dequantised(q: Tensor, scale: Tensor, recipe: Recipe, role: str, transposed: bool, dtype: torch.dtype) -> Tensor:
    """``q · scale``, formed in fp32 and cast."""
    wide = scale.view(torch.uint8).to(torch.int32).sub(127) if scale.dtype == E8M0 else None
    scale = scale if wide is None else torch.ldexp(torch.ones_like(wide, dtype=torch.float32), wide)
    return (q.float() * _spread(scale, q.shape, recipe.tile(role, transposed))).to(dtype)


def contiguous_along(q: Tensor, dim: int) -> Tensor:
    """Float8 is no dtype to copy with everywhere: bytes are."""
    data = q.view(torch.uint8)
    data = data.contiguous() if dim == -1 else data.transpose(-1, -2).contiguous().transpose(-1, -2)
    return data.view(q.dtype)


def num_tiles(size: int, step: int) -> int:
    """How many tiles of ``step`` (0: all) a dim of ``size`` has."""
    return (size + step - 1) // step if step else 1


def _tiled(x: Tensor, tile: Tile) -> Tensor:
    """[..., r, rows, c, columns], padded with zeros."""
    *lead, R, C = x.shape
    steps = [s or max(n, 1) for s, n in zip(tile, (R, C), strict=True)]
    tiles = [num_tiles(n, s) for s, n in zip(tile, (R, C), strict=True)]
    if (tiles[0] * steps[0], tiles[1] * steps[1]) != (R, C):
        x = F.pad(x, (0, tiles[1] * steps[1] - C, 0, tiles[0] * steps[0] - R))
    return x.reshape(*lead, tiles[0], steps[0], tiles[1], steps[1])


def _spread(scale: Tensor, shape: torch.Size, tile: Tile) -> Tensor:
    """Scales as they multiply elements."""
    for dim in (-2, -1):
        if tile[dim] > 1:
            scale = scale.repeat_interleave(tile[dim], dim).narrow(dim, 0, shape[dim])
    return scale
