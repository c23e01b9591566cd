"""How a pass writes one node in the place of another: a new node, its value on fakes, the exchange."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from moec.runtime.torch_compat import python_dispatcher


def replace(node: fx.Node, other: fx.Node) -> None:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def new(node: fx.Node, target, args, val, **kwargs) -> fx.Node:
    """A node that stands beside ``node``: same module, with the value ``val``."""
    made = node.graph.call_function(target, args, kwargs)
    made.meta.update({k: v for k, v in node.meta.items() if k in ("where", "nn_module_stack", "stack_trace")})
    made.meta["val"] = val
    return made


def apply(node: fx.Node, target, *args, **kwargs) -> fx.Node:
    """A node that stands beside ``node``, its value inferred."""
    fakes, named = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    beside = node.meta["val"]
    first = beside[0] if isinstance(beside, (tuple, list)) else beside
    with first.fake_mode, python_dispatcher(), torch.no_grad():
        val = target(*fakes, **named)
    return new(node, target, args, val, **kwargs)


def fake(fn: Callable, *args):
    """Evaluate a function of the fake values of nodes."""
    first = next(a for a in args if isinstance(a, fx.Node))
    with first.meta["val"].fake_mode, python_dispatcher():
        return fn(*[a.meta["val"] if isinstance(a, fx.Node) else a for a in args])
