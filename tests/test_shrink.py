"""A block that is too large for its proof is proved on a narrow twin, and only as far as it does what the twin does."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moec
from moec.capture import capture, probe, shrink

H, FFN = 32, 16


class Experts(nn.Module):
    """Gate and up are told apart by a width, an integer constant of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.ffn = H, FFN
        self.up, self.down = nn.Parameter(torch.randn(4, 2 * FFN, H) / 6), nn.Parameter(torch.randn(4, H, FFN) / 4)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(4):
            t, k = torch.where(ids == e)
            if t.numel() == 0:
                continue
            out.index_add_(0, t, self.expert(x[t], e) * weights[t, k, None])
        return out

    def expert(self, x: Tensor, e: int) -> Tensor:
        h = F.linear(x, self.up[e])
        return F.linear(F.silu(h[:, : self.ffn]) * h[:, self.ffn :], self.down[e])


class ScaledByWidth(Experts):
    def expert(self, x, e):
        return super().expert(x, e) * self.hidden**-0.5


class OtherwiseWhenWide(Experts):
    def expert(self, x, e):
        y = super().expert(x, e)
        return y.relu() if self.hidden >= H else y


class ByWidth(Experts):
    """The wide block cuts elsewhere than the twin does."""

    def expert(self, x, e):
        h = F.linear(x, self.up[e])
        cut = self.ffn if self.hidden < H else 5
        return F.linear(F.silu(h[:, : self.ffn]) * h[:, self.ffn :].roll(cut, 1), self.down[e])


class Buffered(Experts):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.ones(H))


class Odd(Experts):
    def __init__(self):
        super().__init__()
        self.extra = nn.Parameter(torch.ones(7))


class Net(nn.Module):
    def __init__(self, experts: type[Experts]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(H, 4, bias=False), experts()

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        return self.experts(x, ids, weights)


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch):
    monkeypatch.setattr(shrink, "LARGE", 100)
    monkeypatch.setattr(shrink, "NARROW", 4)


def test_proved_narrow_and_computed_wide():
    model, x = Net(Experts), torch.randn(6, H)
    program = capture(model, (x,), training=True)
    (block,) = program.blocks
    assert block.guide.report.factor == 4 and block.guide.module.up.shape == (4, 8, 8)
    assert probe(block).factor == 4
    tensors = dict(model.named_parameters()) | {"0": x}
    specs = {**program.params, **program.inputs}
    values = [tensors[getattr(specs[n.name], "name", "0")] for n in program.placeholders()]
    torch.testing.assert_close(program.module(*values)[0], model(x))
    assert (model.experts.hidden, model.experts.ffn) == (H, FFN)


@pytest.mark.parametrize(
    ("experts", "why"),
    [
        (ScaledByWidth, "other constants than in the narrow twin"),
        (OtherwiseWhenWide, "does something else"),
        (ByWidth, "other constants than in the narrow twin"),
        (Buffered, "a buffer has one of its widths"),
        (Odd, "do not shrink"),
    ],
)
def test_what_the_twin_does_not_prove_is_refused(experts, why):
    with pytest.raises(moec.MoecError, match=why):
        capture(Net(experts), (torch.randn(6, H),), training=True)
