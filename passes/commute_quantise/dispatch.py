"""dispatch: tokens travel to their experts as a payload (part of ``commute_quantise``).

Legend: T tokens, N rows, H hidden.

1. Tokens are rounded where a permute, or slots, take them; where ranks gather tokens for the permute alone (the
   dispatcher ``allgather``), before the gather.  The one scale of ``current`` needs the largest magnitude over all
   ranks first; tokens in chunks are refused then: it would be known when the last chunk is.  That of ``delayed`` is
   made from the history of the experts' first products, which is the same on all ranks: of the first of them in the
   graph, as their operand's is (``cast_fp8``).  Each of them learns the largest magnitude of the tokens as they were
   before they were rounded, those that no expert takes among them: of what arrives nothing is larger than the scale
   can say.  Tokens that no FP8 product reads as they arrive have no history, and are refused.
2. Every move on the way to the experts takes the payload: bytes forward; gradients come back as wide as they are.
3. Where rows arrive, an FP8 product's operand of the same recipe is what has arrived (``decode_operand``); whatever
   else reads them reads the values that it means (``decode_rows``).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from moec.passes.commute_quantise.histories import is_delayed, learn, past_of
from moec.passes.commute_quantise.moves import PERMUTES, Pair, decode, encode, is_move, moved_by, rows_of, through
from moec.passes.commute_quantise.operands import as_operand, largest
from moec.program import Program, op_name
from moec.runtime.errors import MoecError
from moec.runtime.fp8 import Recipe
from moec.runtime.fp8.payload import BF16

moec_ops = torch.ops.moec
SIZES = ("aten.sym_size", "moec.equal_counts")
"""What reads of rows how many they are."""


def dispatch(program: Program, payload: str) -> None:
    made = _Dispatch(program, payload)
    for node in list(program.graph.nodes):
        if op_name(node) in PERMUTES and node.args[0].meta["val"].dtype.is_floating_point:
            made.region(node)


class _Dispatch:
    def __init__(self, program: Program, payload: str) -> None:
        self.program, self.payload = program, payload
        self.recipe = None if payload == BF16 else Recipe.parse(payload)
        self.sources: dict[fx.Node, tuple[Pair, fx.Node | None]] = {}
        """Tokens -> the payload, and what its one scale is made from."""

    # -- 1

    def region(self, permute: fx.Node) -> None:
        move = permute
        while len(move.args[0].users) == 1 and (before := moved_by(move.args[0])) is not None:
            move = before
        x = move.args[0]
        if self.payload == BF16 and x.meta["val"].dtype == torch.bfloat16:
            return  # they are as narrow already
        if self.recipe is not None and self.recipe.name == "delayed":  # each block by its own history
            amax = self._past(move, x)
            self._follow(move, encode(self.program, move, x, amax, self.payload), amax)
            return
        if x not in self.sources:
            amax = self._amax(move, x)
            self.sources[x] = encode(self.program, move, x, amax, self.payload), amax
        self._follow(move, *self.sources[x])

    def _past(self, move: fx.Node, x: fx.Node) -> fx.Node:
        """What histories make the scale from; they learn of ``x``."""
        readers = list(_arrived(move))
        first = next((u for u in readers if self._is_operand(u) and is_delayed(u)), None)
        if first is None:
            raise MoecError(
                f"a payload of {self.payload} is scaled by the history of an FP8 product, and none reads these tokens "
                "as they arrive",
                where=move.meta.get("where", ""),
                way_out="the experts out of Precision.exclude, another recipe, or Precision(dispatch='bf16')",
            )
        amax = past_of(self.program, move, first, x)
        learn(self.program, move, readers, x)
        return amax

    def _is_operand(self, node: fx.Node) -> bool:
        return node.target is moec_ops.quantise.default and node.args[4] == self.payload

    def _amax(self, at: fx.Node, x: fx.Node) -> fx.Node | None:
        if self.recipe is None or self.recipe.shared != "tensor":
            return None
        if "chunk" in at.meta:
            raise MoecError(
                f"a payload of {self.recipe.name} scales all tokens together, and Overlap(chunks=…) sends them in "
                "parts",
                where=at.meta.get("where", ""),
                way_out="blockwise or mxfp8, Overlap(chunks=1), or Precision(dispatch=None)",
            )
        return largest(self.program, self.recipe, at, x)

    # -- 2

    def _follow(self, move: fx.Node, pair: Pair, amax: fx.Node | None) -> None:
        pair = through(self.program, move, pair, self.payload)
        readers = [u for u in pair.data.users if u is not pair.carrier and op_name(u) not in SIZES]
        for user in readers:
            if is_move(user, pair.data):
                self._follow(user, pair, amax)
        self._read(pair, amax, [u for u in readers if not is_move(u, pair.data)])

    # -- 3

    def _read(self, pair: Pair, amax: fx.Node | None, readers: list[fx.Node]) -> None:
        for user in readers:
            if self._is_operand(user):
                as_operand(user, pair, amax)
        # A maximum that nobody needs any more is gone.
        if others := [u for u in pair.data.users if u in readers and u.target is not moec_ops.decode_operand.default]:
            first = min(others, key=list(self.program.graph.nodes).index)
            value = decode(self.program, first, pair, amax, self.payload)
            for user in others:
                user.replace_input_with(pair.data, value)


def _arrived(move: fx.Node) -> Iterator[fx.Node]:
    """Who reads the rows of ``move`` when no move takes them on."""
    rows = rows_of(move)
    for user in rows.users:
        if is_move(user, rows):
            yield from _arrived(user)
        else:
            yield user
