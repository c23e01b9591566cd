"""Evaluation in FP8: what training's forward computes, on any number of ranks; and a backward of it is refused."""

from __future__ import annotations

import pytest
import torch
from spmd import Batch, Shape, build, oracle
from witness import witness

import moec
from moec.compiler import compile_program
from moec.overlap import Overlap
from moec.passes.verify import verify
from moec.plan import Plan
from moec.precision import Precision
from moec.program import op_name
from moec.runtime.errors import MoecError

SHAPE, BATCH = Shape(4, 2, biased=True), Batch(4, 6, 0, 4)
SP, EP = ((1, 2, 2, 1), {"sequence_parallel": True}), ((2, 1, 2, 1), {})


def outputs(recipe, training, degrees, options, **precision):
    """Of simulated ranks, in float64."""
    model, plan = build(SHAPE).train(training), Plan(*degrees, precision=Precision(fp8=recipe, **precision), **options)
    stages = {}
    program = compile_program(
        model, plan, plan.dp * plan.tp, BATCH.tensors(), {}, training=training,
        observe=lambda name, p: stages.update({name: p}),
    )  # fmt: skip
    verify(stages["commute_quantise"])
    witness(stages["commute_quantise"])
    products = [n for n in program.graph.nodes if op_name(n) in ("moec.fp8_linear", "moec.fp8_grouped_mm")]
    truth = oracle(model, BATCH)
    truth.cotangents = {}
    return truth._run(program).outputs, len(products)


CASES = [("delayed", *EP), ("delayed", *SP), ("rowwise", *SP)]
MORE = [("current", *SP), ("mxfp8", *EP), ("blockwise", *EP), ("current", *EP)]


@pytest.mark.parametrize(
    ("recipe", "degrees", "options"), [*CASES, *(pytest.param(*c, marks=pytest.mark.nightly) for c in MORE)], ids=str
)
def test_ranks_evaluate_what_one_trains(recipe, degrees, options):
    precision = {"dispatch": "fp8"} if "sequence_parallel" not in options else {}
    got, count = outputs(recipe, False, degrees, options, **precision)
    want, _ = outputs(recipe, True, (1, 1, 1, 1), {}, **precision)
    assert count >= 5, "they do compute in FP8"
    for path, value in want.items():
        assert float((got[path] - value).norm() / value.norm()) < 1e-12, path


@pytest.mark.parametrize("overlap", [None, Overlap()], ids=["plain", "scheduled"])
@pytest.mark.parametrize("exclude", [("first", "last"), ("*attention*", "last")], ids=["linear", "experts"])
def test_a_model_is_evaluated_and_trained_on(overlap, exclude):
    """``exclude``: which op a backward meets first."""
    plan = Plan(precision=Precision(fp8="current", exclude=exclude), overlap=overlap)
    model = moec.parallelize(build(SHAPE), plan, example_inputs=BATCH.tensors())
    loss = model(*BATCH.tensors())["loss"]
    evaluated = model.eval()(*BATCH.tensors())["loss"]
    with torch.no_grad():
        assert torch.equal(model(*BATCH.tensors())["loss"], evaluated)
    torch.testing.assert_close(evaluated, loss, rtol=1e-6, atol=0)
    with pytest.raises(MoecError, match="for evaluation alone") as e:
        evaluated.backward()
    assert "model.train()" in e.value.way_out
    loss.backward()
    model.train()(*BATCH.tensors())["loss"].backward()
