"""cast_fp8: linears and experts' products compute in FP8, by the recipe of ``Plan.precision``.

Contract
    requires   sharded
    provides   fp8
    preserves  nothing: operands are rounded to FP8.  Given equal operands, any number of ranks rounds them to the same
               numbers (but for tiles along tokens, whose tokens are those of a rank)
    never      touches routers, norms, embeddings, the head, softmax, combines, or what ``Precision.exclude`` names

Legend: K and M in and out features, E experts, N rows.

Algorithm
    1. What stays out: products without a parameter, routers, the head, excluded modules, products whose gradient would
       be a pending sum on an axis (quantised pending sums do not add up to a quantised sum): reasons in ``why_not``.  A
       feature dim that is cut inside of a tile is refused, and so are tokens in chunks where a tile holds all tokens:
       its scale would be known when the last chunk is, and nothing would be hidden.
    2. Operands are quantised once each, for all products that read them: ``moec::quantise``.  Where a tile's elements
       are on several ranks, ``moec::amax`` and a maximum over these ranks come before it, and for gradients, whose
       products are in the backward, ``moec::grad_amax`` behind the product, with taps that carry the maximum back to
       it.  The recipe ``delayed`` knows past steps' instead (``fp8_delayed.py``).
    3. ``aten::linear`` becomes ``moec::fp8_linear`` (a bias is added behind it), ``moec::grouped_mm``
       ``moec::fp8_grouped_mm``.
    4. Experts' rows are aligned (``fp8_rows.py``): every expert's begin at a multiple of what the recipe's kernels
       want.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from moec.passes.contract import Pass, PassContract
from moec.passes.fp8_delayed import Histories
from moec.passes.fp8_rows import align
from moec.passes.fp8_which import Which
from moec.passes.typed import result, sweep, typed
from moec.passes.verify.fp8 import scale_type
from moec.placement import M, Types
from moec.plan import Plan
from moec.precision import Precision
from moec.program import Program, op_name
from moec.runtime.collectives import TABLE
from moec.runtime.errors import MoecError
from moec.runtime.fp8 import Recipe
from moec.runtime.torch_compat import WAIT, hint

aten, moec_ops = torch.ops.aten, torch.ops.moec


def _run(program: Program, plan: Plan) -> Program:
    assert plan.precision is not None
    recipe = recipe_of(plan.precision)
    which = Which(program, plan.precision)
    histories = Histories(program, which, plan.precision.history, recipe) if recipe.name == "delayed" else None
    cast = Cast(program, recipe, histories)
    for node in which.linears:  # 1
        cast.check(node)
        cast.linear(node)
    for counts, products in which.experts.items():
        for node in products:
            cast.check(node)
        align(program, counts, products, recipe.alignment, cast.grouped)
    program.graph.lint()
    program.module.recompile()
    return program


def recipe_of(precision: Precision) -> Recipe:
    """The recipe that ``precision.fp8`` names, which is not None."""
    assert precision.fp8 is not None
    return replace(Recipe.parse(precision.fp8), margin=precision.margin)


class Cast:
    def __init__(self, program: Program, recipe: Recipe, histories: Histories | None = None) -> None:
        self.program, self.recipe, self.text, self.histories = program, recipe, recipe.text(), histories
        self.made: dict[tuple[fx.Node, str, fx.Node | None], list[fx.Node]] = {}

    # -- 1

    def check(self, node: fx.Node) -> None:
        """Raise MoecError where an axis cuts a feature dim inside of a tile, or chunks one that holds all tokens."""
        whole = self.recipe.shared == "tensor" or (self.recipe.shared == "vector" and self.program.training)
        if "chunk" in node.meta and whole and self.histories is None:
            tile = "all values" if self.recipe.shared == "tensor" else "a feature of all tokens (for weight gradients)"
            raise MoecError(
                f"{self.recipe.name} scales {tile} together, and Overlap(chunks=…) computes the tokens of "
                f"{op_name(node)} in parts",
                where=node.meta.get("where", ""),
                way_out="blockwise or mxfp8, Overlap(chunks=1), or the module in Precision.exclude",
            )
        for x in node.args[:2]:
            val, first = x.meta["val"], 0 if x is node.args[1] and op_name(node) == "aten.linear" else -1
            dims = range(val.ndim)[first:] if x is node.args[0] or first == 0 else (1, 2)
            for d in dims:
                self.check_size(val.shape[d], x.meta.get("types") or {}, d, x.name, node.meta.get("where", ""))

    def check_size(self, global_size: Any, types: Types, dim: int, name: str, where: str = "") -> None:
        """Raise MoecError if ``types`` cut dim ``dim`` of a weight or of rows inside of a tile."""
        size, block, mesh = hint(global_size), self.recipe.block, self.program.mesh
        cuts = {a: t for a, t in types.items() if t.kind == "S" and t.dim == dim}
        if not block or not cuts or size is None:
            return
        local = size // mesh.size(list(cuts))
        parts = max(int(t.parts) for t in cuts.values())
        if local % (block * parts):
            raise MoecError(
                f"{self.recipe.name} scales tiles of {block}, and {', '.join(cuts)} leaves each rank {local} of the "
                f"{size} features of {name}" + (f", in {parts} parts" if parts > 1 else ""),
                where=where,
                way_out="fewer ranks on these axes, a recipe without tiles (current, rowwise), or the module in "
                "Precision.exclude",
            )

    # -- 2

    def quantised(self, at: fx.Node, x: fx.Node, role: str, counts: fx.Node | None = None) -> list[fx.Node]:
        """``[carrier, q, scale, q_T, scale_T]`` of x, before ``at`` or wherever they were made first."""
        if (x, role, counts) not in self.made:
            both = self.program.training
            amax = self.histories and self.histories.past(at, x, role)
            amax = amax or self.amax(at, x, role, counts, False)
            amax_T = amax if self.recipe.shared == "tensor" or not both else self.amax(at, x, role, counts, True)
            args = (x, amax, amax_T if both else None, counts, self.text, role, both)
            node = typed(self.program, at, moec_ops.quantise.default, *args)
            found = [result(self.program, node, i) for i in range(5)]
            for n in found[1:]:
                n.meta["grad"] = False
            self.made[x, role, counts] = found
        return self.made[x, role, counts]

    def amax(self, at: fx.Node, x: fx.Node, role: str, counts: fx.Node | None, transposed: bool) -> fx.Node | None:
        """The largest magnitudes over all ranks, None where each rank has whole tiles."""
        if not self._shared(x, role, transposed):
            return None
        local = typed(self.program, at, moec_ops.amax.default, x, counts, self.text, role, transposed)
        local.meta["grad"] = False
        return self._convert(at, local, "m_to_i", self._shared(x, role, transposed))

    def _shared(self, x: fx.Node, role: str, transposed: bool) -> tuple[str, ...]:
        """Axes whose ranks have elements of the same tiles of x."""
        ndim, types = x.meta["val"].ndim, x.meta.get("types") or {}
        return tuple(a for a, t in types.items() if scale_type(self.recipe, role, transposed, ndim, t, M) == M)

    def _convert(self, at: fx.Node, x: fx.Node, kind: str, axes: tuple[str, ...]) -> fx.Node:
        mesh = self.program.mesh
        grad = x.meta["grad"]
        made = typed(self.program, at, TABLE[kind].op, x, 0, mesh.size(axes), mesh.key(axes))
        made.meta["grad"] = grad
        if TABLE[kind].needs_wait:
            made = typed(self.program, at, WAIT, made, val=made.meta["val"])
            made.meta["grad"] = grad
        return made

    # -- 3

    def linear(self, node: fx.Node) -> None:
        x, w, *bias = node.args
        past = self.histories and self.histories.note(node, x, w, "weight", None)
        y = self._product(node, moec_ops.fp8_linear.default, self.quantised(node, x, "rows"),
                          self.quantised(node, w, "weight"), None, past)  # fmt: skip
        if bias and bias[0] is not None:
            y = typed(self.program, node, aten.add.Tensor, y, bias[0])
        node.replace_all_uses_with(y)
        sweep(node)

    def grouped(self, node: fx.Node, x: fx.Node, counts: fx.Node) -> fx.Node:
        """The product, of aligned rows, that stands for ``node``; before it."""
        past = self.histories and self.histories.note(node, x, node.args[1], "stack", counts)
        return self._product(node, moec_ops.fp8_grouped_mm.default, self.quantised(node, x, "rows", counts),
                             self.quantised(node, node.args[1], "stack"), counts, past)  # fmt: skip

    def _product(
        self, at: fx.Node, op, x: list[fx.Node], w: list[fx.Node], counts: fx.Node | None, past: fx.Node | None
    ) -> fx.Node:
        each = (False, True) if self.recipe.shared == "vector" else (False,)
        axes = {t: self._shared(at, "grad", t) if self.program.training and t in each else () for t in (False, True)}
        shared = any(axes.values()) and self.histories is None
        given = [] if counts is None else [counts]
        args = (x[0], w[0], *given, *x[1:3], *w[1:3], *x[3:], *w[3:], past, self.text, shared)
        node = typed(self.program, at, op, *args)
        y, *taps = (result(self.program, node, i) for i in range(3))
        if not shared:
            for tap in taps:
                self.program.graph.erase_node(tap)
            return y
        taps = [
            self._convert(at, t, "i_to_m", over) if over else t for t, over in zip(taps, axes.values(), strict=True)
        ]
        return typed(self.program, at, moec_ops.grad_amax.default, y, *taps, counts, self.text)


CONTRACT = PassContract(
    name="cast_fp8",
    requires=frozenset({"sharded"}),
    provides=frozenset({"fp8"}),
    conflicts_with=frozenset({"fp8", "experts_fused", "lowered"}),
    preserves_values=False,
)
cast_fp8 = Pass(CONTRACT, _run, applies=lambda plan: plan.precision is not None and plan.precision.fp8 is not None)
