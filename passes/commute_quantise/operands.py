"""Operands of FP8 products that have travelled as payloads (part of ``commute_quantise``)."""

from __future__ import annotations

import torch
from torch import fx

from moec.passes.cast_fp8 import Cast
from moec.passes.commute_quantise.moves import Pair
from moec.passes.typed import typed
from moec.program import Program, op_name
from moec.runtime.collectives import is_start, is_wait
from moec.runtime.fp8 import Recipe

moec_ops = torch.ops.moec


def largest(program: Program, recipe: Recipe, at: fx.Node, x: fx.Node) -> fx.Node:
    """The largest magnitude of ``x`` over all ranks, before ``at``: of a recipe with one scale."""
    found = Cast(program, recipe).amax(at, x, "rows", None, False)
    if found is None:  # this rank has all of it
        found = typed(program, at, moec_ops.amax.default, x, None, recipe.text(), "rows", False)
        found.meta["grad"] = False
    return found


def as_operand(quantise: fx.Node, pair: Pair, amax: fx.Node | None) -> None:
    """``quantise`` becomes ``decode_operand`` of what has travelled.  A maximum that nobody needs any more is gone."""
    _, given, given_T, counts, recipe, _, both = quantise.args
    if amax is not None and both:  # one scale for both layouts
        given_T = amax
    quantise.target = moec_ops.decode_operand.default
    quantise.args = (pair.data, pair.carrier, amax, given_T, counts, recipe, both)
    if given is not None:
        erase_maximum(given)


def erase_maximum(node: fx.Node) -> None:
    """``node``, a maximum, and what it alone reads, if nobody reads it: what is not needed is not communicated."""
    if node.users or node.op != "call_function":
        return
    read = dict.fromkeys(node.all_input_nodes)
    node.graph.erase_node(node)
    for source in read:
        if is_wait(node.target) or is_start(source.target) or op_name(source) == "moec.amax":
            erase_maximum(source)
