"""rejoin: chunks that were joined where equal layers meet, and cut again behind, pass as they are.

Contract
    requires   expanded
    provides   rejoined: no value is joined of chunks only to be cut into the same chunks
    preserves  values, bit for bit
    never      touches anything but ``moec::split_tokens`` and ``moec::join_tokens``

``expand`` copies layers that hand one value on, so ``chunk_experts`` joins chunks there.  Once all layers are there, a
chunk of one layer is the input of the same chunk of the next, and need not wait for the others.

Algorithm, for each split of what a join made with the same number of chunks, tokens' dims and blocks:
    1. Each chunk's readers read the chunk that was joined.
    2. A join that nobody else reads goes; the mark of a layer's end moves to the operation before it.
"""

from __future__ import annotations

import torch
from torch import fx

from moec.passes.contract import Pass, PassContract
from moec.plan import Plan
from moec.program import Program

SPLIT, JOIN = torch.ops.moec.split_tokens.default, torch.ops.moec.join_tokens.default


def _run(program: Program, plan: Plan) -> Program:
    for split in program.graph.find_nodes(op="call_function", target=SPLIT):
        joined, *how = split.args
        if joined.target is JOIN and how == [len(joined.args[0]), len(joined.args[1]), joined.args[2]]:
            _pass_on(split, joined)
    program.graph.lint()
    program.module.recompile()
    return program


def _pass_on(split: fx.Node, joined: fx.Node) -> None:
    for part in list(split.users):  # 1
        part.replace_all_uses_with(joined.args[0][part.args[1]])
        split.graph.erase_node(part)
    split.graph.erase_node(split)
    if not joined.users:  # 2
        if joined.meta.get("boundary"):
            joined.prev.meta["boundary"] = True
        joined.graph.erase_node(joined)


CONTRACT = PassContract(
    name="rejoin",
    requires=frozenset({"expanded"}),
    provides=frozenset({"rejoined"}),
    conflicts_with=frozenset({"rejoined"}),
    copies=True,
)
rejoin = Pass(CONTRACT, _run, applies=lambda plan: plan.overlap is not None)
