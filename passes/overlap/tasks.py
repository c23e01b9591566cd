"""Tasks: what of a graph takes time, what each needs, and on which resource it runs.

A task is a node that computes, a start (which takes the time of its launch), or the *job* of a start: the transfer
itself, on its link.  Waits, views and sizes take no time and are no tasks; what they read is read through them, and
what reads a wait needs the job.  The dependences are a ``networkx`` graph of task numbers; nodes have the lower
numbers, in the order of the graph.

An exchange reads on the host how many rows go where, so its launch waits for the counts: they are its operands, and
come as early as anything else that a start needs.  They have a communicator of their own and do not queue behind rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import networkx as nx
from torch import fx

from moec import cost
from moec.cost.host import reads
from moec.passes.joint.regather import parameter_values
from moec.runtime.collectives import collective, group_of, is_start, is_wait
from moec.runtime.mesh import GRADIENTS, PARAMETERS, Mesh

COMPUTE = cost.COMPUTE
SHORT = 1 / 4
"""Of a transfer's time: work in front of it that is worth doing before any other."""


@dataclass
class Costs:
    """What nodes take on a cluster; every rank computes the same."""

    cluster: cost.Cluster
    mesh: Mesh
    sizes: cost.Sizes
    _known: dict[fx.Node, float] = field(default_factory=dict)
    _reads: dict[fx.Node, bool] = field(default_factory=dict)

    def seconds(self, node: fx.Node) -> float:
        if node not in self._known:
            self._known[node] = cost.seconds(node, self.cluster, self.mesh, self.sizes)
        return self._known[node]

    def host(self) -> cost.Host | None:
        found = cost.Host.of(self.cluster)
        return None if found is None else replace(found, reads=self.reads)

    def reads(self, node: fx.Node) -> bool:
        if node not in self._reads:
            self._reads[node] = reads(node)
        return self._reads[node]

    def link(self, start: fx.Node) -> str:
        """The link that a collective uses, and shares with the others that use it."""
        return cost.link(cost.stream(start, self.mesh), self.cluster, self.mesh)

    def queue(self, start: fx.Node) -> str:
        """Where a transfer waits for others: its link.  What is latency alone (counts, say) waits for nobody, unless
        its communicator carries large ones too, which works through them in order."""
        where = self.link(start)
        if group_of(start).partition("#")[2] in (GRADIENTS, PARAMETERS):
            return where
        alpha, _ = self.cluster.link(where).of(collective(start.target).primitive)  # type: ignore[union-attr]
        return f"latency of {start.name}" if self.seconds(start) <= 2 * alpha else where

    @property
    def launch(self) -> float:
        return self.cluster.op_overhead_s + self.cluster.launch_s

    def launched(self, node: fx.Node) -> float:
        """Seconds of compute that a node takes; of a start its launch.  Where a host has to read something first, also
        how long nothing is launched."""
        idle = self.cluster.sync_s + self.cluster.dispatch_s if self.cluster.dispatch_s and self.reads(node) else 0.0
        return (self.launch if is_start(node.target) else self.seconds(node)) + idle


@dataclass
class Tasks:
    nodes: list[fx.Node]
    dag: nx.DiGraph
    seconds: list[float]
    resource: list[str]
    """``compute``, or a link."""
    job: dict[int, int]
    """Start -> its job."""
    ahead: frozenset[int]
    """Starts of gathers of parameters: they could run at any time before their use."""

    @staticmethod
    def of(nodes: Sequence[fx.Node], costs: Costs, params: set[str]) -> Tasks:
        """``params``: placeholders of parameters."""
        heavy = [n for n in nodes if n.op == "call_function" and _takes_time(n, costs)]
        number = {n: i for i, n in enumerate(heavy)}
        starts = [n for n in heavy if is_start(n.target)]
        job = {number[s]: len(heavy) + i for i, s in enumerate(starts)}
        dag: nx.DiGraph = nx.DiGraph()
        dag.add_nodes_from(range(len(heavy) + len(starts)))
        dag.add_edges_from(job.items())
        needs: dict[fx.Node, frozenset[int]] = {}
        effect: fx.Node | None = None  # the last node that does something besides returning a value
        for node in nodes:
            own = frozenset().union(*(needs[a] for a in node.all_input_nodes))
            if is_wait(node.target):
                own = frozenset([job[number[node.args[0]]]])
            elif node in number:
                if node.is_impure():
                    own |= needs[effect] if effect is not None else frozenset()
                    effect = node
                dag.add_edges_from((i, number[node]) for i in sorted(own))
                own = frozenset([number[node]])
            needs[node] = own
        of_params = parameter_values(nodes[0].graph, params)
        return Tasks(
            heavy,
            dag,
            [costs.launched(n) for n in heavy] + [costs.seconds(s) for s in starts],
            [COMPUTE] * len(heavy) + [costs.queue(s) for s in starts],
            job,
            frozenset(number[s] for s in starts if s in of_params),
        )

    @cached_property
    def leading(self) -> frozenset[int]:
        """Starts that read what was computed, and the short work before them: what takes, with all up to the start and
        the counts that it reads, at most ``SHORT`` of its transfer's time.  Done first, it delays other work little and
        the link works earlier."""
        left: dict[int, float] = {}  # seconds that may pass before the start
        for task in reversed(range(len(self.nodes))):
            job = self.job.get(task)
            after = self.dag.succ[task if job is None else job]
            most = max((left[i] for i in after if i in left), default=-1.0) - self.seconds[task if job is None else job]
            if job is not None and task not in self.ahead:
                most = max(most, SHORT * self.seconds[job])
            if most >= 0:
                left[task] = most
        return frozenset(left)

    @cached_property
    def final(self) -> frozenset[int]:
        """Starts that no other communication waits for: reductions of gradients."""
        leads: set[int] = set()
        for node in reversed(range(len(self.nodes))):
            after = [*self.dag.succ[node], *self.dag.succ[self.job[node]]] if node in self.job else self.dag.succ[node]
            if any(i in leads or i in self.job for i in after):
                leads.add(node)
        return frozenset(self.job.keys() - leads)

    def __len__(self) -> int:
        return len(self.seconds)


def _takes_time(node: fx.Node, costs: Costs) -> bool:
    if is_wait(node.target):  # torch calls it impure; what it must come behind is its start
        return False
    return is_start(node.target) or node.is_impure() or costs.seconds(node) > 0
