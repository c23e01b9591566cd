"""The algebra of types: given a factor rule and the operands' types on one axis, what the operands must become and
what the results are.  Pure: it looks at no graph and moves no data.

1. Choose the factor to shard: one that the op creates, if the caller wants one (nothing moves for it); else the first
   that a sharded operand has and that is not blocked (ragged rows first, then parameters, since moving a weight costs
   most).  A view knows by itself what becomes of a sharded dim.
2. With a factor f: operands that have f become S at its dim, all others R; results that have f are S, those that lack
   it are P (the contraction of f), and so are operands that are added to them.
3. Without: pending sums pass through ops that are linear in them; otherwise they are reduced, to I when every other
   operand is I (so that the result stays invariant and its gradient needs no reduction), else to R.
4. Operands that must be invariant are, and say nothing about the others.
5. Operands that are then all I give I; I and R mix to R.  Operands without a gradient are neutral: they are R and fit
   beside either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moec.passes.shard.rule import Rule
from moec.placement import I, P, Parts, R, S, Type, V


@dataclass(frozen=True)
class Operand:
    type: Type
    neutral: bool
    """Needs no gradient: I and R are the same thing."""
    is_param: bool = False


def solve(rule: Rule, ops: Sequence[Operand], wanted: frozenset[str] = frozenset()) -> tuple[list[Type], list[Type]]:
    """Target types of the operands and types of the results on one axis.  ``wanted``: created factors to shard here."""
    if rule.invariant:
        others = [slot for slot in range(len(ops)) if slot not in rule.invariant]
        rest = replace(rule, operands=tuple(rule.operands[slot] for slot in others), invariant=frozenset())
        targets, results = solve(rest, [ops[slot] for slot in others], wanted)
        found = iter(targets)
        return [I if slot in rule.invariant else next(found) for slot in range(len(ops))], results
    if rule.moves is not None and ops[0].type.kind == "S":
        result = rule.moves(ops[0].type)
        return ([ops[0].type], [result]) if result is not None else _without_factor(rule, ops)
    factor, parts, ragged = _choose(rule, ops, wanted)
    if factor is not None:
        return _with_factor(rule, ops, factor, parts, ragged)
    return _without_factor(rule, ops)


def _choose(rule: Rule, ops: Sequence[Operand], wanted: frozenset[str]) -> tuple[str | None, Parts, bool]:
    if made := wanted & rule.created:
        return min(made), 1, False
    found = []
    for slot, o in enumerate(ops):
        if o.type.sharded:
            f = rule.operands[slot][o.type.dim]
            if f is not None and f not in rule.blocked:
                found.append((o.type.kind != "V", not o.is_param, slot, f, o.type))
    if found:
        *_, f, t = min(found, key=lambda x: x[:3])
        return f, t.parts, t.kind == "V"
    return None, 1, False


def _with_factor(
    rule: Rule, ops: Sequence[Operand], f: str, parts: Parts, ragged: bool
) -> tuple[list[Type], list[Type]]:
    def place(dims) -> Type:
        return V if ragged else S(dims.index(f), parts)

    results = [place(dims) if f in dims else P for dims in rule.results]
    targets = [
        place(dims) if f in dims else P if slot in rule.added and results[0] == P else R
        for slot, dims in enumerate(rule.operands[: len(ops)])
    ]
    return targets, results


def _without_factor(rule: Rule, ops: Sequence[Operand]) -> tuple[list[Type], list[Type]]:
    grads = [o for o in ops if not o.neutral]
    pending = [i for i, o in enumerate(ops) if o.type.kind == "P"]
    if pending and _passes(rule.carries, ops, pending):
        return [P if o.type.kind == "P" else R for o in ops], [P] * len(rule.results)
    # What a reduced or gathered operand becomes: invariant unless a replicated operand with a gradient is beside it.
    settled = [o.type.kind for o in grads if o.type.kind in "IR"]
    kind = R if "R" in settled else I
    targets = [R if o.neutral else kind for o in ops]
    return targets, [kind if grads else R] * len(rule.results)


def _passes(carries: str, ops: Sequence[Operand], pending: list[int]) -> bool:
    others = [o for i, o in enumerate(ops) if i not in pending]
    if any(o.type.sharded for o in others):
        return False
    if carries == "linear":
        return not others
    if carries == "multilinear":
        return len(pending) == 1
    return carries == "first" and pending == [0]
