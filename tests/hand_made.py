"""A small model and its parallel program, written by hand: what ParallelModule must run, without any compiler.

Net has all that ParallelModule treats specially: a packed parameter, experts that are one stacked parameter, tied
weights, a frozen and an unused parameter, persistent and other buffers, a scalar and a batch-carrying output.

    h_BF  = silu(gate) * up,  gate|up = x_BD @ gate_up.T        gate_up [2F, D] packed, cut over tp
    h_BF  = h * scale                                            scale [F] replicated, each tp rank uses its slice
    y_BD  = h @ down.T + bias + shift                            down [D, F] cut over tp, so a sum over tp
    y_BD  = y * sum_e experts[e].w                               stacked [E, D] cut over tp, so a sum over tp
    y_BD  = (y @ tied.T) @ tied                                  tied [D, D], two names
    loss  = mean(y ** 2) over the global batch
"""

from __future__ import annotations

import operator

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.utils import _pytree as pytree

from moec.placement import I, S
from moec.program import InputSpec, OutputSpec, ParamSpec, Program
from moec.runtime.groups import Groups
from moec.runtime.mesh import Mesh

D, F, E = 6, 8, 4


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(D))


class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.gate_up = nn.Linear(D, 2 * F, bias=False)
        self.scale = nn.Parameter(torch.randn(F))
        self.down = nn.Linear(F, D)
        self.experts = nn.ModuleList(Expert() for _ in range(E))
        self.tied = nn.Linear(D, D, bias=False)
        self.head = nn.Linear(D, D, bias=False)
        self.head.weight = self.tied.weight
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(D), requires_grad=False)
        self.register_buffer("shift", torch.randn(D))
        self.register_buffer("cache", torch.ones(1), persistent=False)
        self.double()

    def forward(self, x, mode=None, flag=1, labels=None):
        gate, up = self.gate_up(x).chunk(2, -1)
        h = nn.functional.silu(gate) * up * self.scale
        y = self.down(h) + self.shift * self.frozen * self.cache
        y = y * sum(e.w for e in self.experts)
        y = self.head(y) @ self.tied.weight
        return {"loss": (y**2).mean() * flag, "y": y, "note": "constant"}


class _Sum(torch.autograd.Function):
    """P -> I: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx, x, name):
        x = x.clone()
        dist.all_reduce(x, group=dist.distributed_c10d._resolve_process_group(name))
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


def total(x, name):
    return x if name is None else _Sum.apply(x, name)


class _Share(torch.autograd.Function):
    """I -> S by slicing; the gradient is gathered by summing zero-padded parts, here left to the epilogue."""

    @staticmethod
    def forward(ctx, x, start, length):
        ctx.at = (start, length, x.shape)
        return x.narrow(0, start, length).clone()

    @staticmethod
    def backward(ctx, g):
        start, length, shape = ctx.at
        out = g.new_zeros(shape)
        out.narrow(0, start, length).copy_(g)
        return out, None, None


def share(x, start, length):
    return _Share.apply(x, start, length)


def program(mesh: Mesh, groups: Groups | None, rank: int, training=True, flag=1) -> Program:
    tp, dp = mesh.role("tp"), mesh.role("dp")
    tp_name = groups.name(mesh.key(tp)) if tp else None
    dp_name = groups.name(mesh.key(dp)) if dp else None
    n_tp, n_dp = mesh.size(tp), mesh.size(dp)

    def types(t):
        return {a: t if a in tp else I for a in mesh.names}

    def spec(placeholder, name, shape, t=I, **kwargs):
        return ParamSpec(
            placeholder, name, shape, torch.float64, kwargs.pop("requires_grad", True), types=types(t), **kwargs
        )

    params = [
        spec("p_gate_up", "gate_up.weight", (2 * F, D), S(0, parts=2)),
        spec("p_scale", "scale", (F,)),
        spec("p_down", "down.weight", (D, F), S(1)),
        spec("p_bias", "down.bias", (D,)),
        spec("p_experts", "experts.*.w", (E, D), S(0), members=tuple(f"experts.{e}.w" for e in range(E))),
        spec("p_tied", "tied.weight", (D, D), aliases=("head.weight",)),
        spec("p_frozen", "frozen", (D,), requires_grad=False),
        spec("b_shift", "shift", (D,), requires_grad=False, buffer=True),
        spec("b_cache", "cache", (1,), requires_grad=False, buffer=True, persistent=False),
    ]
    g = fx.Graph()
    at = {p.placeholder: g.placeholder(p.placeholder) for p in params}
    x = g.placeholder("x")
    call, aten = g.call_function, torch.ops.aten
    gate_up = call(aten.linear.default, (x, at["p_gate_up"]))
    chunks = call(torch.chunk, (gate_up, 2, -1))
    h = call(
        operator.mul,
        (call(aten.silu.default, (call(operator.getitem, (chunks, 0)),)), call(operator.getitem, (chunks, 1))),
    )
    h = call(operator.mul, (h, call(share, (at["p_scale"], mesh.index(rank, tp) * (F // n_tp), F // n_tp))))
    y = call(total, (call(aten.linear.default, (h, at["p_down"])), tp_name))
    y = call(operator.add, (y, at["p_bias"]))
    shift = call(operator.mul, (call(operator.mul, (at["b_shift"], at["p_frozen"])), at["b_cache"]))
    y = call(operator.add, (y, shift))
    y = call(operator.mul, (y, call(total, (call(torch.sum, (at["p_experts"], 0)), tp_name))))
    y = call(torch.matmul, (call(aten.linear.default, (y, at["p_tied"])), at["p_tied"]))
    loss = call(operator.truediv, (call(torch.mean, (call(operator.mul, (y, y)),)), n_dp))
    loss = call(operator.mul, (call(total, (loss, dp_name)), flag))
    g.output((loss, y))
    batch = {a: S(0) if a in dp else I for a in mesh.names}
    reductions = {p.placeholder: mesh.key(dp) for p in params if p.requires_grad and dp}
    reductions["p_scale"] = mesh.key(mesh.names)
    return Program(
        module=fx.GraphModule(nn.Module(), g),
        params={p.placeholder: p for p in params},
        inputs={"x": InputSpec("x", "x", 0, 2, torch.float64, (None, D))},
        outputs=[
            OutputSpec("loss", 0, types=types(I)),
            OutputSpec("y", 1, types=batch),
            OutputSpec("note", None, "constant"),
        ],
        out_spec=pytree.tree_structure({"loss": 0, "y": 0, "note": 0}),
        training=training,
        mesh=mesh,
        grad_reductions={k: v for k, v in reductions.items() if v},
    )
