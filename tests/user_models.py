"""Models as people write them: other spellings of attention, norms, losses and expert loops than our examples use."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

H, VOCAB, HEADS, EXPERTS = 16, 24, 4, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(H, 8), nn.GELU(), nn.Linear(8, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class MoE(nn.Module):
    """A biased router, biased experts, ``out[t] += …``."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.reshape(-1, H)
        weights, ids = F.softmax(self.router(x), -1).topk(2)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            if t.numel() == 0:
                continue
            out[t] += weights[t, k].unsqueeze(-1) * expert(x[t])
        return out.reshape(shape)


class FusedAttention(nn.Module):
    """One qkv projection, a tril mask, masked_fill and softmax by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        q, k, v = (t.view(B, S, HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(H // HEADS)
        mask = torch.tril(torch.ones(S, S, dtype=torch.bool, device=x.device))
        scores = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.out((scores @ v).transpose(1, 2).reshape(B, S, H))


class EinsumAttention(nn.Module):
    """einsum, an additive triu mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(H, H, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        q, k, v = (f(x).reshape(B, S, HEADS, -1) for f in (self.q, self.k, self.v))
        scores = torch.einsum("bsnd,btnd->bnst", q, k) / math.sqrt(H // HEADS)
        scores = scores + torch.full((S, S), float("-inf"), device=x.device).triu(1)
        return self.out(torch.einsum("bnst,btnd->bsnd", scores.softmax(-1), v).flatten(2))


class TorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(H, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Net(nn.Module):
    """One block: learned positions, a scaled MoE branch, a Sequential MLP; language model or classifier."""

    def __init__(self, attention: nn.Module, norm: type[nn.Module], classes: int | None = None) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, H), nn.Embedding(32, H)
        self.norm1, self.norm2, self.attention, self.moe = norm(H), norm(H), attention, MoE()
        self.scale = nn.Parameter(torch.full((H,), 0.5))
        self.mlp = nn.Sequential(nn.Linear(H, 32), nn.SiLU(), nn.Linear(32, H))
        self.classes = classes
        self.head = nn.Linear(H, classes or VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = x + self.attention(self.norm1(x))
        x = x + self.scale * self.moe(self.norm2(x))
        x = x + self.mlp(x)
        if self.classes:
            logits = self.head(x.mean(1))
            return {"loss": F.cross_entropy(logits, labels[:, 0]), "logits": logits}
        logits = self.head(x)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits}


class Regression(nn.Module):
    """Float inputs and a loss that is the mean over everything."""

    def __init__(self, loss=F.mse_loss) -> None:
        super().__init__()
        self.inp, self.moe, self.out, self.loss = nn.Linear(6, H), MoE(), nn.Linear(H, 2), loss

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.inp(x))
        p = self.out(h + self.moe(h))
        return self.loss(p, y), p


def tokens(classes: int | None = None) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (4, 7), generator=g)
    labels = torch.randint(0, classes or VOCAB, (4, 7), generator=g)
    if not classes:
        labels[0, 3:] = -100
    return ids, labels


def floats(*lead: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(4)
    return torch.randn(*lead, 6, generator=g), torch.rand(*lead, 2, generator=g)


CASES = {
    "fused qkv, tril, LayerNorm": lambda: (Net(FusedAttention(), nn.LayerNorm), tokens()),
    "einsum, triu, RMSNorm": lambda: (Net(EinsumAttention(), nn.RMSNorm), tokens()),
    "MultiheadAttention": lambda: (Net(TorchAttention(), nn.LayerNorm), tokens()),
    "classifier": lambda: (Net(EinsumAttention(), nn.LayerNorm, classes=3), tokens(classes=3)),
    "regression": lambda: (Regression(), floats(8)),
    "regression over a sequence, smooth l1": lambda: (Regression(F.smooth_l1_loss), floats(4, 5)),
    "binary labels": lambda: (Regression(F.binary_cross_entropy_with_logits), floats(4, 5)),
}
