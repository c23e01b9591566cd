"""fuse_cross_entropy: what a loss takes of the logits is taken in one read, and their gradient made in one write.

Contract
    requires   sharded: losses are spelled as ``losses`` and ``shard/vocab`` leave them
    provides   fused_cross_entropy
    preserves  values: rows are widened to fp32 as the model widens them, without a copy [N, V] of them
    never      moves a collective

Algorithm
    1. ``aten.cross_entropy_loss`` of [N, V] and class indices, whatever its reduction: ``moec.cross_entropy``, in fp32,
       its loss cast to the dtype that it had.
    2. A vocabulary in parts: ``moec.blocked_logsumexp`` and ``moec.pick`` of one number a row, and the sum of the row
       where labels are smoothed, all of the same logits: ``moec.logsumexp_pick``.  What is reduced between ranks, and
       all that follows, stays.
    3. Logits that the model widened (``logits.float()``), through reshapes and slices: the narrow ones are read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from moec.passes.contract import Pass, PassContract
from moec.passes.typed import bring_before, dtype_of, result, sweep, typed
from moec.plan import Plan
from moec.program import Program

aten, moec_ops = torch.ops.aten, torch.ops.moec
NARROW = (torch.bfloat16, torch.float16)
VIEWS = (aten.reshape.default, aten.slice.Tensor, aten.clone.default)


def _run(program: Program, plan: Plan) -> Program:
    for node in program.graph.find_nodes(op="call_function", target=aten.cross_entropy_loss.default):
        _note(program, node, _whole(program, node))
    for node in program.graph.find_nodes(op="call_function", target=moec_ops.blocked_logsumexp.default):
        _note(program, node, _in_parts(program, node))
    program.graph.lint()
    program.module.recompile()
    return program


def _note(program: Program, node: fx.Node, reason: str | None) -> None:
    if reason is not None:
        program.why_not.append(f"{node.meta.get('where') or 'the loss'}: cross entropy is not fused: {reason}")


# -- 1


def _whole(program: Program, node: fx.Node) -> str | None:
    names = ("weight", "reduction", "ignore_index", "label_smoothing")
    given: dict[str, Any] = {"weight": None, "reduction": 1, "ignore_index": -100, "label_smoothing": 0.0}
    given |= dict(zip(names, node.args[2:], strict=False)) | dict(node.kwargs)
    x, target = node.args[:2]
    if x.meta["val"].ndim != 2:
        return f"its classes are dim 1 of {x.meta['val'].ndim}"
    if target.meta["val"].dtype.is_floating_point:
        return "its targets are probabilities"
    if given["weight"] is not None:
        return "its classes have weights"
    narrow = _narrow(program, node, x)
    args = (given["ignore_index"], given["label_smoothing"], given["reduction"])
    both = typed(program, node, moec_ops.cross_entropy.default, narrow or x, target, *args)
    loss = result(program, both, 0)
    if dtype_of(loss) != dtype_of(node):
        loss = typed(program, node, aten._to_copy.default, loss, dtype=dtype_of(node))
    node.replace_all_uses_with(loss)
    sweep(node)
    return None


# -- 2


def _in_parts(program: Program, lse: fx.Node) -> str | None:
    x, blocks = lse.args
    picks = [n for n in x.users if n.target is moec_ops.pick.default and n.args[0] is x]
    picks = [n for n in picks if isinstance(size := n.args[2].meta["val"].shape[-1], int) and size == 1]
    if not picks:
        return "its logits are normalised, and not only picked from"
    pick = picks[0]
    _, vocab, ids = pick.args
    first = min(lse, pick, key=list(lse.graph.nodes).index)
    if not bring_before([vocab, ids], first):
        return "its labels are known only behind the logits' sum"
    total = _total(x)
    narrow = _narrow(program, first, x)
    source = narrow or x
    lead = x.meta["val"].shape[:-1]
    vals = (
        lse.meta["val"],
        pick.meta["val"].new_empty(pick.meta["val"].shape, dtype=dtype_of(source)),
        lse.meta["val"].new_empty(lead),
    )
    joined = typed(program, first, moec_ops.logsumexp_pick.default, source, vocab, ids, blocks, val=vals)
    for i, node in enumerate((lse, pick, total)):
        if node is not None:
            value = result(program, joined, i)
            if dtype_of(value) != dtype_of(node):
                value = typed(program, node, aten._to_copy.default, value, dtype=dtype_of(node))
            node.replace_all_uses_with(value)
    for node in (total, pick, lse):
        if node is not None:
            sweep(node)
    return None


def _total(x: fx.Node) -> fx.Node | None:
    """The sum of every row, of ``x`` or of it widened."""
    for y in (x, *(n for n in x.users if n.target is aten._to_copy.default)):
        for node in y.users:
            if node.target is aten.sum.dim_IntList and node.args[1] in ([-1], [y.meta["val"].ndim - 1]):
                if len(node.args) == 2 and not node.kwargs and dtype_of(node) in (torch.float32, torch.float64):
                    return node
    return None


# -- 3


def _narrow(program: Program, at: fx.Node, x: fx.Node) -> fx.Node | None:
    """``x`` before it was widened to fp32; None where it was not."""
    if x.target is aten._to_copy.default:
        source = x.args[0]
        only = set(x.kwargs) == {"dtype"} and dtype_of(x) == torch.float32
        return source if only and dtype_of(source) in NARROW else None
    if x.target not in VIEWS or (source := _narrow(program, at, x.args[0])) is None:
        return None
    val = x.meta["val"]
    with val.fake_mode:
        val = val.to(dtype_of(source))
    view = typed(program, at, x.target, source, *x.args[1:], val=val, **x.kwargs)
    view.meta["types"] = x.meta["types"]
    return view


CONTRACT = PassContract(
    name="fuse_cross_entropy",
    requires=frozenset({"sharded"}),
    provides=frozenset({"fused_cross_entropy"}),
    conflicts_with=frozenset({"fused_cross_entropy", "lowered"}),
)
fuse_cross_entropy = Pass(CONTRACT, _run, applies=lambda plan: plan.fuse)
