"""Skeleton: the user's model without its numbers.

``skeleton(model, training=…)`` is a deep copy whose parameters and buffers are fake tensors of the right shape, dtype
and device, so that capture needs no real values and no memory, can be given a model on the meta device, and can do to
the copy what it likes.  The user's model and its config are never written to.

``replica(module, fill, …)`` is a deep copy whose parameters and buffers are what ``fill`` returns: the randomised
copies that MoE blocks are observed and proved with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from moec.runtime import torch_compat


def replica(
    module: nn.Module, fill: Callable[[Tensor, bool], Tensor], *, training: bool, hollow: Collection[str] = ()
) -> nn.Module:
    """Deep copy of ``module`` with every tensor ``t`` that it registers replaced by ``fill(t, is_parameter)``.

    Storage is never copied on the way, and tied tensors stay tied.  Modules at the paths ``hollow`` keep their class
    and their settings and lose what they consist of: parameters, buffers and submodules."""
    memo: dict[int, object] = {}
    hollowed = [module.get_submodule(path) for path in hollow]
    skipped = {id(m) for h in hollowed for m in h.modules()}
    for h in hollowed:
        shell = object.__new__(type(h))
        shell.__dict__.update(vars(h), _parameters={}, _buffers={}, _modules={})
        memo[id(h)] = copy.deepcopy(shell, memo)
    for m in module.modules():
        if id(m) in skipped:
            continue
        for t in m._parameters.values():
            if t is not None and id(t) not in memo:
                memo[id(t)] = nn.Parameter(fill(t, True), requires_grad=t.requires_grad)
        for b in m._buffers.values():
            if b is not None and id(b) not in memo:
                memo[id(b)] = fill(b, False)
        for t in vars(m).values():
            if isinstance(t, Tensor) and t.grad_fn is not None:  # a result kept from a forward: deepcopy refuses those
                memo.setdefault(id(t), t.detach())
    twin = copy.deepcopy(module, memo)
    twin.train(training)
    _configure(twin)
    return twin


def skeleton(
    model: nn.Module, *, training: bool, hollow: Collection[str] = ()
) -> tuple[nn.Module, AbstractContextManager]:
    """The copy and the fake mode that its tensors live in."""
    mode = torch_compat.fake_mode()
    device = device_of(model)

    def fill(t: Tensor, _: bool) -> Tensor:
        with mode:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device if t.is_meta else t.device)

    return replica(model, fill, training=training, hollow=hollow), mode


def device_of(model: nn.Module) -> torch.device:
    """Where the model lives; a model without storage will live on the CPU until its owner says otherwise."""
    for t in (*model.parameters(), *model.buffers()):
        if not t.is_meta:
            return t.device
    return torch.device("cpu")


def _configure(module: nn.Module) -> None:
    """Hugging Face has several spellings of an expert layer; whatever the user chose, the plain loop says the same and
    is the one that moec reads.  A key/value cache is made only when a call asks for it (``use_cache=True``), since a
    graph that is trained would return it for nothing.  The config is the copy's own (deep copies take it along)."""
    for m in module.modules():
        config = getattr(m, "config", None)
        if config is not None and hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"
        if config is not None and getattr(config, "use_cache", False) is True:
            config.use_cache = False
