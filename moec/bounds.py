"""Bounds: which values the integer inputs of a program may have, as the graph itself implies them.

A token id beyond the vocabulary makes one rank raise in the middle of its graph while the others wait in a collective.
So the preflight compares values with what the graph will ask of them:

* ``aten.embedding`` takes ids in ``[0, rows of the table)``;
* ``aten.cross_entropy_loss`` and ``nll_loss`` take targets in ``[0, classes)``, or ``ignore_index``;
* ``aten.gather`` takes indices in ``[0, size of the dim)``.

Bounds are found by following an input through operations that only move values, and the slices on the way are
replayed on the real tensor: what a shift of the labels throws away may have any value.  An input that reaches a
lookup in any other way has no bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from moec.program import Program, op_name

_MOVES = """alias clone contiguous detach expand flatten lift_fresh_copy permute reshape squeeze t transpose unflatten
unsqueeze view _to_copy _unsafe_view"""
SAME_VALUES = frozenset(f"aten.{n}" for n in _MOVES.split())
LOSSES = {"aten.cross_entropy_loss": "cross entropy", "aten.nll_loss_nd": "nll_loss"}
PADDED = frozenset({"aten.pad", "aten.constant_pad_nd"})
"""They add values, all alike; where they pad is replayed, so that a slice behind them means what it says."""


@dataclass(frozen=True)
class Bound:
    """Values in ``[low, high)``, or equal to ``also``, after ``steps``."""

    low: int
    high: int
    also: int | None
    what: str
    steps: tuple[tuple[Any, tuple[Any, ...]], ...] = ()
    """(op, arguments after the tensor) of slices and pads between the input and its use."""

    def problem(self, x: Tensor) -> str:
        """What is wrong with the values of ``x``; empty when nothing is."""
        for op, args in self.steps:
            x = op(x, *args)
        if x.is_meta or not x.numel():
            return ""
        bad = (x < self.low) | (x >= self.high)
        if self.also is not None:
            bad &= x != self.also
        if not bad.any():
            return ""
        also = "" if self.also is None else f" or be {self.also}"
        return f"has the value {int(x[bad][0])}, which must lie in [{self.low}, {self.high}){also}: {self.what}"


def with_bounds(program: Program) -> Program:
    """Fill ``InputSpec.bounds`` from the captured graph, whose sizes are global."""
    found: dict[str, list[Bound]] = {}
    for node in program.graph.nodes:
        for source, bound in _asked(node):
            traced = _trace(source)
            if traced is not None and traced[0].name in program.inputs:
                bounds = found.setdefault(traced[0].name, [])
                bound = replace(bound, steps=traced[1])
                if bound not in bounds:
                    bounds.append(bound)
    for name, bounds in found.items():
        program.inputs[name] = replace(program.inputs[name], bounds=tuple(bounds))
    return program


def _asked(node: fx.Node) -> Iterator[tuple[fx.Node, Bound]]:
    if node.op != "call_function":
        return
    where = node.meta.get("where") or "the model"
    if op_name(node) == "aten.embedding":
        rows = node.args[0].meta["val"].shape[0]
        if isinstance(rows, int):
            yield node.args[1], Bound(0, rows, None, f"the table of {where} has {rows} rows")
    elif op_name(node) == "aten.gather":
        size = node.args[0].meta["val"].shape[node.args[1]]
        if isinstance(size, int):
            yield node.args[2], Bound(0, size, None, f"what {where} gathers from has {size} entries")
    elif op_name(node) in LOSSES:
        logits, target = node.args[0].meta["val"], node.args[1].meta["val"]
        classes = logits.shape[1] if logits.ndim > 1 else logits.shape[0]
        ignore = node.args[4] if len(node.args) > 4 else node.kwargs.get("ignore_index", -100)
        if isinstance(classes, int) and isinstance(ignore, int) and not target.dtype.is_floating_point:
            what = f"the {LOSSES[op_name(node)]} in {where} has {classes} classes"
            yield node.args[1], Bound(0, classes, ignore, what)


def _trace(node: fx.Node) -> tuple[fx.Node, tuple[tuple[Any, tuple[Any, ...]], ...]] | None:
    """The placeholder that ``node`` moves the values of, and the slices and pads on the way; None if there is more."""
    steps: list[tuple[Any, tuple[Any, ...]]] = []
    while node.op == "call_function":
        name = op_name(node)
        rest = node.args[1:]
        if name == "aten.slice" or name in PADDED:
            if node.kwargs or any(isinstance(a, (fx.Node, torch.SymInt)) for a in _flat(rest)):
                return None
            steps.append((node.target, rest))
        elif name not in SAME_VALUES or (name == "aten._to_copy" and node.meta["val"].dtype.is_floating_point):
            return None
        elif steps and name not in ("aten._to_copy", "aten.alias", "aten.clone", "aten.contiguous", "aten.detach"):
            return None  # a slice of a reshaped input: its dims are not those of the input
        node = node.args[0]
    return node, tuple(reversed(steps))


def _flat(args: tuple[Any, ...]) -> Iterator[Any]:
    for a in args:
        if isinstance(a, (tuple, list)):
            yield from _flat(tuple(a))
        else:
            yield a
