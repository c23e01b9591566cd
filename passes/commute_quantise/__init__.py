"""commute_quantise: what is quantised behind a collective is quantised before it, and travels as FP8.

Contract
    requires   fp8
    provides   commuted: gathers of FP8 weights carry bytes
    preserves  values: operands and scales to the bit
    never      touches a value that somebody reads in high precision
"""

from __future__ import annotations

from moec.passes.commute_quantise.weights import commute_weights
from moec.passes.contract import Pass, PassContract
from moec.plan import Plan
from moec.program import Program
from moec.runtime.fp8 import Recipe


def _run(program: Program, plan: Plan) -> Program:
    assert plan.precision is not None and plan.precision.fp8 is not None
    commute_weights(program, Recipe.parse(plan.precision.fp8))
    program.graph.lint()
    program.module.recompile()
    return program


CONTRACT = PassContract(
    name="commute_quantise",
    requires=frozenset({"fp8"}),
    provides=frozenset({"commuted"}),
    conflicts_with=frozenset({"commuted", "units", "experts_fused", "lowered"}),
)
commute_quantise = Pass(
    CONTRACT, _run, applies=lambda plan: plan.precision is not None and plan.precision.fp8 is not None
)
__all__ = ["CONTRACT", "commute_quantise"]
