"""Step: a program's forward and backward as graphs that run one after the other, for plans that schedule them.

What they compute on one rank (``passes/joint`` makes them, physical passes rewrite them, ``moec.scheduled`` runs them):

    *outputs, *saved = forward(*placeholders of the program)
    *outputs         = inference(*placeholders of the program)            # nothing is kept for a backward
    *grads           = backward(given)(*saved, *gradients of the outputs ``given``)

Gradients are complete: what ``Program.grad_reductions`` owes is summed within the backward.  Placeholders of a backward
are a part of what is saved, by name, and ``tangent_<i>``: the gradient of output ``i``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import fx

from moec.overlap import Overlap
from moec.runtime.collectives import collective, name_groups

Given = frozenset[int]
"""Positions of outputs whose gradients are there."""


@dataclass(frozen=True)
class Step:
    forward: fx.GraphModule
    inference: fx.GraphModule
    num_outputs: int
    saved: tuple[str, ...]
    """What the results of ``forward`` past the outputs are called in backward graphs."""
    differentiable: tuple[int, ...]
    """Outputs that a gradient may come for."""
    params: tuple[str, ...]
    """Placeholders of the parameters whose gradients a backward returns (None where none arrives)."""
    backward_for: Callable[[Given], fx.GraphModule]
    """Makes the backward of some outputs' gradients; needs no communication, and gives the same on every rank."""
    keys: frozenset[str]
    """Groups that any of the graphs communicates over."""
    options: Overlap
    """What was asked for."""
    shapes: Mapping[str, tuple[int, ...]]
    """Sizes of a rank's inputs, by path, that the order is made for."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Group key -> name of the process group, once there are some."""
    made: dict[Given, fx.GraphModule] = field(default_factory=dict)

    def usual(self) -> Given:
        """The outputs whose gradients are expected: of losses, where there are some, else of all."""
        values = self.forward.graph.output_node().args[0]
        scalars = [i for i in self.differentiable if values[i].meta["val"].ndim == 0]
        return frozenset(scalars or self.differentiable)

    def render(self) -> str:
        """The graphs that usually run, as text that tells one order from another."""
        graphs = (self.forward, self.inference, self.backward_for(self.usual()))
        return "\n".join(str(g.graph) for g in graphs)

    def write(self, folder: Path) -> None:
        """The graphs that usually run, in their order: ``step_forward.txt`` and ``step_backward.txt``."""
        (folder / "step_forward.txt").write_text(f"{self.forward.graph}\n")
        if self.differentiable:
            (folder / "step_backward.txt").write_text(f"{self.backward_for(self.usual()).graph}\n")

    def backward(self, given: Given) -> fx.GraphModule:
        if given not in self.made:
            self.made[given] = named(self.backward_for(given), self.names)
        return self.made[given]

    def bound(self, names: Mapping[str, str]) -> Step:
        """The same graphs, communicating over real process groups."""
        graphs = {f: named(getattr(self, f), names) for f in ("forward", "inference")}
        return replace(self, **graphs, names=names, made={})


def named(module: fx.GraphModule, names: Mapping[str, str]) -> fx.GraphModule:
    """A copy whose collectives name process groups (``names``: by group key)."""
    if not names:
        return module
    graph = fx.Graph()
    output = graph.graph_copy(module.graph, {})
    graph.output(output)
    for node in graph.nodes:
        if node.op == "call_function" and collective(node.target):
            name_groups(node, names)
    return fx.GraphModule(module, graph)
