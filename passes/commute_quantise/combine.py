"""combine: results travel back as a payload, and their gradients to the experts (part of ``commute_quantise``).

1. Rows are rounded where the experts leave them, before they are sorted and sent; a pending sum over ranks is refused.
2. Every move on the way home takes the payload.  In the backward a row's gradient is rounded once, where it sets out to
   the expert (``Recipe.gradients``), and travels as a payload too.
3. The weighted sum at home reads the values that have arrived.
"""

from __future__ import annotations

import torch
from torch import fx

from moec.passes.commute_quantise.moves import STARTS, Pair, decode, encode, moved_by, through
from moec.passes.typed import typed
from moec.program import Program, op_name
from moec.runtime.errors import MoecError
from moec.runtime.fp8.payload import BF16

moec_ops = torch.ops.moec
HOME = ("moec.sort_chunks", "moec.swap_chunks", "moec.all_to_all", "moec.all_to_all_equal")
"""Moves on the way home."""


def combine(program: Program, payload: str) -> None:
    for node in program.graph.find_nodes(op="call_function", target=moec_ops.unpermute.default):
        _region(program, node, payload)


def _region(program: Program, unpermute: fx.Node, payload: str) -> None:
    rows: fx.Node = unpermute.args[0]
    moves: list[fx.Node] = []
    while len(rows.users) == 1 and (move := moved_by(rows)) is not None and op_name(move) in HOME:
        moves.insert(0, move)
        rows = move.args[0]
    if payload == BF16 and rows.meta["val"].dtype == torch.bfloat16:
        return  # they are as narrow already
    if pending := [a for a, t in (rows.meta.get("types") or {}).items() if t.kind == "P"]:
        raise MoecError(
            f"results are pending sums over {', '.join(pending)}, which cannot be rounded before they are added",
            where=unpermute.meta.get("where", ""),
            way_out="a plan with etp=1, or Precision(combine=None)",
        )
    pair = encode(program, moves[0] if moves else unpermute, rows, None, payload)  # 1
    for move in moves:  # 2
        pair = through(program, move, pair, payload, payload)
    if not any(op_name(m) in STARTS for m in moves):
        home = typed(program, unpermute, moec_ops.carry_home.default, pair.carrier, pair.data, payload)
        pair = Pair(pair.data, home)
    value = decode(program, unpermute, pair, None, payload)  # 3
    unpermute.args = (value, *unpermute.args[1:])
