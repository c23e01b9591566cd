"""Observe: run a module for real and write down, call by call, what it computed.

A *value* is one state of one tensor: an in-place call makes a new value of its operand, and of every other tensor that
shares its storage.  So the tape is in single-assignment form although the module is not, and later analysis is plain
dataflow.

* ``Tape.calls[i]``: the i-th torch function that the module called, with the values that it read and made.
* ``Tape.values[v]``: the tensor of value v (None once an in-place call has overwritten it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moec.runtime.errors import MoecError

from .owners import walk

_DRAWS = frozenset(
    {"bernoulli", "bernoulli_", "uniform_", "normal_", "normal", "exponential_", "multinomial", "gumbel_softmax"}
    | {"rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "randperm", "rrelu"}
)


@dataclass(frozen=True)
class Call:
    index: int
    func: Callable
    args: tuple
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    """Value of each tensor argument, in flattening order."""
    makes: tuple[int, ...]
    """Value of each tensor in the result, in flattening order."""
    overwrites: tuple[tuple[int, int], ...]
    """(old value, new value) of every tensor that the call wrote to, its operand first."""
    result: Any

    @property
    def name(self) -> str:
        return getattr(self.func, "__name__", str(self.func))

    @property
    def is_query(self) -> bool:
        """It told the Python code something instead of making a tensor."""
        return not self.makes and not self.overwrites


@dataclass
class Tape:
    calls: list[Call] = field(default_factory=list)
    values: list[Tensor | None] = field(default_factory=list)
    maker: list[int] = field(default_factory=list)
    """Index of the call that made the value, -1 for what was there before."""
    params: dict[int, str] = field(default_factory=dict)
    """Value -> name of the parameter or buffer that it is."""
    inputs: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    """Values of the tensors that the module returned."""
    current: dict[int, int] = field(default_factory=dict)
    """id of a tensor object -> its value in the end."""
    objects: list[Tensor] = field(default_factory=list)
    """Keeps every tensor alive, so that ids and addresses stay unique."""

    died: dict[int, int] = field(default_factory=dict)
    """Value -> index of the in-place call that overwrote it."""

    def held(self, value: int) -> Tensor:
        """The tensor of a value that is known not to be overwritten."""
        t = self.values[value]
        assert t is not None, f"value {value} was overwritten"
        return t

    def valid_at(self, value: int, index: int) -> bool:
        """Does the tensor of ``value`` still hold it when call ``index`` runs?"""
        return self.died.get(value, len(self.calls)) >= index


def observe(module: nn.Module, args: tuple, kwargs: dict[str, Any], where: str) -> Tape:
    recorder = _Recorder(where)
    tape = recorder.tape
    for name, t in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
        if id(t) not in tape.current:
            tape.params[recorder.define(t, -1)] = name
    tape.inputs = tuple(recorder.define(t, -1) for t in walk((args, kwargs)))
    with recorder:
        out = module(*args, **kwargs)
    tape.results = tuple(recorder.value_of(t) for t in walk(out))
    return tape


class _Recorder(TorchFunctionMode):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.tape = Tape()
        self.where = where
        self.sharing: dict[int, list[Tensor]] = {}

    def define(self, t: Tensor, maker: int) -> int:
        tape = self.tape
        v = len(tape.values)
        tape.values.append(t.detach())
        tape.maker.append(maker)
        if id(t) not in tape.current:
            tape.objects.append(t)
            address = t.untyped_storage().data_ptr()
            if address:
                self.sharing.setdefault(address, []).append(t)
        tape.current[id(t)] = v
        return v

    def value_of(self, t: Tensor) -> int:
        v = self.tape.current.get(id(t))
        return self.define(t, -1) if v is None else v

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if off_tape(func):
            return func(*args, **kwargs)
        refuse_randomness(func, args, kwargs, self.where)
        tape, index = self.tape, len(self.tape.calls)
        operands = list(walk((args, kwargs)))
        reads = tuple(self.value_of(t) for t in operands)
        versions = [t._version for t in operands]
        before = [t.detach().clone() if _writes(func, kwargs) and t.numel() else None for t in operands]
        result = func(*args, **kwargs)
        overwrites: list[tuple[int, int]] = []
        handled: set[int] = set()
        for t, version, old in zip(operands, versions, before, strict=True):
            address = t.untyped_storage().data_ptr()
            if t._version == version or address in handled:
                continue
            handled.add(address)  # views share a version counter: once for all of them
            for s in [t, *(s for s in self.sharing.get(address, ()) if s is not t)]:
                was = tape.current[id(s)]
                tape.values[was] = old if s is t else None
                tape.died[was] = index
                overwrites.append((was, self.define(s, index)))
        makes = tuple(
            tape.current[id(t)] if any(t is x for x in operands) else self.define(t, index) for t in walk(result)
        )
        tape.calls.append(Call(index, func, args, kwargs, reads, makes, tuple(overwrites), result))
        return result


def off_tape(func: Callable) -> bool:
    """``x.device``, because fake tensors answer it without saying so to a mode; arithmetic with sizes (``sym_float``),
    which only symbolic ones do."""
    return getattr(func, "__self__", None) is Tensor.device or getattr(func, "__name__", "").startswith("sym_")


def _writes(func: Callable, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__setitem__", "__set__") or kwargs.get("out") is not None or kwargs.get("inplace"):
        return True
    if name.startswith("__i") and name not in ("__int__", "__index__", "__iter__", "__invert__"):
        return True
    return name.endswith("_") and not name.endswith("__")


def refuse_randomness(func: Callable, args: tuple, kwargs: dict[str, Any], where: str) -> None:
    """Masks drawn by one process are not those of another: dropout and jitter are refused."""
    name = getattr(func, "__name__", "")
    if func in (F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d):
        given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        p = given.get("p", 0.5)
        if p > 0 and given.get("training", True):
            raise randomness(name, f"p = {p}", where)
    elif name in _DRAWS:
        raise randomness(name, ", ".join(str(a) for a in args if not isinstance(a, Tensor)), where)


def randomness(op: str, value: str, where: str) -> MoecError:
    return MoecError(
        f"draws random numbers in its forward: {op} ({value})",
        where=where or "model",
        way_out="set dropout and router jitter to 0 (or capture the model in eval mode)",
    )
