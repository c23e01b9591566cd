"""Examples: what to call the model with while it is captured, and when a capture can be used again.

Only shapes matter.  ``dummy_examples`` makes the arguments of a Hugging Face model up; ``flatten_call`` splits the
arguments of any call into tensor inputs and constants; ``fabricate`` stretches sizes of 1 that stand for "any number"
(the batch, a sequence of token ids) to 2, because a size of 1 would be captured as the constant 1;
``capture_key`` is equal for two calls that the same capture serves.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moec.runtime.errors import MoecError


@dataclass(frozen=True)
class Call:
    """The arguments of one call: ``leaves`` in order, tensors among them; ``paths`` say how the user passes each."""

    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    spec: pytree.TreeSpec

    def tensors(self) -> dict[str, Tensor]:
        return {p: x for p, x in zip(self.paths, self.leaves, strict=True) if isinstance(x, Tensor)}

    def rebuild(self, tensors: dict[str, Tensor]) -> tuple[tuple, dict[str, Any]]:
        leaves = [tensors.get(p, x) for p, x in zip(self.paths, self.leaves, strict=True)]
        return pytree.tree_unflatten(leaves, self.spec)


def flatten_call(args: tuple, kwargs: dict[str, Any]) -> Call:
    with_paths, spec = pytree.tree_flatten_with_path((tuple(args), dict(sorted(kwargs.items()))))
    paths = tuple(dotted(path[1:]) for path, _ in with_paths)
    return Call(tuple(x for _, x in with_paths), paths, spec)


def dotted(path: Any) -> str:
    """``past.0.keys`` for a pytree key path."""
    return ".".join(_key(k) for k in path)


def _key(entry: Any) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(entry, name):
            return str(getattr(entry, name))
    return str(entry)


def dummy_examples(model: nn.Module, *, training: bool) -> tuple[tuple, dict[str, Any]]:
    """Arguments for a model that says itself what it can be called with (``dummy_inputs``)."""
    try:
        given = getattr(model, "dummy_inputs", None)
    except Exception:  # a property that needs more than the model knows
        given = None
    if not isinstance(given, dict):
        raise MoecError(
            f"{type(model).__name__} has no dummy_inputs, so capture does not know how to call it",
            where="example_inputs",
            way_out="pass example_inputs and/or example_kwargs: tensors of the right rank and dtype, any values",
        )
    kwargs: dict[str, Any] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in given.items()}
    names = inspect.signature(model.forward).parameters
    ids = kwargs.get("input_ids")
    if training and "labels" in names and isinstance(ids, Tensor) and _predicts_tokens(model):
        kwargs["labels"] = ids.clone()
    return (), kwargs


def _predicts_tokens(model: nn.Module) -> bool:
    """Labels shaped like the ids: a language-model head, not a classifier."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return head is not None


def batch_size(tensors: dict[str, Tensor]) -> int | None:
    """Dim 0 of the first tensor that has a batch at all."""
    return next((t.shape[0] for t in tensors.values() if t.dim() >= 2), None)


def fabricate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stand-ins of the same ranks, all distinct objects, with every size that may vary at least 2."""
    b = batch_size(tensors)
    return {p: t.new_empty(_stretched(t, b), device="meta") for p, t in tensors.items()}


def _stretched(t: Tensor, b: int | None) -> tuple[int, ...]:
    shape = list(t.shape)
    if t.dim() >= 2 and shape[0] == 1 and b == 1:
        shape[0] = 2
    if t.dim() == 2 and shape[1] == 1 and not t.is_floating_point():
        shape[1] = 2
    return tuple(shape)


def capture_key(training: bool, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """Hashable; equal for calls that one capture serves: same structure, same non-tensor values, same ranks and
    dtypes, and the same tensors broadcast over the batch."""
    call = flatten_call(args, kwargs)
    b = batch_size(call.tensors())
    leaves: list[tuple] = []
    for x in call.leaves:
        if isinstance(x, Tensor):
            broadcast = x.dim() >= 2 and x.shape[0] == 1 and b is not None and b > 1
            leaves.append(("tensor", x.dim(), str(x.dtype), broadcast))
        else:
            try:
                hash(x)
            except TypeError:
                leaves.append((type(x).__qualname__, id(x)))
            else:
                leaves.append((type(x).__qualname__, x))
    return (training, torch.is_grad_enabled(), call.paths, str(call.spec), tuple(leaves))
