"""shard: one graph for one device becomes one graph for every rank, with typed collectives between.

Contract
    requires   normalized, raised (MoE blocks are permute … unpermute)
    provides   sharded: every value has a type on every atomic axis; sizes are local; each start has one wait
    preserves  values: the loss, the outputs and every gradient of the global batch
    never      writes a gradient-scale factor, or inserts a collective that no type asked for

Algorithm
    1. Layout: a type for every parameter (``layout.py``; ``overrides.py`` where the plan says more).
    2. Split the bias off linears whose contraction is sharded: it must be added once, after the sum.
    3. Walk the graph in order.  For every op and axis, ``solve`` says what the operands must become and what the
       result is; ``convert`` emits the difference.  Expert regions have their own rules (``experts.py``), and what
       looks along a sharded vocabulary is written with ops that need no gather (``vocab.py``); tokens that compete for
       places among experts compete across ranks (``capacity.py``).
    4. Re-write size arguments to local sizes (``sizes.py``).
    5. Outputs: scalars invariant, batch dims stay this rank's slice (``outputs.py``).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from moec.passes.contract import Pass, PassContract
from moec.passes.shard import capacity
from moec.passes.shard import layout as layouts
from moec.passes.shard.context import Context
from moec.passes.shard.convert import Converter, divides
from moec.passes.shard.experts import Experts
from moec.passes.shard.outputs import place_outputs
from moec.passes.shard.overrides import override
from moec.passes.shard.rule import Rule, differentiable, is_getitem, operands, shape
from moec.passes.shard.rules import is_creation, rule_for
from moec.passes.shard.sequence import Sequence
from moec.passes.shard.sizes import Sizes
from moec.passes.shard.solve import Operand, solve
from moec.passes.shard.vocab import Vocabulary
from moec.passes.shard.weight import weight_of
from moec.placement import I, P, R, S, Type, Types, V
from moec.plan import Plan
from moec.program import EQUAL_LENGTHS, Program, op_name
from moec.runtime.errors import MoecError
from moec.runtime.torch_compat import OpOverload, expr

aten = torch.ops.aten

SIZED = {"aten.reshape": 1, "aten.expand": 1, "aten.zeros": 0, "aten.ones": 0, "aten.full": 0,
         "aten.empty": 0, "aten.new_zeros": 1, "aten.new_ones": 1, "aten.new_full": 1, "aten.new_empty": 1}  # fmt: skip
"""op -> position of its size argument."""


class Sharder:
    def __init__(self, program: Program, plan: Plan) -> None:
        self.program, self.plan = program, plan
        self.graph, self.mesh = program.graph, program.mesh
        self.dp, self.tp = self.mesh.role("dp"), self.mesh.role("tp")
        self.sequence = Sequence(program, plan)
        self.sizes = Sizes(program, self.mesh.size(self.dp))
        self.convert = Converter(self.graph, self.mesh, self.sizes)
        self.experts = Experts(self)
        self.context = Context(self)
        self.vocabulary = Vocabulary(self)
        self.vocabulary_size = 0
        self.created: dict[tuple[fx.Node, int], str] = {}
        self.parts: dict[fx.Node, tuple[str, ...]] = {}
        """Rows of whole parameters of which a rank uses its share -> the axes that share them."""
        self.token_counts: list[fx.Node] = []
        """Global counts of more than the batch (B·S): equal on all ranks only if their sequence lengths are."""

    def run(self) -> Program:
        layout = layouts.infer(self.program, self.plan)  # 1
        override(self.program, self.plan, layout)
        self.plan.validate(self.mesh.world, self.program, layout.limits)
        self.program.layout_reasons = {self.program.params[p].name: why for p, why in layout.reasons.items()}
        self.created, self.vocabulary_size = layout.created, layout.vocabulary
        self.parts = {n: self.mesh.role(role) for n, (ph, role) in layout.parts.items() if ph in layout.at_use}
        self._place_inputs(layout)
        self._replicate_at_use(layout)
        self._split_row_biases()  # 2
        for node in self.graph.nodes:  # 3: new nodes are inserted before the current one, and so not visited
            if node.op == "get_attr":
                self._note(node, node.meta["val"], self._all(R), False)
            elif node.op == "call_function" and "types" not in node.meta:
                with self.graph.inserting_before(node):
                    self._visit(node)
            elif node.op == "output":
                with self.graph.inserting_before(node):
                    place_outputs(self, node)  # 5
        self.graph.eliminate_dead_code()
        # A value computed from such a count (a mean written as x.sum() / x.shape[0]) ties the ranks' lengths together.
        if any(
            isinstance(u.target, OpOverload) or u.target is torch.sym_float for n in self.token_counts for u in n.users
        ):
            self.program.facts.add(EQUAL_LENGTHS)
        self.graph.lint()
        self.program.module.recompile()
        return self.program

    # -- small tools, also for experts.py

    def _all(self, t: Type) -> Types:
        return dict.fromkeys(self.mesh.names, t)

    def _note(self, node: fx.Node, val, types, grad) -> fx.Node:
        node.meta.update(val=val, types=types, grad=grad)
        return node

    def call(self, target, args, val, types=None, grad=False) -> fx.Node:
        node = self.graph.call_function(target, args)
        source = next((a for a in args if isinstance(a, fx.Node)), None)
        node.meta["where"] = source.meta.get("where", "") if source is not None else ""
        return self._note(node, val, types if types is None else dict(types), grad)

    def default_type(self, node: fx.Node) -> Type:
        return I if node.meta["grad"] else R

    def shards(self, types: Types, dim: int) -> int:
        return self.mesh.size([a for a, t in types.items() if t.kind == "S" and t.dim == dim])

    def local_dim(self, node: fx.Node, dim: int):
        """The local size of a dim, as an int or a node."""
        if any(t.kind == "V" and t.dim == dim for t in node.meta["types"].values()):
            return self.call(aten.sym_size.int, (node, dim), None)
        return self._local(node.meta["val"].shape[dim], node.meta["types"], dim, node)

    def _local(self, size, types: Types, dim: int, node: fx.Node):
        n = self.shards(types, dim)
        if isinstance(size, int) and not divides(self.mesh, types, dim, size):
            raise MoecError(
                f"dim {dim} of {node.name} has size {size}, which {n} ranks do not divide ({types})",
                where=node.meta.get("where", ""),
                way_out=f"a degree that divides {size}",
            )
        return self.sizes.local(size, n)

    # -- steps

    def _place_inputs(self, layout: layouts.Layout) -> None:
        for node in self.program.placeholders():
            spec = self.program.params.get(node.name)
            if spec is not None:
                types = layouts.types_of(layout, node.name, self.mesh)
                grad = spec.requires_grad and differentiable(spec)
                node.meta["where"] = spec.name.rpartition(".")[0]
                # A value without a gradient makes no difference between I and R, but is *stored* as I.
                self._note(node, node.meta["val"], types, grad)
                self.program.params[node.name] = replace(spec, types=types)
                continue
            dim = self.program.inputs[node.name].batch_dim
            grad = differentiable(node.meta["val"])
            rest = I if grad else R
            types = {a: S(dim) if dim is not None and a in self.dp else rest for a in self.mesh.names}
            self._note(node, node.meta["val"], types, grad)

    def _replicate_at_use(self, layout: layouts.Layout) -> None:
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        for node in [n for n in self.program.placeholders() if n.name in layout.at_use]:
            users = list(node.users)
            with self.graph.inserting_before(first):
                used = self.convert(node, {a: R if t == I else t for a, t in node.meta["types"].items()})
            for user in users:
                user.replace_input_with(node, used)

    def _cut(self, part: fx.Node) -> None:
        users = list(part.users)
        with self.graph.inserting_after(part):
            mine = self.convert(part, {a: S(0) if a in self.parts[part] else t for a, t in part.meta["types"].items()})
        for user in users:
            user.replace_input_with(part, mine)

    def _split_row_biases(self) -> None:
        for node in list(self.graph.nodes):
            if (
                node.op != "call_function"
                or op_name(node) != "aten.linear"
                or len(node.args) < 3
                or node.args[2] is None
            ):
                continue
            w = weight_of(node, self.program)
            types = self.program.params[w.placeholder].types if w else {}
            if w is None or not any(t == S(w.dims[1]) for t in types.values()):
                continue
            bias = node.args[2]
            node.args = node.args[:2]
            with self.graph.inserting_after(node):
                add = self.graph.call_function(aten.add.Tensor, (node, bias))
            add.meta.update(node.meta)
            node.replace_all_uses_with(add, delete_user_cb=lambda user, add=add: user is not add)

    def _visit(self, node: fx.Node) -> None:
        val, name = node.meta.get("val"), op_name(node)
        if not isinstance(val, (torch.Tensor, tuple, list)):
            self._global_size(node)
        elif is_getitem(node):
            parent = node.args[0]
            grad = parent.meta["grad"] and differentiable(node.meta["val"])
            self._note(node, val, parent.meta["types"][node.args[1]], grad)
            if node in self.parts:
                self._cut(node)
        elif name == "moec.permute":
            self.experts.permute(node)
        elif name == "moec.unpermute":
            self._become(node, self.experts.unpermute(node))
        elif name in ("moec.grouped_mm", "moec.grouped_add"):
            self._grouped(node, name)
        elif self.mesh.names and capacity.has_capacity(node):
            capacity.spread(self, node)
        elif self.sequence.begins(node):
            self._begin(node, name)
        elif (other := self.vocabulary.rewrite(node)) is not None:
            self._become(node, other)
        elif name == "aten.scaled_dot_product_attention":
            self.context.attention(node)
        else:
            self._general(node, name)

    def _begin(self, node: fx.Node, name: str) -> None:
        """The first activation: sharded on the sequence from here on."""
        if found := self.sequence.sliced(node):
            value, t = found
            on_cp = {a: t if a in self.sequence.cp and x.kind in "IR" else x for a, x in value.meta["types"].items()}
            node.replace_input_with(value, self.convert(value, on_cp))
        first = self.vocabulary.rewrite(node)
        if first is None:
            self._general(node, name)
            first = node
        users = list(node.users)
        with self.graph.inserting_before(node.next):
            stream = self.convert(first, self.sequence.types(first))
        for user in users:
            user.replace_input_with(node, stream)
        if first is not node:
            self.graph.erase_node(node)

    def _become(self, node: fx.Node, other: fx.Node) -> None:
        node.replace_all_uses_with(other)
        self.graph.erase_node(node)

    def _global_size(self, node: fx.Node) -> None:
        """Numbers of the graph keep their global meaning; those that are local from now on are re-emitted."""
        val = node.meta.get("val")
        if isinstance(val, (float, torch.SymFloat)):
            node.meta["types"] = None  # computed from integers that have been re-emitted
            return
        if not isinstance(val, (int, torch.SymInt)):
            raise MoecError(
                f"{node.target} yields a {type(node.meta.get('val')).__name__}", where=node.meta.get("where", "")
            )
        value = self.sizes.local(val)
        if value is node:
            return
        if isinstance(value, fx.Node) and self.sizes.carries_batch(val) and len(expr(val).free_symbols) > 1:
            self.token_counts.append(value)
        for user in list(node.users):
            user.args = fx.node.map_aggregate(user.args, lambda a: value if a is node else a)
            user.kwargs = fx.node.map_aggregate(user.kwargs, lambda a: value if a is node else a)
        node.meta["types"] = None
        self.graph.erase_node(node)

    def _general(self, node: fx.Node, name: str) -> None:
        if not self.mesh.names:  # one rank: nothing to decide, and no rule needed
            many = isinstance(node.meta["val"], (tuple, list))
            self._note(node, node.meta["val"], [{} for _ in node.meta["val"]] if many else {}, False)
            return
        ops, rule = operands(node), rule_for(node)
        val = node.meta["val"]
        vals = val if isinstance(val, (tuple, list)) else [val]
        made = rule.created if name != "aten.arange" else ()  # a shard of arange is not an arange
        results_of = list(zip(rule.results, vals, strict=True))
        creates = {
            f for f in made if any(f in d and self.sizes.carries_batch(v.shape[d.index(f)]) for d, v in results_of)
        }
        targets: list[Types] = [{} for _ in ops]
        results: list[Types] = [{} for _ in vals]
        for a in self.mesh.names:
            on_axis = [Operand(o.meta["types"][a], not o.meta["grad"], o.op == "placeholder") for o in ops]
            if is_creation(node):
                on_axis = [Operand(R, True)] * len(ops)
            wanted = frozenset(creates) if a in self.dp else self._made_in_parts(node, rule, a)
            into, out = solve(rule, on_axis, wanted)
            for t, x in zip(targets, into, strict=True):
                t[a] = x
            for t, x in zip(results, out, strict=True):
                t[a] = x
        if not is_creation(node):
            new = iter([self.convert(o, t) for o, t in zip(ops, targets, strict=True)])
            node.args, node.kwargs = fx.node.map_arg(
                (node.args, node.kwargs), lambda n: next(new) if isinstance(n.meta.get("val"), torch.Tensor) else n
            )
        grad = any(o.meta["grad"] for o in ops) and not is_creation(node) and name != "aten.detach"
        results = self._split_parts(node, name, results)
        # Integers have no gradient: I and R are the same, and R is how it is written.
        results = [
            t if grad and differentiable(v) else {a: R if x == I else x for a, x in t.items()}
            for t, v in zip(results, vals, strict=True)
        ]
        self._note(
            node,
            val,
            results if isinstance(val, (tuple, list)) else results[0],
            grad and any(differentiable(v) for v in vals),
        )
        self._localize(node, name)  # 4

    def _made_in_parts(self, node: fx.Node, rule: Rule, axis: str) -> frozenset[str]:
        """Expanded dims that the layout wants sharded over this axis from the start."""
        dims = [d for (n, d), role in self.created.items() if n is node and axis in self.mesh.role(role)]
        return frozenset(f for d in dims if (f := rule.results[0][d]) in rule.created)

    def _split_parts(self, node: fx.Node, name: str, results: list[Types]) -> list[Types]:
        """A packed dim that is split into its parts leaves each part plainly sharded."""
        if name not in ("aten.split", "aten.split_with_sizes"):
            return results
        dim = (node.args[2] if len(node.args) > 2 else 0) % len(shape(operands(node)[0]))
        n = len(results)
        for a, t in results[0].items():
            if t.kind == "S" and t.dim == dim and t.parts != n:
                raise MoecError(
                    f"{node.name} cuts dim {dim} in {n} parts, but it is sharded as {t} on {a}",
                    where=node.meta.get("where", ""),
                    way_out="a layout that keeps this weight whole",
                )
        return [{a: S(dim) if t.kind == "S" and t.dim == dim else t for a, t in r.items()} for r in results]

    def _localize(self, node: fx.Node, name: str) -> None:
        if name in SIZED:
            at = SIZED[name]
            types = node.meta["types"]
            local = [
                -1 if any(t == V for t in types.values()) and d == 0 else self._local(s, types, d, node)
                for d, s in enumerate(shape(node))
            ]
            node.args = (*node.args[:at], local, *node.args[at + 1 :])
        elif name in ("aten.split", "aten.split_with_sizes"):
            dim = (node.args[2] if len(node.args) > 2 else 0) % len(shape(operands(node)[0]))
            n = self.shards(node.meta["types"][0], dim)
            if n > 1:
                sizes = node.args[1]
                local = (
                    [self._local(s, node.meta["types"][0], dim, node) for s in sizes]
                    if isinstance(sizes, (list, tuple))
                    else self._local(sizes, node.meta["types"][0], dim, node)
                )
                node.args = (node.args[0], local, *node.args[2:])
        elif name == "moec.blocked_logsumexp":
            x, blocks = node.args
            node.args = (x, self._local(blocks, node.meta["types"], len(shape(node)) - 1, node))
        elif name == "moec.logsumexp_pick":
            *given, blocks = node.args
            node.args = (*given, self._local(blocks, node.meta["types"][0], len(shape(given[0])) - 1, node))
        elif name == "aten.conv1d" and (n := self.shards(node.meta["types"], len(shape(node)) - 2)) > 1:
            node.args = (*node.args[:6], node.args[6] // n)  # depthwise: each rank convolves its own channels
        else:
            for v, types in zip(_as_list(node.meta["val"]), _as_list(node.meta["types"]), strict=True):
                for d, s in enumerate(v.shape):
                    if isinstance(s, int):
                        self._local(s, types, d, node)

    def _grouped(self, node: fx.Node, name: str) -> None:
        """Grouped GEMM and bias: rows ragged over ep and edp; the ordinary contraction rules over etp."""
        x, w, counts = node.args
        into_x: Types = {}
        into_w: Types = {}
        out: Types = {}
        for axis in self.mesh.axes:
            a, tx, tw = axis.name, x.meta["types"][axis.name], w.meta["types"][axis.name]
            if axis.expert != "etp":
                into_x[a], into_w[a], out[a] = V, S(0) if axis.expert == "ep" else R, V
            elif name == "moec.grouped_add":
                into_x[a], into_w[a], out[a] = tx, (P if tx == P else R if tx == R else S(1, tx.parts)), tx
            elif tw.kind == "S" and tw.dim == 2:
                into_x[a], into_w[a], out[a] = R, tw, S(1, tw.parts)
            elif tw.kind == "S" and tw.dim == 1:
                into_x[a], into_w[a], out[a] = S(1, tw.parts), tw, P
            else:
                into_x[a], into_w[a], out[a] = R, R, R
        grad = x.meta["grad"] or w.meta["grad"]
        node.args = (self.convert(x, into_x), self.convert(w, into_w), counts)
        self._note(node, node.meta["val"], out, grad)


def _as_list(x) -> list:
    return list(x) if isinstance(x, (list, tuple)) else [x]


def _run(program: Program, plan: Plan) -> Program:
    return Sharder(program, plan).run()


CONTRACT = PassContract(
    name="shard",
    requires=frozenset({"normalized", "raised"}),
    provides=frozenset({"sharded"}),
    conflicts_with=frozenset({"sharded", "lowered"}),
)
shard = Pass(CONTRACT, _run)
__all__ = ["CONTRACT", "Sharder", "shard"]
