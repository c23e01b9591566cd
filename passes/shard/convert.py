"""Conversions between types, emitted as typed collectives of the runtime, each (value, types) made once.

One conversion a kind joins all axes that take the same step into one collective over the joined group.  Every kind
that communicates is a *start* followed by its own wait node.
"""

from __future__ import annotations

from torch import fx

from moec.placement import S, Type, Types
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
        if owned := [a for a in source if target[a].kind == "P" and source[a].kind in "IR"]:
            return self(self(node, {**source, **{a: self._last(node, owned) for a in owned}}), target)
        variants = self._variants.setdefault(node, [(source, node)])
        # Start from the variant that is furthest on the way, so that no step is done twice.
        usable = [(t, n) for t, n in variants if all(t[a] in (source[a], target[a]) for a in t)]
        types, value = max(usable, key=lambda v: sum(v[0][a] == target[a] for a in target))
        for step in _steps(types, target):
            axes = [a for a in self.mesh.names if (types[a], target[a]) == step and types[a] != target[a]]
            value = self._emit(value, step, axes)
            types = {a: target[a] if a in axes else t for a, t in types.items()}
            value.meta["types"] = types
            variants.append((types, value))
        return value

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


def _steps(types: Types, target: Types) -> list[tuple[Type, Type]]:
    """The distinct steps, gathers and reductions of inner axes first (a dim is gathered minor to major, sliced major
    to minor), so that a dim that several axes shard is always a contiguous block."""
    steps: list[tuple[Type, Type]] = []
    for a in reversed(types):
        if types[a] != target[a] and (types[a], target[a]) not in steps:
            steps.append((types[a], target[a]))
    return sorted(steps, key=lambda s: (s[1].kind == "S", s[0].kind == "P"))
