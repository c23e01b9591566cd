"""Types, derived again: from the placeholders' placements and the collectives alone, without looking at what the
sharding pass recorded; then the two must agree.

Every op is asked, on every axis, what the factor rules say of the operands *as they are*.  An op that would need a
conversion (its target types differ from the actual ones) is ill typed: a collective is missing.  A collective must be
fed the type that it converts from.
"""

from __future__ import annotations

import torch
from torch import fx

from moec.passes.chunks.types import blocks_of, chunk_types
from moec.passes.shard.convert import dealt_blocks
from moec.passes.shard.rule import Rule, differentiable, is_getitem, operands
from moec.passes.shard.rules import is_creation, rule_for
from moec.passes.shard.solve import Operand, solve
from moec.passes.units import packed_types
from moec.passes.verify.dialect import derive_dialect, meaning, on_axes
from moec.passes.verify.fp8 import FP8, derive_fp8
from moec.passes.verify.payload import PAYLOADS, check_pairs, derive_payload
from moec.placement import I, R, S, Type, Types, V, show
from moec.program import Program, op_name
from moec.runtime.collectives import (
    CARRY_PARAMETERS,
    CONVERSIONS,
    FUSED,
    LOW_GATHER,
    MAXIMA,
    TABLE,
    collective,
    group_of,
    is_wait,
)
from moec.runtime.errors import MoecError

BY_THE_TABLE = {
    "moec.boundary", "moec.lookup", "moec.pick", "moec.blocked_logsumexp", "moec.route", "moec.drop",
    "moec.balance", "moec.inject", "moec.tally", "moec.route_counted", "moec.logsumexp_pick", "moec.cross_entropy",
    "moec.rms_norm",
}  # fmt: skip
"""Ops of ours that are no expert dialect: their factor rules say all."""

def check_types(program: Program) -> None:
    if not program.mesh.names:
        return
    derived: dict[fx.Node, Types | list[Types]] = {}
    for node in program.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            derived[node] = node.meta["types"]
            if node.op == "placeholder" and node.name in program.params:
                _check_param(program, node)
        elif node.op == "call_function" and node.meta.get("types") is not None:
            derived[node] = derive(program, node, derived)
            _agree(node, derived[node], node.meta["types"])
        elif node.op == "output":
            counted = {s.index for s in program.statistics.values()}
            for value in (v for i, v in enumerate(node.args[0]) if i not in counted):
                for axis, t in value.meta["types"].items():
                    if t.kind == "P":
                        raise MoecError(
                            f"output {value.name} is a pending sum over {axis}", where=value.meta.get("where", "")
                        )


def _check_param(program: Program, node: fx.Node) -> None:
    """A stored parameter is I or S; R means that its reduction is owed by the epilogue, and must be registered."""
    owed = set(program.grad_reductions.get(node.name, "").split(","))
    for axis, t in node.meta["types"].items():
        stored = program.params[node.name].types.get(axis, I)
        expected = R if axis in owed else stored
        if t != expected:
            raise MoecError(
                f"parameter {program.params[node.name].name} is {t} on {axis}, stored as {stored}, "
                f"reduced over {sorted(owed - {''})}",
                where="program",
            )


def derive(program: Program, node: fx.Node, derived) -> Types | list[Types]:
    """The types of what ``node`` yields, from those of its operands.  Raises MoecError where it is ill typed."""
    if is_getitem(node):
        return derived[node.args[0]][node.args[1]]
    if is_wait(node.target):
        return derived[node.args[0]]
    entry, name = collective(node.target), meaning(node)
    if entry is not None and entry.kind == LOW_GATHER:
        return _gather_low(program, node, derived, entry)
    if entry is not None and entry.kind == CARRY_PARAMETERS:
        masters, dims = node.args[:2]
        return [_convert(program, node, derived[m], entry, m, d) for m, d in zip(masters, dims, strict=True)]
    if entry is not None and entry.kind == "carry_gather":
        check_pairs(node)
        return _convert(program, node, derived[node.args[0]], entry)
    if entry is not None and entry.kind in (*CONVERSIONS, *MAXIMA):
        return _convert(program, node, derived[node.args[0]], entry)
    if entry is not None and entry.primitive in FUSED:
        return _with_products(program, node, derived, entry)
    ops = operands(node)
    types = [derived[o] if o.meta["grad"] else _neutral(derived[o]) for o in ops]
    if name in ("moec.pack", "moec.pack_empty"):
        return _pack(node, types)
    if name == "moec.pack_bytes":
        return _pack_bytes(node, types)
    if name in ("moec.unpack", "moec.unpack_bytes"):
        return _unpack(node, derived)
    if name in ("moec.split_tokens", "moec.join_tokens"):
        return _chunks(node, name, types)
    if name in PAYLOADS:
        return derive_payload(program, node, dict(zip(ops, types, strict=True)))
    if name in FP8:
        return derive_fp8(program, node, dict(zip(ops, types, strict=True)), on_axes(program))
    if entry is not None or (name.startswith("moec.") and name not in BY_THE_TABLE):
        return derive_dialect(program, node, dict(zip(ops, types, strict=True)))
    if (
        types
        and any(t == V for t in types[0].values())
        and name in ("aten.sum", "aten.reshape")
        and not node.meta["val"].dtype.is_floating_point
    ):
        return types[0]  # bookkeeping on counts, which every rank does for its own rows
    rule = rule_for(node)
    out: list[Types] = [{} for _ in rule.results]
    for axis in program.mesh.names:
        on_axis = [Operand(t[axis], not o.meta["grad"], o.op == "placeholder") for o, t in zip(ops, types, strict=True)]
        recorded = node.meta["types"][0] if isinstance(node.meta["types"], list) else node.meta["types"]
        made = {
            f for f in rule.created if recorded[axis].kind == "S" and rule.results[0].index(f) == recorded[axis].dim
        }
        if is_creation(node):
            on_axis = [Operand(R, True)] * len(ops)  # an operand is metadata
        targets, results = solve(rule, on_axis, frozenset(made))
        _require(node, axis, on_axis, targets)
        for r, t in zip(out, results, strict=True):
            r[axis] = t
    if name in ("aten.split", "aten.split_with_sizes"):
        dim = (node.args[2] if len(node.args) > 2 else 0) % node.args[0].meta["val"].ndim
        out = [
            {a: S(dim) if t.kind == "S" and t.dim == dim and t.parts == len(out) else t for a, t in r.items()}
            for r in out
        ]
    return out if isinstance(node.meta["val"], (tuple, list)) else out[0]


def _require(node: fx.Node, axis: str, ops: list[Operand], targets: list[Type]) -> None:
    for o, want in zip(ops, targets, strict=True):
        same = o.type == want or (o.neutral and o.type.kind in "IR" and want.kind in "IR")
        if not same:
            raise MoecError(
                f"{node.format_node()} needs an operand of type {want} on {axis}, and gets {o.type}",
                where=node.meta.get("where", ""),
            )


def _convert(
    program: Program, node: fx.Node, source: Types, entry, x: fx.Node | None = None, dim: int | None = None
) -> Types:
    """``x``, of ``source``: what is converted along ``dim``, where it is not the first operand along the op's."""
    x = x or node.args[0]
    dim, to_dim = node.args[1:3] if entry.kind == "s_to_s" else [node.args[-3] if dim is None else dim] * 2
    out = dict(source)
    axes = group_of(node).split(",")
    # What is cut from a dim that axes minor to these share already, is cut from each of their blocks.
    was, becomes = (S(d, dealt_blocks(program.mesh, source, axes, d)) for d in (dim, to_dim))
    for axis in axes:
        expected = was if entry.source == "S" else Type(entry.source)
        neutral = not x.meta["grad"] and source[axis].kind in "IR" and expected.kind in "IR"
        if source[axis] != expected and not neutral:
            raise MoecError(
                f"{node.name} ({entry.kind}) is fed {source[axis]} on {axis}", where=node.meta.get("where", "")
            )
        out[axis] = becomes if entry.dest == "S" else Type(entry.dest)
    return out


def _with_products(program: Program, node: fx.Node, derived, entry) -> Types | list[Types]:
    """The types of the transfer and of the products, one after the other."""
    x, dim = node.args[0], node.args[2]
    if entry.primitive == "gather_products":
        whole = _convert(program, node, derived[x], TABLE["s_to_r"], x, dim)
        return [whole, *(_product(program, node, (x, whole), (w, derived[w])) for w in node.args[1])]
    w = node.args[1]
    return _convert(program, node, _product(program, node, (x, derived[x]), (w, derived[w])), TABLE["p_to_s"], x, dim)


def _product(program: Program, node: fx.Node, *ops: tuple[fx.Node, Types]) -> Types:
    """Of ``linear`` of two operands, given with their types."""
    lead = tuple(f"b{i}" for i in range(ops[0][0].meta["val"].ndim - 1))
    rule = Rule(((*lead, "k"), ("n", "k")), ((*lead, "n"),))
    out: Types = {}
    for axis in program.mesh.names:
        on = [
            Operand((t if o.meta["grad"] else _neutral(t))[axis], not o.meta["grad"], o.op == "placeholder")
            for o, t in ops
        ]
        targets, (out[axis],) = solve(rule, on)
        _require(node, axis, on, targets)
    return out


def _gather_low(program: Program, node: fx.Node, derived, entry) -> Types:
    """The narrow copy has no gradient, its master has, and both are sharded alike."""
    x, master = node.args[:2]
    if x.meta["grad"] or not master.meta["grad"]:
        raise MoecError(f"{node.format_node()}: the gradient is not its master's alone", where=node.meta["where"])
    _agree(x, derived[master], derived[x])
    return _convert(program, node, derived[master], entry)


def _pack(node: fx.Node, types: list[Types]) -> Types:
    """Shards as one vector, for the gather that follows: each is sharded there, on the dim that is to be whole."""
    axes = _gathered_axes(node) if node.args[1] == 1 else None
    if axes is None:
        raise MoecError(f"{node.format_node()} does not feed one gather", where=node.meta.get("where", ""))
    for t, dim in zip(types, node.args[2], strict=True):
        for a in axes:
            if t[a].kind != "S" or t[a].dim != dim:
                raise MoecError(
                    f"{node.format_node()} has an operand of type {t[a]} on {a}, to be gathered on dim {dim}",
                    where=node.meta.get("where", ""),
                )
    return packed_types(types, axes)


def _gathered_axes(node: fx.Node) -> list[str] | None:
    """The axes over which what was packed is gathered, None where that does not become of it alone."""
    user = next(iter(node.users), node)
    entry = collective(user.target)
    if entry is None or entry.primitive != "all_gather" or len(node.users) != 1:
        return None
    return group_of(user).split(",")


def _pack_bytes(node: fx.Node, types: list[Types]) -> Types:
    """Like ``_pack``; along which dims its operands are joined, the op that takes them apart says."""
    axes = _gathered_axes(node)
    if axes is None:
        raise MoecError(f"{node.format_node()} does not feed one gather", where=node.meta.get("where", ""))
    return packed_types(types, axes)


def _unpack(node: fx.Node, derived) -> list[Types]:
    """On the gathered axes what the vector is; on others what the shards were that it was packed of."""
    started = node.args[0].args[0]
    source = started.args[0] if started.args else None
    wrong = MoecError(f"{node.format_node()} takes apart what was not packed so", where=node.meta.get("where", ""))
    if op_name(node) == "moec.unpack_bytes":
        _, _, dims, turned, _, dtypes = node.args
        if source is None or op_name(source) != "moec.pack_bytes" or source.args[1] != turned:
            raise wrong
        names = [str(x.meta["val"].dtype).removeprefix("torch.") for x in source.args[0]]
        if names != dtypes.split(","):
            raise wrong
        cut = [derived[x][a] for x in source.args[0] for a in group_of(started).split(",")]
        if any(t.kind != "S" for t in cut) or any(
            derived[x][a].dim != d
            for x, d in zip(source.args[0], dims, strict=True) for a in group_of(started).split(",")
        ):  # fmt: skip
            raise wrong
    elif source is None or op_name(source) != "moec.pack" or node.args[2] != source.args[2]:
        raise wrong
    packed = source.args[0]
    if started.target is TABLE[LOW_GATHER].op:
        masters = started.args[1]
        if op_name(masters) != "moec.pack_empty" or masters.args[1:] != source.args[1:]:
            raise MoecError(f"{started.format_node()} has masters packed otherwise", where=node.meta.get("where", ""))
        packed = masters.args[0]
    whole, axes = derived[node.args[0]], group_of(started).split(",")
    return [{a: whole[a] if a in axes else t for a, t in derived[x].items()} for x in packed]


def _chunks(node: fx.Node, name: str, types: list[Types]) -> Types | list[Types]:
    """Each rank's own tokens, fewer or more of them: in as many blocks as are recorded."""
    where = node.meta.get("where", "")
    lead = node.args[2] if name == "moec.split_tokens" else len(node.args[1])
    recorded = node.meta["types"]
    blocks = blocks_of(recorded[0] if isinstance(recorded, list) else recorded)
    if any(t.kind == "V" for t in types[0].values()) or any(t != types[0] for t in types):
        raise MoecError(f"{node.format_node()} has operands of types {[show(t) for t in types]}", where=where)
    found = chunk_types(types[0], lead, blocks)
    return [found] * node.args[1] if name == "moec.split_tokens" else found


def _neutral(types: Types) -> Types:
    """Without a gradient I and R are one type, written R."""
    return {a: R if t == I else t for a, t in types.items()}


def _agree(node: fx.Node, derived, recorded) -> None:
    pairs = zip(derived, recorded, strict=True) if isinstance(derived, list) else [(derived, recorded)]
    for d, r in pairs:
        for axis in r:
            # Without a gradient I and R are one type.
            if d[axis] != r[axis] and not (d[axis].kind in "IR" and r[axis].kind in "IR" and not _has_grad(node)):
                raise MoecError(
                    f"{node.format_node()} is recorded as {show(r)}, and follows as {show(d)}",
                    where=node.meta.get("where", ""),
                )


def _has_grad(node: fx.Node) -> bool:
    val = node.meta["val"]
    vals = val if isinstance(val, (tuple, list)) else [val]
    return node.meta["grad"] and all(isinstance(v, torch.Tensor) and differentiable(v) for v in vals)
