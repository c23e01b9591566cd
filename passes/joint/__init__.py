"""joint: the forward and the backward of a lowered program as two graphs, collectives and waits as nodes of both.

What they compute for one rank:

    *outputs, *saved = forward(*placeholders of the program)
    *grads           = backward(*saved, *gradients of the differentiable outputs)

``grads`` are what this rank's work gives each trainable parameter; what ``Program.grad_reductions`` owes is still to be
summed over its group.  This is what physical passes (bucketing, overlap, recomputation) work on.

1. The graph is cut where equal layers end (``segments.py``), and each distinct piece is traced with its backward once
   (``vjp.py``): pieces are the same if they have the same operations and inputs of the same shapes, strides and types.
2. Forward: the pieces' forward nodes, one piece after the other.
3. Backward: the pieces in reverse.  By the chain rule a value's gradient is the sum of what the later pieces, and the
   caller, give for it; a piece that nobody gives a gradient is left out.
4. What the backward reads of the forward becomes an output of the forward, once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from moec.passes.joint.segments import Segment, cut
from moec.passes.joint.vjp import Vjp, trace
from moec.passes.verify.reinfer import local_placeholder
from moec.program import Program
from moec.runtime.collectives import is_start
from moec.runtime.errors import MoecError
from moec.runtime.torch_compat import fake_mode_of


@dataclass
class JointGraphs:
    forward: fx.GraphModule
    backward: fx.GraphModule
    num_outputs: int
    """How many results of ``forward`` are the program's; the rest is saved for ``backward``."""
    differentiable: tuple[int, ...]
    """Positions of the outputs whose gradients ``backward`` takes, in this order."""
    params: tuple[str, ...]
    """Placeholders of the parameters whose gradients ``backward`` returns (None where none arrives), in this order."""
    pieces: int
    distinct: int
    """How many pieces the graph was cut into, and how many of them were traced."""


def joint_graphs(program: Program) -> JointGraphs:
    """Raises MoecError for a program that is not lowered, or that still holds a part of its layers only."""
    if "lowered" not in program.facts or program.repeats:
        raise MoecError("only a lowered program with all of its layers has these graphs", where="joint_graphs")
    if unknown := [n.name for n in program.placeholders() if n.name not in program.params | program.inputs]:
        raise MoecError(f"{unknown} is not a tensor: a graph that is bound to process groups", where="joint_graphs")
    return _Joint(program).build()


@dataclass
class _Piece:
    """A segment and the trace that it shares with its equals."""

    segment: Segment
    vjp: Vjp
    env: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Node of the trace -> node of the forward graph."""


class _Joint:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.forward, self.backward = fx.Graph(), fx.Graph()
        self.roots = (nn.Module(), nn.Module())
        self.made: dict[fx.Node, fx.Node] = {}
        """Node of the program -> node of the forward graph."""
        self.saved: dict[fx.Node, fx.Node] = {}
        """Node of the forward graph -> placeholder of the backward graph."""

    def build(self) -> JointGraphs:
        pieces, values = self._traced()
        flows = {n for n, v in values.items() if isinstance(v, Tensor) and v.requires_grad}
        outputs = list(self.program.graph.output_node().args[0])
        self._forward(pieces, values)
        tangents = {i: n for i, n in enumerate(outputs) if n in flows}
        params = tuple(s.placeholder for s in self.program.params.values() if s.differentiable)
        grads = self._backward(pieces, tangents, params)
        self.forward.output((*(self.made[n] for n in outputs), *self.saved))
        self.backward.output(grads)
        for graph in (self.forward, self.backward):
            graph.lint()
        return JointGraphs(
            fx.GraphModule(self.roots[0], self.forward),
            fx.GraphModule(self.roots[1], self.backward),
            len(outputs),
            tuple(tangents),
            params,
            len(pieces),
            len({id(p.vjp) for p in pieces}),
        )

    # -- 1

    def _traced(self) -> tuple[list[_Piece], dict[fx.Node, Any]]:
        """The pieces, and what goes in and out of them on fakes of one rank's shapes."""
        program = self.program
        mode = fake_mode_of(n.meta["val"] for n in program.placeholders())
        values: dict[fx.Node, Any] = {}
        with mode:  # type: ignore[union-attr]  # captured programs have fakes
            for node in program.graph.nodes:
                if node.op == "placeholder":
                    spec = program.params.get(node.name)
                    wanted = spec is not None and spec.differentiable
                    values[node] = local_placeholder(program, node, True).detach().requires_grad_(wanted)
                elif node.op == "get_attr":
                    values[node] = mode.from_tensor(program.constants[node.target])  # type: ignore[union-attr]
        known: dict[tuple, Vjp] = {}
        pieces = []
        for segment in cut(program):
            key = segment.key(values)
            if key not in known:
                known[key] = trace(segment, [values[n] for n in segment.inputs], mode)
            pieces.append(_Piece(segment, known[key]))
            values.update(zip(segment.outputs, known[key].values, strict=True))
        return pieces, values

    # -- 2

    def _forward(self, pieces: list[_Piece], values: dict[fx.Node, Any]) -> None:
        for node in self.program.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.made[node] = self.forward.node_copy(node)
                self.made[node].meta = {"val": values[node], "where": node.meta.get("where", "")}
                if node.op == "get_attr":
                    self.roots[0].register_buffer(node.target, self.program.constants[node.target], persistent=False)
        for piece in pieces:
            vjp, segment = piece.vjp, piece.segment
            piece.env = {p: self.made[n] for p, n in zip(vjp.inputs, segment.inputs, strict=True)}
            for node in vjp.forward:
                copy = piece.env[node] = self._copy(self.forward, 0, node, piece, piece.env)
                at = vjp.source.get(node)
                if at is not None and is_start(node.target) and "moves" in segment.nodes[at].meta:
                    copy.meta.update({k: segment.nodes[at].meta[k] for k in ("moves", "types")})
            for out, node in zip(vjp.outputs, segment.outputs, strict=True):
                self.made[node] = piece.env[out] if isinstance(out, fx.Node) else out

    def _copy(self, graph: fx.Graph, which: int, node: fx.Node, piece: _Piece, env: dict[fx.Node, fx.Node]) -> fx.Node:
        if node.op == "get_attr":  # a constant that tracing met: scalars of a formula
            value = getattr(piece.vjp.module, node.target)
            name = f"traced_{len(dict(self.roots[which].named_buffers()))}"
            self.roots[which].register_buffer(name, value, persistent=False)
            return graph.get_attr(name)
        copy = graph.node_copy(node, env.__getitem__)
        at, segment = piece.vjp.source.get(node), piece.segment
        of = {"where": segment.where} if at is None else segment.nodes[at].meta
        copy.meta = {"val": node.meta.get("val"), "where": of.get("where", "")}
        if "chunk" in of:
            copy.meta["chunk"] = of["chunk"]
        return copy

    # -- 3 and 4

    def _backward(self, pieces: list[_Piece], tangents: dict[int, fx.Node], params: tuple[str, ...]) -> tuple:
        grads: dict[fx.Node, fx.Node] = {}
        ahead = self.backward.create_node("placeholder", "tangents")  # what is saved goes in before it
        self.start = ahead
        for i, node in tangents.items():
            tangent = self.backward.placeholder(f"tangent_{i}")
            tangent.meta["val"] = self.made[node].meta.get("val")
            self._add(grads, node, tangent)
        for piece in reversed(pieces):
            self._piece_backward(piece, grads)
        self.backward.erase_node(ahead)
        nodes = {n.name: n for n in self.program.placeholders()}
        return tuple(grads.get(nodes[p]) for p in params)

    def _piece_backward(self, piece: _Piece, grads: dict[fx.Node, fx.Node]) -> None:
        vjp, segment = piece.vjp, piece.segment
        outputs = [segment.outputs[i] for i in vjp.differentiable]
        if not any(n in grads for n in outputs):
            return
        env: dict[fx.Node, fx.Node] = {}
        for tangent, node in zip(vjp.tangents, outputs, strict=True):
            if node in grads:
                env[tangent] = grads[node]
            elif tangent.users:
                zeros = torch.ops.aten.zeros_like.default
                env[tangent] = self.backward.call_function(zeros, (self._save(self.made[node]),))
        read = [a for n in vjp.backward for a in n.all_input_nodes] + [g for g in vjp.grads if g is not None]
        for node in dict.fromkeys(read):  # in an order that is the same on every rank
            if node in piece.env:
                env[node] = self._save(piece.env[node])
        for node in vjp.backward:
            env[node] = self._copy(self.backward, 1, node, piece, env)
        for grad, node in zip(vjp.grads, segment.inputs, strict=True):
            if grad is not None:
                self._add(grads, node, env[grad])

    def _save(self, value: fx.Node) -> fx.Node:
        """The placeholder of the backward that stands for a value of the forward."""
        if value not in self.saved:
            with self.backward.inserting_before(self.start):
                self.saved[value] = self.backward.placeholder(f"saved_{value.name}")
            self.saved[value].meta["val"] = value.meta.get("val")
        return self.saved[value]

    def _add(self, grads: dict[fx.Node, fx.Node], node: fx.Node, grad: fx.Node) -> None:
        if node in grads:
            total = self.backward.call_function(torch.ops.aten.add.Tensor, (grads[node], grad))
            total.meta.update(grad.meta)
            grads[node] = total
        else:
            grads[node] = grad
