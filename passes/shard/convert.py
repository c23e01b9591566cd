"""Conversions between types, emitted as typed collectives of the runtime, each (value, types) made once.

One conversion a kind joins all axes that take the same step into one collective over the joined group.  Every kind
that communicates is a *start* followed by its own wait node.
"""

from __future__ import annotations

from torch import fx

from moec.placement import I, R, S, Type, Types, show
from moec.runtime.collectives import TABLE
from moec.runtime.errors import MoecError
from moec.runtime.mesh import Mesh
from moec.runtime.torch_compat import WAIT


class Converter:
    """Emits conversions into one graph.  ``types[node]`` are a value's types; conversions of it are cached."""

    def __init__(self, graph: fx.Graph, mesh: Mesh) -> None:
        self.graph = graph
        self.mesh = mesh
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
            types = {a: step[1] if a in axes else t for a, t in types.items()}
            value.meta["types"] = types
            variants.append((types, value))
        return value

    def _check_divides(self, node: fx.Node, target: Types) -> None:
        """Static sizes are checked here; sizes that are known only at run time, by the collective."""
        for dim, size in enumerate(node.meta["val"].shape):
            axes = [a for a, t in target.items() if t.kind == "S" and t.dim == dim]
            if not axes or not isinstance(size, int) or (dim == 0 and "padded" in node.meta):
                continue
            n = self.mesh.size(axes)
            if size % (n * target[axes[0]].parts):
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
        where = value.meta.get("where", "")
        if "V" in (src.kind, dst.kind) or max(src.parts, dst.parts) > 1 or kind not in TABLE:
            raise MoecError(
                f"{value.name} would have to go from {src} to {dst} over {axes}, which no collective does",
                where=where,
                way_out="choose another layout for the parameters of this module",
            )
        size = self.mesh.size(axes)
        dim = src.dim if src.kind == "S" else dst.dim if dst.kind == "S" else 0
        args = [value, dim, size, self.mesh.key(axes)]
        if kind == "s_to_s":
            args.insert(2, dst.dim)
        out = self.graph.call_function(TABLE[kind].op, tuple(args))
        out.meta.update({k: value.meta[k] for k in ("val", "where", "grad", "padded") if k in value.meta})
        if TABLE[kind].needs_wait:
            started, out = out, self.graph.call_function(WAIT, (out,))
            out.meta.update(started.meta)
            started.meta["types"] = {**value.meta["types"], **dict.fromkeys(axes, dst)}
        return out


def _settle(src: Type, dst: Type, node: fx.Node) -> Type:
    """A value without a gradient is the same as I and as R: no conversion between them."""
    if not node.meta["grad"] and src.kind in "IR" and dst.kind in "IR":
        return src
    return dst


Move = tuple[str, tuple[Type, Type]]
"""An axis, and the types that it goes from and to."""


def _steps(types: Types, target: Types, whole: Type) -> list[tuple[list[str], tuple[Type, Type]]]:
    """The steps from ``types`` to ``target``: axes that move together, and the move.

    Axes are in mesh order, and a dim that several of them shard is cut major to minor, so shards can be added and
    removed at the minor end only.

    1. An axis keeps its shard of a dim if no axis major to it changes on that dim; else it is undone, and redone last.
    2. A shard moves straight to another dim (all-to-all) if all others of both dims are major to it and stay.
    3. Undo minor to major, then reduce, then shard major to minor.  Neighbours with the same move go together.
    """
    order = list(types)
    src, dst = ({a: t.dim if t.kind == "S" else None for a, t in x.items()} for x in (types, target))
    changed = [a for a in order if types[a] != target[a]]

    def stays(a: str) -> bool:  # 1
        dim, majors = src[a], order[: order.index(a)]
        return types[a] == target[a] and not any(m in changed and dim in (src[m], dst[m]) for m in majors)

    def straight(a: str) -> bool:  # 2
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
        dims = {t.dim for t in move if t.kind == "S"}
        for axes, earlier in reversed(out):
            if earlier == move:
                axes.append(axis)
                break
            if dims & {t.dim for t in earlier if t.kind == "S"}:
                out.append(([axis], move))
                break
        else:
            out.append(([axis], move))
    return out
