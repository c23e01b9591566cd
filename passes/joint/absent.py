"""absent: the backward of a program of whose outputs some get no gradient (logits beside a loss, say).

``autograd`` would not compute what such gradients lead to.  Neither does this graph:

1. What is linear in an absent gradient is absent, collectives included.
2. A sum with something absent is its other operand; a parameter that only absent gradients reach gets None.
3. Whatever else reads an absent gradient reads zeros: its placeholder stays, and the caller passes them.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from moec.runtime.collectives import collective, is_wait
from moec.runtime.torch_compat import expr

aten = torch.ops.aten

_OF_FIRST = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.expand.default, aten.slice.Tensor, aten.select.int, aten.clone.default, aten._to_copy.default,
    aten.neg.default, aten.detach.default, aten.alias.default, aten.div.Tensor, aten.div.Scalar, aten.mul.Scalar,
    aten.sum.default, aten.sum.dim_IntList, aten.embedding_dense_backward.default, operator.getitem,
})  # fmt: skip
"""Linear in the first operand, whatever the others are."""
_PRODUCTS = frozenset({aten.mul.Tensor, aten.mm.default, aten.bmm.default})
_SUMS = frozenset({aten.add.Tensor})


def without(backward: fx.Graph, absent: set[str]) -> fx.Graph:
    """A copy of a backward graph for tangents (by name of the placeholder) that are absent."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(backward, {}))
    zeros: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op == "placeholder":
            if node.name in absent:
                zeros.add(node)
        elif node.op == "call_function":
            if node.target in _SUMS and zeros & set(node.args) and not zeros.issuperset(node.args):
                _drop(node, zeros)  # 2
            elif _absent(node, zeros):  # 1
                zeros.add(node)
    output = graph.output_node()
    output.args = (tuple(None if g in zeros else g for g in output.args[0]),)
    graph.eliminate_dead_code()
    for node in graph.find_nodes(op="placeholder"):
        if not node.users:
            graph.erase_node(node)
    return graph


def _absent(node: fx.Node, zeros: set[fx.Node]) -> bool:
    if node.target in _PRODUCTS:
        return bool(zeros & set(node.args))
    if node.target in _SUMS:
        return zeros.issuperset(node.args)
    if node.target in _OF_FIRST or is_wait(node.target) or collective(node.target):
        return node.args[0] in zeros
    return False


def _drop(total: fx.Node, zeros: set[fx.Node]) -> None:
    other = next(a for a in total.args if a not in zeros)
    if isinstance(other, fx.Node) and _alike(other.meta.get("val"), total.meta.get("val")):
        total.replace_all_uses_with(other)


def _alike(a: object, b: object) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return a.dtype == b.dtype and [*map(expr, a.shape)] == [*map(expr, b.shape)]
