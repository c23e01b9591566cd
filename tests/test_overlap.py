"""Scheduled graphs: the same bits as unscheduled ones, an order that every rank can follow, a bound that is kept."""

from dataclasses import replace
from functools import cache

import deep_models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

import moec
from moec import cost, shards, simulate
from moec.passes import bucket as bucketing
from moec.passes.overlap import choose, in_order, listing, overlap
from moec.passes.overlap.emit import order
from moec.passes.overlap.tasks import Costs, Tasks
from moec.passes.split_experts import split_experts
from moec.passes.step import complete_graphs, finish
from moec.passes.verify.order import check_order, check_same_dataflow, collective_order, dataflow
from moec.runtime.collectives import TABLE, collective, group_of, is_start, is_wait
from moec.runtime.mesh import Mesh
from moec.runtime.torch_compat import WAIT
from moec.runtime.world import LockstepWorld
from moec.step import Step

aten = torch.ops.aten
DATA = deep_models.batch(8, 6)
PLANS = {
    "ep": {"dp": 4, "ep": 4},
    "fsdp, ep": {"dp": 4, "fsdp": True, "ep": 2},
    "hsdp": {"dp": 4, "fsdp": 2, "ep": 4},
    "tp, ep": {"dp": 2, "tp": 2, "sequence_parallel": True, "ep": 2, "etp": 2},
}
EVERY = [pytest.param(p, marks=pytest.mark.nightly if p in ("ep", "tp, ep") else ()) for p in PLANS]
SIZES = {"0": (32, 64), "1": (32, 64)}


@cache
def model():
    return deep_models.Deep(layers=3).double()


@cache
def lowered(plan: str):
    return moec.compile_program(model(), moec.Plan(**PLANS[plan]), 4, DATA, {}, training=True)


@cache
def complete(plan: str):
    return complete_graphs(lowered(plan))


@cache
def steps(plan: str, bucket_mb=None, schedule=True) -> Step:
    return finish(complete(plan), lowered(plan), moec.Overlap(schedule=schedule, bucket_mb=bucket_mb), SIZES)


def run(plan: str, step: Step):
    """Outputs and complete gradients of every rank, in lockstep."""
    program = lowered(plan)
    mesh, world, ranks = program.mesh, LockstepWorld(program.mesh), range(4)
    tensors = dict(model().named_parameters())
    params = {ph: tensors[s.name] for ph, s in program.params.items()}
    inputs = {ph: DATA[int(s.path)] for ph, s in program.inputs.items()}
    given = step.usual()
    back = step.backward(given)
    names = [n.name for n in back.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        values = [simulate._rank_values(program, params, inputs, mesh, r) for r in ranks]
        results = world.run(step.forward, [[v[n.name] for n in program.placeholders()] for v in values])
        known = [dict(zip(step.saved, r[step.num_outputs :], strict=True)) for r in results]
        tangents = {f"tangent_{i}": torch.ones((), dtype=torch.float64) for i in given}
        grads = world.run(back, [[(k | tangents)[n] for n in names] for k in known])
        alone = world.run(step.inference, [[v[n.name] for n in program.placeholders()] for v in values])
    for a, b in zip(alone, results, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=False))
    return [r[: step.num_outputs] for r in results], grads


def equal(a, b) -> None:
    for x, y in zip(a, b, strict=True):
        for u, v in zip(x, y, strict=True):
            assert (u is None) == (v is None) and (u is None or torch.equal(u, v))


# ------------------------------------------------------------------------------------------------ the same bits


@pytest.mark.parametrize("bucket_mb", [None, 0.002], ids=str)
@pytest.mark.parametrize("plan", EVERY)
def test_scheduled_and_unscheduled_graphs_are_equal_bit_by_bit(plan, bucket_mb):
    plain, scheduled = steps(plan, bucket_mb, False), steps(plan, bucket_mb)
    backwards = [s.backward(s.usual()).graph for s in (plain, scheduled)]
    assert [n.name for n in backwards[0].nodes] != [n.name for n in backwards[1].nodes]
    a, b = run(plan, plain), run(plan, scheduled)
    equal(a[0], b[0])
    equal(a[1], b[1])


@pytest.mark.parametrize("plan", EVERY)
def test_gradients_are_those_of_the_model(plan):
    """With regathers, reductions and buckets in the graphs, against autograd on one device."""
    program, step = lowered(plan), steps(plan, "auto")
    _, grads = run(plan, step)
    net = model()
    net.zero_grad()
    net(*DATA)[0].backward()
    tensors = dict(net.named_parameters())
    for i, ph in enumerate(step.params):
        spec = program.params[ph]
        parts = [shards.trim(grads[r][i], spec.shape, spec.types, program.mesh, r) for r in range(4)]
        got, apart = simulate._assemble(parts, spec.types, program.mesh)
        assert apart < 1e-12
        torch.testing.assert_close(got, tensors[spec.name].grad, rtol=1e-10, atol=1e-12)


def kinds(graph: fx.Graph) -> list[str]:
    return [collective(n.target).kind for n in graph.nodes if n.op == "call_function" and is_start(n.target)]


def test_buckets_are_filled_to_their_size():
    many, few, one = (steps("hsdp", mb).backward(frozenset([0])).graph for mb in (None, 0.002, 1000.0))
    counts = [[k for k in kinds(g) if k != "all_to_all_rows"] for g in (many, few, one)]
    assert len(counts[0]) > len(counts[1]) > len(counts[2])
    # Dense parameters over their group and the experts over theirs; what HSDP's copies sum of both.
    assert sorted(counts[2]) == ["p_to_i", "p_to_s", "s_to_r"] or len(counts[2]) <= 6, counts[2]
    for graph, limit in ((few, 2000), (one, 10**9)):
        for n in graph.nodes:
            if n.op == "call_function" and is_start(n.target) and n.args[0].target is torch.ops.moec.pack.default:
                assert bucketing._bytes(n) <= limit or len(n.args[0].args[0]) == 1


def test_regathers_bring_only_what_is_read():
    """FSDP: no gathered matrix is saved but of the last two gathers, and embeddings do not come again."""
    step = steps("fsdp, ep")
    graph = step.backward(step.usual()).graph
    gathers = [n for n in graph.nodes if n.op == "call_function" and n.target is TABLE["s_to_r"].op]
    forward = [n for n in step.forward.graph.nodes if n.target is TABLE["s_to_r"].op]
    assert 0 < len(gathers) < len(forward)
    moved, whole = (sum(n.meta["val"].numel() for n in g) for g in (gathers, forward))
    assert moved < whole
    sharded = {s.placeholder for s in lowered("fsdp, ep").params.values()}
    assert {f"saved_{p}" for p in sharded} & set(step.saved)


def test_weight_gradients_of_experts_apart_are_the_same():
    """Each half computes its gradients as the whole op does."""
    step = steps("fsdp, ep", None, False)
    whole = step.backward(step.usual())
    apart = split_experts(whole)
    ops = [n for n in apart.graph.nodes if n.target is torch.ops.moec.experts_rows_backward.default]
    assert len(ops) == 6 and sum(n.args[-1][0] for n in ops) == 3
    assert all(any(n.args[-1][1:]) != n.args[-1][0] for n in ops)
    equal(run("fsdp, ep", step)[1], run("fsdp, ep", replace(step, backward_for=lambda _: apart, made={}))[1])
    assert split_experts(apart) is None


# ------------------------------------------------------------------------------------------------ order


def test_purposes_have_communicators_of_their_own():
    step = steps("hsdp")
    by: dict[str, set[str]] = {}
    for graph in (step.forward.graph, step.backward(step.usual()).graph):
        for n in graph.nodes:
            if n.op == "call_function" and is_start(n.target):
                by.setdefault(group_of(n).partition("#")[2], set()).add(collective(n.target).primitive)
    assert by["exchange"] <= {"exchange", "counts", "equal"} and by["parameters"] == {"all_gather", "reduce_scatter"}
    assert all("exchange" not in p for k, p in by.items() if k != "exchange")
    assert by["gradients"] == {"all_reduce"}


def sabotaged(what):
    """A scheduled backward with one mistake."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(steps("fsdp, ep").backward(frozenset([0])).graph, {}))
    starts = [n for n in graph.nodes if n.op == "call_function" and is_start(n.target)]
    what(graph, starts)
    return graph


def _no_wait(graph, starts):
    wait = next(u for u in starts[0].users if is_wait(u.target))
    wait.replace_all_uses_with(starts[0])
    graph.erase_node(wait)


def _second_wait(graph, starts):
    with graph.inserting_after(starts[0]):
        graph.call_function(WAIT, (starts[0],))


def _waits_for_nothing(graph, starts):
    with graph.inserting_before(starts[0]):
        graph.call_function(WAIT, (starts[0].args[0],))


def _read_before_the_wait(graph, starts):
    wait = next(iter(starts[0].users))
    next(iter(wait.users)).replace_input_with(wait, starts[0])


def _shared_communicator(graph, starts):
    exchange = next(s for s in starts if group_of(s).endswith("#exchange"))
    other = next(s for s in starts if s.args[-2] == exchange.args[-2] and not group_of(s).endswith("#exchange"))
    exchange.args = (*exchange.args[:-1], group_of(other))


def _wrong_group(graph, starts):
    starts[0].args = (*starts[0].args[:-1], "nobody#exchange")


def _wrong_size(graph, starts):
    starts[0].args = (*starts[0].args[:-2], 3, starts[0].args[-1])


def _branch(graph, starts):
    with graph.inserting_before(starts[0]):
        graph.call_module("maybe", (starts[0].args[0],))


ORDERS = {
    _no_wait: "waits", _second_wait: "2 waits", _waits_for_nothing: "starts nothing",
    _read_before_the_wait: "reads its", _shared_communicator: "over the communicator", _wrong_group: "not a group",
    _wrong_size: "size 3", _branch: "branch",
}  # fmt: skip


@pytest.mark.parametrize("mistake", ORDERS, ids=lambda f: f.__name__)
def test_each_mistake_in_the_order_is_caught(mistake):
    mesh = lowered("fsdp, ep").mesh
    check_order(sabotaged(lambda *_: None), mesh)
    with pytest.raises(moec.MoecError, match=ORDERS[mistake]):
        check_order(sabotaged(mistake), mesh)


def test_ranks_that_order_differently_are_told_apart():
    one = sabotaged(lambda *_: None)
    pairs = collective_order(one)

    def swapped(graph, starts):
        key = next(k for k, v in pairs.items() if len(v) > 1)
        a, b = [s for s in starts if group_of(s) == key][:2]
        a.prepend(b)

    other = sabotaged(swapped)
    assert collective_order(other) != pairs and str(other) != str(one)


def test_changed_dataflow_is_caught():
    graph = sabotaged(lambda *_: None)
    before = dataflow(graph)
    check_same_dataflow(before, graph)
    add = next(n for n in graph.nodes if n.target is aten.add.Tensor)
    add.args = (add.args[1], add.args[0])  # the order of a sum
    with pytest.raises(moec.MoecError, match="scheduling changed"):
        check_same_dataflow(before, graph)


# ------------------------------------------------------------------------------------------------ the scheduler


MESH = Mesh.of(dp=2)
CLUSTER = cost.cluster("cpu2-1gbit")


def costs(graph: fx.Graph) -> Costs:
    return Costs(CLUSTER, MESH, cost.Sizes({}))


class Maker:
    """Graphs of products and all-reduces of matrices, by hand."""

    def __init__(self, size: int = 256) -> None:
        self.graph, self.size = fx.Graph(), size
        self.val = torch.empty(size, size, device="meta")

    def made(self, node: fx.Node) -> fx.Node:
        node.meta["val"] = self.val
        return node

    def input(self, name: str) -> fx.Node:
        return self.made(self.graph.placeholder(name))

    def product(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self.made(self.graph.call_function(aten.mm.default, (a, b)))

    def reduced(self, a: fx.Node) -> fx.Node:
        start = self.made(self.graph.call_function(TABLE["p_to_r"].op, (a, 0, 2, MESH.key(MESH.names))))
        return self.made(self.graph.call_function(WAIT, (start,)))

    def module(self, *results: fx.Node) -> fx.GraphModule:
        self.graph.output(results)
        return fx.GraphModule(torch.nn.Module(), self.graph)


def scheduled(module: fx.GraphModule, bound: int | None = None) -> list[fx.Node]:
    return list(overlap([module], costs(module.graph), set(), True, bound).graph.nodes)


def time_of(nodes) -> cost.Timeline:
    return cost.predict(nodes, CLUSTER, MESH, cost.Sizes({}), [n for n in nodes if n.op == "placeholder"])


def test_weight_gradients_run_beside_an_exchange():
    m = Maker()
    x, g, w = m.input("x"), m.input("g"), m.input("w")
    dw = m.product(x, g)  # comes first in the graph, and nothing waits for it
    dx = m.reduced(m.product(g, w))
    module = m.module(m.product(dx, w), dw)
    assert not any(is_wait(n.target) for n in Tasks.of(list(module.graph.nodes), costs(module.graph), set()).nodes)
    names = [n.name for n in scheduled(module)]
    assert names.index("p_to_r_default") < names.index(dw.name) < names.index("wait_tensor_default")
    assert time_of(scheduled(module)).exposed_s < time_of(list(module.graph.nodes)).exposed_s


@st.composite
def graphs(draw):
    """Random graphs of products and all-reduces."""
    m = Maker(draw(st.sampled_from([16, 256])))
    values = [m.input("a"), m.input("b")]
    for _ in range(draw(st.integers(1, 25))):
        pick = st.integers(0, len(values) - 1)
        if draw(st.integers(0, 2)):
            values.append(m.product(values[draw(pick)], values[draw(pick)]))
        else:
            values.append(m.reduced(values[draw(pick)]))
    return m.module(*(v for v in values if not v.users))


@settings(max_examples=40)
@given(graphs(), st.floats(0, 1))
def test_any_graph_keeps_its_dataflow_its_bound_and_gets_no_slower(module, share):
    before = list(module.graph.nodes)
    own = time_of(before)
    check_order(module.graph, MESH)
    after = scheduled(module)
    assert {n.name: str(n.args) for n in after} == {n.name: str(n.args) for n in before}
    check_order(after[0].graph, MESH)
    best = time_of(after)
    assert best.step_s <= own.step_s * 1.0101
    bound = max(own.peak_bytes, int(best.peak_bytes * share))  # the graph's own order stays below it
    assert time_of(scheduled(module, bound)).peak_bytes <= bound
    assert [n.name for n in scheduled(module)] == [n.name for n in after]  # the same on every rank


def wide(n: int) -> fx.GraphModule:
    """n products whose weight gradients may wait, each behind an all-reduce: deferring them all keeps all operands."""
    m = Maker()
    x, w = m.input("x"), m.input("w")
    late = []
    for _ in range(n):
        fresh = m.product(x, w)
        late.append(m.product(fresh, fresh))
        x = m.product(m.reduced(fresh), w)
    total = late[0]
    for y in late[1:]:
        total = m.product(total, y)
    return m.module(total, x)


def test_a_bound_is_kept_or_refused():
    module = wide(12)
    free = time_of(scheduled(module))
    own = time_of(list(module.graph.nodes))
    bound = own.peak_bytes
    kept = time_of(scheduled(module, bound))
    assert kept.peak_bytes <= bound and kept.step_s >= free.step_s * 0.99
    with pytest.raises(moec.MoecError, match="memory_gb"):
        scheduled(module, 1000)


def test_a_windows_width_bounds_what_runs_ahead():
    module = wide(12)
    nodes = list(module.graph.nodes)
    tasks = Tasks.of(nodes, costs(module.graph), set())
    late = listing.backward(tasks, listing.forward(tasks, [float(i) for i in range(len(tasks))]))
    compute = sum(tasks.seconds[: len(tasks.nodes)])

    def furthest(window: float) -> float:
        """How far, in seconds of compute, something runs ahead of the first task that has not run."""
        base = [sum(tasks.seconds[:i]) for i in range(len(tasks.nodes))]
        number, waiting, ahead = {n: i for i, n in enumerate(tasks.nodes)}, set(range(len(tasks.nodes))), 0.0
        for node in order(nodes, tasks, listing.forward(tasks, late, window)):
            if node in number:
                ahead = max(ahead, base[number[node]] - base[min(waiting)])
                waiting.remove(number[node])
        return ahead

    assert furthest(compute / 8) <= compute / 8 < furthest(float("inf"))
    exact = order(nodes, tasks, listing.forward(tasks, late, 0.0))
    heavy = set(tasks.nodes)
    assert [n for n in exact if n in heavy] == tasks.nodes  # no window: the order of the graph


def test_the_least_memory_of_equally_fast_orders_is_taken():
    from moec.passes.overlap import Scheduled

    a, b, c = Scheduled([], 1.0, 0, 300), Scheduled([], 1.005, 0, 200), Scheduled([], 1.2, 0, 100)
    assert choose([a, b, c], None) is b
    assert choose([a, b, c], 150) is c


def test_work_grows_linearly(monkeypatch):
    """A task is pushed and popped once a list, whatever the size of the graph."""
    counts = {}
    for n in (50, 200):
        module = wide(n)
        pushes = []
        push = listing.heappush
        with monkeypatch.context() as patch:
            patch.setattr(listing, "heappush", lambda h, x, push=push, n=pushes: (n.append(0), push(h, x)))
            scheduled(module)
        counts[n] = len(pushes) / len(module.graph.nodes)
    assert counts[200] <= counts[50] * 1.1


def test_an_order_of_nodes_is_a_graph_of_them():
    module = wide(3)
    again = in_order(module, list(module.graph.nodes))
    assert str(again.graph) == str(module.graph)
