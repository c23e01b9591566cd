"""``moec.sharding_rule("my::op", "... k, n k -> ... n")``: users' factor rules of their own ops.

1. The op exists, and neither the table nor an earlier call has another rule for it.
2. The spec is well formed.
3. The spec fits the op's schema: what is wrong for every call is an error now.
4. The rule is kept with the op (``declared.py``, which fits it to the shapes of a call).
"""

from __future__ import annotations

import re

import torch

from moec.passes.shard.declared import KEPT_AS, Declared, is_tensor
from moec.passes.shard.rules import in_table
from moec.runtime.errors import MoecError

CARRIES = ("none", "linear", "multilinear")
_NAME = re.compile(r"!?[A-Za-z]\w*")


def sharding_rule(op: str, spec: str, *, carries: str = "none") -> None:
    """Say how sharding passes through an op of your own, so that models that call it can be parallelized.

    Args:
        op: the qualified name of a registered op, ``"my::op"``; the rule holds for all its overloads.
        spec: the dims of the tensor arguments and of the results, ``"... k, n k -> ... n"``: one term a tensor argument
            in the order of the schema (an optional one that a call leaves out has its term all the same; a list of
            tensors has one term for all of them), dims separated by spaces.  Equal names are one *factor* of the op:

            * a factor may be cut: the op on a part of it yields that part of every result that has the factor;
            * a factor that a result lacks is **summed**: parts of it yield addends of the result (if the op does
              anything but add there, block it);
            * ``!k`` is never cut: the op needs all of it (a normalised dim, a softmax, a max);
            * ``...`` are leading dims that broadcast from the right; ``1`` is a dim that has no factor.
        carries: what the op makes of operands that are pending sums: ``"linear"`` the sum of its results, if all are
            pending (``f(a + b, c + d) = f(a, c) + f(b, d)``); ``"multilinear"`` the same in each operand by itself;
            ``"none"``, which is always right: they are reduced first.

    The same call may be repeated.  Nothing can check a rule when it is declared; ``moec.check`` compares values and
    every gradient of a model that uses it, which a wrong rule does not survive.

    Raises:
        MoecError: the op does not exist or has another rule, or the spec is malformed or does not fit its schema.  A
            spec that does not fit the shapes of a call is an error when that call is sharded.
    """
    packet = _packet(op)  # 1
    if in_table(op):
        raise _bad(op, "moec has a rule for this op")
    if carries not in CARRIES:
        raise _bad(op, f"carries={carries!r} is not one of {', '.join(CARRIES)}")
    rule = Declared(spec, carries, *_parse(op, spec))  # 2
    _check_schema(op, packet, rule)  # 3
    known = getattr(packet, KEPT_AS, None)
    if known not in (None, rule):
        raise _bad(op, f"has the rule {known.spec!r} (carries={known.carries!r}) already")
    setattr(packet, KEPT_AS, rule)  # 4


def _packet(op: str):
    space, found, name = op.partition("::")
    packet = getattr(getattr(torch.ops, space), name, None) if found and space and name else None
    if packet is None:
        raise MoecError(
            f"there is no op {op!r}",
            where="sharding_rule",
            way_out='register it first (torch.library.custom_op("my::op", …)) and name it as "my::op"',
        )
    return packet


def _parse(op: str, spec: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    sides = spec.split("->")
    if len(sides) != 2:
        raise _bad(op, f"{spec!r} is not 'operands -> results'")
    terms, results = (tuple(" ".join(t.split()) for t in side.split(",")) for side in sides)
    for term in (*terms, *results):
        names = [n.removeprefix("!") for n in term.split() if n != "1"]
        if wrong := [n for n in term.split() if n not in ("1", "...") and not _NAME.fullmatch(n)]:
            raise _bad(op, f"{wrong[0]!r} in {spec!r} is no dim: a name, !name, ... or 1")
        if twice := [n for n in names if names.count(n) > 1]:
            raise _bad(op, f"{twice[0]!r} is twice in the term {term!r} of {spec!r}")
    read = {n.removeprefix("!") for t in terms for n in t.split()}
    if made := [n for t in results for n in t.split() if n != "1" and n.removeprefix("!") not in read]:
        raise _bad(op, f"{made[0]!r} in the result of {spec!r} is in no operand (1 is a dim without a factor)")
    return terms, results


def _check_schema(op: str, packet, rule: Declared) -> None:
    found = []
    for overload in packet.overloads():
        schema = getattr(packet, overload)._schema
        takes = sum(is_tensor(a.type) for a in schema.arguments)
        yields = [r.type for r in schema.returns]
        many = any(isinstance(t, torch.ListType) for t in yields)
        if len(rule.terms) == takes and all(map(is_tensor, yields)) and (many or len(rule.results) == len(yields)):
            return
        found.append(f"{takes} tensor arguments and {len(yields)} results ({schema})")
    raise _bad(
        op,
        f"{rule.spec!r} has {len(rule.terms)} operands and {len(rule.results)} results, but the op has "
        + " or ".join(found),
    )


def _bad(op: str, what: str) -> MoecError:
    return MoecError(f"{op}: {what}", where="sharding_rule")
