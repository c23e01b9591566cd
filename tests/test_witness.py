"""Types have a second witness: the ``spmd_types`` checker derives those of sharded graphs anew (``witness.py``).

It accepts every right program, and of the mistakes of ``sabotage.py`` it catches every one in a collective or in a
gradient: dropped, or with the wrong gradient.  What it cannot see are other values of the same type.
"""

from __future__ import annotations

import pytest
from sabotage import mistakes
from spmd import Shape, compiled
from test_zoo import BY_DEFAULT, FAMILIES, PLANS, REFUSED, make
from witness import LACKING, MOEC, PACKED, WitnessError, witness

from moec.capture.examples import dummy_examples
from moec.compiler import compile_program
from moec.plan import Plan
from moec.program import Program
from moec.runtime.collectives import CONVERSIONS, TABLE, collective

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
    """Those of sharded graphs: conversions and exchanges (``witness.CONVERSIONS`` by primitive) and the dialect."""
    used = set()
    for degrees, shape in SHAPES.items():
        for n in dict(compiled(shape, degrees))["shard"].graph.nodes:
            name = getattr(n.target, "namespace", "") == "moec" and n.target._schema.name.replace("::", ".")
            if name and not collective(n.target):
                used.add(name)
    assert used == MOEC.keys()
    assert not MOEC.keys() & (LACKING.keys() | PACKED.keys())
    assert CONVERSIONS and TABLE


def sharded(family: str, plan: tuple[int, int, int, int], layers: int) -> Program:
    model, found = make(family, layers), {}
    args, kwargs = dummy_examples(model, training=True)
    compile_program(model, Plan(*plan), 4, args, kwargs, training=True, observe=found.__setitem__)
    return found["shard"]


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_family(family: str) -> None:
    witness(sharded(family, BY_DEFAULT[family], layers=1))


@pytest.mark.nightly
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_family_under_every_plan(family: str, plan: tuple[int, int, int, int]) -> None:
    if (family, plan) in REFUSED:
        pytest.skip("refused, see test_zoo.py")
    witness(sharded(family, plan, layers=2))
