"""fsdp: every parameter is stored in shards over the data-parallel ranks, and gathered right before its first use.

Contract
    requires   sharded
    provides   fsdp: parameters, so gradients and optimizer state, are sharded over fsdp (experts: efsdp) axes
    preserves  values
    never      touches an activation: only the placeholders of parameters and the I→R conversions behind them change

Algorithm
    1. Place: every parameter that a use reads becomes S(d) over its axes.  d is a dim that nothing else shards and that
       the degree divides (dim 0, else the largest); else a dim that an inner axis shards too, each of whose shards is
       cut (a strided shard); else a free dim that is cut unevenly.  A vector that leaves none of these stays whole.
    2. What all uses of a parameter turn from I to R is turned at the placeholder, on the shard: ``lower`` peels it off,
       and over axes that hold copies (HSDP) the epilogue sums shards, not whole gradients.
    3. Gather: S→R, whose backward is a reduce-scatter, before the first use; whole from then on.  Where some use keeps
       the parameter invariant over such an axis, S→I.  Padding of uneven parts is cut off behind.  The node that then
       stands for the parameter is marked in ``meta["gathered"]`` with the runs that are no padding (none: all is data).
    4. A parameter that is only read narrow (``cast_bf16``) is cast before its gather, which carries the narrow copy:
       ``moec::s_to_r_low``, whose backward widens the gradient before it is summed.
    5. The experts of a block are gathered together, before the tokens are dealt out: whatever the routing is, every
       rank takes part.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from moec.passes.contract import Pass, PassContract
from moec.passes.hoist import I_TO_R, become_r, owed
from moec.passes.typed import dtype_of
from moec.placement import I, R, S, Type, Types, local_shape
from moec.plan import Plan
from moec.program import ParamSpec, Program, op_name
from moec.runtime.collectives import LOW_GATHER, TABLE
from moec.runtime.mesh import Mesh
from moec.runtime.torch_compat import WAIT

aten = torch.ops.aten
CAST = aten._to_copy.default


def _run(program: Program, plan: Plan) -> Program:
    order = {n: i for i, n in enumerate(program.graph.nodes)}
    sharded: dict[fx.Node, set[str]] = {}  # placeholder -> axes over which its gradient is a pending sum
    for node in program.placeholders():
        spec = program.params.get(node.name)
        if spec is not None and not spec.buffer and node.users and _place(program, spec):  # 1
            sharded[node] = _hoist(program, node)  # 2
    before = {node: min(node.users, key=order.__getitem__) for node in sharded}
    _together(program, before, order)  # 5
    replaced = [_gather(program, node, turned, before[node]) for node, turned in sharded.items()]  # 3
    for cast in filter(None, replaced):  # now only: what stands before one of them was put there
        program.graph.erase_node(cast)
    if plan.reshard_after_forward:
        program.facts.add("reshard_after_forward")
    program.graph.lint()
    program.module.recompile()
    return program


# -- step 1


def _place(program: Program, spec: ParamSpec) -> bool:
    mesh, expert = program.mesh, any(spec.name in block.stacked for block in program.blocks)
    axes = mesh.role("efsdp" if expert else "fsdp")
    if not axes:
        return False
    placed, why = place(spec.shape, spec.types, axes, mesh)
    if not placed:
        program.why_not.append(f"fsdp: {spec.name} stays whole over {mesh.key(axes)}: {why}")
        return False
    so_far = program.layout_reasons.get(spec.name)
    program.layout_reasons[spec.name] = f"{so_far}; fsdp: {why}" if so_far else f"fsdp: {why}"
    program.params[spec.placeholder] = replace(spec, types={**spec.types, **placed})
    return True


def place(shape: tuple[int, ...], types: Types, axes: tuple[str, ...], mesh: Mesh) -> tuple[Types, str]:
    """Types on the fsdp ``axes`` of a parameter laid out as ``types``, and the reason; no types: it stays whole."""
    n = mesh.size(axes)
    ways = {d: mesh.size([a for a, t in types.items() if t.kind == "S" and t.dim == d]) for d in range(len(shape))}
    packed = {t.dim for t in types.values() if t.kind == "S" and t.parts > 1}
    free = [d for d in ways if ways[d] == 1]

    def largest(dims: list[int]) -> int:
        return max(dims, key=lambda d: (d == 0, shape[d]))

    if even := [d for d in free if shape[d] % n == 0]:
        d = largest(even)
        return dict.fromkeys(axes, S(d)), f"dim {d} over {n}"
    if strided := [d for d in ways if d not in packed and ways[d] > 1 and shape[d] % (n * ways[d]) == 0]:
        d = largest(strided)
        return dict.fromkeys(axes, S(d, parts=ways[d])), f"dim {d} over {n} inside each of {ways[d]} shards"
    if free:
        d = max(free, key=lambda d: shape[d])
        return dict.fromkeys(axes, S(d)), f"dim {d} over {n}, unevenly"
    return {}, f"{n} divides no dim of {list(shape)} that is not packed"


# -- step 2


def _hoist(program: Program, node: fx.Node) -> set[str]:
    """Take the conversions that all uses share off them; returns the axes that the placeholder is to be R on."""
    if not node.meta["grad"]:
        return set()
    axes, fsdp = owed(node), _fsdp_axes(program, node)
    if not fsdp <= axes:  # gathered to I: what is R on these axes is so behind the gather
        axes -= fsdp
    become_r(program, node, axes)
    return axes


def _fsdp_axes(program: Program, node: fx.Node) -> set[str]:
    stored = program.params[node.name].types
    return {a for a, t in stored.items() if t != node.meta["types"][a]}


# -- steps 3 to 5


def _together(program: Program, before: dict[fx.Node, fx.Node], order: dict[fx.Node, int]) -> None:
    """All experts of a block before the permute that deals tokens to them, or before the first use of one of them."""
    permutes = [n for n in program.graph.nodes if n.op == "call_function" and op_name(n) == "moec.permute"]
    for block in program.blocks:
        mine = [n for n in before if program.params[n.name].name in block.stacked]
        if not mine:
            continue
        last = max(order[u] for n in mine for u in n.users)
        points = [before[n] for n in mine] + [p for p in permutes if order[p] < last][-1:]
        before.update(dict.fromkeys(mine, min(points, key=order.__getitem__)))


def _gather(program: Program, node: fx.Node, turned: set[str], before: fx.Node) -> fx.Node | None:
    """Returns the cast behind the parameter if one before its gather takes its place."""
    graph, mesh, spec = program.graph, program.mesh, program.params[node.name]
    fsdp = _fsdp_axes(program, node)
    group, dim = mesh.key(fsdp), next(spec.types[a].dim for a in fsdp)
    rest = mesh.key(turned - fsdp)
    whole = R if fsdp <= turned or not node.meta["grad"] else I

    narrow = _narrow_copy(node) if spec.shape[dim] > 1 else None  # one number has no parts to be cast
    users = list((narrow or node).users)

    def call(target, args: tuple, size: int, changed: dict[str, Type], dtype: torch.dtype | None = None) -> fx.Node:
        """A node like the value so far, but for the length of ``dim`` and some types; ``dtype`` of a cast."""
        out = graph.call_function(target, args, {} if dtype is None else {"dtype": dtype})
        val = value.meta["val"]
        shape = [size if d == dim else n for d, n in enumerate(val.shape)]
        if size != val.shape[dim] or dtype is not None:
            val = val.new_empty(shape, dtype=dtype)
        out.meta.update(val=val, types={**types, **changed}, where=node.meta["where"], grad=node.meta["grad"])
        return out

    node.meta["types"] = types = dict(spec.types)
    lengths = [local_shape(spec.shape, types, mesh, rank)[dim] for rank in mesh.groups(group)[0]]
    even = len(set(lengths)) == 1
    padded = spec.shape[dim] if even else max(lengths) * len(lengths)
    value = node
    with graph.inserting_before(before):
        if rest:
            value = call(I_TO_R, (value, 0, mesh.size(rest), rest), padded, dict.fromkeys(turned - fsdp, R))
            types = value.meta["types"]
        kind = "s_to_r" if whole == R else "s_to_i"
        masters: tuple[fx.Node, ...] = ()
        if narrow is not None:  # 4
            source = value
            value = call(CAST, (node,), padded, {}, narrow.meta["val"].dtype)
            if whole == R and node.meta["grad"]:
                kind, masters = LOW_GATHER, (source,)
                value.meta["grad"] = False
        value = call(TABLE[kind].op, (value, *masters, dim, len(lengths), group), padded, dict.fromkeys(fsdp, whole))
        types = value.meta["types"]
        value = call(WAIT, (value,), padded, {})
        runs = () if even else _filled(lengths)
        if runs:
            parts = [call(aten.slice.Tensor, (value, dim, a, b), b - a, {}) for a, b in runs]
            value = parts[0] if len(parts) == 1 else call(aten.cat.default, (parts, dim), spec.shape[dim], {})
    value.meta["gathered"] = runs
    for user in users:
        user.replace_input_with(narrow or node, value)
    return narrow


def _narrow_copy(node: fx.Node) -> fx.Node | None:
    """The cast to fewer bits that is all that reads the parameter."""
    users = list(node.users)
    if len(users) != 1 or users[0].target is not CAST:
        return None
    return users[0] if dtype_of(users[0]).itemsize < dtype_of(node).itemsize else None


def _filled(lengths: list[int]) -> tuple[tuple[int, int], ...]:
    """Where the data lies in equal parts of which only so much is filled: (start, end) of each run."""
    runs: list[tuple[int, int]] = []
    for i, length in enumerate(lengths):
        start = i * max(lengths)
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], start + length)
        elif length:
            runs.append((start, start + length))
    return tuple(runs)


CONTRACT = PassContract(
    name="fsdp",
    requires=frozenset({"sharded"}),
    provides=frozenset({"fsdp"}),
    conflicts_with=frozenset({"fsdp", "lowered"}),
)
fsdp = Pass(CONTRACT, _run, applies=lambda plan: plan.fsdp_degree > 1)
__all__ = ["CONTRACT", "fsdp", "place"]
