"""Types of payloads on one axis, and what belongs to what.

A payload's bytes and its carrier have the types of the rows that they are: the carrier those of a value with a
gradient, the bytes those of one without.  Rounding takes no pending sum, no row of which ranks have parts, and, where a
recipe has one scale, a maximum over all ranks.

A carrier and its bytes belong to each other: an op that moves a carrier must stand beside one that moves its bytes,
over the same ranks in the same way, or gradients would not come from where rows went.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from moec.passes.shard.rule import is_getitem
from moec.passes.verify.fp8 import quantised_type, scale_type
from moec.placement import I, M, P, R, Type, Types, V
from moec.program import Program, op_name
from moec.runtime.collectives import is_wait
from moec.runtime.errors import MoecError
from moec.runtime.fp8 import Recipe
from moec.runtime.fp8.payload import BF16
from moec.runtime.mesh import Axis

BESIDE = {
    "moec.carry_sorted": "moec.sort_chunks", "moec.carry_swapped": "moec.swap_chunks",
    "moec.carry_aligned": "moec.align_rows", "moec.carry_exchange": "moec.all_to_all",
    "moec.carry_equal": "moec.all_to_all_equal", "moec.carry_gather": "moec.s_to_r",
}  # fmt: skip
"""Which move each stands beside."""
NUMBERS = {"moec.permute": 2, "moec.permute_kept": 2, "moec.permute_aligned": 3, "moec.slots": 1}
"""Tokens to rows: which result numbers the rows."""
PAYLOADS = {*BESIDE, "moec.carry_rows", "moec.carry_home", "moec.encode_rows", "moec.decode_rows",
            "moec.decode_operand"} - {"moec.carry_gather"}  # fmt: skip
"""Ops that are typed here; ``carry_gather`` is a conversion like others."""


def derive_payload(program: Program, node: fx.Node, types: Mapping[fx.Node, Types]) -> Types | list[Types]:
    """The types of ``node``'s results, of the ``types`` of its operands."""
    check_pairs(node)
    results: list[Types] = []
    for axis in program.mesh.axes:
        found = _OnAxis(node, axis, {n: t[axis.name] for n, t in types.items()}).derive()
        results = results or [{} for _ in found]
        for r, t in zip(results, found, strict=True):
            r[axis.name] = t
    return results if isinstance(node.meta["val"], (tuple, list)) else results[0]


def check_pairs(node: fx.Node) -> None:
    """Raise MoecError where a carrier and bytes do not belong to each other."""
    name = op_name(node)
    if name == "moec.encode_rows":
        return
    if name in ("moec.decode_rows", "moec.decode_operand"):
        data, carrier = node.args[:2]
        while op_name(data) == op_name(carrier) == "aten.reshape" and data.args[1][:-1] == carrier.args[1][:-1]:
            data, carrier = data.args[0], carrier.args[0]
        _require(node, _data_of(carrier) == _name(data), "its bytes and its carrier are two payloads'")
        return
    carrier, data, *rest = node.args
    move = data
    if name == "moec.carry_rows":
        move = data.args[0] if is_getitem(data) and data.args[1] == 0 else data
        beside = op_name(move) in NUMBERS and rest[0] in move.users and rest[0].args[1] == NUMBERS[op_name(move)]
        _require(node, beside, "its bytes are no rows that were numbered so")
    elif name != "moec.carry_home":
        move = data.args[0] if is_wait(data.target) else data
        _require(node, op_name(move) == BESIDE[name], f"its bytes come from no {BESIDE[name]}")
        if name in ("moec.carry_exchange", "moec.carry_equal"):  # the payload of gradients is theirs alone
            rest = [*rest[:-3], *rest[-2:]]
        _require(node, tuple(rest) == tuple(move.args[1:]), f"{move.name} moved its bytes otherwise")
    source = data if name == "moec.carry_home" else move.args[0]
    _require(node, _data_of(carrier) == _name(source), f"what {move.name} moved is not what its carrier belongs to")


def _name(node: fx.Node) -> object:
    """A value: results of one node by their number."""
    return (node.args[0], node.args[1]) if is_getitem(node) else node


def _data_of(carrier: fx.Node) -> object:
    if is_getitem(carrier) and op_name(carrier.args[0]) == "moec.encode_rows" and carrier.args[1] == 0:
        return (carrier.args[0], 1)
    return _name(carrier.args[1]) if op_name(carrier).startswith("moec.carry_") else None


def _require(node: fx.Node, holds: bool, text: str) -> None:
    if not holds:
        raise MoecError(f"{node.format_node()}: {text}", where=node.meta.get("where", ""))


class _OnAxis:
    def __init__(self, node: fx.Node, axis: Axis, on: Mapping[fx.Node, Type]) -> None:
        self.node, self.axis, self.on = node, axis, on

    def require(self, operand: fx.Node, *want: Type) -> None:
        have = self.on[operand]
        if have not in want and not (have in (I, R) and not operand.meta["grad"] and R in want):
            raise MoecError(
                f"{self.node.format_node()} has an operand {operand.name} of type {have} on {self.axis.name}, not "
                f"{' or '.join(map(str, want))}",
                where=self.node.meta.get("where", ""),
            )

    def same(self, data: fx.Node, carrier: fx.Node) -> Type:
        t = self.on[carrier]
        self.require(data, R if t == I else t)
        return t

    def largest(self, amax: fx.Node | None, payload: str) -> None:
        """One scale needs the largest magnitude of all ranks."""
        if payload != BF16 and Recipe.parse(payload).shared == "tensor":
            _require(self.node, amax is not None, "one scale, and nothing to make it from")
            self.require(amax, R)

    def derive(self) -> list[Type]:
        match op_name(self.node).removeprefix("moec."):
            case "encode_rows":
                x, amax, payload, _ = self.node.args
                t = self.on[x]
                cut = t.kind == "S" and t.dim == x.meta["val"].ndim - 1
                if t.kind in "PM" or cut:
                    raise MoecError(
                        f"{self.node.format_node()} rounds rows of type {t} on {self.axis.name}",
                        where=self.node.meta.get("where", ""),
                    )
                self.largest(amax, payload)
                return [t, R if t == I else t]
            case "decode_rows":
                data, carrier, amax, payload, _ = self.node.args
                self.largest(amax, payload)
                return [self.same(data, carrier)]
            case "decode_operand":
                return self.operand(*self.node.args)
            case "carry_rows":
                carrier, data, row_of = self.node.args
                self.tokens(carrier, row_of)
                self.require(data, *((R,) if self.axis.expert == "etp" else (V,)))
                return [self.on[data]]
            case _:
                carrier, data, *_ = self.node.args
                self.require(carrier, *((R, P, I) if self.axis.expert == "etp" else (V,)))
                return [self.same(data, carrier)]

    def tokens(self, carrier: fx.Node, row_of: fx.Node) -> None:
        """As a permute takes them: all ranks of ep may have the same tokens, and each the ids of its own experts."""
        tokens = self.on[row_of]
        self.require(carrier, *((tokens, R) if tokens == V and self.axis.expert == "ep" else (tokens,)))

    def operand(self, data, carrier, amax, amax_T, counts, payload, both) -> list[Type]:
        t, ndim, recipe = self.same(data, carrier), carrier.meta["val"].ndim, Recipe.parse(payload)
        self.largest(amax, payload)
        if counts is not None:
            self.require(counts, V if t == V else R)
        scale = [scale_type(recipe, "rows", transposed, ndim, t, M) for transposed in (False, True)]
        if amax_T is not None:
            self.require(amax_T, R if scale[1] == M else scale[1])
        elif both:
            _require(self.node, scale[1] != M, f"scales of this rank's part alone, of {t} on {self.axis.name}")
        scale = [R if s == M else s for s in scale]
        other = [quantised_type("rows", True, ndim, t), scale[1]] if both else [R, R]
        return [t, quantised_type("rows", False, ndim, t), scale[0], *other]
