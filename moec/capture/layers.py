"""Layers: which layers of a model are equal, so that capture need look at a few of them only.

``find_repeats`` looks at structure alone.  It takes a ``ModuleList`` outside of any other whose members hold candidates
for MoE blocks, and finds in it runs of at least ``WORTH`` *units* of ``period`` layers each (sliding and full attention
in turn have period 2).  Layers are equal if their modules have the same classes and settings, parameters of the same
names, shapes, dtypes and ``requires_grad``, and buffers of the same content.  An integer attribute that is the layer's
own index may differ; capture then runs with ``Unknown`` in its place, so that a forward which computes with it is
noticed.  A layer that shares a tensor with anything else is equal to none.

That equal layers are also *used* alike is found out while capturing (``thin.py``) and proved on the graph
(``passes/expand.py``).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from moec.program import Repeat

from .likeness import Index, likeness
from .owners import candidates

WORTH = 5
"""Fewer units than these are captured one by one: three of them would be captured anyway."""
LONGEST = 8
"""Largest period that is looked for."""


class Used(Exception):
    """A forward computed with the index of its layer."""


def _used(self: Unknown, *_: Any) -> Any:
    raise Used(f"its forward computes with the layer's index ({object.__getattribute__(self, 'name')})")


class Unknown:
    """The index of a layer while equal layers are captured: it can be handed on, and nothing else."""

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "name", name)

    def __deepcopy__(self, memo: dict) -> Unknown:
        return self

    __class__ = property(lambda _: int)  # isinstance says what it would of the index


_ASKED = """abs add and bool ceil complex divmod eq float floor floordiv format ge getattr gt hash index int invert iter
le len lshift lt matmul mod mul ne neg or pos pow radd rand rdivmod repr rfloordiv rlshift rmatmul rmod rmul ror round
rpow rrshift rshift rsub rtruediv rxor str sub truediv trunc xor"""
for _name in _ASKED.split():
    setattr(Unknown, f"__{_name}__", _used)


def find_repeats(model: nn.Module) -> tuple[Repeat, ...]:
    """Runs of equal layers, in the order of the model; none for most small models."""
    blocks = [o.path for o in candidates(model)]
    shared = _shared(model)
    found: list[Repeat] = []
    for path, layers in model.named_modules():
        prefix = f"{path}." if path else ""
        outermost = not any(path.startswith(f"{r.path}.") for r in found)
        if not isinstance(layers, nn.ModuleList) or len(layers) < WORTH or not outermost:
            continue
        if any(b.startswith(prefix) for b in blocks):
            found += _runs(path, _keys(layers, shared))
    return tuple(found)


def index_attributes(layers: nn.ModuleList) -> set[tuple[str, str]]:
    """(module path inside a layer, attribute) of integers that say which layer it is, in every layer that has one."""
    found: dict[tuple[str, str], bool] = {}
    for i, layer in enumerate(layers):
        for path, m in layer.named_modules():
            for name, value in vars(m).items():
                if type(value) is int:
                    found[path, name] = found.get((path, name), True) and value == i
    return {at for at, is_index in found.items() if is_index}


def _keys(layers: nn.ModuleList, shared: set[int]) -> list[Any]:
    """Equal for equal layers."""
    indices = index_attributes(layers)
    keys: list[Any] = []
    for i, layer in enumerate(layers):
        tensors = [*layer.parameters(), *layer.buffers()]
        alone = not any(id(t) in shared for t in tensors)
        keys.append((likeness(layer, indices), layer.training) if alone else Index(i))
    return keys


def _shared(model: nn.Module) -> set[int]:
    """ids of tensors that are registered more than once."""
    count: Counter[int] = Counter()
    for _, m in model.named_modules(remove_duplicate=False):
        count.update(id(t) for t in (*m._parameters.values(), *m._buffers.values()) if t is not None)
    return {i for i, n in count.items() if n > 1}


def _runs(path: str, keys: list[Any]) -> list[Repeat]:
    found, at = [], 0
    while at < len(keys):
        options = [Repeat(path, at, p, _units(keys, at, p)) for p in range(1, LONGEST + 1)]
        best = max(options, key=lambda r: (r.units >= WORTH, r.units * r.period if r.units >= WORTH else 0, -r.period))
        if best.units >= WORTH:
            found.append(best)
            at += best.units * best.period
        else:
            at += 1
    return found


def _units(keys: list[Any], at: int, period: int) -> int:
    """How often the ``period`` layers at ``at`` come in a row."""
    n = 1
    while keys[at : at + period] == keys[at + n * period : at + (n + 1) * period]:
        n += 1
    return n
