"""fuse_quantise: the same FP8 numbers, forward and backward, the ops that it leaves, and what is kept."""

import pytest
import torch
from spmd import build, captured, compile_stages, oracle
from test_cast_fp8 import BATCH, SHAPE, calls
from witness import witness

from moec.check import _relative
from moec.passes.verify import verify
from moec.plan import Plan
from moec.precision import Precision

RECIPES = ["current", "blockwise", *(pytest.param(r, marks=pytest.mark.nightly) for r in ("rowwise", "mxfp8"))]


def around(recipe, degrees=(1, 1, 1, 1), shape=SHAPE, **options):
    """The program before the pass, and behind it."""
    precision = Precision(fp8=recipe, exclude=("first", "last"))
    stages = dict(compile_stages(captured(shape), Plan(*degrees, precision=precision, **options)))
    return stages["fuse_experts"], stages["fuse_quantise"]


def run(program):
    return oracle(build(SHAPE), BATCH)._run(program)


def same(got, want, tolerance=1e-12):
    """FP8 numbers are the same, so nothing is off by more than the last bits of float64."""
    assert got.disagreement == 0
    assert all(torch.equal(got.outputs[path], y) for path, y in want.outputs.items())
    for name, g in want.grads.items():
        assert (g is None) == (got.grads[name] is None), name
        assert g is None or _relative(got.grads[name], g, 1e-9) < tolerance, name


@pytest.mark.parametrize("recipe", RECIPES)
def test_operands_are_quantised_where_they_are_made(recipe):
    apart, program = around(recipe)
    names = ("moec.permute_aligned", "moec.permute_quantised", "moec.fp8_grouped_mm", "moec.fp8_grouped_act")
    assert [len(calls(apart, n)) for n in names] == [1, 0, 2, 0]
    assert [len(calls(program, n)) for n in names] == [0, 1, 1, 1]
    assert not any(n.args[5] == "rows" and n.args[3] is not None for n in calls(program, "moec.quantise"))
    assert not any("op by op" in w or "an op of its own" in w for w in program.why_not), program.why_not
    verify(program)
    witness(program)
    same(run(program), run(apart))


NIGHTLY = pytest.param("blockwise", (2, 2, 2, 2), marks=pytest.mark.nightly)


@pytest.mark.parametrize(("recipe", "degrees"), [("mxfp8", (2, 1, 2, 1)), NIGHTLY])
def test_on_several_ranks(recipe, degrees):
    """Rows come from an exchange, and are aligned behind it; the activation is fused all the same."""
    apart, program = around(recipe, degrees)
    assert len(calls(program, "moec.fp8_grouped_act")) == 1
    verify(program)
    witness(program)
    same(run(program), run(apart))


def test_why_not():
    """Rows whose columns' maxima are those of all ranks: ``moec::amax`` reads them too."""
    _, program = around("rowwise", (2, 1, 1, 1))
    assert calls(program, "moec.permute_aligned")
    assert any("the permuted rows are also read by moec.amax" in w for w in program.why_not)
    assert any("its scales are made from more than these rows" in w for w in program.why_not), "the activation's"
