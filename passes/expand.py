"""expand: every layer of the model, where the graph holds only some of many equal ones.

Contract
    requires   captured; any later stage will do, it is last so that the other passes see few layers
    provides   expanded: no ``Program.repeats`` is left
    preserves  values, types and the order of collectives
    never      copies what it has not seen to repeat: raises ``Unlike``, and the model is compiled in full

Capture keeps the first three units of a run of equal layers (``Repeat``) and has seen that all of them are called
alike.  For each run

1. The *segment* of a unit is what lies between the boundaries before and after it.
2. *Steady state*: the segment of the third unit is that of the second, node by node, up to the names of parameters:
   the same operations, constants, shapes, types and groups, and the same values from outside.  What leaves a segment
   has the types of what enters it, and leaves through its boundary (statistics apart).  So a copy of it may
   follow it, and another one that.
3. Copy the third segment for every unit that is missing, reading from the one before, with the unit's own parameters.
4. What the program says of the third unit it says of each copy: parameters, reductions, blocks, statistics, reasons.
5. Boundaries go; the value that one stood on is marked (``meta["boundary"]``), so that others can tell units apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from moec.passes.contract import Pass, PassContract
from moec.plan import Plan
from moec.program import ParamSpec, Program, Repeat, Statistic, placeholder_name
from moec.runtime.errors import MoecError
from moec.runtime.torch_compat import expr, is_unbacked

BOUNDARY = torch.ops.moec.boundary.default


class Unlike(MoecError):
    """Two layers that look alike are not compiled alike."""


def expand_layers(program: Program) -> Program:
    """Expand in place; returns ``program``.  Raises ``Unlike``."""
    for repeat in program.repeats:
        _Run(program, repeat).expand()
    for mark in program.graph.find_nodes(op="call_function", target=BOUNDARY):  # 5
        mark.args[0].meta["boundary"] = True
        mark.replace_all_uses_with(mark.args[0])
        program.graph.erase_node(mark)
    if program.repeats:
        program.repeats = ()
        program.graph.lint()
        program.module.recompile()
    return program


class _Run:
    def __init__(self, program: Program, repeat: Repeat) -> None:
        self.program, self.repeat = program, repeat
        self.graph = program.graph
        marks = {n.args[1]: n for n in self.graph.find_nodes(op="call_function", target=BOUNDARY)}
        self.marks = [marks[repeat.boundary(unit)] for unit in range(repeat.KEPT)]
        first, second, third = self.marks
        self.before = list(_between(first, second))  # 1
        self.segment = list(_between(second, third))
        layers = {unit: "|".join(map(re.escape, repeat.layers(unit))) for unit in (1, 2)}
        self._paths = {unit: re.compile(rf"(?<![\w.])(?:{paths})(?!\w)") for unit, paths in layers.items()}
        self.counted = {self._output(s.index): name for name, s in program.statistics.items()}

    def expand(self) -> None:
        self._steady()
        _, entry, exit_ = self.marks
        follows, last, readers = exit_.next, exit_, set(exit_.users)
        params = self._params()
        statistics: dict[str, fx.Node] = {}
        for unit in range(self.repeat.KEPT, self.repeat.units):  # 3
            env: dict[fx.Node, fx.Node] = {entry: last, **params[unit]}
            with self.graph.inserting_before(follows):
                for node in self.segment:
                    env[node] = copy = self.graph.node_copy(node, lambda n, env=env: env.get(n, n))
                    if "where" in copy.meta:
                        copy.meta["where"] = self._rename(copy.meta["where"], unit)
                    if node in self.counted:
                        statistics[self._rename(self.counted[node], unit)] = copy
                last = env[exit_.args[0]]
            last.meta["boundary"] = True
        node = follows  # what was made of the third unit's output is made of the last one's
        while node.op != "root":
            if "where" in node.meta:
                node.meta["where"] = self._rename(node.meta["where"], self.repeat.units - 1)
            node = node.next
        exit_.replace_all_uses_with(last, delete_user_cb=lambda user: user in readers)
        self._tables(statistics)

    # -- 2

    def _steady(self) -> None:
        first, second, third = self.marks
        if len(self.before) != len(self.segment):
            raise self._unlike(f"compile to {len(self.before)} and {len(self.segment)} operations")
        self.pairs: dict[fx.Node, fx.Node] = {first: second}
        names = self._param_pairs()
        for a, b in zip(self.before, self.segment, strict=True):
            if a.op != b.op or (a.target != b.target and a.op != "get_attr"):
                raise self._unlike(f"differ in {a.name} and {b.name}", b)
            if not self._same((a.args, a.kwargs), (b.args, b.kwargs), names):
                raise self._unlike(f"differ in what {a.name} and {b.name} are given", b)
            if _facts(a) != _facts(b) or self._rename(a.meta.get("where", ""), 2, 1) != b.meta.get("where", ""):
                raise self._unlike(f"differ in shape or type at {a.name} and {b.name}", b)
            self.pairs[a] = b
        if self.pairs.get(second.args[0]) is not third.args[0]:
            raise self._unlike("do not end in the same operation", third)
        if _facts(first) != _facts(second) or _facts(second) != _facts(third):
            raise self._unlike("leave another type than they take", third)
        for segment, mark in ((self.before, second), (self.segment, third)):
            own = {*segment, mark}
            for node in segment:
                if leaks := [u for u in node.users if u not in own and not self._is_count(node, u)]:
                    raise self._unlike(f"hand on {node.name}, which {leaks[0].name} uses", node)

    def _param_pairs(self) -> dict[str, str]:
        """Placeholder of a parameter of the second unit -> that of the third."""
        by_name = {s.name: s for s in self.program.params.values()}
        pairs, reductions = {}, self.program.grad_reductions
        for spec in self._specs(1):
            other = by_name.get(self._rename(spec.name, 2, 1))
            if other is None or self._renamed(spec, 2, 1, other.placeholder) != other:
                raise self._unlike(f"differ in the parameter {spec.name}")
            if reductions.get(spec.placeholder) != reductions.get(other.placeholder):
                raise self._unlike(f"reduce the gradient of {spec.name} over different groups")
            pairs[spec.placeholder] = other.placeholder
        return pairs

    def _same(self, a: Any, b: Any, params: dict[str, str]) -> bool:
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            if a in self.pairs or (a.op == "placeholder" and a.name in params):
                return b is self.pairs.get(a) or (a.op == "placeholder" and params.get(a.name) == b.name)
            if a.op == b.op == "get_attr":
                x, y = (self.program.constants[n.target] for n in (a, b))
                return x is y or (x.dtype == y.dtype and torch.equal(x, y))
            return a is b
        if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
            return len(a) == len(b) and all(self._same(x, y, params) for x, y in zip(a, b, strict=True))
        if isinstance(a, dict) and isinstance(b, dict):
            return a.keys() == b.keys() and all(self._same(a[k], b[k], params) for k in a)
        if isinstance(a, slice) and isinstance(b, slice):
            return self._same((a.start, a.stop, a.step), (b.start, b.stop, b.step), params)
        return type(a) is type(b) and bool(a == b)

    def _is_count(self, node: fx.Node, user: fx.Node) -> bool:
        return user.op == "output" and node in self.counted

    # -- 3 and 4

    def _params(self) -> dict[int, dict[fx.Node, fx.Node]]:
        """Unit -> placeholder of the third unit's parameter -> the unit's own, which this makes."""
        program, specs = self.program, {s.placeholder: s for s in self._specs(2)}
        made: dict[int, dict[fx.Node, fx.Node]] = {u: {} for u in range(self.repeat.KEPT, self.repeat.units)}
        together: list[fx.Node] = []  # in the order of the model: those of the next unit follow those of this one
        for node in program.placeholders():
            if node.name in specs:
                together.append(node)
            if not together or (node.next.op == "placeholder" and node.next.name in specs):
                continue
            with self.graph.inserting_before(together[-1].next):
                for unit in made:
                    for source in together:
                        made[unit][source] = self._param(specs[source.name], source, unit)
            together = []
        order = {n.name: i for i, n in enumerate(program.placeholders())}
        program.params = dict(sorted(program.params.items(), key=lambda kv: order[kv[0]]))
        return made

    def _param(self, spec: ParamSpec, source: fx.Node, unit: int) -> fx.Node:
        program = self.program
        node = self.graph.placeholder(placeholder_name(self._rename(spec.name, unit)))
        node.meta.update(source.meta)
        node.meta["where"] = self._rename(source.meta.get("where", ""), unit)
        program.params[node.name] = self._renamed(spec, unit, 2, node.name)
        if spec.placeholder in program.grad_reductions:
            program.grad_reductions[node.name] = program.grad_reductions[spec.placeholder]
        return node

    def _tables(self, statistics: dict[str, fx.Node]) -> None:
        program, units = self.program, range(self.repeat.KEPT, self.repeat.units)
        ours = self.repeat.layers(2)
        blocks = [b for b in program.blocks if self._inside(b.path, ours)]
        if blocks:
            at = program.blocks.index(blocks[-1]) + 1
            copies = [
                replace(b, path=self._rename(b.path, u), stacked=tuple(self._rename(s, u) for s in b.stacked))
                for u in units
                for b in blocks
            ]
            program.blocks = (*program.blocks[:at], *copies, *program.blocks[at:])
        for name, why in list(program.layout_reasons.items()):
            if self._inside(name, ours):
                program.layout_reasons |= {self._rename(name, u): self._rename(why, u) for u in units}
        of_third = [w for w in program.why_not if self._rename(w, self.repeat.units) != w]
        program.why_not += [self._rename(w, u) for u in units for w in of_third]
        if statistics:
            self._add_statistics(statistics, ours)

    def _add_statistics(self, copies: dict[str, fx.Node], ours: list[str]) -> None:
        """Behind those of the third unit of the same kind, as a pass over all layers would have added them."""
        program = self.program
        output = program.graph.output_node()
        leaves = list(output.args[0])
        start = len(leaves) - len(program.statistics)
        last = {_kind(n): n for n in program.statistics if self._inside(n.partition(":")[0], ours)}
        nodes: dict[str, fx.Node] = {}
        for name, s in program.statistics.items():
            nodes[name] = leaves[s.index]
            if last.get(_kind(name)) == name:
                nodes |= {n: copy for n, copy in copies.items() if _kind(n) == _kind(name)}
        output.args = ((*leaves[:start], *nodes.values()),)
        program.statistics = {
            n: Statistic(start + i, dict(v.meta.get("types", {}))) for i, (n, v) in enumerate(nodes.items())
        }

    # -- names

    def _specs(self, unit: int) -> list[ParamSpec]:
        layers = self.repeat.layers(unit)
        return [s for s in self.program.params.values() if self._inside(s.name, layers)]

    def _inside(self, name: str, layers: list[str]) -> bool:
        return any(name == path or name.startswith(f"{path}.") for path in layers)

    def _rename(self, text: str, unit: int, source: int = 2) -> str:
        """``text`` with the paths of one unit's layers in place of another's."""
        new = dict(zip(self.repeat.layers(source), self.repeat.layers(unit), strict=True))
        return self._paths[source].sub(lambda found: new[found.group()], text)

    def _renamed(self, spec: ParamSpec, unit: int, source: int, placeholder: str) -> ParamSpec:
        assert not spec.aliases, "layers that share tensors are equal to none"
        members = tuple(self._rename(m, unit, source) for m in spec.members)
        return replace(spec, placeholder=placeholder, name=self._rename(spec.name, unit, source), members=members)

    def _output(self, index: int) -> fx.Node:
        return self.program.graph.output_node().args[0][index]

    def _unlike(self, how: str, node: fx.Node | None = None) -> Unlike:
        first, second = (self.repeat.layers(u)[0] for u in (1, 2))
        return Unlike(f"{first} and {second} {how}", where=node.meta.get("where", "") if node is not None else "")


def _kind(statistic: str) -> str:
    return statistic.partition(":")[2]


def _between(start: fx.Node, end: fx.Node) -> Iterator[fx.Node]:
    node = start.next
    while node is not end:
        yield node
        node = node.next


def _facts(node: fx.Node) -> tuple:
    """What must be the same of two nodes that stand for each other."""
    types = node.meta.get("types")
    rest = (node.meta.get(k) for k in ("grad", "padded", "gathered"))
    return (_show(node.meta.get("val")), repr(types), *rest)


def _show(val: Any) -> Any:
    if isinstance(val, (tuple, list)):
        return tuple(map(_show, val))
    if isinstance(val, torch.Tensor):
        return (val.dtype, tuple("?" if is_unbacked(expr(s)) else expr(s) for s in val.shape))
    return expr(val) if isinstance(val, (int, torch.SymInt)) and not isinstance(val, bool) else type(val)


def _run(program: Program, plan: Plan) -> Program:
    return expand_layers(program)


CONTRACT = PassContract(
    name="expand",
    requires=frozenset({"captured"}),
    provides=frozenset({"expanded"}),
    conflicts_with=frozenset({"expanded"}),
    copies=True,
)
expand = Pass(CONTRACT, _run)
