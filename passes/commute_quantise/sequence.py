"""sequence: what sequence parallelism gathers for FP8 products travels as FP8 (part of ``commute_quantise``).

Legend: H hidden, W bytes a row.

A gather of rows, for each rank has some tokens of a sequence, is taken if FP8 products alone read it, through reshapes
that keep rows; else ``why_not`` says who else does.

1. Rows are rounded before the gather.  Of a recipe with one scale the largest magnitude over all ranks comes first, of
   the parts, or histories have it (``delayed``; of products whose histories differ the gather stays as it is).  Tiles
   of rows do not reach over ranks, so numbers and scales are what they were, to the bit.
2. The gather takes the bytes; gradients go the way back as wide as they are.
3. The other layout, which weight gradients read, is quantised from what has arrived.  With one scale, or with scales
   that are powers of two, rounding again changes nothing but numbers below a format's normal ones.  ``rowwise``, whose
   scales are no powers of two, stays as it is in training.
"""

from __future__ import annotations

import torch
from torch import fx

from moec.passes.commute_quantise.histories import SHAPES, history_of, is_delayed, learn, past_of
from moec.passes.commute_quantise.moves import Pair, encode, is_move, through
from moec.passes.commute_quantise.operands import as_operand, largest
from moec.passes.typed import sweep, typed
from moec.program import Program, op_name
from moec.runtime.fp8 import Recipe
from moec.runtime.torch_compat import resized

aten, moec_ops = torch.ops.aten, torch.ops.moec


def sequence(program: Program, recipe: Recipe) -> None:
    for start in list(program.graph.find_nodes(op="call_function", target=moec_ops.s_to_r.default)):
        (wait,) = start.users
        quantises, others = _readers(wait, recipe)
        if not quantises or not is_move(start, start.args[0]):
            continue
        if others:
            reason = f"{', '.join(sorted({op_name(u) for u in others}))} read it too"
        elif len({history_of(q) for q in quantises if is_delayed(q)}) > 1:
            reason = "products read it by histories of their own"
        elif recipe.shared == "vector" and program.training:
            reason = "each feature's scale, for weight gradients, is that of tokens before they are rounded"
        else:
            _commute(program, recipe, start, wait, quantises)
            continue
        program.why_not.append(f"{start.meta.get('where', '')}: its gather is not FP8: {reason}")


def _readers(value: fx.Node, recipe: Recipe) -> tuple[dict[fx.Node, list[fx.Node]], list[fx.Node]]:
    """``(quantise -> the reshapes before it, who else reads the value)``."""
    quantises: dict[fx.Node, list[fx.Node]] = {}
    others: list[fx.Node] = []
    todo: list[tuple[fx.Node, list[fx.Node]]] = [(value, [])]
    while todo:
        x, views = todo.pop()
        for user in x.users:
            if user.target is moec_ops.quantise.default and user.args[4:6] == (recipe.text(), "rows"):
                quantises[user] = views
            elif user.target is aten.reshape.default and user.meta["val"].shape[-1] == value.meta["val"].shape[-1]:
                todo.append((user, [*views, user]))
            elif op_name(user) not in ("moec.amax", SHAPES):  # whose maximum is of the parts now
                others.append(user)
    return quantises, others


def _commute(
    program: Program, recipe: Recipe, start: fx.Node, wait: fx.Node, quantises: dict[fx.Node, list[fx.Node]]
) -> None:
    x, first = start.args[0], next(iter(quantises))
    if is_delayed(first):  # 1
        amax = past_of(program, start, first, x)
        for of in dict.fromkeys(q.args[0] for q in quantises):
            learn(program, start, list(of.users), x)
    else:
        amax = largest(program, recipe, start, x) if recipe.shared == "tensor" else None
    pair = through(program, start, encode(program, start, x, amax, recipe.text()), recipe.text())  # 2
    made: dict[fx.Node, Pair] = {}
    for quantise, views in quantises.items():
        of = pair
        for view in views:
            if view not in made:
                made[view] = _reshaped(program, view, of)
            of = made[view]
        as_operand(quantise, of, amax)  # 3
    for view in made:
        sweep(view)


def _reshaped(program: Program, view: fx.Node, pair: Pair) -> Pair:
    """``view`` of both."""
    sizes, W, val = view.args[1], pair.data.meta["val"].shape[-1], view.meta["val"]
    as_bytes = resized(val, (*val.shape[:-1], W)).to(torch.uint8)
    data = typed(program, view, aten.reshape.default, pair.data, [*sizes[:-1], W], val=as_bytes)
    data.meta["grad"] = False
    return Pair(data, typed(program, view, aten.reshape.default, pair.carrier, list(sizes), val=val))
