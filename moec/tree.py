"""The tree of modules that a parallel module is: the source's tensors, and where the names of ours live."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from moec.program import ParamSpec


def named_tensors(source: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """(name, tensor, persistent) of every parameter and buffer under every name, in state-dict order."""
    for prefix, module in source.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, p in module._parameters.items():
            if p is not None:
                yield dot + name, p, True
        for name, b in module._buffers.items():
            if b is not None:
                yield dot + name, b, name not in module._non_persistent_buffers_set


def initial(spec: ParamSpec, device: torch.device) -> Tensor:
    """A buffer that a pass made."""
    return torch.full(spec.shape, spec.initial or 0.0, dtype=spec.dtype, device=device)


def unused(name: str, tensor: Tensor, persistent: bool) -> ParamSpec:
    """The spec of a tensor that the program never reads: replicated."""
    buffer = not isinstance(tensor, nn.Parameter)
    return ParamSpec("", name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, buffer, persistent)


def container(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module in which a dotted name lives, created on the way.  Not ``add_module``: a child of the user's may be
    called like an attribute of ours."""
    *path, attribute = name.split(".")
    for step in path:
        child = root._modules.get(step) or nn.Module()
        root._modules[step] = child
        root = child
    return root, attribute
