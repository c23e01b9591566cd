"""What the recipe ``delayed`` scales by, and learns of, where a value travels in parts (part of ``commute_quantise``).

Scales are made from histories, which all ranks have, so parts are quantised as the whole would be and no maximum is
needed first.  What a step learns of a value is the largest magnitude of a rank's part: whoever runs the program takes
the maximum over all ranks in any case (``moec.delayed``).
"""

from __future__ import annotations

from torch import fx

from moec.passes.shard.rule import is_getitem
from moec.passes.typed import bring_before, typed
from moec.program import Program, op_name

SHAPES = "moec.past_amax"
"""Reads of a value nothing but its shape."""


def is_delayed(quantise: fx.Node) -> bool:
    """Are its scales made from a history?"""
    return quantise.args[1] is not None and op_name(quantise.args[1]) == SHAPES


def history_of(quantise: fx.Node) -> tuple[fx.Node, int]:
    """The buffer, and the row of it, that its scales are made from."""
    history, row, *_ = quantise.args[1].args
    if is_getitem(history):  # of moec::fan_max
        history = history.args[0].args[0]
    return history, row


def past_of(program: Program, at: fx.Node, quantise: fx.Node, part: fx.Node) -> fx.Node:
    """What scales of ``part`` are made from, before ``at``: what those of the whole were to be made from."""
    history, row, _, recipe, role = quantise.args[1].args
    bring_before([history], at)
    made = typed(program, at, quantise.args[1].target, history, row, part, recipe, role)
    made.meta["grad"] = False
    return made


def learn(program: Program, at: fx.Node, readers: list[fx.Node], part: fx.Node) -> None:
    """Of ``readers`` of a value, those that learn how large it is do so of ``part``, all of it, before ``at``."""
    made: dict[tuple, fx.Node] = {}
    for amax in [n for n in readers if op_name(n) == "moec.amax"]:
        if any(op_name(user) == "moec.note_amax" for user in amax.users):
            how = (None, *amax.args[2:])
            if how not in made:
                made[how] = typed(program, at, amax.target, part, *how)
                made[how].meta["grad"] = False
            amax.replace_all_uses_with(made[how])
            amax.graph.erase_node(amax)
