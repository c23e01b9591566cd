"""Shards of parameters: from a full tensor to one rank's part and back, and the same thing as DTensor placements.

A dim that several axes shard is cut major to minor in mesh order; with ``S(dim, parts=p)`` every one of the p equal
blocks is cut and a rank's slices lie side by side (see :mod:`moec.placement`).

As DTensor placements a packed dim is a strided shard.  Its split factor grows by the size of each further axis that
cuts the same dim: the inner axis sees the blocks that the outer axes have not merged yet.
"""

from __future__ import annotations

from itertools import product
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from moec.placement import Types, show
from moec.runtime.errors import MoecError
from moec.runtime.groups import Groups
from moec.runtime.mesh import Mesh
from moec.runtime.torch_compat import PackedDTensor, all_gather_flat, strided_shard


def check_types(name: str, shape: tuple[int, ...], types: Types, mesh: Mesh) -> None:
    """Raise MoecError unless a parameter of this shape can be laid out as ``types`` say."""
    parts: dict[int, int] = {}
    ways: dict[int, int] = {}
    for axis, t in types.items():
        if t.kind not in "IRS":
            raise MoecError(f"a parameter cannot be of type {t} (on axis {axis})", where=name)
        if t.kind != "S":
            continue
        if not 0 <= t.dim < len(shape):
            raise MoecError(f"type {t} on axis {axis} names no dim of shape {tuple(shape)}", where=name)
        if parts.setdefault(t.dim, t.parts) != t.parts:
            raise MoecError(f"dim {t.dim} is packed differently on different axes: {show(types)}", where=name)
        ways[t.dim] = ways.get(t.dim, t.parts) * mesh.axis(axis).size
    for dim, n in ways.items():
        if shape[dim] % n:
            blocks = f" in {parts[dim]} packed blocks" if parts[dim] > 1 else ""
            raise MoecError(
                f"dim {dim} of shape {tuple(shape)} cannot be cut into {n // parts[dim]} equal parts{blocks}",
                where=name,
                way_out="choose degrees that divide it",
            )


def cut(full: Tensor, types: Types, mesh: Mesh, rank: int) -> Tensor:
    """The part of ``full`` that ``rank`` holds: a view where possible."""
    at = mesh.coords(rank)
    for axis in mesh.axes:
        t = types.get(axis.name)
        if t is not None and t.kind == "S":
            blocks = full.chunk(t.parts, t.dim)
            mine = [b.chunk(axis.size, t.dim)[at[axis.name]] for b in blocks]
            full = mine[0] if len(mine) == 1 else torch.cat(mine, t.dim)
    return full


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
        blocks = [[x.chunk(t.parts, t.dim) for x in run] for run in runs]
        parts = [torch.cat([x[b] for b in range(t.parts) for x in run], t.dim) for run in blocks]
    return parts[0]


def gather(local: Tensor, types: Types, mesh: Mesh, groups: Groups | None) -> Tensor:
    """A full tensor of our own on every rank.  Collective over each group that shards the tensor."""
    local = local.detach()
    key = sharding(types, mesh)
    if not key:
        return local.clone()
    assert groups is not None, "a sharded tensor has process groups"
    flat = local.new_empty((mesh.size(key), *local.shape))
    all_gather_flat(flat.view(-1), local.contiguous().view(-1), group=groups.group(key))
    return join(list(flat.unbind(0)), types, mesh)


def placements(types: Types, mesh: Mesh) -> tuple[Placement, ...]:
    """One DTensor placement an axis, in mesh order."""
    merged: dict[int, int] = {}
    out: list[Placement] = []
    for axis in mesh.axes:
        t = types.get(axis.name)
        if t is None or t.kind != "S":
            out.append(Replicate())
            continue
        factor = merged.get(t.dim, t.parts)
        out.append(Shard(t.dim) if t.parts == 1 else strided_shard(t.dim, factor))
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
    at = mesh.coords(dist.get_rank())
    spans = []  # per dim: (global offset, local offset, length) of each contiguous run
    for dim, size in enumerate(x.shape):
        axes = [a for a in mesh.axes if a.name in types and types[a.name].kind == "S" and types[a.name].dim == dim]
        parts = types[axes[0].name].parts if axes else 1
        index = 0
        for axis in axes:
            index = index * axis.size + at[axis.name]
        length = size // (parts * prod(axis.size for axis in axes))
        spans.append([(b * (size // parts) + index * length, b * length, length) for b in range(parts)])
    chunks = [tuple(zip(*box, strict=True)) for box in product(*spans)]
    return PackedDTensor.wrap(x, [(c[0], c[1], c[2]) for c in chunks])
