"""FP8 weights are made once an optimizer step: never twice, never stale, and nothing else changes."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch
from spmd import Batch, Shape, build
from test_commute_weights import Wide
from torch import nn

import moec
from moec.passes import lower
from moec.passes.once import quantise_once
from moec.program import op_name
from moec.runtime.collectives import TABLE
from moec.runtime.once import Once, maxima

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


def graphs(program):
    """That run."""
    step = program.step
    if step is None:
        return [program.graph]
    return [g.graph for g in (step.forward, step.inference, step.backward(step.usual()))]


def left(program):
    """How many weights each graph quantises by itself."""
    return [len(quantises(g, "weight", "stack")) for g in graphs(program)]


OVERLAP = {"overlap": moec.Overlap()}


@pytest.mark.parametrize("plan", [{}, OVERLAP], ids=["autograd", "scheduled"])
@pytest.mark.parametrize(("recipe", "compute"), [("current", "bf16"), ("mxfp8", "fp32")])
def test_once_a_step_and_the_same_bits(recipe, compute, plan):
    losses, params, runs, model = trained(True, recipe=recipe, compute=compute, **plan)
    want_losses, want, none, uncut = trained(False, recipe=recipe, compute=compute, **plan)
    assert runs == [1, 2] and none == [0, 0]
    assert not model.program.narrowed, "no bf16 copies are kept beside"
    assert not any(left(model.program)) and left(uncut.program)[0] == 2
    assert all(torch.equal(a, b) for a, b in zip(losses, want_losses, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(params, want, strict=True))


@pytest.mark.parametrize("plan", [{}, OVERLAP], ids=["autograd", "scheduled"])
def test_what_changes_a_parameter_is_seen(plan):
    model = parallelize(**plan)
    first, again = step(model, 1), step(model, 1)
    assert torch.equal(first, again) and model.once.runs == 1
    p = next(model.parameters())
    other_memory = lambda: setattr(p, "data", p * 2)  # noqa: E731
    kinds = (lambda: p.mul_(2), lambda: torch.nn.init.normal_(p), lambda: p.detach().add_(1), other_memory)
    for i, change in enumerate(kinds):
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


def four(rank, world, plan):
    (losses, params, runs, model), (want_losses, want, *_) = trained(True, world, **plan), trained(False, world, **plan)
    assert runs == [1, 2] and not any(left(model.program))
    assert all(torch.equal(a, b) for a, b in zip(losses, want_losses, strict=True)), (losses, want_losses)
    assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(params, want, strict=True))
    losses, params, runs, model = trained(True, world, fsdp=True, **plan)
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
    for graph in graphs(model.program):
        starts = [n for n in graph.nodes if n.target is TABLE["m_to_i"].op]
        assert not [n for n in starts if op_name(n.args[0]) == "moec.amax" and n.args[0].args[3] == "weight"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("plan", [{}, OVERLAP], ids=["autograd", "scheduled"])
def test_four_processes(gloo4, plan):
    gloo4.run(four, plan, timeout=280)


class Behind(torch.optim.Optimizer):
    """Writes parameters without a trace in their versions."""

    def __init__(self, params) -> None:
        super().__init__(params, {})

    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data.add_(1)


def test_what_is_kept_is_of_one_graph_and_of_the_same_memory():
    p, q = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(4, 2))
    once = Once()

    def made(graph, *sources):
        """Is it made anew?"""
        before = once.runs
        (got,) = once.get(graph, sources, lambda: (sources[0][1].sum(),))
        assert got == sources[0][1].sum() and not got.requires_grad
        return once.runs > before

    assert made("one", (p, p.detach())) and not made("one", (p, p.detach()))
    assert made("other", (p, p.detach())), "of another graph"
    assert made("other", (p, p), (q, q)), "of more"
    assert made("other", (p, p.detach())) and made("other", (q, p.detach())), "whose"
    assert made("other", (p, p.detach())) and made("other", (p, p.detach()[:2])), "a part"
    assert made("other", (p, p.detach())) and not made("other", (p, p.detach()))
    p.data = torch.ones(4, 2)
    assert made("other", (p, p.detach())), "memory, at the same version"
    Behind([p]).step()
    assert made("other", (p, p.detach())), "an optimizer's step"
    once.expire()
    assert made("other", (p, p.detach())) and not made("other", (p, p.detach()))


# -- which weights, on simulated ranks


def cut(program):
    """``program``, of which weights are made once."""
    program = program.fork()
    quantise_once(program)
    program.graph.lint()
    return program


def quantises(graph, *roles):
    return [n for n in graph.nodes if op_name(n) == "moec.quantise" and n.args[5] in roles]


def test_maxima_of_a_group_are_one_collective_each():
    """Dense weights share tiles over all ranks of dp, experts over those that ep leaves: two groups."""
    plan = moec.Plan(4, 1, 2, 1, fsdp=True, precision=moec.Precision(fp8="current"))
    model, batch = build(Shape(4, 2, biased=True)), Batch(4, 6, 0, 4).tensors()
    program = moec.compile_program(model, plan, 4, batch, {}, training=True)
    weights = quantises(program.graph, "weight", "stack")
    starts = [n for n in program.graph.nodes if n.target is TABLE["m_to_i"].op]
    groups = Counter(n.args[-1] for n in starts if n.args[0].args[3] in ("weight", "stack"))
    assert len(groups) == 2 and min(groups.values()) > 1
    made = cut(program)
    assert not quantises(made.graph, "weight", "stack")
    assert len(quantises(made.once.module.graph, "weight", "stack")) == len(weights) == 5 + 2
    together = [n for n in made.once.module.graph.nodes if n.target is maxima]
    assert {n.args[2]: len(n.args[0]) for n in together} == groups


class Buffered(nn.Module):
    """A weight that training writes, if anybody does, and not the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.register_buffer("fixed", torch.randn(16, 16))

    def forward(self, x):
        return self.down(torch.tanh(nn.functional.linear(self.up(x), self.fixed))).square().mean()


@pytest.mark.parametrize(("recipe", "left"), [("current", 1), ("delayed", 3)])
def test_what_more_than_parameters_decides_stays(recipe, left):
    """A buffer's numbers, and weights whose scales come from histories."""
    plan = moec.Plan(precision=moec.Precision(fp8=recipe, exclude=()))
    program = moec.compile_program(Buffered(), plan, 1, (torch.randn(4, 16),), {}, training=True)
    made = cut(program)
    assert len(quantises(program.graph, "weight")) == 3
    assert len(quantises(made.graph, "weight")) == left and (made.once is None) == (left == 3)


@pytest.mark.parametrize(("compute", "plan"), [("fp32", {}), ("bf16", {}), ("bf16", OVERLAP)])
def test_experts_are_made_once_too(compute, plan):
    """Stacks, which are read transposed: the same losses and gradients, in the parameters' dtype."""
    batch, found = Batch(4, 6, 0, 4).tensors(), []
    for once in (True, False):
        with mock.patch.object(lower, "quantise_once", lower.quantise_once if once else lambda program: None):
            precision = moec.Precision(fp8="blockwise", compute=compute)
            source = build(Shape(4, 2, biased=True))
            model = moec.parallelize(source, moec.Plan(precision=precision, **plan), example_inputs=batch)
        losses = [model(*batch)["loss"] for _ in range(2)]
        for loss in losses:
            loss.backward()
        found.append((*losses, *(p.grad for p in model.parameters())))
        assert model.once.runs == once
        assert left(model.program)[0] == (0 if once else 5 + 2)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*found, strict=True))
