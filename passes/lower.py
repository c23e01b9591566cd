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
       one more placeholder.
"""

from __future__ import annotations

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
from moec.runtime.narrow import NARROW, narrow
from moec.runtime.reshard import RESHARDING, gathered

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
    if program.step:
        bound.step = program.step.bound(names)
    else:
        quantise_once(bound)
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
