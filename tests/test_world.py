"""The lockstep world: against what the types mean, against real gloo processes, and against a dense MoE."""

from dataclasses import replace

import pytest
import torch
from collective_cases import (
    CONVERSIONS,
    KEYS,
    MESH,
    Case,
    cases,
    conversion,
    dense_moe,
    dims_of,
    ep_moe,
    exchange_graph,
    exchange_inputs,
    moe_inputs,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from moec.runtime.collectives import TABLE
from moec.runtime.errors import MoecError
from moec.runtime.groups import Groups
from moec.runtime.mesh import Mesh
from moec.runtime.world import LockstepWorld

WORLD = MESH.world


# --- What the types mean, written without the table. ---------------------------------------------------------------


def deal(kind: str, value: Tensor, dim: int, n: int, gen: torch.Generator) -> list[Tensor]:
    """Local values on ``n`` ranks whose meaning under the type ``kind`` is ``value``."""
    if kind == "S":
        return list(value.chunk(n, dim))
    if kind == "P":
        parts = [torch.randint(-9, 9, value.shape, generator=gen).to(value.dtype) for _ in range(n - 1)]
        return [*parts, value - sum(parts)]
    return [value] * n


def holds(kind: str, local: list[Tensor], value: Tensor, dim: int) -> bool:
    """Do the ranks' tensors mean ``value``, and are the copies really the same?"""
    if kind == "S":
        return torch.equal(torch.cat(local, dim), value)
    if kind == "P":
        return torch.equal(sum(local), value)
    return all(x.shape == value.shape and torch.equal(x, value) for x in local)


GRADIENT = {"I": "I", "R": "P", "P": "R", "S": "S"}


def means_the_same(kind: str, dims: tuple[int, ...], key: str, table=TABLE) -> bool:
    """Deal out a global value and a global cotangent by their types; both must come through with their meaning."""
    gen = torch.Generator().manual_seed(3)
    source, dest = kind[0].upper(), kind[-1].upper()
    value, cotangent = (torch.randint(-9, 9, (4, 8, 4), generator=gen).double() for _ in range(2))
    groups, n = MESH.groups(key), MESH.size(key)
    local: list = [None] * WORLD
    back: list = [None] * WORLD
    for ranks in groups:
        for r, x, g in zip(
            ranks, deal(source, value, dims[0], n, gen), deal(GRADIENT[dest], cotangent, dims[-1], n, gen), strict=True
        ):
            local[r], back[r] = x.clone().requires_grad_(), g
    outs = [o for (o,) in LockstepWorld(MESH, table).run(conversion(kind, dims, n, key), [[x] for x in local])]
    torch.autograd.backward(outs, back)
    return all(
        holds(dest, [outs[r] for r in ranks], value, dims[-1])
        and holds(GRADIENT[source], [local[r].grad for r in ranks], cotangent, dims[0])
        for ranks in groups
    )


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("kind", CONVERSIONS)
def test_values_and_gradients_keep_their_meaning(kind, key):
    assert all(means_the_same(kind, dims, key) for dims in dims_of(kind))


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_sabotage_every_wrong_dual_is_caught(kind):
    """Every other kind in the place of the dual: caught, unless it moves the data in the same way."""
    right = TABLE[kind].dual
    dims = dims_of(kind)[0]
    for wrong in CONVERSIONS:
        table = {**TABLE, kind: replace(TABLE[kind], dual=wrong)}
        try:
            same = means_the_same(kind, dims, KEYS[2], table)
        except (RuntimeError, MoecError, ValueError):
            same = False
        assert same == (TABLE[wrong].primitive == TABLE[right].primitive), wrong


def test_sabotage_every_wrong_forward_is_caught():
    for kind in CONVERSIONS:
        for other in {c.primitive for k, c in TABLE.items() if k in CONVERSIONS} - {TABLE[kind].primitive}:
            table = {**TABLE, kind: replace(TABLE[kind], primitive=other)}
            try:
                same = means_the_same(kind, dims_of(kind)[0], KEYS[2], table)
            except (RuntimeError, MoecError, ValueError):
                same = False
            assert not same, (kind, other)


# --- Against real processes. ---------------------------------------------------------------------------------------


def _run_cases(rank: int, world: int, todo: list[Case]) -> list[tuple[Tensor, Tensor | None]]:
    groups = Groups(MESH, KEYS)
    results = []
    for case in todo:
        x = case.input(rank)
        (y,) = case.graph(groups.name(case.key))(x)
        if x.requires_grad:
            y.backward(case.cotangent(y, rank))
        results.append((y.detach().contiguous(), x.grad))
    return results


def test_every_conversion_equals_gloo(gloo4):
    todo = cases()
    real = gloo4.run(_run_cases, todo, timeout=100)
    for i, case in enumerate(todo):
        xs = [case.input(r) for r in range(WORLD)]
        ys = [o for (o,) in LockstepWorld(MESH).run(case.graph(case.key), [[x] for x in xs])]
        if xs[0].requires_grad:
            torch.autograd.backward(ys, [case.cotangent(y, r) for r, y in enumerate(ys)])
        for r in range(WORLD):
            y, grad = real[r][i]
            assert y.dtype == ys[r].dtype, case
            assert torch.equal(y, ys[r].detach()), case
            assert grad is None if xs[r].grad is None else torch.equal(grad, xs[r].grad), case


EXCHANGES = [(kind, key, seed) for kind in ("all_to_all", "all_to_all_rows") for key in KEYS for seed in range(3)]


def _run_exchanges(rank: int, world: int, todo: list) -> list[tuple[Tensor, Tensor]]:
    groups = Groups(MESH, KEYS)
    results = []
    for kind, key, seed in todo:
        x, send, recv = exchange_inputs(key, seed, rank)
        (y,) = exchange_graph(kind, MESH.size(key), groups.name(key))(x, send, recv)
        (y.sin() * (rank + 1)).sum().backward()
        results.append((y.detach(), x.grad))
    return results


def test_uneven_exchanges_equal_gloo(gloo4):
    real = gloo4.run(_run_exchanges, EXCHANGES)
    for i, (kind, key, seed) in enumerate(EXCHANGES):
        inputs = [exchange_inputs(key, seed, r) for r in range(WORLD)]
        ys = [o for (o,) in LockstepWorld(MESH).run(exchange_graph(kind, MESH.size(key), key), inputs)]
        torch.autograd.backward([(y.sin() * (r + 1)).sum() for r, y in enumerate(ys)])
        for r in range(WORLD):
            y, grad = real[r][i]
            x, send, recv = inputs[r]
            assert torch.equal(y, ys[r].detach())
            assert torch.equal(grad, x.grad)
            assert not grad[int(send.sum()) :].any()  # rows that stayed at home
            assert y.shape[0] == (24 if kind == "all_to_all_rows" else int(recv.sum()))
            assert not y[int(recv.sum()) :].any()


def _run_moe(rank: int, world: int, data: dict) -> tuple[Tensor, ...]:
    group = Groups(MESH, KEYS).name(KEYS[2])
    x, weights, w, b = (
        v.clone().requires_grad_()
        for v in (data["x"][rank], data["weights"][rank], data["w"][2 * rank :][:2], data["b"][2 * rank :][:2])
    )
    y = ep_moe(x, data["ids"][rank], weights, w, b, 8, 4, group)
    y.sin().sum().backward()
    return y.detach(), x.grad, weights.grad, w.grad, b.grad


def test_an_expert_parallel_moe_equals_the_dense_one_on_gloo(gloo4):
    data = moe_inputs([5, 0, 7, 1], E=8, K=2, H=3, seed=1)
    got = [torch.cat(parts) for parts in zip(*gloo4.run(_run_moe, data), strict=True)]
    torch.testing.assert_close(got, dense_results(data), rtol=1e-12, atol=1e-12)


# --- Against a dense MoE, in the lockstep world alone. -------------------------------------------------------------


def dense_results(data: dict) -> list[Tensor]:
    x, weights, w, b = (
        v.clone().requires_grad_() for v in (torch.cat(data["x"]), torch.cat(data["weights"]), data["w"], data["b"])
    )
    y = dense_moe(x, torch.cat(data["ids"]), weights, w, b)
    y.sin().sum().backward()
    return [y.detach(), x.grad, weights.grad, w.grad, b.grad]


def moe_graph(E: int, R: int, group: str) -> fx.GraphModule:
    class Moe(torch.nn.Module):
        def forward(self, x, ids, weights, w, b):
            return (ep_moe(x, ids, weights, w, b, E, R, group),)

    return fx.symbolic_trace(Moe())


@settings(max_examples=40)
@given(
    st.sampled_from((Mesh.of(dp=2, ep=2), Mesh.of(dp=2, tp=2, ep=4), Mesh.of(dp=3, ep=3))),
    st.data(),
)
def test_an_expert_parallel_moe_equals_the_dense_one(mesh, draw):
    n = mesh.world
    tokens = draw.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    E = n * draw.draw(st.integers(1, 2))
    data = moe_inputs(tokens, E, K=draw.draw(st.integers(1, min(3, E))), H=3, seed=draw.draw(st.integers(0, 99)))
    inputs = []
    for r in range(n):
        mine = [data["x"][r], data["weights"][r], data["w"].chunk(n)[r], data["b"].chunk(n)[r]]
        x, weights, w, b = (v.clone().requires_grad_() for v in mine)
        inputs.append([x, data["ids"][r], weights, w, b])
    world = LockstepWorld(mesh)
    ys = [o for (o,) in world.run(moe_graph(E, n, mesh.key(mesh.names)), inputs)]
    torch.autograd.backward([y.sin().sum() for y in ys])
    got = [torch.cat([y.detach() for y in ys])]
    got += [torch.cat([i[j].grad for i in inputs]) for j in (0, 2, 3, 4)]
    torch.testing.assert_close(got, dense_results(data), rtol=1e-12, atol=1e-12)
    assert [(e.kind, e.phase) for e in world.log] == [
        ("exchange_counts", "forward"),
        ("all_to_all", "forward"),
        ("all_to_all", "forward"),
        ("all_to_all_rows", "backward"),
        ("all_to_all_rows", "backward"),
    ]


# --- The interpreter itself. ---------------------------------------------------------------------------------------


def test_log_names_group_bytes_and_node():
    world = LockstepWorld(MESH)
    case = Case("s_to_r", "tp_ep", (0,), torch.float64)
    ys = world.run(case.graph(case.key), [[case.input(r)] for r in range(WORLD)])
    ys[0][0].sum().backward()  # only one rank's loss: the others' gradients are zeros
    forward, backward = world.log
    whole = 2 * 4 * 8 * 4 * 8
    assert (forward.kind, forward.group, forward.bytes, forward.phase) == ("s_to_r", "tp_ep", (whole,) * 4, "forward")
    assert (backward.kind, backward.bytes, backward.phase) == ("p_to_s", (whole,) * 4, "backward")
    assert forward.node == backward.node == "s_to_r_default"


def test_missing_gradients_are_zeros():
    case = Case("s_to_r", "dp_ep,tp_ep", (0,), torch.float64)
    xs = [case.input(r) for r in range(WORLD)]
    ys = LockstepWorld(MESH).run(case.graph(case.key), [[x] for x in xs])
    ys[1][0].sum().backward()
    assert all(torch.equal(x.grad, torch.ones_like(x)) for x in xs)


def test_values_are_freed_after_their_last_use():
    alive: list[int] = []

    class Probe:
        count = 0

        def __init__(self):
            Probe.count += 1

        def __del__(self):
            Probe.count -= 1

    def make(x):
        return Probe()

    def look(x):
        alive.append(Probe.count)
        return x

    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(make, (graph.call_function(make, (x,)),))  # the first dies at the second, that one at once
    graph.output((graph.call_function(look, (x,)),))
    module = fx.GraphModule(torch.nn.Module(), graph)
    LockstepWorld(Mesh()).run(module, [[torch.zeros(1)]])
    assert alive == [0]


def test_attributes_methods_symbolic_sizes_and_plain_outputs():
    graph = fx.Graph()
    x = graph.placeholder("x")
    rows = graph.call_function(torch.ops.aten.sym_size.int, (x, 0))
    y = graph.call_method("add", (x, graph.get_attr("shift")))
    graph.output((y, rows))
    root = torch.nn.Module()
    root.register_buffer("shift", torch.tensor(2.0))
    outs = LockstepWorld(MESH).run(fx.GraphModule(root, graph), [[torch.full((r,), r)] for r in range(WORLD)])
    assert [(y.tolist(), rows) for y, rows in outs] == [([2.0 + r] * r, r) for r in range(WORLD)]


def test_errors_name_the_node_and_the_values():
    world = LockstepWorld(MESH)
    bad = exchange_graph("all_to_all", 2, "tp_ep")
    inputs = [[torch.zeros(4, 1), torch.tensor([1, 1]), torch.tensor([1, 2 if r == 3 else 1])] for r in range(WORLD)]
    with pytest.raises(MoecError, match=r"rank 1 of the group expects \[1, 2\] rows, but \[1, 1\]") as e:
        world.run(bad, inputs)
    assert "all_to_all_default" in e.value.__notes__[0]
    with pytest.raises(MoecError, match="different shapes"):
        world.run(conversion("p_to_i", (0,), 2, "tp_ep"), [[torch.zeros(r)] for r in range(WORLD)])
    with pytest.raises(MoecError, match="group 'pp' of size 2"):
        world.run(conversion("p_to_i", (0,), 2, "pp"), [[torch.zeros(2)] for r in range(WORLD)])
    with pytest.raises(MoecError, match="group 'tp_ep' of size 4"):
        world.run(conversion("p_to_i", (0,), 4, "tp_ep"), [[torch.zeros(2)] for r in range(WORLD)])
    with pytest.raises(MoecError, match="3 ranks with"):
        world.run(conversion("p_to_i", (0,), 2, "tp_ep"), [[torch.zeros(2)] for r in range(3)])
