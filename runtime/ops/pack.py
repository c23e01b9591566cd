"""``moec::pack`` and ``moec::unpack``: several tensors as one vector, so that one collective moves them all.

Legend: R ranks, N elements of all tensors on one rank.

``pack(xs, size, dims)`` cuts dim ``dims[i]`` of every tensor into ``size`` equal parts and lays, for each part, the
parts of all tensors side by side: a vector ``[R * N]`` whose r-th piece is what rank r holds of them.
``unpack(flat, size, dims, shapes)`` undoes it; ``shapes`` are those of the tensors in ``xs`` one after the other, each
preceded by its number of dims (schemas know no lists of lists).  Each is the other's backward.

With ``size`` 1 they only flatten: ``pack`` of shards, all-gather of the vector, ``unpack`` with the group's size gives
whole parameters; backwards it is ``pack``, reduce-scatter, ``unpack``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import MoecError


def flatten_shapes(shapes: Sequence[Sequence[int]]) -> list[int]:
    """``[(2, 3), (4,)]`` as ``[2, 2, 3, 1, 4]``: what ``unpack`` takes."""
    return [n for shape in shapes for n in (len(shape), *shape)]


def shapes_of(flat: Sequence[int]) -> list[list[int]]:
    found, at = [], 0
    while at < len(flat):
        found.append(list(flat[at + 1 : at + 1 + flat[at]]))
        at += 1 + flat[at]
    return found


@torch.library.custom_op("moec::pack", mutates_args=(), device_types=("cpu", "cuda"))
def pack(xs: Sequence[Tensor], size: int, dims: Sequence[int]) -> Tensor:
    _check(xs, size, dims)
    if size == 1:
        return torch.cat([x.reshape(-1) for x in xs])
    return torch.cat(
        [x.unflatten(d, (size, -1)).movedim(d, 0).reshape(size, -1) for x, d in zip(xs, dims, strict=True)], 1
    ).view(-1)


@torch.library.custom_op("moec::unpack", mutates_args=(), device_types=("cpu", "cuda"))
def unpack(flat: Tensor, size: int, dims: Sequence[int], shapes: Sequence[int]) -> list[Tensor]:
    parts = flat.view(size, -1)
    out, at = [], 0
    for d, shape in zip(dims, shapes_of(shapes), strict=True):
        n = torch.Size(shape).numel() // size
        part = parts[:, at : at + n].reshape(size, *shape[:d], shape[d] // size, *shape[d + 1 :])
        # A copy in any case: a custom op may not return views of its input.
        out.append(part.movedim(0, d).clone(memory_format=torch.contiguous_format).view(shape))
        at += n
    return out


def _check(xs: Sequence[Tensor], size: int, dims: Sequence[int]) -> None:
    for x, d in zip(xs, dims, strict=True):
        if x.shape[d] % size:
            raise MoecError(f"dim {d} of shape {tuple(x.shape)} is not {size} equal parts", where="moec::pack")


@pack.register_fake
def _(xs, size, dims):
    return xs[0].new_empty((sum(x.numel() for x in xs),))


@unpack.register_fake
def _(flat, size, dims, shapes):
    return [flat.new_empty(shape) for shape in shapes_of(shapes)]


def _setup_pack(ctx, inputs, output) -> None:
    xs, ctx.size, ctx.dims = inputs
    ctx.shapes = flatten_shapes([x.shape for x in xs])


def _setup_unpack(ctx, inputs, output) -> None:
    _, ctx.size, ctx.dims, ctx.shapes = inputs


pack.register_autograd(
    lambda ctx, g: (unpack(g, ctx.size, ctx.dims, ctx.shapes), None, None), setup_context=_setup_pack
)
unpack.register_autograd(lambda ctx, gs: (pack(gs, ctx.size, ctx.dims), None, None, None), setup_context=_setup_unpack)
