"""Models of several equal layers, small enough to be captured in full as well; and some that only look so."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

H, VOCAB, LAYERS = 8, 24, 6


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 6, H) / 3), nn.Parameter(torch.randn(4, H, 6) / 3)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(4):
            t, k = torch.where(ids == e)
            if t.numel() == 0:
                continue
            out.index_add_(0, t, F.linear(F.silu(F.linear(x[t], self.up[e])), self.down[e]) * weights[t, k, None])
        return out


class Layer(nn.Module):
    def __init__(self, i: int) -> None:
        super().__init__()
        self.layer_idx = i
        self.norm, self.router, self.experts = nn.RMSNorm(H), nn.Linear(H, 4, bias=False), Experts()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).reshape(-1, H)
        weights, ids = self.router(y).softmax(-1).topk(2)
        return x + self.experts(y, ids, weights).reshape(x.shape)


class Deep(nn.Module):
    def __init__(self, layer: Callable[[int], nn.Module] = Layer, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(VOCAB, H), nn.Linear(H, VOCAB)
        self.layers = nn.ModuleList(layer(i) for i in range(layers))

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(self.tokens(ids))
        logits = self.head(x)
        return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1)), logits

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batch(B: int = 4, S: int = 5) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, VOCAB, (B, S), generator=g) for _ in range(2))
    labels[0, 2:] = -100
    return ids, labels


# -- layers that differ in something that can be seen


class Scaled(Layer):
    def __init__(self, i: int) -> None:
        super().__init__(i)
        self.scale = 1.0 + i

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Buffered(Layer):
    def __init__(self, i: int) -> None:
        super().__init__(i)
        self.register_buffer("shift", torch.full((H,), 1.0 + i))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


class Closure(Layer):
    def __init__(self, i: int) -> None:
        super().__init__(i)
        self.act = lambda x: x * (i + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


class Tied(Deep):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.norm = self.layers[0].norm


class Frozen(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].router.weight.requires_grad_(False)


class Hooked(Deep):
    def __init__(self) -> None:
        super().__init__()
        for i, layer in enumerate(self.layers):
            layer.register_forward_hook(lambda m, args, out, i=i: out * (i + 1))


UNEQUAL: dict[str, Callable[[], nn.Module]] = {
    "a number differs": lambda: Deep(Scaled),
    "a buffer differs": lambda: Deep(Buffered),
    "a function differs": lambda: Deep(Closure),
    "a module is shared": Tied,
    "one is frozen": Frozen,
    "hooks": Hooked,
    "too few": lambda: Deep(layers=4),
}


# -- layers that are equal, and not used alike


class Indexed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.layer_idx + 1)


class Branching(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * 2 if self.layer_idx == 4 else x


class Listed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0, 1, 2, 3, 4, 5)[self.layer_idx]


class Timed(Layer):
    def forward(self, x: Tensor, t: float = 0.0) -> Tensor:
        return super().forward(x) + t


class TimedDeep(Deep):
    def body(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x, t=float(i))
        return x


class Between(Deep):
    def body(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 4:
                x = x * 2
        return x


class InPlace(Deep):
    def body(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 4:
                x.mul_(2)
        return x


class Tapped(Deep):
    def body(self, x):
        taps = []
        for layer in self.layers:
            x = layer(x)
            taps.append(x)
        return x + taps[4]


class Backwards(Deep):
    def body(self, x):
        for layer in reversed(self.layers):
            x = layer(x)
        return x


class Early(Deep):
    def body(self, x):
        for layer in self.layers[:5]:
            x = layer(x)
        return x


class Skipping(Deep):
    def body(self, x):
        start = x
        for layer in self.layers:
            layer(x)
            x = layer.norm(x)
        return x + start


UNALIKE: dict[str, Callable[[], nn.Module]] = {
    "computes with its index": lambda: Deep(Indexed),
    "branches on its index": lambda: Deep(Branching),
    "looks its index up": lambda: Deep(Listed),
    "another argument each": lambda: TimedDeep(Timed),
    "something between two": Between,
    "written to between two": InPlace,
    "one output is used again": Tapped,
    "backwards": Backwards,
    "the last one is left out": Early,
    "outputs are dropped": Skipping,
}


# -- found on the graph only: every layer leaves something behind


class Leaving(Layer):
    def __init__(self, i: int) -> None:
        super().__init__(i)
        self.logits: object = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.logits = self.router(x)
        return super().forward(x)


class Collected(Deep):
    """A balancing term from what the layers leave behind."""

    def __init__(self) -> None:
        super().__init__(Leaving)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, logits = super().forward(ids, labels)
        return loss + sum((torch.as_tensor(layer.logits) ** 2).mean() for layer in self.layers), logits


class Alternating(Deep):
    """Layers of two kinds in turn."""

    def __init__(self, layers: int = 10) -> None:
        super().__init__(lambda i: Layer(i) if i % 2 else Gated(i), layers)


class Gated(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.sigmoid(x)
