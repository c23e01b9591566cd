"""Plans with ``overlap``: forward and backward graphs run in the place of recorded ones, and train alike."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import grid
import pytest
import torch
import yaml
from torch import nn

import moec
import moec.cost

pytestmark = pytest.mark.timeout(300)  # four processes compile on what may be two busy cores

PLANS = {
    "dp, tp, ep": {"dp": 2, "tp": 2, "ep": 4},
    "fsdp, ep": {"dp": 4, "fsdp": True, "ep": 2},
    "hsdp, tp": {"dp": 4, "fsdp": 2, "ep": 4, "outputs": "drop"},
    "sp, cp": {"dp": 1, "tp": 2, "cp": 2, "sequence_parallel": True, "ep": 4},
}


def unchanged(net):
    pass


BOTH = (None, moec.Overlap())


def models(plan, data, change=unchanged, overlaps=BOTH):
    """The same model with recorded and with scheduled graphs."""
    out = []
    for p in (replace(plan, overlap=overlap) for overlap in overlaps):
        net = grid.build("plain")
        change(net)
        if change is unchanged:
            out.append(grid.parallelize("plain", net, p, data))
        else:
            out.append(moec.parallelize(net, p, example_kwargs=data))
    return out


def same_grads(a: nn.Module, b: nn.Module, tolerance: float = 0.0) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            x, y = (g.to_local() if hasattr(g, "to_local") else g for g in (p.grad, q.grad))
            assert type(p.grad) is type(q.grad) and x.stride() == y.stride()
            off = grid.relative(x, y, floor=1e-12)
            assert off <= tolerance, (name, off)


# ------------------------------------------------------------------------------------------------------- one process


@cache
def pair():
    return models(moec.Plan(), grid.batch())


@pytest.fixture
def both():
    for m in pair():
        m.zero_grad()
        m.train()
    return pair()


LOSSES = {
    "loss": lambda out: out["loss"],
    "logits": lambda out: (out["logits"] ** 2).sum(),
    "both": lambda out: out["loss"] * 2 + out["logits"].sum(),
}


@pytest.mark.parametrize("of", LOSSES)
def test_gradients_are_those_of_autograd_bit_for_bit(both, of):
    for seed in range(2):  # accumulates, another size each time
        outs = [m(**grid.batch(seed=seed, S=7 + seed)) for m in both]
        assert torch.equal(outs[0]["loss"], outs[1]["loss"]) and torch.equal(outs[0]["logits"], outs[1]["logits"])
        for out in outs:
            LOSSES[of](out).backward()
    same_grads(*both)


def test_a_backward_makes_only_what_is_asked_for(both):
    """A loss alone: as autograd, no gradient of the logits is made up, added or passed on."""
    step = both[1].program.step
    alone, all_ = (step.backward(frozenset(g)).graph for g in ([0], [0, 1]))
    assert not alone.find_nodes(op="call_function", target=torch.ops.aten.zeros_like.default)
    names = {n.name for n in alone.nodes}
    assert "tangent_1" not in names and len(alone.nodes) < len(all_.nodes)


def test_without_gradients(both):
    recorded, model = both
    data = grid.batch(seed=3)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out, want = model(**data), recorded(**data)
        assert not out["loss"].requires_grad and torch.equal(out["loss"], want["loss"])
    kept = model.program.step.inference.graph.output_node().args[0]
    assert len(kept) == model.program.step.num_outputs


def test_a_second_backward_needs_retain_graph(both):
    recorded, model = both
    data = grid.batch(seed=4)
    loss, want = model(**data)["loss"], recorded(**data)["loss"]
    for x in (loss, want):
        x.backward(retain_graph=True)
        x.backward()
    same_grads(recorded, model)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_parameter_changed_before_the_backward_is_an_error(both):
    model = both[1]
    loss = model(**grid.batch())["loss"]
    with torch.no_grad():
        model.head.weight.mul_(1.0)
    with pytest.raises(moec.MoecError, match="changed between forward and backward"):
        loss.backward()


def test_saved_tensors_go_as_they_are_read(both):
    """The backward holds no list of all that was saved."""
    model = both[1]
    loss = model(**grid.batch())["loss"]
    node = loss.grad_fn
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        node.saved_tensors  # noqa: B018


def test_statistics_and_evaluation(both):
    data = grid.batch(seed=5)
    stats = []
    for m in both:
        moec.moe_stats(m, reset=True)
        m(**data)["loss"].backward()
        stats.append(moec.moe_stats(m, reset=True))
        m.eval()
    for path, stat in stats[0].items():
        assert torch.equal(stat.tokens_per_expert, stats[1][path].tokens_per_expert) and stat.tokens > 0
    with torch.no_grad():
        assert torch.equal(*(m(**data)["loss"] for m in both))


def partly(net):
    for name, p in net.named_parameters():
        p.requires_grad_(not ("embed" in name or ".w3" in name or "norm1" in name))
    net.unused = nn.Parameter(torch.ones(3))


def test_frozen_and_unused_parameters():
    both = models(moec.Plan(), grid.batch(), partly)
    for m in both:
        m(**grid.batch(seed=2))["loss"].backward()
    same_grads(*both)
    grads = {n: p.grad for n, p in both[1].named_parameters()}
    assert grads["unused"] is None and grads["embed.weight"] is None and grads["head.weight"] is not None
    for p in both[1].parameters():  # frozen after it was compiled, all of it
        p.requires_grad_(False)
    assert not both[1](**grid.batch())["loss"].requires_grad


# ----------------------------------------------------------------------------------------------------- four processes


def trains_as_recorded(rank, world, degrees):
    overlaps = (None, moec.Overlap(bucket_mb=0.004), moec.Overlap(bucket_mb=0.004, schedule=False))
    recorded, model, in_place = every = models(moec.Plan(**degrees), grid.batch(S=8), overlaps=overlaps)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in every]
    orders = [[n.name for n in m.program.step.backward(m.program.step.usual()).graph.nodes] for m in every[1:]]
    assert orders[0] != orders[1]
    for step in range(3):
        for part in range(2):  # accumulates
            data = grid.batch(seed=2 * step + part, S=8 + 4 * step)
            outs = [m(**moec.shard_batch(data, m)) for m in every]
            assert grid.relative(outs[1]["loss"], outs[0]["loss"]) <= 1e-12
            assert torch.equal(outs[1]["loss"], outs[2]["loss"])
            for out in outs:
                out["loss"].backward()
        same_grads(recorded, model, 1e-9)
        same_grads(model, in_place)  # bit for bit
        for o in optimizers:
            o.step()
            o.zero_grad()
    for p, q in zip(model.parameters(), in_place.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local())


@pytest.mark.parametrize("plan", [pytest.param(p, marks=() if p == "fsdp, ep" else pytest.mark.nightly) for p in PLANS])
def test_trains_as_recorded(gloo4, plan):
    gloo4.run(trains_as_recorded, PLANS[plan], timeout=280)


def on_another_cluster(rank, world, folder):
    path = f"{folder}/{rank % 2}.yaml"
    if rank < 2:
        cluster = moec.cost.cluster("cpu2-1gbit").to_dict()
        cluster["op_overhead_s"] = (1e-6, 0.1)[rank]
        Path(path).write_text(yaml.safe_dump(cluster))
    torch.distributed.barrier()
    plan = moec.Plan(dp=4, fsdp=True, overlap=moec.Overlap(cluster=path, bucket_mb=None))
    grid.parallelize("plain", grid.build("plain"), plan, grid.batch())


@pytest.mark.nightly
def test_ranks_with_another_order_are_refused(gloo4, tmp_path):
    """Clusters that differ give other orders: one error on all ranks, and no hang in the first step."""
    gloo4.run_raising(on_another_cluster, str(tmp_path), timeout=280)
