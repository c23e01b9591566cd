"""fuse_experts: the experts of a block become one op.

Contract
    requires   sharded
    provides   experts_fused
    preserves  values; activations are rounded once, where their functions were rounded one by one
    never      moves or removes a collective, nor a value that something else uses

Algorithm
    1. first product(s) (+ bias) → pointwise nodes → second product (+ bias), all over the same counts and of the same
       rows, become ``moec.experts_rows``, the nodes between them a body (``outline_body``).
    2. Where the rows come straight from a permute and go straight into its unpermute (no exchange in between), these
       join: ``moec.experts``.
    3. What stays op by op is in ``why_not`` with the reason; of FP8's products ``fuse_quantise`` says it.

Types are those recorded of the nodes replaced; the verifier derives them anew from the operands (``verify/dialect``).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from moec.passes.contract import Pass, PassContract
from moec.passes.outline_body import Declined, is_product, outline, with_bias
from moec.passes.rewrite import new
from moec.placement import S, Type, Types
from moec.plan import Plan
from moec.program import Program, op_name

moec_ops = torch.ops.moec
PERMUTES = {moec_ops.permute.default: False, moec_ops.permute_kept.default: True}
"""A permute -> does it keep the rows of experts alone?"""
KEPT = ("grad", "padded", "chunk")
"""What the fused node inherits: whether it needs a gradient, whether its rows are others than those recorded, and the
chunk of tokens that it belongs to."""


def _run(program: Program, plan: Plan) -> Program:
    why: dict[fx.Node, str] = {}
    for node in list(program.graph.nodes):
        if op_name(node) == "moec.grouped_mm" and node.users and isinstance(node.args[0], fx.Node):
            try:
                _fuse(program, node)
            except Declined as e:
                why[node] = str(e)
    left = [n for n in program.graph.nodes if op_name(n) == "moec.grouped_mm"]
    for counts in dict.fromkeys(n.args[2] for n in left):  # 3
        last = [n for n in left if n.args[2] is counts][-1]
        program.why_not.append(f"{last.meta.get('where', '')}: experts are computed op by op: {why.get(last, '')}")
    program.graph.lint()
    program.module.recompile()
    return program


def _fuse(program: Program, second: fx.Node) -> None:
    """Fuse what ends with the product ``second``, or raise Declined."""
    inner, w_out, counts = second.args
    body, sums, between = outline(inner, counts, program.mesh)  # 1
    products = [p if is_product(p, counts) else p.args[0] for p in sums]
    end = with_bias(second, counts)
    old = {*between, *products, *sums, second}
    _check_users(old, end)
    x = products[0].args[0]
    if any(p.args[0] is not x for p in products):
        raise Declined("first products of different rows")
    b_in = [p.args[1] for p, product in zip(sums, products, strict=True) if p is not product]
    if b_in and len(b_in) != len(products):
        raise Declined("a bias for some first products only")
    weights = ([p.args[1] for p in products], b_in, w_out, end.args[1] if end is not second else None, body.text())
    h_val, h_types = _side_by_side(sums)
    if (ends := _whole_block(x, counts, second, end, products, sums)) is not None:  # 2
        permute, unpermute, row_of = ends
        source, ids, _ = permute.args
        kept = PERMUTES[permute.target]
        with program.graph.inserting_before(unpermute):
            fused = _call(
                unpermute, moec_ops.experts.default, (source, ids, unpermute.args[1], *weights, kept),
                [_of(unpermute), (h_val, h_types), _of(row_of), _of(counts)],
            )  # fmt: skip
            y = _item(fused, 0, unpermute)
        unpermute.replace_all_uses_with(y)
        old |= {unpermute, row_of, counts, x, permute, end}
    else:
        with program.graph.inserting_before(end):
            results = [_of(end), (h_val, h_types)]
            fused = _call(end, moec_ops.experts_rows.default, (x, counts, *weights), results)
            y = _item(fused, 0, end)
        end.replace_all_uses_with(y)
        old |= {end}
    for node in reversed([n for n in program.graph.nodes if n in old]):
        for dead in [u for u in node.users if not u.users and u.target is operator.getitem]:
            program.graph.erase_node(dead)
        program.graph.erase_node(node)


def _check_users(old: set[fx.Node], end: fx.Node) -> None:
    for node in old - {end}:
        others = [u for u in node.users if u not in old and u is not end]
        if others := [u for u in others if u.users or u.target is not operator.getitem]:
            raise Declined(f"{node.name} is also used by {op_name(others[0])}")


def _whole_block(
    x: fx.Node, counts: fx.Node, second: fx.Node, end: fx.Node, products: list[fx.Node], sums: list[fx.Node]
) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """``(permute, unpermute, the number of each pair's row)`` if nothing but the experts stands between the two."""
    if x.target is not operator.getitem or x.args[1] != 0 or x.args[0].target not in PERMUTES:
        return None
    permute, users = x.args[0], list(end.users)
    if len(users) != 1 or users[0].target is not moec_ops.unpermute.default or users[0].args[0] is not end:
        return None
    unpermute = users[0]
    row_of = unpermute.args[2]
    results = {n.args[1]: n for n in permute.users if n.users}
    inside = {*products, *sums, second, end}
    whole = (
        results == {0: x, 1: counts, 2: row_of}
        and set(x.users) <= inside
        and set(counts.users) <= inside
        and set(row_of.users) == {unpermute}
    )
    return (permute, unpermute, row_of) if whole else None


def _side_by_side(sums: list[fx.Node]) -> tuple[torch.Tensor, Types]:
    """Value and types of all first products in one matrix: what shards the columns of each, shards each block of it."""
    vals = [s.meta["val"] for s in sums]
    types: Types = dict(sums[0].meta.get("types") or {})
    for axis, t in types.items():
        if t.kind == "S" and t.dim == 1:
            types[axis] = side_by_side([s.meta["types"][axis] for s in sums])
    return vals[0].new_empty((vals[0].shape[0], sum(v.shape[1] for v in vals))), types


def side_by_side(types: list[Type]) -> Type:
    """The type on one axis of matrices side by side, of the columns of each of which the axis shards each block."""
    return S(1, sum(t.parts for t in types))


def _of(node: fx.Node) -> tuple[Any, Types | None]:
    return node.meta["val"], node.meta.get("types")


def _call(beside: fx.Node, op, args: tuple, results: list[tuple[Any, Types | None]]) -> fx.Node:
    made = new(beside, op, args, tuple(val for val, _ in results))
    if "types" in beside.meta:
        made.meta["types"] = [types for _, types in results]
    made.meta.update({k: beside.meta[k] for k in KEPT if k in beside.meta})
    return made


def _item(fused: fx.Node, index: int, instead: fx.Node) -> fx.Node:
    made = new(instead, operator.getitem, (fused, index), instead.meta["val"])
    made.meta.update({k: instead.meta[k] for k in ("types", *KEPT) if k in instead.meta})
    return made


CONTRACT = PassContract(
    name="fuse_experts",
    requires=frozenset({"sharded"}),
    provides=frozenset({"experts_fused"}),
    conflicts_with=frozenset({"experts_fused", "lowered"}),
)
fuse_experts = Pass(CONTRACT, _run, applies=lambda plan: plan.fuse)
