"""``PlainGroupedMM`` computes what torch's grouped_mm computes, where torch can, and in float64, where it cannot."""

import pytest
import torch
import torch.nn.functional as F

from moec.grouped import PlainGroupedMM


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x_NK, w_EKM = (torch.randn(s, generator=g).to(dtype).requires_grad_() for s in ((9, 8), (4, 8, 4)))
    return x_NK, w_EKM, torch.tensor([3, 3, 4, 9], dtype=torch.int32)  # the second expert has no row


def test_equals_torchs_own() -> None:
    results = []
    for plain in (False, True):
        x, w, ends = operands(torch.float32)
        if plain:
            with PlainGroupedMM():
                y = F.grouped_mm(x, w, offs=ends)
        else:
            y = F.grouped_mm(x, w, offs=ends)
        (y * torch.arange(36.0).view(9, 4)).sum().backward()
        results.append((y.detach(), x.grad, w.grad))
    for mine, own in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, own)


def test_takes_float64() -> None:
    x, w, ends = operands(torch.float64)
    with pytest.raises(RuntimeError):
        F.grouped_mm(x, w, offs=ends)
    with PlainGroupedMM():
        y = F.grouped_mm(x, w, offs=ends)
    rows = zip([0, *ends.tolist()], ends.tolist(), strict=False)
    torch.testing.assert_close(y, torch.cat([x[a:b] @ w[e] for e, (a, b) in enumerate(rows)]))
