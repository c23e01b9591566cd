"""timeline: the predicted training step of a compiled program on a cluster.

1. Forward and backward are two graphs, executed in their order in predicted time (:func:`moec.cost.predict`): those
   that run where the plan has ``overlap``, else those of ``joint_graphs``.
2. What a program without ``overlap`` does outside of these graphs follows: parameters that were resharded after the
   forward are gathered again (shown in front of the backward, although each is gathered when it is needed: nothing runs
   beside it, so the step is as long), and the gradient epilogue sums its buckets, one after the other.

``moec.record`` writes what a run really did, as the same kind of spans, so that both can be shown in one trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import fx

from moec.compiler import joint_graphs, note_storages
from moec.cost import COMPUTE, Cluster, Sizes, Span, Timeline, cluster, trace, transfer
from moec.cost.roofline import group_key
from moec.placement import local_shape
from moec.program import Program
from moec.regather import saved_gathers
from moec.runtime.errors import MoecError
from moec.schedule import predicted, step_graphs


@dataclass(frozen=True)
class Prediction:
    cluster: str
    sizes: dict[str, tuple[int, ...]]
    """The local input sizes that it is stated for."""
    parts: dict[str, Timeline]
    """What follows each other: forward, backward …"""

    @property
    def step(self) -> Timeline:
        whole, *rest = self.parts.values()
        for part in rest:
            whole = whole.then(part)
        return whole

    def to_dict(self) -> dict[str, object]:
        step = self.step
        numbers = {k: getattr(step, k) for k in ("step_s", "compute_s", "exposed_s", "host_s")}
        return {
            "cluster": self.cluster,
            "sizes": {k: list(v) for k, v in self.sizes.items()},
            **numbers,
            "peak_bytes": step.peak_bytes,
            "parts": {k: {"step_s": p.step_s, "exposed_s": p.exposed_s} for k, p in self.parts.items()},
        }

    def trace(self, measured: Iterable[Span] = ()) -> dict[str, object]:
        """For Chrome or Perfetto, with what was measured beside it."""
        shown: dict[str, Iterable[Span]] = {f"predicted on {self.cluster}": self.step.spans}
        return trace({**shown, **({"measured": measured} if (measured := list(measured)) else {})})

    def __str__(self) -> str:
        step = self.step
        sizes = ", ".join(f"{k}{list(v)}" for k, v in self.sizes.items())
        lines = [f"predicted step of one rank on {self.cluster}, for inputs {sizes}"]
        rows = [*self.parts.items(), ("step", step)]
        lines += [
            f"  {name:<10} {_ms(t.step_s)}   compute {_ms(t.compute_s)}   exposed communication {_ms(t.exposed_s)}"
            for name, t in rows
        ]
        if step.host_s:
            lines.append(f"  host       {_ms(step.host_s)}   the GPU had nothing to do: nothing was launched yet")
        share = step.exposed_s / step.step_s if step.step_s else 0.0
        return "\n".join(
            [*lines, f"  exposed    {share:.1%} of the step", f"  peak       {step.peak_bytes / 1e6:.1f} MB"]
        )


def timeline(
    program: Program, on: Cluster | str | Path, sizes: Mapping[str, tuple[int, ...]] | None = None
) -> Prediction:
    """Predict one training step of a lowered program (``moec.compile_program`` of a model in training mode).

    ``on``: a cluster, a preset's name, or the path of a cluster file.  ``sizes``: *local* input sizes by path; what is
    not given is 2 sequences of 16.  Raises MoecError for a program that does not train, or a cluster without the links
    that the plan needs, and for sizes of inputs that do not exist."""
    if not program.training:
        raise MoecError("the program has no backward", where="timeline", way_out="compile the model in training mode")
    on = on if isinstance(on, Cluster) else cluster(on)
    _check_sizes(program, sizes or {})
    graphs = step_graphs(program) if program.step else _recorded(program)
    values, parts = Sizes.of(program, sizes, graphs.values()), {}
    for phase, graph in graphs.items():
        if phase == "backward" and not program.step and (again := _again(program, on)):
            parts["gathered"] = again
        parts[phase] = predicted(program, phase, graph, on, values)
    if epilogue := None if program.step else _epilogue(program, on):
        parts["epilogue"] = epilogue
    shown = {s.path: values.shape(n.meta["val"]) for n in program.placeholders() if (s := program.inputs.get(n.name))}
    return Prediction(on.name, shown, parts)


def _check_sizes(program: Program, sizes: Mapping[str, tuple[int, ...]]) -> None:
    known = {spec.path: spec.ndim for spec in program.inputs.values()}
    if wrong := {path: size for path, size in sizes.items() if len(size) != known.get(path)}:
        raise MoecError(
            f"no inputs have the sizes {wrong}", where="timeline", way_out=f"inputs and their dims are {known}"
        )


def _recorded(program: Program) -> dict[str, fx.Graph]:
    """Forward and backward for the gradients of all outputs."""
    joint = note_storages(joint_graphs(program), set(program.params))
    return {"forward": joint.forward.graph, "backward": joint.backward.graph}


def _again(program: Program, on: Cluster) -> Timeline | None:
    jobs = []
    for entries in saved_gathers(program).values():
        for start, elements in entries:
            key = group_key(start)
            ranks = program.mesh.size(key)
            whole = elements * start.meta["val"].dtype.itemsize
            jobs.append((start.name, key, transfer("all_gather", whole * (ranks - 1) / ranks, key, on, program.mesh)))
    return _in_turn(jobs)


def _epilogue(program: Program, on: Cluster) -> Timeline | None:
    buckets: dict[tuple[str, torch.dtype], int] = defaultdict(int)
    for name, key in program.grad_reductions.items():
        spec = program.params[name]
        buckets[key, spec.dtype] += prod(local_shape(spec.shape, spec.types, program.mesh)) * spec.dtype.itemsize
    jobs = []
    for (key, dtype), nbytes in buckets.items():
        ranks, copied = program.mesh.size(key), 2 * nbytes / on.memory(2 * nbytes)
        took = transfer("all_reduce", 2 * nbytes * (ranks - 1) / ranks, key, on, program.mesh)
        jobs += [(f"bucket of {dtype}", "", copied), (f"sum of {dtype}", key, took)]
    return _in_turn(jobs)


def _in_turn(jobs: list[tuple[str, str, float]]) -> Timeline | None:
    """Work (without a group) and collectives, each of which waits for the one before."""
    if not jobs:
        return None
    now, compute, spans = 0.0, 0.0, []
    for name, key, took in jobs:
        spans.append(Span(name, f"comm:{key}" if key else COMPUTE, now, now + took))
        now += took
        compute += 0.0 if key else took
    return Timeline(now, compute, now - compute, 0, tuple(spans))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:9.3f} ms"
