"""Gradient reductions as nodes of the backward: ``Program.grad_reductions``, each started where a gradient is final.

Contract
    requires   a backward graph of ``joint``
    provides   complete gradients: each is summed over its group, by a start and a wait
    never      reduces what no gradient arrives for
"""

from __future__ import annotations

from torch import fx

from moec.passes.joint import JointGraphs
from moec.program import Program
from moec.runtime.collectives import TABLE
from moec.runtime.mesh import GRADIENTS, for_purpose
from moec.runtime.torch_compat import WAIT


def reduce_gradients(graphs: JointGraphs, program: Program) -> None:
    graph, mesh = graphs.backward.graph, program.mesh
    output = graph.output_node()
    grads: list[fx.Node | None] = list(output.args[0])
    for i, (name, grad) in enumerate(zip(graphs.params, grads, strict=True)):
        key = program.grad_reductions.get(name, "")
        if grad is None or not key:
            continue
        with graph.inserting_after(grad):
            args = (grad, 0, mesh.size(key), for_purpose(key, GRADIENTS))
            start = graph.call_function(TABLE["p_to_i"].op, args)
        with graph.inserting_after(start):
            wait = graph.call_function(WAIT, (start,))
        for node in (start, wait):
            node.meta.update(val=grad.meta["val"], where=program.params[name].name)
        grads[i] = wait
    output.args = (tuple(grads),)
