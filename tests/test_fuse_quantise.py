"""fuse_quantise: the same bits, forward and backward, and the ops that it leaves."""

import pytest
import torch
from spmd import build, captured, compile_stages, oracle
from test_cast_fp8 import BATCH, SHAPE, calls
from witness import witness

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


def same_bits(got, want):
    assert got.disagreement == 0
    assert all(torch.equal(got.outputs[path], y) for path, y in want.outputs.items())
    for name, g in want.grads.items():
        assert (g is None) == (got.grads[name] is None) and (g is None or torch.equal(got.grads[name], g)), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_permuted_rows_are_quantised_where_they_are_gathered(recipe):
    apart, program = around(recipe)
    assert len(calls(apart, "moec.permute_aligned")) == 1 and not calls(apart, "moec.permute_quantised")
    assert len(calls(program, "moec.permute_quantised")) == 1 and not calls(program, "moec.permute_aligned")
    verify(program)
    witness(program)
    same_bits(run(program), run(apart))


def test_why_not():
    """Rows whose columns' maxima are those of all ranks: ``moec::amax`` reads them too."""
    _, program = around("rowwise", (2, 1, 1, 1))
    assert calls(program, "moec.permute_aligned")
    assert any("the permuted rows are also read by moec.amax" in w for w in program.why_not)
