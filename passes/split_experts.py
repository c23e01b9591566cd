"""split_experts: the weight gradients of fused experts as an op of their own, so that they can run beside an exchange.

Contract
    requires   a backward graph of ``joint``
    provides   no op computes both the gradient that goes on to the dispatch and the experts' weight gradients
    preserves  values, bit for bit: each op computes what it is asked for as the whole op does
    never      splits what gives one of the two kinds only

The price is one product of the backward (of the gradient with ``w_out``) that both compute: the caller compares what
the split graph takes with what the whole one does.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

moec = torch.ops.moec
ROWS = {moec.experts_backward.default: 2, moec.experts_rows_backward.default: 1}
"""How many of the results are gradients of rows (and of their weights); the others are those of the experts' weights.
The last argument says which are needed."""


def split_experts(whole: fx.Graph) -> fx.Graph | None:
    """A copy of the graph, or None if there is nothing to split."""
    found = [n for n in whole.nodes if n.op == "call_function" and n.target in ROWS and _both(n)]
    if not found:
        return None
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(whole, copies))
    for node in found:
        _split(graph, copies[node])
    return graph


def _both(node: fx.Node) -> bool:
    need, rows = node.args[-1], ROWS[node.target]
    return any(need[:rows]) and any(need[rows:]) and all(u.target is operator.getitem for u in node.users)


def _split(graph: fx.Graph, node: fx.Node) -> None:
    need, rows = list(node.args[-1]), ROWS[node.target]
    with graph.inserting_after(node):
        weights = graph.call_function(node.target, (*node.args[:-1], [n and i >= rows for i, n in enumerate(need)]))
    weights.meta = dict(node.meta)
    node.args = (*node.args[:-1], [n and i < rows for i, n in enumerate(need)])
    for part in list(node.users):
        if part.args[1] >= rows:
            part.args = (weights, part.args[1])
            weights.append(part)
