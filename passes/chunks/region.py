"""The region that is computed chunk by chunk: grown around what needs it, as far as tokens are independent.

Two ranks' chunks need not be of the same size, but all of one rank's values must be cut at the same tokens.  Which
tokens a rank has of a value is its *layout*: the axes that shard the dims of tokens; where chunks are whole sequences,
those that shard the sequences, while what shards each of them stays as it is in every chunk.  A region has one *base*
layout, in which values are cut and joined.  Inside, conversions may change the layout (tokens are dealt to ranks before
a dispatch, gathered for a product): a value's *history* says which changes lie between the base and it, and only values
of one history meet in an op.

Algorithm
    1. From the seeds, take in whatever reads or gives tokens or rows, op by op (``rows.py``), in both directions.
       ``moec::boundary`` is stepped over: the value is joined and cut again there.
    2. In graph order, give every value its history.  An op goes if its operands' histories differ, or if a value from
       outside cannot be cut.
    3. Behind the region values are joined: an op whose result cannot be, goes; so does one that only makes more to
       join (a language model's head).
    4. Repeat until nothing goes.  What is no longer connected with the seeds goes too.
    5. Of each place where the region ends, ``stops`` keeps the reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import sympy
import torch
from torch import fx

from moec.passes.chunks.rows import ADDED, NUMBER, ROWS, TOKENS, Rows, Tokens
from moec.placement import Types
from moec.program import Program, op_name
from moec.runtime.collectives import CONVERSIONS, collective, group_of, is_start, is_wait
from moec.runtime.torch_compat import expr

History = tuple[tuple[str, Any, int], ...]
"""(what was done, over which axes or to which multiple, to which dim of tokens), oldest first."""
INVERSE = {"gather": "slice", "slice": "gather"}
WIDER = 4
BOUNDARY = torch.ops.moec.boundary.default


@dataclass(frozen=True)
class Layout:
    """Axes that shard the tokens: ``major`` the first dim of them (or blocks of sequences), ``minor`` the rest."""

    major: frozenset[str] = frozenset()
    minor: frozenset[str] = frozenset()

    @staticmethod
    def of(types: Types, dims: int, by_sequence: bool = False) -> Layout:
        """``dims``: how many leading ones are tokens."""
        if by_sequence:
            return Layout(frozenset(a for a, t in types.items() if t.kind == "S" and t.dim < dims and t.parts == 1))
        on = {a: t for a, t in types.items() if t.kind == "S" and t.dim < dims}
        minor = frozenset(a for a, t in on.items() if t.dim == 1 or t.parts != 1)
        return Layout(frozenset(on) - minor, minor)


@dataclass
class Region:
    program: Program
    tokens: Tokens
    base: Layout
    seeds: frozenset[fx.Node]
    experts: bool = True
    """Whether what the routing deals out may be in it."""
    history: dict[fx.Node, History] = field(default_factory=dict)
    """Every node of the region; of a value that is no tokens, ()."""
    entries: dict[fx.Node, History] = field(default_factory=dict)
    """Values from outside that are cut."""
    exits: dict[fx.Node, History] = field(default_factory=dict)
    """Values of the region that are joined for others."""
    padded: dict[History, fx.Node] = field(default_factory=dict)
    """History of padded tokens -> the value that was padded."""
    stops: dict[fx.Node, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = Rows(self.program, self.tokens, self.experts)

    def __contains__(self, node: object) -> bool:
        return node in self.history

    @property
    def shards(self) -> int:
        """How many ranks share in the base layout a sequence that is cut."""
        return self.program.mesh.size(self.base.minor)

    def layout(self, value: fx.Node) -> Layout:
        dims = self.tokens.lead(value.meta["val"])
        return Layout.of(value.meta["types"], dims, self.tokens.sequences is not None)

    def blocks(self, history: History) -> int:
        """How many ranks' tokens, gathered along the sequence, a value with this history has side by side."""
        return self.program.mesh.size(history[0][1]) if history else 1


def find(region: Region) -> bool:
    """Fill ``region``, whose ``seeds`` are all in it afterwards; False (and ``stops``) if one of them cannot be."""
    members = _grown(region, region.seeds, None)  # 1
    while True:
        if not region.seeds <= members:
            return False
        kept = _with_histories(region, members)  # 2
        kept = _joinable(region, kept)  # 3
        kept = _grown(region, region.seeds & kept, kept)
        if kept == members:
            break
        members = kept  # 4
    for node in [n for n in region.stops if n in members or not _beside(region, n)]:
        del region.stops[node]  # 5
    return True


def _beside(region: Region, node: fx.Node) -> bool:
    return any(_past(n) in region for n in (*node.all_input_nodes, *node.users))


def _past(node: fx.Node) -> fx.Node:
    """The value that a boundary hands on."""
    return node.args[0] if node.target is BOUNDARY else node


def _neighbours(region: Region, node: fx.Node) -> Iterable[fx.Node]:
    found = region.rows.of(node)
    yield from ([found.parent] if found.parent is not None else [])
    yield from map(_past, (*found.tokens, *found.rows))
    if found.results[0] == ADDED and isinstance(node.meta["val"], torch.Tensor):
        return  # the sum is no tokens
    for user in node.users:
        yield from user.users if user.target is BOUNDARY else (user,)


def _grown(region: Region, seeds: Iterable[fx.Node], within: set[fx.Node] | None) -> set[fx.Node]:
    members: set[fx.Node] = set()
    todo = list(seeds)
    while todo:
        node = todo.pop()
        if node in members or node.op != "call_function" or (within is not None and node not in within):
            continue
        found = region.rows.roles(node)
        if isinstance(found, str):
            region.stops[node] = found
            continue
        members.add(node)
        todo += _neighbours(region, node)
    return members


# -- 2


def _with_histories(region: Region, members: set[fx.Node]) -> set[fx.Node]:
    region.history.clear()
    region.entries.clear()
    region.padded.clear()
    for node in region.program.graph.nodes:
        if node not in members:
            continue
        found = region.rows.of(node)
        if found.parent is not None:
            if found.parent in region:
                region.history[node] = region.history[found.parent]
            continue
        before: set[History | None] = {
            region.history[o] if o in region else _cut(region, o) for o in found.tokens
        }
        if len(before) > 1 or None in before:
            region.stops[node] = "its operands' tokens lie differently on the ranks"
        elif any(o not in region for o in (*found.rows, *_started(node), *_numbers(node, members))):
            region.stops[node] = "it reads what is not in the region"
        else:
            history = next(iter(before), ()) or ()
            after = _changed(region, node, history)
            if after is None:
                region.stops[node] = "it moves tokens between the ranks in a way that chunks cannot"
            else:
                region.history[node] = after
                region.entries |= {o: history for o in found.tokens if o not in region}
    return set(region.history)


def _started(node: fx.Node) -> tuple[Any, ...]:
    return node.args[:1] if is_wait(node.target) else ()


def _numbers(node: fx.Node, members: set[fx.Node]) -> list[fx.Node]:
    return [a for a in node.all_input_nodes if a in members and not isinstance(a.meta.get("val"), torch.Tensor)]


def _cut(region: Region, value: fx.Node) -> History | None:
    """The history with which a value from outside is cut; None if it cannot be."""
    types = value.meta["types"]
    if not isinstance(types, dict) or any(t.kind == "V" for t in types.values()):
        return None
    return _whole(region, value)


def _whole(region: Region, value: fx.Node) -> History | None:
    """() in the base layout.  In two dims, tokens gathered over the innermost axes of the sequence can be cut too."""
    layout, dims = region.layout(value), region.tokens.lead(value.meta["val"])
    if layout == region.base:
        return ()
    names = [a for a in region.program.mesh.names if a in region.base.minor]
    gathered = [a for a in names if a not in layout.minor]
    if dims != 2 or layout.major != region.base.major or not layout.minor <= region.base.minor:
        return None
    if names[len(names) - len(gathered) :] != gathered:
        return None
    return (("gather", region.program.mesh.key(gathered), 1),)


def _changed(region: Region, node: fx.Node, history: History) -> History | None:
    """The history of what ``node`` makes of tokens of ``history``."""
    name, entry = op_name(node), collective(node.target)
    if name == "moec.pad_rows":
        region.padded.setdefault((*history, ("pad", node.args[1], 0)), node.args[0])
        return (*history, ("pad", node.args[1], 0))
    if name == "moec.take_rows":
        return history[:-1] if history and history[-1][0] == "pad" else None
    if entry is None or entry.kind not in CONVERSIONS or region.rows.kind(node.args[0]) != TOKENS:
        return history
    what = {"all_gather": "gather", "reduce_scatter": "slice", "slice": "slice", "zero_pad": "gather"}
    n, dim = region.tokens.lead(node.args[0].meta["val"]), node.args[1]
    if entry.primitive == "all_to_all":
        return history if min(node.args[1:3]) >= n else None
    if entry.primitive not in what or dim >= n:
        return history
    done = (what[entry.primitive], group_of(node), dim)
    if history and history[-1] == (INVERSE[done[0]], *done[1:]):
        return history[:-1]
    if done[0] == "slice" and not (history and history[-1][0] == "pad" and history[-1][1] % node.args[-2] == 0):
        return None  # chunks are not multiples of the ranks
    return (*history, done)


# -- 3


def _joinable(region: Region, members: set[fx.Node]) -> set[fx.Node]:
    region.exits.clear()
    kept = set(members)
    joined: dict[fx.Node, set[fx.Node]] = {}
    """Node -> what is joined of what is computed from it; not of nodes that seeds are computed from."""
    for node in reversed([n for n in region.program.graph.nodes if n in members]):
        found = region.rows.of(node)
        if found.results[0] == ADDED:
            joined[node] = set()
            continue
        inside, outside = ([u for u in node.users if (u in kept) is there] for there in (True, False))
        why = None
        if outside and (len(found.results) > 1 or found.results[0] in (ROWS, NUMBER) or is_start(node.target)):
            why = "a value of it that cannot be joined is read elsewhere"
        elif outside and _joined(region, node) is None:
            why = "its result lies on the ranks in another way than the tokens before the region"
        elif node not in region.seeds and all(u in joined for u in inside):
            joined[node] = set().union({node} if outside else (), *(joined[u] for u in inside))
            if found.results == (TOKENS,) and found.tokens and _widens(region, node, joined[node]):
                why = f"what would be joined behind it is more than {WIDER} times what it reads"
        if why is not None:
            region.stops[node] = why
            kept.discard(node)
            joined.pop(node, None)
        elif outside:
            region.exits[node] = region.history[node]
    return kept


def _joined(region: Region, node: fx.Node) -> History | None:
    history = region.history[node]
    return history if history == _whole(region, node) else None


def _widens(region: Region, node: fx.Node, joined: set[fx.Node]) -> bool:
    """Does more have to be joined because of ``node`` than it is worth?"""
    found = region.rows.of(node)
    read, made = (sum(_numel(region, n) for n in nodes) for nodes in (found.tokens, joined))
    return sympy.And(_numel(region, node) > read, made > WIDER * read) == sympy.true  # a sum of lengths may be unknown


def _numel(region: Region, node: fx.Node) -> sympy.Expr:
    """Numbers a token on one rank."""
    n, types = region.tokens.lead(node.meta["val"]), node.meta["types"]
    cut = region.program.mesh.size([a for a, t in types.items() if t.kind == "S" and t.dim >= n])
    numel = prod([expr(s) for s in node.meta["val"].shape], start=sympy.Integer(1))
    return sympy.cancel(numel / region.tokens.number) / cut
