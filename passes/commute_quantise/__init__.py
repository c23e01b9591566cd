"""commute_quantise: what is quantised anyway, or asked to be, is quantised before it travels.

Contract
    requires   sharded; where products compute in FP8, fp8: what arrives becomes their operands
    provides   commuted: gathers of FP8 weights, and rows that ``Precision.dispatch`` or ``combine`` name, carry bytes
    preserves  operands and scales of weights and of gathered rows, to the bit.  Rows are rounded on their way where a
               plan asks for it, at any number of ranks, one among them, and so all of them compute the same
    never      rounds twice what an FP8 product reads; moves what somebody reads in high precision

A rewrite each:

``weights``    FP8 weights that FSDP gathers
``sequence``   rows that sequence parallelism gathers for FP8 products
``dispatch``   tokens on their way to their experts (``Precision.dispatch``)
``combine``    results on their way back, and their gradients (``Precision.combine``)
"""

from __future__ import annotations

from moec.passes.cast_fp8 import recipe_of
from moec.passes.commute_quantise.combine import combine
from moec.passes.commute_quantise.dispatch import dispatch
from moec.passes.commute_quantise.sequence import sequence
from moec.passes.commute_quantise.weights import commute_weights
from moec.passes.contract import Pass, PassContract
from moec.plan import Plan
from moec.program import Program


def _run(program: Program, plan: Plan) -> Program:
    precision = plan.precision
    assert precision is not None
    if precision.fp8 is not None:
        commute_weights(program, recipe_of(precision))
        sequence(program, recipe_of(precision))
    if precision.dispatch is not None:
        dispatch(program, precision.payload("dispatch"))
    if precision.combine is not None:
        combine(program, precision.payload("combine"))
    program.graph.lint()
    program.module.recompile()
    return program


def _applies(plan: Plan) -> bool:
    p = plan.precision
    return p is not None and any(x is not None for x in (p.fp8, p.dispatch, p.combine))


CONTRACT = PassContract(
    name="commute_quantise",
    requires=frozenset({"sharded"}),
    provides=frozenset({"commuted"}),
    conflicts_with=frozenset({"commuted", "units", "experts_fused", "lowered"}),
    preserves_values=False,
)
commute_quantise = Pass(CONTRACT, _run, _applies)
__all__ = ["CONTRACT", "commute_quantise"]
