"""raise_moe: proves that every MoE block of the graph is the block that the user wrote.

Contract
    requires   normalized
    provides   raised: every region ``permute … unpermute`` belongs to a block that was probed
    preserves  values
    never      accepts a block on the strength of a match alone

A data-dependent loop cannot be expressed as a graph first and rewritten later, so capture *proposes*: it observes the
block and emits the canonical dialect (``moec.permute``, ``moec.grouped_mm``, ``moec.unpermute``).  This pass *proves*:

1. Every permute has exactly one unpermute, and belongs to a recorded block.
2. Each block carries its probe: the user's own module in eager mode and the raised form ran in float64 on random
   inputs, with empty experts, other sizes and skewed routing among them; outputs and every gradient must agree.
   (Capture runs it, once for blocks that compute alike; ``moec.capture.probe`` repeats it.)
3. A top-k that no region uses is noted in ``why_not``; with ep or etp above 1 a block that was not raised is refused,
   and so is a model in which ep finds no block.
"""

from __future__ import annotations

from collections import Counter

from moec.passes.contract import Pass, PassContract
from moec.plan import Plan
from moec.program import Program, op_name
from moec.runtime.errors import MoecError

TOLERANCE = 1e-9
"""Largest relative difference of a probe in float64: clean blocks are below 1e-13, a wrong expert is of order 1."""


def _run(program: Program, plan: Plan) -> Program:
    regions = Counter(n.meta.get("where", "") for n in program.graph.nodes if op_name_of(n) == "moec.permute")  # 1
    closed = Counter(n.meta.get("where", "") for n in program.graph.nodes if op_name_of(n) == "moec.unpermute")
    known = {b.path for b in program.blocks}
    if regions != closed or not set(regions) <= known:
        raise MoecError(
            f"expert regions {dict(regions)} do not match combines {dict(closed)} and blocks {sorted(known)}",
            where="raise_moe",
        )
    for block in program.blocks:  # 2
        report = block.guide.report
        if not report.max_rel_error <= TOLERANCE:
            raise MoecError(
                f"the raised block differs from the module in eager mode by {report.max_rel_error:.3g} "
                f"(relative; {report.cases})",
                where=block.path,
                way_out="write the block as a loop over experts, each applied to its tokens and weighted by the router",
            )
    unraised = [w for w in program.why_not if "not raised" in w]  # 3
    if unraised and (plan.ep > 1 or (plan.etp or 1) > 1):
        raise MoecError(
            "; ".join(unraised),
            where="raise_moe",
            way_out=f"a plan with ep=1 and etp=1 runs the block as it is (asked for: ep={plan.ep}, etp={plan.etp})",
        )
    if plan.ep > 1 and not program.blocks:
        raise MoecError(
            f"ep={plan.ep} shards experts, and no MoE block was found in this model",
            where="raise_moe",
            way_out="ep=1; or write the block so that one module owns the experts and loops over them",
        )
    return program


def op_name_of(node) -> str:
    return op_name(node) if node.op == "call_function" else ""


CONTRACT = PassContract(
    name="raise_moe",
    requires=frozenset({"normalized"}),
    provides=frozenset({"raised"}),
    conflicts_with=frozenset({"sharded"}),
)
raise_moe = Pass(CONTRACT, _run)
