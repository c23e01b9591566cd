"""Parameters that are gathered again lie in memory as they did: autograd reads them by strides."""

import pytest
import torch

from moec.runtime import reshard
from moec.runtime.reshard import Resharding


@pytest.mark.parametrize("saved", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_strides_are_those_of_the_forward(saved, padded, monkeypatch):
    """Two parameters travel together; autograd saves one of them, or both; alone it is gathered in another layout."""
    torch.manual_seed(0)

    def gather(kind, x, dim, to_dim, size, group):
        """Of two ranks that have the same part, along ``dim`` in front: the dim moves, as in ``all_gather``."""
        return torch.cat([x.movedim(dim, 0)] * size).movedim(0, dim)

    monkeypatch.setattr(reshard, "convert", gather)
    locals_ = [torch.randn(3, 2), torch.randn(5, 2)]
    runs = ((0, 3),) if padded else ()
    wholes = [reshard.unpadded(torch.cat([x, x], 1).contiguous(), 1, runs) for x in locals_]
    xs = [torch.randn(4, len(x), requires_grad=True) for x in locals_]
    resharding = Resharding()
    for whole, local in zip(wholes, locals_, strict=True):
        resharding.note(whole, "unit", local, 1, 2, "group", runs)
    with resharding.hooks():
        y = sum((xs[i] @ wholes[i]).square().sum() for i in saved)
    want = [2 * xs[i].detach() @ wholes[i] @ wholes[i].t() for i in saved]
    assert sum(p.handles for p in resharding._parameters.values()) == len(saved)
    y.backward()
    torch.testing.assert_close([xs[i].grad for i in saved], want)
