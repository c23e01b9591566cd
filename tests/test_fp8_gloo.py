"""Whole models in FP8 whose tokens travel to their experts as FP8, trained on four gloo processes.

Every step's loss and gradients are compared with simulated ranks, which run the same graph on the same parameters in
one process, and with the same plan on one device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import grid
import pytest
import torch

import moec
from moec.check import _Oracle, _relative
from moec.compiler import compile_program, expanded
from moec.plan import Plan
from moec.precision import Precision
from moec.program import HISTORY
from moec.runtime.fp8.payload import width
from moec.runtime.ops import exchange

STEPS, H = 3, grid.SIZES.hidden


@dataclass
class Trained:
    """Of every step: parameters before it, loss, gradients; and numbers a row, and their dtype, that were exchanged."""

    states: list[dict[str, torch.Tensor]] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    grads: list[dict[str, torch.Tensor]] = field(default_factory=list)
    rows: set[tuple[torch.dtype, int]] = field(default_factory=set)
    damaged: dict[str, tuple] = field(default_factory=dict)
    """Loss and gradients of the first step once more, each time with a mistake in what is sent."""


def step(model, number):
    data = grid.batch(seed=number, S=8)
    loss = model(**(moec.shard_batch(data, model) if model.groups else data))["loss"]
    loss.backward()
    return loss.detach(), {n: g for n, g in moec.full_grads(model).items() if g is not None}


def trained(model):
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True), Trained()
    for number in range(STEPS):
        found.states.append(moec.full_state_dict(model))
        loss, grads = step(model, number)
        found.losses.append(loss)
        found.grads.append(grads)
        optimizer.step()
        optimizer.zero_grad()
    return found


def built(precision, degrees=(1, 1, 1, 1), **options):
    plan = Plan(*degrees, precision=Precision(**precision), **options)
    return moec.parallelize(grid.build("plain").float(), plan, example_kwargs=grid.batch(S=8))


def no_scales(x):
    return torch.cat([x[:, :H], torch.zeros_like(x[:, H:])], 1)


def scales_of_another_row(x):
    return torch.cat([x[:, :H], x[:, H:].roll(1, 0)], 1)


def rows_of_another_rank(x):
    return x.flip(0)


def on_processes(rank, world, precision, degrees, options):
    rows, change, start = set(), None, exchange.start_all_to_all

    def seen(out, x, recv, send, *groups):
        if x.ndim == 2:
            rows.add((x.dtype, x.shape[1]))
        if x.dtype == torch.uint8 and change is not None:
            x = change(x)
        return start(out, x, recv, send, *groups)

    with mock.patch.object(exchange, "start_all_to_all", seen):
        model = built(precision, degrees, **options)
        found = trained(model)
        for change in (no_scales, scales_of_another_row, rows_of_another_rank):
            moec.load_full_state_dict(model, found.states[0])
            model.zero_grad()
            found.damaged[change.__name__] = step(model, 0)
    found.rows = rows
    return found


def simulated(precision, degrees, options, states):
    """``(loss, gradients)`` of every step, in the program's own dtypes."""
    net, plan = grid.build("plain").float(), Plan(*degrees, precision=Precision(**precision), **options)
    program = expanded(compile_program(net, plan, 4, (), grid.batch(S=8), training=True))
    for number, state in enumerate(states):
        net.load_state_dict({name: x for name, x in state.items() if not name.endswith(HISTORY)})
        truth = _Oracle(net, (), grid.batch(seed=number, S=8), None)
        truth._full = partial(_value, truth._full, state)
        truth.cotangents = {at: g for at, g in truth.cotangents.items() if g.ndim == 0}  # of the loss alone
        found = truth._run(program, promoted=False)
        grads = {}
        for name, g in found.grads.items():
            spec = program.params[name]
            if g is not None and not spec.history:
                grads |= dict(zip(spec.members, g, strict=True)) if spec.members else {spec.name: g}
        yield found.outputs["loss"], grads


def _value(others, state, spec):
    """Of a parameter or buffer; a history as a step finds it, whose own column is behind nobody's yet."""
    return state[spec.name].roll(1, -1) if spec.history else others(spec)


def apart(got, want):
    """How far a loss and gradients are off: the loss, the worst gradient, all gradients as one vector."""
    (loss, grads), (true_loss, true) = got, want
    assert grads.keys() == true.keys()
    floor = grid.VANISHING * max(float(g.norm()) for g in true.values())
    worst = max((_relative(grads[n], true[n], floor), n) for n in true)
    mine, all_true = (torch.cat([g[n].double().flatten() for n in true]) for g in (grads, true))
    return _relative(loss, true_loss), *worst, _relative(mine, all_true)


THERE, BOTH = {"dispatch": "fp8"}, {"dispatch": "fp8", "combine": "fp8"}
CASES = [
    ({"compute": "bf16", "fp8": "rowwise"} | THERE, (4, 1, 2, 1), {"fsdp": True}),
    ({"compute": "bf16", "fp8": "delayed", "margin": 1} | THERE, (4, 1, 2, 1), {"fsdp": True}),
    ({"fp8": "delayed"} | THERE, (4, 1, 4, 1), {"overlap": moec.Overlap(chunks=2)}),
    ({"fp8": "rowwise"} | THERE, (4, 1, 2, 1), {}),
    ({"compute": "bf16", "fp8": "current"} | THERE, (2, 2, 4, 1), {"sequence_parallel": True}),
    ({"compute": "bf16", "fp8": "blockwise"} | THERE, (4, 1, 4, 1), {"fsdp": True}),
    ({"compute": "bf16", "fp8": "mxfp8"} | BOTH, (4, 1, 4, 1), {}),
    ({"compute": "bf16", "fp8": "rowwise"} | BOTH, (4, 1, 4, 1), {}),
]

SIMULATED = 1e-6
"""Of losses and every gradient, at every step: what sums over processes in another order leave.  The worst of all cases
was 1.3e-7; the least mistake in what is sent (scales of another row) is 1.0 off in a gradient."""
ALONE = {"fp32": (1e-6, 1e-6), "bf16": (1e-3, 0.05)}
"""Losses of all steps, and the first step's gradients as one vector, of one device.  In fp32 the worst were 1.2e-7 and
2e-7.  In bf16 experts' results travel in bf16 where one device adds them up in fp32 at once, and FP8 rounds otherwise
what is a bf16 number off: 1.9e-4 and 0.015 (without FP8: 6e-5 and 0.005).  What ``delayed`` learns is held to the
latter bound, each magnitude by itself: at most 1.5e-7 off in fp32, 0.0043 in bf16."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("precision", "degrees", "options"),
    [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.nightly) for case in CASES[2:])], ids=str,
)  # fmt: skip
def test_processes_train_as_simulated_ranks_and_as_one(gloo4, precision, degrees, options):
    all_ranks = gloo4.run(on_processes, precision, degrees, options, timeout=280)
    found, alone = all_ranks[0], trained(built(precision))
    for other in all_ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found.losses, other.losses, strict=True))
    bytes_a_row = width(H, precision["fp8"])
    assert (torch.uint8, bytes_a_row) in found.rows
    wide = {dtype for dtype, _ in found.rows} - {torch.uint8}
    assert wide == {torch.bfloat16 if "compute" in precision else torch.float32}, "gradients of tokens"
    truth = list(simulated(precision, degrees, options, found.states))
    loss_bound, grad_bound = ALONE[precision.get("compute", "fp32")]
    for number, want in enumerate(truth):
        mine = found.losses[number], found.grads[number]
        off, other = apart(mine, want), apart(mine, (alone.losses[number], alone.grads[number]))
        print(precision, degrees, options, number, off, other)
        assert max(off[0], off[1]) <= SIMULATED, off
        assert other[0] <= loss_bound
        assert number or other[3] <= grad_bound
    states = zip(found.states, alone.states, strict=True)
    learnt = [(name, mine[name], theirs[name]) for mine, theirs in states for name in theirs if name.endswith(HISTORY)]
    assert bool(learnt) == (precision["fp8"] == "delayed")
    for name, mine, theirs in learnt:
        off = ((mine - theirs).abs() / theirs.clamp_min(1e-30)).max()
        print(name, float(off))
        assert off <= grad_bound, name
    for what, broken in found.damaged.items():
        if "scales" in what and bytes_a_row == H:
            continue  # all ranks know the one scale
        if "another_row" in what and precision["fp8"] == "blockwise":
            continue  # a row has one power of two here, and normed rows have the same one
        off = apart(broken, truth[0])
        print(what, off)
        assert off[1] > 0.05, what
