"""Segments: a program's graph cut into pieces, so that equal pieces are differentiated once.

``expand`` marks the value that each of many equal layers ends with (``meta["boundary"]``); there the node list is cut.
Any cut is right, since a piece takes everything that it reads from before; these cuts give equal pieces.  A program
without boundaries is one piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moec.program import Program
from moec.runtime.torch_compat import expr


@dataclass(frozen=True)
class Segment:
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    """What it reads from before, in the order of first use."""
    outputs: tuple[fx.Node, ...]
    """What others read of it."""

    def key(self, values: dict[fx.Node, Any]) -> tuple:
        """Equal for segments that compute the same of inputs that are alike; ``values``: what the inputs are."""
        number = {n: i for i, n in enumerate((*self.inputs, *self.nodes))}
        return (
            tuple(_describe(values[n]) for n in self.inputs),
            tuple((str(n.target), _encode((n.args, n.kwargs), number)) for n in self.nodes),
            tuple(number[n] for n in self.outputs),
        )

    @property
    def where(self) -> str:
        """The module that all of it comes from."""
        paths = [n.meta.get("where", "").split(".") for n in self.nodes]
        common = paths[0]
        for p in paths:
            common = common[: next((i for i, (a, b) in enumerate(zip(common, p, strict=False)) if a != b), len(p))]
        return ".".join(common)


def cut(program: Program) -> list[Segment]:
    pieces: list[list[fx.Node]] = [[]]
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        pieces[-1].append(node)
        if node.meta.get("boundary"):
            pieces.append([])
    return [_segment(tuple(nodes)) for nodes in pieces if nodes]


def _segment(nodes: tuple[fx.Node, ...]) -> Segment:
    own = set(nodes)
    inputs = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in own)
    return Segment(nodes, tuple(inputs), tuple(n for n in nodes if any(u not in own for u in n.users)))


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sizes = tuple(map(expr, value.shape)), tuple(map(expr, value.stride()))
        return (value.dtype, value.device, *sizes, value.requires_grad)
    return expr(value) if isinstance(value, (int, torch.SymInt)) else repr(value)


def _encode(args: Any, number: dict[fx.Node, int]) -> Any:
    if isinstance(args, fx.Node):
        return ("node", number[args])
    if isinstance(args, (tuple, list)):
        return tuple(_encode(a, number) for a in args)
    if isinstance(args, dict):
        return tuple((k, _encode(a, number)) for k, a in args.items())
    if isinstance(args, slice):
        return ("slice", _encode((args.start, args.stop, args.step), number))
    return (type(args), repr(args))
