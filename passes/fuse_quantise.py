"""fuse_quantise: what experts' FP8 products take is quantised where it is made.

Contract
    requires   fp8
    provides   quantise_fused
    preserves  values, to the bit
    never      moves a collective, or changes which elements share a scale

Why: rows of a permute, and the activations of experts, would be written in a wide dtype only to be read once and
written again in FP8.

Algorithm, for every ``moec::quantise`` of experts' rows:
    1. Rows that a ``moec::permute_aligned`` makes, and nobody else reads: both become ``moec::permute_quantised``.
    2. What stays two ops is in ``why_not`` with the reason.
"""

from __future__ import annotations

import torch
from torch import fx

from moec.passes.contract import Pass, PassContract
from moec.passes.outline_body import Declined
from moec.passes.shard.rule import is_getitem
from moec.passes.typed import result, sweep, typed
from moec.plan import Plan
from moec.program import Program, op_name

moec_ops = torch.ops.moec


def _run(program: Program, plan: Plan) -> Program:
    for node in program.graph.find_nodes(op="call_function", target=moec_ops.quantise.default):
        if node.args[3] is None or node.args[5] != "rows":
            continue
        try:
            if _item_of(node.args[0], "moec.permute_aligned", 0):
                _permuted(program, node)  # 1
        except Declined as e:  # 2
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
