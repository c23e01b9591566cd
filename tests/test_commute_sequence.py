"""commute_quantise, sequence: what sequence parallelism gathers for FP8 products carries FP8.

Legend: B batch, S sequence, H hidden, W bytes a row.
"""

from __future__ import annotations

from functools import cache
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from spmd import Batch, Shape, build, captured, oracle
from test_cast_fp8 import same
from test_commute_quantise import calls
from torch import nn
from witness import WitnessError, witness

import moec
from moec import compiler
from moec.compiler import PIPELINE
from moec.passes import manager
from moec.passes.commute_quantise.sequence import sequence
from moec.passes.verify import verify
from moec.plan import Plan
from moec.precision import Precision
from moec.runtime.errors import MoecError
from moec.runtime.fp8 import Recipe
from moec.runtime.fp8.payload import width
from moec.runtime.ops import convert

SHAPE = Shape(4, 2, biased=True)
BATCH = Batch(4, 6, 0, 4)
TP, MORE, ONE = (1, 2, 2, 1), (2, 2, 4, 1), (1, 1, 1, 1)


def passes(commute: bool):
    return tuple(p for p in PIPELINE if commute or p.name != "commute_quantise")


def sized(hidden: int, features: int):
    """Models of other widths, inside; ``captured`` keeps none of them."""
    return mock.patch.multiple("spmd", HIDDEN=hidden, WIDTH=features, captured=captured.__wrapped__)


@cache
def compiled(recipe, degrees, commute=True, stage="", sizes=(12, 24), compute="fp32", **precision):
    precision = Precision(fp8=recipe, compute=compute, **precision)
    plan, stages = Plan(*degrees, precision=precision, sequence_parallel=degrees[1] > 1), {}
    world = plan.dp * plan.tp
    with sized(*sizes):
        program = (captured if sizes == (12, 24) else captured.__wrapped__)(SHAPE).fork()
    program.mesh = plan.mesh(world)
    last = manager.run(program, plan.resolve(world), passes(commute), observe=lambda name, p: stages.update({name: p}))
    return stages[stage] if stage else last


def taken(program):
    """Gathers of bytes along a sequence."""
    return [n for n in calls(program, "moec.s_to_r") if n.meta["val"].dtype == torch.uint8]


@pytest.mark.parametrize(
    ("recipe", "degrees"),
    [("current", TP), ("delayed", TP),
     *(pytest.param(r, MORE, marks=pytest.mark.nightly) for r in ("current", "delayed"))],
)
def test_the_same_bits(recipe, degrees):
    """Outputs with the rewrite and without; gradients but for how float64 is added; and one rank's numbers."""
    truth = oracle(build(SHAPE), BATCH)
    on, off = (compiled(recipe, degrees, commute) for commute in (True, False))
    assert taken(on) and not taken(off)
    got, want = truth._run(on), truth._run(off)
    assert all(torch.equal(got.outputs[k], want.outputs[k]) for k in want.outputs)
    same(on, got, want, 1e-12)
    same(on, got, truth._run(compiled(recipe, ONE)), 1e-12)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_the_same_bits_in_tiles(recipe):
    """The forward; weight gradients read what is rounded twice, so they may differ where a number is subnormal."""
    on, off = (compiled(recipe, TP, c, sizes=(256, 256), exclude=("*attention*", "last")) for c in (True, False))
    assert taken(on) and not taken(off)
    with sized(256, 256):
        truth = oracle(build(SHAPE), BATCH)
        got, want = truth._run(on), truth._run(off)
    assert all(torch.equal(got.outputs[k], want.outputs[k]) for k in want.outputs)
    same(on, got, want, 1e-3)


def test_what_stays():
    assert not taken(compiled("rowwise", TP))
    for recipe, said in (("rowwise", "tokens before they are rounded"), ("current", "aten.linear read it too")):
        assert any(said in w and "its gather is not FP8" in w for w in compiled(recipe, TP).why_not), recipe


def test_without_training_a_rows_own_scale_travels():
    program = moec.compile_program(
        build(SHAPE).eval(), Plan(*TP, precision=Precision(fp8="rowwise"), sequence_parallel=True), 2,
        BATCH.tensors(), {}, training=False,
    )  # fmt: skip
    assert taken(program)


def test_bytes_are_half_of_bf16():
    def gathered(recipe):
        options = {"exclude": ("*attention*", "last")} if recipe else {}
        program = compiled(recipe, TP, sizes=(1024, 256), compute="bf16", **options)
        found = moec.explain(program, {"0": (8, 8), "1": (8, 8)}).collectives
        return {c.where: c.bytes for c in found if c.primitive == "all_gather" and c.phase == "forward"}

    wide, rows = gathered(None), 8 * 8
    for recipe in ("blockwise", "mxfp8", "current", "delayed"):
        low = gathered(recipe)
        (where,) = [where for where in low if low[where] != wide[where]]
        assert wide[where] == rows * 2048 and low[where] == rows * width(1024, recipe) <= 0.53 * wide[where]


@pytest.mark.parametrize("damage", ["a maximum is missing", "another dim", "no carrier", "another scale"])
def test_sabotage(damage):
    """By the verifier, by the witness, or in numbers."""
    program = compiled("current", TP, stage="commute_quantise").fork()
    verify(program)
    witness(program)
    (encode,) = calls(program, "moec.encode_rows")
    (operand,) = calls(program, "moec.decode_operand")
    (carry,) = calls(program, "moec.carry_gather")
    if damage == "a maximum is missing":
        wait = encode.args[1]
        wait.replace_all_uses_with(wait.args[0].args[0])
    elif damage == "another dim":
        (gather,) = taken(program)
        gather.args = (gather.args[0], 0, *gather.args[2:])
    elif damage == "no carrier":
        carry.replace_all_uses_with(carry.args[0])
    else:
        others = [n for n in calls(program, "moec.quantise") if n.args[1] not in (None, encode.args[1])]
        operand.args = (*operand.args[:2], others[0].args[1], *operand.args[3:])
    program.graph.eliminate_dead_code()
    program.module.recompile()
    if damage != "another scale":
        with pytest.raises(MoecError):
            verify(program)
        with pytest.raises((WitnessError, AttributeError, MoecError)):
            witness(program)
        return
    truth = oracle(build(SHAPE), BATCH)
    with pytest.raises(AssertionError):
        same(program, truth._run(program), truth._run(compiled("current", ONE)), 1e-12)


@pytest.mark.parametrize("damage", ["", "encoded by another history", "learnt of some rows"])
def test_sabotage_of_histories(damage):
    truth = oracle(build(SHAPE), BATCH)
    want = truth._run(compiled("delayed", ONE))
    program = compiled("delayed", TP).fork()
    (encode,) = calls(program, "moec.encode_rows")
    past = encode.args[1]
    (learnt,) = [n for n in calls(program, "moec.amax") if n.args[0] is encode.args[0]]
    if damage == "encoded by another history":
        others = [n.args[0] for n in calls(program, "moec.past_amax") if n.args[0] is not past.args[0]]
        past.args = (others[0], *past.args[1:])
    elif damage:
        with program.graph.inserting_before(learnt):
            some = program.graph.call_function(torch.ops.aten.slice.Tensor, (learnt.args[0], 1, 0, 1))
        learnt.args = (some, *learnt.args[1:])
    program.module.recompile()
    got = truth._run(program)
    right = all(torch.equal(got.grads[n], g) for n, g in want.grads.items() if n.endswith("_amax_history"))
    if damage == "learnt of some rows":
        assert not right
    elif damage:
        with pytest.raises(AssertionError):
            same(program, got, want, 1e-12)
    else:
        assert right
        same(program, got, want, 1e-12)


class TwoViews(nn.Module):
    """Two products of the same rows, one of them by way of a reshape, and so by a history of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(16, 16), nn.Linear(16, 16)
        self.up, self.beside, self.down = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        x = F.layer_norm(x, (16,))
        y = torch.tanh(self.up(x)) + torch.tanh(self.beside(x.reshape(-1, 16)).reshape(x.shape))
        return self.last(x + self.down(y)).square().mean()


def test_products_with_histories_of_their_own():
    """What they scale one value by may differ, so it is gathered wide."""
    plan = Plan(1, 2, precision=Precision(fp8="delayed", exclude=("last",)), sequence_parallel=True)
    stages = {}
    moec.compile_program(
        TwoViews(), plan, 2, (torch.zeros(4, 6, dtype=torch.long),), {}, training=True,
        observe=lambda name, p: stages.update({name: p}),
    )  # fmt: skip
    for shared in (False, True):
        program = stages["cast_fp8"].fork()
        one, other = [n for n in calls(program, "moec.s_to_r") if n.meta["val"].shape[-1] == 16][:2]
        if shared:
            next(iter(other.users)).replace_all_uses_with(next(iter(one.users)))
            program.graph.eliminate_dead_code()
        sequence(program, Recipe.parse("delayed"))
        verify(program)
        assert len(taken(program)) == (0 if shared else 2)
        assert any("histories of their own" in w for w in program.why_not) == shared


# ------------------------------------------------------------------------------------------------- on real processes


def train(commute: bool, world: int, recipe: str):
    """Three AdamW steps: losses, parameters, bytes gathered as bytes, the program."""
    plan = Plan(world // 2, 2, 1, 1, precision=Precision(fp8=recipe), sequence_parallel=True)
    mine = torch.distributed.get_rank() // 2
    ids, moved = [t.chunk(world // 2)[mine].clone() for t in BATCH.tensors()], []
    gather = convert.start_all_gather

    def seen(out, x, *groups):
        moved.append(out.nbytes if x.dtype == torch.uint8 else 0)
        return gather(out, x, *groups)

    with mock.patch.object(compiler, "PIPELINE", passes(commute)):
        model = moec.parallelize(build(SHAPE), plan, example_inputs=tuple(ids))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(3):
        optimizer.zero_grad()
        with mock.patch.object(convert, "start_all_gather", seen):
            loss = model(*ids)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, {n: p.full_tensor() for n, p in model.named_parameters()}, sum(moved), model.program


def on_and_off(rank: int, world: int, recipe: str) -> None:
    on, off = train(True, world, recipe), train(False, world, recipe)
    assert torch.equal(on[0][0], off[0][0])
    for a, b in zip(on[0], off[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=0)
    for name, p in off[1].items():
        torch.testing.assert_close(on[1][name], p, rtol=1e-3, atol=1e-4)
    B, S = BATCH.tensors()[0].shape
    each = B // (world // 2) * S * width(build(SHAPE).embed.weight.shape[1], "current")
    assert on[2] == 3 * each * len(taken(on[3])) > 0 and off[2] == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", ["current", pytest.param("delayed", marks=pytest.mark.nightly)])
def test_processes_train_the_same(gloo4, recipe):
    gloo4.run(on_and_off, recipe, timeout=280)
