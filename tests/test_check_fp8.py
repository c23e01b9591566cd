"""moec.check of plans in FP8 and with payloads: the oracle is the plan on one rank, which rounds too."""

from __future__ import annotations

import pytest
from spmd import Batch, Shape, build

import moec
from moec.check import TILES
from moec.passes.commute_quantise.dispatch import _Dispatch
from moec.passes.fp8_delayed import Histories
from moec.plan import Plan
from moec.precision import Precision
from moec.router import Router
from moec.runtime.ops.past_amax import ROWS

SHAPE = Shape(4, 2, biased=True)


def checked(recipe, degrees=(2, 1, 2, 1), precision=None, **options):
    plan = Plan(*degrees, precision=Precision(fp8=recipe, **(precision or {})), **options)
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


BOTH, THERE = {"dispatch": "fp8", "combine": "fp8"}, {"dispatch": "fp8"}
SLOTS = {"dispatch": "static", "router": Router(capacity_factor=0.5)}


@pytest.mark.parametrize(
    ("recipe", "precision", "options"),
    [("rowwise", BOTH, {}), ("current", THERE | {"exclude": ("*moe*",)}, {}), (None, BOTH | {"compute": "bf16"}, {}),
     ("delayed", THERE | {"margin": 2}, SLOTS)],
    ids=["rowwise", "current", "no products", "delayed"],
)  # fmt: skip
def test_payloads_round_as_on_one_rank(recipe, precision, options):
    """What products do not round, payloads do: it is no mistake, and what comes later is held against it."""
    report = checked(recipe, precision=precision, **options)
    assert report.ok, str(report)
    assert max(p.worst()[1] for p in report.passes) < 1e-12
    (commuted,) = (p for p in report.passes if p.name == "commute_quantise")
    assert commuted.grads


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_what_ranks_round_wrongly_on_the_way_is_seen(recipe, monkeypatch):
    """By another recipe, or by the weight's history, where there are several ranks."""
    begin, past = _Dispatch.__init__, _Dispatch._past

    def of_another_recipe(self, program, payload):
        begin(self, program, "blockwise" if program.mesh.world > 1 else payload)

    def of_the_weight(self, move, x):
        made = past(self, move, x)
        if self.program.mesh.world > 1:
            made.args = (made.args[0], ROWS.index("weight"), *made.args[2:])
        return made

    if recipe == "delayed":
        monkeypatch.setattr(_Dispatch, "_past", of_the_weight)
    else:
        monkeypatch.setattr(_Dispatch, "__init__", of_another_recipe)
    report = checked(recipe, precision=THERE | ({} if recipe == "delayed" else {"exclude": ("*moe*",)}))
    name, _, error = report.first_failure
    assert name == "commute_quantise" and error > 1e-3
