"""lower (eager): what remains is ordinary PyTorch that one rank can run.

Contract
    requires   sharded
    provides   lowered: parameters enter the graph as they are stored; ``grad_reductions`` says what is still owed
    preserves  values
    never      reorders collectives

Algorithm
    1. Peel the I→R conversions that all uses of a parameter share off it, through transposes and the like (``hoist``):
       forward they are the identity, backward the reduction of that parameter's gradient.  Peeled, all reductions
       become one epilogue of the backward (bucketed, and deferrable by gradient accumulation) instead of one collective
       each in the middle of it.
    2. Note which parameters the graph casts to fewer bits (``Program.narrowed``): a run keeps such copies.
    3. ``bind`` (once the process groups exist) replaces group keys by the names of real groups.  If parameters are to
       be resharded after the forward, it tells ``runtime.reshard`` of every gather, casts of parameters read the
       copies of ``runtime.narrow``, and FP8 weights are what a graph of their own made last (``once.py``); each takes
       one more placeholder.  Graphs of ``step`` read both too, copies each by a placeholder of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace as changed

import torch
from torch import fx

from moec.passes.contract import Pass, PassContract
from moec.passes.hoist import become_r, owed
from moec.passes.once import quantise_once
from moec.passes.rewrite import replace
from moec.passes.typed import dtype_of
from moec.placement import R
from moec.plan import Plan
from moec.program import Gathered, Program
from moec.runtime.collectives import collective, keys_of, name_groups
from moec.runtime.narrow import NARROW, narrow, narrow_copy
from moec.runtime.reshard import RESHARDING, gathered
from moec.step import Step

CAST = torch.ops.aten._to_copy.default


def _run(program: Program, plan: Plan) -> Program:
    for node in program.placeholders():  # 1
        if node.name in program.params and (axes := owed(node)):
            become_r(program, node, axes)
            node.meta["types"] = {a: R if a in axes else t for a, t in node.meta["types"].items()}
            program.grad_reductions[node.name] = program.mesh.key(axes)
    for cast in program.graph.find_nodes(op="call_function", target=CAST):  # 2
        source, to = cast.args[0], dtype_of(cast)
        if source.name in program.params and to.itemsize < dtype_of(source).itemsize:
            program.narrowed[source.name] = to
    program.graph.lint()
    program.module.recompile()
    return program


def group_keys(program: Program) -> set[str]:
    """Every group that the program communicates over, the gradient epilogue included."""
    keys = {k for n in program.graph.nodes if n.op == "call_function" and collective(n.target) for k in keys_of(n)}
    keys |= program.step.keys if program.step else set()
    return keys | set(program.grad_reductions.values())


def bind(program: Program, names: dict[str, str]) -> Program:
    """A fork whose collectives name real process groups: ``names`` maps group key -> c10d group name."""
    bound = program.fork()
    for node in bound.graph.nodes:
        if node.op == "call_function" and collective(node.target):
            name_groups(node, names)
    bound.step = program.step and program.step.bound(names)
    quantise_once(bound)
    if bound.step:
        bound.step = _narrow_step(bound.step, bound.narrowed)
    else:
        if bound.narrowed:
            _narrow(bound)
        if resharded := bound.resharded():
            _reshard(bound, resharded)
    bound.module.recompile()
    return bound


def _narrow(program: Program) -> None:
    graph = program.graph
    with graph.inserting_before(next(iter(graph.nodes))):
        copies = graph.placeholder(NARROW)
    for cast in graph.find_nodes(op="call_function", target=CAST):
        source, to = cast.args[0], dtype_of(cast)
        if program.narrowed.get(source.name) == to:
            with graph.inserting_before(cast):
                read = graph.call_function(narrow, (copies, source, source.name, to))
            read.meta.update(cast.meta)
            replace(cast, read)


def _narrow_step(step: Step, narrowed: Mapping[str, torch.dtype]) -> Step:
    """Graphs that read the copies, forward and backward: placeholders of their own (``narrow_copy``)."""

    def read(module: fx.GraphModule, prefix: str = "") -> fx.GraphModule:
        wanted = {prefix + name: (narrow_copy(name), to) for name, to in narrowed.items()}
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        first, copies = next(iter(graph.nodes)), dict[str, fx.Node]()
        for cast in graph.find_nodes(op="call_function", target=CAST):
            name, to = wanted.get(getattr(cast.args[0], "name", ""), ("", None))
            if to == dtype_of(cast):
                if name not in copies:
                    with graph.inserting_before(first):
                        copies[name] = graph.placeholder(name)
                    copies[name].meta.update(cast.meta)
                replace(cast, copies[name])
        return fx.GraphModule(module, graph)

    if not narrowed:
        return step
    backward = step.backward_for
    return changed(
        step,
        forward=read(step.forward),
        inference=read(step.inference),
        backward_for=lambda given: read(backward(given), "saved_"),
        made={},
    )


def _reshard(program: Program, resharded: dict[fx.Node, Gathered]) -> None:
    graph = program.graph
    with graph.inserting_before(next(iter(graph.nodes))):
        resharding = graph.placeholder(RESHARDING)
    for value, how in resharded.items():
        with graph.inserting_after(value):
            args = (resharding, value, how.start.name, how.shard, how.dim, *how.start.args[-2:], value.meta["gathered"])
            noted = graph.call_function(gathered, args)
        noted.meta.update(value.meta)
        del value.meta["gathered"]
        value.replace_all_uses_with(noted, delete_user_cb=lambda user, noted=noted: user is not noted)


CONTRACT = PassContract(
    name="lower",
    requires=frozenset({"sharded"}),
    provides=frozenset({"lowered"}),
    conflicts_with=frozenset({"lowered"}),
)
lower = Pass(CONTRACT, _run)
