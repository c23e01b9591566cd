"""Sabotage: one mistake at a time in right programs; each must show in the numbers, far above the tolerance.

Every collective is dropped in turn, every one that has a gradient swapped with its sibling, every operand of the
experts' ops moved, every gradient reduction left out, every kind given every wrong dual.  What no mistake could show
would be redundant; there is no such thing in these programs.  (The kind of a conversion of a value *without* a gradient
is immaterial, and is not swapped.)

Recorded (float64, relative; printed by ``pytest -s``):

    worst error of a right program      7e-15
    smallest error of a wrong program   1.3e-1
    tolerance                           1e-12
"""

from __future__ import annotations

import pytest
import torch
from sabotage import DROPS, SIBLINGS, mistakes, wrong_duals
from spmd import Batch, Shape, build, compiled, off, oracle

from moec import simulate
from moec.check import TOLERANCE, PassReport
from moec.runtime.collectives import TABLE, collective
from moec.runtime.errors import MoecError
from moec.runtime.world import LockstepWorld

PLANS = [(2, 2, 4, 1), (2, 2, 2, 2), (1, 4, 1, 4), (4, 1, 2, 2)]
CLEAR = 1e-3
"""A mistake must be at least this far off: nine orders of magnitude above the tolerance."""
REFUSED = float("inf")
"""The error of a program that does not even run (shapes or counts that do not fit)."""


class Bench:
    """A model, its programs under a plan, and what they must compute.  Five tokens a sequence: tp pads them.  (Eight
    where ranks share each sequence.)"""

    def __init__(self, degrees: tuple) -> None:
        shape = Shape(12 if degrees[2] == 4 else 6, biased=True)
        self.stages = dict(compiled(shape, degrees))
        self.truth = oracle(build(shape, 3), Batch(max(2, degrees[0]), 5 if len(degrees) == 4 else 8, 1, degrees[0]))
        self.clean = max(off(self.truth.compare(s, self.stages[s])) for s in ("shard", "lower"))

    def error(self, program, world=None) -> float:
        try:
            return off(self.truth.compare("sabotaged", program) if world is None else self._in(world, program))
        except (MoecError, RuntimeError, IndexError):
            return REFUSED

    def _in(self, world: LockstepWorld, program) -> PassReport:
        run = simulate.run
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(simulate, "run", lambda p, params, inputs, cot: run(p, params, inputs, cot, world))
            return self.truth.compare("sabotaged", program)


SHARED = [pytest.param(d, marks=pytest.mark.nightly) for d in ((2, 2, 2, 2, 1, True), (1, 2, 4, 1, 2, True))]
"""Sequence parallelism; context parallelism with it: (dp, tp, ep, etp, cp, sequence_parallel)."""


@pytest.fixture(scope="module", params=PLANS + SHARED, ids=str)
def bench(request) -> Bench:
    return Bench(request.param)


def verdict(bench: Bench, found: list[tuple[float, str]]) -> None:
    missed = sorted(f"{error:.1e} {what}" for error, what in found if error < CLEAR)
    print(f"\n{len(found)} mistakes: clean {bench.clean:.1e}, smallest sabotaged {min(found)[0]:.1e} ({min(found)[1]})")
    assert not missed
    assert bench.clean < TOLERANCE / 10


def test_every_mistake_in_the_graph_is_caught(bench: Bench) -> None:
    found = [(bench.error(m.program), m.what) for m in mistakes(bench.stages["shard"])]
    verdict(bench, found)
    assert len(found) > 15
    assert sum(e == REFUSED for e, _ in found) * 3 < len(found), "most must run, and show in the numbers"


def test_every_mistake_in_the_gradient_epilogue_is_caught(bench: Bench) -> None:
    program = bench.stages["lower"]
    assert program.grad_reductions
    verdict(bench, [(bench.error(m.program), m.what) for m in mistakes(program) if m.what.startswith("the gradient")])


def test_every_wrong_dual_is_caught(bench: Bench) -> None:
    program = bench.stages["shard"]
    todo = list(wrong_duals(program))
    verdict(bench, [(bench.error(program, LockstepWorld(program.mesh, table)), what) for what, table in todo])
    assert len(todo) > 6


def test_the_catalogue_knows_every_collective() -> None:
    """A kind that a plan uses and that nobody knows how to drop would be left out without a word."""
    used = set()
    for degrees in PLANS:
        nodes = compiled(Shape(12 if degrees[2] == 4 else 6, biased=True), degrees)[-2][1].graph.nodes
        used |= {c.kind for n in nodes if n.op == "call_function" and (c := collective(n.target))}
    assert used <= DROPS.keys()
    assert {"i_to_r", "p_to_i", "p_to_s", "s_to_r", "s_to_i", "i_to_s", "all_to_all", "exchange_counts"} <= used
    assert all(TABLE[a].primitive == TABLE[b].primitive for a, b in SIBLINGS.items())


def test_a_right_program_in_a_world_of_its_own_is_clean(bench: Bench) -> None:
    """What catches the duals is the table, not the detour by which it is passed."""
    program = bench.stages["shard"]
    assert bench.error(program, LockstepWorld(program.mesh)) < TOLERANCE
    assert torch.isfinite(torch.tensor(bench.clean))
