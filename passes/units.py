"""units: the parameters of a layer are gathered by one collective, and their gradients reduced by one.

Contract
    requires   fsdp
    provides   units
    preserves  values, bit for bit: the same elements go the same way, together
    never      touches a collective of activations

Algorithm
    1. A unit is a layer: parameters whose names agree up to their first number (``model.layers.3``).  What belongs to
       no layer goes with the first layer if it is gathered before that (an embedding); what is gathered behind a layer
       (norm and head) makes a unit of its own.
    2. Gathers of a unit over the same ranks, of the same dtype, with gradients or without, become
       pack → gather → unpack at the place of the first of them.  Padding of uneven parts is cut off behind, as before.
       Of narrow copies the masters, whose the gradients are, are packed too, without their values.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict

import torch
from torch import fx

from moec.passes.contract import Pass, PassContract
from moec.placement import S, Types, V, local_shape
from moec.plan import Plan
from moec.program import Program
from moec.runtime.collectives import LOW_GATHER, TABLE, collective, group_of
from moec.runtime.ops.pack import flatten_shapes
from moec.runtime.torch_compat import WAIT

pack, unpack = torch.ops.moec.pack.default, torch.ops.moec.unpack.default
pack_empty, GATHER_LOW = torch.ops.moec.pack_empty.default, TABLE[LOW_GATHER].op


def _run(program: Program, plan: Plan) -> Program:
    buckets: dict[tuple, list[fx.Node]] = defaultdict(list)
    starts = gather_starts(program)
    for start, unit in zip(starts, unit_names(program, starts), strict=True):  # 1
        of = start.meta["val"].dtype, start.meta["grad"]
        buckets[unit, start.target, group_of(start), *of].append(start)
    for bucket in buckets.values():
        if len(bucket) > 1:
            _join(program, bucket)  # 2
    program.graph.lint()
    program.module.recompile()
    return program


def unit_names(program: Program, starts: list[fx.Node]) -> list[str]:
    """The unit of each gather, by name."""
    layers = [_layer(program.params[p.name].name) for s in starts if (p := parameter_of(s)) is not None]
    out, last = [], ""  # the last layer so far
    for layer in layers:
        last = layer or last
        out.append(layer or (f"behind {last}" if last else next(filter(None, layers), "")))
    return out


def gather_starts(program: Program) -> list[fx.Node]:
    """Gathers of parameters, in graph order."""
    return [
        n
        for n in program.graph.nodes
        if (c := collective(n.target)) is not None and c.primitive == "all_gather" and parameter_of(n) is not None
    ]


def parameter_of(start: fx.Node) -> fx.Node | None:
    """The placeholder whose shard a collective gathers, seen through the conversion that owes its reduction."""
    node = start.args[1] if start.target is GATHER_LOW else start.args[0]
    if (c := collective(node.target)) is not None and c.kind == "i_to_r":
        node = node.args[0]
    return node if node.op == "placeholder" and "gathered" in behind(start).meta else None


def behind(start: fx.Node) -> fx.Node:
    """The value that stands for the gathered parameter: the wait, or what cuts off padding behind it."""
    node = next(iter(start.users))
    while "gathered" not in node.meta and node.users:
        node = next(iter(node.users))
    return node


def _layer(name: str) -> str:
    found = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
    return found.group() if found else ""


def _join(program: Program, starts: list[fx.Node]) -> None:
    graph, first = program.graph, starts[0]
    sources, masters = [s.args[0] for s in starts], [s.args[1] for s in starts if s.target is GATHER_LOW]
    dims, size, group = [s.args[-3] for s in starts], first.args[-2], group_of(first)
    for source in (*sources, *masters):
        if source.op != "placeholder":
            first.prepend(source)
    where, grad = first.meta["where"], first.meta["grad"]

    def call(target, args: tuple, val, types, grad: bool = grad) -> fx.Node:
        out = graph.call_function(target, args)
        out.meta.update(val=val, types=types, where=where, grad=grad)
        return out

    axes = group.split(",")
    types = packed_types([s.meta["types"] for s in sources], axes)
    waits = [next(iter(s.users)) for s in starts]
    # Of the recorded shapes, that of one rank is what the collective moves.
    shapes = [local_shape(w.meta["val"].shape, w.meta["types"], program.mesh) for w in waits]
    elements = sum(torch.Size(s).numel() for s in shapes)
    val = waits[0].meta["val"].new_empty((elements,))
    with graph.inserting_before(first):
        flat = [call(pack, (sources, 1, dims), val, types, grad and not masters)]
        if masters:
            wide = val.to(masters[0].meta["val"].dtype)
            flat.append(call(pack_empty, (masters, 1, dims), wide, types))
        whole = {**types, **{a: first.meta["types"][a] for a in axes}}
        started = call(first.target, (*flat, 0, size, group), val, whole)
        done = call(WAIT, (started,), val, whole)
        args = (done, size, dims, flatten_shapes(shapes))
        parts = call(unpack, args, [w.meta["val"] for w in waits], [w.meta["types"] for w in waits])
        for i, wait in enumerate(waits):
            part = call(operator.getitem, (parts, i), wait.meta["val"], wait.meta["types"])
            part.meta.update({k: wait.meta[k] for k in ("gathered", "where") if k in wait.meta})
            wait.replace_all_uses_with(part)
    for start, wait in zip(starts, waits, strict=True):
        graph.erase_node(wait)
        graph.erase_node(start)


def packed_types(sources: list[Types], gathered: list[str]) -> Types:
    """Types of ``pack`` of shards that a collective over the axes ``gathered`` makes whole: sharded on them; on other
    axes what all sources are, or each rank's own where some are sharded."""
    out: Types = {}
    for a in sources[0]:
        kinds = {t[a] for t in sources}
        out[a] = S(0) if a in gathered else kinds.pop() if len(kinds) == 1 and not next(iter(kinds)).sharded else V
    return out


CONTRACT = PassContract(
    name="units",
    requires=frozenset({"fsdp"}),
    provides=frozenset({"units"}),
    conflicts_with=frozenset({"units", "lowered"}),
)
units = Pass(CONTRACT, _run, applies=lambda plan: plan.fsdp_degree > 1)
__all__ = ["CONTRACT", "behind", "gather_starts", "packed_types", "parameter_of", "unit_names", "units"]
