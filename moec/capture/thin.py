"""Thin: run a model of which only some of many equal layers are really there.

Of every run of equal layers (``layers.find_repeats``) the first three units stay; the others are hollow and hand their
input on.  ``Thin.watched`` puts this in place of the layers' forwards and holds, while the model's own code runs,
what makes it sound to fill the gap with copies of the third unit:

1. The layers are called once each, in their order, and each gets the output of the one before it.
2. Every other argument of a layer is that of the same layer of the unit before: the same tensor, equal constants.
3. A layer gives back one tensor of the shape and dtype of what it got, and equal constants beside it.
4. Where a unit ends there is a ``moec::boundary`` in the graph.  A hollow unit leaves one as well; ``closed`` finds in
   the graph that nothing else happens between them, or to what passes them, and takes those out.

Whatever does not hold raises ``Irregular``, and capture goes the long way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from moec.program import Repeat
from moec.runtime.torch_compat import expr

from .layers import Unknown, index_attributes


class Irregular(Exception):
    """Layers that look alike are not used alike; the message says where."""


class Thin:
    """``repeats`` of ``model``; the skeletons that it watches were made with ``hollow=thin.hollow``."""

    def __init__(self, model: nn.Module, repeats: tuple[Repeat, ...]) -> None:
        self.repeats = repeats
        self.hollow = tuple(path for r in repeats for path in r.left_out)
        self._indices = {r.path: index_attributes(_list(model, r.path)) for r in repeats}

    def prepare(self, twin: nn.Module) -> None:
        """Hide the layers' indices in a skeleton."""
        for r in self.repeats:
            layers = _list(twin, r.path)
            for i in range(r.first, r.first + r.units * r.period):
                for path, name in self._indices[r.path]:
                    at: nn.Module | None = layers[i]
                    for step in path.split(".") if path else ():
                        at = at._modules.get(step) if at is not None else None
                    if at is not None and name in vars(at):
                        vars(at)[name] = Unknown(f"{r.path}.{i}.{path + '.' if path else ''}{name}")

    @contextmanager
    def watched(self, twin: nn.Module) -> Iterator[None]:
        """Inside, the layers of ``twin`` are watched and the hollow ones hand on; raises Irregular at the end if some
        were not called."""
        watches = [_Watch(r) for r in self.repeats]
        wrapped: list[tuple[nn.Module, Callable | None]] = []
        try:
            for watch in watches:
                r = watch.repeat
                for at in range(r.units * r.period):
                    layer = _list(twin, r.path)[r.first + at]
                    wrapped.append((layer, vars(layer).get("forward")))
                    layer.forward = watch.forward(at, layer.forward)
            yield
        finally:
            for layer, forward in reversed(wrapped):
                vars(layer).pop("forward")
                if forward is not None:
                    layer.forward = forward
        for watch in watches:
            watch.finish()


class _Watch:
    """What was seen of one run of layers, in one call of the model."""

    def __init__(self, repeat: Repeat) -> None:
        self.repeat = repeat
        self.next = 0
        self.last: Tensor | None = None
        """Output of the layer before."""
        self.calls: dict[int, tuple[list[Any], Any, list[int]]] = {}
        """By position in the unit: arguments, their structure, and which of them come from the layer before."""
        self.results: dict[int, tuple[list[Any], Any]] = {}

    def forward(self, at: int, forward: Callable) -> Callable:
        @functools.wraps(forward)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return self._call(at, forward, args, kwargs)

        return wrapper

    def _where(self, at: int) -> str:
        return f"{self.repeat.path}.{self.repeat.first + at}"

    def _call(self, at: int, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        unit, i = divmod(at, self.repeat.period)
        if at != self.next:  # 1
            raise Irregular(f"{self._where(at)} is called when it is the turn of {self._where(self.next)}")
        self.next += 1
        leaves, spec = pytree.tree_flatten((args, kwargs))
        chain = [k for k, x in enumerate(leaves) if at and x is self.last]
        if at and not chain:
            raise Irregular(f"{self._where(at)} is not called with what {self._where(at - 1)} returned")
        if unit > 1:
            self._compare(at, self.calls[i], (leaves, spec, chain), "is called")  # 2
        if unit <= 1:
            self.calls[i] = (leaves, spec, chain)
        if unit >= self.repeat.KEPT:
            assert self.last is not None
            out, result = self.last, self.results[i]
        else:
            out, result = self._run(at, forward, args, kwargs, leaves, chain)
        if i == self.repeat.period - 1:  # 4
            out = torch.ops.moec.boundary(out, self.repeat.boundary(unit))
        self.last = out
        return pytree.tree_unflatten([out if isinstance(x, Tensor) else x for x in result[0]], result[1])

    def _run(
        self, at: int, forward: Callable, args: tuple, kwargs: dict[str, Any], given: list[Any], chain: list[int]
    ) -> tuple[Tensor, tuple[list[Any], Any]]:
        unit, i = divmod(at, self.repeat.period)
        leaves, spec = pytree.tree_flatten(forward(*args, **kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if len(tensors) != 1:  # 3
            raise Irregular(f"{self._where(at)} returns {len(tensors)} tensors")
        out = tensors[0]
        if chain and _kind(out) != _kind(given[chain[0]]):
            raise Irregular(f"{self._where(at)} returns {_kind(out)} for {_kind(given[chain[0]])}")
        seen: tuple[list[Any], Any, list[int]] = ([None if x is out else x for x in leaves], spec, [])
        if unit:
            before = [None if isinstance(x, Tensor) else x for x in self.results[i][0]]
            self._compare(at, (before, self.results[i][1], []), seen, "returns")
        self.results[i] = (leaves, spec)
        return out, (leaves, spec)

    def _compare(self, at: int, before: tuple, now: tuple, what: str) -> None:
        if before[1] != now[1] or before[2] != now[2]:
            raise Irregular(f"{self._where(at)} {what} in another way than {self._where(at - self.repeat.period)}")
        for k, (a, b) in enumerate(zip(before[0], now[0], strict=True)):
            if k not in now[2] and not _same(a, b):
                raise Irregular(
                    f"{self._where(at)} {what} with other values than {self._where(at - self.repeat.period)}"
                )

    def finish(self) -> None:
        if self.next != self.repeat.units * self.repeat.period:
            raise Irregular(f"{self._where(self.next)} is not called")


def closed(graph: fx.Graph, repeats: tuple[Repeat, ...]) -> None:
    """Take the boundaries of hollow units out of a captured graph; Irregular if anything but the next one uses one."""
    marks = {n.args[1]: n for n in graph.find_nodes(op="call_function", target=torch.ops.moec.boundary.default)}
    for r in repeats:
        for unit in range(r.KEPT, r.units):
            mark, before = marks.get(r.boundary(unit)), marks[r.boundary(unit - 1)]
            if mark is None or mark.args[0] is not before or list(before.users) != [mark]:
                raise Irregular(f"something is done to the output of {r.layers(unit - 1)[-1]} on its way to the next")
        last = marks[r.boundary(r.KEPT - 1)]
        marks[r.boundary(r.units - 1)].replace_all_uses_with(last)
        for unit in reversed(range(r.KEPT, r.units)):
            graph.erase_node(marks[r.boundary(unit)])


def _list(model: nn.Module, path: str) -> nn.ModuleList:
    found = model.get_submodule(path)
    assert isinstance(found, nn.ModuleList)
    return found


def _kind(x: Tensor) -> tuple:
    return (x.dtype, tuple(str(expr(s)) for s in x.shape))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    if a is b:
        return True
    return type(a) is type(b) and isinstance(a, (bool, int, float, str, torch.dtype, torch.device)) and a == b
