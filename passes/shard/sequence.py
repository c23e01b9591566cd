"""The residual stream, sharded on the sequence: where it begins, and what its length is.

With context parallelism (cp) activations are sharded on the sequence from the first one on, with sequence parallelism
over tp as well.  Only the beginning is decided here: how far the stream reaches and where it is gathered, scattered or
exchanged follows from the factor rules (a column weight gathers it, the pending sum of a row weight is reduced and
scattered when it meets the stream).

Contract
    requires   inputs of a sequence: a dynamic dim beside the batch dim
    provides   recorded sizes in which the sequence length is ``n * t``, n the ranks that share it: it divides, and
               ``Program.size_problems`` holds every call against that
    never      names a module

Algorithm
    1. Lengths: inputs whose batch and sequence are as long as the first one's get its symbols (capture gives each input
       its own); the sequence is written n * t in all recorded sizes.
    2. The stream begins at activations that are computed from parameters and inputs alone (an embedding, a projection
       of features).  Over cp their inputs are sliced before; over tp they themselves are (or their pending sum is
       reduced and scattered): a slice of an embedding's output costs nothing, reducing the table's gradient would.
"""

from __future__ import annotations

import sympy
import torch
from torch import fx

from moec.passes.shard.rule import differentiable, operands
from moec.placement import S, Type, Types
from moec.plan import Plan
from moec.program import Program, op_name
from moec.runtime.errors import MoecError
from moec.runtime.torch_compat import expr, fresh_size, hint, resized, size_of


class Sequence:
    """``axes``: those that the stream is sharded over (maybe none), ``cp`` among them; ``length``: as recorded."""

    def __init__(self, program: Program, plan: Plan) -> None:
        mesh = program.mesh
        self.program = program
        self.cp = mesh.role("cp")
        shared = self.cp + (mesh.role("tp") if plan.sequence_parallel else ())
        self.axes = tuple(a for a in mesh.names if a in shared)
        self.length: sympy.Expr | None = None
        if self.axes:
            self.length = _write_lengths(program, mesh.size(self.axes))

    def place(self, value) -> Type | None:
        """S of the stream's dim of a tensor that carries batch and sequence, None for any other."""
        if self.length is None or not isinstance(value, torch.Tensor):
            return None
        batch = {str(s) for d in value.shape for s in expr(d).free_symbols} & self.program.batch_symbols
        for dim, size in enumerate(value.shape):
            parts = sympy.cancel(expr(size) / self.length)
            if batch and not parts.free_symbols & self.length.free_symbols and sympy.fraction(parts)[1] == 1:
                return S(dim, parts)
        return None

    def types(self, node: fx.Node) -> Types:
        """Of an activation that the stream begins at, the types that it goes on with."""
        t = self.place(node.meta["val"])
        types: Types = node.meta["types"]
        return {a: t if t is not None and a in self.axes and not old.sharded else old for a, old in types.items()}

    def begins(self, node: fx.Node) -> bool:
        """Is ``node`` (not typed yet, its operands are) the first activation of the stream?"""
        if self.place(node.meta.get("val")) is None or not differentiable(node.meta["val"]):
            return False
        if op_name(node).startswith("moec."):  # written by this pass, in place of an op that begins the stream
            return False
        grads = [o for o in operands(node) if o.meta["grad"]]
        return bool(grads) and all(o.op == "placeholder" or self.place(o.meta["val"]) is None for o in grads)

    def sliced(self, node: fx.Node) -> tuple[fx.Node, Type] | None:
        """The input of a first activation that carries the sequence, and the type that it is to have over cp."""
        for o in operands(node):
            if o.name not in self.program.params and (t := self.place(o.meta["val"])) is not None:
                return o, t
        return None


# -- step 1


def _write_lengths(program: Program, n: int) -> sympy.Expr:
    """Rewrite all recorded sizes; returns the expression of the sequence length."""
    found = list(_beside_batch(program))
    if not found:
        raise MoecError(
            "no input of this model has a sequence: a dynamic dim beside its batch dim",
            where="plan",
            way_out="a plan with cp=1 and sequence_parallel=False",
        )
    (batch, sequence), like = found[0][:2], found[0][2]
    t = fresh_size(like, "sequence", max(2, (hint(sequence) or 0) // n))
    length = n * expr(t)
    swap: dict[sympy.Basic, sympy.Basic] = {}
    for b, s, _ in found:
        if hint(b) == hint(batch):
            swap[expr(b)] = expr(batch)
        if hint(s) == hint(sequence):
            swap[expr(s)] = length
    for node in program.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = _rewritten(node.meta["val"], swap, like)
    program.batch_symbols = frozenset(str(swap.get(s, s)) for s in map(sympy.Symbol, program.batch_symbols)) & {
        str(s) for node in program.placeholders() for d in node.meta["val"].shape for s in expr(d).free_symbols
    }
    guards = (g.xreplace(swap) for g in program.size_guards)
    program.size_guards = tuple(dict.fromkeys(g for g in guards if g != sympy.true))
    return length


def _beside_batch(program: Program):
    """(batch size, sequence length, tensor) of every input that has both."""
    for node in program.placeholders():
        spec = program.inputs.get(node.name)
        if spec is None or spec.batch_dim is None or spec.batch_dim + 1 >= spec.ndim:
            continue
        batch, sequence = node.meta["val"].shape[spec.batch_dim : spec.batch_dim + 2]
        if expr(batch).is_Symbol and expr(sequence).is_Symbol:
            yield batch, sequence, node.meta["val"]


def _rewritten(val, swap: dict, like: torch.Tensor):
    if isinstance(val, (tuple, list)):
        return type(val)(_rewritten(v, swap, like) for v in val)
    if isinstance(val, torch.SymInt):
        return size_of(expr(val).xreplace(swap), like)
    if isinstance(val, torch.Tensor) and any(expr(d).free_symbols & swap.keys() for d in val.shape):
        return resized(val, [expr(d).xreplace(swap) for d in val.shape])
    return val
