"""Conversions between types, emitted as typed collectives of the runtime, each (value, types) made once.

One conversion a kind joins all axes that take the same step into one collective over the joined group.  Every kind
that communicates is a *start* followed by its own wait node.

A packed dim (``S(d, parts)``) is converted as what it is: reshaped into its blocks and what each holds, converted on
the second of these dims, and reshaped back.  Blocks that are a minor axis's shards (``parts`` is that axis's size) are
dealt out already, and need no reshape.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
from torch import fx

from moec.passes.shard.views import moved
from moec.placement import I, R, S, Type, Types, show
from moec.runtime.collectives import TABLE
from moec.runtime.errors import MoecError
from moec.runtime.mesh import Mesh
from moec.runtime.torch_compat import WAIT, expr, resized

if TYPE_CHECKING:
    from moec.passes.shard.sizes import Sizes


class Converter:
    """Emits conversions into one graph.  ``types[node]`` are a value's types; conversions of it are cached."""

    def __init__(self, graph: fx.Graph, mesh: Mesh, sizes: Sizes | None = None) -> None:
        """``sizes`` says how many blocks of a packed dim one rank has, where that is no number."""
        self.graph = graph
        self.mesh = mesh
        self.sizes = sizes
        self._variants: dict[fx.Node, list[tuple[Types, fx.Node]]] = {}

    def __call__(self, node: fx.Node, target: Types) -> fx.Node:
        """``node`` with the types ``target``; inserts at the graph's current insertion point."""
        source: Types = node.meta["types"]
        target = {a: _settle(source[a], target[a], node) for a in source}
        if target == source:
            return node
        self._check_divides(node, target)
        if owned := [a for a in source if target[a].kind == "P" and source[a].kind in "IR"]:
            return self(self(node, {**source, **{a: self._last(node, owned) for a in owned}}), target)
        variants = self._variants.setdefault(node, [(source, node)])
        # Start from the variant that is furthest on the way, so that no step is done twice.
        usable = [(t, n) for t, n in variants if all(t[a] in (source[a], target[a]) for a in t)]
        types, value = max(usable, key=lambda v: sum(v[0][a] == target[a] for a in target))
        for axes, step in _steps(types, target, I if node.meta["grad"] else R):
            value = self._emit(value, step, axes)
            types = value.meta["types"]
            variants.append((types, value))
        return value

    def _check_divides(self, node: fx.Node, target: Types) -> None:
        """Static sizes are checked here; sizes that are known only at run time, by the collective."""
        for dim, size in enumerate(node.meta["val"].shape):
            axes = [a for a, t in target.items() if t.kind == "S" and t.dim == dim]
            if not axes or not isinstance(size, int) or (dim == 0 and "padded" in node.meta):
                continue
            n = self.mesh.size(axes)
            if not divides(self.mesh, target, dim, size):
                raise MoecError(
                    f"dim {dim} of {node.name} has size {size}, which {n} ranks do not divide ({show(target)})",
                    where=node.meta.get("where", ""),
                    way_out=f"degrees that divide {size}",
                )

    def _last(self, node: fx.Node, axes: list[str]) -> Type:
        """To make a pending sum of a whole value, each rank owns a slice of its last dim and has zeros elsewhere."""
        dim, size = node.meta["val"].ndim - 1, self.mesh.size(axes)
        if node.meta["val"].shape[dim] % size:
            raise MoecError(
                f"{node.name} of shape {tuple(node.meta['val'].shape)} cannot be dealt over {size} ranks",
                where=node.meta.get("where", ""),
                way_out=f"etp that divides {node.meta['val'].shape[dim]}",
            )
        return S(dim)

    def _emit(self, value: fx.Node, step: tuple[Type, Type], axes: list[str]) -> fx.Node:
        src, dst = step
        kind = f"{src.kind}_to_{dst.kind}".lower()
        if "V" in (src.kind, dst.kind) or kind not in TABLE:
            raise MoecError(
                f"{value.name} would have to go from {src} to {dst} over {axes}, which no collective does",
                where=value.meta.get("where", ""),
                way_out="choose another layout for the parameters of this module",
            )
        types = {**value.meta["types"], **dict.fromkeys(axes, dst)}
        for t in step:  # a packed dim becomes two, the blocks and what each of them holds
            if t.kind == "S" and t.parts != dealt_blocks(self.mesh, value.meta["types"], axes, t.dim):
                return self._in_blocks(value, step, axes, t)
        size = self.mesh.size(axes)
        dim = src.dim if src.kind == "S" else dst.dim if dst.kind == "S" else 0
        args = [value, dim, size, self.mesh.key(axes)]
        if kind == "s_to_s":
            args.insert(2, dst.dim)
        out = self.graph.call_function(TABLE[kind].op, tuple(args))
        out.meta.update({k: value.meta[k] for k in ("val", "where", "grad", "padded") if k in value.meta})
        out.meta["types"] = types
        if TABLE[kind].needs_wait:
            started, out = out, self.graph.call_function(WAIT, (out,))
            out.meta.update(started.meta)
        return out

    def _in_blocks(self, value: fx.Node, step: tuple[Type, Type], axes: list[str], packed: Type) -> fx.Node:
        """The step with the dim of ``packed`` taken apart into ``packed.parts`` blocks."""
        shape, types, d = value.meta["val"].shape, value.meta["types"], packed.dim
        blocks = [*shape[:d], packed.parts, expr(shape[d]) / packed.parts, *shape[d + 1 :]]
        apart = self._reshape(value, blocks, d, d + 1)

        def later(t: Type) -> Type:
            if t.kind != "S" or t.dim < d:
                return t
            if t.dim > d:
                return S(t.dim + 1, t.parts)
            assert t.parts == packed.parts != 1
            return S(d + 1)

        done = self._emit(apart, (later(step[0]), later(step[1])), axes)
        out = self._reshape(done, list(shape), d, d)
        expected = {**types, **dict.fromkeys(axes, step[1])}
        assert out.meta["types"] == expected, (show(out.meta["types"]), show(expected))
        return out

    def _reshape(self, value: fx.Node, shape: list, first: int, last: int) -> fx.Node:
        """``value`` as ``shape``, whose dims first … last are new: their local sizes are computed, others stay."""
        source = value.meta["val"]
        val = resized(source, shape)
        types: Types = {}
        for a, t in value.meta["types"].items():
            into = moved(tuple(source.shape), tuple(val.shape), t) if t.kind == "S" else t
            if into is None:
                raise MoecError(
                    f"{value.name} is {t} on {a}, which {tuple(val.shape)} cannot be",
                    where=value.meta.get("where", ""),
                    way_out="choose another layout for the parameters of this module",
                )
            types[a] = into
        local = [self._local(s, types, d) for d, s in enumerate(val.shape)]
        out = self.graph.call_function(torch.ops.aten.reshape.default, (value, local))
        out.meta.update(val=val, types=types, **{k: value.meta[k] for k in ("where", "grad") if k in value.meta})
        return out

    def _local(self, size, types: Types, dim: int):
        n = self.mesh.size([a for a, t in types.items() if t.kind == "S" and t.dim == dim])
        return self.sizes.local(size, n) if self.sizes else size // n


def divides(mesh: Mesh, types: Types, dim: int, size: int) -> bool:
    """Can a dim of ``size`` be cut as ``types`` say?  Expressions of parts are taken to fit."""
    known = [t.parts for t in types.values() if t.kind == "S" and t.dim == dim and isinstance(t.parts, int)]
    ways = 1
    for parts in sorted(set(known)):  # the finest blocks hold what coarser axes leave
        if parts % ways and ways % parts:
            return False
        cut = mesh.size([a for a, t in types.items() if t == S(dim, parts)])
        ways = max(ways, parts) * cut
    return size % ways == 0


def dealt_blocks(mesh: Mesh, types: Types, axes: list[str], dim: int) -> int:
    """The parts of a shard that ``axes`` cut from (or add to) a local dim as it is: one, or the blocks that axes minor
    to them have dealt out."""
    last = max(mesh.names.index(a) for a in axes)
    minor = [a for a in mesh.names[last + 1 :] if types[a] == S(dim)]
    return prod(mesh.axis(a).size for a in minor)


def _settle(src: Type, dst: Type, node: fx.Node) -> Type:
    """A value without a gradient is the same as I and as R: no conversion between them."""
    if not node.meta["grad"] and src.kind in "IR" and dst.kind in "IR":
        return src
    return dst


Move = tuple[str, tuple[Type, Type]]
"""An axis, and the types that it goes from and to."""


def _steps(types: Types, target: Types, whole: Type) -> list[tuple[list[str], tuple[Type, Type]]]:
    """The steps from ``types`` to ``target``: axes that move together, and the move.

    Axes are in mesh order, and a dim that several of them shard in the same parts is cut major to minor, so shards can
    be added and removed at the minor end only.  Shards of a dim in different parts do not meet: "dim" below is a dim
    and its parts.

    1. An axis keeps its shard of a dim if no axis major to it changes on that dim; else it is undone, and redone last.
    2. A shard moves straight to another dim (all-to-all) if all others of both are major to it and stay.
    3. Undo minor to major, then reduce, then shard major to minor.  Neighbours with the same move go together.
    """
    order = list(types)
    src, dst = ({a: t if t.kind == "S" else None for a, t in x.items()} for x in (types, target))
    changed = [a for a in order if types[a] != target[a]]

    def stays(a: str) -> bool:  # 1
        dim, majors = src[a], order[: order.index(a)]
        return types[a] == target[a] and not any(m in changed and dim in (src[m], dst[m]) for m in majors)

    def straight(a: str) -> bool:  # 2
        if types[a].dim == target[a].dim:
            return False
        same = [b for b in changed if (types[b], target[b]) == (types[a], target[a])]
        others = [b for b in order if b not in same and {src[b], dst[b]} & {src[a], dst[a]} - {None}]
        return all(stays(b) and order.index(b) < order.index(same[0]) for b in others)

    undo: list[Move] = []  # 3
    reduce: list[Move] = []
    redo: list[Move] = []
    for a in order:
        t, goal = types[a], target[a]
        if t.kind != "S":
            if t != goal:
                (redo if goal.kind == "S" else reduce).append((a, (t, goal)))
        elif goal.kind != "S":
            undo.append((a, (t, goal)))
        elif not stays(a):
            if t != goal and straight(a):
                redo.append((a, (t, goal)))
            else:
                undo.append((a, (t, whole)))
                redo.append((a, (whole, goal)))
    return _joined(undo[::-1]) + _joined(sorted(reduce, key=lambda m: m[1][0].kind == "P")) + _joined(redo)


def _joined(moves: list[Move]) -> list[tuple[list[str], tuple[Type, Type]]]:
    """Equal moves go together unless another move of the same dim lies between them."""
    out: list[tuple[list[str], tuple[Type, Type]]] = []
    for axis, move in moves:
        dims = {t for t in move if t.kind == "S"}
        for axes, earlier in reversed(out):
            if earlier == move:
                axes.append(axis)
                break
            if dims & {t for t in earlier if t.kind == "S"}:
                out.append(([axis], move))
                break
        else:
            out.append(([axis], move))
    return out
