"""chunk_experts: tokens pass through a block of experts in chunks, so that some travel while others are computed.

Contract
    requires   irredundant
    provides   chunked: every exchange of a block's tokens is as many exchanges as there are chunks
    preserves  values, forward and backward (sums over tokens, weight gradients among them, are formed in another order)
    never      cuts tokens that compete for places among experts, or moves a collective of parameters

Autograd derives the backward: the gradients of a weight that all chunks use add up.  Every rank has the same number of
chunks and so the same collectives, whatever its number of tokens; a chunk may be empty.

Chunks are any tokens, or whole sequences (``Overlap.chunk_by``): then attention goes with the chunks as well, so that
the experts of some sequences are computed beside the attention of others, and all layers hang together.

Algorithm
    1. A block is what the routing deals out: the values of type V that hang together, with the ops that make tokens
       rows and rows tokens.
    2. Around the blocks grows the region that is token by token (``chunks/region.py``): routers, norms, projections,
       shared experts and the residual stream, up to where tokens depend on each other (attention, a capacity).
    3. The region is written chunk by chunk (``chunks/rewrite.py``).  A block that whole sequences are not possible for
       has chunks of any tokens.
    4. Blocks that cannot be chunked, and the ops at which regions end, are in ``why_not``.
"""

from __future__ import annotations

from collections import defaultdict

import sympy
import torch
from torch import fx

from moec.overlap import LEAST
from moec.passes.chunks.apply import Groups, chunk
from moec.passes.chunks.region import Layout
from moec.passes.chunks.rows import Tokens, lead
from moec.passes.contract import Pass, PassContract
from moec.passes.shard.dispatch import Static, chosen
from moec.plan import Plan
from moec.program import Program, op_name
from moec.runtime.collectives import CONVERSIONS, collective, is_wait
from moec.runtime.torch_compat import expr, hint

PERMUTES = ("moec.permute", "moec.permute_kept", "moec.slots")
STAY = (torch.ops.aten.reshape.default, torch.ops.moec.i_to_r.default)
"""Ops on the way to a permute that leave tokens where they are."""


def _run(program: Program, plan: Plan) -> Program:
    assert plan.overlap is not None
    count, blocks = chunks_of(plan), _blocks(program)  # 1
    if count == 1:
        return program
    if plan.overlap.chunk_by == "sequences":  # 2 to 4
        whole = [b for b in blocks if _enough(program, b, count)]
        left = chunk(program, _groups(program, whole, True), count, declined="chunks are not whole sequences")
        blocks = [b for b in blocks if b not in whole] + left
    chunk(program, _groups(program, blocks, False), count, declined="experts are computed in one chunk")
    return program


def _enough(program: Program, block: frozenset[fx.Node], count: int) -> bool:
    """Are there two sequences a chunk?  (Where ops are inferred anew, sizes of none or one are taken for constants.)"""
    sequences = _sequences(program, _tokens_of(block)[0])
    if sequences is not None and (hint(sequences) or 0) >= LEAST * count:
        return True
    where = next((n.meta["where"] for n in block if n.meta.get("where")), "")
    found = "no sequences" if sequences is None else f"{hint(sequences)} sequences"
    wanted = f"{count} chunks of {LEAST}"
    program.why_not.append(f"{where}: chunks are not whole sequences: the example has {found}, for {wanted}")
    return False


def _groups(program: Program, blocks: list[frozenset[fx.Node]], by_sequence: bool) -> Groups:
    groups: Groups = defaultdict(list)
    for block in blocks:
        number, x = _tokens_of(block)
        sequences = _sequences(program, number) if by_sequence else None
        tokens = Tokens(number, None if sequences is None else expr(sequences))
        groups[tokens, Layout.of(x.meta["types"], tokens.lead(x.meta["val"]), by_sequence)].append(block)
    return groups


def _sequences(program: Program, tokens: sympy.Expr) -> int | torch.SymInt | None:
    """How many sequences the tokens are: as many as the first that are recorded as ``[B, S, …]``."""
    for node in program.graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and node.name not in program.params and lead(val, tokens) == 2:
            return val.shape[0]
    return None


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


def _tokens_of(block: frozenset[fx.Node]) -> tuple[sympy.Expr, fx.Node]:
    """The number of tokens of a block, and their value before they are dealt to experts."""
    permute = next(n for n in next(iter(block)).graph.nodes if n in block and op_name(n) in PERMUTES)
    x = node = permute.args[0]
    while node.op == "call_function" and (is_wait(node.target) or node.target in STAY or _deals(node)):
        moves = node.target not in STAY
        node = node.args[0]
        x = node if moves else x
    tokens = expr(permute.args[0].meta["val"].shape[0])
    return tokens, x


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
