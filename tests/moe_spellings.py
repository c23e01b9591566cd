"""MoE blocks in the spellings that people use beyond a loop over experts: one plain module each.

E = 6 experts, K = 3: no power of two, so that a mistaken axis cannot hide behind an equal size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

H, E, K, W = 12, 6, 3, 10


class Stacked(nn.Module):
    """A router and stacked SwiGLU experts, gate and up in one parameter."""

    k = K

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.w13 = nn.Parameter(torch.randn(E, H, 2 * W) / H**0.5)
        self.w2 = nn.Parameter(torch.randn(E, W, H) / W**0.5)

    def route(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        w, ids = self.gate(flat).softmax(-1).topk(self.k)
        return w / w.sum(-1, keepdim=True), ids

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, H)
        return self.mix(flat, *self.route(flat)).reshape(x.shape)

    def mix(self, x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def glu(h: Tensor) -> Tensor:
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up


class GatheredEinsum(Stacked):
    """``w[ids]``: every token takes its own experts' weights along."""

    def mix(self, x, w, ids):
        h = self.glu(torch.einsum("th,tkhi->tki", x, self.w13[ids]))
        return (torch.einsum("tki,tkih->tkh", h, self.w2[ids]) * w[..., None]).sum(1)


class GatheredMatmul(Stacked):
    """The same with columns: ``wᵀ[ids] @ x[:, None, :, None]``, biases gathered besides."""

    def __init__(self) -> None:
        super().__init__()
        self.b2 = nn.Parameter(torch.randn(E, H))

    def mix(self, x, w, ids):
        up = self.w13.transpose(1, 2)[ids]
        gate, up = (up @ x[:, None, :, None]).squeeze(-1).chunk(2, -1)
        y = torch.matmul((F.gelu(gate) * up).unsqueeze(2), self.w2[ids]).squeeze(2) + self.b2[ids]
        return (w.unsqueeze(-1) * y).sum(dim=1)


class GatheredBmm(Stacked):
    """Flat pairs: tokens repeated K times, ``bmm`` with ``index_select``."""

    def mix(self, x, w, ids):
        pairs, flat_ids = x.repeat_interleave(self.k, 0), ids.reshape(-1)
        h = self.glu(torch.bmm(pairs.unsqueeze(1), self.w13.index_select(0, flat_ids)))
        y = torch.bmm(h, self.w2.index_select(0, flat_ids)).squeeze(1)
        return (y * w.reshape(-1, 1)).view(-1, self.k, H).sum(1)


class DenseEinsum(Stacked):
    """Every expert on every token, weighted by a dense matrix."""

    def mix(self, x, w, ids):
        dense = torch.zeros(x.shape[0], E, dtype=w.dtype, device=x.device).scatter(1, ids, w)
        h = self.glu(torch.einsum("th,ehi->tei", x, self.w13))
        return torch.einsum("tei,eih->teh", h, self.w2).mul(dense.unsqueeze(-1)).sum(1)


class DenseBmm(Stacked):
    """Experts first: ``bmm`` over experts, a one-hot weight matrix, a product with it as the sum."""

    def mix(self, x, w, ids):
        dense = (F.one_hot(ids, E).to(w.dtype) * w.unsqueeze(-1)).sum(1)
        y = torch.bmm(self.glu(torch.bmm(x.expand(E, -1, -1), self.w13)), self.w2)
        return torch.einsum("te,eth->th", dense, y)


class DenseWhere(Stacked):
    """No ids at all: scores below the K-th are set to zero; ties take more than K experts."""

    def forward(self, x):
        flat = x.reshape(-1, H)
        scores = self.gate(flat).softmax(-1)
        kth = scores.topk(self.k).values[:, -1:]
        dense = torch.where(scores >= kth, scores, torch.zeros_like(scores))
        y = self.glu(flat @ self.w13) @ self.w2
        return (dense.t().unsqueeze(-1) * y).sum(0).reshape(x.shape)


class DenseFirst(Stacked):
    """The experts run before the router chooses; batch and sequence stay apart."""

    def forward(self, x):
        y = torch.einsum("bsei,eih->bseh", self.glu(torch.einsum("bsh,ehi->bsei", x, self.w13)), self.w2)
        w, ids = self.gate(x).softmax(-1).topk(self.k)
        return (torch.zeros_like(self.gate(x)).scatter_(-1, ids, w).unsqueeze(-1) * y).sum(-2)


class IndexCopy(Stacked):
    """Sorted pairs, a slice of them for each expert, ``index_copy`` back."""

    def mix(self, x, w, ids):
        out = x.new_zeros(ids.numel(), H)
        for e in range(E):
            pair = (ids.reshape(-1) == e).nonzero().squeeze(1)
            y = self.glu(x.index_select(0, pair // self.k) @ self.w13[e]) @ self.w2[e]
            out = out.index_copy(0, pair, y)
        return (out.view(-1, self.k, H) * w[..., None]).sum(1)


class SortedSegments(Stacked):
    """Pairs sorted by expert, one matmul a segment, unsorted by the inverse permutation."""

    def mix(self, x, w, ids):
        order = ids.flatten().argsort(stable=True)
        rows, counts = x[order // self.k], torch.bincount(ids.flatten(), minlength=E).tolist()
        parts = [self.glu(r @ self.w13[e]) @ self.w2[e] for e, r in enumerate(rows.split(counts))]
        y = torch.cat(parts)[order.argsort()]
        return (y.view(-1, self.k, H) * w.unsqueeze(-1)).sum(1)


class PaddedBmm(Stacked):
    """Pairs sorted by expert, padded to the longest, one ``bmm`` for all experts, unpadded and unsorted."""

    def mix(self, x, w, ids):
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=E)
        longest = int(counts.max())
        expert = flat[order]
        slot = torch.arange(flat.numel(), device=x.device) - (counts.cumsum(0) - counts)[expert]
        padded = x.new_zeros(E, longest, H)
        padded[expert, slot] = x[order // self.k]
        y = torch.bmm(self.glu(torch.bmm(padded, self.w13)), self.w2)[expert, slot]
        out = torch.zeros_like(x)
        return out.index_add(0, order // self.k, y * w.flatten()[order].unsqueeze(1))


class SortedCapacity(PaddedBmm):
    """A capacity that drops, known only in the order of the experts: not raised (not among the spellings below)."""

    def mix(self, x, w, ids):
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=E)
        expert = flat[order]
        slot = torch.arange(flat.numel(), device=x.device) - (counts.cumsum(0) - counts)[expert]
        kept = slot < 3
        padded = x.new_zeros(E, 3, H)
        padded[expert[kept], slot[kept]] = x[order[kept] // self.k]
        y = torch.bmm(self.glu(torch.bmm(padded, self.w13)), self.w2)[expert[kept], slot[kept]]
        return torch.zeros_like(x).index_add(0, order[kept] // self.k, y * w.flatten()[order[kept]].unsqueeze(1))


class Capacity(Stacked):
    """GShard: dispatch and combine masks ``[T, E, C]``; what exceeds the capacity is dropped."""

    factor = 0.5

    def mix(self, x, w, ids):
        tokens = x.shape[0]
        capacity = int(self.factor * tokens * self.k / E) + 1
        chosen = F.one_hot(ids, E)  # [T, K, E]
        place = (chosen.transpose(0, 1).reshape(-1, E).cumsum(0) - 1).reshape(self.k, tokens, E).transpose(0, 1)
        place = (place * chosen).sum(-1)  # [T, K]
        slots = (place.unsqueeze(-1) == torch.arange(capacity, device=x.device)).to(x.dtype)  # all False: dropped
        combine = torch.einsum("tk,tke,tkc->tec", w, chosen.to(x.dtype), slots)
        dispatch = (combine > 0).to(x.dtype)
        rows = torch.einsum("tec,th->ech", dispatch, x)
        y = torch.einsum("eci,eih->ech", self.glu(torch.einsum("ech,ehi->eci", rows, self.w13)), self.w2)
        return torch.einsum("tec,ech->th", combine, y)


class Switch(Stacked):
    """Top-1, weighted by the probability of the argmax; capacity that never drops, by position in the expert."""

    k = 1

    def mix(self, x, w, ids):
        probs = self.gate(x).softmax(-1)
        gate, index = probs.max(-1)
        mask = F.one_hot(index, E).to(x.dtype)
        place = ((mask.cumsum(0) - 1) * mask).sum(-1).long()
        dispatch = mask.unsqueeze(-1) * (place[:, None, None] == torch.arange(x.shape[0], device=x.device)).to(x.dtype)
        rows = torch.einsum("tec,th->ech", dispatch, x)
        y = torch.bmm(self.glu(torch.bmm(rows, self.w13)), self.w2)
        return torch.einsum("tec,ech->th", dispatch * gate[:, None, None], y)


class WeightedBefore(Stacked):
    """``f(w·x)``: tokens are scaled on their way in."""

    def mix(self, x, w, ids):
        out = torch.zeros_like(x)
        for e in range(E):
            t, k = torch.where(ids == e)
            out.index_add_(0, t, self.glu((x[t] * w[t, k, None]) @ self.w13[e]) @ self.w2[e])
        return out


class WeightedBeforeDense(Stacked):
    """Llama 4: sigmoid of the chosen scores, zero elsewhere, scales a copy of all tokens for every expert."""

    k = 1

    def mix(self, x, w, ids):
        logits = self.gate(x)
        top, ids = logits.topk(self.k, dim=1)
        scores = torch.full_like(logits, float("-inf")).scatter_(1, ids, top).transpose(0, 1)
        rows = x.repeat(E, 1) * torch.sigmoid(scores).reshape(-1, 1)
        h = self.glu(torch.bmm(rows.view(E, -1, H), self.w13))
        return torch.bmm(h, self.w2).sum(0)


class WeightedBetween(Stacked):
    """The weight is applied between the two products."""

    def mix(self, x, w, ids):
        h = self.glu(torch.einsum("th,tkhi->tki", x, self.w13[ids])) * w[..., None]
        return torch.tanh(h.unsqueeze(2) @ self.w2[ids]).squeeze(2).sum(1)


class WeightedBetweenLoop(Stacked):
    def mix(self, x, w, ids):
        out = torch.zeros_like(x)
        for e in range(E):
            t, k = torch.where(ids == e)
            out[t] += torch.tanh((self.glu(x[t] @ self.w13[e]) * w[t, k].unsqueeze(1)) @ self.w2[e])
        return out


class TopOneSigmoid(Stacked):
    """``argmax`` and ``gather``, a sigmoid as the weight, no normalisation."""

    def mix(self, x, w, ids):
        logits = self.gate(x)
        best = logits.argmax(-1)
        w = torch.sigmoid(logits.gather(-1, best.unsqueeze(-1)))
        out = torch.zeros_like(x)
        for e in range(E):
            rows = (best == e).nonzero(as_tuple=True)[0]
            if len(rows):
                out[rows] = w[rows] * (self.glu(x[rows] @ self.w13[e]) @ self.w2[e])
        return out


class Expert(nn.Module):
    """Biases, a norm, a learned slope, a scale of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(H), nn.Linear(H, W), nn.PReLU(), nn.Linear(W, H)
        self.scale = nn.Parameter(torch.rand(H) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(self.norm(x)))) * self.scale


class ScaledExperts(Stacked):
    """Parameters that are used entry by entry."""

    def __init__(self) -> None:
        super().__init__()
        del self.w13, self.w2
        self.experts = nn.ModuleList(Expert() for _ in range(E))
        for e in self.experts:
            nn.init.normal_(e.norm.weight)
            nn.init.normal_(e.norm.bias)

    def mix(self, x, w, ids):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, expert(x[t]) * w[t, k, None])
        return out


class ScaledStacked(Stacked):
    """Stacked biases and scales beside a dense product, one temperature an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.b13 = nn.Parameter(torch.randn(E, 2 * W))
        self.scale = nn.Parameter(torch.rand(E, 1, H) + 0.5)
        self.slope = nn.Parameter(torch.rand(E))

    def mix(self, x, w, ids):
        dense = torch.zeros_like(self.gate(x)).scatter(1, ids, w)
        gate, up = (torch.matmul(x, self.w13) + self.b13[:, None]).chunk(2, -1)
        y = (torch.sigmoid(gate * self.slope[:, None, None]) * up) @ self.w2 / self.scale
        return (y * dense.t()[..., None]).sum(0)


class SharedFirst(WeightedBefore):
    """The routed experts add to what a gated shared expert left in ``out``."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.shared_gate = nn.Linear(H, H), nn.Linear(H, 1)

    def mix(self, x, w, ids):
        out = torch.sigmoid(self.shared_gate(x)) * F.gelu(self.shared(x))
        for e in range(E):
            t, k = torch.where(ids == e)
            out.index_add_(0, t, (self.glu(x[t] @ self.w13[e]) @ self.w2[e]) * w[t, k, None])
        return out


class SharedLast(SharedFirst):
    """The shared expert is computed first and added last."""

    def mix(self, x, w, ids):
        shared = F.gelu(self.shared(x)) * torch.sigmoid(self.shared_gate(x))
        return WeightedBefore.mix(self, x, w, ids) + shared


class Experts(nn.Module):
    """Holds the stacked weights and does not route."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.randn(E, H, 2 * W) / H**0.5)
        self.w2 = nn.Parameter(torch.randn(E, W, H) / W**0.5)

    def forward(self, x: Tensor, e: int) -> Tensor:
        return Stacked.glu(x @ self.w13[e]) @ self.w2[e]


class CallsExperts(Stacked):
    """The loop is in one module, the weights are in another."""

    def __init__(self) -> None:
        super().__init__()
        del self.w13, self.w2
        self.experts = Experts()

    def mix(self, x, w, ids):
        out = torch.zeros_like(x)
        for e in range(E):
            t, k = torch.where(ids == e)
            out.index_add_(0, t, self.experts(x[t], e) * w[t, k, None])
        return out


class GroupedBefore(Stacked):
    """``grouped_mm`` over sorted pairs that the weights have scaled before."""

    def pairs(self, x: Tensor, w: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        order = ids.reshape(-1).argsort(stable=True)
        ends = torch.bincount(ids.reshape(-1), minlength=E).cumsum(0).to(torch.int32)
        token = order // self.k
        return x[token], w.reshape(-1)[order, None], token, ends

    def mix(self, x, w, ids):
        rows, w, token, ends = self.pairs(x, w, ids)
        h = self.glu(F.grouped_mm(rows * w, self.w13, offs=ends))
        return torch.zeros_like(x).index_add(0, token, F.grouped_mm(h, self.w2, offs=ends))


class GroupedAfter(GroupedBefore):
    """The same with weights behind."""

    def mix(self, x, w, ids):
        rows, w, token, ends = self.pairs(x, w, ids)
        h = self.glu(F.grouped_mm(rows, self.w13, offs=ends))
        return torch.zeros_like(x).index_add(0, token, F.grouped_mm(h, self.w2, offs=ends) * w)


SPELLINGS = (
    GatheredEinsum, GatheredMatmul, GatheredBmm, DenseEinsum, DenseBmm, DenseWhere, DenseFirst, IndexCopy,
    SortedSegments, PaddedBmm, Capacity, Switch, WeightedBefore, WeightedBeforeDense, WeightedBetween,
    WeightedBetweenLoop, TopOneSigmoid, ScaledExperts, ScaledStacked, SharedFirst, SharedLast, CallsExperts,
    GroupedBefore, GroupedAfter,
)  # fmt: skip
