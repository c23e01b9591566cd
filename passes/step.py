"""step: from a lowered program to the graphs that run, for plans with ``overlap``.

1. Forward and backward as graphs (``joint``); gradient reductions and regathers become nodes of the backward.
2. For every combination of outputs that get a gradient, the backward without what the others lead to (``absent``).
3. Each of these graphs, and the forward without what only a backward needs, gets process groups by purpose, is bucketed
   and scheduled, and is checked (``verify/order.py``).
"""

from __future__ import annotations

from torch import fx

from moec.passes.joint import JointGraphs, joint_graphs
from moec.passes.joint.absent import without
from moec.passes.joint.purposes import give_purposes
from moec.passes.joint.reductions import reduce_gradients
from moec.passes.joint.regather import regather
from moec.passes.verify.order import check_order
from moec.plan import Plan
from moec.program import Program
from moec.runtime.collectives import collective, group_of
from moec.step import Given, Step


def make_step(program: Program, plan: Plan) -> Step:
    """Raises MoecError for what has no such graphs."""
    graphs = joint_graphs(program)  # 1
    reduce_gradients(graphs, program)
    regather(graphs, program)
    params = set(program.params)
    give_purposes(graphs.forward.graph, params)
    give_purposes(graphs.backward.graph, {f"saved_{p}" for p in params})
    saved = tuple(n.name for n in graphs.backward.graph.find_nodes(op="placeholder") if n.name.startswith("saved_"))

    def finished(module: fx.GraphModule) -> fx.GraphModule:  # 3
        check_order(module.graph, program.mesh)
        return fx.GraphModule(module, module.graph)

    def backward_for(given: Given) -> fx.GraphModule:  # 2
        return finished(without(graphs.backward, {f"tangent_{i}" for i in graphs.differentiable if i not in given}))

    return Step(
        finished(graphs.forward),
        finished(_inference(graphs)),
        graphs.num_outputs,
        saved,
        graphs.differentiable,
        graphs.params,
        backward_for,
        frozenset(_keys(graphs.forward) | _keys(graphs.backward)),
    )


def _inference(graphs: JointGraphs) -> fx.GraphModule:
    graph = fx.Graph()
    results = graph.graph_copy(graphs.forward.graph, {})
    graph.output(results[: graphs.num_outputs])
    graph.eliminate_dead_code()
    return fx.GraphModule(graphs.forward, graph)


def _keys(module: fx.GraphModule) -> set[str]:
    return {group_of(n) for n in module.graph.nodes if n.op == "call_function" and collective(n.target)}
