"""Which tokens a router's rows are: the input that they come from, and which of them are padding.

Legend: B batch, S sequence, T = B*S tokens, in this order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from moec.passes.losses import agree
from moec.passes.rewrite import apply, new
from moec.program import Program
from moec.runtime.errors import MoecError
from moec.runtime.torch_compat import expr

aten = torch.ops.aten
PADDING = "attention_mask"


class Tokens:
    """Writes the mask into ``program`` once, before everything else."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.start = next(n for n in program.graph.nodes if n.op != "placeholder")
        self.made: dict[str | None, fx.Node] = {}

    def valid(self, rows: fx.Node, wanted: str | None) -> fx.Node | None:
        """bool [T]: False at padding.  ``wanted`` is the path of the mask; None: ``attention_mask``, if there is such
        an input with one entry a token, else no token is padding (None)."""
        spec = next((s for s in self.program.inputs.values() if s.path == (wanted or PADDING)), None)
        if spec is None or (spec.ndim != 2 and wanted is None):
            if wanted is None:
                return None
            raise MoecError(
                f"padding={wanted!r} is not an input; inputs are {[s.path for s in self.program.inputs.values()]}"
            )
        mask = next(n for n in self.program.placeholders() if n.name == spec.placeholder)
        tokens = self.input_of(rows)
        if spec.ndim != 2 or tokens is None or not agree(self.program, _pairs(mask, tokens)):
            if wanted is None:
                return None
            raise MoecError(f"padding={wanted!r} has shape {tuple(mask.meta['val'].shape)}, not one entry a token")
        if wanted not in self.made:
            with self.program.graph.inserting_before(self.start):
                valid_BS = mask
                if mask.meta["val"].dtype != torch.bool:
                    valid_BS = apply(mask, aten.ne.Scalar, mask, 0)
                if any(expr(a) != expr(b) for a, b in _pairs(mask, tokens)):  # the same sizes, under the tokens' names
                    valid_BS = apply(mask, aten.expand.default, valid_BS, [size_of(tokens, d) for d in range(2)])
                self.made[wanted] = apply(mask, aten.reshape.default, valid_BS, [-1])
        return self.made[wanted]

    def input_of(self, rows: fx.Node) -> fx.Node | None:
        """An input whose first two dims are the tokens [B, S] of ``rows`` [T, …].  Where only the examples say so, it
        becomes a guard of the program."""
        inputs = self.program.inputs
        found = [n for n in self.program.placeholders() if n.name in inputs and inputs[n.name].batch_dim == 0]
        sizes = {n: n.meta["val"].shape[0] * n.meta["val"].shape[1] for n in found if n.meta["val"].ndim >= 2}
        T = rows.meta["val"].shape[0]
        exact = next((n for n, size in sizes.items() if expr(size) == expr(T)), None)
        return exact or next((n for n, size in sizes.items() if agree(self.program, [(size, T)])), None)


def _pairs(a: fx.Node, b: fx.Node) -> list[tuple[Any, Any]]:
    """Sizes of the first two dims."""
    return list(zip(a.meta["val"].shape[:2], b.meta["val"].shape[:2], strict=True))


def size_of(node: fx.Node, dim: int) -> Any:
    """The size of a dim, as a number or a node."""
    size = node.meta["val"].shape[dim]
    return size if isinstance(size, int) else new(node, aten.sym_size.int, (node, dim), size)
