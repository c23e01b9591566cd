"""A factor rule, and the small tools to write one.

A *factor* is a loop of an op: see ``rules.py`` for what rules mean and for the table of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx

from moec.placement import Type
from moec.runtime.torch_compat import expr

Dims = tuple[str | None, ...]


@dataclass(frozen=True)
class Rule:
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    blocked: frozenset[str] = field(default_factory=frozenset)
    carries: str = "none"
    created: frozenset[str] = field(default_factory=frozenset)
    """Factors that the op itself makes (an expanded dim): free to be sharded, no operand has them."""
    added: frozenset[int] = field(default_factory=frozenset)
    """Operands that are added to the result (a bias): P where it is P, so that they count once."""
    invariant: frozenset[int] = field(default_factory=frozenset)
    """Operands (without factors) that are I on every axis, whatever the others are: a loss of the global batch, whose
    gradient every rank states in full."""
    moves: Callable[[Type], Type | None] | None = None
    """Of a view: S of its operand -> S of its result (None: gathered first).  Says more than factors can."""


def operands(node: fx.Node) -> list[fx.Node]:
    """The tensor operands of a node, one entry a slot (a value used twice is there twice), in argument order."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda n: found.append(n))
    return [n for n in found if isinstance(n.meta.get("val"), torch.Tensor)]


def shape(node: fx.Node) -> tuple:
    return tuple(node.meta["val"].shape)


def result_shapes(node: fx.Node) -> list[tuple]:
    val = node.meta["val"]
    return [tuple(v.shape) for v in (val if isinstance(val, (tuple, list)) else [val])]


def same_size(a, b) -> bool:
    return bool(expr(a) == expr(b))


def is_one(size) -> bool:
    return isinstance(size, int) and size == 1


def differentiable(value) -> bool:
    """Can a value of this dtype have a gradient?"""
    return value.dtype.is_floating_point or value.dtype.is_complex


def is_getitem(node: fx.Node) -> bool:
    return node.target is operator.getitem
