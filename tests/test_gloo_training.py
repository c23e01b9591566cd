"""What people do to a model before and while they train it, on four gloo processes (and on one without any)."""

import copy
from contextlib import contextmanager

import grid
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moec
from moec import compiler

pytestmark = pytest.mark.timeout(300)  # four processes compile on what may be two busy cores

TOLERANCE = {"plain": 1e-9, "mixtral": 1e-6}


@contextmanager
def compilations():
    """The list of what is compiled meanwhile: (training,) of each."""
    seen, compile_program = [], compiler.compile_program

    def counting(*args, **kwargs):
        seen.append(kwargs["training"])
        return compile_program(*args, **kwargs)

    compiler.compile_program = counting
    try:
        yield seen
    finally:
        compiler.compile_program = compile_program


def compare(model, ref, data, tolerance):
    """One forward and backward of both; loss and every gradient agree."""
    out, want = model(**moec.shard_batch(data, model)), ref(**data)
    out["loss"].backward()
    want["loss"].backward()
    assert grid.relative(out["loss"], want["loss"]) <= tolerance
    error, name = grid.worst_grad(moec.full_grads(model), ref)
    assert error <= tolerance, name
    return out


# ------------------------------------------------------------------------------------------------ sizes and modes


def sizes_and_modes(rank, world):
    net, data = grid.build("plain"), grid.batch()
    ref = grid.reference(net)
    with compilations() as seen:
        model = moec.parallelize(net, moec.Plan(dp=2, tp=2, ep=4), example_kwargs=data)
        compare(model, ref, data, 1e-9)
        compare(model, ref, grid.batch(B=2, S=17, seed=2), 1e-9)  # accumulates into the gradients of the first
        model.zero_grad()
        ref.zero_grad()
        # Each dp rank has its own length; padding that has no label and comes last changes nothing for one device.
        short = grid.batch(B=2, S=5, seed=3)
        long = grid.batch(B=2, S=8, seed=4)
        padded = {k: torch.cat([F.pad(short[k], (0, 3), value=v), long[k]]) for k, v in
                  (("input_ids", 0), ("labels", -100))}  # fmt: skip
        loss = model(**(short, long)[model.dp_rank])["loss"]
        loss.backward()
        want = ref(**padded)["loss"]
        want.backward()
        assert grid.relative(loss, want) <= 1e-9
        assert grid.worst_grad(moec.full_grads(model), ref)[0] <= 1e-9
        for i in range(10):  # ten lengths and ten batch sizes, none of them seen before
            for data_i in (grid.batch(B=2, S=18 + i, seed=i), grid.batch(B=10 + 2 * i, S=4, seed=i)):
                with torch.no_grad():
                    out, want = model(**moec.shard_batch(data_i, model)), ref(**data_i)
                assert grid.relative(out["loss"], want["loss"]) <= 1e-9
        assert seen == [True]

        model.eval()
        with torch.no_grad():
            out, want = model(**moec.shard_batch(data, model)), ref.eval()(**data)
        assert not out["loss"].requires_grad
        assert grid.relative(out["loss"], want["loss"]) <= 1e-9
        with torch.no_grad():
            out, want = model(moec.shard_batch(data["input_ids"], model)), ref(data["input_ids"])
        assert out.keys() == {"logits"}
        assert grid.relative(out["logits"], moec.shard_batch(want["logits"], model)) <= 1e-9
        assert seen == [True, False, False]
        model.train()
        ref.train()
        model.zero_grad()
        ref.zero_grad()
        compare(model, ref, data, 1e-9)
        assert seen == [True, False, False]


def test_sizes_and_modes(gloo4):
    gloo4.run(sizes_and_modes, timeout=280)


# ------------------------------------------------------------------------------------------ parts that do not train


class LowRank(nn.Module):
    """What an adapter library puts in the place of a linear layer; tp does not divide its rank."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False).to(base.weight.dtype)
        self.b = nn.Linear(rank, base.out_features, bias=False).to(base.weight.dtype)

    def forward(self, x):
        return self.base(x) + 0.5 * self.b(self.a(x))


def adapted(net):
    """Frozen but for low-rank adapters on the attention's projections."""
    net.requires_grad_(False)
    for path, module in list(net.named_modules()):
        owner, _, name = path.rpartition(".")
        if isinstance(module, nn.Linear) and ("attn" in owner or owner.endswith("attention")):
            setattr(net.get_submodule(owner), name, LowRank(module))
    return net


def frozen(net):
    """Embedding, one norm and one expert projection do not train."""
    for name, p in net.named_parameters():
        p.requires_grad_(
            not ("embed" in name or "layers.0.norm1" in name or "input_layernorm" in name or ".w3." in name)
        )
    return net


def tied(net):
    if hasattr(net, "config"):
        net.config.tie_word_embeddings = True
        net.lm_head.weight = net.model.embed_tokens.weight
    else:
        net.head.weight = net.embed.weight
    return net


def trains(rank, world, kind, change, degrees):
    net, data = change(grid.build(kind)), grid.batch()
    ref = grid.reference(net)
    model = moec.parallelize(net, moec.Plan(**degrees), example_kwargs=data)
    trainable = {n for n, p in ref.named_parameters() if p.requires_grad}
    assert trainable
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (model, ref)]
    for step in range(2):
        compare(model, ref, grid.batch(seed=step), TOLERANCE[kind] if step == 0 else 1e-4)
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.nn.utils.clip_grad_norm_(ref.parameters(), 0.1)
        for o in optimizers:
            o.step()
            o.zero_grad()
    assert grid.worst_value(model, ref)[0] <= 1e-5
    start, now = dict(net.named_parameters()), moec.full_state_dict(model)
    assert all(torch.equal(now[n], p) == (n not in trainable) for n, p in start.items())
    return len(list(model.parameters())), len({id(p) for p in net.parameters()})


@pytest.mark.parametrize("change", [adapted, *(pytest.param(c, marks=pytest.mark.nightly) for c in (frozen, tied))])
def test_partly_trained(gloo4, change):
    gloo4.run(trains, "plain", change, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, timeout=280)


@pytest.mark.nightly
@pytest.mark.parametrize("change", [frozen, adapted, tied])
@pytest.mark.parametrize("degrees", [{"dp": 2, "tp": 2, "ep": 4}, {"tp": 4, "dp": 1}, {"dp": 4, "ep": 4}], ids=str)
@pytest.mark.parametrize("kind", ["plain", "mixtral"])
def test_partly_trained_on_more_plans(gloo4, kind, change, degrees):
    gloo4.run(trains, kind, change, degrees, timeout=300)


# ------------------------------------------------------------------------------------------------ calls and results


def shifted_loss(out, ids, labels):
    return F.cross_entropy(out["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)


class Headless(nn.Module):
    """Logits only; takes labels and leaves them to the loss."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, ids, labels=None):
        return self.net(ids)


def loss_of_the_user_and_positional_inputs(rank, world):
    net, data = Headless(grid.build("plain")), grid.batch()
    ref = grid.reference(net)
    args = (data["input_ids"], data["labels"])
    with compilations() as seen:
        plan = moec.Plan(dp=2, tp=2, ep=4, outputs={"output.logits": "full"})
        model = moec.parallelize(net, plan, example_inputs=args, loss_fn=shifted_loss)
        out = model(*moec.shard_batch(args, model))
        want = ref(*args)
        loss = shifted_loss(want, *args)
        out["loss"].backward()
        loss.backward()
        assert grid.relative(out["loss"], loss) <= 1e-9
        assert grid.worst_grad(moec.full_grads(model), ref)[0] <= 1e-9
        assert out["output"]["logits"].shape == want["logits"].shape  # the global batch, on every rank
        assert grid.relative(out["output"]["logits"], want["logits"]) <= 1e-9
        ids, labels = moec.shard_batch(args, model)
        assert torch.equal(model(ids, labels=labels)["loss"], out["loss"])  # however it is spelt
        assert torch.equal(model(labels=labels, ids=ids)["loss"], out["loss"])
        assert seen == [True]
    return [s.path for s in model.program.inputs.values()]


def test_loss_of_the_user_and_positional_inputs(gloo4):
    assert gloo4.run(loss_of_the_user_and_positional_inputs, timeout=280) == [["0", "1"]] * 4


def outputs_full_or_dropped(rank, world):
    net, data = grid.build("mixtral"), grid.batch()
    ref = grid.reference(net)
    results = {}
    for mode in ("full", "drop"):
        model = grid.parallelize("mixtral", net, moec.Plan(dp=4, ep=4, outputs=mode), data)
        results[mode] = compare(model, ref, data, 1e-6)
        ref.zero_grad()
    want = ref(**data)
    assert type(results["full"]) is type(results["drop"]) is type(want)
    assert grid.relative(results["full"].logits, want.logits) <= 1e-6
    assert results["drop"].logits is None


def test_outputs_full_or_dropped(gloo4):
    gloo4.run(outputs_full_or_dropped, timeout=280)


# ------------------------------------------------------------------------------------------------ one process


@pytest.mark.parametrize("kind", ["plain", "mixtral"])
def test_one_process_needs_no_process_group(kind):
    assert not torch.distributed.is_initialized()
    net, data = grid.build(kind), grid.batch()
    ref = grid.reference(net)
    model = moec.parallelize(net, moec.Plan(), example_kwargs=data)
    assert not any(isinstance(p, torch.distributed.tensor.DTensor) for p in model.parameters())
    before = copy.deepcopy(net.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (model, ref)]
    for step in range(2):
        compare(model, ref, grid.batch(seed=step), TOLERANCE[kind] if step == 0 else 1e-4)
        assert {p.removesuffix(".experts"): n.tolist() for p, n in model.expert_load().items()}.keys() == {
            p.removesuffix(".gate") for p, _ in net.named_modules() if p.endswith(".gate")
        }
        for o in optimizers:
            o.step()
            o.zero_grad()
    assert grid.worst_value(model, ref)[0] <= 1e-5
    assert all(torch.equal(before[n], v) for n, v in net.state_dict().items())  # copied from, never changed
