"""fuse_router: a router's choice and what is counted of its logits become one op.

Contract
    requires   irredundant: equal values are one node
    provides   fused_router: a ``moec.route`` whose logits are counted is a ``moec.route_counted``
    preserves  values: ids, weights, counts and probabilities; a token's entropy is formed in the dtype of the scores
               instead of fp64 (people read it)
    never      changes what is counted, or moves a collective

Why: each of ``moec.route``, ``moec.tally`` and ``moec.balance`` reads the logits and forms their scores anew.

Algorithm, for each ``moec.route``:
    1. Its ``moec.tally``: of its ids as they come, with nothing kept back behind them, of its logits and its score.
       (A gradient stops at the tally in any case: a ``detach`` before it says nothing.)
    2. A ``moec.balance`` of the same logits, of as many choices, which counts the same tokens.  One of other dims
       (by sequence) stays an op of its own.
    3. One node in the place of the route; what says which tokens count is brought before it.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from moec.passes.contract import Pass, PassContract
from moec.passes.typed import bring_before, result, sweep, typed
from moec.plan import Plan
from moec.program import Program
from moec.runtime.route_spec import RouteSpec

aten, moec_ops = torch.ops.aten, torch.ops.moec


def _run(program: Program, plan: Plan) -> Program:
    for route in program.graph.find_nodes(op="call_function", target=moec_ops.route.default):
        if (reason := _join(program, route)) is not None:
            where = route.meta.get("where") or "the router"
            program.why_not.append(f"{where}: routing and counting stay apart: {reason}")
    program.graph.lint()
    program.module.recompile()
    return program


def _join(program: Program, route: fx.Node) -> str | None:
    """None when done, or when there is nothing to join; else why not."""
    logits, bias, valid, token, text = route.args
    spec = RouteSpec.parse(text)
    parts = {n.args[1]: n for n in route.users if n.target is operator.getitem}
    tallies = [n for n in (parts[1].users if 1 in parts else ()) if n.target is moec_ops.tally.default]  # 1
    if not tallies:
        return None
    tally, *more = tallies
    chosen, kept, counted_logits, counted, _, score = tally.args
    if kept is not None or chosen is not parts[1]:
        return "pairs are dropped between the two"
    if more or counted_logits is None or _behind_detach(counted_logits) is not logits or score != spec.score:
        return "what is counted is not the logits that are routed"
    balance = _balance(logits, counted, spec)  # 2
    if counted is not None and not bring_before([counted], route):  # 3
        return "which tokens count is known only behind the routing"
    args = (logits, bias, valid, token, counted, text, balance is not None)
    joined = typed(program, route, moec_ops.route_counted.default, *args)
    read = [*((n, i) for i, n in parts.items()), (tally, 2)]
    if balance is not None:
        read += [(n, 3 + n.args[1]) for n in balance.users if n.target is operator.getitem]
    for node, i in read:
        made = result(program, joined, i)
        made.meta.update({k: v for k, v in node.meta.items() if k != "val"})
        node.replace_all_uses_with(made)
    for node, _ in reversed(read):
        sweep(node)
    return None


def _balance(logits: fx.Node, counted: fx.Node | None, spec: RouteSpec) -> fx.Node | None:
    for node in logits.users:
        if node.target is moec_ops.balance.default and node.args == (logits, counted, spec.top_k, spec.score):
            return node
    return None


def _behind_detach(node: fx.Node) -> fx.Node:
    return node.args[0] if node.target is aten.detach.default else node


CONTRACT = PassContract(
    name="fuse_router",
    requires=frozenset({"irredundant"}),
    provides=frozenset({"fused_router"}),
    conflicts_with=frozenset({"fused_router", "lowered"}),
)
fuse_router = Pass(CONTRACT, _run, applies=lambda plan: plan.fuse)
