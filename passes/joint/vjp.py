"""Vjp: one segment and its backward, traced below autograd as a graph of plain operators.

    outputs, gradients of the inputs = joint(inputs, gradients of the outputs)

Autograd itself runs while ``make_fx`` watches, on fake tensors with the shapes of one rank, so the gradient of every
op, the duals of collectives among them, is the registered one; starts and waits are separate nodes.  Forward nodes are
those that the outputs need, and what is taken of forward values: sizes, single results.  Everything else is backward;
what it reads of the forward has to be saved.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

from moec.passes.joint.segments import Segment
from moec.runtime.errors import MoecError
from moec.runtime.torch_compat import expr, forget_unbacked, is_unbacked, python_dispatcher, settled_sizes


@dataclass(frozen=True)
class Vjp:
    module: fx.GraphModule
    """Placeholders: the inputs, then a gradient for each of ``differentiable``."""
    inputs: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    outputs: tuple[Any, ...]
    """Nodes, one for each output of the segment (or a number that tracing found constant)."""
    grads: tuple[fx.Node | None, ...]
    """One for each input; None where none is needed or none arrives."""
    values: tuple[Any, ...]
    """The outputs on fakes; ``requires_grad`` says whether a gradient may come back."""
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    source: dict[fx.Node, int]
    """Node -> which node of the segment it was traced from: as a part of it, or of its derivative."""

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Positions of the outputs that take a gradient."""
        return tuple(i for i, v in enumerate(self.values) if isinstance(v, Tensor) and v.requires_grad)


def trace(segment: Segment, values: Sequence[Any], mode: Any) -> Vjp:
    """``values``: the segment's inputs on fakes of ``mode``, with ``requires_grad`` set where gradients are wanted.

    Raises MoecError where an output's size depends on data, or where tracing would settle a size of the inputs."""
    before = settled_sizes(mode)
    with mode, python_dispatcher(), torch.enable_grad():
        leaves = [v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in values]
        found = _run(segment, leaves)
        _check_sizes(segment, found)
        tangents = [torch.empty_like(v.detach()) for v in found if isinstance(v, Tensor) and v.requires_grad]

        def joint(inputs: list[Any], tangents: list[Tensor]) -> list[Any]:
            with ExitStack() as derivatives:
                outs = _run(segment, inputs, derivatives)
                wrt = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
                roots = [x for x in outs if isinstance(x, Tensor) and x.requires_grad]
                grads: list[Tensor | None] = [None] * len(wrt)
                if roots and wrt:
                    grads = list(torch.autograd.grad(roots, wrt, tangents, allow_unused=True))
                return [*outs, *grads]

        forget_unbacked(mode)
        with traceback.preserve_node_meta():
            module = make_fx(joint)(leaves, tangents)
            if any(map(writes, module.graph.nodes)):  # a decomposition that reuses its own memory
                forget_unbacked(mode)
                with torch.no_grad():
                    again = torch.func.functionalize(fx.Interpreter(module).run)
                    module = make_fx(again)(*(x.detach() if isinstance(x, Tensor) else x for x in [*leaves, *tangents]))
    if settled := {str(s): e for s, e in settled_sizes(mode).items() if s not in before}:
        raise MoecError(f"its graphs would hold for one size of the inputs only: {settled}", where=segment.where)
    return _partition(module, leaves, len(tangents), found)


def writes(node: fx.Node) -> bool:
    """Does it write to an operand?"""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def _run(segment: Segment, values: Sequence[Any], derivatives: ExitStack | None = None) -> list[Any]:
    """``derivatives``: until it is closed, autograd says of which node it computes the derivative."""
    env: dict[fx.Node, Any] = dict(zip(segment.inputs, values, strict=True))
    for i, node in enumerate(segment.nodes):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        with traceback.annotate({"at": i}):
            found = env[node] = node.target(*args, **kwargs)
        if derivatives is not None:
            for x in found if isinstance(found, (tuple, list)) else [found]:
                if isinstance(x, Tensor) and x.grad_fn is not None:
                    x.grad_fn.register_prehook(partial(_derivative_of, i, derivatives))
    return [env[n] for n in segment.outputs]


def _derivative_of(at: int, derivatives: ExitStack, grads: Any) -> None:
    derivatives.enter_context(traceback.annotate({"at": at}))


def _check_sizes(segment: Segment, found: list[Any]) -> None:
    for node, v in zip(segment.outputs, found, strict=True):
        if isinstance(v, Tensor) and v.requires_grad and any(is_unbacked(expr(s)) for s in v.shape):
            raise MoecError(
                f"{node.name} leaves its layer with a size that depends on data ({tuple(v.shape)})",
                where=node.meta.get("where", ""),
            )


def _partition(module: fx.GraphModule, leaves: list[Any], num_tangents: int, found: list[Any]) -> Vjp:
    graph = module.graph
    graph.eliminate_dead_code()
    placeholders = graph.find_nodes(op="placeholder")
    results = graph.output_node().args[0]
    outs, grads = results[: len(found)], results[len(found) :]
    needed: set[fx.Node] = set()
    todo = [n for n in outs if isinstance(n, fx.Node)]
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    inputs, tangents = placeholders[: len(leaves)], placeholders[len(leaves) :]
    assert len(tangents) == num_tangents and not needed & set(tangents)
    body = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    known = needed | set(inputs)
    for node in body:  # a size is saved as a number, not as the tensor that has it; of several results what is read
        part = isinstance(node.meta.get("val"), (int, torch.SymInt)) or node.target is operator.getitem
        if part and known.issuperset(node.all_input_nodes):
            needed.add(node)
            known.add(node)
    given = iter(grads)
    return Vjp(
        module,
        tuple(inputs),
        tuple(tangents),
        tuple(outs),
        tuple(next(given) if isinstance(x, Tensor) and x.requires_grad else None for x in leaves),
        tuple(found),
        tuple(n for n in body if n in needed),
        tuple(n for n in body if n not in needed),
        {n: n.meta["custom"]["at"] for n in body if "at" in (n.meta.get("custom") or {})},
    )
