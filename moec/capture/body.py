"""Body: what one expert computes, as steps cut out of a tape.

A body starts from rows (one token a row) and uses the parameters of one expert (or, written for all experts at once, of
each row's expert).  ``Body.grouped`` replays it on rows sorted by expert, with all experts' stacked parameters.

``bodies`` proposes them:

1. Starts: the rows of the first use of a parameter, or what these were made from, a few steps back.
2. From a start forward, every step whose operands are known joins: steps on parameters alone (``params``), steps where
   rows meet parameters (``meets``), steps on rows alone.  One value from outside may take part: one number a row (the
   *scale*: a routing weight applied inside).
3. Ends: values that depend on a parameter, the last ones first, bodies without a scale before those with one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch import Tensor

from .axes import Layout, follow, rows_of, spread
from .meets import Contraction, FeatureWise, contraction, feature_wise
from .observe import Call, Tape
from .params import ExpertValues, Reshaped, reshaped
from .steps import Env, function_name, record, substitute

STEPS_BACK, ENDS = 5, 8
_SEGMENTED = ("grouped_mm", "_grouped_mm")


@dataclass(frozen=True)
class Relaid:
    """The same rows in another shape."""

    call: Call
    source: int
    feature: int
    targets: tuple[tuple[int, Layout], ...]

    def apply(self, env: Env, counts_E: Tensor) -> None:
        rows_NF = rows_of(env[self.source], self.feature)
        for v, layout in self.targets:
            env[v] = spread(rows_NF, layout)


@dataclass(frozen=True)
class OnRows:
    """A step on rows alone, and perhaps the scale."""

    call: Call
    rows: dict[int, Layout]
    scale: int | None

    def apply(self, env: Env, counts_E: Tensor) -> None:
        local: Env = dict(env)
        rank = max(layout.rank for layout in self.rows.values())
        if len(self.rows) > 1 or self.scale is not None:
            for v, layout in self.rows.items():
                local[v] = spread(rows_of(env[v], layout.feature), layout.aligned(rank))
                common = layout.aligned(rank)
            if self.scale is not None:
                local[self.scale] = spread(env[self.scale], common)
        args, kwargs = substitute(self.call, local, next(iter(env.values())).device)
        record(self.call, self.call.func(*args, **kwargs), env)


Step = Contraction | FeatureWise | Reshaped | Relaid | OnRows


@dataclass(frozen=True)
class Body:
    rows: int
    """Value of the rows that it starts from, and their layout."""
    layout: Layout
    out: int
    out_layout: Layout
    steps: tuple[Step, ...]
    params: dict[int, str]
    """Value that is a parameter -> role."""
    scale: int | None
    """Value of one number a row that takes part."""

    def grouped(
        self, rows_NH: Tensor, counts_E: Tensor, stack: Callable[[str], Tensor], scale_N1: Tensor | None = None
    ) -> Tensor:
        """``[N, M]`` of rows that lie in order of experts; ``stack(role)`` gives ``[E, …]``."""
        env: Env = {v: stack(role) for v, role in self.params.items()}
        env[self.rows] = spread(rows_NH, self.layout)
        if self.scale is not None:
            env[self.scale] = scale_N1
        for step in self.steps:
            step.apply(env, counts_E)
        return rows_of(env[self.out], self.out_layout.feature)

    def widened(self, own: Callable[[Call], Call], factor: int) -> Body:
        """The body of a module that is ``factor`` times as wide; ``own(call)`` is a call as that module makes it."""

        def one(step: Step) -> Step:
            if isinstance(step, (FeatureWise, OnRows)):
                return replace(step, call=own(step.call))
            return step.widened(factor) if isinstance(step, Reshaped) else step

        return replace(self, steps=tuple(map(one, self.steps)))


def bodies(tape: Tape, values: ExpertValues, of_experts: set[int]) -> Iterator[Body]:
    call, expert = values.uses[0] if values.uses else (values.whole_uses[0], None)
    mine = values.mine(expert)
    found = [grown for start in _starts(tape, call, mine) if (grown := _grow(tape, *start, values, mine)) is not None]
    for scaled in (False, True):
        for grown in found:
            yield from grown.bodies(tape, of_experts, scaled)


# 1 ------------------------------------------------------------------------------------------------------------------


def _starts(tape: Tape, call: Call, mine: frozenset[int]) -> Iterator[tuple[int, int]]:
    """(value, axis of its features)"""
    start: int | None = next((v for v in call.reads if v not in mine), None)
    if start is None or tape.values[start] is None:
        return
    size = None
    for _ in range(STEPS_BACK + 1):
        if start is None:
            return
        shape = _shape(tape, start)
        axes = [a for a in reversed(range(len(shape))) if size is None or shape[a] == size]
        if size is None and len(shape) > 1:
            # Of the first use itself, the contracted axis: the last one, or the last but one (``w @ x[…, None]``).
            axes = [a for a in axes if shape[a] > 1]
            size = shape[axes[0]] if axes else 1
        for axis in axes:
            yield start, axis
        start = _previous(tape, start, size)


def _previous(tape: Tape, v: int, size: int | None) -> int | None:
    """What these rows were made from, one step back."""
    if tape.maker[v] < 0:
        return None
    call = tape.calls[tape.maker[v]]
    reads = (*call.reads, *(old for old, _ in call.overwrites))
    return next((r for r in reads if size in _shape(tape, r) and _is_float(tape, r)), None)


def _shape(tape: Tape, v: int) -> tuple[int, ...]:
    t = tape.values[v]
    return tuple(t.shape) if t is not None else ()


def _is_float(tape: Tape, v: int) -> bool:
    t = tape.values[v]
    return t is not None and t.is_floating_point()


# 2 ------------------------------------------------------------------------------------------------------------------


@dataclass
class _Grown:
    start: int
    axis: int
    roles: dict[int, str]
    layouts: dict[int, Layout]
    features: dict[int, tuple[int, ...]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    # 3
    def bodies(self, tape: Tape, of_experts: set[int], scaled: bool) -> Iterator[Body]:
        ends = sorted((v for v in self.layouts if v in of_experts and tape.values[v] is not None), reverse=True)
        seen = 0
        for out in ends:
            needed, kept = {out}, []
            for step in reversed(self.steps):
                call_makes, call_reads = _interface(step)
                if any(v in needed for v in call_makes):
                    kept.append(step)
                    needed.update(call_reads)
            scales = {s.scale for s in kept if isinstance(s, OnRows) and s.scale is not None}
            if len(scales) > 1 or bool(scales) != scaled or self.start not in needed:
                continue
            params = {v: r for v, r in self.roles.items() if v in needed}
            yield Body(
                self.start,
                self.layouts[self.start],
                out,
                self.layouts[out],
                tuple(reversed(kept)),
                params,
                next(iter(scales), None),
            )
            seen += 1
            if seen == ENDS:
                return


def _interface(step: Step) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a step makes and reads."""
    if isinstance(step, Contraction):
        return (step.target,), (step.rows, step.weight, *(() if step.bias is None else (step.bias,)))
    call = step.call
    return (*call.makes, *(new for _, new in call.overwrites)), (*call.reads, *(old for old, _ in call.overwrites))


def _grow(tape: Tape, start: int, axis: int, values: ExpertValues, mine: frozenset[int]) -> _Grown | None:
    grown = _Grown(start, axis, {}, {start: Layout(len(_shape(tape, start)), axis)})
    for v, role in values.roles.items():
        if v in mine:
            rank = len(_shape(tape, v))
            grown.roles[v] = role
            grown.features[v] = tuple(range(1 if v in values.whole else 0, rank))
    after = tape.maker[start]
    for call in tape.calls:
        if not call.makes or not call.reads or all(v in grown.roles for v in call.makes):
            continue
        try:
            if all(v in mine for v in call.makes):
                step, features = reshaped(tape, call, grown.features)
                grown.steps.append(step)
                grown.features.update(features)
            elif call.index > after:
                _join(tape, call, grown, mine)
        except Exception:  # not a step of the body, or one that cannot be replayed
            continue
    return grown if len(grown.layouts) > 1 else None


def _join(tape: Tape, call: Call, grown: _Grown, mine: frozenset[int]) -> None:
    rows = {v: grown.layouts[v] for v in call.reads if v in grown.layouts}
    params = {v: grown.features[v] for v in call.reads if v in grown.features}
    outside = [v for v in dict.fromkeys(call.reads) if v not in rows and v not in params]
    if not rows or any(v in mine and v not in params for v in call.reads):
        return
    if params:
        if outside and function_name(call.func) not in _SEGMENTED:
            return
        found = contraction(tape, call, params)
        if found is None:
            by_feature = feature_wise(tape, call, rows, params)
            grown.layouts.update(dict(by_feature.targets))
            grown.steps.append(by_feature)
        elif grown.layouts[found.rows].feature == found.rows_axis:
            grown.layouts[found.target] = found.layout
            grown.steps.append(found)
        return
    if len(outside) > 1 or (outside and not _one_a_row(tape, outside[0], rows)):
        return
    followed = follow(tape, call, {v: layout.feature for v, layout in rows.items()}, outside)
    targets = []
    for v, f in zip(call.makes, followed, strict=True):
        made = _shape(tape, v)
        a = f.axis
        if a is None:  # the same everywhere (zeros_like), or it cannot be told: then an equal shape has equal axes
            a = next((la.feature for u, la in rows.items() if _shape(tape, u) == made), None)
        if a is not None:
            targets.append((v, Layout(len(made), a)))
    grown.layouts.update(targets)
    if not targets:
        return
    same = not outside and not call.overwrites and len(rows) == 1 and all(f.whole for f in followed)
    if same and all(_dtype(tape, v) == _dtype(tape, call.reads[0]) for v in call.makes):
        ((source, layout),) = rows.items()
        grown.steps.append(Relaid(call, source, layout.feature, tuple(targets)))
    else:
        grown.steps.append(OnRows(call, rows, outside[0] if outside else None))


def _dtype(tape: Tape, v: int) -> Any:
    t = tape.values[v]
    return None if t is None else t.dtype


def _one_a_row(tape: Tape, v: int, rows: dict[int, Layout]) -> bool:
    """Does ``v`` broadcast along the features and have one number for every row?"""
    rank = max(layout.rank for layout in rows.values())
    shape = _shape(tape, v)
    for u, layout in rows.items():
        if layout.rank == rank and len(shape) == rank and shape[layout.feature] == 1:
            lead = [n for a, n in enumerate(_shape(tape, u)) if a != layout.feature]
            return _is_float(tape, v) and prod(shape) == prod(lead)
    return False
