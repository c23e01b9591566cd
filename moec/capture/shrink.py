"""Shrink: a narrow twin of a MoE block that is too large to be run for its proof.

One block of a large model has more parameters than a machine has memory (256 experts of 7168 × 2048).  Its twin is the
same Python code with every *width* divided by one factor: sizes of its parameters, plain integers of its modules and of
their configs that equal one, sizes of its inputs.  The number of experts stays.

1. ``narrow`` makes the twin, or says why there is none.  The twin is what is observed and proved.
2. What is proved of the twin holds of the block as far as the block does the same.  So whenever the guide runs the
   block itself, at its own size, every call is held against the twin's (``guide``): the same functions in the same
   order, with the same constants, integers that are widths excepted (``constants_agree``); and what is emitted has the
   block's own constants.  Code that does something else at another width, or scales by one, is refused.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .owners import Owner
from .skeleton import replica
from .steps import Refused

LARGE = 1 << 26
"""Parameters of a block beyond which it is shrunk: in float64, with gradients, 2 GB."""
NARROW = 16
"""No width becomes smaller than this."""


def narrow(module: nn.Module, owner: Owner, *, training: bool) -> tuple[nn.Module, frozenset[int], int]:
    """(twin whose parameters have no storage, widths, factor); factor 1 and no widths where it is small enough.

    Raises Refused for a large block whose widths have no common factor, or whose buffers have a width."""
    params = list(module.parameters())
    if sum(p.numel() for p in params) <= LARGE:
        return replica(module, lambda t, p: _bare(t, p, t.shape), training=training), frozenset(), 1
    widths = {s for p in params for s in p.shape if s not in (owner.num_experts, 1)}
    if any(p.dim() == 3 and p.shape[0] != owner.num_experts for p in params):
        raise Refused("it is too large to be proved at its own size, and its stacked parameters differ in their number")
    factor = gcd(*widths)
    while factor > 1 and min(widths) // factor < NARROW:
        factor = next((d for d in range(factor - 1, 0, -1) if factor % d == 0), 1)
    if factor == 1:
        raise Refused(f"it is too large to be proved at its own size, and its widths {sorted(widths)} do not shrink")
    if any(s in widths for b in module.buffers() for s in b.shape):
        raise Refused("it is too large to be proved at its own size, and a buffer has one of its widths")
    sizes = {w: w // factor for w in widths}
    twin = replica(module, lambda t, p: _bare(t, p, [sizes.get(s, s) for s in t.shape]), training=training)
    for m in twin.modules():
        _resize(vars(m), sizes)
        for value in vars(m).values():  # a config, which is the twin's own by now
            if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Tensor, type)) and not callable(value):
                _resize(vars(value), sizes)
    return twin, frozenset(widths), factor


def _bare(t: Tensor, is_param: bool, shape: Any) -> Tensor:
    if is_param:
        return torch.empty(tuple(shape), dtype=t.dtype, device="meta")
    return t.detach().clone()


def _resize(settings: dict[str, Any], sizes: dict[int, int]) -> None:
    for name, value in settings.items():
        if type(value) is int and value in sizes:
            settings[name] = sizes[value]
        elif type(value) in (tuple, torch.Size) and value and all(type(v) is int for v in value):
            settings[name] = type(value)(sizes.get(v, v) for v in value)


def constants_agree(twin: Any, block: Any, factor: int, *, sizes: bool) -> bool:
    """Are the constants of a call of the block those of the twin's call, integers ``factor`` times as large excepted?
    ``sizes``: may an integer be a size of the inputs, which is symbolic while the block is captured?"""
    a, b = (_constants(x) for x in (twin, block))
    return len(a) == len(b) and all(_agree(x, y, factor, sizes) for x, y in zip(a, b, strict=True))


def _agree(x: Any, y: Any, factor: int, sizes: bool) -> bool:
    if isinstance(y, torch.SymInt):
        return sizes and type(x) is int
    if type(x) is int and type(y) is int and y == x * factor:
        return True
    return x is y or (type(x) is type(y) and bool(x == y))


def _constants(tree: Any) -> list[Any]:
    out: list[Any] = []
    for x in pytree.tree_leaves(tree):
        if isinstance(x, slice):
            out += ["slice", *_constants((x.start, x.stop, x.step))]
        elif isinstance(x, (Tensor, torch.device)):
            out.append(Tensor if isinstance(x, Tensor) else torch.device)
        else:
            out.append(x)
    return out
