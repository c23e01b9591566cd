"""explain: every collective of a training step (origin, group, bytes), where parameters lie and why, what ops compute
in and why (where a plan asks for bf16), what was declined.

Read off the compiled graph: nothing is computed, no ranks are needed.  Of a plan with ``overlap`` these are the graphs
that run, and ``schedule`` says in which order (``moec.schedule``).  Else a forward collective whose input needs a
gradient has its dual in the backward; reductions that ``lower`` peeled off parameters form the epilogue, one bucket for
each group and dtype.  A collective is *parameter* traffic if what it moves is computed from parameters alone (and so
their gradients), else *activation* traffic.  Parameters that are resharded after the forward are gathered again in the
backward if autograd saves them, which a run on fake tensors shows.  Bytes are tensor bytes on one rank (the larger of
what goes in and out).  An exchange of routed rows depends on the data; it is stated for uniform routing and marked
``estimated`` (``moec.traffic`` says it for a routing that is known).  Where the plan knows nodes, ``crossing`` is the
part of a collective's bytes that goes to ranks of other nodes.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from moec.cost.sizes import Sizes
from moec.placement import Types, local_shape, show
from moec.program import DtypeChoice, ParamSpec, Program
from moec.regather import saved_gathers
from moec.runtime.collectives import CARRY_PARAMETERS, LOW_GATHER, TABLE, collective, group_of, is_fused
from moec.runtime.errors import MoecError
from moec.runtime.fp8.payload import width
from moec.runtime.mesh import axes_of
from moec.runtime.once import ONCE, maxima
from moec.schedule import Schedule, Transfer, schedule
from moec.text import human, table

if TYPE_CHECKING:
    from moec.module import ParallelModule


TRAFFIC = ("parameter", "activation")
CODED = (torch.ops.moec.carry_exchange.default, torch.ops.moec.carry_equal.default)
"""What may have gradients travel as another payload than it moves."""


@dataclass(frozen=True)
class CollectiveUse:
    """One collective of a step.  ``phase``: forward, backward or epilogue; ``traffic``: parameter or activation."""

    kind: str
    primitive: str
    phase: str
    traffic: str
    group: str
    ranks: int
    bytes: int
    where: str
    node: str
    estimated: bool = False
    crossing: int = 0


@dataclass(frozen=True)
class Placement:
    name: str
    types: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    bytes: int
    """On one rank."""
    reason: str


@dataclass(frozen=True)
class Explanation:
    sizes: dict[str, tuple[int, ...]]
    """The local input sizes that bytes are stated for."""
    collectives: tuple[CollectiveUse, ...]
    parameters: tuple[Placement, ...]
    declined: tuple[str, ...]
    dtypes: tuple[DtypeChoice, ...] = ()
    """What ops compute in and why, where a plan asks for bf16."""
    schedule: Schedule | None = None
    """Where a plan has ``overlap``: the order in which ``collectives`` run, and beside what."""

    def totals(self) -> dict[str, tuple[int, int]]:
        """(count, bytes) by phase and primitive, by traffic (``"parameter"``, ``"activation"``), ``"all"``, and
        ``"crossing nodes"`` where there are some."""
        out: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for c in self.collectives:
            for k in (f"{c.phase} {c.primitive}", c.traffic, "all"):
                out[k] = (out[k][0] + 1, out[k][1] + c.bytes)
            if c.crossing:
                out["crossing nodes"] = (out["crossing nodes"][0] + 1, out["crossing nodes"][1] + c.crossing)
        return dict(out)

    def to_dict(self) -> dict[str, Any]:
        total = {k: dict(zip(("collectives", "bytes"), v, strict=True)) for k, v in self.totals().items()}
        none = {"collectives": 0, "bytes": 0}
        return {
            "sizes": {k: list(v) for k, v in self.sizes.items()},
            "total": total.get("all", none),
            "traffic": {k: total.get(k, none) for k in TRAFFIC},
            "collectives": [asdict(c) for c in self.collectives],
            "parameters": [asdict(p) for p in self.parameters],
            "declined": list(self.declined),
            "dtypes": [asdict(d) for d in self.dtypes],
            **({"schedule": self.schedule.to_dict()} if self.schedule else {}),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        lines = [
            "collectives of one step, bytes on one rank, for inputs "
            + ", ".join(f"{k}{list(v)}" for k, v in self.sizes.items())
        ]
        rows = [
            (
                c.phase,
                c.traffic,
                c.primitive,
                c.kind,
                c.group,
                str(c.ranks),
                human(c.bytes) + ("~" if c.estimated else ""),
                c.where or c.node,
            )
            for c in self.collectives
        ]
        if self.schedule:
            lines += ["", str(self.schedule)]
            rows = [r for r in rows if r[0] not in self.schedule.parts]
        if rows or not self.schedule:
            lines += table(("phase", "traffic", "collective", "types", "group", "ranks", "bytes", "where"), rows)
        lines += ["", "totals"] + [f"  {k:<28} {n:>4}  {human(b)}" for k, (n, b) in self.totals().items()]
        lines += ["", "parameters"]
        lines += table(
            ("name", "placement", "shape", "local", "bytes", "why"),
            [
                (p.name, p.types or "whole", str(list(p.shape)), str(list(p.local_shape)), human(p.bytes), p.reason)
                for p in self.parameters
            ],
        )
        if self.dtypes:
            lines += ["", "dtypes"] + table(("module", "computes in", "why", "ops"), _by_module(self.dtypes))
        lines += ["", "declined rewrites"] + [f"  {d}" for d in self.declined or ("none",)]
        return "\n".join(lines)


def explain(target: Program | ParallelModule, sizes: Mapping[str, tuple[int, ...]] | None = None) -> Explanation:
    """Explain a lowered program or a parallel module.

    ``sizes``: *local* sizes of the inputs by path; default: those of the module's last call, else small ones.
    """
    program = target if isinstance(target, Program) else target.program
    if "sharded" not in program.facts:
        raise MoecError("only a sharded program communicates", where="explain", way_out="compile it first")
    sizes = sizes or getattr(target, "last_sizes", None) or (program.step.shapes if program.step else {})
    values = Sizes.of(program, sizes)
    shown = {
        s.path: values.shape(node.meta["val"])
        for node in program.placeholders()
        if (s := program.inputs.get(node.name))
    }
    runs = schedule(program, sizes) if program.step else None
    uses = [_scheduled(t) for t in runs.transfers] + _magnitudes(program) if runs else _recorded(program, values)
    uses += _once(program)
    uses = [replace(u, crossing=_crossing(program, u)) for u in uses]
    places = tuple(_placement(program, s) for s in program.params.values())
    return Explanation(shown, tuple(uses), places, tuple(program.why_not), program.dtype_choices, runs)


def _scheduled(t: Transfer) -> CollectiveUse:
    return CollectiveUse(
        t.kind, t.primitive, t.phase, TRAFFIC[not t.parameters], t.group, t.ranks, t.bytes, t.where, t.node, t.estimated
    )


def _recorded(program: Program, values: Sizes) -> list[CollectiveUse]:
    """Of a program whose backward is autograd's."""
    own = _of_parameters(program)
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    uses = [u for node in nodes for u in _uses(program, node, values, "forward", own)]
    if program.training:
        again = saved_gathers(program)
        for node in reversed(nodes):
            for start, elements in again.get(node, ()):
                size = elements * start.meta["val"].dtype.itemsize
                uses += [replace(u, bytes=size) for u in _uses(program, start, values, "backward", own, True)]
            uses += _uses(program, node, values, "backward", own)
        uses += _epilogue(program)
    return uses


def _by_module(dtypes: Sequence[DtypeChoice]) -> list[tuple[str, ...]]:
    """Rows of a table: what the ops of a module compute in, equal layers together."""
    rows: dict[tuple[str, str, str], dict[str, None]] = defaultdict(dict)
    for d in dtypes:
        rows[re.sub(r"\b\d+\b", "*", d.where), d.dtype, d.why][d.op] = None
    return [(where or "(top)", dtype, why, ", ".join(ops)) for (where, dtype, why), ops in rows.items()]


def _of_parameters(program: Program) -> set[fx.Node]:
    """The values that are computed from parameters alone."""
    own: set[fx.Node] = set()
    own_names = {*program.params, ONCE}
    for node in program.graph.nodes:
        tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), (torch.Tensor, tuple, list))]
        if node.name in own_names if node.op == "placeholder" else tensors and own.issuperset(tensors):
            own.add(node)
    return own


def _uses(
    program: Program, node: fx.Node, values: Sizes, phase: str, own: set[fx.Node], again: bool = False
) -> list[CollectiveUse]:
    """The collective of ``node`` in this phase, if there is one; ``again``: a parameter gathered once more."""
    entry = collective(node.target)
    if entry is None:
        return []
    if entry.kind == CARRY_PARAMETERS:
        return _sums_for_masters(program, node, values, phase, own)
    source = node.args[0]
    wider = 1
    if phase == "backward" and not again:
        if entry.kind == LOW_GATHER:  # the gradient is the master's, and as wide
            source = node.args[1]
            wider = source.meta["val"].dtype.itemsize // node.meta["val"].dtype.itemsize
        if entry.dual is None or not source.meta["grad"]:
            return []
        entry = TABLE[entry.dual]
    if not entry.communicates:
        return []
    payload = node.args[-3] if node.target in CODED and phase == "backward" else ""
    rows = any(t.kind == "V" for t in source.meta["types"].values())
    if is_fused(node.target):  # what one rank has of what travels
        part = source if collective(node.target).primitive == "gather_products" else node  # type: ignore[union-attr]
        sizes = [node.args[-2] * _bytes(program, part, values, source)] * 2
    else:
        sizes = [_bytes(program, n, values, node) for n in (source, node)]
    if payload:  # gradients travel as bytes
        H, each = int(source.meta["val"].shape[-1]), source.meta["val"].dtype.itemsize
        sizes = [n // (H * each) * width(H, payload) for n in sizes]
    return [
        CollectiveUse(
            entry.kind,
            entry.primitive,
            phase,
            TRAFFIC[source not in own],
            group_of_key(program, node),
            node.args[-2],
            entry.tensor_bytes(sizes[0], sizes[1] * wider),
            node.meta.get("where", ""),
            node.name,
            rows and entry.primitive == "exchange",
        )
    ]


def _sums_for_masters(
    program: Program, node: fx.Node, values: Sizes, phase: str, own: set[fx.Node]
) -> list[CollectiveUse]:
    """What travelled as FP8 costs no more forward; its gradients are summed for the masters, and as wide."""
    masters, _, _, ranks, _ = node.args
    if phase == "forward" or not masters[0].meta["grad"]:
        return []
    entry = TABLE[TABLE[CARRY_PARAMETERS].dual]
    whole = ranks * sum(_bytes(program, m, values, node) for m in masters)
    where = node.meta.get("where", "")
    traffic = TRAFFIC[not own.issuperset(masters)]
    return [
        CollectiveUse(
            entry.kind, entry.primitive, phase, traffic, group_of_key(program, node), ranks, whole, where, node.name
        )
    ]


def group_of_key(program: Program, node) -> str:
    """The group key of a collective, whether or not the graph is bound to process groups."""
    return node.meta.get("group_key") or group_of(node)


def _results(node: fx.Node) -> tuple[list[torch.Tensor], list[Types]]:
    return node.meta["val"], node.meta["types"]


def _once(program: Program) -> list[CollectiveUse]:
    """Largest magnitudes of FP8 weights, once an optimizer step: all of a group together."""
    graph = program.once.module.graph if program.once else fx.Graph()
    return [
        CollectiveUse(
            "m_to_i", "all_reduce_max", "optimizer step", TRAFFIC[0], node.meta["group_key"], node.args[1],
            4 * sum(prod(local_shape(v.shape, t, program.mesh)) for v, t in zip(*_results(node), strict=True)),
            node.meta["where"], node.name,
        )
        for node in graph.find_nodes(op="call_function", target=maxima)
    ]  # fmt: skip


def _epilogue(program: Program) -> list[CollectiveUse]:
    buckets: dict[tuple[str, torch.dtype], int] = defaultdict(int)
    for name, key in program.grad_reductions.items():
        spec = program.params[name]
        buckets[key, spec.dtype] += prod(local_shape(spec.shape, spec.types, program.mesh)) * spec.dtype.itemsize
    return [
        CollectiveUse(
            "p_to_i",
            "all_reduce",
            "epilogue",
            TRAFFIC[0],
            key,
            program.mesh.size(key),
            n,
            f"parameter gradients ({dtype})",
            "epilogue",
        )
        for (key, dtype), n in buckets.items()
    ] + _magnitudes(program)


def _magnitudes(program: Program) -> list[CollectiveUse]:
    """What ``moec.delayed`` reduces: column 0 of every history, all in one."""
    histories = [s for s in program.params.values() if s.history]
    if not histories or not program.mesh.names:
        return []
    key, size = program.mesh.key(program.mesh.names), sum(s.shape[0] * s.dtype.itemsize for s in histories)
    ranks = program.mesh.world
    what = "largest magnitudes of the step"
    return [CollectiveUse("m_to_i", "all_reduce", "epilogue", TRAFFIC[1], key, ranks, size, what, "epilogue")]


def _placement(program: Program, spec: ParamSpec) -> Placement:
    local = local_shape(spec.shape, spec.types, program.mesh)
    types = {a: t for a, t in spec.types.items() if t.kind == "S"}
    return Placement(
        spec.name,
        show(types),
        spec.shape,
        local,
        prod(local) * spec.dtype.itemsize,
        program.layout_reasons.get(spec.name, "whole: no rule asks for more"),
    )


def _crossing(program: Program, use: CollectiveUse) -> int:
    """Ranks of a group exchange evenly, as far as a plan can tell."""
    nodes = program.mesh.size([a for a in axes_of(use.group).split(",") if program.mesh.axis(a).nodes])
    return use.bytes * (nodes - 1) // nodes


def _bytes(program: Program, node, values: Sizes, use) -> int:
    if spec := program.params.get(node.name):
        return prod(local_shape(spec.shape, spec.types, program.mesh)) * spec.dtype.itemsize
    val = node.meta.get("local")
    if val is None:
        val = node.meta["val"]
    whole, dealt = values.everywhere(), program.mesh.size([a for a, t in use.meta["types"].items() if t.kind == "V"])
    if "moves" in use.meta:  # a dispatcher says how many rows a token is expected to be on this way
        tokens, rows = use.meta["moves"]
        return round(whole.number(tokens) * rows / dealt) * prod(map(int, val.shape[1:])) * val.dtype.itemsize
    shape = []
    for dim, local in enumerate(val.shape):
        if values.knows(local):
            shape.append(values.number(local))
        else:  # rows that the exchange deals out: under uniform routing as many as every other rank's
            shape.append(-(-whole.number(node.meta["val"].shape[dim]) // dealt))
    return prod(shape) * val.dtype.itemsize
