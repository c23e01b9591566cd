"""LockstepWorld: runs an SPMD graph for all ranks in one process, node by node.

The same graph is the program of every rank, so one walk over its nodes serves them all: an ordinary node runs once per
rank under eager autograd; a collective runs across the ranks' values, as one ``autograd.Function`` over all of them
whose backward is the dual that ``collectives.TABLE`` names; a wait is the identity.  Then

    outs = LockstepWorld(mesh).run(graph_module, inputs)      # inputs[rank] = values of the placeholders
    torch.autograd.backward([o[0] for o in outs], [torch.ones(())] * mesh.world)

leaves each rank's gradients on that rank's own leaves.  Groups are group keys of ``mesh`` (graphs before lowering).
A graph that already contains its backward (AOTAutograd's joint graph) runs as well: its backward nodes are just nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from . import simulate
from .collectives import CARRY_PARAMETERS, FUSED, LOW_GATHER, TABLE, Collective, collective, is_wait
from .errors import MoecError
from .fp8.payload import packed, values
from .mesh import Mesh
from .ops.carry_parameters import carriers
from .ops.pack import flatten_shapes, pack, unpack
from .torch_compat import OpOverload


@dataclass(frozen=True)
class Event:
    """One executed collective: ``bytes[rank]`` is ``Collective.tensor_bytes`` there; ``sent[rank][other]`` what one
    rank sends another (0 to itself) if each part goes straight to the rank that needs it."""

    kind: str
    group: str
    bytes: tuple[int, ...]
    node: str
    phase: str
    """``forward``, or ``backward`` when autograd ran it as the dual of ``node``."""
    sent: tuple[tuple[int, ...], ...] = ()


class LockstepWorld:
    """``log`` holds the collectives of all runs and backwards so far, in the order in which they were executed.

    Args:
        mesh: the ranks and their groups.
        table: the table of collectives (tests pass sabotaged ones).
    """

    def __init__(self, mesh: Mesh, table: Mapping[str, Collective] = TABLE) -> None:
        self.mesh = mesh
        self.table = table
        self.log: list[Event] = []

    def run(self, module: fx.GraphModule, inputs: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        """Run the graph; ``inputs[rank]`` are the values of its placeholders, in order.  Returns outputs per rank."""
        nodes = list(module.graph.nodes)
        placeholders = [n for n in nodes if n.op == "placeholder"]
        if len(inputs) != self.mesh.world or any(len(i) != len(placeholders) for i in inputs):
            raise MoecError(
                f"{len(inputs)} ranks with {sorted({len(i) for i in inputs})} inputs each, for a mesh of "
                f"{self.mesh.world} ranks and a graph with {len(placeholders)} placeholders",
                where="LockstepWorld.run",
            )
        dies_at = _last_uses(nodes)
        envs: list[dict[fx.Node, Any]] = [dict(zip(placeholders, mine, strict=True)) for mine in inputs]
        for node in nodes:
            if node.op == "output":
                outs = [fx.map_arg(node.args[0], env.__getitem__) for env in envs]
                return [tuple(o) if isinstance(o, (tuple, list)) else (o,) for o in outs]
            if node.op != "placeholder":
                _store(envs, node, self._step(module, node, envs))
            for dead in dies_at.get(node, ()):
                for env in envs:
                    del env[dead]
        raise MoecError("the graph has no output node", where="LockstepWorld.run")

    def _step(self, module: fx.GraphModule, node: fx.Node, envs: list[dict[fx.Node, Any]]) -> list[Any]:
        """The value of ``node`` on every rank."""
        if node.op == "get_attr":
            return [attrgetter(node.target)(module)] * len(envs)
        calls = [(fx.map_arg(node.args, env.__getitem__), fx.map_arg(node.kwargs, env.__getitem__)) for env in envs]
        try:
            if node.op == "call_function" and is_wait(node.target):
                return [args[0] for args, _ in calls]
            if node.op == "call_function" and (found := collective(node.target)):
                return self._collective(self.table[found.kind], node, calls)
            return [_call(module, node, args, kwargs) for args, kwargs in calls]
        except Exception as e:
            e.add_note(f"while running {node.format_node()} of {node.meta.get('where') or '(top)'} for all ranks")
            raise

    def _collective(self, entry: Collective, node: fx.Node, calls: list[tuple[tuple, dict]]) -> list[Tensor]:
        bound = [_bind(node.target, args, kwargs) for args, kwargs in calls]
        key, size = bound[0]["group"], bound[0]["size"]
        if not self.mesh.is_key(key) or self.mesh.size(key) != size:
            raise MoecError(
                f"group {key!r} of size {size} is not a group of the mesh "
                f"{dict(zip(self.mesh.names, self.mesh.shape, strict=True))}",
                where=node.name,
            )
        if entry.kind == CARRY_PARAMETERS:
            return self._carriers(entry, key, node, bound)
        if entry.primitive in FUSED:
            return self._with_products(entry, key, node, bound)
        xs = [next(iter(b.values())) for b in bound]  # the tensor that travels is the first argument of every op
        if entry.primitive == "counts":
            return self._across(entry, key, node, xs, lambda ranks, mine: simulate.counts(mine))
        if entry.primitive == "carry":
            return self._carry(entry, key, node, xs, bound)
        if entry.primitive == "exchange":
            return self._exchange(entry, key, node, xs, bound)
        if entry.primitive == "equal":
            return self._convert(entry, key, node, xs, 0, 0)
        dim = bound[0]["dim"]
        if entry.kind == LOW_GATHER:
            return self._gather_low(entry, key, node, xs, [b["master"] for b in bound], dim)
        return self._convert(entry, key, node, xs, dim, bound[0].get("to_dim", dim))

    def _convert(
        self, entry: Collective, key: str, node: fx.Node, xs: Sequence[Tensor], dim: int, to_dim: int
    ) -> list[Tensor]:
        back = (to_dim, dim) if entry.primitive == "all_to_all" else (dim, to_dim)

        def forward(c: Collective, phase: str, values: Sequence[Tensor], dims: tuple[int, int]) -> list[Tensor]:
            run = lambda ranks, mine: simulate.convert(c.primitive, mine, *dims)  # noqa: E731
            return self._across(c, key, node, values, run, phase)

        def backward(grads: Sequence[Tensor]) -> list[Tensor]:
            return forward(self.table[entry.dual], "backward", grads, back)

        return list(_Across.apply(lambda v: forward(entry, "forward", v, (dim, to_dim)), backward, *xs))

    def _with_products(self, entry: Collective, key: str, node: fx.Node, bound: list[dict[str, Any]]) -> list[Any]:
        """The transfer and the products one after the other, differentiated by autograd.  Results lie in memory as the
        ops say: graphs that were traced look at them in other shapes."""
        dim = bound[0]["dim"]
        if entry.primitive == "gather_products":
            whole = self._convert(self.table["s_to_r"], key, node, [b["x"] for b in bound], dim, dim)
            found = [[x, *(F.linear(x, w) for w in b["ws"])] for x, b in zip(whole, bound, strict=True)]
            return [[w.movedim(dim, 0).contiguous().movedim(0, dim), *(y.contiguous() for y in ys)] for w, *ys in found]
        partial = [F.linear(b["x"], b["w"]) for b in bound]
        return [t.contiguous() for t in self._convert(self.table["p_to_s"], key, node, partial, dim, dim)]

    def _gather_low(
        self, entry: Collective, key: str, node: fx.Node, xs: Sequence[Tensor], masters: Sequence[Tensor], dim: int
    ) -> list[Tensor]:
        """What travels is ``xs``; gradients are widened to the dtype of ``masters``, reduced, and theirs."""

        def move(c: Collective, phase: str, values: Sequence[Tensor]) -> list[Tensor]:
            run = lambda ranks, mine: simulate.convert(c.primitive, mine, dim, dim)  # noqa: E731
            return self._across(c, key, node, values, run, phase)

        def backward(grads: Sequence[Tensor]) -> list[Tensor]:
            wide = [g.to(m.dtype) for g, m in zip(grads, masters, strict=True)]
            return move(self.table[entry.dual], "backward", wide)

        return list(_Across.apply(lambda _: move(entry, "forward", [x.detach() for x in xs]), backward, *masters))

    def _carriers(self, entry: Collective, key: str, node: fx.Node, bound: list[dict[str, Any]]) -> list[Any]:
        """Nothing travels; gradients are widened to the dtype of their masters, reduced together, and theirs."""
        masters, dims, size = [b["masters"] for b in bound], bound[0]["dims"], bound[0]["size"]
        n, dual = len(dims), self.table[entry.dual]

        def forward(_: Sequence[Tensor]) -> list[Tensor]:
            return [y for b in bound for y in carriers(b["masters"], dims, b["dtype"], size)]

        def backward(grads: Sequence[Tensor]) -> list[Tensor]:
            mine = [grads[i : i + n] for i in range(0, len(grads), n)]
            wide = [[g.to(m.dtype) for g, m in zip(gs, ms, strict=True)] for gs, ms in zip(mine, masters, strict=True)]
            one, dim = n == 1, dims[0] if n == 1 else 0
            flat = [gs[0] if one else pack(gs, size, dims) for gs in wide]
            run = lambda ranks, xs: simulate.convert(dual.primitive, xs, dim, dim)  # noqa: E731
            reduced = self._across(dual, key, node, flat, run, "backward")
            if one:
                return reduced
            return [x for r, ms in zip(reduced, masters, strict=True)
                    for x in unpack(r, 1, dims, flatten_shapes([m.shape for m in ms]))]  # fmt: skip

        flat = _Across.apply(forward, backward, *(m for ms in masters for m in ms))
        return [list(flat[i : i + n]) for i in range(0, len(flat), n)]

    def _exchange(
        self, entry: Collective, key: str, node: fx.Node, xs: Sequence[Tensor], bound: list[dict[str, Any]]
    ) -> list[Tensor]:
        sends, recvs = ([b[name] for b in bound] for name in ("send_R", "recv_R"))
        rows = [b.get("rows") for b in bound]
        rows_in = [x.shape[0] for x in xs]

        def forward(c: Collective, phase: str, values: Sequence[Tensor], s: list, r: list, n: list) -> list[Tensor]:
            def run(ranks: Sequence[int], mine: Sequence[Tensor]) -> list[Tensor]:
                return simulate.exchange(mine, [s[i] for i in ranks], [r[i] for i in ranks], [n[i] for i in ranks])

            return self._across(c, key, node, values, run, phase, s)

        def backward(grads: Sequence[Tensor]) -> list[Tensor]:
            return forward(self.table[entry.dual], "backward", grads, recvs, sends, rows_in)

        return list(_Across.apply(lambda v: forward(entry, "forward", v, sends, recvs, rows), backward, *xs))

    def _carry(
        self, entry: Collective, key: str, node: fx.Node, xs: Sequence[Tensor], bound: list[dict[str, Any]]
    ) -> list[Tensor]:
        """Forward each rank's carrier has the rows of what it received; backward gradients go back, as bytes where a
        payload is named."""
        dual, payload, dim = self.table[entry.dual], bound[0].get("payload", ""), bound[0].get("dim", 0)
        rows_in = [x.shape[0] for x in xs]

        def forward(_) -> list[Tensor]:
            return [x.new_zeros(()).expand(*b["data"].shape[:-1], x.shape[-1]) for x, b in zip(xs, bound, strict=True)]

        def move(sent: Sequence[Tensor]) -> list[Tensor]:
            if dual.primitive != "exchange":
                run = lambda ranks, mine: simulate.convert(dual.primitive, mine, dim, dim)  # noqa: E731
                return self._across(dual, key, node, sent, run, "backward")
            sends, recvs = ([b[name] for b in bound] for name in ("recv_R", "send_R"))

            def run_exchange(ranks: Sequence[int], mine: Sequence[Tensor]) -> list[Tensor]:
                return simulate.exchange(
                    mine, [sends[i] for i in ranks], [recvs[i] for i in ranks], [rows_in[i] for i in ranks]
                )

            return self._across(dual, key, node, sent, run_exchange, "backward", sends)

        def backward(grads: Sequence[Tensor]) -> list[Tensor]:
            if not payload:
                return move(grads)
            data = move([packed(g, payload, "grad") for g in grads])
            return [values(d, g.shape[-1], payload, "grad", g.dtype) for d, g in zip(data, grads, strict=True)]

        return list(_Across.apply(forward, backward, *xs))

    def _across(
        self,
        entry: Collective,
        key: str,
        node: fx.Node,
        xs: Sequence[Tensor],
        run: Callable[[Sequence[int], Sequence[Tensor]], list[Tensor]],
        phase: str = "forward",
        rows: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """``run(ranks, their tensors)`` in every group of ``key``; results by rank.  ``rows``: of an uneven exchange,
        how many each rank sends each member of its group."""
        ys: dict[int, Tensor] = {}
        for ranks in self.mesh.groups(key):
            ys.update(zip(ranks, run(ranks, [xs[r] for r in ranks]), strict=True))
        out = [ys[r] for r in range(self.mesh.world)]
        moved = tuple(entry.tensor_bytes(x.nbytes, y.nbytes) for x, y in zip(xs, out, strict=True))
        sent = [[0] * self.mesh.world for _ in xs]
        for ranks in self.mesh.groups(key):
            for r in ranks:
                parts = simulate.sent(entry.primitive, xs[r], len(ranks), None if rows is None else rows[r].tolist())
                for other, part in zip(ranks, parts, strict=True):
                    sent[r][other] = part if other != r else 0
        self.log.append(Event(entry.kind, key, moved, node.name, phase, tuple(map(tuple, sent))))
        return out


class _Across(torch.autograd.Function):
    """A function of all ranks' tensors with a given backward.  Gradients that are missing arrive as zeros."""

    @staticmethod
    def forward(ctx, run, run_backward, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.run_backward = run_backward
        ctx.shapes = [x.shape for x in xs]
        return tuple(run(xs))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor):
        found = ctx.run_backward(grads)
        # Autograd itself would sum a gradient that is merely broadcastable to the right shape.
        if [g.shape for g in found] != ctx.shapes:
            raise MoecError(
                f"the dual gave gradients of shapes {[tuple(g.shape) for g in found]} "
                f"for inputs of shapes {[tuple(s) for s in ctx.shapes]}",
                where="collectives.TABLE",
            )
        return None, None, *found


def _store(envs: list[dict[fx.Node, Any]], node: fx.Node, values: list[Any]) -> None:
    # A function of its own, so that no loop variable keeps the last value alive.
    for env, value in zip(envs, values, strict=True):
        env[node] = value


def _call(module: fx.GraphModule, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    target = module.get_submodule(node.target) if node.op == "call_module" else node.target
    return target(*args, **kwargs)


def _bind(op: OpOverload, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Arguments by the names of the op's schema."""
    names = [a.name for a in op._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def _last_uses(nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Node -> values that nothing needs once it has run."""
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        last[node] = node  # a value without users dies at once
        for used in node.all_input_nodes:
            last[used] = node
    dies: dict[fx.Node, list[fx.Node]] = {}
    for value, at in last.items():
        dies.setdefault(at, []).append(value)
    return dies
