"""overlap: the order of a graph in which communication runs beside what does not need it.

Contract
    requires   a forward or backward graph of ``joint``: starts and waits are nodes, nothing writes to an operand
    provides   an order in which starts come early and waits late, on every rank the same
    preserves  values, bit for bit: the nodes and their operands stay as they are
    never      exceeds the memory bound; looks at data

What covers what follows from the dependences alone: other chunks' experts, the shared expert, weight gradients under
the exchanges of a backward, gathers ahead of their use, gradient reductions under the rest of the backward.

Algorithm
    1. Tasks, their dependences and their times by the cost model (``tasks.py``), for the sizes of the examples.
    2. List schedules: in the order of the graph, out of it only where compute would stand still; then improved by how
       late each task may be (``listing.py``), in windows of several widths.
    3. Each is written as an order of nodes (``emit.py``) and played on the cost model's timeline, and its peak memory
       counted.  The fastest within the bound is taken; of those that are as fast (within 1%), the one that needs least.
       The graph's own order is always among them, so nothing becomes slower or larger by the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from moec import cost
from moec.passes.overlap import listing
from moec.passes.overlap.emit import Links, order
from moec.passes.overlap.tasks import Costs, Tasks
from moec.passes.verify.order import check_same_dataflow, dataflow
from moec.runtime.errors import MoecError

SAME = 0.01
"""Step times so close count as equal."""
WINDOWS = (float("inf"), 1 / 4, 1 / 16, 1 / 64)
"""In parts of the graph's compute."""
ROUNDS = 2


@dataclass(frozen=True)
class Scheduled:
    nodes: list[fx.Node]
    step_s: float
    exposed_s: float
    peak_bytes: int


def overlap(
    variants: Sequence[fx.Graph], costs: Costs, params: set[str], owned: bool, bound: int | None
) -> fx.Graph:
    """The best order of the best of these graphs, which compute the same.  ``params``: placeholders of parameters;
    ``owned``: are the other placeholders the graph's alone?  ``bound``: bytes that may be alive at once.

    Raises MoecError if no order stays below the bound."""
    found: list[Scheduled] = []
    for graph in variants:
        nodes = list(graph.nodes)
        play = _player(nodes, costs, params if owned else {n.name for n in nodes if n.op == "placeholder"})
        different = dict.fromkeys(map(tuple, [nodes, *_orders(nodes, costs, params)]))
        found += [play(list(each)) for each in different]
    best = choose(found, bound)
    out = in_order(best.nodes)
    check_same_dataflow(dataflow(best.nodes[0].graph), out)
    return out


def choose(found: Sequence[Scheduled], bound: int | None) -> Scheduled:  # 3
    fitting = [s for s in found if bound is None or s.peak_bytes <= bound]
    if not fitting:
        least = min(s.peak_bytes for s in found)
        raise MoecError(
            f"memory_gb={bound / 1e9:g} is less than any order of the graph needs"  # type: ignore[operator]
            f" ({least / 1e9:.3g} GB, parameters and saved tensors included)",
            where="plan.overlap",
            way_out="raise memory_gb, use smaller batches, or shard more",
        )
    fastest = min(s.step_s for s in fitting)
    return min((s for s in fitting if s.step_s <= fastest * (1 + SAME)), key=lambda s: (s.peak_bytes, s.step_s))


def _orders(nodes: list[fx.Node], costs: Costs, params: set[str]) -> Iterator[list[fx.Node]]:
    tasks = Tasks.of(nodes, costs, params)  # 1
    if not tasks.job:
        return
    links = Links.of(nodes)
    compute = sum(tasks.seconds[: len(tasks.nodes)])
    for eager in (True, False):  # 2
        times = listing.forward(tasks, [float(i) for i in range(len(tasks))], eager=eager)
        yield order(links, tasks, times)
        for _ in range(ROUNDS):
            urgency = _ahead(tasks, listing.backward(tasks, times))
            times = listing.forward(tasks, urgency, eager=eager)
            yield order(links, tasks, times)
        for window in WINDOWS[1:]:
            yield order(links, tasks, listing.forward(tasks, urgency, window * compute, eager))


def _ahead(tasks: Tasks, urgency: list[float]) -> list[float]:
    """Gathers of parameters are issued earlier than they must by as long as they take: estimates are estimates."""
    for start in tasks.ahead:
        urgency[start] -= tasks.seconds[tasks.job[start]]
    return urgency


def _player(nodes: list[fx.Node], costs: Costs, kept: set[str]) -> Callable[[list[fx.Node]], Scheduled]:
    storages = cost.Storages(nodes, costs.sizes)
    held = [n for n in nodes if n.op == "output" or (n.op == "placeholder" and n.name in kept)]

    def play(order: list[fx.Node]) -> Scheduled:
        t = cost.simulate(
            order,
            costs.seconds,
            lambda n: cost.stream(n, costs.mesh),
            link=lambda s: cost.link(s, costs.cluster, costs.mesh),
            at_once=costs.cluster.at_once,
            comm_share=costs.cluster.comm_share,
            launch=costs.launch,
            host=costs.host(),
            storages=storages,
            kept=held,
        )
        return Scheduled(order, t.step_s, t.exposed_s, t.peak_bytes)

    return play


def in_order(nodes: Sequence[fx.Node]) -> fx.Graph:
    """A copy of these nodes' graph with its nodes in this order."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.lint()
    return graph
