"""Likeness: a key that is equal for modules that compute alike: same classes, shapes, settings and buffers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_HIDDEN = {"_parameters", "_buffers", "_modules", "training"}


@dataclass(frozen=True)
class Index:
    """Stands for a number that may differ; ``Index(i)`` for a layer that is like none."""

    of: int = -1


def likeness(module: nn.Module, indices: Collection[tuple[str, str]] = ()) -> tuple:
    """``indices``: (module path, attribute) of numbers that do not count."""
    out: list[Any] = []
    for path, m in module.named_modules():
        settings = tuple(
            (k, Index() if (path, k) in indices else _value(v)) for k, v in sorted(vars(m).items()) if k not in _HIDDEN
        )
        shapes = tuple(
            (n, None if p is None else (tuple(p.shape), p.dtype, p.requires_grad)) for n, p in m._parameters.items()
        )
        buffers = tuple((n, None if b is None else _content(b)) for n, b in m._buffers.items())
        out.append((path, type(m), settings, shapes, buffers))
    return tuple(out)


def _value(v: Any) -> Any:
    if isinstance(v, (int, float, str, bool, type(None), torch.dtype, torch.device)):
        return (type(v), v)
    if isinstance(v, (tuple, list)):
        return (type(v), *map(_value, v))
    if isinstance(v, (set, frozenset)):
        return tuple(sorted(map(str, v)))
    if isinstance(v, dict):
        return tuple((str(k), _value(x)) for k, x in v.items())
    return id(v)


def _content(b: torch.Tensor) -> Any:
    if b.is_meta:
        return (tuple(b.shape), b.dtype)
    if b.numel() > 1 << 20:
        return (tuple(b.shape), b.dtype, id(b))
    return (tuple(b.shape), b.dtype, tuple(b.detach().flatten().tolist()))
