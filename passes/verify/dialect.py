"""Types of the expert dialect, on each axis by its role: tokens S(0), packed or not, over ep and edp, R over etp;
rows V; weights S(0) over ep, R over edp.

A fused op is typed as what it fuses: permute, products, biases, body and unpermute in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import fx

from moec.passes.shard.rule import operands
from moec.placement import I, P, R, S, Type, Types, V
from moec.program import Program, op_name
from moec.runtime.body import FORMS, Body
from moec.runtime.errors import MoecError
from moec.runtime.mesh import Axis

TOKENS = {
    "moec.permute", "moec.permute_kept", "moec.permute_aligned", "moec.slots", "moec.unpermute", "moec.unpermute_add",
    "moec.place_rows", "moec.add_rows",
}  # fmt: skip
"""Between tokens and rows; the last operand has a line for each token."""


def meaning(node: fx.Node) -> str:
    """``op_name``, of Transformer Engine's ops that of the op of ours which each stands for."""
    return op_name(node).replace("moec_te.", "moec.")


def derive_dialect(program: Program, node: fx.Node, types: Mapping[fx.Node, Types]) -> Types | list[Types]:
    """The types of ``node``'s result or results, of the ``types`` of its operands."""
    name, ops = meaning(node), operands(node)
    results: list[Types] = []
    for axis in program.mesh.axes:
        on = OnAxis(node, axis)
        if name in ("moec.experts", "moec.experts_rows"):
            found = on.experts({n: types[n][axis.name] for n in ops})
        else:
            found = on.one(name, [types[n][axis.name] for n in ops])
        results = results or [{} for _ in found]
        for r, t in zip(results, found, strict=True):
            r[axis.name] = t
    return results if isinstance(node.meta["val"], (tuple, list)) else results[0]


def on_axes(program: Program) -> Callable[[fx.Node, str], OnAxis]:
    """``(node, the name of an axis) -> OnAxis``, for ops that are partly of this dialect."""
    axes = {axis.name: axis for axis in program.mesh.axes}
    return lambda node, axis: OnAxis(node, axes[axis])


class OnAxis:
    """What ops make of the types that their operands have on one axis."""

    def __init__(self, node: fx.Node, axis: Axis) -> None:
        self.node, self.axis, self.etp = node, axis.name, axis.expert == "etp"
        self.ep = axis.expert == "ep"

    def require(self, have: Type, *want: Type) -> None:
        if have not in want:
            raise MoecError(
                f"{self.node.format_node()} has an operand of type {have} on {self.axis}, not "
                f"{' or '.join(map(str, want))}",
                where=self.node.meta.get("where", ""),
            )

    def one(self, name: str, on: list[Type]) -> list[Type]:
        """Of an op by itself: the type of each result."""
        if name in ("moec.permute", "moec.permute_kept", "moec.permute_aligned", "moec.slots"):
            rows, tokens = self.permute(on[0], on[-1])
            results = {"moec.slots": 1, "moec.permute_aligned": 3}.get(name, 2)  # rows, and what is counted of them
            return [rows] * results + [tokens]
        if name in ("moec.unpermute", "moec.unpermute_add"):
            y = self.unpermute(on[-3], on[-2], on[-1], self.node.args[-2].meta["grad"])
            for x, t in zip(self.node.args[0] if name == "moec.unpermute_add" else [], on, strict=False):
                self.require(t, *((y,) if x.meta["grad"] or y != I else (y, R)))
            return [y]
        if name in TOKENS:
            tokens = self.tokens(on[-1])
            self.require(on[0], *((R, I) if self.etp else (tokens,)) if name == "moec.place_rows" else self.rows())
            return [on[0] if self.etp else V if name == "moec.place_rows" else tokens]
        if name == "moec.destinations":
            self.require(on[0], *((R,) if self.etp else (S(0, on[0].parts), V)))
            return [on[0]]
        if name == "moec.own_ids":
            ids, numbers = on
            self.require(numbers, *((S(0), R) if self.ep else (R,)))
            # Only of ids that all ranks have, or that were sent to them, can each rank keep its own.
            self.require(ids, *((R,) if self.etp else (R, V) if numbers == S(0) else (S(0, ids.parts), V)))
            return [V if numbers == S(0) else ids]
        if name == "moec.grouped_mm":
            return [self.product(*on[:2])]
        if name == "moec.grouped_add":
            return [self.bias(*on[:2])]
        if name not in ("moec.pad_rows", "moec.take_rows"):  # these are each rank's own, whatever shard they are
            self.require(on[0], *self.rows())  # exchanges and re-sorting move whole rows
        return [on[0]]

    def rows(self) -> tuple[Type, ...]:
        return (R, P, I) if self.etp else (V,)

    def tokens(self, ids: Type) -> Type:
        """Tokens are distinct over ep and edp, in whatever order the rows lie: the same order for all operands.  Those
        that came from other ranks are ragged.  (Of ids, or of the number of each pair's row.)"""
        self.require(ids, *((R,) if self.etp else (S(0, ids.parts), V)))
        return ids

    def alike(self, tokens: Type) -> tuple[Type, ...]:
        """All ranks of ep may have the same tokens, and each the ids of its own experts."""
        return (tokens, R) if tokens == V and self.ep else (tokens,)

    def permute(self, x: Type, ids: Type) -> tuple[Type, Type]:
        """``(rows and counts, the number of each pair's row)``"""
        tokens = self.tokens(ids)
        self.require(x, *self.alike(tokens))
        return R if self.etp else V, tokens

    def unpermute(self, rows: Type, weights: Type, row_of: Type, weights_need_grad: bool) -> Type:
        tokens = self.tokens(row_of)
        self.require(rows, *self.rows())
        # Rows that a body has summed over etp already are weighted by what is invariant too.
        self.require(weights, *((I,) if rows == I and weights_need_grad else self.alike(tokens)))
        if tokens == V and weights == R:  # each rank adds the pairs of its own experts
            return P
        return rows if self.etp else tokens

    def product(self, x: Type, w: Type) -> Type:
        if not self.etp:
            self.require(x, V)
            self.require(w, S(0) if self.ep else R)
            return V
        if w.kind == "S" and w.dim == 2:
            self.require(x, R)
            return S(1, w.parts)
        if w.kind == "S":
            self.require(w, S(1, w.parts))
            self.require(x, S(1, w.parts))
            return P
        self.require(w, R)
        self.require(x, R)
        return R

    def bias(self, x: Type, b: Type) -> Type:
        if not self.etp:
            self.require(x, V)
            self.require(b, S(0) if self.ep else R)
            return V
        self.require(b, P if x == P else R if x == R else S(1, x.parts))
        return x

    def experts(self, on: Mapping[fx.Node, Type]) -> list[Type]:
        """``experts`` and ``experts_rows``, op by op as in the graph that they replace."""
        *ends, w_in, b_in, w_out, b_out, body = self.node.args[: 8 if op_name(self.node) == "moec.experts" else 7]
        whole = len(ends) == 3
        x, counts_or_tokens = on[ends[0]], on[ends[1]]
        rows, tokens = self.permute(x, counts_or_tokens) if whole else (x, R)
        counts = rows if whole else counts_or_tokens
        h = [self.product(rows, on[w]) for w in w_in]
        if b_in:
            h = [self.bias(t, on[b]) for t, b in zip(h, b_in, strict=True)]
        y = self.product(self.body(Body.parse(body), h), on[w_out])
        if b_out is not None:
            y = self.bias(y, on[b_out])
        beside = S(1, sum(t.parts for t in h)) if h[0].kind == "S" else h[0]
        if not whole:
            return [y, beside]
        y = self.unpermute(y, on[ends[2]], tokens, ends[2].meta["grad"])
        return [y, beside, tokens, counts]

    def body(self, body: Body, h: list[Type]) -> Type:
        """Every part of the columns of a product is cut like every other: a block of a packed dim in its own shards, an
        unpacked dim as a whole."""
        for i in body.inputs:
            t = h[i.source]
            if FORMS[i.form] == "h" and t.kind == "S":
                self.require(t, S(1, i.parts if i.form == "chunk" else 1))
            self.require(t, S(1, t.parts) if h[0].kind == "S" else h[0])
            if t == P:
                raise MoecError(
                    f"{self.node.format_node()} computes with a pending sum over {self.axis}",
                    where=self.node.meta.get("where", ""),
                )
        return S(1) if h[0].kind == "S" else h[0]
