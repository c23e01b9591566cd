"""Which ops compute token by token, so that a chunk of the tokens can be computed by itself.

Chunking is sharding in time: the factor rules say through which ops a chunk passes.  A value is

* ``tokens``: its leading dims are all tokens of the rank, ``[T, …]`` or ``[B, S, …]`` with B·S = T.  Where chunks are
  whole sequences, its first dim is all of these, ``[B, …]`` or ``[T, …]``, and whatever computes sequence by sequence
  (attention) goes with chunks too;
* ``rows``: what the routing dealt out (type V): rows of a chunk's pairs, or counts of them;
* ``shared``: neither; the same for every chunk (parameters, constants, a rank's expert numbers).

An op can be computed by chunks if its operands that are tokens have these dims in common with each other and with
every result, no shared operand has one of them, and none is *blocked* (mixed along).  Sums over tokens (``SUMS``) are
formed chunk by chunk and added.  Whatever reads rows is part of the dispatch, which is any rank's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from moec.passes.shard.capacity import has_capacity
from moec.passes.shard.rule import is_getitem, operands
from moec.passes.shard.rules import is_creation, rule_for
from moec.program import Program, op_name
from moec.runtime.collectives import collective, is_wait
from moec.runtime.torch_compat import expr

TOKENS, ROWS, SHARED, ADDED, NUMBER = "tokens", "rows", "shared", "added", "number"
SUMS = ("moec.tally", "moec.balance")
DISPATCH = (
    "moec.permute", "moec.permute_kept", "moec.permute_aligned", "moec.slots", "moec.destinations", "moec.place_rows",
    "moec.pad_rows", "moec.take_rows", "moec.own_ids",
)  # fmt: skip
"""Ops that take tokens one by one, whatever shard of them a rank has."""
CHUNKED = ("moec.split_tokens", "moec.join_tokens")
SIZED = ("aten.reshape", "aten.expand", "moec.take_rows", "moec.slots", "moec.place_rows")
"""Ops that are given sizes, and for which the rewrite knows those of a chunk."""


@dataclass(frozen=True)
class Roles:
    results: tuple[str, ...]
    """What each result is; of an op with several results, one each."""
    tokens: tuple[fx.Node, ...] = ()
    """Operands, each once."""
    rows: tuple[fx.Node, ...] = ()
    parent: fx.Node | None = None
    """Of one of several results: the node that has them."""


def lead(val: Any, tokens: sympy.Expr) -> int:
    """How many leading dims of a value are the tokens; 0: it has none."""
    sizes = [expr(s) for s in val.shape[:2]]
    for n in range(1, len(sizes) + 1):
        if sympy.expand(sympy.Mul(*sizes[:n]) - tokens) == 0:
            return n
    return 0


@dataclass(frozen=True)
class Tokens:
    """What is cut into chunks: recorded, global numbers."""

    number: sympy.Expr
    sequences: sympy.Expr | None = None
    """How many sequences, if chunks are whole ones; None: they are any tokens."""

    def lead(self, val: Any) -> int:
        """How many leading dims of a value are cut; 0: it is no tokens."""
        if self.sequences is None:
            return lead(val, self.number)
        first = [expr(s) for s in val.shape[:1]]
        return int(any(sympy.expand(s - n) == 0 for s in first for n in (self.number, self.sequences)))


class Rows:
    """Says how nodes of ``program`` go with chunks of ``tokens``; without ``experts``, what the routing deals out does
    not."""

    def __init__(self, program: Program, tokens: Tokens, experts: bool = True) -> None:
        self.program, self.tokens, self.experts = program, tokens, experts
        self._known: dict[fx.Node, Roles | str] = {}

    def kind(self, node: fx.Node) -> str:
        """What the (single) value of ``node`` is."""
        if not isinstance(node.meta.get("val"), torch.Tensor) or node.name in self.program.params:
            return SHARED
        return self._kind(node.meta["val"], node.meta.get("types"))

    def roles(self, node: fx.Node) -> Roles | str:
        """How ``node`` goes with chunks, or why it does not."""
        if node not in self._known:
            self._known[node] = self._roles(node)
        return self._known[node]

    def of(self, node: fx.Node) -> Roles:
        """The roles of a node that goes with chunks."""
        found = self.roles(node)
        assert not isinstance(found, str), found
        return found

    def _kind(self, val: Any, types: Any) -> str:
        ragged = bool(types) and any(t.kind == "V" for t in types.values())
        return ROWS if ragged else TOKENS if self.tokens.lead(val) else SHARED

    def _roles(self, node: fx.Node) -> Roles | str:
        if node.op != "call_function":
            return "it is not computed"
        if is_getitem(node):
            parent = self.roles(node.args[0])
            return parent if isinstance(parent, str) else Roles((parent.results[node.args[1]],), (), (), node.args[0])
        ops = operands(node)
        chunked, ragged = (tuple(o for o in dict.fromkeys(ops) if self.kind(o) == k) for k in (TOKENS, ROWS))
        if not chunked and not ragged:
            return "it reads nothing that begins with tokens"
        vals, types = _results(node)
        if not all(isinstance(v, torch.Tensor) for v in vals):
            return Roles((NUMBER,), (), ragged) if ragged else "it takes the number of tokens"
        found = Roles(tuple(self._kind(v, t) for v, t in zip(vals, types, strict=True)), chunked, ragged)
        entry, name = collective(node.target), op_name(node)
        if name in CHUNKED:
            return "tokens are in chunks there already"
        if not self.experts and (ROWS in (*found.results, *(self.kind(o) for o in ops)) or name in DISPATCH):
            return "it belongs to experts"
        if entry is not None or is_wait(node.target) or ragged or name in DISPATCH:
            return found if SHARED not in found.results else "a result is neither tokens nor rows"
        if is_creation(node) or name == "moec.boundary":
            return "it reads nothing that begins with tokens"
        if name not in SIZED and any(a not in ops for a in node.all_input_nodes):
            return "it is given a size"
        if name == "aten.reshape":
            if self.tokens.sequences is not None and -1 in node.args[1]:
                return "it leaves a size open"
            return found if found.results == (TOKENS,) else "its result has no dims of tokens alone"
        return self._by_the_rule(node, found, ops)

    def _by_the_rule(self, node: fx.Node, found: Roles, ops: list[fx.Node]) -> Roles | str:
        if has_capacity(node):  # to the rules, tokens of one rank may compete and be independent of other ranks'
            return "tokens compete for places in it"
        rule = rule_for(node)
        dims: set[tuple[str | None, ...]] = set()
        mine: set[str] = set()
        others: set[str | None] = set()
        for o, names in zip(ops, rule.operands, strict=False):
            n = self.tokens.lead(o.meta["val"]) if o in found.tokens else 0
            others |= set(names[n:])
            if n:
                dims.add(names[:n])
                mine |= {f for f in names[:n] if f is not None}
        if len(dims) != 1 or not mine or mine & others:
            return "its operands have tokens in different dims"
        (leading,) = dims
        if mine & rule.blocked:
            return "tokens depend on each other in it"
        if op_name(node) in SUMS and not any(mine & set(r) for r in rule.results):
            return Roles((ADDED,) * len(rule.results), found.tokens)
        n = len(leading)
        if any(r[:n] != leading or mine & set(r[n:]) for r in rule.results) or set(found.results) != {TOKENS}:
            return "its result has no dims of tokens alone"
        return found


def _results(node: fx.Node) -> tuple[list[Any], list[Any]]:
    val, types = node.meta.get("val"), node.meta.get("types")
    if isinstance(val, (tuple, list)):
        return list(val), list(types) if types is not None else [None] * len(val)
    return [val], [types]
