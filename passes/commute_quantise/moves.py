"""Moves: the ops that move rows as they are, and how a payload goes through one (part of ``commute_quantise``).

A payload is a pair of values (``runtime/ops/payload.py``): the rows as bytes, and a carrier for their gradient.  A move
takes the bytes in the place of the rows, itself unchanged; beside it a ``carry_`` op takes the carrier along.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from moec.passes.shard.rule import is_getitem
from moec.passes.typed import result, typed
from moec.program import Program, op_name
from moec.runtime.fp8.payload import width
from moec.runtime.torch_compat import resized

moec_ops = torch.ops.moec

PERMUTES = {"moec.permute": 2, "moec.permute_kept": 2, "moec.permute_aligned": 3, "moec.slots": 1}
"""Tokens to rows: which result numbers the rows."""
LOCAL = {"moec.sort_chunks": "sorted", "moec.swap_chunks": "swapped", "moec.align_rows": "aligned"}
STARTS = {"moec.all_to_all": "exchange", "moec.all_to_all_equal": "equal", "moec.s_to_r": "gather"}


@dataclass(frozen=True)
class Pair:
    data: fx.Node
    carrier: fx.Node


def is_move(node: fx.Node, value: fx.Node) -> bool:
    """Does ``node`` move the rows of ``value`` as they are?"""
    name = op_name(node)
    if node.op != "call_function" or node.args[0] is not value:
        return False
    if name == "moec.s_to_r":
        return node.args[1] % value.meta["val"].ndim != value.meta["val"].ndim - 1
    return name in PERMUTES or name in LOCAL or name in STARTS


def moved_by(value: fx.Node) -> fx.Node | None:
    """The move whose rows ``value`` is, None if it is no move's."""
    node = value
    if op_name(value) == "_c10d_functional.wait_tensor" or (is_getitem(value) and value.args[1] == 0):
        node = value.args[0]
    elif op_name(value) not in LOCAL:
        return None
    found = node.op == "call_function" and isinstance(node.args[0], fx.Node) and is_move(node, node.args[0])
    return node if found else None


def rows_of(move: fx.Node) -> fx.Node:
    """The value that has the moved rows."""
    name = op_name(move)
    if name in PERMUTES:
        return next(u for u in move.users if u.args[1] == 0)
    return next(iter(move.users)) if name in STARTS else move


def encode(program: Program, at: fx.Node, x: fx.Node, amax: fx.Node | None, payload: str) -> Pair:
    """``x`` as a payload, before ``at``."""
    node = typed(program, at, moec_ops.encode_rows.default, x, amax, payload, "rows")
    carrier, data = (_as(result(program, node, i), at) for i in range(2))
    return Pair(data, carrier)


def decode(program: Program, at: fx.Node, pair: Pair, amax: fx.Node | None, payload: str) -> fx.Node:
    """The values of a payload, before ``at``."""
    return typed(program, at, moec_ops.decode_rows.default, pair.data, pair.carrier, amax, payload, "rows")


def through(program: Program, move: fx.Node, pair: Pair, payload: str, gradients: str = "") -> Pair:
    """``move`` takes the payload.  ``gradients``: the payload that they come back as, where ranks exchange rows."""
    name, rows = op_name(move), rows_of(move)
    H = pair.carrier.meta["val"].shape[-1]
    move.args = (pair.data, *move.args[1:])
    for node in {move: None, rows: None}:
        val = node.meta["val"]
        several = isinstance(val, (tuple, list))
        data = _bytes(val[0] if several else val, H, payload)
        node.meta |= {"val": (data, *val[1:]) if several else data, "grad": False}
    last = rows
    if name in PERMUTES:
        row_of = next((u for u in move.users if u.args[1] == PERMUTES[name]), None)
        row_of = row_of or result(program, move, PERMUTES[name])
        rows.append(row_of)  # wherever it was taken: what follows may be before it
        kind, args, last = "rows", (row_of,), row_of
    elif name in STARTS:
        kind, (*args, size, group) = STARTS[name], move.args[1:]
        args = (*args, *([] if kind == "gather" else [gradients]), size, group)
    else:
        kind, args = LOCAL[name], move.args[1:]
    op = getattr(moec_ops, f"carry_{kind}").default
    carrier = _as(typed(program, last.next, op, pair.carrier, rows, *args), move)
    if "moves" in move.meta:  # what its gradient is expected to move
        carrier.meta["moves"] = move.meta["moves"]
    return Pair(rows, carrier)


def _bytes(val: torch.Tensor, H, payload: str) -> torch.Tensor:
    return resized(val, (*val.shape[:-1], width(H, payload))).to(torch.uint8)


def _as(made: fx.Node, like: fx.Node) -> fx.Node:
    made.meta["where"] = like.meta.get("where", "")
    return made
