"""Shards of parameters: from a full tensor to one rank's part and back, and the same thing as DTensor placements.

A dim that several axes shard is cut major to minor in mesh order; with ``S(dim, parts=p)`` every one of the p equal
blocks is cut and a rank's slices lie side by side (see :mod:`moec.placement`).  FSDP may cut a dim unevenly; inside a
graph such a part is padded to the largest one (``pad``, ``trim``).

As DTensor placements a dim of several blocks is a strided shard: what is packed, and what FSDP cuts although an inner
axis cuts it too.  The split factor of a packed dim grows by the size of each further axis that cuts it: the inner axis
sees the blocks that the outer axes have not merged yet.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from moec.placement import Types, local_shape, part, show
from moec.runtime.errors import MoecError
from moec.runtime.groups import Groups
from moec.runtime.mesh import Mesh
from moec.runtime.torch_compat import PackedDTensor, all_gather_flat, strided_shard


def check_types(name: str, shape: tuple[int, ...], types: Types, mesh: Mesh) -> None:
    """Raise MoecError unless a parameter of this shape can be laid out as ``types`` say."""
    for axis, t in types.items():
        if t.kind not in "IRS":
            raise MoecError(f"a parameter cannot be of type {t} (on axis {axis})", where=name)
        if t.kind == "S" and not 0 <= t.dim < len(shape):
            raise MoecError(f"type {t} on axis {axis} names no dim of shape {tuple(shape)}", where=name)
    fsdp = {*mesh.role("fsdp"), *mesh.role("efsdp")}
    for dim, size in enumerate(shape):
        cuts = [(a, u.parts) for a in mesh.axes if (u := types.get(a.name)) and u.kind == "S" and u.dim == dim]
        if all(a.name in fsdp and parts == 1 for a, parts in cuts):
            continue  # FSDP may cut unevenly
        for a, parts in cuts:
            if size % (parts * a.size):
                blocks = f" in {parts} packed blocks" if parts > 1 else ""
                raise MoecError(
                    f"dim {dim} of shape {tuple(shape)} cannot be cut into {a.size} equal parts{blocks} on "
                    f"{a.name} ({show(types)})",
                    where=name,
                    way_out="choose degrees that divide it",
                )
            size //= a.size


def cut(full: Tensor, types: Types, mesh: Mesh, rank: int) -> Tensor:
    """The part of ``full`` that ``rank`` holds: a view where possible."""
    at = mesh.coords(rank)
    for axis in mesh.axes:
        t = types.get(axis.name)
        if t is not None and t.kind == "S":
            blocks = full.chunk(t.parts, t.dim) if t.parts > 1 else (full,)
            mine = [b.narrow(t.dim, *part(b.shape[t.dim], axis.size, at[axis.name])) for b in blocks]
            full = mine[0] if len(mine) == 1 else torch.cat(mine, t.dim)
    return full


def uneven(shape: tuple[int, ...], types: Types, mesh: Mesh) -> bool:
    """Are the ranks' parts of different sizes?"""
    return len({local_shape(shape, types, mesh, r) for r in range(mesh.world)}) > 1


def pad(local: Tensor, shape: tuple[int, ...], types: Types, mesh: Mesh) -> Tensor:
    """A rank's part with zeros behind it, as large as the largest part: what graphs are given."""
    return pad_to(local, local_shape(shape, types, mesh))


def pad_to(local: Tensor, wanted: tuple[int, ...]) -> Tensor:
    if tuple(local.shape) == wanted:
        return local
    out = local.new_zeros(wanted)
    out[tuple(slice(n) for n in local.shape)] = local
    return out


def trim(padded: Tensor, shape: tuple[int, ...], types: Types, mesh: Mesh, rank: int) -> Tensor:
    """The inverse of ``pad``, for gradients."""
    return trim_to(padded, local_shape(shape, types, mesh, rank))


def trim_to(padded: Tensor, wanted: tuple[int, ...]) -> Tensor:
    return padded if tuple(padded.shape) == wanted else padded[tuple(slice(n) for n in wanted)]


def sharding(types: Types, mesh: Mesh) -> str:
    """The group key of the axes that shard a parameter; empty when it is replicated."""
    return mesh.key(a for a, t in types.items() if t.kind == "S")


def join(parts: list[Tensor], types: Types, mesh: Mesh) -> Tensor:
    """The inverse of ``cut``: the parts of one group over ``sharding(types)``, in group order, to the full tensor."""
    for axis in reversed(mesh.axes):
        # Groups are ordered major axis first, so each run of axis.size tensors differs in this axis alone.
        t = types.get(axis.name)
        if t is None or t.kind != "S":
            continue
        runs = [parts[i : i + axis.size] for i in range(0, len(parts), axis.size)]
        blocks = [[x.chunk(t.parts, t.dim) if t.parts > 1 else (x,) for x in run] for run in runs]
        parts = [torch.cat([x[b] for b in range(t.parts) for x in run], t.dim) for run in blocks]
    return parts[0]


def gather(local: Tensor, shape: tuple[int, ...], types: Types, mesh: Mesh, groups: Groups | None) -> Tensor:
    """A full tensor of our own on every rank.  Collective over each group that shards the tensor."""
    local = local.detach()
    key = sharding(types, mesh)
    if not key:
        return local.clone()
    assert groups is not None, "a sharded tensor has process groups"
    local = pad(local, shape, types, mesh).contiguous()
    flat = local.new_empty((mesh.size(key), *local.shape))
    all_gather_flat(flat.view(-1), local.view(-1), group=groups.group(key))
    ranks = mesh.group(dist.get_rank(), key)
    parts = [trim(x, shape, types, mesh, r) for x, r in zip(flat.unbind(0), ranks, strict=True)]
    return join(parts, types, mesh)


def placements(types: Types, mesh: Mesh) -> tuple[Placement, ...]:
    """One DTensor placement an axis, in mesh order."""
    merged: dict[int, int] = {}
    out: list[Placement] = []
    for axis in mesh.axes:
        t = types.get(axis.name)
        if t is None or t.kind != "S":
            out.append(Replicate())
            continue
        minor = mesh.names[mesh.names.index(axis.name) + 1 :]
        inner = mesh.size([a for a in minor if (u := types.get(a)) and u.kind == "S" and u.dim == t.dim and u != t])
        if t.parts == 1:
            out.append(Shard(t.dim))
        elif t.parts == inner:  # each shard of the inner axes is cut
            out.append(strided_shard(t.dim, inner))
        else:
            factor = merged.get(t.dim, t.parts)
            out.append(strided_shard(t.dim, factor))
            merged[t.dim] = factor * axis.size
    return tuple(out)


def distribute(local: Tensor, shape: tuple[int, ...], types: Types, mesh: Mesh, device_mesh: DeviceMesh) -> DTensor:
    """Call ``local`` this rank's part of a DTensor of the given shape, on the device mesh or some of its axes.  No
    communication; a gradient of the DTensor becomes one of ``local``."""
    stride = torch.empty(shape, device="meta").stride()
    known = device_mesh.mesh_dim_names or ()
    where = [p for axis, p in zip(mesh.names, placements(types, mesh), strict=True) if axis in known]
    return DTensor.from_local(local, device_mesh, where, run_check=False, shape=torch.Size(shape), stride=stride)


def packed(types: Types) -> bool:
    return any(t.kind == "S" and t.parts > 1 for t in types.values())


def checkpointable(x: DTensor, types: Types, mesh: Mesh) -> DTensor:
    """``x`` in a form that ``torch.distributed.checkpoint`` stores rightly (the same memory): packed dims as boxes."""
    if not packed(types):
        return x
    rank = dist.get_rank()
    spans = []  # per dim: (global offset, local offset, length) of each contiguous run
    for dim, size in enumerate(x.shape):
        of_dim = {a: replace(t, dim=0) for a, t in types.items() if t.kind == "S" and t.dim == dim}
        spans.append(_runs(cut(torch.arange(size), of_dim, mesh, rank).tolist()))
    chunks = [tuple(zip(*box, strict=True)) for box in product(*spans)]
    return PackedDTensor.wrap(x, [(c[0], c[1], c[2]) for c in chunks])


def _runs(places: list[int]) -> list[tuple[int, int, int]]:
    """(first place, its position, length) of each run of consecutive numbers."""
    starts = [i for i, p in enumerate(places) if not i or p != places[i - 1] + 1]
    return [(places[i], i, end - i) for i, end in zip(starts, [*starts[1:], len(places)], strict=True)]
