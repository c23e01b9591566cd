"""chunk_experts: tokens pass through a block of experts in chunks, so that some travel while others are computed.

Contract
    requires   irredundant
    provides   chunked: every exchange of a block's tokens is as many exchanges as there are chunks
    preserves  values, forward and backward (sums over tokens, weight gradients among them, are formed in another order)
    never      cuts tokens that compete for places among experts, or moves a collective of parameters

Autograd derives the backward: the gradients of a weight that all chunks use add up.  Every rank has the same number of
chunks and so the same collectives, whatever its number of tokens; a chunk may be empty.

Algorithm
    1. A block is what the routing deals out: the values of type V that hang together, with the ops that make tokens
       rows and rows tokens.
    2. Around the blocks grows the region that is token by token (``chunks/region.py``): routers, norms, projections,
       shared experts and the residual stream, up to where tokens depend on each other (attention, a capacity).
    3. The region is written chunk by chunk (``chunks/rewrite.py``).
    4. Blocks that cannot be chunked, and the ops at which regions end, are in ``why_not``.
"""

from __future__ import annotations

from collections import defaultdict

import sympy
import torch
from torch import fx

from moec.passes.chunks.apply import Groups, chunk
from moec.passes.chunks.region import Layout
from moec.passes.chunks.rows import lead
from moec.passes.contract import Pass, PassContract
from moec.passes.shard.dispatch import Static, chosen
from moec.plan import Plan
from moec.program import Program, op_name
from moec.runtime.collectives import CONVERSIONS, collective, is_wait
from moec.runtime.torch_compat import expr

PERMUTES = ("moec.permute", "moec.permute_kept", "moec.slots")
STAY = (torch.ops.aten.reshape.default, torch.ops.moec.i_to_r.default)
"""Ops on the way to a permute that leave tokens where they are."""


def _run(program: Program, plan: Plan) -> Program:
    groups: Groups = defaultdict(list)
    for block in _blocks(program):  # 1
        groups[_tokens_of(block)].append(block)
    if (count := chunks_of(plan)) > 1:
        chunk(program, groups, count, declined="experts are computed in one chunk")  # 2 to 4
    return program


def chunks_of(plan: Plan) -> int:
    """The compiler puts a number in the place of ``auto`` (``moec.chunks``).  Where this pass runs without it, it is a
    rule: 4 chunks; 1 where every chunk has slots for a whole capacity, so that chunks move several times as much."""
    assert plan.overlap is not None
    if plan.overlap.chunks != "auto":
        return plan.overlap.chunks
    return 1 if chosen(plan) is Static else 4


def _blocks(program: Program) -> list[frozenset[fx.Node]]:
    """The nodes that make, hold or read what the routing deals out, by block."""
    found: list[frozenset[fx.Node]] = []
    for start in program.graph.nodes:
        if not _ragged(start) or any(start in block for block in found):
            continue
        block: set[fx.Node] = set()
        todo = [start]
        while todo:
            node = todo.pop()
            if node in block or node.op != "call_function":
                continue
            block.add(node)
            if _ragged(node) or not isinstance(node.meta.get("val"), torch.Tensor):
                todo += node.users
            todo += [n for n in node.all_input_nodes if _ragged(n)]
        found.append(frozenset(block))
    return [block for block in found if any(op_name(n) in PERMUTES for n in block)]  # or a packed vector of parameters


def _ragged(node: fx.Node) -> bool:
    types = node.meta.get("types")
    each = types if isinstance(types, list) else [types or {}]
    return node.op == "call_function" and any(t.kind == "V" for ts in each for t in ts.values())


def _tokens_of(block: frozenset[fx.Node]) -> tuple[sympy.Expr, Layout]:
    """The number of tokens of a block, and how they lie on the ranks before they are dealt to experts."""
    permute = next(n for n in next(iter(block)).graph.nodes if n in block and op_name(n) in PERMUTES)
    x = node = permute.args[0]
    while node.op == "call_function" and (is_wait(node.target) or node.target in STAY or _deals(node)):
        moves = node.target not in STAY
        node = node.args[0]
        x = node if moves else x
    tokens = expr(permute.args[0].meta["val"].shape[0])
    return tokens, Layout.of(x.meta["types"], lead(x.meta["val"], tokens))


def _deals(node: fx.Node) -> bool:
    entry = collective(node.target)
    return op_name(node) == "moec.pad_rows" or (
        entry is not None and entry.kind in CONVERSIONS and entry.source != "P"
    )


CONTRACT = PassContract(
    name="chunk_experts",
    requires=frozenset({"irredundant"}),
    provides=frozenset({"chunked"}),
    conflicts_with=frozenset({"chunked", "lowered"}),
)
chunk_experts = Pass(
    CONTRACT, _run, applies=lambda plan: plan.overlap is not None and plan.overlap.chunks != 1 and plan.ep > 1
)
