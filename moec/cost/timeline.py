"""Timeline: a graph's nodes executed in a given order, in predicted time.

Compute is one queue.  A start takes its ``launch`` of it and hands its collective to its stream (the process group),
where ``at_once`` of them run at a time, the others waiting in order; what pairs of ranks send (``PAIRWISE``) goes
through one connection, one behind the other.  Collectives on one link share it evenly.
A wait stops compute until the collective is done.  While anything is communicated compute is slower by ``comm_share``.
With a host that launches what a GPU runs (``host.py``), nothing begins before it is launched.
All ranks do the same at the same time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from torch import fx

from moec.cost.cluster import Cluster
from moec.cost.host import HOST, Host
from moec.cost.memory import Storages
from moec.cost.roofline import COMPUTE, launch, link, seconds, stream
from moec.cost.sizes import Sizes
from moec.runtime.collectives import PAIRWISE, collective, is_start, is_wait
from moec.runtime.mesh import Mesh

__all__ = ["COMPUTE", "Span", "Timeline", "predict", "simulate"]


class Span(NamedTuple):
    """What ``node`` did on ``stream`` from ``start_s`` to ``end_s``."""

    node: str
    stream: str
    start_s: float
    end_s: float
    where: str = ""

    def later(self, seconds: float) -> Span:
        return self._replace(start_s=self.start_s + seconds, end_s=self.end_s + seconds)


@dataclass(frozen=True)
class Timeline:
    step_s: float
    compute_s: float
    """What compute would take if nothing were communicated."""
    exposed_s: float
    """What communication adds to it: waiting, and slower compute beside it."""
    peak_bytes: int
    spans: tuple[Span, ...] = field(repr=False, default=())
    waits: tuple[Span, ...] = field(repr=False, default=())
    """When compute reached the wait of a collective (``node`` is its start), and when it went on."""
    host_s: float = 0.0
    """What the host adds: nothing was launched yet."""

    def then(self, other: Timeline) -> Timeline:
        """This one, and ``other`` after it."""
        later, waited = ([s.later(self.step_s) for s in spans] for spans in (other.spans, other.waits))
        return Timeline(
            self.step_s + other.step_s,
            self.compute_s + other.compute_s,
            self.exposed_s + other.exposed_s,
            max(self.peak_bytes, other.peak_bytes),
            (*self.spans, *later),
            (*self.waits, *waited),
            self.host_s + other.host_s,
        )


@dataclass
class _Job:
    node: fx.Node
    stream: str
    link: str
    left: float
    """Seconds of the link's whole attention."""
    began: float = 0.0
    done: bool = False


class _Clock:
    """Time, and the collectives that run meanwhile."""

    def __init__(self, at_once: int, comm_share: float) -> None:
        self.now = 0.0
        self.at_once, self.comm_share = at_once, comm_share
        self.running: list[_Job] = []
        self.queues: dict[str, deque[_Job]] = defaultdict(deque)
        self.spans: list[Span] = []

    def enqueue(self, job: _Job) -> None:
        self.queues[job.stream].append(job)
        self._begin(job.stream)

    def compute(self, work: float) -> None:
        """Time passes until ``work`` seconds of undisturbed compute are done."""
        while work > 0:
            speed = 1 - self.comm_share if self.running else 1.0
            step = min(work / speed, self._next())
            self._pass(step)
            work = 0.0 if step == work / speed else work - step * speed

    def idle(self, until: float) -> float:
        """Nothing is computed until then; returns how long that was."""
        began = self.now
        while self.now < until:
            rest, step = until - self.now, self._next()
            self._pass(min(rest, step))
            if rest <= step:
                self.now = until
        return self.now - began

    def wait(self, job: _Job) -> None:
        while not job.done:
            self._pass(self._next())

    def drain(self) -> None:
        while self.running:
            self._pass(self._next())

    def _begin(self, stream: str) -> None:
        waiting = self.queues[stream]
        while waiting:
            most = 1 if collective(waiting[0].node.target).primitive in PAIRWISE else self.at_once  # type: ignore[union-attr]
            if sum(j.stream == stream for j in self.running) >= most:
                break
            job = waiting.popleft()
            job.began = self.now
            self.running.append(job)

    def _sharing(self, job: _Job) -> int:
        return sum(j.link == job.link for j in self.running)

    def _next(self) -> float:
        """Seconds until a collective ends."""
        return min((j.left * self._sharing(j) for j in self.running), default=float("inf"))

    def _pass(self, step: float) -> None:
        self.now += step
        ended = []
        for job in self.running:
            share = self._sharing(job)
            if job.left * share <= step:
                ended.append(job)
            job.left -= step / share
        for job in ended:
            job.done = True
            self.running.remove(job)
            self.spans.append(Span(job.node.name, job.stream, job.began, self.now, job.node.meta.get("where", "")))
        for job in ended:
            self._begin(job.stream)


def simulate(
    order: Sequence[fx.Node],
    seconds: Callable[[fx.Node], float],
    stream: Callable[[fx.Node], str],
    *,
    link: Callable[[str], str] = lambda stream: stream,
    at_once: int = 1,
    comm_share: float = 0.0,
    launch: float | Callable[[fx.Node], float] = 0.0,
    host: Host | None = None,
    storages: Storages | None = None,
    kept: Collection[fx.Node] = (),
) -> Timeline:
    """Execute ``order`` (operands first; every wait after its start).

    ``host``: who launches it, if not the one who computes it.
    ``link``: of a stream, which of the links its collectives share with others (default: each stream has its own).
    ``storages`` and ``kept``: for ``peak_bytes`` (see :meth:`Storages.profile`); without them it is 0."""
    clock = _Clock(at_once, comm_share)
    links = cache(link)
    jobs: dict[fx.Node, _Job] = {}
    waits: list[Span] = []
    compute = idle = launched = 0.0  # launched: until when the host is busy
    for node in order:
        start = is_start(node.target)
        took = (launch(node) if callable(launch) else launch) if start else seconds(node)
        if host is not None and (start or (took and not is_wait(node.target))):
            if host.reads(node):
                asked = launched
                launched = max(launched, clock.now) + host.sync_s
                clock.spans.append(Span(node.name, HOST, asked, launched, node.meta.get("where", "")))
            launched += host.dispatch_s
            idle += clock.idle(launched)
        began = clock.now
        if start:
            clock.compute(took)
            compute += took
            where = stream(node)
            jobs[node] = _Job(node, where, links(where), seconds(node))
            clock.enqueue(jobs[node])
        elif is_wait(node.target) and node.args[0] in jobs:
            job = jobs[node.args[0]]
            clock.wait(job)
            waits.append(Span(job.node.name, job.stream, began, clock.now, node.meta.get("where", "")))
            continue
        else:
            clock.compute(took)
            compute += took
        if clock.now > began:
            clock.spans.append(Span(node.name, COMPUTE, began, clock.now, node.meta.get("where", "")))
    clock.drain()
    peak = max(storages.profile(order, kept), default=0) if storages is not None else 0
    spans = tuple(sorted(clock.spans, key=lambda s: (s.start_s, s.end_s)))
    return Timeline(clock.now, compute, clock.now - compute - idle, peak, spans, tuple(waits), idle)


def predict(
    nodes: Iterable[fx.Node], cluster: Cluster, mesh: Mesh, sizes: Sizes, owned: Collection[fx.Node] = ()
) -> Timeline:
    """The nodes of a graph in their order on a cluster.

    Placeholders are alive throughout, and what the graph returns from when it is made; of ``owned`` placeholders the
    graph is the only user, so that their memory is free after the last use."""
    order = list(nodes)
    outputs = [n for n in order if n.op == "output"]
    kept = [n for n in order if n.op == "placeholder" and n not in set(owned)] + outputs
    return simulate(
        order,
        lambda n: seconds(n, cluster, mesh, sizes),
        lambda n: stream(n, mesh),
        link=lambda s: link(s, cluster, mesh),
        at_once=cluster.at_once,
        comm_share=cluster.comm_share,
        launch=lambda n: launch(n, cluster, mesh, sizes),
        host=Host.of(cluster),
        storages=Storages(order, sizes),
        kept=kept,
    )
