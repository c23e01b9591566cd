"""The capacity of experts when the tokens that compete for their places lie on several ranks.

Legend: T tokens, K choices per token.

``route`` with a capacity and ``drop`` rank the pairs of all tokens that they see; a rank sees only its own.  So they
become

1. ``route`` without the capacity, on the tokens where they are;
2. ``drop`` on the pairs [T, K], gathered over the axes whose tokens compete: all of them for ``level="global"``, all
   but dp for ``dp_shard``, whose runs of tokens are then one a rank (``RouteSpec.shards``);
3. this rank's part of the kept ids; a weight whose id is gone becomes 0.  Only numbers without a gradient travel.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import fx

from moec.passes.rewrite import apply, new
from moec.placement import R, S, Types
from moec.program import op_name
from moec.runtime.route_spec import RouteSpec

aten, moec_ops = torch.ops.aten, torch.ops.moec


def has_capacity(node: fx.Node) -> bool:
    name = op_name(node)
    return name in ("moec.route", "moec.drop") and RouteSpec.parse(node.args[-1]).capacity_factor is not None


def spread(ctx, node: fx.Node) -> None:
    """Rewrite ``weights, ids = route(…)`` or ``drop(…)`` in place.  ``ctx`` is the pass (``Sharder``)."""
    spec = RouteSpec.parse(node.args[-1])
    if op_name(node) == "moec.route":  # 1
        free = replace(spec, capacity_factor=None, level="global", shards=1)
        weights, ids = _pair(ctx, node, moec_ops.route.default, (*node.args[:4], free.text()))
    else:
        weights, ids = node.args[:2]
    runs = {a: t for a, t in weights.meta["types"].items() if a in ctx.dp and t == S(0)}
    if spec.level == "dp_shard" and ctx.mesh.size(runs) == spec.shards:
        spec = replace(spec, shards=1)
    else:
        runs = {}
    seen: Types = {a: runs.get(a, R) for a in ctx.mesh.names}
    fixed = _visited(ctx, apply(weights, aten.detach.default, weights))
    pairs = ctx.convert(fixed, seen), ctx.convert(ids, seen)
    _, kept = _pair(ctx, node, moec_ops.drop.default, (*pairs, spec.text()))  # 2
    kept = ctx.convert(kept, ids.meta["types"])  # 3
    gone = _visited(ctx, apply(ids, aten.lt.Scalar, kept, 0))
    weights = _visited(ctx, apply(weights, aten.masked_fill.Scalar, weights, gone, 0.0))
    for user in list(node.users):
        user.replace_all_uses_with((weights, kept)[user.args[1]])
        ctx.graph.erase_node(user)
    ctx.graph.erase_node(node)


def _pair(ctx, node: fx.Node, target, args) -> tuple[fx.Node, fx.Node]:
    made = new(node, target, args, node.meta["val"])
    with ctx.graph.inserting_before(made):
        ctx._general(made, op_name(made))
    first, second = (_visited(ctx, new(node, operator.getitem, (made, i), node.meta["val"][i])) for i in range(2))
    return first, second


def _visited(ctx, made: fx.Node) -> fx.Node:
    with ctx.graph.inserting_before(made):
        ctx._visit(made)
    return made
