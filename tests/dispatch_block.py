"""One raised MoE block written by hand, compiled for a plan, and run on a simulated world with any routing.

    y[t] = sum_k weights[t, k] · silu(x[t] @ up[ids[t, k]]) @ down[ids[t, k]]

Tokens, ids and weights are inputs, so that a test chooses the routing; each dp rank may have its own number of tokens.

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
from moec.passes.lower import lower
from moec.passes.redundant import redundant
from moec.passes.shard import shard
from moec.placement import I, S
from moec.plan import Plan
from moec.program import InputSpec, MoEBlock, OutputSpec, ParamSpec, Program
from moec.runtime.torch_compat import expr, fake_mode, resized, symbolic_fake
from moec.runtime.world import Event, LockstepWorld

aten, moec_ops = torch.ops.aten, torch.ops.moec
H, WIDTH = 4, 6


@cache
def block(E: int, K: int) -> Program:
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
def compiled(E: int, K: int, plan: Plan, world: int) -> Program:
    program = block(E, K).fork()
    program.mesh = plan.mesh(world)
    return manager.run(program, plan.resolve(world), (shard, redundant, lower))


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


def dense(data: Data) -> dict[str, Tensor]:
    """The oracle: one-hot algebra over all experts, and autograd through it."""
    x, w, up, down = (
        t.clone().requires_grad_() for t in (torch.cat(data.x), torch.cat(data.w), data.up, data.down)
    )
    hot_TKE = (torch.cat(data.ids)[:, :, None] == torch.arange(len(up))).to(x.dtype)
    hidden = torch.nn.functional.silu(torch.einsum("th,ehi->tei", x, up))
    y = torch.einsum("tk,tke,tei,eih->th", w, hot_TKE, hidden, down)
    y.backward(torch.cat(cotangents(data)))
    return {"y": y.detach(), "x": x.grad, "w": w.grad, "up": up.grad, "down": down.grad}


def run(program: Program, data: Data, log: list[Event] | None = None) -> dict[str, Tensor]:
    """The same on the simulated world; ``log`` takes what was communicated."""
    mesh = program.mesh
    world, dp = LockstepWorld(mesh), mesh.role("dp")
    values, back = [], []
    for r in range(mesh.world):
        i = mesh.index(r, dp)
        mine = {"x": data.x[i], "ids": data.ids[i], "w": data.w[i]}
        for name, spec in program.params.items():
            mine[name] = shards.cut(getattr(data, spec.name), spec.types, mesh, r)
        values.append({k: v.clone().requires_grad_(v.is_floating_point()) for k, v in mine.items()})
        back.append(cotangents(data)[i])
    order = [n.name for n in program.placeholders()]
    outs = world.run(program.module, [[v[n] for n in order] for v in values])
    assert "equal_lengths" not in program.facts or len({len(x) for x in data.x}) == 1
    torch.autograd.backward([o[0] for o in outs], back)
    by_dp = {a: S(0) if a in dp else I for a in mesh.names}

    def whole(parts: list[Tensor], types) -> Tensor:
        found, apart = simulate._assemble(parts, types, mesh)
        assert apart < 1e-12
        return found

    found = {"y": whole([o[0].detach() for o in outs], by_dp)}
    found |= {k: whole([v[k].grad for v in values], by_dp) for k in ("x", "w")}
    for name, spec in program.params.items():
        parts = [v[name].grad for v in values]
        if key := program.grad_reductions.get(name):
            parts = simulate._reduce(parts, key, mesh)
        found[spec.name] = whole(parts, spec.types)
    if log is not None:
        log += world.log
    return found
