"""schedule: what runs where a plan has ``overlap``: each collective in the order of the forward and the backward graph,
when it is waited for, and what is computed meanwhile, in the times of the cost model.

A collective is *hidden* as long as something is computed while it travels; ``beside`` says what, by module.  Its
*stall* is how long compute stands still at its wait, for what it queues behind as well.  An op of tensor parallelism
that computes beside its own transfer (``Overlap.symmetric_memory``) is a collective hidden behind its own products, and
waited for at once.  Times are seconds since the step began.  Of the backward it is the one that usually runs: for the
gradient of the loss.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

from torch import fx

from moec.cost import COMPUTE, Cluster, Sizes, Span, Timeline, cluster, predict
from moec.cost.roofline import ends as tensor_ends
from moec.cost.roofline import group_key, own_transfer
from moec.placement import local_shape
from moec.program import Program
from moec.runtime.collectives import collective, is_fused, is_start, is_wait
from moec.runtime.mesh import EXCHANGE, GRADIENTS, PARAMETERS
from moec.text import human, ms, table

SHOWN = 2
"""Modules that the text names beside a collective."""
OWN = "its own products"


@dataclass(frozen=True)
class Transfer:
    """One collective of a scheduled step."""

    phase: str
    number: int
    """Which start of its phase it is, from 1."""
    before: int
    """It is waited for before start ``before`` of its phase (one past the last: behind all)."""
    kind: str
    primitive: str
    parameters: bool
    """Does it move parameters or their gradients?"""
    group: str
    """Its communicator: axes, and the purpose."""
    ranks: int
    bytes: int
    """Of the tensor on one rank, the larger of what goes in and out; of routed rows those that travel."""
    estimated: bool
    """Does the number of rows depend on the routing (taken as uniform)?"""
    where: str
    node: str
    bucket: int
    """How many collectives it is made of."""
    chunk: int | None
    issued_s: float
    start_s: float
    end_s: float
    waited_s: float
    stall_s: float
    hidden_s: float
    beside: tuple[tuple[str, float], ...]
    """Module -> seconds of its compute meanwhile, the longest first."""


@dataclass(frozen=True)
class Schedule:
    cluster: str
    parts: dict[str, Timeline]
    transfers: tuple[Transfer, ...]
    bound: int | None
    """Bytes that may be alive at once."""
    scheduled: bool
    """Was the order searched for, or is it that in which the graphs were built?"""

    @property
    def step(self) -> Timeline:
        whole, *rest = self.parts.values()
        for part in rest:
            whole = whole.then(part)
        return whole

    @property
    def peak_bytes(self) -> int:
        return max(p.peak_bytes for p in self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "cluster": self.cluster,
            "scheduled": self.scheduled,
            "step_s": self.step.step_s,
            "exposed_s": self.step.exposed_s,
            "host_s": self.step.host_s,
            "peak_bytes": self.peak_bytes,
            "bound": self.bound,
            "parts": {k: {"step_s": p.step_s, "exposed_s": p.exposed_s} for k, p in self.parts.items()},
            "transfers": [
                {**{k: v for k, v in vars(t).items() if k != "beside"}, "beside": [list(b) for b in t.beside]}
                for t in self.transfers
            ],
        }

    def __str__(self) -> str:
        order = "as scheduled" if self.scheduled else "in the order in which they were built"
        lines = [f"the step of one rank {order}, predicted on {self.cluster}"]
        for name, part in self.parts.items():
            mine = [t for t in self.transfers if t.phase == name]
            hidden, taken = sum(t.hidden_s for t in mine), sum(t.end_s - t.start_s for t in mine)
            said = f"{ms(part.step_s)} ms: compute {ms(part.compute_s)}, exposed {ms(part.exposed_s)}"
            said += f", host {ms(part.host_s)}" if part.host_s else ""
            lines.append(f"{name} {said}" + (f"; {hidden / taken:.0%} of the transfers' time hidden" if taken else ""))
            lines += table(
                ("#", "at ms", "collective", "group", "bytes", "takes", "hidden", "stall", "wait", "of", "beside"),
                [_row(t, len(mine)) for t in mine],
            )
        limit = "no bound" if self.bound is None else f"bound {human(self.bound)}"
        return "\n".join([*lines, f"memory peak {human(self.peak_bytes)}, parameters included; {limit}"])


def _row(t: Transfer, last: int) -> tuple[str, ...]:
    beside = ", ".join(f"{name} {ms(s)}" for name, s in t.beside[:SHOWN])
    rest = sum(s for _, s in t.beside[SHOWN:])
    chunk = "" if t.chunk is None else f" (chunk {t.chunk})"
    of = t.where if t.bucket == 1 else f"bucket of {t.bucket}: {t.where} …"
    return (
        str(t.number),
        ms(t.issued_s),
        t.primitive,
        t.group,
        human(t.bytes) + ("~" if t.estimated else ""),
        ms(t.end_s - t.start_s),
        ms(t.hidden_s),
        ms(t.stall_s),
        "at the end" if t.before > last else f"before #{t.before}",
        (of or t.node) + chunk,
        beside + (f", others {ms(rest)}" if rest else ""),
    )


def schedule(
    program: Program, sizes: Mapping[str, tuple[int, ...]] | None = None, on: Cluster | None = None
) -> Schedule:
    """Of a program with a ``step``.  ``sizes``: *local* sizes of inputs by path (default: those it is scheduled for);
    ``on``: the cluster (default: the plan's)."""
    step = program.step
    assert step is not None
    on = on or cluster(step.options.cluster)
    graphs = step_graphs(program)
    values = Sizes.of(program, sizes or step.shapes, graphs.values())
    parts, transfers, began = {}, [], 0.0
    for phase, graph in graphs.items():
        parts[phase] = predicted(program, phase, graph, on, values)
        own = partial(own_transfer, cluster=on, mesh=program.mesh, sizes=values)
        transfers += _transfers(phase, list(graph.nodes), parts[phase], values, began, own)
        began += parts[phase].step_s
    bound = step.options.memory_gb
    limit = None if bound is None else int(bound * 1e9)
    return Schedule(on.name, parts, tuple(transfers), limit, step.options.schedule)


def step_graphs(program: Program) -> dict[str, fx.Graph]:
    """The graphs that usually run, by phase; of evaluation the one that keeps nothing for a backward."""
    step = program.step
    assert step is not None
    if not program.training or not step.differentiable:
        return {"forward": step.inference.graph}
    return {"forward": step.forward.graph, "backward": step.backward(step.usual()).graph}


def predicted(program: Program, phase: str, graph: fx.Graph, on: Cluster, values: Sizes) -> Timeline:
    """Of a forward or backward graph.  What is saved goes with its last use; parameters are there all the same."""
    if phase == "forward":
        return predict(graph.nodes, on, program.mesh, values)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    owned = [n for n in placeholders if n.name.removeprefix("saved_") not in program.params]
    found = predict(graph.nodes, on, program.mesh, values, owned)
    read = {n.name.removeprefix("saved_") for n in placeholders} | {n.meta.get("lies_in") for n in placeholders}
    rest = [s for name, s in program.params.items() if name not in read]
    held = sum(prod(local_shape(s.shape, s.types, program.mesh)) * s.dtype.itemsize for s in rest)
    return replace(found, peak_bytes=found.peak_bytes + held)


def _transfers(
    phase: str,
    nodes: Sequence[fx.Node],
    found: Timeline,
    sizes: Sizes,
    began: float,
    beside_itself: Callable[[fx.Node], tuple[float, float]],
) -> list[Transfer]:
    starts = [n for n in nodes if n.op == "call_function" and (is_start(n.target) or is_fused(n.target))]
    names = {s.name for s in starts}
    seen, before = 0, {}
    for node in nodes:
        if node.name in names:
            seen += 1
            if is_fused(node.target):
                before[node] = seen + 1
        elif is_wait(node.target):
            before[node.args[0]] = seen + 1
    own = [s for s in found.spans if s.stream == COMPUTE]
    ends = [s.end_s for s in own]
    jobs = {s.node: s for s in found.spans if s.stream.startswith("comm:")}
    issued = {s.node: s.end_s for s in own if s.node in names}
    waits = {s.node: s for s in found.waits}
    for node in starts:
        if is_fused(node.target):
            at, (sent, hidden) = next(s for s in own if s.node == node.name), beside_itself(node)
            jobs[node.name] = Span(node.name, "", at.start_s, at.start_s + sent)
            issued[node.name] = at.start_s
            waits[node.name] = Span(node.name, "", at.end_s - (sent - hidden), at.end_s)
    out = []
    for number, start in enumerate(starts, 1):
        entry, key = collective(start.target), group_key(start)
        assert entry is not None
        job = jobs[start.name]
        wait = waits.get(start.name, Span(start.name, "", found.step_s, found.step_s))
        beside = _beside(job, own, ends)
        if is_fused(start.target):
            beside = {OWN: beside_itself(start)[1]}
        longest = sorted(beside, key=beside.__getitem__, reverse=True)
        purpose = key.partition("#")[2]
        taken, given = tensor_ends(start, sizes)
        out.append(
            Transfer(
                phase=phase,
                number=number,
                before=before.get(start, len(starts) + 1),
                kind=entry.kind,
                primitive=entry.primitive,
                parameters=purpose in (GRADIENTS, PARAMETERS),
                group=key,
                ranks=start.args[-2],
                bytes=entry.tensor_bytes(taken, given),
                estimated=purpose == EXCHANGE and entry.primitive == "exchange",
                where=start.meta.get("where", ""),
                node=start.name,
                bucket=len(start.meta.get("bucket", (0,))),
                chunk=start.meta.get("chunk"),
                issued_s=began + issued.get(start.name, job.start_s),
                start_s=began + job.start_s,
                end_s=began + job.end_s,
                waited_s=began + wait.start_s,
                stall_s=wait.end_s - wait.start_s,
                hidden_s=sum(beside.values()),
                beside=tuple((name, beside[name]) for name in longest if beside[name] > 0),
            )
        )
    return out


def _beside(job: Span, compute: Sequence[Span], ends: Sequence[float]) -> dict[str, float]:
    """Seconds by module.  ``compute``: spans one after the other, which end at ``ends``."""
    meanwhile: dict[str, float] = defaultdict(float)
    for span in compute[bisect_left(ends, job.start_s) :]:
        if span.start_s >= job.end_s:
            break
        meanwhile[span.where or span.node] += min(span.end_s, job.end_s) - max(span.start_s, job.start_s)
    return meanwhile
