"""Body: what one expert computes, as a list of steps cut out of a tape.

A body starts from rows (one token a row) and uses the parameters of one expert.  It can be replayed

* ``for_expert``: with the parameters of any expert, on plain tensors (to compare numbers);
* ``grouped``: with all experts' stacked parameters at once, on rows sorted by expert: products with a parameter become
  ``moec::grouped_mm``, sums with a bias ``moec::grouped_add``; every other step stays what it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from .observe import Call
from .owners import walk

_TURNS = frozenset({"t", "T", "mT", "transpose", "swapaxes", "swapdims"})
_SAME = frozenset({"to", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone"})
_PRODUCTS = frozenset({"matmul", "mm", "__matmul__"})
_SUMS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})


class Refused(Exception):
    """The block cannot be raised; the message says why."""


def function_name(func: Callable) -> str:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":  # a property of Tensor: its descriptor knows the name
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name


@dataclass(frozen=True)
class Body:
    rows: int
    """Value of the rows that it starts from."""
    out: int
    steps: tuple[Call, ...]
    params: dict[int, str]
    """Value of a parameter of the template's expert -> role."""
    from_params: frozenset[int]
    """Values made of parameters only (transposed, cast)."""

    def for_expert(self, rows: Tensor, param: Callable[[str], Tensor]) -> Tensor:
        env: dict[int, Any] = {v: param(role) for v, role in self.params.items()}
        env[self.rows] = rows.clone()
        for step in self.steps:
            run(step, env, rows.device)
        return env[self.out]

    def grouped(self, rows: Tensor, counts: Tensor, stack: Callable[[str], Tensor]) -> Tensor:
        env: dict[int, Any] = {v: stack(role) for v, role in self.params.items()}
        env[self.rows] = rows
        for step in self.steps:
            if any(r in self.from_params for r in step.reads):
                self._grouped_step(step, env, counts, rows.device)
            else:
                run(step, env, rows.device)
        return env[self.out]

    def _grouped_step(self, step: Call, env: dict[int, Any], counts: Tensor, device: torch.device) -> None:
        args, kwargs = substitute(step, env, device)
        name = function_name(step.func)
        is_param = [r in self.from_params for r in step.reads]
        if all(is_param):
            result = _stacked(name, step, args, kwargs)
        else:
            result = _use(name, step, args, kwargs, is_param, counts)
        record(step, result, env)


def _stacked(name: str, step: Call, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A step on parameters alone, done for all experts at once."""
    if name in _TURNS and args[0].dim() == 3:
        return args[0].transpose(-2, -1)
    if name in _SAME:
        return step.func(*args, **kwargs)
    if name in ("chunk", "split"):
        dim = kwargs.pop("dim", args[2] if len(args) > 2 else 0)
        return step.func(*args[:2], dim=dim + 1 if dim >= 0 else dim, **kwargs)
    if name == "__getitem__" and _slices(args[1]):
        key = args[1] if isinstance(args[1], tuple) else (args[1],)
        return args[0][(slice(None), *key)]
    raise Refused(f"an expert parameter goes through {name}, which has no form for all experts at once")


def _slices(key: Any) -> bool:
    return all(isinstance(k, slice) for k in (key if isinstance(key, tuple) else (key,)))


def _use(
    name: str, step: Call, args: tuple, kwargs: dict[str, Any], is_param: Sequence[bool], counts: Tensor
) -> Tensor:
    """A step that takes rows and stacked parameters."""
    ops = torch.ops.moec
    operands = list(walk((args, kwargs)))
    if step.func is F.linear and not is_param[0] and is_param[1]:
        y = ops.grouped_mm(operands[0], operands[1].transpose(-2, -1), counts)
        if len(operands) == 3:
            if not is_param[2]:
                raise Refused("linear has a bias that is no parameter of the expert")
            y = ops.grouped_add(y, operands[2], counts)
        return y
    if name in _PRODUCTS and is_param == [False, True] and operands[1].dim() == 3:
        return ops.grouped_mm(operands[0], operands[1], counts)
    if name == "addmm" and is_param == [True, False, True] and not kwargs:
        return ops.grouped_add(ops.grouped_mm(operands[1], operands[2], counts), operands[0], counts)
    if name in _SUMS and len(operands) == 2 and not kwargs:
        rows, bias = operands if is_param[1] else operands[::-1]
        if bias.dim() == 2:
            return ops.grouped_add(rows, bias, counts)
    if name == "einsum" and is_param == [False, True]:
        return _einsum(args[0], operands[0], operands[1], counts)
    raise Refused(f"rows and an expert parameter meet in {name}, which has no grouped form")


def _einsum(equation: str, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """``th,hm->tm`` or ``th,mh->tm``, whatever the letters."""
    left, _, out = equation.replace(" ", "").partition("->")
    x, _, w = left.partition(",")
    if len(x) == 2 and len(w) == 2 and len(out) == 2 and out[0] == x[0]:
        if w == x[1] + out[1]:
            return torch.ops.moec.grouped_mm(rows, weight, counts)
        if w == out[1] + x[1]:
            return torch.ops.moec.grouped_mm(rows, weight.transpose(-2, -1), counts)
    raise Refused(f"einsum {equation!r} over an expert parameter has no grouped form")


def substitute(step: Call, env: dict[int, Any], device: torch.device | None = None) -> tuple[tuple, dict[str, Any]]:
    """The step's arguments with the tensors (and the device) of ``env`` in place of the recorded ones."""
    reads = iter(step.reads)

    def swap(x: Any) -> Any:
        if isinstance(x, Tensor):
            return env[next(reads)]
        return device if isinstance(x, torch.device) and device is not None else x

    leaves, spec = pytree.tree_flatten((step.args, step.kwargs))
    return pytree.tree_unflatten([swap(x) for x in leaves], spec)


def run(step: Call, env: dict[int, Any], device: torch.device | None = None) -> None:
    args, kwargs = substitute(step, env, device)
    record(step, step.func(*args, **kwargs), env)


def record(step: Call, result: Any, env: dict[int, Any]) -> None:
    for old, new in step.overwrites:
        if old in env:
            env[new] = env[old]
    for v, t in zip(step.makes, walk(result), strict=True):
        env[v] = t


def same_function(a: Callable, b: Callable) -> bool:
    """Method wrappers of properties are made anew at every access; equality sees through that."""
    return a is b or operator.eq(a, b)
