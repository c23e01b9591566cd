"""One raised MoE block written by hand, compiled for a plan, and run on a simulated world with any routing.

    y[t] = sum_k weights[t, k] · silu(x[t] @ up[ids[t, k]]) @ down[ids[t, k]]

Tokens, ids and weights are inputs, so that a test chooses the routing; each dp rank may have its own number of tokens.
With a ``RouteSpec`` the pairs beyond its capacity are dropped, as a router would.

Legend: T tokens, H hidden, I expert width, E experts, K choices a token.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from moec import shards, simulate
from moec.passes import manager
from moec.passes.chunk_experts import chunk_experts
from moec.passes.lower import bind, group_keys, lower
from moec.passes.redundant import redundant
from moec.passes.shard import shard
from moec.placement import I, S
from moec.plan import Plan
from moec.program import InputSpec, MoEBlock, OutputSpec, ParamSpec, Program
from moec.runtime.groups import Groups
from moec.runtime.route_spec import RouteSpec
from moec.runtime.torch_compat import expr, fake_mode, resized, symbolic_fake
from moec.runtime.world import Event, LockstepWorld

aten, moec_ops = torch.ops.aten, torch.ops.moec
H, WIDTH = 4, 6


@cache
def block(E: int, K: int, spec: RouteSpec | None = None) -> Program:
    """The block for one device, as ``raise_moe`` leaves it; the number of tokens is a symbol."""
    mode, graph = fake_mode(), fx.Graph()

    def fixed(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return mode.from_tensor(torch.empty(shape, dtype=dtype), static_shapes=True)

    T = symbolic_fake(mode, torch.empty(8, dtype=torch.float64), "x").shape[0]
    x_val = resized(fixed(8, H), (T, H))
    ids_val, w_val = resized(x_val.to(torch.int64), (T, K)), resized(x_val, (T, K))
    vals = {"p_up": fixed(E, H, WIDTH), "p_down": fixed(E, WIDTH, H), "x": x_val, "ids": ids_val, "w": w_val}
    at = {}
    for name, val in vals.items():
        at[name] = graph.placeholder(name)
        at[name].meta.update(val=val, where="moe")

    def call(op, args, val) -> fx.Node:
        node = graph.call_function(op, args)
        node.meta.update(val=val, where="moe")
        return node

    if spec is not None:
        dropped = call(moec_ops.drop.default, (at["w"], at["ids"], spec.text()), (w_val, ids_val))
        at["w"], at["ids"] = (call(operator.getitem, (dropped, i), v) for i, v in enumerate((w_val, ids_val)))
    rows_val, counts_val = resized(x_val, (T * K, H)), fixed(E, dtype=torch.int64)
    permuted = call(moec_ops.permute.default, (at["x"], at["ids"], E), (rows_val, counts_val, ids_val))
    rows, counts, row_of = (
        call(operator.getitem, (permuted, i), v) for i, v in enumerate((rows_val, counts_val, ids_val))
    )
    hidden_val = resized(x_val, (T * K, WIDTH))
    hidden = call(moec_ops.grouped_mm.default, (rows, at["p_up"], counts), hidden_val)
    hidden = call(aten.silu.default, (hidden,), hidden_val)
    rows = call(moec_ops.grouped_mm.default, (hidden, at["p_down"], counts), rows_val)
    y = call(moec_ops.unpermute.default, (rows, at["w"], row_of), x_val)
    graph.output((y,))
    params = {
        n: ParamSpec(n, n.removeprefix("p_"), tuple(vals[n].shape), torch.float64, True) for n in ("p_up", "p_down")
    }
    inputs = {n: InputSpec(n, n, 0, 2, vals[n].dtype, (None, vals[n].shape[1])) for n in ("x", "ids", "w")}
    return Program(
        fx.GraphModule(nn.Module(), graph),
        params,
        inputs,
        [OutputSpec("y", 0)],
        pytree.tree_structure(0),
        batch_symbols=frozenset(map(str, expr(T).free_symbols)),
        blocks=(MoEBlock("moe", E, K, ("up", "down")),),
        facts={"captured", "normalized", "raised"},
    )


@cache
def compiled(E: int, K: int, plan: Plan, world: int, spec: RouteSpec | None = None) -> Program:
    program = block(E, K, spec).fork()
    program.mesh = plan.mesh(world)
    return manager.run(program, plan.resolve(world), (shard, redundant, chunk_experts, lower))


@dataclass
class Data:
    """Of each dp rank: tokens, ids and weights; the experts."""

    x: list[Tensor]
    ids: list[Tensor]
    w: list[Tensor]
    up: Tensor
    down: Tensor

    @staticmethod
    def of(ids: Sequence[Tensor], E: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Data:
        gen = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=gen, dtype=dtype)

        x, w = [randn(len(i), H) for i in ids], [randn(*i.shape) for i in ids]
        return Data(x, list(ids), w, randn(E, H, WIDTH), randn(E, WIDTH, H))


def cotangents(data: Data) -> list[Tensor]:
    gen = torch.Generator().manual_seed(9)
    return [torch.randn(x.shape, generator=gen, dtype=x.dtype) for x in data.x]


def dense(data: Data, spec: RouteSpec | None = None) -> dict[str, Tensor]:
    """The oracle: one-hot algebra over all experts, and autograd through it.  What is dropped is taken from the op,
    which has tests of its own."""
    x, w, up, down = (
        t.clone().requires_grad_() for t in (torch.cat(data.x), torch.cat(data.w), data.up, data.down)
    )
    ids = torch.cat(data.ids)
    if spec is not None:
        ids = moec_ops.drop(w.detach(), ids, spec.text())[1]
    hot_TKE = (ids[:, :, None] == torch.arange(len(up))).to(x.dtype)
    hidden = torch.nn.functional.silu(torch.einsum("th,ehi->tei", x, up))
    y = torch.einsum("tk,tke,tei,eih->th", w, hot_TKE, hidden, down)
    y.backward(torch.cat(cotangents(data)))
    return {"y": y.detach(), "x": x.grad, "w": w.grad, "up": up.grad, "down": down.grad}


def operands(program: Program, data: Data, rank: int) -> dict[str, Tensor]:
    """What a rank passes, by placeholder, in their order."""
    i = program.mesh.index(rank, program.mesh.role("dp"))
    mine = {"x": data.x[i], "ids": data.ids[i], "w": data.w[i]}
    for name, spec in program.params.items():
        mine[name] = shards.cut(getattr(data, spec.name), spec.types, program.mesh, rank)
    mine = {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in mine.items()}
    return {n.name: mine[n.name] for n in program.placeholders()}


def run(program: Program, data: Data, log: list[Event] | None = None) -> dict[str, Tensor]:
    """The same on the simulated world; ``log`` takes what was communicated."""
    assert "equal_lengths" not in program.facts or len({len(x) for x in data.x}) == 1
    mesh = program.mesh
    world, ranks, dp = LockstepWorld(mesh), range(mesh.world), mesh.role("dp")
    values = [operands(program, data, r) for r in ranks]
    outs = world.run(program.module, [list(v.values()) for v in values])
    torch.autograd.backward([o[0] for o in outs], [cotangents(data)[mesh.index(r, dp)] for r in ranks])
    if log is not None:
        log += world.log
    return whole(program, [found(v, o) for v, o in zip(values, outs, strict=True)])


def run_real(rank: int, world: int, data: Data, *compile_args) -> dict[str, Tensor]:
    """What this process, one of ``world``, has of it."""
    program = compiled(*compile_args)
    keys = sorted(group_keys(program))
    groups = Groups(program.mesh, keys)
    bound = bind(program, {k: groups.name(k) for k in keys})
    values = operands(program, data, rank)
    out = bound.module(*values.values())
    out[0].backward(cotangents(data)[program.mesh.index(rank, program.mesh.role("dp"))])
    return found(values, out)


def found(values: dict[str, Tensor], out: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Of one rank: y, and the gradients of what it passed."""
    return {"y": out[0].detach(), **{k: v.grad for k, v in values.items() if v.grad is not None}}


def whole(program: Program, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The global values that the ranks have parts of; ranks that should have the same must agree."""
    mesh = program.mesh
    by_dp = {a: S(0) if a in mesh.role("dp") else I for a in mesh.names}
    out = {}
    for name in ("y", "x", "w", *program.params):
        mine, spec = [p[name] for p in parts], program.params.get(name)
        if key := program.grad_reductions.get(name):
            mine = simulate._reduce(mine, key, mesh)
        out[spec.name if spec else name], apart = simulate._assemble(mine, spec.types if spec else by_dp, mesh)
        assert apart < 1e-12
    return out
