"""causal_attention: a mask that is proved to be the causal one becomes ``is_causal=True``.

Capture spells every mask out, as a tensor [.., S, T] that one position's index is compared in with another's; a kernel
that is told "causal" skips the half of the products that such a mask throws away (and needs no mask in memory).

Contract
    requires   normalized
    provides   attention whose mask is `j <= i` for all i, j, or true everywhere, says so instead
    preserves  values
    never      judges by a mask's values: what it means is derived from the nodes that compute it, for all sizes

Algorithm
    1. What nodes mean (``_Meaning``): an integer is ``constant + sum of slope · index`` over the dims of its tensor, a
       truth value a set of such integers all of which are <= 0 (empty: true).  Positions that the model numbers itself
       are known from ``arange`` on; packed sequences that it looks for in them turn out to be none.  Whatever depends
       on an input, or has no rule here, means nothing.
    2. A mask that is true needs no mask.  One that means ``j - i <= 0`` over its last two dims, on as many queries as
       keys, is the causal flag.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moec.passes.contract import Pass, PassContract
from moec.plan import Plan
from moec.program import Program, op_name
from moec.runtime.torch_compat import expr

SDPA = "aten.scaled_dot_product_attention"


@dataclass(frozen=True)
class Linear:
    """``constant + Σ slope[d] · index[d]``, where d counts dims from the last one (-1, -2 …)."""

    constant: int
    slopes: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(constant: int, slopes: dict[int, int]) -> Linear:
        return Linear(constant, tuple(sorted((d, s) for d, s in slopes.items() if s)))

    def slope(self, dim: int) -> int:
        return dict(self.slopes).get(dim, 0)

    def plus(self, other: Linear, times: int = 1) -> Linear:
        dims = {d for d, _ in (*self.slopes, *other.slopes)}
        return Linear.of(
            self.constant + times * other.constant, {d: self.slope(d) + times * other.slope(d) for d in dims}
        )

    def moved(self, where: Callable[[int], int]) -> Linear:
        """Over other dims: ``where`` gives the new one of each."""
        return Linear.of(self.constant, {where(d): s for d, s in self.slopes})

    def at(self, dim: int, index: int) -> Linear:
        """The same with ``index`` for that dim's."""
        return Linear.of(self.constant + self.slope(dim) * index, {d: s for d, s in self.slopes if d != dim})


Truth = frozenset[Linear]
"""All of them are <= 0."""
TRUE: Truth = frozenset()
FALSE: Truth = frozenset({Linear(1)})


def truth(*below: Linear) -> Truth:
    """What is <= 0 whatever the indices is left out."""
    if any(x.constant > 0 and not x.slopes for x in below):
        return FALSE
    return frozenset(x for x in below if x.slopes or x.constant > 0)


class _Meaning:
    """Node -> Linear, Truth, or None: nothing is known."""

    def __init__(self) -> None:
        self.known: dict[fx.Node, Linear | Truth | None] = {}

    def of(self, x: Any) -> Any:
        if not isinstance(x, fx.Node):
            return Linear(int(x)) if isinstance(x, int) else None
        if x not in self.known:
            rule = _RULES.get(op_name(x)) if x.op == "call_function" else None
            value = x.meta.get("val")
            if rule is None or not isinstance(value, torch.Tensor) or value.dtype not in (torch.int64, torch.bool):
                self.known[x] = None
            else:
                self.known[x] = _settled(rule(self, x), value)
        return self.known[x]


def _settled(found: Any, value: torch.Tensor) -> Any:
    """The only index of a dim of size 1 is 0; when it is broadcast, its slope must not come to life."""
    ones = [d - value.ndim for d, n in enumerate(value.shape) if expr(n) == 1]
    below = [found] if isinstance(found, Linear) else list(found or ())
    for d in ones:
        below = [x.at(d, 0) for x in below]
    return below[0] if isinstance(found, Linear) else None if found is None else truth(*below)


# -- 1: dims of arguments are counted from the last one of the argument


def _arg(node: fx.Node, at: int, name: str, default: Any = None) -> Any:
    return node.args[at] if len(node.args) > at else node.kwargs.get(name, default)


def _rank(x: fx.Node) -> int:
    return x.meta["val"].ndim


def _from_last(dim: int, rank: int) -> int:
    return dim if dim < 0 else dim - rank


def _arange(m: _Meaning, node: fx.Node) -> Any:
    start, step = (node.args[0] if len(node.args) > 1 else 0), _arg(node, 2, "step", 1)
    return Linear.of(start, {-1: step}) if isinstance(start, int) and isinstance(step, int) else None


def _same(m: _Meaning, node: fx.Node) -> Any:
    """The same value, dims aligned at the last: expand, clones, casts that keep the kind."""
    x = node.args[0]
    return m.of(x) if x.meta["val"].dtype == node.meta["val"].dtype else None


def _unsqueeze(m: _Meaning, node: fx.Node) -> Any:
    x, dim = node.args[:2]
    new = _from_last(dim, _rank(node))
    return _moved(m.of(x), lambda d: d if d > new else d - 1)


def _moved(x: Any, where: Callable[[int], int]) -> Any:
    if isinstance(x, Linear):
        return x.moved(where)
    return None if x is None else frozenset(one.moved(where) for one in x)


def _slice(m: _Meaning, node: fx.Node) -> Any:
    x, dim, start, step = node.args[0], _arg(node, 1, "dim", 0), _arg(node, 2, "start", 0), _arg(node, 4, "step", 1)
    found, dim = m.of(x), _from_last(dim, _rank(node))
    if not isinstance(found, Linear) or not isinstance(start or 0, int) or (start or 0) < 0 or step != 1:
        return None
    return Linear(found.constant + found.slope(dim) * (start or 0), found.slopes)


def _select(m: _Meaning, node: fx.Node) -> Any:
    x, dim, index = node.args
    found, dim = m.of(x), _from_last(dim, _rank(x))
    if not isinstance(found, Linear) or not isinstance(index, int) or index < 0:
        return None
    return found.at(dim, index).moved(lambda d: d if d > dim else d + 1)


def _sum(sign: int) -> Callable[[_Meaning, fx.Node], Any]:
    def rule(m: _Meaning, node: fx.Node) -> Any:
        a, b = (m.of(x) for x in node.args[:2])
        fits = isinstance(a, Linear) and isinstance(b, Linear) and not node.kwargs
        return a.plus(b, sign) if fits else None

    return rule


def _diff(m: _Meaning, node: fx.Node) -> Any:
    """``x[i] - x[i - 1]``; what is put before x has to be what x would be at -1."""
    names = ("self", "n", "dim", "prepend", "append")
    x, n, dim, before, after = (_arg(node, i, name) for i, name in enumerate(names))
    found, dim = m.of(x), _from_last(-1 if dim is None else dim, _rank(x))
    if n not in (None, 1) or after is not None or not isinstance(found, Linear):
        return None
    if before is not None:
        put = m.of(before)
        if not isinstance(put, Linear) or expr(before.meta["val"].shape[dim]) != 1:
            return None
        if put.at(dim, 0) != found.at(dim, -1):
            return None
    return Linear(found.slope(dim))


def _cumsum(m: _Meaning, node: fx.Node) -> Any:
    """Of nothing but zeros."""
    return Linear(0) if m.of(node.args[0]) in (Linear(0), FALSE) else None


def _true(m: _Meaning, node: fx.Node) -> Any:
    return TRUE if node.meta["val"].dtype == torch.bool else Linear(1)


def _tril(m: _Meaning, node: fx.Node) -> Any:
    k = _arg(node, 1, "diagonal", 0)
    return truth(Linear.of(-k, {-1: 1, -2: -1})) if m.of(node.args[0]) == TRUE and isinstance(k, int) else None


def _full(m: _Meaning, node: fx.Node) -> Any:
    fill = node.args[1]
    if isinstance(fill, bool):
        return TRUE if fill else FALSE
    return Linear(fill) if isinstance(fill, int) else None


def _compared(below: Callable[[Linear, Linear], tuple[Linear, ...]]) -> Callable[[_Meaning, fx.Node], Any]:
    def rule(m: _Meaning, node: fx.Node) -> Any:
        a, b = (m.of(x) for x in node.args[:2])
        return truth(*below(a, b)) if isinstance(a, Linear) and isinstance(b, Linear) else None

    return rule


def _differs(m: _Meaning, node: fx.Node) -> Any:
    a, b = (m.of(x) for x in node.args[:2])
    if not isinstance(a, Linear) or not isinstance(b, Linear) or (difference := a.plus(b, -1)).slopes:
        return None
    return TRUE if difference.constant else FALSE


def _both(m: _Meaning, node: fx.Node) -> Any:
    a, b = (m.of(x) for x in node.args[:2])
    return truth(*a, *b) if isinstance(a, frozenset) and isinstance(b, frozenset) else None


def _index(m: _Meaning, node: fx.Node) -> Any:
    """One index along one dim: its own dims take that dim's place."""
    x, indices = node.args[0], node.args[1]
    given = [i for i, n in enumerate(indices) if n is not None]
    if len(given) != 1:
        return None
    found, by = m.of(x), m.of(indices[given[0]])
    if not isinstance(found, Linear) or not isinstance(by, Linear):
        return None
    if min(by.constant, *(s for _, s in by.slopes), 0) < 0:  # it may count from the end
        return None
    dim, more = _from_last(given[0], _rank(x)), _rank(indices[given[0]])
    rest = found.at(dim, 0).moved(lambda d: d if d > dim else d + 1 - more)
    step = found.slope(dim)
    after = -1 - dim
    placed = by.moved(lambda d: d - after)
    return rest.plus(Linear.of(step * placed.constant, {d: step * s for d, s in placed.slopes}))


def _le(a: Linear, b: Linear) -> tuple[Linear, ...]:
    return (a.plus(b, -1),)


def _lt(a: Linear, b: Linear) -> tuple[Linear, ...]:
    return (a.plus(b, -1).plus(Linear(1)),)


_RULES: dict[str, Callable[[_Meaning, fx.Node], Any]] = {
    "aten.arange": _arange, "aten.tril": _tril,
    **dict.fromkeys(("aten.expand", "aten.clone", "aten.alias", "aten.detach", "aten._to_copy"), _same),
    "aten.unsqueeze": _unsqueeze, "aten.slice": _slice, "aten.select": _select,
    "aten.add": _sum(1), "aten.sub": _sum(-1), "aten.diff": _diff, "aten.cumsum": _cumsum, "aten.index": _index,
    **dict.fromkeys(("aten.new_ones", "aten.ones", "aten.ones_like"), _true), "aten.full": _full,
    "aten.le": _compared(_le), "aten.lt": _compared(_lt), "aten.ge": _compared(lambda a, b: _le(b, a)),
    "aten.gt": _compared(lambda a, b: _lt(b, a)), "aten.eq": _compared(lambda a, b: (*_le(a, b), *_le(b, a))),
    "aten.ne": _differs,
    **dict.fromkeys(("aten.__and__", "aten.bitwise_and", "aten.logical_and"), _both),
}  # fmt: skip

CAUSAL = truth(Linear.of(0, {-1: 1, -2: -1}))


# -- 2


def _run(program: Program, plan: Plan) -> Program:
    meaning = _Meaning()
    for node in program.graph.nodes:
        if node.op != "call_function" or op_name(node) != SDPA:
            continue
        mask = _arg(node, 3, "attn_mask")
        if not isinstance(mask, fx.Node):
            continue
        found = meaning.of(mask)
        query, key = (x.meta["val"].shape[-2] for x in node.args[:2])
        causal = found == CAUSAL and expr(query) == expr(key)
        if causal or found == TRUE:
            _unmask(node, causal)
    program.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    program.graph.lint()
    program.module.recompile()
    return program


def _unmask(node: fx.Node, causal: bool) -> None:
    args, kwargs = list(node.args[:3]), dict(node.kwargs)
    kwargs |= dict(zip(("attn_mask", "dropout_p", "is_causal"), node.args[3:6], strict=False))
    kwargs.pop("attn_mask")
    node.args = tuple(args)
    node.kwargs = kwargs | ({"is_causal": True} if causal else {})


CONTRACT = PassContract(
    name="causal_attention",
    requires=frozenset({"normalized"}),
    provides=frozenset(),
)
causal_attention = Pass(CONTRACT, _run)
