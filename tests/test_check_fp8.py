"""moec.check of plans in FP8: the oracle is the plan on one rank, in FP8 too."""

from __future__ import annotations

import pytest
from spmd import Batch, Shape, build

import moec
from moec.check import TILES
from moec.passes.fp8_delayed import Histories
from moec.plan import Plan
from moec.precision import Precision

SHAPE = Shape(4, 2, biased=True)


def checked(recipe, degrees=(2, 1, 2, 1), **options):
    plan = Plan(*degrees, precision=Precision(fp8=recipe), **options)
    return moec.check(build(SHAPE), plan, example_inputs=Batch(4, 6, 0, 4).tensors(), world_size=2)


@pytest.mark.parametrize(
    ("recipe", "degrees", "options"),
    [("delayed", (1, 2, 2, 1), {"sequence_parallel": True}), ("current", (2, 1, 2, 1), {}),
     ("blockwise", (2, 1, 2, 1), {})],
)  # fmt: skip
def test_ranks_round_as_one_does(recipe, degrees, options):
    report = checked(recipe, degrees, **options)
    assert report.ok, str(report)
    (cast,) = (p for p in report.passes if p.name == "cast_fp8")
    assert max(cast.outputs.values()) < 1e-12
    assert (cast.loose is not None) == (recipe == "blockwise")
    if recipe == "blockwise":
        assert 1e-12 < max(cast.grads.values()) < TILES and cast.failure(1e-12) is None
    histories = [n for n in cast.grads if n.endswith("_amax_history")]
    assert len(histories) == (7 if recipe == "delayed" else 0) and all(cast.grads[n] == 0 for n in histories)


def test_what_ranks_learn_wrongly_is_seen(monkeypatch):
    note = Histories.note

    def swapped(self, product, x, w, role, counts):
        made = note(self, product, x, w, role, counts)
        if self.program.mesh.world > 1 and counts is None:
            made.args = (made.args[0], made.args[2], made.args[1])
        return made

    monkeypatch.setattr(Histories, "note", swapped)
    name, what, error = checked("delayed").first_failure
    assert name == "cast_fp8" and what.endswith("_amax_history") and error > 1e-3
