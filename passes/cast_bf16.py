"""cast_bf16: a program of fp32 parameters computes in bf16, and keeps in fp32 what loses by it.

Contract
    requires   sharded
    provides   bf16: products, attention, tables and what lies between read and write bf16; routers, statistics of
               norms, exponentials, sums and losses read and write fp32; ``meta["precision"]`` says why
    preserves  parameters (fp32, and so their gradients, from before these are summed over ranks) and, where every
               float is promoted to float64, values
    never      narrows an integer, a buffer, or what is wider than fp32

Algorithm
    1. Routers: the products that the choice of experts is computed from are fp32, whatever class they are of.
       So are products without weights in a module that sums floats up along the sequence (``RECURRENT``).
    2. Demand, from the end to the start: a value is wanted ``low`` if every reader is of class low, or moves it to
       such; ``high`` if every reader is of class high, or computes for such.
    3. Casts, from the start to the end: operands of class low are narrowed, of class high widened.  A move narrows what
       is wanted low: so a gather or an exchange of activations carries bf16, and a parameter is cast before whatever is
       done with it.  Everything else computes in the widest dtype of its operands, parameters following the others,
       or in fp32 where it is wanted high.  One cast serves all readers of a value.
    4. What a node yields then follows: it is inferred on one rank's shapes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx

from moec.passes.contract import Pass, PassContract
from moec.passes.dtype_rules import ATTENTION, BETWEEN, RECURRENT, ROUTERS, class_of
from moec.passes.hoist import I_TO_R, owed
from moec.passes.rewrite import new
from moec.passes.verify.dialect import meaning
from moec.passes.verify.reinfer import local_placeholder
from moec.plan import Plan
from moec.program import DtypeChoice, Program, op_name
from moec.runtime.collectives import group_of
from moec.runtime.errors import MoecError
from moec.runtime.torch_compat import WAIT, fake_mode_of, python_dispatcher

CAST = torch.ops.aten._to_copy.default
LOW, HIGH = torch.bfloat16, torch.float32


def _run(program: Program, plan: Plan) -> Program:
    masters = [s for s in program.params.values() if s.dtype == HIGH and not s.buffer]
    if not masters:
        program.why_not.append("cast_bf16: the model has no fp32 parameters; it computes in the dtypes that it has")
        return program
    classes = _classes(program)  # 1
    demand = _demand(program, classes)  # 2
    _Caster(program, classes, demand).run()  # 3, 4
    program.dtype_choices = _choices(program)
    program.graph.lint()
    program.module.recompile()
    return program


# -- 1


def _classes(program: Program) -> dict[fx.Node, tuple[str, str]]:
    classes = {n: class_of(n) for n in program.graph.nodes if n.op == "call_function"}
    for node in program.graph.nodes:
        if node in classes and meaning(node) in ROUTERS:
            for product in _products_before(node, classes):
                classes[product] = ("high", "a router")
    recurrent = {n.meta.get("where", "") for n in classes if op_name(n) in RECURRENT and _is_float(n)}
    for node in classes:
        if meaning(node) in BETWEEN and node.meta.get("where", "") in recurrent:
            classes[node] = ("high", "a recurrence")
    for node in program.graph.find_nodes(op="call_function", target=I_TO_R):
        if (source := _parameter(node)) is not None and not set(group_of(node).split(",")) <= owed(source):
            classes[node] = ("", "")  # its gradient is summed here: in the parameter's own dtype
    return classes


def _products_before(node: fx.Node, classes: dict[fx.Node, tuple[str, str]]) -> list[fx.Node]:
    """The products that ``node``'s float operands are computed from without another product on the way."""
    found, seen, todo = [], set(), list(node.all_input_nodes)
    while todo:
        source = todo.pop()
        if source in seen or source not in classes or not _is_float(source):
            continue
        seen.add(source)
        if classes[source][1] in ("a product with weights", "a product", "a router"):
            found.append(source)
        else:
            todo += source.all_input_nodes
    return found


def _parameter(node: fx.Node) -> fx.Node | None:
    """The placeholder that ``node`` is a view or conversion of."""
    while node.op == "call_function":
        tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
        if len(tensors) != 1:
            return None
        node = tensors[0]
    return node if node.op == "placeholder" else None


# -- 2


def _demand(program: Program, classes: dict[fx.Node, tuple[str, str]]) -> dict[fx.Node, str]:
    """Node -> ``low``, ``high`` or nothing in particular."""
    demand: dict[fx.Node, str] = {}
    for node in reversed(list(program.graph.nodes)):
        wants = {_wants(user, classes, demand) for user in node.users if _reads_floats(user)}
        demand[node] = wants.pop() if len(wants) == 1 else ""
    return demand


def _wants(user: fx.Node, classes: dict[fx.Node, tuple[str, str]], demand: dict[fx.Node, str]) -> str:
    kind = classes.get(user, ("", ""))[0]
    if kind in ("low", "high"):
        return kind
    return demand[user] if kind == "move" or demand.get(user) == "high" else ""


def _reads_floats(user: fx.Node) -> bool:
    """False for what takes from a node results that are no floats: its dtype is not the node's."""
    return op_name(user) != "getitem" or _is_float(user)


# -- 3 and 4


class _Caster:
    def __init__(self, program: Program, classes: dict, demand: dict[fx.Node, str]) -> None:
        self.program, self.classes, self.demand = program, classes, demand
        self.casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        self.of_parameters: set[fx.Node] = set()
        self.local: dict[fx.Node, Any] = {}
        """What each node yields on one rank, as a fake."""

    def run(self) -> None:
        mode = fake_mode_of(n.meta["val"] for n in self.program.placeholders())
        assert mode is not None
        with mode, python_dispatcher(), torch.no_grad():
            for node in list(self.program.graph.nodes):
                if node.op == "placeholder":
                    self.local[node] = local_placeholder(self.program, node, True)
                    spec = self.program.params.get(node.name)
                    if spec is not None and not spec.buffer:
                        self.of_parameters.add(node)
                elif node.op == "get_attr":
                    self.local[node] = mode.from_tensor(self.program.constants[node.target])
                elif node.op == "call_function":
                    self._convert(node)
                    self._infer(node)

    def _convert(self, node: fx.Node) -> None:
        floats = [n for n in dict.fromkeys(node.all_input_nodes) if self._dtype(n) in (LOW, HIGH)]
        if not floats:
            return
        kind, reason = self.classes[node]
        wanted = self.demand[node]
        if kind == "move" and set(floats) <= self.of_parameters:
            self.of_parameters.add(node)
        to: torch.dtype | None = None
        if kind in ("low", "high"):
            to = LOW if kind == "low" else HIGH
        elif kind == "move" and wanted == "low":
            to, reason = LOW, "for its readers"
        elif kind == "":
            # Numbers decide nothing about the dtype of a result.
            floats = [n for n in floats if not isinstance(v := self.local[n], Tensor) or v.ndim]
            to, reason = self._follows(floats, wanted)
        node.meta["precision"] = reason
        for source in floats:
            if to is not None and self._dtype(source) != to and self._may(source):
                node.replace_input_with(source, self._cast(source, to, node))

    def _may(self, source: fx.Node) -> bool:
        """Buffers stay as they are; of an op's results each is cast by itself."""
        spec = self.program.params.get(source.name) if source.op == "placeholder" else None
        return isinstance(self.local[source], Tensor) and not (spec is not None and spec.buffer)

    def _follows(self, floats: list[fx.Node], wanted: str) -> tuple[torch.dtype | None, str]:
        if wanted == "high":
            return HIGH, "for what is fp32"
        others = [n for n in floats if n not in self.of_parameters]
        if len(floats) < 2 or not others:
            return None, "as its operand"
        wide = any(self._dtype(n) == HIGH for n in others)
        return (HIGH, "its widest operand") if wide else (LOW, "as its operands")

    def _cast(self, source: fx.Node, to: torch.dtype, reader: fx.Node) -> fx.Node:
        if (source, to) in self.casts:
            return self.casts[source, to]
        graph = self.program.graph
        # A parameter is cast at its first use, where FSDP gathers it; a value once, outside of the layers that read it.
        at_use = source in self.of_parameters or source.op != "call_function"
        with graph.inserting_before(reader if at_use else source.next):
            value, beside = source, reader if at_use else source
            if to == LOW and meaning(reader) in ATTENTION and source not in reader.args[:3]:
                # A mask: the lowest fp32 number would become -inf, and a row of them no numbers at all.
                value = self._new(beside, torch.ops.aten.clamp.default, (source, torch.finfo(LOW).min), HIGH)
            cast = self.casts[source, to] = self._new(beside, CAST, (value,), to, dtype=to)
        if source in self.of_parameters:
            self.of_parameters.add(cast)
        return cast

    def _new(self, beside: fx.Node, target, args: tuple, yields: torch.dtype, **kwargs) -> fx.Node:
        source = args[0]
        made = new(beside, target, args, source.meta["val"].to(yields), **kwargs)
        made.meta |= {k: source.meta[k] for k in ("types", "grad", "padded") if k in source.meta}
        made.meta["precision"] = "for its readers"
        self.local[made] = self.local[source].to(yields)
        return made

    def _dtype(self, node: fx.Node) -> torch.dtype | None:
        value = self.local.get(node)
        if isinstance(value, (tuple, list)):
            value = value[0]
        return value.dtype if isinstance(value, Tensor) else None

    def _infer(self, node: fx.Node) -> None:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.local.__getitem__)
        try:
            found = args[0] if node.target is WAIT else node.target(*args, **kwargs)
        except Exception as e:
            dtypes = ", ".join(f"{n.name} {self._dtype(n)}" for n in node.all_input_nodes)
            raise MoecError(
                f"{op_name(node)} does not take the dtypes that reach it ({dtypes}): {e}",
                where=node.meta.get("where", ""),
                way_out="leave Plan.precision out, and tell us",
            ) from e
        self.local[node] = found
        node.meta["val"] = _retyped(node.meta.get("val"), found)


def _retyped(recorded: Any, found: Any) -> Any:
    """The recorded value, of the dtype that was found."""
    if isinstance(recorded, (tuple, list)):
        return type(recorded)(_retyped(r, f) for r, f in zip(recorded, found, strict=True))
    if isinstance(recorded, Tensor) and isinstance(found, Tensor) and recorded.dtype != found.dtype:
        return recorded.to(found.dtype)
    return recorded


def _is_float(node: fx.Node) -> bool:
    val = node.meta.get("val")
    if isinstance(val, (tuple, list)):
        return any(isinstance(v, Tensor) and v.dtype.is_floating_point for v in val)
    return isinstance(val, Tensor) and val.dtype.is_floating_point


def _choices(program: Program) -> tuple[DtypeChoice, ...]:
    """What every op that yields floats computes in, and why, ops of a module together."""
    found: Counter[tuple[str, str, str, str]] = Counter()
    for node in program.graph.nodes:
        if node.op == "call_function" and "precision" in node.meta and _is_float(node):
            val = node.meta["val"]
            first = val if isinstance(val, Tensor) else next(v for v in val if v.dtype.is_floating_point)
            dtype = str(first.dtype).removeprefix("torch.")
            found[node.meta.get("where", ""), op_name(node), dtype, node.meta["precision"]] += 1
    return tuple(DtypeChoice(*key, count) for key, count in found.items())


CONTRACT = PassContract(
    name="cast_bf16",
    requires=frozenset({"sharded"}),
    provides=frozenset({"bf16"}),
    conflicts_with=frozenset({"bf16", "fsdp", "lowered"}),
)
cast_bf16 = Pass(CONTRACT, _run, applies=lambda plan: plan.precision is not None and plan.precision.compute == "bf16")
__all__ = ["CONTRACT", "cast_bf16"]
