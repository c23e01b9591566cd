"""statistics: what every MoE block's router chose leaves the graph beside the outputs, for people.

Contract
    requires   raised
    provides   counted: ``program.statistics`` has one ``<block>:tally`` for each block
    preserves  values
    never      communicates: what a rank counts of its own tokens stays a pending sum, and is summed when asked for

For each ``permute`` a ``moec.tally``: of the ids that it deals out, all there is to see of a user's own router; of a
``moec.route`` also of its logits, and of what it had chosen before a ``moec.drop``.  Padding is not counted: what the
router was told of it, else what the model's ``attention_mask`` says.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from moec.passes.contract import Pass, PassContract
from moec.passes.rewrite import apply
from moec.passes.tokens import Tokens
from moec.plan import Plan
from moec.program import Program
from moec.runtime.route_spec import RouteSpec
from moec.runtime.torch_compat import OpOverload

aten, moec_ops = torch.ops.aten, torch.ops.moec


def _run(program: Program, plan: Plan) -> Program:
    tokens = Tokens(program)
    for node in program.graph.find_nodes(op="call_function", target=moec_ops.permute.default):
        _, ids, num_experts = node.args
        chosen, kept, logits, valid, score = ids, None, None, None, "softmax_pre"
        if (drop := _source(ids, moec_ops.drop.default)) is not None:
            chosen, kept = drop.args[1], ids
        route = _source(chosen, moec_ops.route.default)
        with program.graph.inserting_before(node):
            if route is not None:
                logits, _, valid, _, spec = route.args
                logits, score = apply(logits, aten.detach.default, logits), RouteSpec.parse(spec).score
            if valid is None:
                valid = tokens.valid(ids, None)
            tally = apply(ids, moec_ops.tally.default, chosen, kept, logits, valid, num_experts, score)
        program.add_statistic(f"{node.meta.get('where', '')}:tally", tally)
    program.graph.lint()
    program.module.recompile()
    return program


def _source(ids: fx.Node, op: OpOverload) -> fx.Node | None:
    """The node of ``op`` that yields ``ids`` as its second result."""
    source = ids.args[0] if ids.target is operator.getitem and ids.args[1] == 1 else None
    return source if isinstance(source, fx.Node) and source.target is op else None


CONTRACT = PassContract(
    name="statistics",
    requires=frozenset({"raised"}),
    provides=frozenset({"counted"}),
    conflicts_with=frozenset({"sharded", "counted"}),
)
statistics = Pass(CONTRACT, _run)
