"""step: from a lowered program to the graphs that run, for plans with ``overlap``.

1. Forward and backward as graphs (``joint``); gradient reductions and regathers become nodes of the backward.
2. For every combination of outputs that get a gradient, the backward without what the others lead to (``absent``).
3. Each of these graphs, and the forward without what only a backward needs, gets process groups by purpose, is bucketed
   and scheduled, and is checked (``verify/order.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from moec.cost import Sizes
from moec.cost import cluster as load_cluster
from moec.overlap import Overlap
from moec.passes.bucket import buckets
from moec.passes.joint import JointGraphs, joint_graphs
from moec.passes.joint.absent import without
from moec.passes.joint.purposes import give_purposes
from moec.passes.joint.reductions import reduce_gradients
from moec.passes.joint.regather import regather
from moec.passes.joint.storages import note_storages
from moec.passes.overlap import overlap
from moec.passes.overlap.tasks import Costs
from moec.passes.split_experts import split_experts
from moec.passes.verify.order import check_order
from moec.plan import Plan
from moec.program import Program
from moec.runtime.collectives import collective, keys_of
from moec.step import Given, Step


def make_step(program: Program, plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> Step:
    """``shapes``: sizes of a rank's inputs, by path, that the schedule is made for; the same on every rank.

    Raises MoecError for what has no such graphs, and where ``Overlap.memory_gb`` cannot be kept."""
    assert plan.overlap is not None
    return finish(complete_graphs(program), program, plan.overlap, shapes)


def complete_graphs(program: Program) -> JointGraphs:  # 1
    """With complete gradients, no gathered parameters among what is saved, groups by purpose, memory noted."""
    graphs = joint_graphs(program)
    reduce_gradients(graphs, program)
    regather(graphs, program)
    params = set(program.params)
    give_purposes(graphs.forward.graph, params)
    give_purposes(graphs.backward.graph, {f"saved_{p}" for p in params})
    return note_storages(graphs, params)


def finish(
    graphs: JointGraphs, program: Program, options: Overlap, shapes: Mapping[str, tuple[int, ...]]
) -> Step:  # 2 and 3
    """``graphs`` stay as they are."""
    params = set(program.params)
    sizes = Sizes.of(program, shapes, (graphs.forward.graph, graphs.backward.graph))
    cluster = load_cluster(options.cluster)
    bound = None if options.memory_gb is None else int(options.memory_gb * 1e9)
    saved = tuple(n.name for n in graphs.backward.graph.find_nodes(op="placeholder") if n.name.startswith("saved_"))

    def finished(root: fx.GraphModule, graph: fx.Graph, is_backward: bool = False) -> fx.GraphModule:  # 3
        costs = Costs(cluster, program.mesh, sizes)
        variants = [graph] if options.bucket_mb is None else buckets(graph, costs, options.bucket_mb)
        graph = variants[0]
        if options.schedule:
            owned = {f"saved_{p}" for p in params} if is_backward else params
            variants += [apart for v in variants if (apart := split_experts(v)) is not None]
            graph = overlap(variants, costs, owned, is_backward, bound)
        check_order(graph, program.mesh)
        return fx.GraphModule(root, graph)

    made: dict[Given, fx.GraphModule] = {}

    def backward_for(given: Given) -> fx.GraphModule:  # 2
        if given not in made:
            absent = {f"tangent_{i}" for i in graphs.differentiable if i not in given}
            made[given] = finished(graphs.backward, without(graphs.backward.graph, absent), is_backward=True)
        return made[given]

    step = Step(
        finished(graphs.forward, graphs.forward.graph),
        finished(graphs.forward, _inference(graphs)),
        graphs.num_outputs,
        saved,
        graphs.differentiable,
        graphs.params,
        backward_for,
        frozenset(_keys(graphs.forward) | _keys(graphs.backward)),
        options,
        shapes,
    )
    if step.differentiable:
        backward_for(step.usual())  # what cannot be scheduled is refused now, not in the first backward
    return step


def _inference(graphs: JointGraphs) -> fx.Graph:
    graph = fx.Graph()
    results = graph.graph_copy(graphs.forward.graph, {})
    graph.output(results[: graphs.num_outputs])
    graph.eliminate_dead_code()
    return graph


def _keys(module: fx.GraphModule) -> set[str]:
    return {k for n in module.graph.nodes if n.op == "call_function" and collective(n.target) for k in keys_of(n)}
