"""Taking I→R conversions off the uses of a parameter, to be made once before all of them (by ``fsdp`` and ``lower``).

I→R is the identity forward and the sum of gradients backward.  Ops on one tensor alone (a transpose, a reshape, an exp)
do the same on every rank of an axis on which it is I, so whether gradients are summed behind them or before is one.
"""

from __future__ import annotations

import torch
from torch import fx

from moec.placement import I, R, Types
from moec.program import Program
from moec.runtime.collectives import TABLE, group_of

I_TO_R = TABLE["i_to_r"].op


def owed(node: fx.Node) -> set[str]:
    """The axes over which every use of ``node`` that has a gradient turns it from I to R, views and conversions of it
    looked through."""
    found: set[str] | None = None
    for user in node.users:
        if not user.meta.get("grad", True):
            continue
        axes = _owed_by(user, node)
        found = axes if found is None else found & axes
    return found or set()


def _owed_by(user: fx.Node, node: fx.Node) -> set[str]:
    if user.target is I_TO_R:
        return set(group_of(user).split(",")) | owed(user)
    if not _carries(user, node):
        return set()
    return {a for a in owed(user) if all(t[a] == I for t in _types_of(user))}


def _carries(user: fx.Node, node: fx.Node) -> bool:
    """Is ``user`` an op on ``node`` alone, so that I→R may as well come before it?"""
    tensors = [n for n in user.all_input_nodes if not isinstance(n.meta.get("val"), (int, torch.SymInt))]
    return user.op == "call_function" and tensors == [node] and user.meta.get("types") is not None and user.meta["grad"]


def _types_of(node: fx.Node) -> list[Types]:
    types = node.meta["types"]
    return types if isinstance(types, list) else [types]


def become_r(program: Program, node: fx.Node, axes: set[str]) -> None:
    """``node`` is R on ``axes`` (of those that ``owed`` found) from now on: the conversions behind it lose them."""
    if not axes:
        return
    for user in list(node.users):
        if not user.meta.get("grad", True):
            continue  # without a gradient I and R are one
        if user.target is not I_TO_R:
            types = [{a: R if a in axes else t for a, t in x.items()} for x in _types_of(user)]
            user.meta["types"] = types if isinstance(user.meta["types"], list) else types[0]
            become_r(program, user, axes)
            continue
        mine = set(group_of(user).split(","))
        user.meta["types"] = {a: R if a in axes else t for a, t in user.meta["types"].items()}
        if axes - mine:
            become_r(program, user, axes - mine)
        if rest := program.mesh.key(mine - axes):
            user.args = (node, user.args[1], program.mesh.size(rest), rest)
        else:
            user.replace_all_uses_with(node)
            program.graph.erase_node(user)
