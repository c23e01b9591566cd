"""Calls: the arguments of one forward as leaves by path, and the key under which a compiled variant is kept.

A path is the parameter's name in the signature of the user's ``forward``, then the keys inside it, joined by dots:
``input_ids``, ``features.image``, ``states.0``.  Positional and keyword passing give the same path; extra positional
arguments of a ``*args`` are numbered from their position.  Values that equal the signature's default are not part of
a call, so ``model(x)`` and ``model(x, mask=None)`` are the same call.
"""

from __future__ import annotations

import difflib
import enum
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moec.program import Program
from moec.runtime.errors import MoecError

COUNTS = frozenset({"num_items_in_batch"})
"""What Hugging Face's losses divide a sum by, as a tensor or as an int: another number every step, which as a plain
value would be another program every step."""
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, enum.Enum)


@dataclass(frozen=True)
class Call:
    """What one forward was called with: tensors by path, and the plain values, rendered, by path."""

    tensors: dict[str, Tensor]
    values: dict[str, str]

    def key(self, training: bool) -> str:
        """Equal for calls that one compiled program serves, and on every rank the same text: the same tensors with the
        same ranks and dtypes, the same of them broadcast over the batch, the same plain values."""
        batch = next((x.shape[0] for x in self.tensors.values() if x.ndim >= 2), 1)
        inputs = ", ".join(f"{path}: {_kind(x, batch)}" for path, x in sorted(self.tensors.items()))
        values = "".join(f", {path}={value}" for path, value in sorted(self.values.items()))
        return f"{'train' if training else 'eval'}({inputs}{values})"


def bind(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Sort the arguments of a call.  Raises MoecError for arguments that ``forward`` does not take or that are neither
    tensors nor plain values."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as e:
        raise MoecError(str(e), where="forward", way_out=_names(signature, kwargs)) from None
    tensors: dict[str, Tensor] = {}
    values: dict[str, str] = {}
    for name, value in _named(signature, bound):
        parameter = signature.parameters.get(name)
        if parameter is not None and isinstance(value, _PLAIN) and _same(value, parameter.default):
            continue
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            full = ".".join([name, *map(_step, path)])
            if isinstance(leaf, Tensor):
                tensors[full] = leaf
            elif isinstance(leaf, _PLAIN):
                values[full] = repr(leaf)
            else:
                raise MoecError(
                    f"argument is a {type(leaf).__name__}",
                    where=full,
                    way_out="pass tensors, plain values, or lists, tuples and dicts of them",
                )
    return Call(tensors, values)


def counts_as_tensors(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """``COUNTS`` given as plain numbers become tensors of no dim."""
    return {k: torch.tensor(v) if k in COUNTS and type(v) is int else v for k, v in kwargs.items()}


def canonical(signature: inspect.Signature, path: str) -> str:
    """The path that ``bind`` uses for an input known as ``path``: a leading position becomes the parameter's name."""
    head, dot, rest = path.partition(".")
    if not head.isdigit():
        return path
    positional = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    i = int(head)
    return (positional[i].name if i < len(positional) else head) + dot + rest


def call_shapes(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of a call's tensors, by the path that ``bind`` uses."""
    tensors = bind(inspect.signature(model.forward), args, kwargs).tensors
    return {path: tuple(x.shape) for path, x in tensors.items()}


def program_shapes(
    model: nn.Module, program: Program, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """``shapes`` by the paths of the program's inputs; what they do not say is left out."""
    signature = inspect.signature(model.forward)
    paths = {s.path: canonical(signature, s.path) for s in program.inputs.values()}
    return {path: shapes[name] for path, name in paths.items() if name in shapes}


def _named(signature: inspect.Signature, bound: inspect.BoundArguments):
    position = 0
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((str(position + i), v) for i, v in enumerate(value))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            yield from value.items()
        else:
            position += 1
            yield name, value


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _kind(x: Tensor, batch: int) -> str:
    """``int64[:, :]``, or ``int64[1, :]`` for a tensor that has one row for the whole batch."""
    dims = [":"] * x.ndim
    if x.ndim >= 2 and x.shape[0] == 1 and batch > 1:
        dims[0] = "1"
    return f"{str(x.dtype).removeprefix('torch.')}[{', '.join(dims)}]"


def _step(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _names(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> str:
    known = [p.name for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    text = f"forward{signature}"
    for name in kwargs:
        near = difflib.get_close_matches(name, known, n=1) if name not in known else []
        if near:
            text = f"did you mean {near[0]!r}? {text}"
    return text
