"""fuse_tp: gathers of the shared sequence become one op with the products that read them, products one with the
reduce-scatter behind them.

Contract
    requires   sharded
    provides   fused_tp
    preserves  values, forward and backward (sums are added in another order, a bias to what is rounded already)
    never      touches what experts read, a collective of parameters, or products in FP8

``moec.gather_linear`` and ``moec.linear_scatter`` (``runtime/ops/gather_linear.py``) run their transfer beside their
products by themselves: on GPUs that read each other's memory.  Each is the other's derivative, so that the backward has
them too.  Whether a plan has this pass, ``parallelize`` finds out (``Overlap.symmetric_memory``).

Algorithm
    1. The sites: all-gathers and reduce-scatters of activations over axes of tp, with a ``linear`` beside them (a view
       that merges the dims before the last between).
    2. A gather whose readers are all products is computed with them: one op, before the first of them.  A bias is
       added, and the view taken, behind it.
    3. A product that only the reduce-scatter reads is computed with it, the view being taken of its operand.
    4. What stays as it is, stands in ``why_not``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moec.passes.contract import Pass, PassContract
from moec.passes.typed import bring_before, result, sweep, typed
from moec.placement import local_shape
from moec.plan import Plan
from moec.program import Program, op_name
from moec.runtime.collectives import TABLE, collective, group_of
from moec.runtime.torch_compat import expr, resized

aten = torch.ops.aten
LINEAR, VIEW = aten.linear.default, aten.reshape.default
GATHER, SCATTER = TABLE["gather_linear"].op, TABLE["linear_scatter"].op


@dataclass(frozen=True)
class _Product:
    """A ``linear``, and the view between it and its transfer."""

    linear: fx.Node
    view: fx.Node | None

    @property
    def weight(self) -> fx.Node:
        return self.linear.args[1]

    @property
    def bias(self) -> fx.Node | None:
        return self.linear.args[2] if len(self.linear.args) > 2 else None


def _run(program: Program, plan: Plan) -> Program:
    for start in list(program.graph.nodes):
        if not _is_site(program, start):  # 1
            continue
        gathers = collective(start.target).kind == "s_to_r"  # type: ignore[union-attr]
        reason = _with_readers(program, start) if gathers else _with_source(program, start)
        if reason:
            where = start.meta.get("where") or start.name
            program.why_not.append(f"{where}: {op_name(start)} is not one op with its products: {reason}")  # 4
    program.graph.lint()
    program.module.recompile()
    return program


def _is_site(program: Program, node: fx.Node) -> bool:
    entry = collective(node.target)
    if entry is None or entry.kind not in ("s_to_r", "p_to_s"):
        return False
    if not set(group_of(node).split(",")) <= set(program.mesh.role("tp")):
        return False
    shape = node.meta["val"].shape
    return node.args[1] < len(shape) - 1 and bool(expr(shape[0]).free_symbols)  # parameters have fixed sizes


def _merges(node: fx.Node) -> bool:
    """Is it a view in which dims before the last one are one?"""
    if node.target is not VIEW:
        return False
    before, after = (n.meta["val"].shape for n in (node.args[0], node))
    return len(after) == 2 and bool(expr(before[-1]) == expr(after[-1]))


# -- a gather


def _with_readers(program: Program, start: fx.Node) -> str | None:  # 2
    """None when done, or where there is nothing to do; else why not."""
    (wait,) = start.users
    found: list[_Product] = []
    others: list[fx.Node] = []
    for user in wait.users:
        for reader in user.users if _merges(user) else (user,):
            if reader.target is LINEAR and reader.args[0] in (wait, user):
                found.append(_Product(reader, user if user is not reader else None))
            else:
                others.append(reader)
    if others:
        return f"{op_name(others[0])} reads it as well" if found else _in_fp8(others)
    if not found:
        return None
    order = {n: i for i, n in enumerate(program.graph.nodes)}
    found.sort(key=lambda p: order[p.linear])
    columns = [_local(program, p.weight)[0] for p in found]
    first = found[0].linear
    if not bring_before([p.weight for p in found], first):
        return "a weight of it is known only behind its first product"
    whole = wait.meta["val"]
    vals = [whole, *(resized(whole, [*whole.shape[:-1], p.weight.meta["val"].shape[0]]) for p in found)]
    weights = [p.weight for p in found]
    made = typed(program, first, GATHER, start.args[0], weights, *start.args[1:], val=vals)
    for i, (p, n) in enumerate(zip(found, columns, strict=True), 1):
        y = result(program, made, i)
        if p.view is not None:
            y = typed(program, p.linear, VIEW, y, [*_lead(p.view), n], val=p.linear.meta["val"])
        if p.bias is not None:
            y = typed(program, p.linear, aten.add.Tensor, y, p.bias, val=p.linear.meta["val"])
        p.linear.replace_all_uses_with(y)
        sweep(p.linear)
    _erase(start, wait)
    return None


def _in_fp8(readers: list[fx.Node]) -> str | None:
    return "its products are in FP8" if any("fp8" in op_name(u) for r in readers for u in _beyond(r)) else None


def _beyond(node: fx.Node) -> list[fx.Node]:
    """What reads a quantised value."""
    return [u for item in node.users for u in (item, *item.users)]


# -- a reduce-scatter


def _with_source(program: Program, start: fx.Node) -> str | None:  # 3
    """None when done, or where there is nothing to do; else why not."""
    (wait,) = start.users
    source = start.args[0]
    split = source.target is VIEW and source.args[0].target is LINEAR
    p = _Product(*((source.args[0], source) if split else (source, None)))
    if p.linear.target is not LINEAR:
        return "its product is in FP8" if "fp8" in op_name(p.linear) else None
    if p.bias is not None or any(len(n.users) > 1 for n in (p.linear, source)):
        return "its product has a bias, or is read elsewhere"
    x = p.linear.args[0]
    if p.view is not None:
        shape = p.view.meta["val"].shape
        if expr(shape[-1]) != expr(p.linear.meta["val"].shape[-1]):
            return "its product is viewed with other columns"
        val = resized(x.meta["val"], [*shape[:-1], x.meta["val"].shape[-1]])
        x = typed(program, start, VIEW, x, [*_lead(p.view), _local(program, x)[-1]], val=val)
    made = typed(program, start, SCATTER, x, p.weight, *start.args[1:], val=start.meta["val"])
    wait.replace_all_uses_with(made)
    _erase(start, wait)
    sweep(source)
    return None


# -- both


def _lead(view: fx.Node) -> list[Any]:
    """The sizes that a view is given, but for the columns."""
    return list(view.args[1])[:-1]


def _local(program: Program, node: Any) -> tuple[int, ...]:
    return local_shape(tuple(node.meta["val"].shape), node.meta["types"], program.mesh)


def _erase(start: fx.Node, wait: fx.Node) -> None:
    for view in list(wait.users):
        sweep(view)
    wait.graph.erase_node(wait)
    start.graph.erase_node(start)


CONTRACT = PassContract(
    name="fuse_tp",
    requires=frozenset({"sharded"}),
    provides=frozenset({"fused_tp"}),
    conflicts_with=frozenset({"fused_tp", "lowered"}),
)
fuse_tp = Pass(
    CONTRACT,
    _run,
    applies=lambda plan: (
        plan.overlap is not None and plan.overlap.symmetric_memory is True and plan.sequence_parallel and plan.tp > 1
    ),
)
