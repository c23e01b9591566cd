"""Owners: modules that may be MoE blocks, because they own isomorphic experts.

1. ``candidates`` looks at structure only.  An owner has direct children lists (``ModuleList``, ``ModuleDict``,
   ``ParameterList``) of E >= 2 isomorphic members that hold no such list themselves, or direct 3-D parameters
   ``[E, …]``.
2. ``Owner.routes`` looks at what its forward does, on the meta device: a block picks experts (top-k or the like), or
   is given ids and weights of one shape.  A stack of layers does neither.
3. ``seen_from_parent``: experts whose owner does not route may be routed to by the module that holds the owner.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

PICKS = frozenset({"topk", "argmax", "max", "sort", "argsort"})
"""Functions by which a router picks experts."""


@dataclass(frozen=True)
class Owner:
    path: str
    num_experts: int
    roles: dict[str, tuple[str, ...]]
    """Role (``experts.*.w1.weight``, or the name of a stacked parameter) -> names of its members, relative to the
    module; a stacked parameter is its own single member."""
    stacked: bool

    def member(self, role: str, module: nn.Module, e: int) -> Tensor:
        names = self.roles[role]
        return module.get_parameter(names[0])[e] if self.stacked else module.get_parameter(names[e])

    def stack(self, role: str, module: nn.Module) -> Tensor:
        names = self.roles[role]
        if self.stacked:
            return module.get_parameter(names[0])
        return torch.stack([module.get_parameter(n) for n in names])

    def routes(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Does ``module`` (on the meta device, called with meta tensors) pick experts, or is it told which?"""
        if _routed_arguments(pytree.tree_leaves((args, kwargs))):
            return True
        scout, hooks = _Scout(self, module), []
        if not self.stacked:
            for child in {n.rsplit(".", 1)[0] for names in self.roles.values() for n in names}:
                hooks.append(module.get_submodule(child).register_forward_pre_hook(scout.expert_called))
        try:
            with scout:
                module(*args, **copy.copy(kwargs))
        except _Decided as verdict:
            return verdict.routes
        except Exception:  # it did something that the meta device cannot do before it picked an expert
            return False
        finally:
            for h in hooks:
                h.remove()
        return False

    def seen_from_parent(self) -> Owner | None:
        """The same experts as belonging to the module one level up, which may be the one that routes to them."""
        if not self.path:
            return None
        parent, _, name = self.path.rpartition(".")
        roles = {f"{name}.{r}": tuple(f"{name}.{n}" for n in names) for r, names in self.roles.items()}
        return Owner(parent, self.num_experts, roles, self.stacked)


def _routed_arguments(leaves: list[Any]) -> bool:
    tensors = [x for x in leaves if isinstance(x, Tensor) and x.dim() >= 2]
    ids = [x.shape for x in tensors if x.dtype in (torch.int64, torch.int32)]
    return any(x.is_floating_point() and x.shape in ids for x in tensors)


class _Decided(BaseException):
    def __init__(self, routes: bool) -> None:
        self.routes = routes


class _Scout(TorchFunctionMode):
    def __init__(self, owner: Owner, module: nn.Module) -> None:
        super().__init__()
        self.num_experts = owner.num_experts
        self.experts = {id(module.get_parameter(n)) for names in owner.roles.values() for n in names}
        self.rows: Any = None
        self.used = False

    def expert_called(self, _: nn.Module, args: tuple) -> None:
        """All experts on the same tokens, before one is picked, is a dense block; else it is a stack of layers."""
        if self.used and (not args or args[0] is not self.rows):
            raise _Decided(False)
        self.used, self.rows = True, args[0] if args else None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        operands = pytree.tree_leaves((args, kwargs))
        tensors = [x for x in operands if isinstance(x, Tensor)]
        if (
            getattr(func, "__name__", "") in PICKS
            and tensors
            and tensors[0].is_floating_point()
            and len(operands) > 1
            and (not self.used or tensors[0].shape[-1:] == (self.num_experts,))
        ):
            raise _Decided(True)
        self.used = self.used or any(id(t) in self.experts and t.dim() == 3 for t in tensors)
        return func(*args, **kwargs)


def candidates(model: nn.Module) -> list[Owner]:
    found: dict[str, Owner] = {}
    for path, module in model.named_modules():
        owner = _list_owner(path, module) or _stacked_owner(path, module)
        if owner is not None:
            found[path] = owner
    return [o for p, o in found.items() if not _holds_another(o, p, found)]


def _holds_another(owner: Owner, path: str, found: dict[str, Owner]) -> bool:
    """Are there owners inside of its members?  Then it is a stack of layers."""
    if owner.stacked:
        return False
    prefix = f"{path}." if path else ""
    inside = {prefix + n.split(".")[0] + "." for names in owner.roles.values() for n in names}
    return any(other != path and any((other + ".").startswith(p) for p in inside) for other in found)


def _stacked_owner(path: str, module: nn.Module) -> Owner | None:
    if type(module).__module__.startswith("torch.nn"):
        return None  # Conv1d and Bilinear have 3-D weights
    params = {n: p for n, p in module._parameters.items() if p is not None and p.dim() >= 1}
    sizes = [p.shape[0] for p in params.values() if p.dim() == 3]
    if not sizes or len(set(sizes)) > 1 or sizes[0] < 2:
        return None
    roles: dict[str, tuple[str, ...]] = {n: (n,) for n, p in params.items() if p.shape[0] == sizes[0]}
    return Owner(path, sizes[0], roles, stacked=True)


def _list_owner(path: str, module: nn.Module) -> Owner | None:
    by_size: dict[int, dict[str, tuple[str, ...]]] = {}
    for attr, child in module.named_children():
        members = _members(child)
        if members is not None:
            roles = {
                f"{attr}.*" + (f".{n}" if n else ""): tuple(f"{attr}.{i}" + (f".{n}" if n else "") for i, _ in members)
                for n, _ in members[0][1]
            }
            by_size.setdefault(len(members), {}).update(roles)
    if not by_size:
        return None
    size = max(by_size)
    return Owner(path, size, by_size[size], stacked=False) if by_size[size] else None


Member = tuple[str, list[tuple[str, Tensor]]]


def _members(child: nn.Module) -> list[Member] | None:
    """The members of a list with their parameters, or None if it is no list of >= 2 isomorphic members."""
    if isinstance(child, nn.ParameterList):
        members = [(str(i), [("", p)]) for i, p in enumerate(child)]
        kinds = {"parameter"}
    elif isinstance(child, (nn.ModuleList, nn.ModuleDict)):
        members = [(i, list(m.named_parameters(remove_duplicate=False))) for i, m in child.named_children()]
        kinds = {type(m).__qualname__ for m in child.children()}
    else:
        return None
    shapes = {tuple((n, p.shape, p.dtype) for n, p in params) for _, params in members}
    return members if len(members) >= 2 and len(kinds) == 1 and len(shapes) == 1 else None


def walk(tree: Any) -> Iterator[Tensor]:
    """The tensors of a tree, in order."""
    return (x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor))
