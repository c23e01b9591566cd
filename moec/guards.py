"""Guards: what capture assumed of the sizes of inputs.

A program serves other sizes than those it was captured with, unless the model's Python code branched on one (a loop
over chunks of the sequence was unrolled for so many chunks).  Then the graph is right only while the branch would be
taken again.  ``size_guards`` collects these assumptions from what the tracer noted; ``size_problems`` holds a call
against them.  That a size is not 0 or 1 is noted for broadcasting's sake and is no assumption of ours: capture made
every size at least 2, and graphs without another guard serve 1 as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import sympy
from torch import fx

from moec.runtime.torch_compat import expr, shape_guards


def size_guards(graph: fx.Graph) -> tuple[sympy.Basic, ...]:
    """Assumptions about the sizes of a captured graph's inputs, as relations of their symbols."""
    inputs = {s for n in graph.find_nodes(op="placeholder") for d in n.meta["val"].shape for s in expr(d).free_symbols}
    found = shape_guards(n.meta["val"] for n in graph.find_nodes(op="placeholder"))
    return tuple(dict.fromkeys(g for g in found if g.free_symbols and g.free_symbols <= inputs and not _only_large(g)))


def _only_large(guard: sympy.Basic) -> bool:
    """Does it say no more than that something is neither 0 nor 1?"""
    if not isinstance(guard, sympy.core.relational.Relational) or not guard.rhs.is_number:
        return False
    bound = 1 if isinstance(guard, sympy.Ne) else 2 if isinstance(guard, (sympy.Ge, sympy.Gt)) else -1
    return bool(guard.rhs <= bound)


def solve_sizes(found: Iterable[tuple[sympy.Expr, str, int]]) -> tuple[dict[sympy.Symbol, tuple[str, int]], list[str]]:
    """Values of the symbols of recorded sizes, as (what it is for the user, value), and what is wrong with the sizes.

    ``found``: (recorded size, what it is, size).  A size recorded as ``n * t`` must be a multiple of n; one that two
    inputs share must be the same in both.
    """
    sizes: dict[sympy.Symbol, tuple[str, int]] = {}
    problems = []
    for recorded, what, size in found:
        n, symbol = recorded.as_coeff_Mul()
        if not symbol.is_Symbol:
            continue
        if size % int(n):
            problems.append(f"{what} = {size} is shared by {n} ranks, which do not divide it: pad the sequences")
            continue
        known = sizes.setdefault(symbol, (what, size // int(n)))
        if known[1] != size // int(n):
            problems.append(f"{what} = {size}, but {known[0]} = {known[1] * int(n)}: they were equal in the examples")
    return sizes, problems


def size_problems(guards: tuple[sympy.Basic, ...], sizes: Mapping[sympy.Symbol, tuple[str, int]]) -> list[str]:
    """``sizes``: symbol -> (what it is for the user, its global size)."""
    values = {s: n for s, (_, n) in sizes.items()}
    problems = []
    for guard in guards:
        if guard.subs(values) == sympy.false:
            named = ", ".join(f"{what} = {n}" for s, (what, n) in sizes.items() if s in guard.free_symbols)
            problems.append(
                f"the model's code took a branch that depends on sizes, and would take another one for {named} "
                f"(captured under {guard}): pass examples of the sizes that you run with"
            )
    return problems[:1]
