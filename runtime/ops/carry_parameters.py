"""``moec::carry_parameters``: values are whole from here on for whoever sends gradients back; numbers come as FP8.

``carry_parameters(masters, dims, dtype, size, group) -> carriers``: for each ``masters[i]``, this rank's part along
``dims[i]``, the *carrier* (``moec::quantise``) of the gathered value: its shape, of ``dtype``, without memory.  Nothing
is communicated.  Backward widens the carriers' gradients to the masters' dtype, and one reduce-scatter sums them over
the ranks for the masters (``p_to_s``), as the gather of the masters themselves would have it.  Masters have one dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..collectives import CARRY_PARAMETERS, TABLE
from .convert import convert
from .pack import flatten_shapes, pack, unpack


@torch.library.custom_op(f"moec::{CARRY_PARAMETERS}", mutates_args=())
def carry_parameters(
    masters: Sequence[Tensor], dims: Sequence[int], dtype: torch.dtype, size: int, group: str
) -> list[Tensor]:
    return carriers(masters, dims, dtype, size)


def carriers(masters: Sequence[Tensor], dims: Sequence[int], dtype: torch.dtype, size: int) -> list[Tensor]:
    made = []
    for x, dim in zip(masters, dims, strict=True):
        shape = list(x.shape)
        shape[dim] = shape[dim] * size
        made.append(x.new_zeros((), dtype=dtype).expand(shape))
    return made


@carry_parameters.register_fake
def _(masters, dims, dtype, size, group):
    return carriers(masters, dims, dtype, size)


def _setup(ctx, inputs, output) -> None:
    masters, ctx.dims, _, ctx.size, ctx.group = inputs
    ctx.dtype, ctx.shapes = masters[0].dtype, [x.shape for x in masters]


def _backward(ctx, grads: Sequence[Tensor]):
    wide = [g.to(ctx.dtype) for g in grads]
    dual = TABLE[CARRY_PARAMETERS].dual
    if len(wide) == 1:
        return [convert(dual, wide[0], ctx.dims[0], 0, ctx.size, ctx.group)], None, None, None, None
    flat = convert(dual, pack(wide, ctx.size, ctx.dims), 0, 0, ctx.size, ctx.group)
    return unpack(flat, 1, ctx.dims, flatten_shapes(ctx.shapes)), None, None, None, None


carry_parameters.register_autograd(_backward, setup_context=_setup)
