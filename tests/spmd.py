"""What the tests of the passes share: a small transformer with every kind of weight, captured once a shape, compiled
once a plan, and compared with itself in eager mode on a simulated world.

Legend: B batch, S sequence, T = B*S tokens, H hidden, E experts, K choices a token, I expert width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moec.capture import capture
from moec.check import PassReport, _Oracle
from moec.compiler import PIPELINE
from moec.passes import manager
from moec.plan import Plan
from moec.program import Program

STAGES = (
    "captured", "normalize", "causal_attention", "raise_moe", "raise_router", "statistics", "shard", "redundant",
    "bundle", "fuse_router", "fuse_experts", "fuse_permute", "fuse_cross_entropy", "fuse_norm", "lower",
)  # fmt: skip
"""What is observed of a plan without options."""
HIDDEN, WIDTH, VOCAB = 12, 24, 19
HEADS, HEAD_DIM = 12, 3


@dataclass(frozen=True)
class Shape:
    """What is built; equal shapes share one capture."""

    experts: int = 6
    k: int = 3
    biased: bool = False
    """Biases on experts, router and attention, and a shared expert with its gate."""
    layers: int = 1
    kv_heads: int = HEADS


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, bias = HEAD_DIM, shape.biased
        self.q = nn.Linear(HIDDEN, HEADS * d, bias=bias)
        self.k = nn.Linear(HIDDEN, shape.kv_heads * d, bias=bias)
        self.v = nn.Linear(HIDDEN, shape.kv_heads * d, bias=bias)
        self.o = nn.Linear(HEADS * d, HIDDEN, bias=bias)
        self.q_norm = Norm(d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, HEAD_DIM)) for p in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != HEADS)
        return self.o(y.transpose(1, 2).flatten(2))


class MoE(nn.Module):
    """Stacked experts whose gate and up projections are packed in one parameter."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        E = shape.experts
        self.router = nn.Linear(HIDDEN, E, bias=shape.biased)
        self.gate_up = nn.Parameter(torch.randn(E, 2 * WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.randn(E, HIDDEN, WIDTH))
        self.gate_up_bias = self.down_bias = None
        if shape.biased:
            self.gate_up_bias = nn.Parameter(torch.randn(E, 2 * WIDTH))
            self.down_bias = nn.Parameter(torch.randn(E, HIDDEN))
            self.shared_up = nn.Linear(HIDDEN, WIDTH)
            self.shared_down = nn.Linear(WIDTH, HIDDEN)
            self.shared_gate = nn.Linear(HIDDEN, 1)

    def expert(self, e: int, x: Tensor) -> Tensor:
        biases = (None, None) if self.down_bias is None else (self.gate_up_bias[e], self.down_bias[e])
        gate, up = F.linear(x, self.gate_up[e], biases[0]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down[e], biases[1])

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_TH = x_BSH.reshape(-1, HIDDEN)
        w_TK, ids_TK = torch.topk(self.router(x_TH).softmax(-1), self.shape.k)
        if self.shape.k > 1:
            w_TK = w_TK / w_TK.sum(-1, keepdim=True)
        y_TH = torch.zeros_like(x_TH)
        for e in range(self.shape.experts):
            token, slot = torch.where(ids_TK == e)
            y_TH.index_add_(0, token, self.expert(e, x_TH[token]) * w_TK[token, slot, None])
        if self.shape.biased:
            y_TH = y_TH + torch.sigmoid(self.shared_gate(x_TH)) * self.shared_down(F.gelu(self.shared_up(x_TH)))
        return y_TH.view(x_BSH.shape)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(HIDDEN), Norm(HIDDEN)
        self.attention, self.moe = Attention(shape), MoE(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.moe(self.norm2(x))


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def build(shape: Shape, seed: int = 0, skew: float = 1.0) -> Model:
    """Random weights of a scale at which every gradient matters; ``skew`` multiplies the routers, so that few experts
    get most tokens and others none.  0 leaves a router its bias, so that all tokens prefer the same experts, and a
    trace of its weights: scores never tie, because of equal ones an untouched module takes any."""
    model = Model(shape)
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=gen) * 0.5 + (1.0 if "norm" in name else 0.0))
            if "router" in name:
                p.mul_(skew or (1.0 if name.endswith("bias") else 1e-9))
    return model


@cache
def captured(shape: Shape) -> Program:
    ids = torch.randint(0, VOCAB, (4, 5))
    return capture(build(shape), (ids, ids.flip(0)), {}, training=True)


@cache
def compiled(shape: Shape, degrees: tuple[int, int, int, int]) -> tuple[tuple[str, Program], ...]:
    """The program after every pass; ``degrees`` = (dp, tp, ep, etp)."""
    return tuple(compile_stages(captured(shape), Plan(*degrees)))


def compile_stages(program: Program, plan: Plan) -> list[tuple[str, Program]]:
    world = plan.dp * plan.cp * plan.tp
    stages: list[tuple[str, Program]] = []
    program = replace(program.fork(), mesh=plan.mesh(world))
    manager.run(program, plan.resolve(world), PIPELINE, observe=lambda n, p: stages.append((n, p)))
    return stages


@dataclass
class Batch:
    """A global batch.  ``seed`` draws ids and labels; labels of ``silent`` dp ranks (of ``dp``) are all ignored, of the
    others about a third."""

    size: int
    seq: int
    seed: int = 0
    dp: int = 1
    silent: frozenset[int] = field(default_factory=frozenset)

    def tensors(self) -> tuple[Tensor, Tensor]:
        gen = torch.Generator().manual_seed(self.seed)
        shape = (self.size, self.seq)
        ids = torch.randint(0, VOCAB, shape, generator=gen)
        labels = torch.randint(0, VOCAB, shape, generator=gen)
        ignored = torch.rand(shape, generator=gen) < 0.3
        share = self.size // self.dp
        for rank in self.silent:
            ignored[rank * share : (rank + 1) * share] = True
        labels[ignored] = -100
        if bool((labels == -100).all()):
            labels[-1, -1] = 1
        return ids, labels


def oracle(model: Model, batch: Batch) -> _Oracle:
    return _Oracle(model, batch.tensors(), {}, None)


def off(report: PassReport) -> float:
    """The largest error of a report, nan counted as infinite."""
    worst = report.worst()[1]
    return worst if worst == worst else float("inf")
