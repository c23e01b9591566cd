"""Overlap: what a plan does to hide communication behind computation (``Plan.overlap``).  None of it changes values.

A batch is cut into token chunks around each block of experts; all-gathers and reduce-scatters of sequence parallelism
become pieces beside their products, or one op with them (logical passes: autograd derives the backward); then the
forward and the backward graph are put into the order in which transfers run beside what does not need them.

Chunked programs compute the same sums in another order: they agree with unchunked ones as closely as the dtype rounds.
With the same chunks, a scheduled and an unscheduled program are equal bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from moec.runtime.errors import MoecError

By = Literal["tokens", "sequences", "auto"]
LEAST = 2
"""Sequences that the example has for each chunk of whole ones."""


@dataclass(frozen=True)
class Overlap:
    """Raises MoecError for values without meaning."""

    chunks: int | Literal["auto"] = 1
    """Token chunks of every block whose tokens travel to their experts; ``auto``: as many as the cost model says the
    step is fastest with (``moec.chunks``), which compiles the program a few times."""
    chunk_by: By = "auto"
    """What a chunk is: any tokens of a rank, or whole sequences of its batch, so that one chunk's attention runs beside
    another's exchanges (where the example call has at least two sequences for each).  ``auto``: with ``chunks="auto"``
    what the cost model says is faster, else tokens."""
    schedule: bool = True
    """List scheduling of the forward and the backward graph; False leaves the order in which they were built."""
    bucket_mb: float | Literal["auto"] | None = "auto"
    """Gradient reductions and FSDP gathers are merged into buckets of so many megabytes (10⁶ bytes); ``auto``: by the
    cost model; None: they stay as they are."""
    memory_gb: float | None = None
    """Bound of the scheduled program's peak memory, in 10⁹ bytes a rank; None: no bound."""
    pipeline_tp: int = 1
    """Pieces of each all-gather → product and product → reduce-scatter of sequence parallelism."""
    symmetric_memory: bool | Literal["auto"] = "auto"
    """Make one op of each of these transfers and its products (``passes/fuse_tp.py``): on GPUs torch's, in which ranks
    read each other's memory part by part while they multiply; ``pipeline_tp`` then cuts nothing.  ``auto``: where
    ``moec.parallelize`` finds GPUs that can read each other in every tp group.  True: anywhere; an error on GPUs that
    lack it, on a CPU the transfer and the products one after the other.  False: never."""
    cluster: str = "cpu2-1gbit"
    """The machines that times are estimated for: a preset's name, or the path of a data file."""

    def __post_init__(self) -> None:
        if problems := self._problems():
            raise MoecError("; ".join(problems), where="plan.overlap")

    def to_dict(self) -> dict[str, Any]:
        """Plain dict of the fields that differ from their defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Overlap:
        known = [f.name for f in fields(Overlap)]
        if not isinstance(data, Mapping) or (unknown := [k for k in data if k not in known]):
            what = f"unknown field {', '.join(map(repr, unknown))}" if isinstance(data, Mapping) else f"found {data!r}"
            raise MoecError(what, where="plan.overlap", way_out=f"fields are {', '.join(known)}")
        return Overlap(**data)

    def _problems(self) -> list[str]:
        counts: dict[str, Any] = {"pipeline_tp": self.pipeline_tp}
        if self.chunks != "auto":
            counts["chunks"] = self.chunks
        problems = [
            f"{name}={n!r} is not a positive integer"
            for name, n in counts.items()
            if not isinstance(n, int) or isinstance(n, bool) or n < 1
        ]
        if self.chunk_by not in ("tokens", "sequences", "auto"):
            problems.append(f"chunk_by={self.chunk_by!r} is not 'tokens', 'sequences' or 'auto'")
        sizes: dict[str, Any] = {"memory_gb": self.memory_gb}
        if self.bucket_mb != "auto":
            sizes["bucket_mb"] = self.bucket_mb
        problems += [
            f"{name}={x!r} is not a positive number" for name, x in sizes.items() if x is not None and not _positive(x)
        ]
        if not isinstance(self.schedule, bool):
            problems.append(f"schedule={self.schedule!r} is not a bool")
        if self.symmetric_memory != "auto" and not isinstance(self.symmetric_memory, bool):
            problems.append(f"symmetric_memory={self.symmetric_memory!r} is not a bool or 'auto'")
        if not isinstance(self.cluster, str) or not self.cluster:
            problems.append(f"cluster={self.cluster!r} is neither a preset's name nor a path")
        return problems


def _positive(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) and x > 0
