"""chunks: what ``Overlap(chunks="auto")`` means, by the cost model: how many chunks, and of what (``chunk_by``).

1. The program is compiled with 1, 2, 3 and 4 chunks, each scheduled as it would run, and its step is predicted: of
   whole sequences, if a rank's batch has ``LEAST`` for each, and of any tokens.  What a number of chunks is refused for
   (an FP8 recipe that scales all tokens together, a bound of memory) rules out that number, not the plan.
2. It stops where more chunks are no longer faster, and takes the fastest; of those as fast (within ``SAME``), the one
   with the fewest.  What was compared is in ``why_not``.

Nothing here depends on data or on the rank: every rank takes the same.  Each candidate costs the passes and a schedule,
not a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from moec.cost import Sizes, cluster, predict
from moec.overlap import LEAST, By
from moec.plan import Plan
from moec.program import Program
from moec.runtime.errors import MoecError

MORE = (2, 3, 4)
SAME = 0.01
"""Step times so close count as equal."""
Chunks = tuple[int, By]
"""How many, of what."""


def choose(
    plan: Plan, compiled: Callable[[Plan], Program], shapes: Mapping[str, tuple[int, ...]], sequences: int
) -> tuple[Plan, str]:
    """The plan with a number of chunks, and what was compared.  ``compiled``: gives the program of a plan.  ``shapes``:
    sizes of a rank's inputs, by path, as the program calls them.  ``sequences``: in a rank's batch.

    Raises MoecError, that of one chunk, if every candidate is refused, within ``Overlap.memory_gb`` for instance."""
    overlap = plan.overlap
    assert overlap is not None
    found: dict[Chunks, float] = {}
    refused: dict[Chunks, MoecError] = {}

    def slower(chunks: Chunks) -> bool:
        """Is it slower than fewer of the same?"""
        candidate = replace(plan, overlap=replace(overlap, chunks=chunks[0], chunk_by=chunks[1]))
        try:
            found[chunks] = step_seconds(compiled(candidate), overlap.cluster, shapes)
        except MoecError as e:
            refused[chunks] = e
            return False
        return found[chunks] > min(s for c, s in found.items() if 1 in c or c[1] == chunks[1]) * (1 + SAME)

    slower((1, "tokens"))  # 1
    both: tuple[By, ...] = ("sequences", "tokens")
    for by in both if overlap.chunk_by == "auto" else (overlap.chunk_by,):
        for n in MORE:
            if (by == "sequences" and LEAST * n > sequences) or slower((n, by)):  # 2
                break
    if not found:
        raise refused[1, "tokens"]
    least = min(found.values())
    best = min(c for c, s in found.items() if s <= least * (1 + SAME))
    said = [f"{_named(c)}: {s * 1e3:.3f} ms" for c, s in found.items()] + [
        f"{_named(c)}: {e}" for c, e in refused.items()
    ]
    why = f"chunks=auto is {_named(best)}; predicted steps are {', '.join(said)}"
    return replace(plan, overlap=replace(overlap, chunks=best[0], chunk_by=best[1])), why


def _named(chunks: Chunks) -> str:
    n, by = chunks
    return str(n) if n == 1 else f"{n} of {by}"


def step_seconds(program: Program, on: str, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Of the graphs that run: forward and backward, or the forward alone where there is no backward."""
    step, machines = program.step, cluster(on)
    assert step is not None
    graphs = [step.forward.graph] + ([step.backward(step.usual()).graph] if step.differentiable else [])
    sizes = Sizes.of(program, shapes, graphs)
    return sum(predict(g.nodes, machines, program.mesh, sizes).step_s for g in graphs)
