"""``moec::s_to_r_low``: a parameter's narrow copy is gathered, and its gradient reduced wide.

``s_to_r_low(x, master, dim, size, group) -> [..., size * d, ...]`` of ``x``'s dtype: the all-gather of ``x`` along
``dim``, like ``s_to_r``.  ``x`` is this rank's part as it travels (bf16 of fp32, say) and has no gradient; ``master``,
of the same shape, is what it was made of.  Backward widens the gradient to the dtype of ``master``, then sums it over
the ranks (``p_to_s``) and gives it to ``master``: gradients are rounded where they are computed, and never again.

``pack_empty(xs, size, dims)`` stands for ``pack(xs, size, dims)`` where only the gradient matters, as ``master`` of
several parameters that travel together: an ``[N]`` that takes no memory, whose backward is that of ``pack``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..collectives import LOW_GATHER, TABLE
from ..errors import MoecError
from .convert import convert
from .pack import flatten_shapes, unpack


@torch.library.custom_op(f"moec::{LOW_GATHER}", mutates_args=())
def s_to_r_low(x: Tensor, master: Tensor, dim: int, size: int, group: str) -> Tensor:
    if x.shape != master.shape:
        raise MoecError(f"{tuple(x.shape)} is no copy of {tuple(master.shape)}", where=f"moec::{LOW_GATHER}")
    return TABLE["s_to_r"].op(x, dim, size, group)


@s_to_r_low.register_fake
def _(x, master, dim, size, group):
    return TABLE["s_to_r"].op(x, dim, size, group)


def _setup_gather(ctx, inputs, output) -> None:
    x, master, dim, ctx.size, ctx.group = inputs
    ctx.dim, ctx.dtype = dim % max(x.ndim, 1), master.dtype


def _gather_backward(ctx, grad: Tensor):
    grad = convert(TABLE[LOW_GATHER].dual, grad.to(ctx.dtype), ctx.dim, 0, ctx.size, ctx.group)
    return None, grad, None, None, None


s_to_r_low.register_autograd(_gather_backward, setup_context=_setup_gather)


@torch.library.custom_op("moec::pack_empty", mutates_args=())
def pack_empty(xs: Sequence[Tensor], size: int, dims: Sequence[int]) -> Tensor:
    return _empty(xs)


@pack_empty.register_fake
def _(xs, size, dims):
    return _empty(xs)


def _empty(xs: Sequence[Tensor]) -> Tensor:
    return xs[0].new_zeros(()).expand(sum(x.numel() for x in xs))


def _setup_pack(ctx, inputs, output) -> None:
    xs, ctx.size, ctx.dims = inputs
    ctx.shapes = flatten_shapes([x.shape for x in xs])


pack_empty.register_autograd(
    lambda ctx, g: (unpack(g.contiguous(), ctx.size, ctx.dims, ctx.shapes), None, None), setup_context=_setup_pack
)
