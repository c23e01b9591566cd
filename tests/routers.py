"""Routers in the spellings of plain users: functions from logits [T, E] and a vector [E] to weights and ids [T, K].

Legend: T tokens, E experts, K choices, G groups.  E = 12 in groups of 3; K = 3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moec.capture import capture
from moec.compiler import normalize
from moec.passes import manager
from moec.passes.contract import Pass, PassContract
from moec.passes.raise_router import raise_router
from moec.plan import Plan
from moec.program import Program
from moec.promote import Promoted, promote_module, promote_program

H, E, K, G = 10, 12, 3, 4


def softmax_topk(z, b):
    return z.softmax(-1).topk(K)


def normalized(z, b):
    w, ids = z.softmax(-1).topk(K)
    return w / w.sum(-1, keepdim=True), ids


def topk_softmax(z, b):
    top, ids = z.topk(K)
    return top.softmax(-1), ids


def masked_softmax(z, b):
    """Shazeer: all but the top K are −inf before the softmax."""
    ids = z.topk(K).indices
    kept = torch.zeros_like(z, dtype=torch.bool).scatter(1, ids, True)
    return z.masked_fill(~kept, float("-inf")).softmax(-1).gather(1, ids), ids


def scattered_logits(z, b):
    top, ids = torch.topk(z, K, dim=-1)
    return torch.full_like(z, float("-inf")).scatter_(-1, ids, top).softmax(-1).gather(-1, ids), ids


def one_hot_weights(z, b):
    """Probabilities by a product with one-hot vectors, then normalised."""
    p = F.softmax(z, dim=-1, dtype=torch.float32)
    ids = p.topk(K, sorted=False).indices
    w = (F.one_hot(ids, E).to(p.dtype) * p.unsqueeze(1)).sum(-1)
    return w / (w.sum(-1, keepdim=True) + 1e-20), ids


def written_out(z, b):
    """Softmax by hand, sorted by argsort."""
    e = torch.exp(z - z.max(-1, keepdim=True).values)
    p = e / e.sum(-1, keepdim=True)
    ids = p.argsort(-1, descending=True)[:, :K]
    return p.gather(1, ids), ids


def maxima(z, b):
    """K times the maximum of what is left."""
    p, w, ids = z.softmax(-1), [], []
    left = p
    for _ in range(K):
        best = left.max(-1)
        w.append(best.values)
        ids.append(best.indices)
        left = left.masked_fill(F.one_hot(best.indices, E).bool(), -1.0)
    return torch.stack(w, -1), torch.stack(ids, -1)


def switch(z, b):
    w, ids = z.softmax(-1).max(-1, keepdim=True)
    return w, ids


def sigmoid_top_one(z, b):
    ids = z.argmax(-1, keepdim=True)
    return torch.sigmoid(z).gather(-1, ids), ids


def biased(z, b):
    s = z.sigmoid()
    ids = (s + b).topk(K, sorted=False).indices
    return s.gather(1, ids) * 2.5, ids


def biased_normalized(z, b):
    s = z.sigmoid()
    ids = torch.topk(s + b.unsqueeze(0), K).indices
    w = s.gather(1, ids)
    return w / (w.sum(-1, keepdim=True) + 1e-20), ids


def biased_softmax(z, b):
    p = z.softmax(-1)
    ids = (p + b).topk(K).indices
    return p.gather(1, ids), ids


def biased_logits(z, b):
    ids = (z + b).topk(K).indices
    return z.gather(1, ids).softmax(-1), ids


def sqrtsoftplus(z, b):
    s = F.softplus(z).sqrt()
    ids = (s + b).topk(K).indices
    w = s.gather(1, ids)
    return w / w.sum(-1, keepdim=True) * 1.5, ids


def _grouped(z, b, rate, kept, fill=float("-inf")):
    s = z.sigmoid()
    by = s + b
    groups = rate(by.view(-1, G, E // G)).topk(kept, sorted=False).indices
    mask = torch.zeros(z.shape[0], G, dtype=torch.bool, device=z.device).scatter(1, groups, True)
    ids = by.masked_fill(~mask.repeat_interleave(E // G, 1), fill).topk(K).indices
    w = s.gather(1, ids)
    return w / (w.sum(-1, keepdim=True) + 1e-20), ids


def grouped_max(z, b):
    return _grouped(z, b, lambda g: g.amax(-1), 2)


def grouped_top2(z, b):
    return _grouped(z, b, lambda g: g.topk(2).values.sum(-1), 2)


def grouped_topk(z, b):
    return _grouped(z, b, lambda g: g.topk(K).values.sum(-1), 1)


def clamped(z, b):
    """The clamp stays; what follows it is a spec."""
    return z.clamp(-60, 60).softmax(-1).topk(K)


def detached(z, b):
    return z.detach().softmax(-1).topk(K)


def in_bfloat16(z, b):
    """Of logits and weights in the model's dtype; scores in fp32."""
    w, ids = z.bfloat16().float().softmax(-1).topk(K)
    return w.bfloat16().float(), ids


def spec(score="softmax_pre", **rest) -> dict:
    return {"num_experts": E, "top_k": K, **({} if score == "softmax_pre" else {"score": score}), **rest}


FIT = {
    softmax_topk: spec(),
    normalized: spec(normalize=True),
    topk_softmax: spec("softmax_post"),
    masked_softmax: spec(normalize=True),
    scattered_logits: spec(normalize=True),
    one_hot_weights: spec(normalize=True),
    written_out: spec(),
    maxima: spec(),
    switch: spec(top_k=1),
    sigmoid_top_one: spec("sigmoid", top_k=1),
    biased: spec("sigmoid", scaling=2.5),
    biased_normalized: spec("sigmoid", normalize=True),
    biased_softmax: spec(),
    biased_logits: spec("softmax_post"),
    sqrtsoftplus: spec("sqrtsoftplus", normalize=True, scaling=1.5),
    grouped_max: spec("sigmoid", normalize=True, groups=G, kept_groups=2),
    grouped_top2: spec("sigmoid", normalize=True, groups=G, kept_groups=2, group_score="top2"),
    grouped_topk: spec("sigmoid", normalize=True, groups=G, group_score="topk"),
    clamped: spec(),
    detached: spec(),
    in_bfloat16: spec(),
}
"""Router -> the fields that its spec states."""
BIASED = {f for f in FIT if f.__name__.startswith(("biased", "grouped")) or f is sqrtsoftplus}


def bias_in_weights(z, b):
    w, ids = (z.sigmoid() + b).topk(K)
    return w, ids


def straight_through(z, b):
    """Weights of 1 with the gradient of the score."""
    p, ids = z.softmax(-1).max(-1, keepdim=True)
    return 1 + p - p.detach(), ids


def constant_one(z, b):
    w, ids = z.softmax(-1).topk(1)
    return w / w.sum(-1, keepdim=True), ids


def half_detached(z, b):
    w, ids = z.softmax(-1).topk(K)
    return w / w.sum(-1, keepdim=True).detach(), ids


def epsilon(z, b):
    w, ids = z.sigmoid().topk(K)
    return w / (w.sum(-1, keepdim=True) + 1e-6), ids


def zero_filled(z, b):
    """Experts of other groups score 0, which negative biases are below."""
    return _grouped(z, b, lambda g: g.topk(2).values.sum(-1), 2, 0.0)


def capacity(z, b):
    """Tokens beyond an expert's 20 get no weight."""
    w, ids = z.softmax(-1).topk(K)
    chosen = F.one_hot(ids, E).reshape(-1, E)
    place = ((chosen.cumsum(0) - 1) * chosen).sum(-1).view(-1, K)
    return w * (place < 20), ids


def over_tokens(z, b):
    w, ids = (z - z.mean(0)).softmax(-1).topk(K)
    return w * z.softmax(0).gather(1, ids), ids


def learned_scale(z, b):
    w, ids = z.softmax(-1).topk(K)
    return w * b[ids], ids


def threshold(z, b):
    """As many experts as score above a number."""
    p = z.softmax(-1)
    w, ids = p.topk(K)
    return w, torch.where(w > 0.1, ids, -1)


UNFIT = {
    bias_in_weights: "weights that differ",
    straight_through: "weights that differ",
    constant_one: "weights that differ",
    half_detached: "gradients that differ",
    epsilon: "weights that differ by .*e-05",
    zero_filled: "other experts for",
    capacity: "cumsum runs over tokens",
    over_tokens: "runs over tokens",
    learned_scale: "depend on a vector",
    threshold: "depends on data",
}
"""Router -> what the reason says."""


class Routed(nn.Module):
    """A router between a linear layer and an expert region of one matrix an expert."""

    def __init__(self, router, *, experts: int = E, trained: bool = False) -> None:
        super().__init__()
        self.gate, self.router = nn.Linear(H, experts, bias=False), router
        self.experts = nn.Parameter(torch.randn(experts * H, H))  # flat, or capture would look for a block to raise
        self.register_buffer("bias", torch.randn(experts))
        if trained:
            del self.bias
            self.bias = nn.Parameter(torch.randn(experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, H)
        weights, ids = self.router(self.gate(flat), self.bias)
        rows, counts, row_of = torch.ops.moec.permute(flat, ids, self.gate.out_features)
        rows = torch.ops.moec.grouped_mm(rows, self.experts.view(-1, H, H), counts)
        return torch.ops.moec.unpermute(rows, weights, row_of).reshape(x.shape)


class Stack(nn.Module):
    """Blocks with one router each."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.rms_norm(layer(x), (H,))
        return x


def program(module: nn.Module, dtype: torch.dtype = torch.float32) -> Program:
    """Captured and normalised; the region is the module's own, so nothing has to be raised."""
    captured = capture(module, (torch.randn(3, 5, H, dtype=dtype),), {}, training=True)
    return manager.run(captured, Plan().resolve(1), (normalize, _TAKEN_AS_RAISED))


def routed(before: Program) -> Program:
    return manager.run(before, Plan().resolve(1), (raise_router,))


def specs(after: Program) -> list[str]:
    return [n.args[4] for n in after.graph.find_nodes(op="call_function", target=torch.ops.moec.route.default)]


_TAKEN_AS_RAISED = Pass(
    PassContract("taken_as_raised", requires=frozenset({"normalized"}), provides=frozenset({"raised"})),
    lambda program, plan: program,
)


def computed(program: Program, module: nn.Module, x: Tensor) -> list[Tensor]:
    """Outputs of a program in float64 and the gradients of its parameters and input, of a random sum."""
    promoted = promote_program(program)
    tensors = {n: t.detach().double() for n, t in (*module.named_parameters(), *module.named_buffers())}
    args = [
        tensors[promoted.params[n.name].name] if n.name in promoted.params else x.double()
        for n in promoted.placeholders()
    ]
    return _with_gradients(lambda args: promoted.module(*args), args)


def expected(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The same of the module itself."""
    twin = promote_module(module)
    order = [n for n, _ in (*twin.named_parameters(), *twin.named_buffers())]

    def run(args):
        with Promoted():
            out = torch.func.functional_call(twin, dict(zip(order, args, strict=False)), (args[-1],))
        return out if isinstance(out, tuple) else (out,)

    tensors = [t.detach() for _, t in (*twin.named_parameters(), *twin.named_buffers())]
    return _with_gradients(run, [*tensors, x.double()])


def _with_gradients(run, args: list[Tensor]) -> list[Tensor]:
    args = [a.clone().requires_grad_() if a.is_floating_point() else a for a in args]
    outs = run(args)
    generator = torch.Generator().manual_seed(5)
    total = sum(
        (o * torch.randn(o.shape, generator=generator, dtype=o.dtype)).sum() for o in outs if o.requires_grad
    )
    grads = torch.autograd.grad(total, [a for a in args if a.requires_grad], allow_unused=True)
    return [*(o.detach() for o in outs), *(torch.zeros(()) if g is None else g for g in grads)]
