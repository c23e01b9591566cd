"""fuse_permute: what is added to the weighted sum of a token's rows is added where the sum is formed.

Contract
    requires   sharded
    provides   fused_permute: no ``moec.unpermute`` is followed by nothing but additions
    preserves  values, to the bit: sums are rounded where the ops that go rounded them
    never      moves a collective, or an addition across one

Why: a residual stream, and the output of a shared expert, are added to the result of every MoE block; by itself each
addition reads and writes [T, H] once more.

Algorithm, for each ``moec.unpermute``:
    1. Follow its only reader as long as that is a reshape, or an addition (of one more value of the same shape, dtype
       and types).
    2. What was added becomes an operand, reshaped to [T, H]; the result gets the shape of the last addition.
"""

from __future__ import annotations

import torch
from torch import fx

from moec.passes.contract import Pass, PassContract
from moec.passes.typed import sweep, typed
from moec.plan import Plan
from moec.program import Program

aten, moec_ops = torch.ops.aten, torch.ops.moec


def _run(program: Program, plan: Plan) -> Program:
    for node in program.graph.find_nodes(op="call_function", target=moec_ops.unpermute.default):
        _join(program, node)
    program.graph.lint()
    program.module.recompile()
    return program


def _join(program: Program, unpermute: fx.Node) -> None:
    addends, last, shaped = _added(program, unpermute)  # 1
    if not addends:
        return
    H = unpermute.meta["val"].shape[1]
    flat = [x if x.meta["val"].ndim == 2 else typed(program, last, aten.reshape.default, x, [-1, H]) for x in addends]
    y = typed(program, last, moec_ops.unpermute_add.default, flat, *unpermute.args, val=unpermute.meta["val"])  # 2
    y.meta["where"] = unpermute.meta.get("where", "")
    if shaped is not None:
        y = typed(program, last, aten.reshape.default, y, *shaped.args[1:], val=last.meta["val"])
    y.meta["types"] = last.meta["types"]
    last.replace_all_uses_with(y)
    sweep(last)


def _added(program: Program, unpermute: fx.Node) -> tuple[list[fx.Node], fx.Node, fx.Node | None]:
    """What is added in turn, the last addition, and the reshape before it, if there is one."""
    addends: list[fx.Node] = []
    last, last_shaped = unpermute, None
    node, shaped = unpermute, None
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is aten.reshape.default:
            shaped = user
        elif user.target is aten.add.Tensor:
            other = user.args[1] if user.args[0] is node else user.args[0]
            if (why := _unlike(user, node, other)) is not None:
                where = unpermute.meta.get("where", "")
                program.why_not.append(f"{where}: an addition stays behind the experts: {why}")
                break
            addends.append(other)
            last, last_shaped = user, shaped
        else:
            break
        node = user
    return addends, last, last_shaped


def _unlike(add: fx.Node, node: fx.Node, other: object) -> str | None:
    if not isinstance(other, fx.Node) or other is node or add.kwargs.get("alpha", 1) != 1:
        return "it adds a number, or a multiple"
    mine, theirs = node.meta["val"], other.meta["val"]
    if mine.dtype != theirs.dtype or tuple(map(str, mine.shape)) != tuple(map(str, theirs.shape)):
        return f"{theirs.dtype}{list(theirs.shape)} is added to {mine.dtype}{list(mine.shape)}"
    if other.meta["grad"] and any(t != node.meta["types"][a] for a, t in other.meta["types"].items()):
        return "what is added lies otherwise on the ranks"
    return None


CONTRACT = PassContract(
    name="fuse_permute",
    requires=frozenset({"sharded"}),
    provides=frozenset({"fused_permute"}),
    conflicts_with=frozenset({"fused_permute", "lowered"}),
)
fuse_permute = Pass(CONTRACT, _run, applies=lambda plan: plan.fuse)
