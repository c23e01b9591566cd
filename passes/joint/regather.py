"""Regathering: parameters that are resharded after the forward are gathered again by nodes of the backward.

Contract
    requires   the graphs of ``joint``, of a program with FSDP and ``reshard_after_forward``
    provides   no gathered matrix is saved for the backward, but for those of the last two gathers
    preserves  values, bit for bit: the nodes of the forward, once more
    never      gathers what the backward does not read

Algorithm
    1. A saved value that was computed from parameters alone, by a gather and ops that only move elements, is made anew.
       What the last two gathers (and those of bytes between) bring is kept, as are vectors (``Program.resharded``).
    2. The nodes that make it are copied to the backward, before the first use there of anything that one of them makes,
       and read the shards, which are saved in its stead.  Values of one gather share the copies.
    3. Of parameters that travel together only those come again that something reads.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from moec.passes.joint import JointGraphs
from moec.program import Program
from moec.runtime.collectives import LOW_GATHER, TABLE, collective, is_start, is_wait
from moec.runtime.ops.pack import flatten_shapes

aten, moec = torch.ops.aten, torch.ops.moec
GATHER_LOW = TABLE[LOW_GATHER].op
MOVES = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int, aten.permute.default,
    aten.slice.Tensor, aten.cat.default, aten.unsqueeze.default, aten.squeeze.dim, aten.select.int, aten.alias.default,
    aten.detach.default, aten.clone.default, aten._to_copy.default, aten.split_with_sizes.default, aten.split.Tensor,
    aten.expand.default, moec.pack.default, moec.unpack.default, moec.pack_bytes.default, moec.unpack_bytes.default,
    moec.turn.default, moec.i_to_r.default, operator.getitem,
})  # fmt: skip
KEPT = 2
"""Gathers at the end of the forward that the backward begins with."""


def regather(graphs: JointGraphs, program: Program) -> None:
    if "reshard_after_forward" not in program.facts:
        return
    made_by = _made_by(graphs.forward.graph, program)
    anew = _made_anew(graphs, made_by)  # 1
    if anew:
        _Regather(graphs, made_by, anew).run()


def parameter_values(graph: fx.Graph, params: set[str]) -> dict[fx.Node, frozenset[fx.Node]]:
    """Values computed from parameters alone -> the gathers behind them."""
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "placeholder" and node.name in params:
            found[node] = frozenset()
        elif node.op == "call_function" and inputs and all(i in found for i in inputs):
            own = frozenset([node]) if is_gather(node) else frozenset()
            found[node] = own.union(*(found[i] for i in inputs))
    return found


def is_gather(node: fx.Node) -> bool:
    found = collective(node.target)
    return found is not None and found.primitive == "all_gather"


def _made_by(graph: fx.Graph, program: Program) -> dict[fx.Node, frozenset[fx.Node]]:
    return parameter_values(graph, {n for n, s in program.params.items() if not s.buffer})


def _made_anew(graphs: JointGraphs, made_by: dict[fx.Node, frozenset[fx.Node]]) -> list[fx.Node]:
    saved = graphs.forward.graph.output_node().args[0][graphs.num_outputs :]
    gathers = [n for n in made_by if is_gather(n)]
    wide = [i for i, n in enumerate(gathers) if n.meta["val"].dtype != torch.uint8] or list(range(len(gathers)))
    last = set(gathers[wide[-KEPT:][0] :] if wide else ())  # FP8 weights of a layer travel beside the rest of it
    moved: set[fx.Node] = set()
    for node in made_by:  # what a gather and moves alone make, of what each rank makes of its own part
        if not made_by[node] or (_moves(node) and all(i in moved for i in _sources(node))):
            moved.add(node)

    def matrix(node: fx.Node) -> bool:
        return isinstance(val := node.meta.get("val"), torch.Tensor) and val.ndim > 1

    return [v for v in saved if v in moved and made_by[v] and not made_by[v] & last and matrix(v)]


def _sources(node: fx.Node) -> list[fx.Node]:
    """What the values of ``node`` come from: of a narrow gather not the master, which is there for gradients alone."""
    return [node.args[0]] if node.target is GATHER_LOW else node.all_input_nodes


def _moves(node: fx.Node) -> bool:
    return node.target in MOVES or is_wait(node.target) or is_gather(node)


class _Regather:
    def __init__(self, graphs: JointGraphs, made_by: dict[fx.Node, frozenset[fx.Node]], anew: list[fx.Node]) -> None:
        self.graphs, self.made_by, self.anew = graphs, made_by, anew
        self.forward, self.backward = graphs.forward.graph, graphs.backward.graph
        self.saved: list[fx.Node] = list(self.forward.output_node().args[0][graphs.num_outputs :])
        placeholders = self.backward.find_nodes(op="placeholder")
        self.stands_for = dict(zip(self.saved, placeholders, strict=False))
        self.plain: set[fx.Node] = set()
        for node in made_by:  # made anew of the parameter; what else a rank made of its own part is saved
            if node.op == "placeholder" or (_moves(node) and all(i in self.plain for i in _sources(node))):
                self.plain.add(node)
        self.needed = set(anew)
        for node in reversed(list(made_by)):
            if node in self.needed and not self._saves(node):
                self.needed.update(_sources(node))
        self.env: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        order = {n: i for i, n in enumerate(self.backward.nodes)}
        uses = {v: min(self.stands_for[v].users, key=order.__getitem__) for v in self.anew}
        for value in sorted(self.anew, key=lambda v: order[uses[v]]):  # 2
            with self.backward.inserting_before(uses[value]):
                self.stands_for[value].replace_all_uses_with(self._copy(value))
            self.backward.erase_node(self.stands_for.pop(value))
            self.saved.remove(value)
        output = self.forward.output_node()
        output.args = ((*output.args[0][: self.graphs.num_outputs], *self.saved),)
        for graph in (self.forward, self.backward):
            graph.lint()

    def _copy(self, value: fx.Node) -> fx.Node:
        """``value`` in the backward; copies of what makes it come before it, where the graph is being written."""
        todo = [value]
        while todo:
            node = todo[-1]
            missing = [i for i in self._reads(node) if i not in self.env]
            if node in self.env or not missing:
                todo.pop()
                if node not in self.env:
                    self.env[node] = self._one(node)
            todo += missing
        return self.env[value]

    def _reads(self, node: fx.Node) -> list[fx.Node]:
        if node.target is moec.pack.default:
            return [node.args[0][i] for i in self._positions(node)]
        return [] if self._saves(node) else _sources(node)

    def _saves(self, node: fx.Node) -> bool:
        """A parameter's part, or what is computed of it before it is gathered (its FP8 numbers)."""
        return node.op == "placeholder" or not (self.made_by[node] or node in self.plain)

    def _one(self, node: fx.Node) -> fx.Node:
        if self._saves(node):
            return self._shard(node)
        if node.target is operator.getitem and node.args[0].target is moec.unpack.default:
            at = self._positions(node.args[0]).index(node.args[1])
            copy = self.backward.call_function(operator.getitem, (self.env[node.args[0]], at))
        elif node.target in (moec.pack.default, moec.unpack.default):
            copy = self.backward.call_function(node.target, self._narrowed(node))
        elif node.target is GATHER_LOW:
            copy = self.backward.call_function(TABLE["s_to_r"].op, (self.env[node.args[0]], *node.args[-3:]))
        else:
            copy = self.backward.node_copy(node, self.env.__getitem__)
        copy.meta = dict(node.meta)
        if isinstance(val := node.meta.get("val"), (list, tuple)) and node.target is moec.unpack.default:
            copy.meta["val"] = [val[i] for i in self._positions(node)]
        elif node.target is moec.pack.default or self._flat(node):
            size = sum(self._elements(node))
            copy.meta["val"] = node.meta["val"].new_empty((size,))
        return copy

    def _shard(self, placeholder: fx.Node) -> fx.Node:
        """A placeholder of the backward for what a rank has of a parameter, saved from now on if it is not yet."""
        if placeholder not in self.stands_for:
            first = next(iter(self.backward.nodes))
            last_saved = self.stands_for[self.saved[-1]] if self.saved else None
            at = self.backward.inserting_after(last_saved) if last_saved else self.backward.inserting_before(first)
            with at:
                made = self.backward.placeholder(f"saved_{placeholder.name}")
            made.meta["val"] = placeholder.meta.get("val")
            self.stands_for[placeholder] = made
            self.saved.append(placeholder)
        return self.stands_for[placeholder]

    # -- 3: a pack, the gather of it and the unpack behind it have the same positions

    def _positions(self, node: fx.Node) -> list[int]:
        unpack = node
        while unpack.target is not moec.unpack.default:
            unpack = next(iter(unpack.users))
        return sorted({g.args[1] for g in unpack.users if g in self.needed})

    def _flat(self, node: fx.Node) -> bool:
        """Is it the gather of a packed vector, or its wait?"""
        source = node.args[0] if is_wait(node.target) else node
        return is_start(source.target) and source.args[0].target is moec.pack.default

    def _elements(self, node: fx.Node) -> list[int]:
        unpack = node
        while unpack.target is not moec.unpack.default:
            unpack = next(iter(unpack.users))
        ranks = unpack.args[1] if node.target is moec.pack.default else 1
        return [unpack.meta["val"][i].numel() // ranks for i in self._positions(unpack)]

    def _narrowed(self, node: fx.Node) -> tuple:
        kept = self._positions(node)
        if node.target is moec.pack.default:
            sources, size, dims = node.args
            return ([self.env[sources[i]] for i in kept], size, [dims[i] for i in kept])
        flat, size, dims, _ = node.args
        shapes = [list(node.meta["val"][i].shape) for i in kept]
        return (self.env[flat], size, [dims[i] for i in kept], flatten_shapes(shapes))


__all__ = ["is_gather", "parameter_values", "regather"]
