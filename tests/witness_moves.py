"""Typing rules in the vocabulary of ``spmd_types``: what changes a type on purpose, moec's conversions, its exchanges
and the packing of parameters that travel together; and what all rules share.  ``w`` is the walk of ``witness.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import spmd_types as spmd
import torch
import torch.nn.functional as F
from spmd_types import rules
from torch import Tensor, fx

from moec.program import op_name
from moec.runtime.collectives import LOW_GATHER, TABLE, Collective, collective, group_of

Axis = spmd.MeshAxis
OWNERS = ("owner_n", "owner")
"""Whose rows they are: of which node, and of which rank inside it (see ``witness.py``)."""
LOCAL = {"I": spmd.I, "R": spmd.R, "P": spmd.P, "S": spmd.V, "V": spmd.V, "M": spmd.V}


def spec_of(dims: list[list[Axis]]) -> spmd.PartitionSpec | None:
    return spmd.PartitionSpec(*(tuple(d) if len(d) > 1 else d[0] if d else None for d in dims)) if any(dims) else None


def derived(x: Tensor, axis: Axis) -> tuple[str, int]:
    kind = repr(spmd.get_axis_local_type(x, axis))
    if kind != "V":
        return kind, -1
    for dim, entry in enumerate(spmd.get_partition_spec(x) or ()):
        if axis == entry or (isinstance(entry, tuple) and axis in entry):
            return "S", dim
    return "V", -1


# -- conversions -----------------------------------------------------------------------------------------------------


def _convert(w, node: fx.Node, entry: Collective, x: Tensor, dim: int, *rest) -> Tensor:
    """One transition an axis: shards are added major to minor and removed minor to major."""
    if "M" in (entry.source, entry.dest):
        return _maximum(w, node, entry, x, dim, *rest)
    to_dim = rest[0] if entry.kind == "s_to_s" else dim
    size, names = rest[-2], group_of(node).split(",")
    with spmd.no_typecheck():
        y = MOVES[entry.primitive](x, dim, to_dim, size)
    dim, to_dim = dim % max(x.ndim, 1), to_dim % max(x.ndim, 1)
    src, dst = (spmd.S(d) if k == "S" else LOCAL[k] for k, d in ((entry.source, dim), (entry.dest, to_dim)))
    typed: Any = x
    if entry.kind == "s_to_s" and len(names) > 1:  # one by one they would end up in another order
        rules.output(y, _handed_over(w, x, dim, to_dim, names))
        return y
    for a in reversed(names) if entry.source == "S" else names:
        have = spmd.get_axis_local_type(typed, w.axes[a])
        # Without a gradient I and R are one type.
        neutral = not x.requires_grad and have in (spmd.I, spmd.R) and src in (spmd.I, spmd.R)
        typed = TRANSITIONS[entry.primitive](typed, w.axes[a], src=have if neutral else src, dst=dst)
    rules.output(y, typed)
    return y


def _maximum(w, node: fx.Node, entry: Collective, x: Tensor, dim: int, *rest) -> Tensor:
    """Magnitudes of each rank's part of a tile become those of all, or back: no values, and no sums."""
    local = dict(spmd.get_local_type(x))
    for a in (w.axes[name] for name in group_of(node).split(",")):
        if entry.source == "M" and derived(x, a) != ("V", -1):
            raise spmd.SpmdTypeError(f"{derived(x, a)} on {a} is no pending maximum")
        if entry.source == "I" and local[a] not in (spmd.I, spmd.R):
            raise spmd.SpmdTypeError(f"{derived(x, a)} on {a} is not the same everywhere")
        local[a] = spmd.V if entry.dest == "M" else spmd.I if x.requires_grad else spmd.R
    typed = rules.NdimWithSpmdType(x.ndim)
    rules.ignore(x)
    spmd.assert_type(typed, local, partition_spec=spec_of(w.dims(x)))
    with spmd.no_typecheck():
        y = x.clone()
    rules.output(y, typed)
    return y


def _handed_over(w, x: Tensor, dim: int, to_dim: int, names: list[str]) -> rules.NdimWithSpmdType:
    """The axes that cut a dim last, in their order, cut another one instead."""
    dims, axes = w.dims(x), [w.axes[a] for a in names]
    if dims[dim][-len(axes) :] != axes:
        raise spmd.SpmdTypeError(f"dim {dim} is cut by {dims[dim]}, not last by {names}")
    del dims[dim][-len(axes) :]
    dims[to_dim] += axes
    return w.made(w.einsum("...->...", x, linear_in=(0,)), dims)


TRANSITIONS = {
    "identity": rules.convert, "slice": rules.convert, "zero_pad": rules.convert, "all_reduce": rules.all_reduce,
    "all_reduce_max": _maximum, "all_gather": rules.all_gather, "reduce_scatter": rules.reduce_scatter,
    "all_to_all": rules.all_to_all,
}  # fmt: skip
MOVES: dict[str, Callable] = {
    "identity": lambda x, d, t, n: x.clone(),
    "all_reduce": lambda x, d, t, n: x.clone(),
    "slice": lambda x, d, t, n: x.chunk(n, d)[0].clone(),
    "reduce_scatter": lambda x, d, t, n: x.chunk(n, d)[0].clone(),
    "zero_pad": lambda x, d, t, n: torch.cat([x, *[torch.zeros_like(x)] * (n - 1)], d),
    "all_gather": lambda x, d, t, n: torch.cat([x] * n, d),
    "all_to_all": lambda x, d, t, n: torch.cat([x.chunk(n, t)[0]] * n, d),
}


def _counts(w, node: fx.Node, entry: Collective, counts_E: Tensor, size: int, group: str) -> Tensor:
    """Home counts are pending sums over the sources; the counts of the experts that live here, source by source."""
    with spmd.no_typecheck():
        y_RE = counts_E.chunk(size)[0].expand(size, -1).clone()
    typed: Any = counts_E
    for a in group.split(","):
        typed = rules.reduce_scatter(typed, w.axes[a], src=spmd.P, dst=spmd.S(0))
    for owner in reached(w, group):
        typed = rules.convert(typed, owner, src=spmd.get_axis_local_type(typed, owner), dst=spmd.S(0))
    rules.output(y_RE, w.shifted(typed))
    return y_RE


def _exchange(w, node: fx.Node, entry: Collective, x_NH, send_R, recv_R, size, group) -> Tensor:
    """Dispatch: home rows become rows of the experts that live here; combine: back."""
    for a in group.split(","):
        for what, t in (("sent", send_R), ("received", recv_R)):
            if spmd.get_axis_local_type(t, w.axes[a]) is not spmd.P:
                raise spmd.SpmdTypeError(f"rows {what} per rank are {spmd.get_local_type(t)}, no sums over {a}")
    typed = _moved_rows(w, x_NH, group)
    out = all(spmd.get_axis_local_type(x_NH, o) is not spmd.V for o in reached(w, group))
    for owner in reached(w, group):
        sent, received = (spmd.get_axis_local_type(t, owner) is spmd.P for t in (send_R, recv_R))
        if (sent, received) != (not out, out):
            raise spmd.SpmdTypeError(f"rows go {'out' if out else 'back'}, but {send_R} are sent and {recv_R} received")
    with spmd.no_typecheck():
        y = x_NH.new_zeros((int(recv_R.sum()), *x_NH.shape[1:])) + (0 * x_NH.sum()).to(x_NH.dtype)
    rules.output(y, typed)
    return y


def _equal(w, node: fx.Node, entry: Collective, x_NH, size, group) -> Tensor:
    """As many rows to every rank."""
    typed = _moved_rows(w, x_NH, group)
    with spmd.no_typecheck():
        y = x_NH.clone()
    rules.output(y, typed)
    return y


def _moved_rows(w, x_NH, group: str) -> Any:
    """Out where rows are at home, back where they are not."""
    for a in group.split(","):
        if derived(x_NH, w.axes[a]) != ("S", 0):
            raise spmd.SpmdTypeError(f"rows are {derived(x_NH, w.axes[a])} on {a}: all the same cannot be exchanged")
    typed: Any = x_NH
    here = [spmd.get_axis_local_type(x_NH, o) for o in reached(w, group)]
    if all(t in (spmd.I, spmd.R) for t in here):
        for owner, t in zip(reached(w, group), here, strict=True):
            typed = rules.convert(typed, owner, src=t, dst=spmd.S(0))
    elif all(t is spmd.V for t in here):
        for owner in reversed(reached(w, group)):
            typed = rules.all_gather(typed, owner, src=spmd.S(0), dst=spmd.I)
    else:
        raise spmd.SpmdTypeError(f"rows are {here} by owner: neither at home nor where their experts live")
    return typed


def reached(w, group: str) -> list[Axis]:
    """The owners that an exchange over ``group`` reaches: nodes over the major axes of ep, ranks in them over the
    minor ones."""
    ep, axes = w.mesh.role("ep"), group.split(",")
    return [w.axes[o] for o, a in zip(OWNERS, (ep[0], ep[-1]), strict=True) if a in axes]


def pack(w, node: fx.Node, xs: list[Tensor], size: int, dims: list[int]) -> rules.NdimWithSpmdType:
    """Shards as one vector, for the collective behind it: what every one of them is on its axes, the vector is; on the
    others they may differ, and the vector is nobody's tensor."""
    user = next(iter(node.users))
    if len(node.users) != 1 or (entry := collective(user.target)) is None or entry.primitive != "all_gather":
        raise spmd.SpmdTypeError("a vector of shards does not feed one gather")
    reached = [w.axes[a] for a in group_of(user).split(",")]
    for x, dim in zip(xs, dims, strict=True):
        if size != 1 or any(derived(x, a) != ("S", dim) for a in reached):
            raise spmd.SpmdTypeError(f"{spmd.get_local_type(x)} is not to be gathered on dim {dim}")
    typed, local = rules.NdimWithSpmdType(1), {}
    for a in w.axes.values():
        kinds = {spmd.get_axis_local_type(x, a) for x in xs}
        local[a] = kinds.pop() if len(kinds) == 1 else spmd.V
    order = list(w.axes.values())
    spmd.assert_type(typed, local, partition_spec=spec_of([sorted(reached, key=order.index)]))
    return typed


def pack_bytes(w, node: fx.Node, xs: list[Tensor], turned: list[bool]) -> rules.NdimWithSpmdType:
    """Along which dims they are to be gathered, the op behind the gather says."""
    apart = next(iter(next(iter(next(iter(node.users)).users)).users))
    rules.ignore(*xs)
    return pack(w, node, xs, 1, apart.args[2])


def unpack_bytes(w, node: fx.Node, flat: Tensor, size: int, dims: list[int], turned: list[bool], *_) -> list:
    if list(node.args[0].args[0].args[0].args[1]) != list(turned):
        raise spmd.SpmdTypeError("taken apart is what lay otherwise")
    return unpack(w, node, flat, size, dims, [])


def unpack(w, node: fx.Node, flat: Tensor, size: int, dims: list[int], shapes: list[int]) -> list:
    """Each part is what its shard becomes if it goes through the collective by itself."""
    started = node.args[0].args[0]
    entry, (source, master, *_) = collective(started.target), started.args
    packed = op_name(source) == "moec.pack" and list(source.args[2]) == list(dims)
    if entry is None or not (packed or op_name(source) == "moec.pack_bytes"):
        raise spmd.SpmdTypeError("taken apart is what was not packed so")
    if entry.kind == LOW_GATHER:
        if op_name(master) != "moec.pack_empty" or list(master.args[2]) != list(dims):
            raise spmd.SpmdTypeError("the masters are not packed so")
        source = master
    out = []
    for x, dim in zip((w.env[n] for n in source.args[0]), dims, strict=True):
        typed: Any = w.einsum("...->...", x, linear_in=(0,))
        for a in reversed(group_of(started).split(",")):
            typed = rules.all_gather(typed, w.axes[a], src=spmd.S(dim), dst=LOCAL[entry.dest])
        out.append(typed)
    return out


def gather_low(w, node: fx.Node, entry: Collective, x: Tensor, master: Tensor, *rest) -> Tensor:
    """The narrow copy travels, typed as its master, whose the gradient is (the copy gets none)."""
    for a in w.axes.values():
        (kind, dim), (same, at) = derived(x, a), derived(master, a)
        if dim != at or (kind != same and {kind, same} != {"I", "R"}):
            raise spmd.SpmdTypeError(f"{kind}({dim}) on {a} is no copy of {same}({at})")
    wide = CONVERSIONS[entry.primitive](w, node, entry, master, *rest)
    typed = w.einsum("...->...", wide, linear_in=(0,))
    with spmd.no_typecheck():
        y = wide.to(x.dtype)
    rules.output(y, typed)
    return y


def carry_parameters(w, node: fx.Node, entry: Collective, masters: list[Tensor], dims, dtype, size, group) -> list:
    """Carriers are typed as what they stand for: the masters, gathered."""
    out = []
    for x, dim in zip(masters, dims, strict=True):
        typed: Any = w.einsum("...->...", x, linear_in=(0,))
        for a in reversed(group_of(node).split(",")):
            typed = rules.all_gather(typed, w.axes[a], src=spmd.S(dim), dst=LOCAL[entry.dest])
        with spmd.no_typecheck():
            y = torch.cat([x] * size, dim).to(dtype)
        rules.output(y, typed)
        out.append(y)
    return out


def _carry(w, node: fx.Node, entry: Collective, carrier: Tensor, data: Tensor, *rest) -> Tensor:
    """What the collective that moved the bytes would make of rows like the carrier."""
    started = node.args[1].args[0]
    moved = collective(started.target)
    if moved is None:
        raise spmd.SpmdTypeError("a carrier goes along with what nobody moved")
    args = fx.node.map_arg(started.args[1:], w.env.__getitem__)
    y = CONVERSIONS[moved.primitive](w, started, moved, carrier, *args)
    belong(w, data, y)
    return y


def belong(w, data: Tensor, carrier: Any) -> None:
    """Raise where bytes and their carrier lie differently on the ranks."""
    if w.dims(data) != w.dims(carrier):
        raise spmd.SpmdTypeError(f"bytes are cut as {w.dims(data)}, their carrier as {w.dims(carrier)}")
    rules.ignore(data)


def _gather_products(w, node: fx.Node, entry: Collective, x: Tensor, ws: list[Tensor], *rest) -> list[Tensor]:
    """Each product is that of the gathered value."""
    whole = _convert(w, node, TABLE["s_to_r"], x, *rest)
    return [whole, *(_product(w, whole, weight) for weight in ws)]


def _products_scatter(w, node: fx.Node, entry: Collective, x: Tensor, weight: Tensor, *rest) -> Tensor:
    """The product is a pending sum, and scattered as one."""
    return _convert(w, node, TABLE["p_to_s"], _product(w, x, weight), *rest)


def _product(w, x: Tensor, weight: Tensor) -> Tensor:
    typed = w.einsum("...k,nk->...n", x, weight, linear_in=(0, 1))
    with spmd.no_typecheck():
        y = F.linear(x, weight)
    rules.output(y, typed)
    return y


CONVERSIONS: dict[str, Callable] = {
    **dict.fromkeys(TRANSITIONS, _convert), "counts": _counts, "exchange": _exchange, "equal": _equal, "carry": _carry,
    "gather_products": _gather_products, "products_scatter": _products_scatter,
}  # fmt: skip
