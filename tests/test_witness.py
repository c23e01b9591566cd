"""Types have a second witness: the ``spmd_types`` checker derives those of sharded graphs anew (``witness.py``).

It accepts every right program, and of the mistakes of ``sabotage.py`` it catches every one in a collective or in a
gradient: dropped, or with the wrong gradient.  What it cannot see are other values of the same type.
"""

from __future__ import annotations

import pytest
import torch
from sabotage import mistakes
from spmd import Shape, compiled
from test_zoo import BY_DEFAULT, FAMILIES, PLANS, make
from witness import WitnessError, witness
from witness_rules import CONVERSIONS, MOEC

from moec.capture.examples import dummy_examples
from moec.compiler import compile_program
from moec.plan import Plan
from moec.program import Program
from moec.runtime.collectives import TABLE

SHAPES = {
    (2, 2, 4, 1): Shape(12, biased=True), (2, 2, 2, 2): Shape(biased=True), (1, 4, 1, 4): Shape(),
    (4, 1, 2, 2): Shape(biased=True),
}  # fmt: skip
UNSEEN = ("ids rolled", "weights rolled", "row numbers rolled", "inverse flipped", "counts reversed")
"""Mistakes that leave every type as it was: rows in another order, other tokens' weights.  The numbers show them
(``test_sabotage.py``)."""


@pytest.mark.parametrize("degrees", SHAPES, ids=str)
def test_a_right_program_is_accepted(degrees) -> None:
    seen = witness(dict(compiled(SHAPES[degrees], degrees))["shard"])
    assert seen.by_rule["moec.grouped_mm"] == 2


@pytest.mark.parametrize(
    "degrees", [(2, 2, 4, 1), *(pytest.param(d, marks=pytest.mark.nightly) for d in list(SHAPES)[1:])], ids=str
)
def test_every_mistake_in_a_collective_is_caught(degrees) -> None:
    program = dict(compiled(SHAPES[degrees], degrees))["shard"]
    missed, caught = [], 0
    for m in mistakes(program):
        try:
            witness(m.program)
            missed.append(m.what)
        except WitnessError:
            caught += 1
    assert not [m for m in missed if not m.startswith(UNSEEN)]
    assert caught > 2 * len(missed), "most of the catalogue are collectives"


def test_every_op_of_moec_has_a_typing_rule() -> None:
    """The dialect's in ``MOEC``, conversions and exchanges by what they do; backwards ops are in no sharded graph."""
    ops = {s.name.removeprefix("moec::") for s in torch._C._jit_get_all_schemas() if s.name.startswith("moec::")}
    backward = {n for n in ops if n.endswith(("_backward", "_wgrad"))} | {"grouped_sum"}
    units = {"pack", "unpack"}  # of parameters that FSDP gathers, behind the graph that is walked here
    assert {f"moec.{n}" for n in ops - backward - units - TABLE.keys()} == MOEC.keys()
    assert {TABLE[n].primitive for n in TABLE} == CONVERSIONS.keys()


def sharded(family: str, plan: tuple[int, int, int, int], layers: int) -> Program:
    model, found = make(family, layers), {}
    args, kwargs = dummy_examples(model, training=True)
    compile_program(model, Plan(*plan), 4, args, kwargs, training=True, observe=found.__setitem__)
    return found["shard"]


@pytest.mark.nightly
def test_family() -> None:
    """Biased experts, sinks, interleaved gate and up, a vocabulary in parts."""
    witness(sharded("gpt_oss", BY_DEFAULT["gpt_oss"], layers=1))


@pytest.mark.nightly
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_family_under_every_plan(family: str, plan: tuple[int, int, int, int]) -> None:
    witness(sharded(family, plan, layers=2))
