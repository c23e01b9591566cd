"""chunks: how many token chunks ``Overlap(chunks="auto")`` means, by the cost model.

1. The program is compiled with 1, 2, 4 … chunks, each scheduled as it would run, and its step is predicted.  What a
   number of chunks is refused for (an FP8 recipe that scales all tokens together, a bound of memory) rules out that
   number, not the plan.
2. It stops where more chunks are no longer faster, and takes the fastest; of those as fast (within ``SAME``), the one
   with the fewest.  What was compared is in ``why_not``.

Nothing here depends on data or on the rank: every rank takes the same.  Each candidate costs the passes and a schedule,
not a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from moec.cost import Sizes, cluster, predict
from moec.plan import Plan
from moec.program import Program
from moec.runtime.errors import MoecError

CANDIDATES = (1, 2, 4, 8)
SAME = 0.01
"""Step times so close count as equal."""


def choose(plan: Plan, compiled: Callable[[Plan], Program], shapes: Mapping[str, tuple[int, ...]]) -> tuple[Plan, str]:
    """The plan with a number of chunks, and what was compared.  ``compiled``: gives the program of a plan.  ``shapes``:
    sizes of a rank's inputs, by path, as the program calls them.

    Raises MoecError, that of one chunk, if every candidate is refused, within ``Overlap.memory_gb`` for instance."""
    overlap = plan.overlap
    assert overlap is not None
    found: dict[int, float] = {}
    refused: dict[int, MoecError] = {}
    for n in CANDIDATES:  # 1
        candidate = replace(plan, overlap=replace(overlap, chunks=n))
        try:
            found[n] = step_seconds(compiled(candidate), overlap.cluster, shapes)
        except MoecError as e:
            refused[n] = e
            continue
        if found[n] > min(found.values()) * (1 + SAME):  # 2
            break
    if not found:
        raise refused[1]
    least = min(found.values())
    best = next(n for n in CANDIDATES if found.get(n, float("inf")) <= least * (1 + SAME))
    said = ", ".join([f"{n}: {s * 1e3:.3f} ms" for n, s in found.items()] + [f"{n}: {e}" for n, e in refused.items()])
    return replace(plan, overlap=replace(overlap, chunks=best)), f"chunks=auto is {best}; predicted steps are {said}"


def step_seconds(program: Program, on: str, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Of the graphs that run: forward and backward, or the forward alone where there is no backward."""
    step, machines = program.step, cluster(on)
    assert step is not None
    graphs = [step.forward.graph] + ([step.backward(step.usual()).graph] if step.differentiable else [])
    sizes = Sizes.of(program, shapes, graphs)
    return sum(predict(g.nodes, machines, program.mesh, sizes).step_s for g in graphs)
