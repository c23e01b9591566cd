"""Plain MoE models in the spellings that people use, and how to run a captured Program beside them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moec.program import Program


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, width, bias=False)
        self.w2 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Router and experts; subclasses say how the loop is written."""

    def __init__(self, hidden: int = 12, experts: int = 6, k: int = 3, width: int = 10) -> None:
        super().__init__()
        self.k, self.num_experts = k, experts
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(self.expert(hidden, width) for _ in range(experts))

    def expert(self, hidden: int, width: int) -> nn.Module:
        return SwiGLU(hidden, width)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        w, ids = torch.topk(self.gate(x).softmax(-1), self.k, dim=-1)
        return w / w.sum(-1, keepdim=True), ids


class WhereIndexAdd(Block):
    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        flat = x.view(-1, h)
        w, ids = self.route(flat)
        out = torch.zeros_like(flat)
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](flat[token]) * w[token, slot, None])
        return out.view(b, s, h)


class SkipEmpty(Block):
    """Biased experts; skips those without work; assigns with ``+=`` to rows."""

    def expert(self, hidden: int, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(hidden, width), nn.GELU(), nn.Linear(width, hidden))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        w, ids = self.route(flat)
        out = flat.new_zeros(flat.shape)
        for e, expert in enumerate(self.experts):
            token, slot = (ids == e).nonzero(as_tuple=True)
            if token.numel() == 0:
                continue
            out[token] += w[token, slot].unsqueeze(-1) * expert(flat[token])
        return out.reshape(x.shape)


class OneHotHit(Block):
    """As Hugging Face's Mixtral was: one-hot mask, only the experts that were hit, a view that is written through."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        flat, sink = x.view(-1, x.shape[-1]), out.view(-1, x.shape[-1])
        w, ids = self.route(flat)
        mask = F.one_hot(ids, num_classes=self.num_experts).permute(2, 1, 0)
        for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slot, token = torch.where(mask[e[0]])
            sink.index_add_(0, token, self.experts[int(e)](flat[token]) * w[token, slot, None])
        return out


class DenseMask(Block):
    """Every expert on every token, weighted by a dense gate matrix; no flattening."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        dense = torch.zeros_like(self.gate(x)).scatter(-1, ids, w)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + dense[..., e : e + 1] * expert(x)
        return out


class TopOne(Block):
    """Switch: one expert a token, by ``max``; boolean masks; assignment instead of a sum."""

    def __init__(self) -> None:
        super().__init__(k=1)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        w, ids = self.gate(flat).softmax(-1).max(-1)
        out = torch.empty_like(flat)
        for e, expert in enumerate(self.experts):
            here = ids == e
            out[here] = expert(flat[here]) * w[here][:, None]
        return out.view_as(x)


class Stacked(Block):
    """Experts as stacked parameters used by slices, with biases and an einsum."""

    def __init__(self, hidden: int = 12, experts: int = 6, k: int = 2, width: int = 10) -> None:
        nn.Module.__init__(self)
        self.k, self.num_experts = k, experts
        self.gate = nn.Parameter(torch.randn(experts, hidden))
        self.up = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)
        self.up_bias = nn.Parameter(torch.randn(experts, width))
        self.down = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        w, ids = torch.topk(F.linear(flat, self.gate), self.k)
        w = w.softmax(-1)
        out = torch.zeros_like(flat)
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            h = torch.tanh(flat[token] @ self.up[e] + self.up_bias[e])
            out.index_add_(0, token, torch.einsum("tw,wh->th", h, self.down[e]) * w[token, slot, None])
        return out.view_as(x)


class ThreeLists(Block):
    """One list of layers a role, and a statistic of the routing beside the output."""

    def __init__(self, hidden: int = 12, experts: int = 6, k: int = 2, width: int = 10) -> None:
        nn.Module.__init__(self)
        self.k, self.num_experts = k, experts
        self.gate = nn.Linear(hidden, experts)
        self.up = nn.ModuleList(nn.Linear(hidden, width) for _ in range(experts))
        self.down = nn.ParameterList(torch.randn(width, hidden) for _ in range(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.view(-1, x.shape[-1])
        p = self.gate(flat).softmax(-1)
        w, ids = p.topk(self.k)
        share = F.one_hot(ids, self.num_experts).sum(1).to(p.dtype).mean(0)
        parts = []
        for e in range(self.num_experts):
            part = torch.zeros_like(flat)
            token, slot = torch.where(ids == e)
            part[token] = F.relu(self.up[e](flat[token])).mm(self.down[e]) * w[token, slot, None]
            parts.append(part)
        return torch.stack(parts).sum(0).view_as(x), (share * p.mean(0)).sum() * self.num_experts


class SharedExpert(WhereIndexAdd):
    def __init__(self) -> None:
        super().__init__()
        self.shared = SwiGLU(12, 14)
        self.shared_gate = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.sigmoid(self.shared_gate(x)) * self.shared(x)


class ScaledByExpert(WhereIndexAdd):
    """Not the canonical form: the experts' parameters alone do not say what they compute."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        w, ids = self.route(flat)
        out = torch.zeros_like(flat)
        for e in range(self.num_experts):
            hit = (ids == e).to(x.dtype)
            out = out + (1 + 0.1 * e) * (w * hit).sum(-1, keepdim=True) * self.experts[e](flat)
        return out.view_as(x)


class ScaledSkipEmpty(ScaledByExpert):
    """The same, with a loop that cannot be exported as it stands."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        w, ids = self.route(flat)
        out = torch.zeros_like(flat)
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, (1 + 0.1 * e) * self.experts[e](flat[token]) * w[token, slot, None])
        return out.view_as(x)


class Model(nn.Module):
    """Embedding, layers of norm and block, head tied to the embedding, a loss with ignored labels."""

    def __init__(self, *blocks: nn.Module, vocab: int = 20, hidden: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(blocks)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in blocks)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x, extra = self.embed(ids), 0.0
        for norm, block in zip(self.norms, self.layers, strict=True):
            y = block(norm(x))
            if isinstance(y, tuple):
                y, aux = y
                extra = extra + 0.01 * aux
            x = x + y
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss + extra, "logits": logits}


def run(program: Program, model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """The program's flat results with the model's own parameters (experts stacked, so that gradients reach them)."""
    real = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    args = []
    for node in program.placeholders():
        spec = program.params.get(node.name)
        if spec is None:
            args.append(inputs[program.inputs[node.name].path])
        else:
            args.append(torch.stack([real[m] for m in spec.members]) if spec.members else real[spec.name])
    return list(program.module(*args))


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, params = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    grads = torch.autograd.grad(loss, params, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, params, grads, strict=True)}


def worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max() / a[n].abs().max().clamp_min(1e-3)) for n in a)
