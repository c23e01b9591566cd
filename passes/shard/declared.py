"""Rules that users declared for their own ops, as the table's makers: the terms of a spec, fitted to one call.

A declared rule says something about an *op*, as its fake kernel and its derivative do, and is kept where they are: with
the op itself (an attribute of its ``OpOverloadPacket``), for as long as the process knows the op.  moec keeps no table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from moec.passes.shard.families import einsum
from moec.passes.shard.rule import Rule, operands, result_shapes, shape
from moec.runtime.errors import MoecError
from moec.runtime.torch_compat import OpOverload, expr

KEPT_AS = "moec_sharding_rule"


@dataclass(frozen=True)
class Declared:
    spec: str
    carries: str
    terms: tuple[str, ...]
    """One a tensor argument of the schema, in its order."""
    results: tuple[str, ...]


def declared_rule(node: fx.Node) -> Callable[[fx.Node], Rule] | None:
    """The maker of the rule that a user declared for a node's op, None without one."""
    if not isinstance(node.target, OpOverload):
        return None
    found: Declared | None = getattr(node.target.overloadpacket, KEPT_AS, None)
    return None if found is None else lambda n: _fit(n, found)


def is_tensor(kind) -> bool:
    """Is a type of a schema Tensor, Tensor?, Tensor[] or Tensor?[]?"""
    while isinstance(kind, (torch.OptionalType, torch.ListType)):
        kind = kind.getElementType()
    return isinstance(kind, torch.TensorType)


def _fit(node: fx.Node, rule: Declared) -> Rule:
    terms, results = _terms(node, rule), rule.results
    shapes, outs = [shape(o) for o in operands(node)], result_shapes(node)
    if len(results) == 1:  # a list of results has one term for all of them
        results = results * len(outs)
    if len(results) != len(outs):
        raise _misfit(node, rule, f"it yields {len(outs)} results")
    sizes: dict[str, int | torch.SymInt] = {}
    for what, term, s in [("operand", *x) for x in zip(terms, shapes, strict=True)] + [
        ("result", *x) for x in zip(results, outs, strict=True)
    ]:
        names = term.split()
        if len(names) - 1 > len(s) if "..." in names else len(names) != len(s):
            raise _misfit(node, rule, f"{what} {term!r} has the shape {list(s)}")
        at = names.index("...") if "..." in names else len(names)
        for name, size in [*zip(names[:at], s, strict=False), *zip(names[:at:-1], s[::-1], strict=False)]:
            known = sizes.setdefault(name.removeprefix("!"), size) if name != "1" else size
            # Two symbols may be equal without showing it; numbers show it.
            apart = expr(known) - expr(size)
            if apart != 0 and (apart.is_number or expr(known).is_number or expr(size).is_number):
                raise _misfit(node, rule, f"{name.removeprefix('!')!r} would be {known} and {size}")
    return einsum(f"{', '.join(terms)} -> {', '.join(results)}", rule.carries)(node)


def _terms(node: fx.Node, rule: Declared) -> list[str]:
    """A term for each tensor of the call, in the order of ``operands``."""
    arguments = node.target._schema.arguments
    tensors = [a.name for a in arguments if is_tensor(a.type)]
    term = dict(zip(tensors, rule.terms, strict=True)) if len(tensors) == len(rule.terms) else None
    if term is None:
        raise _misfit(node, rule, f"this overload has {len(tensors)} tensor arguments")
    given = [*zip((a.name for a in arguments), node.args, strict=False), *node.kwargs.items()]
    out: list[str] = []
    for name, value in given:
        if name in term:
            fx.node.map_arg(value, lambda n, name=name: out.append(term[name]))
    return out


def _misfit(node: fx.Node, rule: Declared, what: str) -> MoecError:
    shapes = ", ".join(str(list(shape(o))) for o in operands(node))
    return MoecError(
        f"the sharding rule {rule.spec!r} does not fit {node.target} (node {node.name}) on {shapes}: {what}",
        where=node.meta.get("where", ""),
        way_out="declare the dims that the op has with moec.sharding_rule",
    )
