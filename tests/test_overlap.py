"""The scheduler, on graphs made by hand: what runs beside what, dataflow unchanged, a memory bound that is kept."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

import moec
from moec import cost
from moec.passes.overlap import choose, in_order, listing, overlap
from moec.passes.overlap.emit import Links, order
from moec.passes.overlap.tasks import SHORT, Costs, Tasks
from moec.passes.verify.order import check_order
from moec.runtime.collectives import TABLE, is_wait
from moec.runtime.mesh import Mesh
from moec.runtime.torch_compat import WAIT

aten = torch.ops.aten
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
    return list(overlap([module.graph], costs(module.graph), set(), True, bound).nodes)


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
        for node in order(Links.of(nodes), tasks, listing.forward(tasks, late, window)):
            if node in number:
                ahead = max(ahead, base[number[node]] - base[min(waiting)])
                waiting.remove(number[node])
        return ahead

    assert furthest(compute / 8) <= compute / 8 < furthest(float("inf"))
    exact = order(Links.of(nodes), tasks, listing.forward(tasks, late, 0.0))
    heavy = set(tasks.nodes)
    assert [n for n in exact if n in heavy] == tasks.nodes  # no window: the order of the graph


def chunked(layers: int, chunks: int) -> fx.GraphModule:
    """Chunks that meet nowhere, as those of whole sequences: rows that travel as soon as their counts are known."""
    m = Maker()
    x, w = m.input("x"), m.input("w")
    key = MESH.key(MESH.names)

    def call(op, args, val) -> fx.Node:
        node = m.graph.call_function(op, args)
        node.meta["val"] = val
        return node

    def travelled(rows: fx.Node, counts: fx.Node) -> fx.Node:
        start = m.made(m.graph.call_function(TABLE["all_to_all_rows"].op, (rows, counts, counts, m.size, 2, key)))
        return m.made(m.graph.call_function(WAIT, (start,)))

    done = [x] * chunks
    for _ in range(layers):
        for c in range(chunks):
            rows = m.product(done[c], w)
            counts = call(aten.argmax.default, (rows,), torch.empty(2, dtype=torch.int64, device="meta"))
            counts = call(TABLE["exchange_counts"].op, (counts, 2, f"{key}#counts"), counts.meta["val"])
            counts = call(WAIT, (counts,), counts.meta["val"])
            done[c] = m.product(travelled(rows, counts), w)
    return m.module(*done)


@pytest.mark.parametrize("chunks", [2, 4])
def test_a_chunk_does_not_wait_for_what_others_compute(chunks):
    """In every layer rows of one chunk are under way before another has counted its own."""
    layers = 3
    written = scheduled(chunked(layers, chunks))
    sent = [i for i, n in enumerate(written) if n.target is TABLE["all_to_all_rows"].op]
    counted = [i for i, n in enumerate(written) if n.target is TABLE["exchange_counts"].op]
    assert len(sent) == len(counted) == layers * chunks
    for first in range(0, layers * chunks, chunks):
        assert sent[first] < counted[first + chunks - 1]


def test_short_work_before_a_transfer_is_done_first():
    """What a transfer still needs is a sum of columns; products that are as urgent wait for it."""
    m = Maker()
    x, w = m.input("x"), m.input("w")
    first = m.product(x, w)
    products = [m.product(first, w) for _ in range(3)]
    short = m.graph.call_function(aten.neg.default, (first,))
    sent = m.reduced(m.made(short))
    nodes = list(m.module(sent, *products).graph.nodes)
    tasks = Tasks.of(nodes, costs(nodes[0].graph), set())
    assert {tasks.nodes[i] for i in tasks.leading} == {short, sent.args[0]}
    links, as_they_are = Links.of(nodes), [float(i) for i in range(len(tasks))]
    names = [n.name for n in order(links, tasks, listing.forward(tasks, as_they_are))]
    assert names.index("p_to_r_default") < names.index(products[0].name)
    lazy = order(links, tasks, listing.forward(tasks, as_they_are, eager=False))
    assert lazy.index(short) > lazy.index(products[0])


def test_what_rows_wait_for_counts_for_is_short_work_too():
    """Before counts, which are nothing to hurry for by themselves."""
    m = Maker(2048)
    x, key = m.input("x"), MESH.key(MESH.names)
    short = m.graph.call_function(aten.argmax.default, (x,))
    counts = m.graph.call_function(TABLE["exchange_counts"].op, (short, 2, f"{key}#counts"))
    wait = m.graph.call_function(WAIT, (counts,))
    for node in (short, counts, wait):
        node.meta["val"] = torch.empty(2, dtype=torch.int64, device="meta")
    rows = m.made(m.graph.call_function(TABLE["all_to_all_rows"].op, (x, wait, wait, m.size, 2, key)))
    nodes = list(m.module(m.made(m.graph.call_function(WAIT, (rows,)))).graph.nodes)
    tasks = Tasks.of(nodes, costs(nodes[0].graph), set())
    long, job = tasks.seconds[tasks.nodes.index(short)], tasks.job[tasks.nodes.index(counts)]
    assert long > SHORT * tasks.seconds[job], "not for the counts' sake"
    assert {tasks.nodes[i] for i in tasks.leading} == {short, counts, rows}


def test_an_order_is_played_once(monkeypatch):
    """However many ways of listing find it."""
    from moec.passes import overlap as module

    played, found, simulate, order_of = [], [], cost.simulate, module.order

    def play(nodes, *how, **more):
        played.append(tuple(nodes))
        return simulate(nodes, *how, **more)

    def listed(*of):
        found.append(order_of(*of))
        return found[-1]

    monkeypatch.setattr(cost, "simulate", play)
    monkeypatch.setattr(module, "order", listed)
    scheduled(wide(3))
    assert len(set(played)) == len(played) < len(found)


def test_small_transfers_wait_for_the_large_ones_of_their_communicator():
    m = Maker()
    key, small = MESH.key(MESH.names), torch.empty(4, device="meta")
    for purpose in ("", "#gradients", "#parameters", "#counts"):
        start = m.graph.call_function(TABLE["p_to_i"].op, (m.input(f"x{purpose[1:]}"), 0, 2, key + purpose))
        start.args[0].meta["val"] = start.meta["val"] = small
        known = costs(m.graph)
        alone = known.queue(start) != known.link(start)
        assert alone == (purpose in ("", "#counts"))


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
    graph = wide(3).graph
    assert str(in_order(list(graph.nodes))) == str(graph)
