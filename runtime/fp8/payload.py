"""Payloads: rows of numbers as the bytes that travel.

Legend: N rows (all leading dims as one), H numbers a row, W bytes a row.

A payload is named by an FP8 recipe (``recipes.py``), or ``bf16``.  A row is its H numbers, quantised as the recipe
quantises ``rows`` or ``grad`` for the product that sums over H, followed by its scales:

============  ==========================================  ==============
payload       scales of a row                             W
============  ==========================================  ==============
``bf16``      none                                        2 H
``current``,  none: one of the tensor, which all know     H
``delayed``
``rowwise``   one, fp32                                   H + 4
``blockwise`` one of 128 numbers, its exponent (E8M0)     H + ⌈H / 128⌉
``mxfp8``     one of 32 numbers, E8M0                     H + ⌈H / 32⌉
============  ==========================================  ==============

Rows know all that they need, so whatever moves rows moves payloads.  A row of zero bytes (one that nobody filled) is
zeros: no scale that a recipe makes is written as zeros, and such a scale is read as 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MoecError
from .recipes import E8M0, LARGEST, Recipe
from .tiles import dequantised, num_tiles, quantised, scale_of

BF16 = "bf16"
"""The payload that is no recipe."""


def width(H, payload: str):
    """Bytes of a row of H numbers."""
    return 2 * H if payload == BF16 else H + scale_bytes(H, Recipe.parse(payload))


def scale_bytes(H, recipe: Recipe):
    return {"tensor": 0, "vector": 4, "block": num_tiles(H, recipe.block or 1)}[recipe.shared]


def packed(x: Tensor, payload: str, role: str, amax: Tensor | None = None) -> Tensor:
    """uint8 [..., W] of ``x [..., H]``.  ``role``: ``rows`` or ``grad``.

    ``amax``: fp32 [1, 1], the largest magnitude of the whole tensor, where the recipe has one scale."""
    if payload == BF16:
        return x.to(torch.bfloat16, copy=True).contiguous().view(torch.uint8)
    recipe = checked(payload, amax)
    x_NH = x.reshape(-1, x.shape[-1])
    q_NH, scale = quantised(x_NH, recipe, role, False, amax)
    parts = [q_NH.view(torch.uint8)]
    if recipe.shared == "vector":
        parts.append(scale.contiguous().view(torch.uint8))
    elif recipe.shared == "block":
        parts.append(scale.to(E8M0).view(torch.uint8))
    return torch.cat(parts, 1).view(*x.shape[:-1], width(x.shape[-1], payload))


def unpacked(data: Tensor, H: int, payload: str, role: str, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``(q [..., H], scales [..., 1 or a tile])`` as ``quantised`` gives them, of a recipe's payload."""
    recipe = checked(payload, amax)
    check_width(data, H, payload)
    q = data[..., :H].clone(memory_format=torch.contiguous_format).view(recipe.format(role))
    rest = data[..., H:].clone(memory_format=torch.contiguous_format)  # of one row a view would begin anywhere
    if recipe.shared == "tensor":
        assert amax is not None
        return q, scale_of(amax, LARGEST[recipe.format(role)], recipe.scales, recipe.margin)
    if recipe.shared == "vector":
        scale = rest.view(torch.float32)
        return q, torch.where(scale == 0, 1.0, scale)
    exponent = torch.where(rest == 0, 127, rest)
    if recipe.scales == "e8m0":
        return q, exponent.view(E8M0)
    power = exponent.to(torch.int32) - 127
    return q, torch.ldexp(torch.ones_like(power, dtype=torch.float32), power)


def values(
    data: Tensor, H: int, payload: str, role: str, dtype: torch.dtype, amax: Tensor | None = None
) -> Tensor:
    """``[..., H]`` in ``dtype``: what a payload says."""
    if payload == BF16:
        return data.contiguous().view(torch.bfloat16).to(dtype, copy=True)
    q, scale = unpacked(data, H, payload, role, amax)
    return dequantised(q, scale, Recipe.parse(payload), role, False, dtype)


def checked(payload: str, amax: Tensor | None) -> Recipe:
    """The recipe of a payload.  Raises MoecError where one scale, and none else, has no largest magnitude."""
    recipe = Recipe.parse(payload)
    if (amax is not None) != (recipe.shared == "tensor"):
        raise MoecError(
            f"{'a' if amax is not None else 'no'} largest magnitude of the tensor for a payload of {recipe.name}",
            where="payload",
        )
    return recipe


def check_width(data: Tensor, H: int, payload: str) -> None:
    if data.shape[-1] != width(H, payload):
        raise MoecError(f"rows of {data.shape[-1]} bytes are no {payload} payload of {H} numbers", where="payload")
