"""fuse_quantise: what experts' FP8 products take is quantised where it is made.

Contract
    requires   fp8
    provides   quantise_fused
    preserves  values; activations are rounded once, where their functions were rounded one by one
    never      moves a collective, or changes which elements share a scale

Why: rows of a permute, and the activations of experts, would be written in a wide dtype only to be read once and
written again in FP8.

Algorithm, for every ``moec::quantise`` of experts' rows:
    1. Rows that a ``moec::permute_aligned`` makes, and nobody else reads: both become ``moec::permute_quantised``.
    2. Rows that pointwise nodes (``outline_body``) make of first products in FP8: these, the nodes and the quantise
       become ``moec::fp8_grouped_act``.  The products' gradients are then quantised inside of it, so their scales must
       be those of these rows alone.
    3. What stays as it is, is in ``why_not`` with the reason.
"""

from __future__ import annotations

import torch
from torch import fx

from moec.passes.contract import Pass, PassContract
from moec.passes.outline_body import Declined, outline
from moec.passes.shard.rule import is_getitem
from moec.passes.typed import result, sweep, typed
from moec.plan import Plan
from moec.program import Program, op_name

moec_ops = torch.ops.moec
PRODUCT = "moec.fp8_grouped_mm"
ROWS = ("moec.align_rows", "getitem")
"""What makes rows that come from elsewhere."""


def _run(program: Program, plan: Plan) -> Program:
    for node in program.graph.find_nodes(op="call_function", target=moec_ops.quantise.default):
        if node.args[3] is None or node.args[5] != "rows":
            continue
        try:
            if _item_of(node.args[0], "moec.permute_aligned", 0):
                _permuted(program, node)  # 1
            elif op_name(node.args[0]) not in ROWS:
                _activation(program, node)  # 2
        except Declined as e:  # 3
            program.why_not.append(f"{node.meta.get('where', '')}: quantised by an op of its own: {e}")
    program.graph.lint()
    program.module.recompile()
    return program


def _item_of(node: fx.Node, name: str, index: int) -> bool:
    """Is ``node`` result ``index`` of an op of this name?"""
    return is_getitem(node) and node.args[1] == index and op_name(node.args[0]) == name


def _permuted(program: Program, quantise: fx.Node) -> None:
    rows, amax, amax_T, counts, recipe, _, both = quantise.args
    permute = rows.args[0]
    if others := [u for u in rows.users if u is not quantise]:
        raise Declined(f"the permuted rows are also read by {', '.join(sorted({op_name(u) for u in others}))}")
    if not _item_of(counts, "moec.permute_aligned", 2) or counts.args[0] is not permute:
        raise Declined("its counts are not those of the permute")
    order = {n: i for i, n in enumerate(program.graph.nodes)}
    items = [u for u in permute.users if u is not rows and u.users]
    if early := [u for item in items for u in item.users if order[u] < order[quantise]]:
        raise Declined(f"{early[0].name} needs to know where the rows lie before they are quantised")
    x, ids, num_experts, *_ = permute.args
    made = typed(program, quantise, moec_ops.permute_quantised.default, x, ids, num_experts, amax, amax_T, recipe, both)
    found = results_like(program, made, quantise, 7)
    for item in items:
        item.replace_all_uses_with(found[{2: 5, 3: 6}[item.args[1]]])
    for dead in (*quantise.users, *(u for u in permute.users if u is not rows)):
        sweep(dead)


def is_product(node: object, counts: fx.Node) -> bool:
    """A first product in FP8, over these counts."""
    return isinstance(node, fx.Node) and _item_of(node, PRODUCT, 0) and node.args[0].args[2] is counts


def _activation(program: Program, quantise: fx.Node) -> None:
    act, amax, amax_T, counts, recipe, _, both = quantise.args
    if any(op_name(u) == "moec_te.fp8_grouped_mm" for u in counts.users):
        raise Declined("its first products are Transformer Engine's, which compute no activation")
    if amax is not None or amax_T is not None:
        raise Declined("its scales are made from more than these rows")
    body, sums, between = outline(act, counts, program.mesh, is_product)
    bare = [p if is_product(p, counts) else p.args[0] for p in sums]
    products = [p.args[0] for p in bare]
    x, x_q = products[0].args[0], [products[0].args[i] for i in (3, 4, 7, 8)]
    if any(p.args[0] is not x or [p.args[i] for i in (3, 4, 7, 8)] != x_q for p in products):
        raise Declined("first products of different rows")
    if any(p.args[11] is not None or p.args[13] for p in products):
        raise Declined("scales of its gradient are made from more than these rows")
    biases = [p.args[1] for p in sums if p not in bare]
    if biases and len(biases) != len(products):
        raise Declined("a bias for some first products only")
    old = {*between, *sums, *bare}
    if others := [u for n in old for u in n.users if u not in old and u is not quantise]:
        raise Declined(f"what is between the products is also used by {op_name(others[0])}")
    of = [[p.args[i] for p in products] for i in (1, 5, 6, 9, 10)]
    args = (x, of[0], biases, counts, *x_q[:2], *of[1:3], *x_q[2:], *of[3:], body.text(), recipe, both)
    results_like(program, typed(program, quantise, moec_ops.fp8_grouped_act.default, *args), quantise, 5)
    for dead in tuple(quantise.users):
        sweep(dead)


def results_like(program: Program, made: fx.Node, quantise: fx.Node, number: int) -> list[fx.Node]:
    """The results of ``made``, of which the first five take the place of those of ``quantise``."""
    found = [result(program, made, i) for i in range(number)]
    for n in found[1:]:
        n.meta["grad"] = False
    for item in quantise.users:
        item.replace_all_uses_with(found[item.args[1]])
    return found


CONTRACT = PassContract(
    name="fuse_quantise",
    requires=frozenset({"fp8"}),
    provides=frozenset({"quantise_fused"}),
    conflicts_with=frozenset({"quantise_fused", "lowered"}),
)
fuse_quantise = Pass(
    CONTRACT, _run, applies=lambda plan: plan.fuse and plan.precision is not None and plan.precision.fp8 is not None
)
