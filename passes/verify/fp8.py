"""Types of FP8's ops on one axis: operands as their carriers, scales as the tiles that they belong to.

A tile whose elements several ranks have (M: a pending maximum) needs the largest magnitude over all of them before
anything is quantised by it: ``moec::amax`` is M there, and ``moec::quantise`` takes only what has been reduced.

Histories (the recipe ``delayed``) are the same on all ranks.  What arrives as their gradient is a maximum over a rank's
part, pending on every axis: whoever runs the program takes it (``moec.delayed``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import fx

from moec.passes.shard.rule import Rule
from moec.passes.shard.solve import Operand, solve
from moec.passes.verify.dialect import OnAxis, meaning
from moec.placement import I, M, R, S, Type, Types, V
from moec.program import Program
from moec.runtime.body import Body
from moec.runtime.errors import MoecError
from moec.runtime.fp8 import Recipe

FP8 = {
    "moec.amax", "moec.quantise", "moec.dequantise", "moec.grad_amax", "moec.fp8_linear", "moec.fp8_grouped_mm",
    "moec.align_rows", "moec.unalign_rows", "moec.permute_quantised", "moec.fp8_grouped_act", "moec.past_amax",
    "moec.note_amax", "moec.fan_max", "moec.turn",
}  # fmt: skip


def derive_fp8(
    program: Program, node: fx.Node, types: Mapping[fx.Node, Types], dialect: Callable[[fx.Node, str], OnAxis]
) -> Types | list[Types]:
    """The types of ``node``'s results, of the ``types`` of its operands.  ``dialect``: the types of what is not FP8's
    alone."""
    results: list[Types] = []
    for axis in program.mesh.names:
        found = _OnAxis(node, axis, {n: t[axis] for n, t in types.items()}, dialect(node, axis)).derive()
        results = results or [{} for _ in found]
        for r, t in zip(results, found, strict=True):
            r[axis] = t
    return results if isinstance(node.meta["val"], (tuple, list)) else results[0]


def quantised_type(role: str, transposed: bool, ndim: int, t: Type) -> Type:
    """Of q, for an operand of type t."""
    if not t.sharded:
        return R
    if role in ("rows", "grad") and transposed:  # [N, C]
        return S(1, t.parts) if t.kind == "S" and t.dim == ndim - 1 else V
    return t


def scale_type(recipe: Recipe, role: str, transposed: bool, ndim: int, t: Type, reduced: Type = R) -> Type:
    """Of the scales of an operand of type t; ``reduced`` where one tile's elements are on several ranks."""
    if not t.sharded:
        return R
    if role in ("rows", "grad"):
        column = t.kind == "S" and t.dim == ndim - 1
        if recipe.tile(role, transposed)[column] == 0:
            return reduced
        return quantised_type(role, transposed, ndim, t)
    whole = t.dim >= ndim - 2 and recipe.tile(role, transposed)[t.dim - ndim + 2] == 0
    return reduced if whole else t


class _OnAxis:
    def __init__(self, node: fx.Node, axis: str, on: Mapping[fx.Node, Type], dialect: OnAxis) -> None:
        self.node, self.axis, self.on, self.dialect = node, axis, on.__getitem__, dialect

    def derive(self) -> list[Type]:
        match meaning(self.node).removeprefix("moec."):
            case "amax":
                x, counts, recipe, role, transposed = self.node.args
                self.counts(counts, self.value(x))
                return [scale_type(Recipe.parse(recipe), role, transposed, x.meta["val"].ndim, self.value(x), M)]
            case "quantise":
                x, amax, amax_T, counts, *how = self.node.args
                self.counts(counts, self.value(x))
                return self.quantised(self.on(x), x.meta["val"].ndim, amax, amax_T, *how)
            case "permute_quantised":
                x, ids, _, amax, amax_T, recipe, both = self.node.args
                self.value(x)
                rows, tokens = self.dialect.permute(self.on(x), self.on(ids))
                return [*self.quantised(rows, 2, amax, amax_T, recipe, "rows", both), rows, tokens]
            case "dequantise":
                return [self.on(self.node.args[0])]
            case "turn":
                q, role = self.node.args
                return [quantised_type(role, True, q.meta["val"].ndim, self.on(q))]
            case "grad_amax":
                return self.grad_amax(*self.node.args)
            case "fp8_linear":
                x, w, *rest = self.node.args
                lead = tuple(f"f{i}" for i in range(x.meta["val"].ndim - 1))
                rule = Rule(((*lead, "k"), ("m", "k")), ((*lead, "m"),), carries="multilinear")
                targets, (y,) = solve(rule, [Operand(self.on(n), not n.meta["grad"]) for n in (x, w)])
                for n, t in zip((x, w), targets, strict=True):
                    self.require(n, t)
                return self.results(x, w, y, rest, "weight")
            case "fp8_grouped_mm":
                x, w, counts, *rest = self.node.args
                self.counts(counts, self.on(x))
                return self.results(x, w, self.dialect.product(self.on(x), self.on(w)), rest, "stack")
            case "fp8_grouped_act":
                return self.act(*self.node.args)
            case "past_amax":
                history, _, x, recipe, role = self.node.args
                self.history(history)
                return [scale_type(Recipe.parse(recipe), role, False, x.meta["val"].ndim, self.value(x), R)]
            case "note_amax":
                self.history(self.node.args[0])
                return [R]  # of any part of its tensor an amax will do
            case "fan_max":
                self.history(self.node.args[0])
                return [self.on(self.node.args[0])] * self.node.args[1]
            case _:  # align_rows, unalign_rows
                x, counts, *_ = self.node.args
                self.counts(counts, self.on(x))
                return [self.on(x)]

    def require(self, operand: fx.Node, want: Type) -> None:
        have = self.on(operand)
        if have != want and not (not operand.meta["grad"] and have in (I, R) and want in (I, R)):
            raise MoecError(
                f"{self.node.format_node()} has an operand {operand.name} of type {have} on {self.axis}, not {want}",
                where=self.node.meta.get("where", ""),
            )

    def value(self, x: fx.Node) -> Type:
        """Of what is quantised: a sum must be taken first."""
        if self.on(x).kind in "PM":
            raise MoecError(
                f"{self.node.format_node()} quantises a value of type {self.on(x)} on {self.axis}",
                where=self.node.meta.get("where", ""),
            )
        return self.on(x)

    def history(self, x: fx.Node) -> None:
        """The same on all ranks; of evaluation, where nothing has a gradient, R says so too."""
        if self.on(x) != I and (x.meta["grad"] or self.on(x) != R):
            raise MoecError(
                f"{self.node.format_node()} reads a history of type {self.on(x)} on {self.axis}, not {I}",
                where=self.node.meta.get("where", ""),
            )

    def counts(self, counts: fx.Node | None, rows: Type) -> None:
        if counts is not None:
            self.require(counts, V if rows == V else R)

    def quantised(self, t: Type, ndim: int, amax, amax_T, recipe: str, role: str, both: bool) -> list[Type]:
        """Of the results of ``moec::quantise``, for a value of type t."""
        found, types = Recipe.parse(recipe), [t]
        for transposed, given in ((False, amax), (True, amax_T)):
            if transposed and not both:
                types += [R, R]
                continue
            scale = scale_type(found, role, transposed, ndim, t, M)
            if scale == M and given is None and found.name:
                raise MoecError(
                    f"{self.node.format_node()} makes scales of this rank's part alone, of {t} on {self.axis}",
                    where=self.node.meta.get("where", ""),
                )
            scale = R if scale == M else scale
            if given is not None:
                self.require(given, scale)
            types += [quantised_type(role, transposed, ndim, t), scale]
        return types

    def results(self, x: fx.Node, w: fx.Node, y: Type, rest: tuple, weight: str) -> list[Type]:
        *quantised, grad_amax, recipe, shared = rest
        found = Recipe.parse(recipe)
        self.operands(x, w, quantised, found, weight)
        if grad_amax is not None:
            self.require(grad_amax, R)
        self.no_sum(x, y)
        ndim = self.node.meta["val"][0].ndim
        return [y, *(self.tap(found, t, ndim, y, shared, I) for t in (False, True))]

    def act(self, x, w, b, counts, x_q, x_s, w_q, w_s, x_qT, x_sT, w_qT, w_sT, body, recipe, both) -> list[Type]:
        """Product, bias and body one after the other, then what is quantised."""
        self.counts(counts, self.on(x))
        found, h = Recipe.parse(recipe), []
        for i, of in enumerate(w):
            self.operands(x, of, (x_q, x_s, w_q[i], w_s[i], x_qT, x_sT, w_qT[i], w_sT[i]), found, "stack")
            y = self.dialect.product(self.on(x), self.on(of))
            self.no_sum(x, y)
            if both and M in (scale_type(found, "grad", t, 2, y, M) for t in (False, True)):
                raise MoecError(
                    f"{self.node.format_node()} makes scales of this rank's part of a gradient, of {y} on {self.axis}",
                    where=self.node.meta.get("where", ""),
                )
            h.append(self.dialect.bias(y, self.on(b[i])) if b else y)
        made = self.quantised(self.dialect.body(Body.parse(body), h), 2, None, None, recipe, "rows", both)
        return [*made, S(1, sum(t.parts for t in h)) if h[0].kind == "S" else h[0]]

    def operands(self, x: fx.Node, w: fx.Node, quantised, found: Recipe, weight: str) -> None:
        """Numbers and scales of both layouts lie where their carriers lie."""
        operands = ((x, "rows", quantised[0:2], False), (w, weight, quantised[2:4], False),
                    (x, "rows", quantised[4:6], True), (w, weight, quantised[6:8], True))  # fmt: skip
        for carrier, role, (q, scale), transposed in operands:
            if transposed and q.meta["val"].ndim == 1:  # nothing will be differentiated
                continue
            t, ndim = self.on(carrier), carrier.meta["val"].ndim
            self.require(q, quantised_type(role, transposed, ndim, t))
            self.require(scale, scale_type(found, role, transposed, ndim, t))

    def no_sum(self, x: fx.Node, y: Type) -> None:
        if y == R and x.meta["grad"]:
            raise MoecError(
                f"{self.node.format_node()} would quantise a gradient that is a pending sum on {self.axis}",
                where=self.node.meta.get("where", ""),
            )

    def tap(self, recipe: Recipe, transposed: bool, ndim: int, y: Type, shared: bool, reduced: Type) -> Type:
        """Its gradient is the largest magnitudes of y's, which ranks share, or have of their own."""
        if not shared or (transposed and recipe.shared != "vector") or not y.sharded:
            return I
        found = scale_type(recipe, "grad", transposed, ndim, y, reduced)
        return I if found == R else found

    def grad_amax(self, y, tap, tap_T, counts, recipe) -> list[Type]:
        self.counts(counts, self.on(y))
        for t, transposed in ((tap, False), (tap_T, True)):
            self.require(t, self.tap(Recipe.parse(recipe), transposed, y.meta["val"].ndim, self.on(y), True, M))
        return [self.on(y)]
