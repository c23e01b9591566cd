"""fuse_router, fuse_permute and fuse_cross_entropy: what becomes one op, what stays apart and why.

That fused programs compute what the user's module does, every other test of whole programs shows; here it is shown for
losses of every reduction where the vocabulary is whole, and for bf16.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from spmd import Shape, off
from spmd import captured as captured_model
from test_vocab import LM, V, batch, captured, reductions, rows, shifted, smoothed_and_weighted, stages
from torch import Tensor

import moec
from moec import Plan, Router
from moec.check import TOLERANCE, _Oracle
from moec.compiler import PIPELINE
from moec.passes import manager
from moec.program import Program, op_name


def compiled(plan: Plan, world: int, shape: Shape) -> Program:
    program = captured_model(shape).fork()
    program.mesh = plan.mesh(world)
    return manager.run(program, plan.resolve(world), PIPELINE)


def counts(program: Program) -> Counter:
    return Counter(op_name(n) for n in program.graph.nodes if n.op == "call_function")


def named(program: Program, op: str) -> list:
    return [n for n in program.graph.nodes if n.op == "call_function" and op_name(n) == op]


def test_what_becomes_one_op():
    shape = Shape(biased=True)
    plain = counts(compiled(Plan(dp=2, ep=2, fuse=False), 2, shape))
    program = compiled(Plan(dp=2, ep=2), 2, shape)
    fused = counts(program)
    apart = "moec.route", "moec.tally", "moec.unpermute", "aten.cross_entropy_loss"
    joined = "moec.route_counted", "moec.unpermute_add", "moec.cross_entropy"
    assert [plain[op] for op in apart] == [1] * 4 and not any(plain[op] for op in joined)
    assert [fused[op] for op in joined] == [1] * 3 and not any(fused[op] for op in apart)
    (add,) = named(program, "moec.unpermute_add")
    assert len(add.args[0]) == 2  # the shared expert, and then the residual stream
    norms = fused["moec.rms_norm"]  # each of which adds its epsilon
    assert norms > 0 and fused["aten.add"] == plain["aten.add"] - 2 - norms
    moves = [op for op in plain if op.startswith(("moec.all", "moec.exchange", "_c10d"))]
    assert moves and {op: fused[op] for op in moves} == {op: plain[op] for op in moves}


@pytest.mark.nightly
def test_a_balancing_loss_is_summed_by_the_router_where_its_tokens_are_one_sequence_of_rows():
    program = compiled(Plan(dp=2, ep=2, router=Router(aux_loss={"micro_batch": 0.1, "sequence": 0.1})), 2, Shape())
    (joined,) = named(program, "moec.route_counted")
    assert joined.args[-1] is True and joined.args[0].meta["grad"]
    (by_sequence,) = named(program, "moec.balance")
    assert by_sequence.args[0].meta["val"].ndim == 3


@pytest.mark.nightly
def test_pairs_that_are_dropped_behind_the_router_are_counted_there():
    program = compiled(Plan(dp=2, ep=2, router=Router(capacity_factor=1.0)), 2, Shape())
    assert [len(named(program, f"moec.{op}")) for op in ("route", "drop", "tally", "route_counted")] == [1, 1, 1, 0]
    assert any("stay apart: pairs are dropped between the two" in w for w in program.why_not)


PLANS = [Plan(2), pytest.param(Plan(1, 2), marks=pytest.mark.nightly)]


@pytest.mark.parametrize("loss", [reductions, smoothed_and_weighted])
@pytest.mark.parametrize("plan", PLANS, ids=["whole", "in parts"])
def test_losses(loss, plan):
    model, _ = captured(loss, tied=True)
    seen = stages(loss, plan, tied=True)
    assert off(_Oracle(model, batch(), {}, None).compare("lower", seen["lower"])) < TOLERANCE
    before, after = counts(seen["bundle"]), counts(seen["lower"])
    if plan.dp == 1:
        assert before["moec.blocked_logsumexp"] > 0 == after["moec.blocked_logsumexp"]
        assert after["moec.logsumexp_pick"] == before["moec.blocked_logsumexp"] and not after["moec.pick"]
    else:
        # Classes in dim 1 of three, and classes with weights, stay what they are; the others do not.
        left = {reductions: 1, smoothed_and_weighted: 2}[loss]
        assert after["aten.cross_entropy_loss"] == left
        assert after["moec.cross_entropy"] == before["aten.cross_entropy_loss"] - left > 0
        assert sum("cross entropy is not fused" in w for w in seen["lower"].why_not) == left


def test_logits_that_the_model_widens_are_read_as_they_are():
    """No fp32 copy of them, forward or backward; the loss is that of the model's own fp32 arithmetic."""
    torch.manual_seed(0)
    model = LM(shifted).bfloat16()
    found = {}
    for fuse in (True, False):
        module = moec.parallelize(model, Plan(fuse=fuse), example_inputs=batch())
        out = module(*batch())
        out["loss"].backward()
        found[fuse] = module.program, out["loss"].detach(), dict(module.named_parameters())["head.weight"].grad
    wide = [
        n.name for n in found[True][0].graph.nodes
        if isinstance(v := n.meta.get("val"), Tensor) and v.dtype == torch.float32 and V in v.shape[-1:]
    ]  # fmt: skip
    assert wide == []
    (op,) = named(found[True][0], "moec.cross_entropy")
    assert op.args[0].meta["val"].dtype == torch.bfloat16
    assert found[True][1].dtype == torch.float32
    torch.testing.assert_close(found[True][1], found[False][1], rtol=1e-6, atol=0)
    torch.testing.assert_close(found[True][2], found[False][2], rtol=2**-7, atol=1e-3)


@pytest.mark.nightly
def test_probabilities_as_targets_stay_what_they_are():
    def soft(model, logits, labels):
        x, y = rows(logits, labels)
        return {"loss": F.cross_entropy(x, F.one_hot(y.clamp(min=0), V).to(x.dtype))}

    program = stages(soft, Plan(2))["lower"]
    assert named(program, "aten.cross_entropy_loss") and not named(program, "moec.cross_entropy")
    assert any("its targets are probabilities" in w for w in program.why_not)
