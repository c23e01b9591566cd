"""Steps: run a recorded call on other tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .observe import Call
from .owners import walk

Env = dict[int, Any]
"""Value of the tape -> what stands for it now."""


class Refused(Exception):
    """The block cannot be raised; the message says why."""


def function_name(func: Callable) -> str:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":  # a property of Tensor: its descriptor knows the name
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def substitute(step: Call, env: Env, device: Any = None) -> tuple[tuple, dict[str, Any]]:
    """The step's arguments with the tensors (and the device) of ``env`` in place of the recorded ones."""
    reads = iter(step.reads)

    def swap(x: Any) -> Any:
        if isinstance(x, Tensor):
            return env[next(reads)]
        return device if isinstance(x, torch.device) and device is not None else x

    leaves, spec = pytree.tree_flatten((step.args, step.kwargs))
    return pytree.tree_unflatten([swap(x) for x in leaves], spec)


def record(step: Call, result: Any, env: Env) -> None:
    for old, new in step.overwrites:
        if old in env:
            env[new] = env[old]
    for v, t in zip(step.makes, walk(result), strict=True):
        env[v] = t


def same_function(a: Callable, b: Callable) -> bool:
    """Method wrappers of properties are made anew at every access; equality sees through that."""
    return a is b or operator.eq(a, b)
