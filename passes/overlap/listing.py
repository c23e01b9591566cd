"""List scheduling: tasks on resources, in simulated time.

Every resource (compute, each link) runs one task at a time and, when it is free, takes the most urgent one that is
ready: a heap a resource, one pop a task, so time is near linear in the size of the graph.

``forward`` starts tasks as early as their operands allow.  ``backward`` is the same in reversed time: every task as
late as those that need it allow, *given that links and compute are busy with others as well*.  How late a task may be
is how urgent it is: the forward pass that follows takes the tasks in the order of these times.  (Forward-backward
improvement of list schedules; Tormos and Lova 2001, "justification" in Valls et al. 2005.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from moec.passes.overlap.tasks import COMPUTE, Tasks


@dataclass(frozen=True)
class Times:
    start: list[float]
    end: list[float]

    @property
    def length(self) -> float:
        return max(self.end, default=0.0)


def forward(tasks: Tasks, urgency: Sequence[float], window: float = float("inf"), eager: bool = True) -> Times:
    """``urgency``: of every task, lower is earlier.

    Starts that read what was computed are issued at once, and the short work before them is done first; gathers of
    parameters when their urgency says, and so are all if not ``eager``.  ``window``: nothing runs more than so many
    seconds of compute ahead of the first task, in the order of the graph, that has not run yet: it bounds what is alive
    at once."""
    key = list(urgency)
    if eager:
        span = max(key, default=0.0) - min(key, default=0.0) + 1.0  # before all others, in their own order
        for task in tasks.leading:
            key[task] = float("-inf") if task in tasks.job else key[task] - span
    gate = _Window(tasks, window) if window != float("inf") else None
    return _run(tasks, tasks.dag.pred, tasks.dag.succ, key, gate)


def backward(tasks: Tasks, times: Times) -> list[float]:
    """How late each task may start, the schedule being as long as ``times``; what ended last goes last."""
    reversed_ = _run(tasks, tasks.dag.succ, tasks.dag.pred, [-t for t in times.end], None)
    length = reversed_.length
    return [length - end for end in reversed_.end]


class _Window:
    """Which of the tasks of the compute resource may run yet."""

    def __init__(self, tasks: Tasks, window: float) -> None:
        self.window, self.order = window, range(len(tasks.nodes))
        self.base, total = [0.0] * len(tasks.nodes), 0.0
        for task in self.order:
            self.base[task] = total
            total += tasks.seconds[task]
        self.ran = [False] * len(tasks.nodes)
        self.first = 0
        self.held: list[tuple[float, int]] = []

    def allows(self, task: int) -> bool:
        if self.base[task] <= self._until():
            return True
        heappush(self.held, (self.base[task], task))
        return False

    def runs(self, task: int) -> list[int]:
        """Note that a task runs; returns those that may from now on."""
        self.ran[task] = True
        while self.first < len(self.order) and self.ran[self.order[self.first]]:
            self.first += 1
        free = []
        while self.held and self.held[0][0] <= self._until():
            free.append(heappop(self.held)[1])
        return free

    def _until(self) -> float:
        return self.base[self.order[self.first]] + self.window if self.first < len(self.order) else float("inf")


def _run(tasks: Tasks, before: Mapping, after: Mapping, key: Sequence[float], gate: _Window | None) -> Times:
    missing = [len(before[i]) for i in range(len(tasks))]
    start, end = [0.0] * len(tasks), [0.0] * len(tasks)
    ready: dict[str, list[tuple[float, int]]] = defaultdict(list)
    busy: set[str] = set()
    events: list[tuple[float, int]] = []

    def release(task: int) -> None:
        where = tasks.resource[task]
        if gate is None or where != COMPUTE or gate.allows(task):
            heappush(ready[where], (key[task], task))

    def begin(where: str, now: float) -> None:
        if where in busy or not ready[where]:
            return
        task = heappop(ready[where])[1]
        busy.add(where)
        start[task], end[task] = now, now + tasks.seconds[task]
        heappush(events, (end[task], task))
        if gate is not None and where == COMPUTE:
            for freed in gate.runs(task):
                heappush(ready[where], (key[freed], freed))

    for task in range(len(tasks)):
        if not missing[task]:
            release(task)
    for where in list(ready):
        begin(where, 0.0)
    ended = 0
    while events:
        now, task = heappop(events)
        ended += 1
        busy.discard(tasks.resource[task])
        touched = {tasks.resource[task]}
        for other in after[task]:
            missing[other] -= 1
            if not missing[other]:
                release(other)
                touched.add(tasks.resource[other])
        for where in sorted(touched):
            begin(where, now)
    assert ended == len(tasks), "some tasks wait for each other"
    return Times(start, end)


__all__ = ["Times", "backward", "forward"]
