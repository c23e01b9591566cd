"""Narrow copies of parameters: cast once after every change, never stale; gathered so, their gradients summed wide."""

from __future__ import annotations

from functools import cache
from unittest import mock

import pytest
import spmd
import torch

import moec
from moec import compiler
from moec.passes.verify import check_types
from moec.precision import Precision
from moec.runtime.errors import MoecError
from moec.runtime.groups import Groups
from moec.runtime.mesh import Mesh
from moec.runtime.narrow import NarrowCopies
from moec.runtime.ops import convert
from moec.runtime.torch_compat import WAIT

SHAPE = spmd.Shape(biased=True)
BF16 = Precision(compute="bf16")
LOW = torch.bfloat16
ops = torch.ops.moec


@cache
def captured():
    return spmd.captured(SHAPE)


def parallelize(**plan) -> moec.ParallelModule:
    """The small transformer of ``spmd``, on this process's world."""
    with mock.patch.object(compiler, "capture", return_value=captured().fork()):
        net = spmd.build(SHAPE)
        ids = torch.zeros((2, 4), dtype=torch.int64)
        return moec.parallelize(net, moec.Plan(precision=BF16, **plan), example_inputs=(ids, ids.clone()))


def step(model: moec.ParallelModule, seed: int) -> torch.Tensor:
    ids, labels = spmd.Batch(4, 4, seed).tensors()
    rows = slice(model.dp_rank, None, model.dp_size)
    loss = model(ids[rows].clone(), labels[rows].clone())["loss"]
    loss.backward()
    return loss.detach()


# ------------------------------------------------------------------------------------------------------- the copies

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_changes_the_copy(optimizer):
    p, copies = torch.nn.Parameter(torch.randn(3, 4)), NarrowCopies()
    opt = OPTIMIZERS[optimizer]([p])

    def now() -> torch.Tensor:
        return copies.copy("p", p, p.detach(), p.detach, LOW)

    for made in range(1, 4):
        for _ in range(3):
            assert torch.equal(now(), p.detach().to(LOW))
        assert copies.casts == made
        p.grad = torch.randn(3, 4)
        opt.step()


def test_what_else_changes_a_parameter_changes_the_copy():
    p, copies = torch.nn.Parameter(torch.randn(3, 4)), NarrowCopies()

    def now() -> torch.Tensor:
        return copies.copy("p", p, p.detach(), p.detach, LOW)

    first = now()
    holder = torch.nn.Module()
    holder.p = p
    changes = [
        lambda: holder.load_state_dict({"p": torch.randn(3, 4)}),
        lambda: torch.nn.init.normal_(p),
        lambda: p.detach().mul_(2),
        lambda: setattr(p, "data", torch.randn(3, 4)),
        lambda: setattr(p, "data", p.detach().clone()),
    ]
    for i, change in enumerate(changes):
        with torch.no_grad():
            change()
        assert torch.equal(now(), p.detach().to(LOW)), i
    assert copies.casts == 1 + len(changes)
    assert first is not now()
    with torch.inference_mode():
        p.detach().add_(1)
        assert not now().is_inference()  # training reads it later


def parameters_cast(model: moec.ParallelModule) -> list[str]:
    """What a run's graphs cast of parameters themselves."""
    program, step = model.program, model.program.step
    graphs = [program.graph] if step is None else [step.forward.graph, step.inference.graph]
    graphs += [step.backward(step.usual()).graph] if step else []
    casts = [c for g in graphs for c in g.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)]
    return [c.args[0].name for c in casts if c.args[0].name.removeprefix("saved_") in program.narrowed]


@pytest.mark.parametrize("overlap", [None, moec.Overlap()])
def test_copies_are_made_once_an_optimizer_step_on_one_rank(overlap):
    model = parallelize(overlap=overlap)
    assert (model.program.step is None) == (overlap is None) and not parameters_cast(model)
    narrowed = model.program.narrowed
    assert set(narrowed.values()) == {LOW}
    assert not any("norm" in n or "router" in n for n in narrowed)
    assert {n for n in narrowed if "gate_up" in n or "down" in n or "embed" in n or "attention_q_w" in n}
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for steps in range(1, 3):
        for micro in range(3):
            step(model, micro)
        assert model.narrow_copies.casts == steps * len(narrowed)
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
        opt.step()
        opt.zero_grad()


def test_a_stale_copy_would_be_seen():
    """Of the same parameters a model that was trained and one made anew compute the same."""
    model = parallelize()
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for seed in range(2):
        step(model, seed)
        opt.step()
        opt.zero_grad()
    fresh = parallelize()
    with torch.no_grad():
        for p, q in zip(fresh.parameters(), model.parameters(), strict=True):
            p.copy_(q)
    assert torch.equal(step(model, 7), step(fresh, 7))
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(fresh.parameters(), model.parameters(), strict=True))
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "gate_up" in n and p.ndim == 3).add_(1.0)
    assert not torch.equal(step(model, 7), step(fresh, 7))


# --------------------------------------------------------------------------------------------------- on four ranks


def trains_like_one_device(rank, world):
    found = {}
    for name, plan in {
        "fsdp": {"dp": 4, "ep": 2, "fsdp": True},
        "tp": {"dp": 2, "tp": 2, "ep": 2, "sequence_parallel": True},
        "scheduled": {"dp": 4, "ep": 2, "fsdp": True, "overlap": moec.Overlap()},
    }.items():
        model = parallelize(**plan)
        assert not parameters_cast(model), name
        opt = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
        losses = []
        for steps in range(2):
            for micro in range(2):
                losses.append(float(step(model, 2 * steps + micro)))
            assert model.narrow_copies.casts == (steps + 1) * len(model.program.narrowed), name
            opt.step()
            opt.zero_grad()
        # What is written to a rank's own part is seen as well.
        with torch.no_grad():
            p = next(p for n, p in model.named_parameters() if "gate_up" in n and p.ndim == 3)
            p.to_local().add_(0.25)
        losses.append(float(step(model, 9)))
        found[name] = losses, {n: g for n, g in moec.full_grads(model).items() if g is not None}
    return found if rank == 0 else None


def one_device():
    """(SGD: Adam's first steps are signs of gradients, which rounding turns where they are small.)"""
    model = parallelize()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    losses = []
    for steps in range(2):
        for micro in range(2):
            losses.append(float(step(model, 2 * steps + micro)))
        opt.step()
        opt.zero_grad()
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "gate_up" in n and p.ndim == 3).add_(0.25)
    return [*losses, float(step(model, 9))], moec.full_grads(model)


@pytest.mark.timeout(300)
def test_four_ranks_train_like_one(gloo4):
    found = gloo4.run(trains_like_one_device, timeout=280)[0]
    losses, grads = one_device()
    for name, (mine, mine_grads) in found.items():
        assert max(abs(a - b) / b for a, b in zip(mine, losses, strict=True)) < 2**-8, (name, mine, losses)
        square = sum(float((g - grads[n]).square().sum()) for n, g in mine_grads.items())
        assert square / sum(float(g.square().sum()) for g in grads.values() if g is not None) < 0.1**2, name


# ---------------------------------------------------------------------------------------------------------- the ops

MESH = Mesh.of(dp=4, tp=1, ep=1, etp=1)


def gathers_low(rank, world):
    group = Groups(MESH, {"dp_edp"}).name("dp_edp")
    masters = [torch.randn(2, 3) + rank, torch.randn(4) + rank]
    masters = [m.requires_grad_() for m in masters]
    # One by one: bf16 travels; 256 + 1 + 1 + 1 is 259 in fp32, and 256 in bf16.
    x = masters[0].detach().to(LOW)
    whole = WAIT(ops.s_to_r_low(x, masters[0], 1, 4, group))
    parts = [torch.empty_like(x) for _ in range(4)]
    torch.distributed.all_gather(parts, x)
    assert whole.dtype == LOW
    assert torch.equal(whole, torch.cat(parts, 1))
    whole.backward(torch.full_like(whole, 256.0 if rank == 0 else 1.0))
    assert masters[0].grad.dtype == torch.float32
    assert masters[0].grad.tolist() == [[259.0] * 3] * 2
    # Together.
    masters[0].grad = None
    flat = ops.pack([m.detach().to(LOW) for m in masters], 1, [1, 0])
    whole = WAIT(ops.s_to_r_low(flat, ops.pack_empty(masters, 1, [1, 0]), 0, 4, group))
    a, b = ops.unpack(whole, 4, [1, 0], [2, 2, 12, 1, 16])
    assert torch.equal(a, torch.cat(parts, 1))
    torch.autograd.backward([a, b], [torch.full_like(a, 256.0 if rank == 0 else 1.0), torch.full_like(b, 2.0)])
    assert masters[0].grad.tolist() == [[259.0] * 3] * 2
    assert masters[1].grad.tolist() == [8.0] * 4
    with pytest.raises(MoecError, match="is no copy of"):
        ops.s_to_r_low(x[:1], masters[0], 1, 4, group)
    with mock.patch.object(convert, "on_wait", lambda _, work: work.wait()):
        checks = ("test_schema", "test_faketensor", "test_autograd_registration")
        master = masters[0].detach().requires_grad_()
        torch.library.opcheck(ops.s_to_r_low.default, (x, master, 1, 4, group), test_utils=checks)
        torch.library.opcheck(ops.pack_empty.default, (masters, 1, [1, 0]), test_utils=checks[:2])


def test_a_narrow_gather_sums_gradients_wide(gloo4):
    gloo4.run(gathers_low, timeout=60)


# --------------------------------------------------------------------------------------------------------- sabotage


@cache
def program():
    stages = dict(spmd.compile_stages(captured(), moec.Plan(dp=4, ep=2, fsdp=True, precision=BF16)))
    return stages["lower"]


@pytest.mark.parametrize(
    ("what", "seen"),
    [
        ("masters packed otherwise", "masters packed otherwise|gathered on dim"),
        ("no master", "does not feed one gather|not its master's alone"),
        ("a gradient of the copy", "not its master's alone"),
    ],
)
def test_the_verifier_sees_a_wrong_gather(what, seen):
    broken = program().fork()
    check_types(broken)
    gather = broken.graph.find_nodes(op="call_function", target=ops.s_to_r_low.default)[0]
    if what == "masters packed otherwise":
        masters, size, dims = gather.args[1].args
        gather.args[1].args = (masters, size, [1 - d for d in dims])
    elif what == "no master":
        gather.update_arg(1, gather.args[0])
    else:
        gather.args[0].meta["grad"] = True
    with pytest.raises(MoecError, match=seen):
        check_types(broken)
