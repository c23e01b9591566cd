"""Scheduled execution: a step's forward and backward graphs under one autograd node (``Plan.overlap``).

Autograd sees one function of the parameters.  Its forward runs the forward graph and saves what the backward graph
reads; its backward runs the backward graph for the outputs that got a gradient, once.  That graph ends with complete
gradients: reductions are nodes of it, which a pass may have put in among everything else.

Tensors are saved as autograd saves them: they are let go of as soon as the backward graph has read them the last time
(unless ``retain_graph``), and whoever changes one between forward and backward is told so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable

from moec.runtime.narrow import NARROW
from moec.runtime.reshard import check_version
from moec.runtime.torch_compat import boxed, local_of
from moec.step import Step

Execute = Callable[[fx.GraphModule], Callable[[list], tuple]]
"""Makes a function of a graph, which takes the list of its operands and empties it."""


@dataclass(frozen=True)
class Parameter:
    """How a trainable parameter enters the graph and its gradient leaves it (``moec.module``)."""

    value: Tensor
    leave: Callable[[Tensor], Tensor]


class Runner:
    """Runs one step's graphs.  What is compiled is kept."""

    def __init__(self, step: Step, execute: Execute = boxed) -> None:
        self.step, self._execute = step, execute
        self._forward, self._inference = execute(step.forward), execute(step.inference)
        self._names, self._read = _placeholders(step.forward), _placeholders(step.inference)
        self._backwards: dict[frozenset[int], tuple[Callable, list[str]]] = {}

    def __call__(self, values: dict[str, Any], params: dict[str, Parameter]) -> tuple[Any, ...]:
        """Results of the program; ``values``: its operands, ``params``: the trainable ones, both by placeholder.

        Operands are read as they were traced, contiguous."""
        values = {n: v.contiguous() if isinstance(v, Tensor) else v for n, v in values.items()}
        trained = [params.get(n) for n in self.step.params]
        if not torch.is_grad_enabled() or not self.step.differentiable or not any(trained):
            with torch.no_grad():
                return self._inference([values[n] for n in self._read])
        copies = {n: v for n, v in values.items() if n.startswith(f"{NARROW}_")}
        operands = [values[n] for n in self._names]
        return _Step.apply(self, operands, copies, trained, *(p and p.value for p in trained))

    def forward(self, operands: list[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        results = self._forward(operands)
        return results[: self.step.num_outputs], results[self.step.num_outputs :]

    def backward(self, saved: dict[str, Any], tangents: dict[int, Tensor], zeros: Callable[[int], Tensor]) -> Any:
        """Complete gradients of ``step.params``.  ``saved`` is emptied.  ``zeros(i)``: a gradient of output ``i`` that
        did not come and is read all the same."""
        given = frozenset(tangents)
        if given not in self._backwards:
            graph = self.step.backward(given)
            self._backwards[given] = self._execute(graph), _placeholders(graph)
        run, names = self._backwards[given]
        known: dict[str, Any] = saved | {f"tangent_{i}": t for i, t in tangents.items()}
        operands = [known[n] if n in known else zeros(int(n.removeprefix("tangent_"))) for n in names]
        known.clear()
        saved.clear()
        tangents.clear()
        return run(operands)


def _placeholders(module: fx.GraphModule) -> list[str]:
    return [n.name for n in module.graph.find_nodes(op="placeholder")]


@dataclass(frozen=True)
class _Layout:
    """An output's shape and strides: its gradient is read with these."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: Tensor) -> _Layout:
        return _Layout(x.shape, x.stride(), x.dtype, x.device)

    def _empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def zeros(self) -> Tensor:
        return self._empty().zero_()

    def like(self, grad: Tensor) -> Tensor:
        return grad if grad.stride() == self.stride and grad.dtype == self.dtype else self._empty().copy_(grad)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        runner: Runner,
        operands: list[Any],
        copies: dict[str, Tensor],
        trained: Sequence[Parameter | None],
        *params: Tensor | None,
    ):
        ctx.set_materialize_grads(False)
        own = {id(x) for x in operands}
        outputs, saved = runner.forward(operands)
        outputs = _apart(outputs, own)
        step = runner.step
        ctx.runner, ctx.copies, ctx.trained = runner, copies, trained
        ctx.mark_non_differentiable(*(o for i, o in enumerate(outputs) if i not in step.differentiable))
        ctx.layouts = {i: _Layout.of(outputs[i]) for i in step.differentiable}
        named = dict(zip(step.saved, saved, strict=True))
        ctx.numbers = {n: v for n, v in named.items() if not isinstance(v, Tensor)}
        ctx.names = [n for n in named if n not in ctx.numbers]
        ctx.save_for_backward(*(named[n] for n in ctx.names))
        read = {named[n].untyped_storage().data_ptr() for n in ctx.names}
        ctx.versions = [(p, p._version) for p in params if p is not None and _storage(p) in read]
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None):
        for p, version in ctx.versions:  # of a DTensor's part, whoever changes the DTensor changes no version
            check_version(p, version)
        saved = dict(zip(ctx.names, ctx.saved_tensors, strict=True)) | ctx.numbers | ctx.copies
        ctx.maybe_clear_saved_tensors()
        tangents = {i: layout.like(g) for i, layout in ctx.layouts.items() if (g := grads[i]) is not None}
        found = ctx.runner.backward(saved, tangents, lambda i: ctx.layouts[i].zeros())
        leave = [None if p is None or g is None else p.leave(g) for p, g in zip(ctx.trained, found, strict=True)]
        return (None, None, None, None, *leave)


def _apart(outputs: Iterable[Any], seen: set[int]) -> tuple[Any, ...]:
    """Outputs as objects of their own: autograd writes to them."""
    out = []
    for x in outputs:
        out.append(x.detach() if isinstance(x, Tensor) and id(x) in seen else x)
        seen.add(id(x))
    return tuple(out)


def _storage(param: Tensor) -> int:
    return local_of(param).untyped_storage().data_ptr()
