"""Norms by the root mean square as one op: its values and gradients, in C and by PyTorch's steps; what is fused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import moec
from moec.compiler import compile_program
from moec.plan import Plan
from moec.program import op_name
from moec.runtime.errors import MoecError
from moec.runtime.kernels import c_library, c_norm

ops = torch.ops.moec
EPS = 1e-5


def spelled(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


@given(st.sampled_from([(0, 3), (1, 1), (5, 7), (2, 3, 33), (600, 5), (3, 260)]), st.booleans(), st.booleans(),
       st.sampled_from([torch.float32, torch.float64]), st.integers(0, 99))  # fmt: skip
def test_values_and_gradients(shape, turned, compiled, dtype, seed):
    """Rows that are not neighbours, more rows than a piece of a sum, none at all; with a compiler and without."""
    gen = torch.Generator().manual_seed(seed)
    x, g = (torch.randn(shape, generator=gen, dtype=dtype) for _ in range(2))
    w = torch.randn(shape[-1], generator=gen, dtype=dtype)
    if turned:
        x, g = (t.transpose(0, -1).contiguous().transpose(0, -1) for t in (x, g))
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setenv("MOEC_CC", "")
        ours = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        y, scale = ops.rms_norm(ours[0], [shape[-1]], ours[1], EPS)
        got = [y.detach(), *torch.autograd.grad(y, ours, g)]
        assert not scale.requires_grad
        assert y.is_contiguous() and got[1].is_contiguous()  # as the fakes say: scheduled graphs count on it
    exact = [t.double().requires_grad_() for t in (x, w)]
    y = spelled(*exact)
    wanted = [y.detach(), *torch.autograd.grad(y, exact, g.double())]
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * (1 + float(b.abs().sum()) ** 0.5))


@pytest.mark.skipif(c_library.compiler() is None, reason="no C compiler here")
def test_c_is_what_runs_and_a_row_does_not_depend_on_its_neighbours():
    x, w = torch.randn(70, 33), torch.randn(33)
    kernels = c_norm.of(x)
    assert kernels is not None and c_norm.of(x.double()) is None and c_norm.of(x[:0]) is None
    y, scale = kernels.forward(x, w, EPS)
    dx, _ = kernels.backward(x, x, w, scale)
    for rows in (slice(3, 4), slice(20, 61)):
        part, own = kernels.forward(x[rows], w, EPS)
        assert torch.equal(part, y[rows]) and torch.equal(own, scale[rows])
        assert torch.equal(kernels.backward(x[rows], x[rows], w, own)[0], dx[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opcheck(dtype):
    x, w = torch.randn(2, 3, 8, dtype=dtype, requires_grad=True), torch.randn(8, dtype=dtype, requires_grad=True)
    torch.library.opcheck(ops.rms_norm.default, (x, [8], w, EPS))
    scale = ops.rms_norm(x, [8], w, EPS)[1].detach()
    torch.library.opcheck(ops.rms_norm_backward.default, (x.detach(), x.detach(), w.detach(), scale))


def test_other_operands_are_refused():
    x, w = torch.randn(2, 8), torch.randn(8)
    for args in ((x, [8], w[:4]), (x, [4], w), (x, [8], w.double()), (x.bfloat16(), [8], w.bfloat16())):
        with pytest.raises(MoecError, match="fp32 or fp64"):
            ops.rms_norm(*args, EPS)


class Norm(nn.Module):
    """``how``: what is done to a norm besides."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how, self.weight, self.out = how, nn.Parameter(torch.randn(8)), nn.Linear(8, 8)

    def forward(self, x):
        if self.how == "widened":
            wide = x.double()
            y = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).float()
        else:
            scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS)
            y = (x * scale) * self.weight
            if self.how == "read twice":
                y = y + scale
            elif self.how == "no weight":
                y = x * scale
        return self.out(y).square().mean()


@pytest.mark.parametrize(("how", "reason"), [("", None), ("read twice", "not only multiplied by its input"),
                                            ("no weight", "not only multiplied by a weight"),
                                            ("widened", "not only multiplied by a weight")])  # fmt: skip
def test_what_is_fused_and_why_not(how, reason):
    x = torch.randn(4, 3, 8)
    for fuse in (True, False):
        program = compile_program(Norm(how), Plan(dp=2, fuse=fuse), 2, (x[:2],), {}, training=True)
        fused = [n for n in program.graph.nodes if op_name(n) == "moec.rms_norm"]
        assert len(fused) == (fuse and reason is None)
        told = [line for line in program.why_not if "norm is not fused" in line]
        assert len(told) == (fuse and reason is not None) and all(reason in line for line in told)


@pytest.mark.parametrize("plan", [Plan(dp=2, tp=2), Plan(dp=1, tp=2, cp=2), Plan(dp=2, fsdp=True)], ids=str)
def test_exact_on_many_ranks(plan):
    report = moec.check(Norm(), plan, example_inputs=(torch.randn(4, 8, 8),), world_size=plan.dp * plan.tp * plan.cp)
    assert report.ok, report
