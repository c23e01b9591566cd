"""ParallelModule against the module that it was made from, in one process and in four gloo processes."""

import inspect
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hand_made import D, Net, program
from torch.distributed.tensor import DTensor

from moec.inputs import bind, canonical
from moec.module import ParallelModule
from moec.plan import Plan
from moec.preflight import Report, exchange, local_problems, values_digest
from moec.program import InputSpec
from moec.runtime.errors import MoecError
from moec.runtime.groups import Groups
from moec.state import checkpointable, full_grads, full_state_dict, load_full_state_dict, shard_batch

MESHES = [
    {"dp": 4, "ep": 4},
    {"dp": 2, "tp": 2},
    {"dp": 1, "tp": 4},
    {"dp": 1, "tp": 4, "ep": 2, "etp": 1},  # tp is two atomic axes: packed dims are cut twice
    {"dp": 2, "tp": 2, "ep": 4},
]
B = 8


def build(source, world=1, rank=0, example=(), compiled=None, **degrees):
    mesh = Plan(**degrees).mesh(world)
    groups = Groups(mesh, {mesh.key(mesh.role(r)) for r in ("tp", "dp")} - {""}) if world > 1 else None

    def compile_fn(training, args, kwargs):
        if compiled is not None:
            compiled.append((training, kwargs))
        if kwargs.get("flag") == "bad":
            raise ValueError("cannot compile this")
        if kwargs.get("flag") == f"bad on {rank}":
            raise MoecError("only here", where="capture")
        return program(mesh, groups, rank, training, kwargs.get("flag", 1))

    return ParallelModule(source, program(mesh, groups, rank), groups, compile_fn, example)


def batch(seed=1, n=B):
    return torch.randn(n, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(a, b, tol=1e-12):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def named_grads(net):
    return {n: p.grad for n, p in net.named_parameters(remove_duplicate=False)}


# ----------------------------------------------------------------------------------------------- four processes


def trains_like_one_device(rank, world, degrees, steps, accumulate):
    net = Net()
    model = build(net, world, rank, (batch()[:2],), **degrees)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    opt, ref = (torch.optim.AdamW(m.parameters(), lr=0.05, foreach=True) for m in (model, net))
    for step in range(steps):
        for k in range(accumulate):
            x = batch(10 * step + k)
            out = model(shard_batch(x, model))
            want = net(x)
            assert out["note"] == "constant"
            close(out["loss"], want["loss"])
            close(out["y"], shard_batch(want["y"], model))
            out["loss"].backward()
            want["loss"].backward()
        mine, theirs = full_grads(model), named_grads(net)
        assert list(mine) == list(theirs)
        for name in mine:
            assert (mine[name] is None) == (theirs[name] is None), name
            if mine[name] is not None:
                close(mine[name], theirs[name])
        for p in model.parameters():
            assert p.grad is None or p.grad.placements == p.placements
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
        close(norm.full_tensor(), torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1))
        for o in (opt, ref):
            o.step()
            o.zero_grad()
    state, want = full_state_dict(model), net.state_dict()
    assert list(state) == list(want)
    for name in state:
        close(state[name], want[name], 1e-10)
    return (model.dp_rank, model.dp_size)


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_trains_like_one_device(gloo4, degrees):
    ranks = gloo4.run(trains_like_one_device, degrees, 3, 2)
    assert [r[0] for r in ranks] == [r // degrees.get("tp", 1) for r in range(4)]


def full_tensors(rank, world, degrees):
    net = Net()
    model = build(net, world, rank, (batch(),), **degrees)
    for name, p in model.named_parameters():
        full = torch.stack([e.w for e in net.experts]) if "*" in name else net.get_parameter(name)
        assert torch.equal(p.full_tensor(), full), name
    assert [n for n, _ in model.named_buffers()] == ["shift", "cache"]
    assert model.head.weight is model.tied.weight
    assert not model.frozen.requires_grad
    return [n for n, _ in model.named_parameters()]


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_parameters_are_dtensors_of_the_full_value_under_the_original_names(gloo4, degrees):
    names = gloo4.run(full_tensors, degrees)
    wanted = {n for n, _ in Net().named_parameters() if "experts" not in n} | {"experts.*.w"}
    assert all(set(n) == wanted and len(n) == len(wanted) for n in names)


def eval_and_variants(rank, world):
    net, compiled = Net(), []
    model = build(net, world, rank, (batch(),), compiled, dp=2, tp=2)
    x = batch(3)
    mine = shard_batch(x, model)
    model(mine)
    model(x=mine, mode=None)  # the same call, spelt otherwise
    assert compiled == []
    model.eval()
    with torch.no_grad():
        out = model(mine)
        close(out["loss"], net(x)["loss"])
        assert not out["loss"].requires_grad
        model(mine[:2])  # another batch size
    assert compiled == [(False, {})]
    model.train()
    close(model(mine, flag=3)["loss"], 3 * net(x)["loss"])
    assert compiled == [(False, {}), (True, {"flag": 3})]
    model(mine, flag=3)
    assert len(compiled) == 2
    with pytest.raises(MoecError, match="cannot compile this"):
        model(mine, flag="bad")
    close(model(mine)["loss"], net(x)["loss"])  # a failure leaves the module usable


def test_eval_and_variants(gloo4):
    gloo4.run(eval_and_variants)


def frozen_later(rank, world):
    net = Net()
    model = build(net, world, rank, (batch(),), dp=2, tp=2)
    model.down.weight.requires_grad_(False)
    model(shard_batch(batch(), model))["loss"].backward()
    assert model.down.weight.grad is None
    assert model.frozen.grad is None and model.unused.grad is None and model.scale.grad is not None


def test_a_parameter_frozen_later_gets_no_gradient(gloo4):
    gloo4.run(frozen_later)


def loads(rank, world, degrees):
    model = build(Net(), world, rank, (batch(),), **degrees)
    other = Net(seed=5)
    other.shift += 1
    load_full_state_dict(model, other.state_dict())
    close(model(shard_batch(batch(), model))["loss"], other(batch())["loss"])
    without_tie = {k: v for k, v in Net(seed=6).state_dict().items() if k != "head.weight"}
    load_full_state_dict(model, without_tie)
    close(model(shard_batch(batch(), model))["loss"], Net(seed=6)(batch())["loss"])


@pytest.mark.parametrize("degrees", MESHES[1:4], ids=str)
def test_load_full_state_dict(gloo4, degrees):
    gloo4.run(loads, degrees)


def checkpoint(rank, world, folder, saved, loaded):
    net = Net()
    model = build(net, world, rank, (batch(),), **saved)
    opt = torch.optim.AdamW(model.parameters(), foreach=True)
    model(shard_batch(batch(), model))["loss"].backward()
    opt.step()
    dcp.save(
        {"model": model.state_dict(), "opt": checkpointable(model, opt.state_dict()["state"])}, checkpoint_id=folder
    )
    want = full_state_dict(model)
    moments = [opt.state[p]["exp_avg"].full_tensor() for p in model.parameters() if p in opt.state]

    other = build(Net(seed=9), world, rank, (batch(),), **loaded)
    opt2 = torch.optim.AdamW(other.parameters(), foreach=True)
    other(shard_batch(batch(), other))["loss"].backward()
    opt2.step()
    into = {"model": other.state_dict(), "opt": checkpointable(other, opt2.state_dict()["state"])}
    dcp.load(into, checkpoint_id=folder)
    other.load_state_dict(into["model"])
    got = full_state_dict(other)
    for name in want:
        assert torch.equal(got[name], want[name]), name
    for p, m in zip(opt2.state, moments, strict=True):
        assert torch.equal(opt2.state[p]["exp_avg"].full_tensor(), m)


@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (3, 1), (0, 3)])
def test_a_checkpoint_of_one_plan_loads_under_another(gloo4, saved, loaded):
    with tempfile.TemporaryDirectory() as folder:
        gloo4.run(checkpoint, folder, MESHES[saved], MESHES[loaded])


# ----------------------------------------------------------------------------------------------- errors on all ranks


def misuse(rank, world, what):
    degrees = {"dp": 2, "tp": 2}
    model = build(Net(), world, rank, (batch(),), **degrees)
    x = shard_batch(batch(), model)
    odd = rank == 3
    if what == "tp shapes":
        model(x[:2] if rank in (2, 3) else x[: 2 if odd else 4])
    elif what == "inside tp":
        model.program.inputs["x"] = type(model.program.inputs["x"])("x", "x", None, 2, torch.float64)
        model(x[: 3 if odd else 4])
    elif what == "batch":
        model(x[:2] if model.dp_rank else x)
    elif what == "dtype":
        model(x.float() if odd else x)
    elif what == "ndim":
        model(x[0] if odd else x)
    elif what == "static":
        model(x[:, :5] if odd else x)
    elif what == "missing":
        model() if odd else model(x)
    elif what == "unknown":
        model(x, lables=x) if odd else model(x)
    elif what == "object":
        model(x, mode=object()) if odd else model(x)
    elif what == "values":
        model(x, flag=2 if odd else 1)
    elif what == "mode":
        model.train(not odd)
        model(x)
    elif what == "compile on one":
        model(x, flag="bad on 3")
    elif what == "alias":
        p = model.down.bias.to_local()
        model(p.detach().view(1, D) if odd else x[:1])
    elif what == "gradient":
        model(x.clone().requires_grad_(odd))
    elif what == "unfrozen":
        model.frozen.requires_grad_(odd)
        model(x)
    elif what == "converted":
        (model.float() if odd else model)(x)
    elif what == "source":
        build(Net(seed=int(rank == 3)), world, rank, (batch(),), **degrees)
    elif what == "load":
        state = Net().state_dict()
        if odd:
            state["down.bias"] = state["down.bias"][:2]
            state["head.weight"] = state["head.weight"] + 1
            state["sclae"] = state.pop("scale")
            del state["experts.2.w"]
        before = full_state_dict(model)
        try:
            load_full_state_dict(model, state)
        finally:
            after = full_state_dict(model)
            assert all(torch.equal(after[n], before[n]) for n in before)
    elif what == "load differs":
        load_full_state_dict(model, Net(seed=int(rank == 3)).state_dict())


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("batch", ["batch size differs", "ranks 0, 1: x=4", "ranks 2, 3: x=2"]),
        ("inside tp", ["shapes differ inside the tp group [2, 3]: rank 2: x=[4, 6]; rank 3: x=[3, 6]"]),
        ("dtype", ["ranks 0, 1, 2: train(x: float64[:, :]); rank 3: train(x: float32[:, :])"]),
        ("ndim", ["ranks 0, 1, 2: train(x: float64[:, :]); rank 3: train(x: float64[:])"]),
        ("static", ["rank 3: input 'x' has size 5 in dim 1, it must be 6"]),
        ("missing", ["rank 3: forward: missing a required argument: 'x'"]),
        ("unknown", ["rank 3: forward: got an unexpected keyword argument 'lables'", "did you mean 'labels'"]),
        ("object", ["rank 3: mode: argument is a object"]),
        ("values", ["ranks 0, 1, 2: train(x: float64[:, :]); rank 3: train(x: float64[:, :], flag=2)"]),
        ("mode", ["ranks 0, 1, 2: train(x: float64[:, :]); rank 3: eval(x: float64[:, :])"]),
        ("compile on one", ["rank 3: capture: only here"]),
        ("alias", ["rank 3: input 'x' shares memory with parameter 'down.bias'"]),
        ("gradient", ["rank 3: input 'x' requires a gradient"]),
        ("unfrozen", ["rank 3: frozen was frozen when the model was compiled"]),
        ("converted", ["rank 3: gate_up.weight is torch.float32, compiled for torch.float64"]),
        ("source", ["tensors differ between rank 3 and rank 0"]),
        (
            "load",
            [
                "rank 3: down.bias: shape (2,), expected (6,)",
                "rank 3: head.weight and tied.weight are one tied parameter, but their values differ",
                "rank 3: sclae: unknown (did you mean 'scale'?)",
                "rank 3: scale: missing",
                "rank 3: experts.2.w: missing",
            ],
        ),
        ("load differs", ["state dict", "rank 3 and rank 0"]),
    ],
)
def test_all_ranks_raise_the_same_error(gloo4, what, texts):
    errors = gloo4.run_raising(misuse, what)
    assert len({str(e) for e in errors}) == 1
    for text in texts:
        assert text in str(errors[0]), f"{text!r} is not in: {errors[0]}"


def wrong_world(rank, world):
    mesh = Plan(dp=1, tp=2).mesh(2)
    ParallelModule(Net(), program(mesh, _Names(), rank % 2), _Names(), None)


class _Names:
    def name(self, key):
        return key


def test_world_of_another_size(gloo4):
    errors = gloo4.run_raising(wrong_world)
    assert "the plan has 2 ranks, the process group has 4" in str(errors[0])


# ----------------------------------------------------------------------------------------------- one process


def test_one_process_needs_no_process_group():
    assert not dist.is_initialized()
    net = Net()
    model = build(net, example=(batch(),))
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    out, want = model(batch()), net(batch())
    out["loss"].backward()
    want["loss"].backward()
    close(out["y"], want["y"])
    for name, grad in full_grads(model).items():
        assert (grad is None) == (named_grads(net)[name] is None)
        if grad is not None:
            close(grad, named_grads(net)[name])
    assert (model.dp_rank, model.dp_size) == (0, 1)
    with torch.no_grad():  # the source is copied, not kept
        model.scale.zero_()
    assert net.scale.abs().sum() > 0


def test_missing_process_group():
    with pytest.raises(MoecError, match="there is no process group"):
        ParallelModule(Net(), program(Plan(tp=4).mesh(4), _Names(), 0), None, None)


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_one_process_checks_its_inputs(name):
    model = build(Net(), example=(batch(),))
    with pytest.raises(MoecError, match="missing a required argument" if name == "missing" else "empty batch"):
        model(*([] if name == "missing" else [batch()[:0]]))


def test_shard_batch_refuses_what_dp_does_not_divide(gloo4):
    errors = gloo4.run_raising(indivisible)
    assert "shape (7, 6) cannot be cut into 2 equal parts" in str(errors[0])


def indivisible(rank, world):
    model = build(Net(), world, rank, (batch(),), dp=2, tp=2)
    tree = shard_batch({"x": batch(n=4), "n": 3}, model)
    assert torch.equal(tree["x"], batch(n=4)[2 * model.dp_rank :][:2]) and tree["n"] == 3
    shard_batch(batch(n=7), model)


def test_meta_source_gives_meta_parameters_that_load_refuses():
    model = build(Net().to("meta"), example=(batch(),))
    assert model.scale.device.type == "meta"
    with pytest.raises(MoecError, match="meta device"):
        load_full_state_dict(model, Net().state_dict())
    model.to_empty(device="cpu")
    load_full_state_dict(model, Net().state_dict())
    assert torch.equal(model.gate_up.weight, Net().gate_up.weight)


def test_a_child_may_be_called_like_one_of_our_attributes():
    class Odd(Net):
        def __init__(self):
            super().__init__()
            self.program = torch.nn.Linear(1, 1).double()

    model = build(Odd(), example=(batch(),))
    assert "program.weight" in full_state_dict(model)
    model(batch())


# ----------------------------------------------------------------------------------------------- preflight, by itself


def ids_differ(rank, world):
    mesh = Plan(dp=2, tp=2).mesh(world)
    ids = torch.tensor([[1, 2, 3 + (rank == 3)], [4, 5, 6]])
    report = Report("k", shapes={"ids": (2, 3)}, values=values_digest([ids + 10 * mesh.index(rank, mesh.role("dp"))]))
    exchange(report, mesh, torch.device("cpu"))


def test_token_ids_that_differ_inside_a_tp_group(gloo4):
    errors = gloo4.run_raising(ids_differ)
    assert len({str(e) for e in errors}) == 1
    assert "integer inputs differ inside the tp group [2, 3]" in str(errors[0])  # and not [0, 1]


def test_values_digest_sees_order_and_leaves_floats_out():
    a = torch.arange(12).view(3, 4)
    assert values_digest([a]) != values_digest([a.flip(0)])
    assert values_digest([a, a + 1]) != values_digest([a + 1, a])
    assert values_digest([a.float()]) == values_digest([])


@pytest.mark.parametrize(
    ("first", "second", "overlap"),
    [
        (lambda x: x[:, :-1], lambda x: x[:, 1:], True),
        (lambda x: x[:, ::2], lambda x: x[:, 1::2], False),  # interleaved: the same range, no common element
        (lambda x: x[:2], lambda x: x[2:], False),
        (lambda x: x, lambda x: x, False),  # one tensor passed twice
        (lambda x: x, lambda x: x.t(), True),
        (lambda x: x, lambda x: x.clone(), False),
    ],
)
def test_inputs_that_overlap(first, second, overlap):
    x = torch.arange(36).view(6, 6)
    specs = [(p, InputSpec(p, p, None, 2, torch.int64)) for p in "ab"]
    problems = local_problems(specs, {"a": first(x), "b": second(x)}, {}, 1)
    assert problems == (["inputs 'a' and 'b' overlap in memory: pass clones"] if overlap else [])


def test_the_same_call_has_one_key_however_it_is_spelt():
    def forward(x, mask=None, *more, states=(), **rest): ...

    s, x, y = inspect.signature(forward), torch.ones(3, 2), torch.ones(1, 2)
    assert bind(s, (x,), {}).key(True) == bind(s, (), {"x": x, "mask": None}).key(True)
    assert bind(s, (x,), {}).key(True) != bind(s, (x,), {}).key(False)
    assert bind(s, (x,), {}).key(True) != bind(s, (x, y), {}).key(True)
    assert bind(s, (x, x), {}).key(True) != bind(s, (x, y), {}).key(True)  # y has one row for the whole batch
    call = bind(s, (x, None, y), {"states": [x, {"a": y}], "extra": 3})
    assert list(call.tensors) == ["x", "2", "states.0", "states.1.a"]
    assert call.values == {"extra": "3"}
    assert [canonical(s, p) for p in ("0", "1.a", "2", "x")] == ["x", "mask.a", "2", "x"]
