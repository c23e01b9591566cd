"""``moec::pack_bytes`` and ``moec::unpack_bytes``: tensors of any dtypes as one vector of bytes, for one all-gather.

Legend: R ranks, N bytes of all tensors on one rank.

``pack_bytes(xs, turned) -> uint8 [N]``: one tensor behind the other.  Of those that are ``turned`` the last two dims
lie swapped, as they do in memory where a product sums over the last but one (``runtime/fp8/tiles.py``).
``unpack_bytes(flat [R * N], size, dims, turned, shapes, dtypes) -> xs``: the R ranks' parts of each, joined along
``dims[i]``: ``shapes`` are those of the whole tensors, one after the other, each preceded by its number of dims;
``dtypes`` their names, by commas.  FP8 travels so wherever a backend knows no float8.  No gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .pack import shapes_of


@torch.library.custom_op("moec::pack_bytes", mutates_args=(), device_types=("cpu", "cuda"))
def pack_bytes(xs: Sequence[Tensor], turned: Sequence[bool]) -> Tensor:
    lying = [x.transpose(-1, -2) if t else x for x, t in zip(xs, turned, strict=True)]
    return torch.cat([as_bytes(x).reshape(-1) for x in lying])


def as_bytes(x: Tensor) -> Tensor:
    """``x`` as uint8, each number's bytes along one dim more."""
    return x.unsqueeze(-1).contiguous().view(torch.uint8)


@torch.library.custom_op("moec::unpack_bytes", mutates_args=(), device_types=("cpu", "cuda"))
def unpack_bytes(
    flat: Tensor, size: int, dims: Sequence[int], turned: Sequence[bool], shapes: Sequence[int], dtypes: str
) -> list[Tensor]:
    parts, out, at = flat.view(size, -1), [], 0
    for dim, turn, shape, name in zip(dims, turned, shapes_of(shapes), dtypes.split(","), strict=True):
        dtype = getattr(torch, name)
        lying, dim = _lying(shape, dim, turn)
        n = torch.Size(shape).numel() * dtype.itemsize // size
        mine = parts[:, at : at + n].reshape(size, *lying[:dim], lying[dim] // size, *lying[dim + 1 :], dtype.itemsize)
        # A copy in any case: a custom op may not return views of its input.
        whole = mine.movedim(0, dim).clone(memory_format=torch.contiguous_format).view(dtype).view(lying)
        out.append(whole.transpose(-1, -2) if turn else whole)
        at += n
    return out


def _lying(shape: list[int], dim: int, turn: bool) -> tuple[list[int], int]:
    """Shape and dim as the tensor lies in memory."""
    if not turn:
        return shape, dim
    order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    return [shape[d] for d in order], order.index(dim)


@pack_bytes.register_fake
def _(xs, turned):
    return xs[0].new_empty((sum(x.numel() * x.dtype.itemsize for x in xs),), dtype=torch.uint8)


@unpack_bytes.register_fake
def _(flat, size, dims, turned, shapes, dtypes):
    out = []
    for dim, turn, shape, name in zip(dims, turned, shapes_of(shapes), dtypes.split(","), strict=True):
        whole = flat.new_empty(_lying(shape, dim, turn)[0], dtype=getattr(torch, name))
        out.append(whole.transpose(-1, -2) if turn else whole)
    return out
