"""Layout: which dim of which parameter is sharded, inferred from the graph alone or said by the user.

``auto`` finds column/row pairs without knowing any module.  Every weight of a linear or grouped GEMM gets a *tag* on
its output dim.  Tags flow forward through the factor rules.  A tag that arrives at the contraction of another weight
ends there well: the first weight can be sharded on its output (column), the second on its input (row), and everything
between needs no communication.  A tag that meets a blocked dim (a norm, a softmax, the output) or a residual stream
that does not carry it is *leaked*: sharding it would cost a gather.  Tags that meet in one dim (gate and up; q, k and v
at the attention) stand or fall together.

1. Tag the output dim of every weight; flow.
2. The vocabulary is the number of rows of the largest table that inputs look up.  Such tables, and the heads that yield
   as many columns (and are not added to a residual stream), are sharded over tp where tp divides it.  What becomes of
   the logits does not matter: a model is laid out the same with labels and without.
3. Union tags that share a dim; a union is good if no tag of it leaked and at least one ended at a weight.
4. Dense unions are sharded over tp, expert unions over etp; expert weights are sharded over ep on dim 0 besides.
5. Whatever was decided, what *column* would mean of each weight and of the vectors that go with it is noted, for those
   who override (``overrides.py``).  Matching only locates; types are propagated the same way for all.

Every static size that a good tag passed (heads, kv heads, widths) must be divisible by the degree: those are the
``Limit`` s that plan validation reports.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import torch
from torch import fx

from moec.passes.shard.rule import is_getitem, operands, shape
from moec.passes.shard.rules import is_creation, rule_for
from moec.passes.shard.singles import split_parts
from moec.passes.shard.weight import GEMMS, Weight, weight_of, whole_of
from moec.placement import I, S, Type
from moec.plan import Limit, Plan
from moec.program import Program, op_name


@dataclass
class Tag:
    node: fx.Node
    weight: Weight
    leaked: str = ""
    mixed: bool = False
    """Did it meet a value that does not carry it (a residual stream)?"""
    ends: list[fx.Node] = field(default_factory=list)
    sizes: dict[int, str] = field(default_factory=dict)
    vectors: set[tuple[fx.Node, int]] = field(default_factory=set)
    """Parameters met on the way that carry the tagged dim (biases): (placeholder, dim)."""
    created: set[tuple[fx.Node, int]] = field(default_factory=set)
    """Expanded dims met on the way, which are made in parts: (expand, dim)."""
    parts: int = 1


@dataclass
class Layout:
    """``dims[placeholder]``: role ("tp", "etp", "ep") -> Type; ``limits``; ``reasons`` by placeholder."""

    dims: dict[str, dict[str, Type]]
    limits: list[Limit]
    reasons: dict[str, str]
    created: dict[tuple[fx.Node, int], str] = field(default_factory=dict)
    """(expand, dim that it makes) -> role over which it is made in parts."""
    at_use: set[str] = field(default_factory=set)
    """Weights that are stored whole and used by every rank for its own share only (key/value heads that are fewer than
    the ranks): replicated at their use, so that what comes of them is a pending sum."""
    parts: dict[fx.Node, tuple[str, str]] = field(default_factory=dict)
    """Rows of a fused projection that is stored whole -> it, and the role over which they are cut at their use."""
    columns: dict[str, Type] = field(default_factory=dict)
    """What column means of a weight or a vector, whether or not it is placed so: part by part, if it is packed."""
    vocabulary: int = 0
    """Rows of the largest table that inputs look up, 0 without one."""


def infer(program: Program, plan: Plan) -> Layout:
    tags = _flow(program) if program.mesh.names else []
    out = Layout(defaultdict(dict), [], {})
    _vocabulary(program, tags, out)
    # The largest weights choose first: where two pairs want one weight, the smaller one (an adapter) stays whole.
    for union in sorted(_unions(tags), key=lambda u: -sum(prod(program.params[t.weight.placeholder].shape) for t in u)):
        _decide(program, union, out)
    for block in program.blocks:
        for ph, spec in program.params.items():
            if spec.name in block.stacked:
                out.dims[ph]["ep"] = S(0)
    for t in tags:
        _column(program, t, out)
    return out


# -- step 1: flow


def _flow(program: Program) -> list[Tag]:
    tags: list[Tag] = []
    carried: dict[fx.Node, list[dict[int, set[int]]]] = {}  # node -> per result: dim -> tag numbers

    def leak(numbers, why: str) -> None:
        for t in numbers:
            tags[t].leaked = tags[t].leaked or why

    for node in program.graph.nodes:
        if node.op == "output":
            for n in node.all_input_nodes:
                for dims in carried.get(n, []):
                    for numbers in dims.values():
                        leak(numbers, "reaches the output")
        if node.op != "call_function" or not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
            continue
        if is_getitem(node):
            if node.args[0] in carried:
                carried[node] = [carried[node.args[0]][node.args[1]]]
            continue
        ops = operands(node)
        name = op_name(node)
        gemm = weight_of(node, program) if name in GEMMS else None
        arriving = [carried.get(o, [{}])[0] for o in ops]
        if name == "moec.unpermute" or name == "moec.permute" or (not any(arriving) and gemm is None):
            for dims in arriving:
                for numbers in dims.values():
                    leak(numbers, f"reaches {name}")
            continue
        if not ops or is_creation(node):  # a creation's operand is metadata
            continue
        rule = rule_for(node)
        by_factor: dict[str, set[int]] = defaultdict(set)
        for slot, dims in enumerate(arriving):
            for dim, numbers in dims.items():
                f = rule.operands[slot][dim]
                if f is None or f in rule.blocked:
                    leak(numbers, f"dim {dim} is blocked by {name} ({node.meta.get('where', '')})")
                else:
                    by_factor[f] |= numbers
        results: list[dict[int, set[int]]] = [{} for _ in rule.results]
        for f, numbers in by_factor.items():
            _meet(program, node, rule, f, numbers, arriving, tags, leak)
            for r, names in enumerate(rule.results):
                if f in names:
                    results[r][names.index(f)] = set(numbers)
            if not any(f in names for names in rule.results) and not (gemm and f == "k"):
                leak(numbers, f"is summed by {name} ({node.meta.get('where', '')})")
        if name in ("aten.split", "aten.split_with_sizes"):
            dim = (node.args[2] if len(node.args) > 2 else 0) % len(shape(ops[0]))
            for t in arriving[0].get(dim, ()):
                parts = tags[t].parts = split_parts(node)
                tags[t].sizes = {size // parts: w for size, w in tags[t].sizes.items()}  # each part is cut on its own
        if gemm is not None:
            out_dim = len(shape(node)) - 1
            tags.append(Tag(node, gemm, sizes={_size(node, out_dim): node.meta.get("where", "")}))
            results[0][out_dim] = results[0].get(out_dim, set()) | {len(tags) - 1}
        _note_sizes(node, rule, results, tags)
        carried[node] = results
    return tags


def _meet(program, node, rule, f, numbers, arriving, tags, leak) -> None:
    """What else has this factor: a weight's contraction (an end), a bias (sharded alike), a value without the tag."""
    name = op_name(node)
    trained = {ph for ph, spec in program.params.items() if not spec.buffer}
    for slot, o in enumerate(operands(node)):
        if f not in rule.operands[slot] or arriving[slot].get(rule.operands[slot].index(f)):
            continue
        if name in GEMMS and slot == 1 and f == "k":
            if weight_of(node, program) is None:
                leak(numbers, f"is contracted with a computed weight in {name}")
            for t in numbers:
                tags[t].ends.append(node)
        elif (origin := _origin(o, rule.operands[slot].index(f), program)) is not None:
            for t in numbers:
                (tags[t].vectors if origin[0].op == "placeholder" else tags[t].created).add(origin)
        elif not o.meta["val"].dtype.is_floating_point or not _depends_on(o, trained):
            continue
        else:
            for t in numbers:
                tags[t].mixed = True
            leak(numbers, f"meets a value that does not carry it in {name} ({node.meta.get('where', '')})")


def _origin(node: fx.Node, dim: int, program: Program) -> tuple[fx.Node, int] | None:
    """Where a dim of a value begins, if that can be cut without moving anything: a dim of a parameter (a bias, sinks of
    attention heads seen through reshapes), or a dim that an ``expand`` makes (one rotary key for all heads)."""
    while node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor) and len(operands(node)) == 1:
        rule = rule_for(node)
        f = rule.results[0][dim]
        if f is None or f in rule.blocked or is_creation(node):
            return None
        if f in rule.created:
            return node, dim
        if f not in rule.operands[0]:
            return None
        node, dim = operands(node)[0], rule.operands[0].index(f)
    return (node, dim) if node.op == "placeholder" and node.name in program.params else None


def _depends_on(node: fx.Node, placeholders: set[str]) -> bool:
    """Is the value (not only the size) of ``node`` computed from one of these?"""
    seen, stack = set(), [node]
    while stack:
        n = stack.pop()
        if n.op == "call_function" and is_creation(n):
            continue  # an operand is metadata
        if not isinstance(n.meta.get("val"), (torch.Tensor, tuple, list)):
            continue  # a size
        if n.op == "placeholder" and n.name in placeholders:
            return True
        for i in n.all_input_nodes:
            if i not in seen:
                seen.add(i)
                stack.append(i)
    return False


def _size(node: fx.Node, dim: int):
    size = shape(node)[dim]
    return size if isinstance(size, int) else 0


def _note_sizes(node, rule, results, tags) -> None:
    val = node.meta["val"]
    vals = val if isinstance(val, (tuple, list)) else [val]
    for v, dims in zip(vals, results, strict=True):
        for dim, numbers in dims.items():
            if isinstance(v.shape[dim], int):
                for t in numbers:
                    tags[t].sizes.setdefault(v.shape[dim], node.meta.get("where", ""))


# -- step 2


def _vocabulary(program: Program, tags: list[Tag], out: Layout) -> None:
    tables = tables_of(program)
    out.vocabulary = vocabulary = max(tables.values(), default=0)
    tp = program.mesh.size(program.mesh.role("tp"))
    found = {w: (0, "its rows are the vocabulary") for w, rows in tables.items() if rows == vocabulary}
    for t in tags:
        out_dim, ph = t.weight.dims[GEMMS[op_name(t.node)][0]], t.weight.placeholder
        if op_name(t.node) == "aten.linear" and program.params[ph].shape[out_dim] == vocabulary and not t.mixed:
            found.setdefault(ph, (out_dim, "its columns are the vocabulary"))
            if len(t.node.args) > 2 and t.node.args[2] is not None and found[ph][0] == out_dim:
                found.setdefault(t.node.args[2].name, (0, "bias of the vocabulary"))
    for ph, (dim, why) in found.items():
        if vocabulary % tp:
            out.reasons[ph] = f"auto: whole, because tp={tp} does not divide the vocabulary of {vocabulary}"
        elif tp > 1 and ph in program.params and not program.params[ph].buffer:
            _place(out, ph, "tp", S(dim), f"auto: {why}")


def tables_of(program: Program) -> dict[str, int]:
    """Placeholder -> rows of every parameter in which values of an integer input are looked up."""
    return {
        n.args[0].name: shape(n.args[0])[0]
        for n in program.graph.nodes
        if n.op == "call_function" and op_name(n) == "aten.embedding"
        if n.args[0].name in program.params and _depends_on(n.args[1], set(program.inputs))
    }


# -- steps 3 and 4


def _unions(tags: list[Tag]) -> list[list[Tag]]:
    """Tags that end at the same weight belong together (everything that meets on the way ends there)."""
    parent = list(range(len(tags)))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    first: dict[fx.Node, int] = {}
    for i, t in enumerate(tags):
        for end in t.ends:
            parent[root(i)] = root(first.setdefault(end, i))
    groups: dict[int, list[Tag]] = defaultdict(list)
    for i, t in enumerate(tags):
        groups[root(i)].append(t)
    return list(groups.values())


def _decide(program: Program, union: list[Tag], out: Layout) -> None:
    leaks = [t.leaked for t in union if t.leaked]
    if leaks or not any(t.ends for t in union):
        for t in union:
            out.reasons.setdefault(
                t.weight.placeholder, f"auto: whole, because its output {leaks[0] if leaks else 'ends nowhere'}"
            )
        return
    ends = {w.placeholder for t in union for end in t.ends if (w := weight_of(end, program))}
    taken = [p for p in {*(t.weight.placeholder for t in union), *ends} if any(k != "ep" for k in out.dims.get(p, {}))]
    if taken:
        # A chain of three linears, whose middle one is the row of the first pair; or a low-rank adapter beside a column
        # weight, whose second factor is a column already.
        for t in union:
            out.reasons.setdefault(t.weight.placeholder, "auto: whole, because a larger pair has taken its partner")
        return
    role: Literal["tp", "etp"] = "etp" if op_name(union[0].node) == "moec.grouped_mm" else "tp"
    for t in _too_few_heads(union, program.mesh.size(program.mesh.role(role))):
        union = [u for u in union if u is not t]
        out.at_use.add(t.weight.placeholder)
        out.reasons[t.weight.placeholder] = (
            f"auto: whole, because {role} does not divide its {min(t.sizes)} heads: each rank uses those that its "
            f"share of {union[0].node.meta.get('where', '')} needs"
        )
    for t in union:
        column = t.weight.dims[GEMMS[op_name(t.node)][0]]
        if t.weight.part is not None:
            _cut_at_use(t, role, out)
        else:
            why = f"auto: column, ends at {t.ends[0].meta.get('where', '')}"
            _place(out, t.weight.placeholder, role, S(column, t.parts), why)
            if op_name(t.node) == "aten.linear" and len(t.node.args) > 2 and t.node.args[2] is not None:
                _place(out, t.node.args[2].name, role, S(0, t.parts), "auto: bias of a column weight")
        out.created.update(dict.fromkeys(t.created, role))
        for ph, dim in t.vectors:
            _place(out, ph.name, role, S(dim, t.parts), "auto: bias of a column weight")
        for end in t.ends:
            w = weight_of(end, program)
            assert w is not None
            row = w.dims[GEMMS[op_name(end)][1]]
            _place(out, w.placeholder, role, S(row), f"auto: row, fed by {t.node.meta.get('where', '')}")
        for size, where in t.sizes.items():
            if size:
                out.limits.append(
                    Limit(role, size, "heads or width", where, "a sharded dim of this size must be cut evenly")
                )


def _cut_at_use(t: Tag, role: str, out: Layout) -> None:
    """A DTensor cannot say which rows of a fused projection are whose: it is whole, and each rank uses its rows."""
    assert t.weight.part is not None
    for part in (t.weight.part, *t.node.args[2:]):
        whole = whole_of(part)
        assert whole is not None
        out.parts[part] = whole.name, role
        out.at_use.add(whole.name)
        where = t.node.meta.get("where", "")
        out.reasons[whole.name] = f"auto: whole, each rank uses its heads of every part at {where}"


def _too_few_heads(union: list[Tag], degree: int) -> list[Tag]:
    """Key/value projections with fewer heads than ranks, whose query heads can be dealt all the same."""

    def dealt(t: Tag) -> bool:
        return all(size % (degree * t.parts) == 0 for size in t.sizes)

    few = [t for t in union if not dealt(t)]
    # All must belong to an attention that some whole projection can be dealt over.
    return few if any(dealt(t) for t in union) else []


def _place(out: Layout, placeholder: str, role: str, t: Type, why: str) -> None:
    out.dims[placeholder][role] = t
    out.reasons[placeholder] = why


# -- step 5


def _column(program: Program, t: Tag, out: Layout) -> None:
    if t.weight.part is not None:
        return
    out.columns[t.weight.placeholder] = S(t.weight.dims[GEMMS[op_name(t.node)][0]], t.parts)
    if op_name(t.node) == "aten.linear" and len(t.node.args) > 2 and t.node.args[2] is not None:
        out.columns[t.node.args[2].name] = S(0, t.parts)
    for vector, dim in t.vectors:
        if vector.name in program.params:
            out.columns.setdefault(vector.name, S(dim, t.parts))


def types_of(layout: Layout, placeholder: str, mesh) -> dict[str, Type]:
    """A parameter's type on every atomic axis."""
    by_role = layout.dims.get(placeholder, {})
    is_expert = "ep" in by_role or "etp" in by_role
    return {a.name: by_role.get(a.expert if is_expert else a.dense, I) for a in mesh.axes}
