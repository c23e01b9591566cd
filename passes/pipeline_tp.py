"""pipeline_tp: gathers before products and reductions behind them in pieces, so that some travel while others are
computed.

Contract
    requires   irredundant
    provides   pipelined_tp: an all-gather of a shared sequence that products read, or a reduce-scatter of one that they
               yield, is as many as there are pieces
    preserves  values, forward and backward (weight gradients are formed in another order)
    never      touches experts (``chunk_experts`` does), or a collective of parameters

Each piece is its own start and wait, beside a product of its own, and so in the backward: the gradient of a gather is a
reduce-scatter behind a product, and the other way round.

Algorithm
    1. The sites: gathers and reduce-scatters of the sequence over axes of tp, next to a ``linear`` (views between).
    2. Around them grows the region that is token by token (``chunks/region.py``): from a reduce-scatter on over the
       residual stream and the norm to the next gather, and on to what mixes tokens (attention).
    3. The region is written piece by piece.  A value whose blocks of all ranks lie side by side is cut and joined block
       by block.  What stays whole is in ``why_not``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import fx

from moec.passes.chunks.apply import Groups, chunk
from moec.passes.chunks.region import Layout
from moec.passes.chunks.rows import Tokens
from moec.passes.contract import Pass, PassContract
from moec.plan import Plan
from moec.program import Program
from moec.runtime.collectives import collective, group_of
from moec.runtime.torch_compat import expr

aten = torch.ops.aten
BESIDE = (aten.reshape.default, aten.add.Tensor)
"""Views, and a bias, between a collective and its product."""


def _run(program: Program, plan: Plan) -> Program:
    assert plan.overlap is not None
    groups: Groups = defaultdict(list)
    for start in program.graph.nodes:
        if _is_site(program, start):  # 1
            (wait,) = start.users
            tokens = expr(start.meta["val"].shape[0]) * expr(start.meta["val"].shape[1])
            stream = start.args[0] if _gathers(start) else start
            groups[Tokens(tokens), Layout.of(stream.meta["types"], 2)].append(frozenset({start, wait}))
    chunk(program, groups, plan.overlap.pipeline_tp, declined="not in pieces", experts=False)  # 2 and 3
    return program


def _gathers(start: fx.Node) -> bool:
    entry = collective(start.target)
    return entry is not None and entry.primitive == "all_gather"


def _is_site(program: Program, node: fx.Node) -> bool:
    entry = collective(node.target)
    if entry is None or entry.primitive not in ("all_gather", "reduce_scatter") or "chunk" in node.meta:
        return False
    if node.args[1] != 1 or not set(group_of(node).split(",")) <= set(program.mesh.role("tp")):
        return False
    if not expr(node.meta["val"].shape[0]).free_symbols:  # parameters have fixed sizes
        return False
    (wait,) = node.users
    return _product(wait.users, True) if _gathers(node) else _product([node.args[0]], False)


def _product(nodes: Iterable[fx.Node], behind: bool) -> bool:
    """Is one of ``nodes`` a product, or is there one behind (before) it?"""
    for node in nodes:
        if node.target is aten.linear.default:
            return True
        if node.target in BESIDE and _product(node.users if behind else node.all_input_nodes, behind):
            return True
    return False


CONTRACT = PassContract(
    name="pipeline_tp",
    requires=frozenset({"irredundant"}),
    provides=frozenset({"pipelined_tp"}),
    conflicts_with=frozenset({"pipelined_tp", "lowered"}),
)


def _applies(plan: Plan) -> bool:
    if plan.overlap is None or plan.overlap.pipeline_tp == 1 or not plan.sequence_parallel or plan.tp == 1:
        return False
    # Where ``fuse_tp`` makes one op of a transfer and its products, that is in parts already; it leaves FP8 alone.
    return plan.overlap.symmetric_memory is not True or (plan.precision is not None and plan.precision.fp8 is not None)


pipeline_tp = Pass(CONTRACT, _run, applies=_applies)
