"""The table of collectives, and the ops on real gloo processes: schemas, fakes, compilation, errors."""

import gc
import time
import weakref
from unittest import mock

import pytest
import torch
from collective_cases import CONVERSIONS, KEYS, MESH, conversion, dims_of, ep_moe, moe_inputs

from moec.runtime import peers, simulate
from moec.runtime.collectives import (
    GRADIENT_TYPE,
    PAIRWISE,
    TABLE,
    collective,
    group_of,
    is_fused,
    is_start,
    is_wait,
    keys_of,
    name_groups,
    needs_wait,
)
from moec.runtime.errors import MoecError
from moec.runtime.groups import Groups
from moec.runtime.mesh import Mesh, back
from moec.runtime.ops import convert, exchange
from moec.runtime.peers import start_all_gather, start_all_to_all, start_reduce_scatter
from moec.runtime.torch_compat import WAIT, on_wait, wait

moec_ops = torch.ops.moec


@pytest.mark.parametrize("kind", [k for k, c in TABLE.items() if c.dual])
def test_a_dual_goes_from_gradient_type_to_gradient_type(kind):
    entry, dual = TABLE[kind], TABLE[TABLE[kind].dual]
    assert (dual.source, dual.dest) == (GRADIENT_TYPE[entry.dest], GRADIENT_TYPE[entry.source])


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_the_dual_of_the_dual_is_the_kind_itself(kind):
    assert TABLE[TABLE[kind].dual].dual == kind


def test_registry_answers_about_targets():
    local = {"i_to_r", "i_to_s", "r_to_s", "s_to_p", "i_to_m", "carry_parameters"}
    local |= {"carry_exchange", "carry_equal", "carry_gather"}
    at_once = {"gather_linear", "linear_scatter"}
    assert {k for k in TABLE if is_fused(TABLE[k].op)} == at_once
    assert {k for k in TABLE if is_start(TABLE[k].op)} == set(TABLE) - local - at_once
    assert {k for k in TABLE if TABLE[k].communicates} == set(TABLE) - local
    assert all(needs_wait(k) == is_start(TABLE[k].op) for k in TABLE)
    assert collective(moec_ops.permute.default) is None
    assert not is_start(torch.relu)
    assert is_wait(WAIT)
    nodes = list(conversion("s_to_r", (1,), 2, "dp_ep").graph.nodes)
    assert group_of(nodes[1]) == "dp_ep"


def test_bytes():
    gather, reduce, cut = TABLE["s_to_r"], TABLE["p_to_i"], TABLE["i_to_s"]
    assert (gather.tensor_bytes(10, 40), gather.wire_bytes(10, 40, 4)) == (40, 30)
    assert (reduce.tensor_bytes(40, 40), reduce.wire_bytes(40, 40, 4)) == (40, 60)
    assert (cut.tensor_bytes(40, 10), cut.wire_bytes(40, 10, 4)) == (0, 0)


# --- On four gloo processes. ---------------------------------------------------------------------------------------


def _opcheck_all(rank: int, world: int) -> None:
    group = Groups(MESH, KEYS).name("tp_ep")
    if rank > 1:
        return  # two processes do
    # opcheck compares results without a wait node, so here the work is waited for inside the op.
    with mock.patch.object(convert, "on_wait", _at_once), mock.patch.object(exchange, "on_wait", _at_once):
        _opcheck_kinds(rank, group)


def _at_once(x: torch.Tensor, work: torch.distributed.Work) -> None:
    work.wait()


def _opcheck_kinds(rank: int, group: str) -> None:
    gen = torch.Generator().manual_seed(rank)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        # Tracing does not depend on the dtype and is slow on four processes: once.
        tests = {} if dtype == torch.float32 else {"test_utils": ("test_schema", "test_faketensor")}
        x = torch.randn(4, 8, generator=gen).to(dtype).requires_grad_()
        for kind in CONVERSIONS:
            dims = (0, 1) if kind == "s_to_s" else dims_of(kind)[-1]
            torch.library.opcheck(TABLE[kind].op, (x, *dims, 2, group), **tests)
        send, recv = torch.tensor([rank, 2]), torch.tensor([[0, 1], [2, 2]][rank])
        torch.library.opcheck(moec_ops.all_to_all.default, (x, send, recv, 2, group), **tests)
        torch.library.opcheck(moec_ops.all_to_all_rows.default, (x, send, recv, 7, 2, group), **tests)
        torch.library.opcheck(moec_ops.all_to_all_equal.default, (x, 2, group), **tests)
    torch.library.opcheck(moec_ops.exchange_counts.default, (torch.arange(8) + rank, 2, group))


@pytest.mark.nightly
@pytest.mark.timeout(180)
def test_opcheck_on_real_processes(gloo4):
    gloo4.run(_opcheck_all, timeout=150)


def _compiled(rank: int, world: int) -> list[tuple[torch.Tensor, ...]]:
    group = Groups(MESH, KEYS).name(KEYS[2])
    graphs: list[str] = []

    def backend(gm, example):
        from torch._dynamo.backends.common import aot_autograd

        def keep(gm, _):
            graphs.append(str(gm.graph))
            return gm

        return aot_autograd(fw_compiler=keep)(gm, example)

    run = torch.compile(ep_moe, backend=backend, dynamic=True, fullgraph=True)
    out: list = []
    for tokens in ([5, 3, 0, 4], [2, 6, 1, 0]):
        data = moe_inputs(tokens, E=8, K=2, H=3, seed=5)
        for fn in (ep_moe, run):
            leaves = [data["x"][rank], data["weights"][rank], data["w"][2 * rank :][:2], data["b"][2 * rank :][:2]]
            x, weights, w, b = leaves = [v.clone().requires_grad_() for v in leaves]
            y = fn(x, data["ids"][rank], weights, w, b, 8, 4, group)
            out.append((y.detach(), *torch.autograd.grad(y.sin().sum(), leaves)))
    starts = [g.count("moec.all_to_all") for g in graphs]
    waits = [g.count("wait_tensor.default") for g in graphs]
    return out, starts, waits


@pytest.mark.timeout(180)
def test_aot_autograd_keeps_starts_and_waits_apart_and_the_values(gloo4):
    for out, starts, waits in gloo4.run(_compiled, timeout=150):
        for eager, compiled in (out[:2], out[2:]):
            torch.testing.assert_close(compiled, eager, rtol=0, atol=0)
        # Forward: two exchanges and one of counts; backward: two exchanges.
        assert all(s >= 2 for s in starts)
        assert len(waits) >= 2
        assert all(w >= 2 for w in waits)


def _wrong_size(rank: int, world: int) -> None:
    moec_ops.p_to_i(torch.zeros(4), 0, 2, Groups(MESH).name(KEYS[2]))


def test_a_wrong_size_is_refused_on_all_ranks(gloo4):
    for e in gloo4.run_raising(_wrong_size):
        assert "size is 2" in str(e)
        assert "has 4 ranks" in str(e)


def _indivisible(rank: int, world: int) -> None:
    moec_ops.i_to_s(torch.zeros(2, 6), 1, 4, Groups(MESH).name(KEYS[2]))


def test_a_dim_that_size_does_not_divide_is_refused_on_all_ranks(gloo4):
    for e in gloo4.run_raising(_indivisible):
        assert "(2, 6)" in str(e)
        assert "size 6, which 4 ranks do not divide" in str(e)


def _groups(rank: int, world: int) -> None:
    mesh = Mesh.of(dp=4, tp=1, ep=2)  # axes dp_edp, dp_ep
    groups = Groups(mesh)
    assert groups.device_mesh.mesh_dim_names == mesh.names
    assert groups.device_mesh.shape == mesh.shape
    for key in ("dp_edp", "dp_ep", "dp_edp,dp_ep"):
        pg = groups.group(key)
        assert tuple(torch.distributed.get_process_group_ranks(pg)) == mesh.group(rank, key)
        assert pg.rank() == mesh.index(rank, key)
    with pytest.raises(MoecError, match="not a group key"):
        groups.name("tp")
    with pytest.raises(MoecError, match="not a group key"):
        groups.name("dp_ep,dp_edp")  # not in mesh order
    with pytest.raises(MoecError, match=r"torch\.distributed has 4"):
        Groups(Mesh.of(dp=8))


def test_groups_follow_the_mesh(gloo4):
    gloo4.run(_groups)


def test_groups_without_a_process_group():
    assert Groups(Mesh.of()).device_mesh is None  # one process needs none
    with pytest.raises(MoecError, match="not initialised"):
        Groups(Mesh.of(dp=2))


def test_an_unlowered_group_key_is_refused():
    with pytest.raises(MoecError, match="no process group named 'dp_ep'"):
        moec_ops.p_to_i(torch.zeros(2), 0, 2, "dp_ep")


def _exchanged(rank: int, world: int, both_ways: bool) -> list[torch.Tensor]:
    """Several exchanges in flight on one group, ranks coming one after the other."""
    group, back = torch.distributed.group.WORLD, torch.distributed.new_group() if both_ways else None
    gen = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 4, (6, world, world), generator=gen)  # [exchange, from, to], nothing among them
    out, works = [], []
    for i, table in enumerate(rows.tolist()):
        send, recv = table[rank], [t[rank] for t in table]
        x = torch.cat([torch.full((n, 3), 100.0 * i + 10 * rank + to) for to, n in enumerate(send)])
        out.append(x.new_empty(sum(recv), 3))
        if i % world == rank:
            time.sleep(0.02)
        works += start_all_to_all(out[-1], x, recv, send, group, back)
    for work in works:
        work.wait()
    wanted = [
        torch.cat([torch.full((t[rank], 3), 100.0 * i + 10 * r + rank) for r, t in enumerate(table)])
        for i, table in enumerate(rows.tolist())
    ]
    assert all(map(torch.equal, out, wanted)), (out, wanted)
    return out


@pytest.mark.parametrize("both_ways", [False, True])
def test_exchanges_in_flight_keep_apart(gloo4, both_ways):
    assert len(gloo4.run(_exchanged, both_ways)) == 4


def _summed(rank: int, world: int, both_ways: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sums of parts and gathers in flight on one group, ranks coming one after the other; what each rank gets."""
    group, back = torch.distributed.group.WORLD, torch.distributed.new_group() if both_ways else None
    dtypes, found, works = (torch.float32, torch.bfloat16, torch.float64), [], []
    for i, dtype in enumerate(dtypes):
        x = _addends(i, world, dtype)[rank]
        part, whole = x.new_empty(len(x) // world, 3), x.new_empty(len(x) * world, 3)
        if i % world == rank:
            time.sleep(0.02)
        works += start_reduce_scatter(part, x, group, back) + start_all_gather(whole, x, group, back)
        found.append((part, whole))
    for work in works:
        work.wait()
    return found


def _addends(i: int, world: int, dtype: torch.dtype) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(i)
    return [torch.randn(world * (7 + i), 3, generator=gen).to(dtype) for _ in range(world)]


@pytest.mark.parametrize("both_ways", [False, True])
def test_sums_of_parts_and_gathers_by_pairs(gloo4, both_ways):
    """To the bit those of a simulated world: added in the order of the ranks, rounded once."""
    for rank, found in enumerate(gloo4.run(_summed, both_ways)):
        for i, (part, whole) in enumerate(found):
            xs = _addends(i, 4, part.dtype)
            assert torch.equal(part, simulate.reduce_scatter(xs, 0, 0)[rank])
            assert torch.equal(whole, torch.cat(xs))


def test_a_sum_of_two_is_the_sum():
    """Of two ranks it takes another way."""
    parts, out = torch.randn(2, 5).to(torch.bfloat16), torch.empty(5, dtype=torch.bfloat16)
    assert peers._Sum(out, parts, []).wait()
    assert torch.equal(out, simulate.all_reduce(list(parts), 0, 0)[0])


def test_a_sum_outlives_who_made_it():
    """torch holds what ``wait`` needs: nobody else does between the start and the wait."""
    out, parts = torch.empty(5), torch.randn(3, 5)
    held = weakref.ref(parts)
    on_wait(out, peers._Sum(out.data, parts, []))
    want = parts.sum(0)
    del parts
    gc.collect()
    assert held() is not None and torch.equal(wait(out), want)
    gc.collect()
    assert held() is None, "and lets it go behind the wait"


def _directions(rank: int, world: int, kind: str) -> tuple[list[tuple[str, str, int]], tuple[str, str]]:
    """What a lowered program's collective asks of gloo: (call, group, peer), and the names of its two groups."""
    groups, key = Groups(Mesh.of(dp=world, ep=world)), "dp_ep"
    graph = torch.fx.Graph()
    x, splits = graph.placeholder("x"), graph.placeholder("splits")
    how = (splits, splits) if kind == "all_to_all" else (0,)
    y = graph.call_function(TABLE[kind].op, (x, *how, world, key))
    graph.output(graph.call_function(WAIT, (y,)))
    groups.ensure(keys_of(y))
    names = groups.name(key), groups.name(back(key))
    name_groups(y, dict(zip((key, back(key)), names, strict=True)))
    calls: list[tuple[str, str, int]] = []

    def noted(name: str, peer: str):
        whole = getattr(torch.distributed, name)

        def call(t, group, **k):
            calls.append((name, group.group_name, k[peer]))
            return whole(t, group=group, **k)

        return mock.patch.object(torch.distributed, name, call)

    with noted("isend", "group_dst"), noted("irecv", "group_src"):
        sent = torch.full((world, 2), float(rank))
        got = torch.fx.GraphModule({}, graph)(sent, torch.ones(world, dtype=torch.int64))
    want = {"all_to_all": range(world), "s_to_r": [r for r in range(world) for _ in range(world)], "p_to_s": [6.0]}
    assert torch.equal(got[:, 0], torch.tensor([float(n) for n in want[kind]]))
    return calls, names


@pytest.mark.parametrize("kind", ["all_to_all", "s_to_r", "p_to_s"])
def test_the_two_directions_of_an_exchange_have_groups_of_their_own(gloo4, kind):
    """Over one connection a rank that is put aside while it sends keeps gloo's thread from reading what arrives."""
    assert TABLE[kind].primitive in PAIRWISE
    for rank, (calls, (up, down)) in enumerate(gloo4.run(_directions, kind)):
        assert up != down and len(calls) == 6
        for name, group, peer in calls:
            assert group == (up if (peer > rank) == (name == "isend") else down), (rank, name, peer)


@pytest.mark.parametrize(("backend", "device"), [("nccl", "cpu"), ("cpu:gloo,cuda:nccl", "meta")])
def test_other_devices_have_their_backends_own_all_to_all(monkeypatch, backend, device):
    called = []
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: backend)
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda *a, **k: called.append((a, k)))
    out, x = torch.empty(3, 2, device=device), torch.empty(4, 2, device=device)
    assert start_all_to_all(out, x, [1, 2], [3, 1], "group") == []
    (((got, sent, recv, send), options),) = called
    assert got is out and sent is x and (recv, send) == ([1, 2], [3, 1])
    assert options == {"group": "group", "async_op": True}


@pytest.mark.parametrize(
    ("start", "name"), [(start_all_gather, "all_gather"), (start_reduce_scatter, "reduce_scatter")]
)
def test_other_devices_have_their_backends_own_gathers_and_sums(monkeypatch, start, name):
    called = []
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(peers, f"{name}_flat", lambda *a, **k: called.append((a, k)))
    out, x = torch.empty(4), torch.empty(2)
    assert start(out, x, "group") == []
    (((got, sent), options),) = called
    assert got is out and sent is x and options == {"group": "group", "async_op": True}


def _first_calls(rank: int, world: int) -> list[str]:
    calls: list[str] = []

    def noted(name: str):
        whole = getattr(torch.distributed, name)
        return mock.patch.object(torch.distributed, name, lambda *a, **k: (calls.append(name), whole(*a, **k))[1])

    x, out = torch.ones(world, 2), torch.empty(world, 2)
    with noted("isend"), noted("irecv"):
        works = start_all_to_all(out, x, [1] * world, [1] * world, torch.distributed.group.WORLD)
    for work in works:
        work.wait()
    return calls


def test_receives_are_asked_for_before_anything_is_sent(gloo4):
    """What makes both directions of a link busy at once."""
    assert all(calls == ["irecv"] * 3 + ["isend"] * 3 for calls in gloo4.run(_first_calls))
