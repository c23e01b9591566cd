"""The FP8 recipe ``delayed`` on several ranks: the magnitudes, scales and histories of one rank, whatever the plan.

Simulated in float64 for breadth, on gloo processes for truth.
"""

from __future__ import annotations

from functools import cache
from unittest import mock

import grid
import pytest
import torch
from spmd import Batch, Shape, build, captured, compile_stages, oracle
from witness import WitnessError, witness

import moec
from moec import delayed
from moec.check import _relative
from moec.passes.typed import typed
from moec.passes.verify import verify
from moec.plan import Plan
from moec.precision import Precision
from moec.program import HISTORY, op_name
from moec.runtime.collectives import TABLE
from moec.runtime.errors import MoecError

SHAPE, BATCH = Shape(4, 2, biased=True), Batch(4, 6, 0, 4)
PRECISION = Precision(fp8="delayed", history=3, margin=1)
PLANS = {
    "dp tp ep": ((2, 2, 4, 1), {}), "etp": ((2, 2, 2, 2), {}), "fsdp": ((2, 1, 2, 1), {"fsdp": True}),
    "sp": ((1, 2, 2, 1), {"sequence_parallel": True}), "allgather": ((2, 1, 2, 1), {"dispatch": "allgather"}),
    "chunks": ((2, 1, 2, 1), {"overlap": moec.Overlap(chunks=2)}), "bf16": ((2, 1, 2, 1), {}),
}  # fmt: skip
DAILY = ("etp", "sp", "chunks")


def compiled(degrees=(1, 1, 1, 1), stage="lower", precision=PRECISION, **options):
    return dict(compile_stages(captured(SHAPE), Plan(*degrees, precision=precision, **options)))[stage]


@cache
def alone():
    return oracle(build(SHAPE), BATCH)._run(compiled())


def _travels(program):
    """What gathers weights or rows as bytes (``test_commute_weights``, ``test_commute_sequence``)."""
    return next((n for n in map(op_name, program.graph.nodes) if n in ("moec.unpack_bytes", "moec.encode_rows")), None)


@pytest.mark.parametrize("plan", [p if p in DAILY else pytest.param(p, marks=pytest.mark.nightly) for p in PLANS])
def test_any_number_of_ranks_learns_what_one_does(plan):
    degrees, options = PLANS[plan]
    if plan == "bf16":
        precision = Precision(compute="bf16", fp8="delayed", history=3, margin=1)
        early, program = (compiled(degrees, stage, precision) for stage in ("cast_fp8", "lower"))
    else:
        early, program = (compiled(degrees, stage, **options) for stage in ("cast_fp8", "lower"))
    verify(early)
    witness(early)
    assert _travels(program) == {"fsdp": "moec.unpack_bytes", "sp": "moec.encode_rows"}.get(plan)
    got, want = oracle(build(SHAPE), BATCH)._run(program), alone()
    assert got.disagreement == 0 and not any(e.kind in ("m_to_i", "i_to_m") for e in got.log), "nothing on the way"
    names = {s.name: n for n, s in program.params.items()}
    scale = max(float(g.norm()) for n, g in want.grads.items() if g is not None and not n.endswith(HISTORY)) * 1e-2
    learnt = 0
    for spec in compiled().params.values():
        mine, theirs = got.grads[names[spec.name]], want.grads[spec.placeholder]
        if spec.history:
            assert torch.equal(mine, theirs) and mine[:, 0].all() and not mine[:, 1:].any(), spec.name
            learnt += 1
        elif theirs is not None:
            assert _relative(mine, theirs, scale) < 1e-12, spec.name
    assert learnt == 7
    for path, value in want.outputs.items():
        assert _relative(got.outputs[path], value) < 1e-12


def test_chunks_share_a_history():
    """Sabotage: the sum of what chunks noted is not the largest of it."""
    program = compiled((2, 1, 2, 1), overlap=moec.Overlap(chunks=2))
    fans = [n for n in program.graph.nodes if op_name(n) == "moec.fan_max"]
    assert len(fans) == 7
    for fan in fans:
        for copy in list(fan.users):
            copy.replace_all_uses_with(fan.args[0])
    program.graph.eliminate_dead_code()
    program.module.recompile()
    got, want = oracle(build(SHAPE), BATCH)._run(program), alone()
    assert any(not torch.equal(g, want.grads[n]) for n, g in got.grads.items() if n.endswith(HISTORY))


def test_one_reduction_takes_all_magnitudes():
    uses = [u for u in moec.explain(compiled((2, 1, 2, 1))).collectives if u.kind in ("m_to_i", "i_to_m")]
    assert [(u.phase, u.ranks, u.bytes) for u in uses] == [("epilogue", 2, 7 * 3 * 4)]
    assert not [u for u in moec.explain(compiled()).collectives if u.kind == "m_to_i"]


def test_a_history_of_one_rank_is_caught():
    program = compiled((2, 1, 2, 1), "cast_fp8").fork()
    history = next(n for n in program.placeholders() if n.name.endswith(HISTORY))
    history.meta["types"] = dict.fromkeys(program.mesh.names, moec.placement.S(1))
    with pytest.raises(MoecError):
        verify(program)
    with pytest.raises((WitnessError, MoecError)):
        witness(program)


def test_magnitudes_are_never_added_up():
    """As the gradient of what is R would be, over the ranks."""
    program = compiled((2, 1, 2, 1), "cast_fp8").fork()
    note = next(n for n in program.graph.nodes if op_name(n) == "moec.note_amax")
    (axis,) = program.mesh.names
    args = (note.args[0], 0, program.mesh.size([axis]), axis)
    note.args = (typed(program, note, TABLE["i_to_r"].op, *args), *note.args[1:])
    with pytest.raises(MoecError, match="reads a history of type R"):
        verify(program)


# -- processes

FIRST, SECOND = (2, 2, 4, 1), (4, 1, 2, 1)


def model_of(degrees, **options):
    net, batch = grid.build("plain"), grid.batch()
    plan = Plan(*degrees, precision=PRECISION, **options)
    if degrees == (1, 1, 1, 1):
        return moec.parallelize(net, plan, example_kwargs=batch)
    return grid.parallelize("plain", net, plan, batch)


def train(model, seeds):
    """Losses, and histories when it is over."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for seed in seeds:
        batch = grid.batch(seed=seed)
        optimizer.zero_grad()
        loss = model(**(moec.shard_batch(batch, model) if model.groups else batch))["loss"]
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {n: b.clone() for n, b in model.named_buffers() if n.endswith(HISTORY)}


def on_processes(rank, world, begun, second, options):
    """Histories after two steps, after one more, after one more under another plan, and without the reduction."""
    model = model_of(begun)
    first = train(model, (1, 2))
    state = moec.full_state_dict(model)
    again = train(model, (3,))
    other = model_of(second, **options)
    moec.load_full_state_dict(other, state)
    resharded = train(other, (3,))
    moec.load_full_state_dict(other, state)
    unreduced = mock.Mock(all_reduce=lambda *_: None, ReduceOp=delayed.dist.ReduceOp)
    with mock.patch.object(delayed, "dist", unreduced):  # for now: these processes run other tests too
        broken = train(other, (3,))
    return first, again, resharded, broken


@pytest.mark.nightly  # four processes compile, on what may be two busy cores
@pytest.mark.timeout(300)
def test_processes_learn_what_one_rank_does(gloo4):
    """The histories of one rank on each of four, to the last bit; a checkpoint goes on with them under another plan."""
    model = model_of((1, 1, 1, 1))
    steps = train(model, (1, 2)), train(model, (3,))
    own = []
    for first, again, resharded, broken in gloo4.run(on_processes, FIRST, SECOND, {"fsdp": True}, timeout=280):
        for (losses, found), (want_losses, want) in ((first, steps[0]), (again, steps[1]), (resharded, steps[1])):
            assert losses == pytest.approx(want_losses, rel=1e-9)
            assert found.keys() == want.keys()
            for name, h in want.items():
                assert torch.equal(found[name], h) and h[:, :2].all(), name
        own.append(broken[1])
        assert any(not torch.equal(h, steps[1][1][n]) for n, h in broken[1].items()), "sabotage: no reduction"
    assert any(not torch.equal(h, own[1][n]) for n, h in own[0].items())
