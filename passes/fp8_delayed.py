"""Histories of magnitudes for the recipe ``delayed`` (part of ``cast_fp8``).

Every weight that products read in FP8 has a buffer ``<weight>_amax_history``, fp32 [3, 1 + H]: the largest magnitudes
of the products' activations, of the weight and of the products' gradients, in column 0 those of the step under way, in
the others those of the H steps before it (``moec.delayed`` keeps it).  It belongs to the weight, not to an operand, so
that names and contents are the same under every plan: what several products share is noted by each of them.

1. A placeholder for each such weight; where several products read it (chunks), a copy for each (``moec::fan_max``).
2. Scales of activations and weights come from ``moec::past_amax`` (``past``), those of gradients from
   ``moec::note_amax``, through which this step's magnitudes leave with the gradients (``note``).
"""

from __future__ import annotations

import torch
from torch import fx

from moec.passes.fp8_which import Which
from moec.passes.typed import result, typed
from moec.placement import I
from moec.program import HISTORY, ParamSpec, Program, placeholder_name
from moec.runtime.errors import MoecError
from moec.runtime.fp8 import Recipe
from moec.runtime.ops.past_amax import ROWS

moec_ops = torch.ops.moec


class Histories:
    """``length``: H."""

    def __init__(self, program: Program, which: Which, length: int, recipe: Recipe) -> None:
        self.program, self.length, self.text = program, length, recipe.text()
        self.of: dict[fx.Node, fx.Node] = {}
        """Product -> the history that it reads, and gives a gradient."""
        self.made: dict[tuple[fx.Node, str, fx.Node | None], fx.Node] = {}
        readers: dict[str, list[fx.Node]] = {}
        order = {n: i for i, n in enumerate(program.graph.nodes)}
        products = [*which.linears, *(n for found in which.experts.values() for n in found)]
        for product in sorted(products, key=order.__getitem__):
            name = which.parameter(product.args[1])
            assert name is not None, "only products by a parameter are cast"
            readers.setdefault(name, []).append(product)
        for name, found in readers.items():  # 1
            self._give(self._buffer(program.params[name], found[0]), found)

    def _give(self, history: fx.Node, products: list[fx.Node]) -> None:
        copies = [history]
        if len(products) > 1 and self.program.training:
            fan = typed(self.program, products[0], moec_ops.fan_max.default, history, len(products))
            copies = [result(self.program, fan, i) for i in range(len(products))]
        self.of |= {p: copies[i % len(copies)] for i, p in enumerate(products)}

    def _buffer(self, weight: ParamSpec, product: fx.Node) -> fx.Node:
        program, name = self.program, weight.name + HISTORY
        if any(name in (s.name, *s.aliases) for s in program.params.values()):
            raise MoecError("the model has a tensor of this name of its own", where=name, way_out="another name in it")
        shape = (len(ROWS), 1 + self.length)
        with program.graph.inserting_after(program.placeholders()[-1]):
            node = program.graph.placeholder(placeholder_name(name))
        like = product.args[1].meta["val"]
        with like.fake_mode:
            val = torch.empty(shape, dtype=torch.float32, device=like.device)
        types = dict.fromkeys(program.mesh.names, I)
        node.meta.update(val=val, where=product.meta.get("where", ""), types=types, grad=program.training)
        program.params[node.name] = ParamSpec(
            node.name, name, shape, torch.float32, False, buffer=True, types=dict(types), initial=0.0, history=True
        )
        program.layout_reasons[name] = "whole: every rank scales by the largest magnitudes of all"
        return node

    # -- 2

    def past(self, product: fx.Node, x: fx.Node, role: str) -> fx.Node:
        """What x's scales are made from, before ``product``."""
        row = ROWS.index("rows" if role == "rows" else "weight")
        args = (self.of[product], row, x, self.text, role)
        return self._without_gradient(typed(self.program, product, moec_ops.past_amax.default, *args))

    def note(self, product: fx.Node, x: fx.Node, w: fx.Node, role: str, counts: fx.Node | None) -> fx.Node | None:
        """What the scales of the product's gradient are made from, before ``product``; its magnitudes, and those of x
        and w (a ``role``), are learnt.  None where there is no backward."""
        if not self.program.training:
            return None
        found = [self._amax(product, x, "rows", counts), self._amax(product, w, role, None)]
        return typed(self.program, product, moec_ops.note_amax.default, self.of[product], *found)

    def _amax(self, at: fx.Node, x: fx.Node, role: str, counts: fx.Node | None) -> fx.Node:
        key = x, role, counts
        if key not in self.made:
            made = typed(self.program, at, moec_ops.amax.default, x, counts, self.text, role, False)
            self.made[key] = self._without_gradient(made)
        return self.made[key]

    @staticmethod
    def _without_gradient(node: fx.Node) -> fx.Node:
        node.meta["grad"] = False
        return node
