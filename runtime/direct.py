"""Direct: a recorded graph whose moec operators are called without torch's dispatcher.

    module = direct(module)

Between a node and the kernel of a ``torch.library.custom_op`` torch runs a dozen Python functions, in the backward as
many again: as much time as a small kernel takes.  In ``direct(module)`` each such node calls an autograd function that
runs the same kernel and the same derivative.  Values and gradients are the operator's, bit for bit.

A wait gives what it was given: it is no node of autograd either.

What watches operators (a profiler, a dispatch mode, a compiler) sees none of this: while one is there
(``torch_compat.observed``), run the module itself.  Nodes that give lists or leave out arguments stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx

from .collectives import is_wait
from .errors import MoecError
from .torch_compat import OpOverload, below_autograd, derivative, kernel, lists_tensors, wait

Lengths = tuple[tuple[int, int], ...]
"""(position, number of tensors) of each argument that is a list of tensors."""


def direct(module: fx.GraphModule) -> fx.GraphModule:
    """A copy; shares what the graph reads of ``module``."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    known: dict[OpOverload, Callable] = {}
    for node in graph.nodes:
        op = node.target
        if is_wait(op):
            node.target = waited
        elif isinstance(op, OpOverload) and op.namespace == "moec" and _can(op, node):
            if op not in known:
                known[op] = _function(op)
            node.target = known[op]
    return fx.GraphModule(module, graph)


def waited(x: Tensor) -> Tensor:
    """``x``, once the collective that fills it has finished."""
    with below_autograd():
        wait(x)
    return x


def _can(op: OpOverload, node: fx.Node) -> bool:
    schema = op._schema
    gives_lists = any(lists_tensors(r) for r in schema.returns)
    return not gives_lists and not node.kwargs and len(node.args) == len(schema.arguments)


def _function(op: OpOverload) -> Callable:
    """``op`` as a function of all its arguments."""
    formula, setup = derivative(op)
    run = _kernel(op)
    if formula is None:

        def plain(*args: Any) -> Any:
            if torch.is_grad_enabled() and any(x.requires_grad for x in _tensors(args)):
                return op(*args)  # whose results remember that no derivative is known
            with below_autograd():
                return run(args)

        return _named(plain, op)

    lists = [i for i, a in enumerate(op._schema.arguments) if lists_tensors(a)]

    def forward(ctx: Any, lengths: Lengths, *flat: Any) -> Any:
        args = _nested(flat, lengths)
        with below_autograd():
            found = run(args)
            if setup is not None:
                setup(ctx=ctx, inputs=args, output=found)
        ctx.lengths = lengths
        return found

    def backward(ctx: Any, *grads: Any) -> tuple:
        needed = ctx.needs_input_grad
        try:
            ctx.needs_input_grad = _nested(needed[1:], ctx.lengths)
            # A backward of a backward is autograd's to see, and to refuse.
            with nullcontext() if torch.is_grad_enabled() else below_autograd():
                found = formula(ctx, *grads)
        finally:
            ctx.needs_input_grad = needed
        return (None, *_flat(found if isinstance(found, tuple) else (found,), ctx.lengths))

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(op._opname, (torch.autograd.Function,), methods)

    def differentiable(*args: Any) -> Any:
        lengths = tuple((i, len(args[i])) for i in lists)
        return function.apply(lengths, *_flat(args, lengths))

    return _named(differentiable, op)


def _kernel(op: OpOverload) -> Callable[[Sequence[Any]], Any]:
    name, kernels = op._schema.name, dict[str, Callable]()

    def run(args: Sequence[Any]) -> Any:
        device = next((x.device.type for x in _tensors(args)), "cpu")
        if device not in kernels:
            found = kernel(name, device)
            if found is None:
                raise MoecError(f"there is no kernel for tensors on {device!r}", where=name)
            kernels[device] = inspect.unwrap(found)  # torch keeps its compiler out of it with a wrapper
        return kernels[device](*args)

    return run


def _named(function: Callable, op: OpOverload) -> Callable:
    function.__name__ = function.__qualname__ = op._opname
    return function


def _tensors(args: Sequence[Any]) -> Iterator[Tensor]:
    for a in args:
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, (list, tuple)):
            yield from (x for x in a if isinstance(x, Tensor))


def _flat(args: Sequence[Any], lengths: Lengths) -> Sequence[Any]:
    """Autograd knows tensors, not lists of them.  In the place of a list, None is a list of None."""
    if not lengths:
        return args
    of = dict(lengths)
    found: list[Any] = []
    for i, a in enumerate(args):
        found += [a] if i not in of else [None] * of[i] if a is None else a
    return found


def _nested(flat: Sequence[Any], lengths: Lengths) -> tuple:
    """The inverse of ``_flat``."""
    found = list(flat)
    for i, n in lengths:
        found[i : i + n] = [found[i : i + n]]
    return tuple(found)
