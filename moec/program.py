"""Program: the intermediate representation that capture makes, passes rewrite and runtimes execute.

A Program is an FX graph plus everything that a pass needs to know about it; there are no globals.

* ``module.graph`` has one placeholder for every parameter and buffer and one for every tensor input, and returns a
  flat tuple of output leaves.  ``node.meta["val"]`` is the fake tensor (or symbolic int) that the node yields;
  ``node.meta["where"]`` the dotted path of the module that it came from;
  ``node.meta["types"]`` (after ``shard``) its :data:`moec.placement.Types`.
* ``params`` and ``inputs`` say what each placeholder is; ``out_spec`` how the flat outputs become the user's
  return value (a Hugging Face dataclass, a dict, a tensor).
* Sizes are symbolic.  Until ``shard`` they are *global*; after it the graph is the local program of one rank and
  ``batch_symbols`` stand for local sizes.
"""

from __future__ import annotations

import copy
import difflib
import operator
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from moec.guards import size_problems, solve_sizes
from moec.placement import Types, show
from moec.router import Router
from moec.runtime.collectives import is_start
from moec.runtime.mesh import Mesh
from moec.runtime.torch_compat import LazyGraphModule, OpOverload, expr
from moec.step import Step

HISTORY = "_amax_history"
"""What a history's name ends with (``moec.delayed``); before it stands a weight's."""
PENDING = "its gradient is a pending sum"
"""Why a product is not FP8 under a plan (``why_not``)."""
EQUAL_LENGTHS = "equal_lengths"
"""Fact: the program computes with the global number of tokens, so all ranks must pass inputs of the same shape."""


@dataclass(frozen=True)
class ParamSpec:
    """A parameter or buffer placeholder.

    ``name`` is the original name; experts of a ``ModuleList`` are one parameter ``[E, ...]`` whose name has ``*`` for
    the expert index and whose ``members`` are the original names in order.  ``aliases`` are further original names of
    the same tensor (tied weights).
    """

    placeholder: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    buffer: bool = False
    persistent: bool = True
    members: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    types: Types = field(default_factory=dict)
    """Placement on the mesh; empty until ``shard``."""
    initial: float | None = None
    """Of a buffer that a pass made, and the user's model lacks: what it is filled with at first.  It keeps its dtype
    whatever the model is cast to."""
    history: bool = False
    """A buffer of past magnitudes (``moec.delayed``): what arrives as its gradient are those of this step, a maximum
    that is pending over all ranks."""

    @property
    def differentiable(self) -> bool:
        """Does the graph's backward give it a gradient?"""
        return self.history or (self.requires_grad and not self.buffer)


@dataclass(frozen=True)
class InputSpec:
    """A tensor input.  ``path`` is how the user passes it (``"input_ids"`` or ``"0"``); ``batch_dim`` the dim that is
    split over dp, or None."""

    placeholder: str
    path: str
    batch_dim: int | None
    ndim: int
    dtype: torch.dtype
    static: tuple[int | None, ...] = ()
    """Per dim the size that capture baked in, or None where any size will do."""
    bounds: tuple[Any, ...] = ()
    """What the graph asks of an integer input's values (``moec.bounds.Bound``)."""


@dataclass(frozen=True)
class OutputSpec:
    """An output leaf: a tensor (``constant`` is None) with its types, or a constant that the graph does not compute."""

    path: str
    index: int | None
    """Position among the graph's results, None for a constant."""
    constant: Any = None
    types: Types = field(default_factory=dict)
    global_shape: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Statistic:
    """A value that leaves the graph behind the outputs, for people: float64, without a gradient."""

    index: int
    """Position among the graph's results."""
    types: Types = field(default_factory=dict)
    """After ``shard``: a pending sum (P) over some axes, the same on all ranks of the others."""

    @property
    def pending(self) -> tuple[str, ...]:
        """The axes over which what ranks have is to be summed."""
        return tuple(a for a, t in self.types.items() if t.kind == "P")


@dataclass(frozen=True)
class MoEBlock:
    """A MoE block that capture found: ``path`` of the module that owns the experts, and how it was raised."""

    path: str
    num_experts: int
    top_k: int
    stacked: tuple[str, ...]
    """Names of the expert parameters, each ``[E, ...]``."""
    guide: Any = None
    """What raised it (``moec.capture.guide.Guide``), kept so that the proof can be repeated."""


@dataclass(frozen=True)
class Repeat:
    """``units`` equal units of ``period`` layers each, from layer ``first`` of the list ``path`` on, of which the graph
    holds the first ``KEPT``: enough to see that the third is as the second.  Its boundaries (``moec::boundary``) lie
    after each of them; ``passes/expand.py`` puts in the rest."""

    path: str
    first: int
    period: int
    units: int

    KEPT: ClassVar[int] = 3

    @property
    def name(self) -> str:
        return f"{self.path}.{self.first}"

    def boundary(self, unit: int) -> str:
        return f"{self.name}:{unit}"

    def layers(self, unit: int) -> list[str]:
        """Paths of the layers of a unit."""
        start = self.first + unit * self.period
        return [f"{self.path}.{i}" if self.path else str(i) for i in range(start, start + self.period)]

    @property
    def left_out(self) -> list[str]:
        return [path for unit in range(self.KEPT, self.units) for path in self.layers(unit)]


@dataclass(frozen=True)
class DtypeChoice:
    """What ``count`` ops of the module ``where`` compute in (``bfloat16``, ``float32``), and why."""

    where: str
    op: str
    dtype: str
    why: str
    count: int


@dataclass(frozen=True)
class Gathered:
    """How a whole parameter came to be: ``start`` gathers, alone or with others, dim ``dim`` of ``shard``."""

    start: fx.Node
    shard: fx.Node
    dim: int


@dataclass(frozen=True)
class OncePerStep:
    """A graph that is run once an optimizer step: it takes the parameters ``params`` (placeholders), and what it
    returns the program's graph reads."""

    module: fx.GraphModule
    params: tuple[str, ...]


@dataclass
class Program:
    module: fx.GraphModule
    params: dict[str, ParamSpec]
    inputs: dict[str, InputSpec]
    outputs: list[OutputSpec]
    out_spec: pytree.TreeSpec
    batch_symbols: frozenset[str] = frozenset()
    training: bool = True
    blocks: tuple[MoEBlock, ...] = ()
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    """get_attr targets -> tensors lifted by capture."""
    mesh: Mesh = field(default_factory=Mesh)
    size_guards: tuple[Any, ...] = ()
    """What capture assumed of (global) input sizes, relations of their symbols (``moec.guards``)."""
    facts: set[str] = field(default_factory=lambda: {"captured"})
    """What holds of this graph: the vocabulary of ``PassContract.requires`` and ``provides``."""
    grad_reductions: dict[str, str] = field(default_factory=dict)
    """After ``lower``: parameter placeholder -> group key over which its gradient is summed when backward ends."""
    narrowed: dict[str, torch.dtype] = field(default_factory=dict)
    """After ``lower``: parameter placeholder -> dtype of the copy of it that the graph reads."""
    once: OncePerStep | None = None
    """Once bound to process groups: what is computed of parameters alone, FP8 weights."""
    statistics: dict[str, Statistic] = field(default_factory=dict)
    """``<path of a MoE block>:<what>`` -> a value past the outputs; ``tally`` (``moec.tally``) for every block."""
    why_not: list[str] = field(default_factory=list)
    """Rewrites that were looked at and declined, each with its reason."""
    own_plan: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """What the model says of its own layout (``moec.own_plan``): role -> pattern of names -> Hugging Face's style."""
    router: Router | None = None
    """What ``configure_router`` changed about the routers."""
    layout_reasons: dict[str, str] = field(default_factory=dict)
    """Parameter name -> who placed it and why."""
    step: Step | None = None
    """Where the plan has ``overlap``, forward and backward as graphs: these run, not ``module``."""
    dtype_choices: tuple[DtypeChoice, ...] = ()
    """What ``cast_bf16`` decided, in graph order."""
    repeats: tuple[Repeat, ...] = ()
    """Runs of equal layers that the graph holds some of; none once they are expanded."""

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def placeholders(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "placeholder"]

    def fork(self) -> Program:
        """A copy whose graph can be rewritten without touching this one (parameters are specs, never copied).  Its
        code is generated when it first runs, not for every pass."""
        module = LazyGraphModule(self.module, copy.deepcopy(self.graph))
        return replace(
            self,
            module=module,
            params=dict(self.params),
            inputs=dict(self.inputs),
            outputs=list(self.outputs),
            constants=dict(self.constants),
            facts=set(self.facts),
            grad_reductions=dict(self.grad_reductions),
            narrowed=dict(self.narrowed),
            statistics=dict(self.statistics),
            why_not=list(self.why_not),
            layout_reasons=dict(self.layout_reasons),
        )

    def add_statistic(self, name: str, value: fx.Node) -> None:
        """Let ``value`` leave the graph under ``name``."""
        output = self.graph.output_node()
        self.statistics[name] = Statistic(len(output.args[0]))
        output.args = ((*output.args[0], value),)

    def size_problems(self, shapes: Mapping[str, tuple[int, ...]], dp: int = 1) -> list[str]:
        """Which assumptions of capture inputs of these shapes (by placeholder, a dp-th of the batch) do not meet."""
        found = []
        for node in self.placeholders():
            if node.name in self.inputs and node.name in shapes and "val" in node.meta:
                spec = self.inputs[node.name]
                for dim, (size, n) in enumerate(zip(node.meta["val"].shape, shapes[node.name], strict=True)):
                    scale = dp if dim == spec.batch_dim else 1
                    found.append((expr(size), f"size {dim} of {spec.path!r}", n * scale))
        sizes, problems = solve_sizes(found)
        return problems[:1] or size_problems(self.size_guards, sizes)

    def resharded(self) -> dict[fx.Node, Gathered]:
        """The values of gathered parameters that are not kept for the backward -> how they were gathered.

        What the last two gathers bring is used when the forward ends, and the backward begins with it: the head of a
        language model and its last layer, say.  It is kept; to let go of it for a moment would save no memory.  So are
        vectors, whose memory is not worth a collective.
        """
        if "reshard_after_forward" not in self.facts:
            return {}
        order = {n: i for i, n in enumerate(self.graph.nodes)}
        found = {value: _gathered(value) for value in order if "gathered" in value.meta}
        starts = sorted({g.start for g in found.values()}, key=order.__getitem__)
        # FP8 weights of a layer travel beside the rest of it.
        wide = [s for s in starts if s.meta["val"].dtype != torch.uint8] or starts
        last = order[wide[-2:][0]] if wide else 0
        return {v: g for v, g in found.items() if v.meta["val"].ndim > 1 and all(order[u] < last for u in v.users)}

    def op_counts(self) -> Counter[str]:
        return Counter(op_name(n) for n in self.graph.nodes if n.op == "call_function")

    def render(self) -> str:
        """The graph as readable text: one line a node with its shape, types and the module that it came from."""
        lines, where = [], None
        for n in self.graph.nodes:
            here = n.meta.get("where", "")
            if here != where and n.op == "call_function":
                lines.append(f"# {here or '(top)'}")
                where = here
            lines.append(_render_node(n, self.params))
        return "\n".join(lines) + "\n"

    def diff(self, other: Program) -> str:
        """Unified diff of the rendered graphs, ``self`` being the older one."""
        return "".join(
            difflib.unified_diff(
                self.render().splitlines(True), other.render().splitlines(True), "before", "after", n=1
            )
        )


def placeholder_name(name: str) -> str:
    """What the placeholder of a parameter or buffer is called."""
    return "p_" + re.sub(r"\W", "_", name.replace("*", "x"))


def _gathered(value: fx.Node) -> Gathered:
    node, index, dims = value, 0, None
    while not is_start(node.target):
        if node.target is operator.getitem:
            index = node.args[1]
        if op_name(node) == "moec.unpack_bytes":
            dims = node.args[2]
        node = next(n for n in node.all_input_nodes if "val" in n.meta)
    shard, dim = node.args[0], node.args[-3]
    if op_name(shard) == "moec.pack":
        dims = shard.args[2]
    if dims is not None:
        shard, dim = shard.args[0][index], dims[index]
    return Gathered(node, shard, dim)


def op_name(node: fx.Node) -> str:
    """``aten.linear``, ``moec.permute``, ``getitem``: short and stable."""
    t = node.target
    if isinstance(t, OpOverload):
        return f"{t.namespace}.{t._schema.name.split('::')[1]}"
    return getattr(t, "__name__", str(t))


def _render_node(n: fx.Node, params: dict[str, ParamSpec]) -> str:
    kind = _show_val(n.meta.get("val"))
    types = f"  [{_show_types(n.meta['types'])}]" if n.meta.get("types") else ""
    if n.op == "placeholder":
        name = params[n.name].name if n.name in params else "input"
        return f"{n.name}: {kind} = {name}{types}"
    if n.op == "output":
        return f"return {n.args[0]}"
    if n.op == "get_attr":
        return f"{n.name}: {kind} = constant {n.target}{types}"
    args = ", ".join([str(a) for a in n.args] + [f"{k}={v}" for k, v in n.kwargs.items()])
    return f"{n.name}: {kind} = {op_name(n)}({args}){types}"


def _show_types(types: Any) -> str:
    return "; ".join(map(show, types)) if isinstance(types, list) else show(types)


def _show_val(val: Any) -> str:
    if isinstance(val, torch.Tensor):
        return f"{str(val.dtype).removeprefix('torch.')}[{', '.join(map(str, val.shape))}]"
    if isinstance(val, (tuple, list)):
        return "(" + ", ".join(map(_show_val, val)) + ")"
    return type(val).__name__ if val is not None else "?"
