"""FP8 weights are made once an optimizer step: never twice, never stale, and nothing else changes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from test_commute_weights import Wide

import moec
from moec.passes import lower
from moec.program import op_name
from moec.runtime.collectives import TABLE

H = 256


def parallelize(dp=1, recipe="current", compute="bf16", cut=True, **plan):
    precision = moec.Precision(fp8=recipe, exclude=(), compute=compute)
    torch.manual_seed(0)
    with mock.patch.object(lower, "quantise_once", lower.quantise_once if cut else lambda program: None):
        plan = moec.Plan(dp=dp, precision=precision, **plan)
        return moec.parallelize(Wide(H, 2), plan, example_inputs=(torch.zeros(2, H),))


def x(seed):
    return torch.randn(2, H, generator=torch.Generator().manual_seed(seed))


def step(model, seed):
    loss = model(x(seed))
    loss.backward()
    return loss.detach()


def trained(cut, dp=1, count=2, **plan):
    """Losses and parameters of two steps of three micro-batches, and how often weights were quantised."""
    model = parallelize(dp, cut=cut, **plan)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses, runs = [], []
    for at in range(count):
        losses += [step(model, 3 * at + i) for i in range(3)]
        runs.append(model.once.runs)
        opt.step()
        opt.zero_grad()
    return losses, [p.detach() for p in model.parameters()], runs, model


@pytest.mark.parametrize(("recipe", "compute"), [("current", "bf16"), ("mxfp8", "fp32")])
def test_once_a_step_and_the_same_bits(recipe, compute):
    losses, params, runs, model = trained(True, recipe=recipe, compute=compute)
    want_losses, want, none, _ = trained(False, recipe=recipe, compute=compute)
    assert runs == [1, 2] and none == [0, 0]
    assert not model.program.narrowed, "no bf16 copies are kept beside"
    assert not [n for n in model.program.graph.nodes if op_name(n) == "moec.quantise" and n.args[5] == "weight"]
    assert all(torch.equal(a, b) for a, b in zip(losses, want_losses, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(params, want, strict=True))


def test_what_changes_a_parameter_is_seen():
    model = parallelize()
    first, again = step(model, 1), step(model, 1)
    assert torch.equal(first, again) and model.once.runs == 1
    p = next(model.parameters())
    for i, change in enumerate((lambda: p.mul_(2), lambda: torch.nn.init.normal_(p), lambda: p.detach().add_(1))):
        with torch.no_grad():
            change()
        other = step(model, 1)
        assert model.once.runs == i + 2 and not torch.equal(first, other)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(x(1)), other)
    with torch.inference_mode():
        p.detach().add_(1)
        model(x(1))
        assert not any(t.is_inference() for t in model.once._made)  # training may read it later


def four(rank, world):
    (losses, params, runs, model), (want_losses, want, *_) = trained(True, world), trained(False, world)
    assert runs == [1, 2]
    assert all(torch.equal(a, b) for a, b in zip(losses, want_losses, strict=True)), (losses, want_losses)
    assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(params, want, strict=True))
    losses, params, runs, model = trained(True, world, fsdp=True)
    assert runs == [1, 2]
    uses = [c for c in moec.explain(model).collectives if c.phase == "optimizer step"]
    assert [(c.kind, c.bytes) for c in uses] == [("m_to_i", 2 * 4)], "both weights' maxima together"
    # A parameter changes on one rank alone: all make FP8 weights anew, none waits for another one.
    before = model.once.runs
    if rank == 2:
        with torch.no_grad():
            next(model.parameters()).to_local().add_(0.5)
    step(model, 9)
    assert model.once.runs == before + 1
    starts = [n for n in model.program.graph.nodes if n.target is TABLE["m_to_i"].op]
    assert not [n for n in starts if op_name(n.args[0]) == "moec.amax" and n.args[0].args[3] == "weight"]


@pytest.mark.timeout(300)
def test_four_processes(gloo4):
    gloo4.run(four, timeout=280)
