"""Purposes: exchanges of tokens, parameters, gradients and everything else have process groups of their own.

A communicator works through what it is given in order.  Over one that they share, an exchange of tokens would wait for
a gather that was started ahead of its use, and the few counts of a chunk for all rows of the chunk before.

1. Exchanges of rows travel over ``#exchange``, those of their counts over ``#counts``.
2. What moves parameters alone (a gather of them), and reduce-scatters that nothing but a gradient is made of, over
   ``#parameters``.
3. Gradient reductions have their purpose from ``reductions``; the rest (tensor parallelism) needs none.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from moec.passes.joint.regather import parameter_values
from moec.runtime.collectives import collective, group_of, is_start, is_wait
from moec.runtime.mesh import COUNTS, EXCHANGE, PARAMETERS, for_purpose

aten, moec = torch.ops.aten, torch.ops.moec
EXCHANGES = frozenset({"exchange", "counts", "equal"})
"""Primitives that move tokens between experts, or say how many."""
_ON_THE_WAY = frozenset({
    aten.view.default, aten.add.Tensor, aten.slice.Tensor, aten._to_copy.default, aten.t.default, aten.transpose.int,
    aten.cat.default, aten.constant_pad_nd.default, moec.pack.default, moec.unpack.default, operator.getitem,
})  # fmt: skip
"""What a gradient may pass between its reduce-scatter and the output."""


def give_purposes(graph: fx.Graph, params: set[str]) -> None:
    """``params``: placeholders of parameters, in this graph."""
    of_params, to_grads = parameter_values(graph, params), _only_gradients(graph)
    for node in graph.nodes:
        if node.op != "call_function" or not is_start(node.target) or "#" in group_of(node):
            continue
        primitive, purpose = collective(node.target).primitive, ""  # type: ignore[union-attr]  # a start is one
        if primitive in EXCHANGES:
            purpose = COUNTS if primitive == "counts" else EXCHANGE  # 1
        elif node in of_params or (primitive == "reduce_scatter" and node in to_grads):
            purpose = PARAMETERS  # 2
        node.args = (*node.args[:-1], for_purpose(group_of(node), purpose))


def _only_gradients(graph: fx.Graph) -> set[fx.Node]:
    """Starts whose results reach nothing but the output, and are not computed with on the way."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        light = node.target in _ON_THE_WAY or is_wait(node.target) or collective(node.target) is not None
        if node.op == "output" or (light and node.users and all(u in found for u in node.users)):
            found.add(node)
    return found
