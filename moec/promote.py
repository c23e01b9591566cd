"""float64 promotion: the same computation with every float32 made float64, so that proofs have no rounding to hide in.

Hugging Face models cast to float32 inside (norms, rotary tables, routers), so ``model.double()`` alone agrees with
itself only to about 1e-7.  ``promote_program`` rewrites the dtype arguments of a captured graph; ``Promoted`` does the
same for a user's module in eager mode, op by op; both together compare the two to 1e-12.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from moec.program import Program
from moec.runtime.torch_compat import DispatchMode

LOW = (torch.float32, torch.bfloat16, torch.float16)


def up(x: Any) -> Any:
    """float64 for a lower float dtype or a tensor of one; anything else as it is."""
    if isinstance(x, torch.dtype):
        return torch.float64 if x in LOW else x
    if isinstance(x, torch.Tensor) and x.dtype in LOW:
        return x.to(torch.float64)
    return x


def promote_program(program: Program) -> Program:
    """A fork of ``program`` that computes in float64 when it is fed float64 parameters and inputs.

    Recorded values (``meta``) keep their old dtypes: the result is for running, not for further passes.
    """
    out = program.fork()
    for node in out.graph.nodes:
        if node.op != "call_function":
            continue
        node.args = fx.node.map_aggregate(node.args, up)
        node.kwargs = fx.node.map_aggregate(node.kwargs, up)
        if node.target in _FLOAT_CREATION and "dtype" not in node.kwargs and _is_low(node):
            node.kwargs = {**node.kwargs, "dtype": torch.float64}
    out.constants = {k: up(v) for k, v in out.constants.items()}
    for name, value in out.constants.items():
        _set(out.module, name, value)
    out.params = {k: replace(s, dtype=up(s.dtype)) for k, s in out.params.items()}
    out.inputs = {k: replace(s, dtype=up(s.dtype)) for k, s in out.inputs.items()}
    out.module.recompile()
    return out


def promote_module(model: nn.Module) -> nn.Module:
    """A float64 copy of a module; run it under ``Promoted()``."""
    return copy.deepcopy(model).to(torch.float64)


class Promoted(DispatchMode):
    """Runs eager PyTorch with float64 wherever a lower float dtype is asked for or would be created."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map(_up_dtype, (args, kwargs or {}))
        if func in _FLOAT_CREATION and kwargs.get("dtype") is None and torch.get_default_dtype() in LOW:
            # The result dtype of a creation without dtype is the default one, unless all arguments are integers.
            probe = func(*args, **kwargs)
            return up(probe)
        return func(*args, **kwargs)


def _up_dtype(x: Any) -> Any:
    return up(x) if isinstance(x, torch.dtype) else x


aten = torch.ops.aten
_FLOAT_CREATION = {
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.zeros.default, aten.ones.default,
    aten.full.default, aten.empty.memory_format, aten.scalar_tensor.default, aten.linspace.default,
}  # fmt: skip


def _is_low(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.dtype in LOW


def _set(module: fx.GraphModule, name: str, value: torch.Tensor) -> None:
    *path, leaf = name.split(".")
    owner: nn.Module = module.get_submodule(".".join(path))
    setattr(owner, leaf, value) if leaf in owner._buffers else owner.__dict__.__setitem__(leaf, value)
