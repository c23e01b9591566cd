"""The table of collectives: what each one does, and which one its gradient needs.

``TABLE`` is the single source: the ops (``ops/convert.py``, ``ops/exchange.py``) take their forward and their
registered backward from it, and so does the lockstep world (``world.py``).  The types I, R, S, V and P are those of the
type system: I is the same on all ranks, R the same with a gradient that is a pending sum, S sharded on a dim,
V ragged rows, P a pending sum; M a pending maximum (of scales, and of scales of gradients).

The dual of ``A -> B`` goes from the type of B's gradient to the type of A's.  Gradients have the types
I: I,  R: P,  P: R,  S: S,  V: V,  M: M.

``carry_…`` move nothing forward: they stand beside the exchange of a payload (``ops/carry.py``) for its gradient.

An op that communicates is a *start* op: it launches the work and its result may be read only after the wait node
``torch.ops._c10d_functional.wait_tensor.default``.  The others (identity, slice, zero_pad, carry) have no wait.

Nor have those of ``FUSED``, which compute beside their transfer themselves and give what is computed: a gather and the
products of what it gathers, a product and the reduce-scatter of what it makes (``ops/gather_linear.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .mesh import back
from .peers import BETWEEN
from .torch_compat import WAIT, OpOverload

GRADIENT_TYPE = {"I": "I", "R": "P", "P": "R", "S": "S", "V": "V", "M": "M"}


@dataclass(frozen=True)
class Collective:
    """One kind of collective.  ``kind`` is the name of its op in the ``moec`` namespace."""

    kind: str
    source: str
    dest: str
    primitive: str
    """What moves the data: see PRIMITIVES."""
    dual: str
    """The kind that carries the gradient back; empty where there is no gradient (integer counts)."""

    @property
    def communicates(self) -> bool:
        return PRIMITIVES[self.primitive] is not None

    @property
    def needs_wait(self) -> bool:
        return self.communicates and self.primitive not in FUSED

    @property
    def op(self) -> OpOverload:
        return getattr(torch.ops.moec, self.kind).default

    def tensor_bytes(self, input_bytes: int, output_bytes: int) -> int:
        """Size of the whole tensor that the collective is about, on one rank; 0 if nothing is communicated."""
        return max(input_bytes, output_bytes) if self.communicates else 0

    def wire_bytes(self, input_bytes: int, output_bytes: int, size: int) -> int:
        """Bytes that one of ``size`` ranks sends, under ring algorithms; for the uneven exchange an upper bound
        (how much stays at home is known only when it runs)."""
        times = PRIMITIVES[self.primitive]
        return 0 if times is None else times * max(input_bytes, output_bytes) * (size - 1) // size


# Primitive -> how often a ring moves the whole tensor ((size-1)/size of it), None where nothing is communicated.
PRIMITIVES: dict[str, int | None] = {
    "identity": None,
    "slice": None,
    "zero_pad": None,
    "all_reduce": 2,
    "all_reduce_max": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
    "exchange": 1,
    "counts": 1,
    "equal": 1,
    "carry": None,
    "gather_products": 1,
    "products_scatter": 1,
}

FUSED = frozenset({"gather_products", "products_scatter"})
"""Primitives of ops that compute beside their transfer and are over when they return."""

PAIRWISE = frozenset({"all_gather", "reduce_scatter", "all_to_all", "exchange", "counts", "equal"})
"""Primitives that are sends and receives of pairs of ranks on CPUs, with a group for each direction (``peers.py``)."""

TABLE: dict[str, Collective] = {
    c.kind: c
    for c in (
        #          kind               source dest  primitive         dual
        Collective("i_to_r", "I", "R", "identity", "p_to_i"),
        Collective("p_to_i", "P", "I", "all_reduce", "i_to_r"),
        Collective("p_to_r", "P", "R", "all_reduce", "p_to_r"),
        Collective("s_to_r", "S", "R", "all_gather", "p_to_s"),
        Collective("s_to_r_low", "S", "R", "all_gather", "p_to_s"),
        Collective("carry_parameters", "S", "R", "carry", "p_to_s"),
        Collective("p_to_s", "P", "S", "reduce_scatter", "s_to_r"),
        Collective("s_to_i", "S", "I", "all_gather", "i_to_s"),
        Collective("i_to_s", "I", "S", "slice", "s_to_i"),
        Collective("r_to_s", "R", "S", "slice", "s_to_p"),
        Collective("s_to_p", "S", "P", "zero_pad", "r_to_s"),
        Collective("s_to_s", "S", "S", "all_to_all", "s_to_s"),
        Collective("m_to_i", "M", "I", "all_reduce_max", "i_to_m"),
        Collective("i_to_m", "I", "M", "identity", "m_to_i"),
        Collective("all_to_all", "V", "V", "exchange", "all_to_all_rows"),
        Collective("all_to_all_rows", "V", "V", "exchange", "all_to_all_rows"),
        Collective("all_to_all_equal", "V", "V", "equal", "all_to_all_equal"),
        Collective("exchange_counts", "V", "V", "counts", ""),
        Collective("carry_exchange", "V", "V", "carry", "all_to_all_rows"),
        Collective("carry_equal", "V", "V", "carry", "all_to_all_equal"),
        Collective("carry_gather", "S", "R", "carry", "p_to_s"),
        Collective("gather_linear", "S", "R", "gather_products", "linear_scatter"),
        Collective("linear_scatter", "P", "S", "products_scatter", "gather_linear"),
    )
}
COLLECTIVES = TABLE
"""The registry that passes read (bytes, waits, groups); the same object as ``TABLE``."""

MAXIMA = ("m_to_i", "i_to_m")
"""Of magnitudes, not of values: forward or backward the largest of the ranks' numbers (FP8 scales)."""

LOW_GATHER = "s_to_r_low"
"""``s_to_r`` of a parameter's narrow copy, whose gradient is the parameter's: ``(x, master, dim, size, group)``."""

CARRY_PARAMETERS = "carry_parameters"
"""``s_to_r`` of what travels otherwise, for gradients alone: ``(masters, dims, dtype, size, group)``."""

CONVERSIONS = tuple(
    k
    for k, c in TABLE.items()
    if c.primitive not in ("exchange", "equal", "counts", "carry", *FUSED) and k not in (*MAXIMA, LOW_GATHER)
)
"""Kinds ``(x, dim, [to_dim,] size, group)``, like ``MAXIMA``; the rest have signatures of their own."""


def collective(target: Any) -> Collective | None:
    """The table entry of an FX node's target, None if it is not a collective."""
    if not isinstance(target, OpOverload) or target.namespace != "moec":
        return None
    return TABLE.get(target._schema.name.removeprefix("moec::"))


def is_start(target: Any) -> bool:
    """Does ``target`` launch communication, so that its result may be read only after a wait?"""
    found = collective(target)
    return found is not None and found.needs_wait


def is_fused(target: Any) -> bool:
    """Does ``target`` compute beside its own communication (``FUSED``)?"""
    found = collective(target)
    return found is not None and found.primitive in FUSED


def is_wait(target: Any) -> bool:
    return target is WAIT


def needs_wait(kind: str) -> bool:
    """Must a result of ``moec::<kind>`` pass a wait node before it is read?"""
    return TABLE[kind].needs_wait


def group_of(node: torch.fx.Node) -> str:
    """The group key (before lowering) or group name (after it) of a collective node: always its last argument."""
    return node.args[-1] if node.args else node.kwargs["group"]


def keys_of(node: torch.fx.Node) -> set[str]:
    """The keys of all groups that a collective node communicates over."""
    key = group_of(node)
    return {key, back(key)} if key and collective(node.target).primitive in PAIRWISE else {key}  # type: ignore[union-attr]


def name_groups(node: torch.fx.Node, names: Mapping[str, str]) -> None:
    """Let a collective node name process groups (``names``: by key) rather than keys; a key without a name stays."""
    key = group_of(node)
    node.meta["group_key"] = key  # for people, for explain and for the cost model
    found = [names[k] for k in (key, back(key)) if k in keys_of(node) and k in names]
    node.args = (*node.args[:-1], BETWEEN.join(found) or key)
