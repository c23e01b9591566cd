"""Local sizes: recorded (global) size expressions, lowered to what one rank sees, as nodes of the graph.

The batch symbol of every input is local in the graph (a rank passes its own slice), so its global value is
``local * dp``.  The local size of a dim that n ranks shard is its global expression over n; for the batch that
cancels, and no division is emitted.
"""

from __future__ import annotations

import operator

import sympy
import torch
from torch import fx

from moec.program import Program
from moec.runtime.errors import MoecError
from moec.runtime.torch_compat import expr


class Sizes:
    """Emits size expressions into a graph; every emitted sub-expression is made once."""

    def __init__(self, program: Program, dp: int) -> None:
        self.graph = program.graph
        self.dp = dp
        self.batch_names = set(program.batch_symbols)
        self.symbols: dict[str, fx.Node] = {}
        self.made: dict[sympy.Expr, fx.Node] = {}
        last = None
        for node in program.placeholders():
            last = node
        self._after = last
        for node in program.placeholders():
            if node.name not in program.inputs:
                continue
            for dim, size in enumerate(node.meta["val"].shape):
                factor, symbol = expr(size).as_coeff_Mul()  # a shared sequence is recorded as n * t
                if symbol.is_Symbol and str(symbol) not in self.symbols:
                    with self.graph.inserting_after(self._after):
                        n = self.graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                    n.meta.update(val=size, types=None)
                    self._after = self.made[expr(size)] = n
                    self.symbols[str(symbol)] = n if factor == 1 else self._call(operator.floordiv, n, int(factor))

    def carries_batch(self, size) -> bool:
        """Whether a recorded size has the batch as a factor."""
        return any(str(s) in self.batch_names for s in expr(size).free_symbols)

    def local(self, size, shards: int = 1):
        """The size of one rank's part as an int or a node, given the recorded global size."""
        e = expr(size)
        e = sympy.cancel(e.subs({s: s * self.dp for s in e.free_symbols if str(s) in self.batch_names}) / shards)
        return self.emit(e)

    def emit(self, e: sympy.Expr):
        if e.is_Integer:
            return int(e)
        if e in self.made:
            return self.made[e]
        if e.is_Symbol:
            if str(e) not in self.symbols:
                raise MoecError(
                    f"size {e} is not the size of any input dim",
                    where="shard",
                    way_out="a size that depends on data cannot be re-computed on each rank",
                )
            return self.symbols[str(e)]
        if e.is_Add or e.is_Mul:
            num, den = sympy.fraction(e)
            if den != 1:
                out = self._call(operator.floordiv, self.emit(num), self.emit(den))
            else:
                op = operator.add if e.is_Add else operator.mul
                terms = [self.emit(a) for a in e.args]
                out = terms[0]
                for t in terms[1:]:
                    out = self._call(op, out, t)
        elif e.is_Pow and e.exp.is_Integer and e.exp > 0:
            base = self.emit(e.base)
            out = base
            for _ in range(int(e.exp) - 1):
                out = self._call(operator.mul, out, base)
        elif type(e).__name__ in _BINARY:
            out = self._call(_BINARY[type(e).__name__], self.emit(e.args[0]), self.emit(e.args[1]))
        else:
            raise MoecError(f"size expression {e} cannot be lowered", where="shard")
        self.made[e] = out
        return out

    def _call(self, fn, a, b):
        if isinstance(a, int) and isinstance(b, int):
            return fn(a, b)
        with self.graph.inserting_after(self._after):
            self._after = self.graph.call_function(fn, (a, b))
        self._after.meta["types"] = None  # a local size: not a value of the user's program
        return self._after


_BINARY = {"FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv, "Mod": operator.mod, "PythonMod": operator.mod}
