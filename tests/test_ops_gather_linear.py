"""Transfers beside their own products: the values and gradients of the transfer and the products one after the other,
on real processes, and torch's own definition of its fused operators as what they are on a GPU."""

import re
from collections import Counter
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric
import torch.nn.functional as F
from collective_cases import KEYS, MESH
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moec.runtime.groups import Groups
from moec.runtime.ops.convert import convert
from moec.runtime.torch_compat import cuda_kernels_on_cpu, symmetric_memory_lacks

ops = torch.ops.moec
SHAPES = [((4, 6), 0), ((4, 3, 6), 0), ((2, 4, 6), 1), ((1, 4, 6), 1), ((2, 3, 4, 6), 2)]
"""Shape of what is gathered, or of the operand of the product that is scattered, and the dim."""
WIDTHS = [(5,), (5, 3, 5)]


def drawn(rank: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(rank)
    return [torch.randn(s, generator=gen, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def graded(out: list[torch.Tensor], leaves: list[torch.Tensor], rank: int, skip: int = -1) -> list[torch.Tensor]:
    """The outputs and the gradients of leaves for drawn gradients of outputs, but for number ``skip``."""
    gen = torch.Generator().manual_seed(50 + rank)
    total = sum((y * torch.randn(y.shape, generator=gen).to(y.dtype)).sum() for i, y in enumerate(out) if i != skip)
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [t.detach() for t in (*out, *(torch.zeros(()) if g is None else g for g in grads))]


def one_by_one(x, ws, dim, size, group, scatter):
    if scatter:
        return [convert("p_to_s", F.linear(x, ws[0]), dim, 0, size, group)]
    whole = convert("s_to_r", x, dim, 0, size, group)
    return [whole, *(F.linear(whole, w) for w in ws)]


def at_once(x, ws, dim, size, group, scatter):
    return [ops.linear_scatter(x, ws[0], dim, size, group)] if scatter else ops.gather_linear(x, ws, dim, size, group)


@contextmanager
def as_on_a_gpu():
    """CPU tensors get the kernels for CUDA tensors, and torch's operators what torch itself says that they compute."""
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symmetric._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", symmetric._fused_matmul_reduce_scatter_fallback, "CPU")
    try:
        with cuda_kernels_on_cpu(["moec::gather_linear", "moec::linear_scatter"]):
            yield
    finally:
        library._destroy()


def _compared(rank: int, world: int, key: str, on_a_gpu: bool, dtype: torch.dtype) -> list[float]:
    """Errors of everything, the transfers and products one by one being the truth."""
    size, group = MESH.size(key), Groups(MESH, KEYS).name(key)
    found = []
    for shape, dim in SHAPES:
        for scatter, widths in ((False, WIDTHS[0]), (False, WIDTHS[1]), (True, WIDTHS[0])):
            leaves = drawn(rank, shape, *((n, shape[-1]) for n in widths), dtype=dtype)
            for skip in (0, 1, -1):  # ``whole`` without a gradient, a product without one, all
                if scatter and skip >= 0:
                    continue
                exact = graded(one_by_one(*pair(leaves), dim, size, group, scatter), leaves, rank, skip)
                with as_on_a_gpu() if on_a_gpu else nullcontext():
                    out = at_once(*pair(leaves), dim, size, group, scatter)
                    got = graded(out, leaves, rank, skip)
                for y, as_faked in zip(out, faked(leaves, dim, size, group, scatter), strict=True):
                    assert y.shape == as_faked.shape and strides(y) == strides(as_faked), (shape, dim, scatter)
                assert [t.shape for t in got] == [t.shape for t in exact]
                pairs = [(a, b) for a, b in zip(got, exact, strict=True) if b.any()]
                found += [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]
    return found


def pair(leaves):
    return leaves[0], leaves[1:]


def strides(x: torch.Tensor) -> list[int]:
    """Of the dims that have more than one index."""
    return [stride for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1]


def faked(leaves, dim, size, group, scatter):
    with FakeTensorMode() as mode:
        return at_once(*pair([mode.from_tensor(t) for t in leaves]), dim, size, group, scatter)


@pytest.mark.parametrize("on_a_gpu", [False, True], ids=["cpu", "as torch defines its own"])
@pytest.mark.parametrize("key", KEYS[1:])
def test_values_and_gradients_are_those_of_one_by_one(gloo4, key, on_a_gpu):
    for errors in gloo4.run(_compared, key, on_a_gpu, torch.float64):
        assert max(errors) < 1e-13


@pytest.mark.parametrize("on_a_gpu", [False, True], ids=["cpu", "as torch defines its own"])
def test_bf16_is_rounded_as_often(gloo4, on_a_gpu):
    """A gradient that is a sum over products is rounded less often than one by one."""
    for errors in gloo4.run(_compared, KEYS[1], on_a_gpu, torch.bfloat16):
        assert max(errors) < 0.03


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func._schema.name.partition("::")[2]] += 1
        return func(*args, **kwargs or {})


def _backward_calls(rank: int, world: int) -> list[tuple[str, list[str], dict[str, int]]]:
    """(op, what has a gradient, calls of its backward)"""
    group = Groups(MESH, KEYS).name(KEYS[1])
    found = []
    for scatter, names in ((False, "x w v"), (True, "x w")):
        tensors = dict(zip(names.split(), drawn(rank, (2, 4, 6), (5, 6), (3, 6)), strict=False))
        for needed in (["x"], ["w"], list(tensors)):
            x, *ws = (t if n in needed else t.detach() for n, t in tensors.items())
            out = at_once(x, ws, 1, 2, group, scatter)
            read = out if scatter else out[1:]
            with Calls() as calls:
                read = [y for y in read if y.requires_grad]
                ones = [torch.ones_like(y) for y in read]
                torch.autograd.grad(read, [tensors[n] for n in needed], ones, allow_unused=True)
            kinds = ("gather_linear", "linear_scatter", "s_to_r", "p_to_s", "mm")
            found.append((scatter, needed, {k: calls.names[k] for k in kinds if calls.names[k]}))
    return found


def test_the_backward_does_no_more_than_it_must(gloo4):
    """One transfer and one product for the gradient of x, whatever the number of weights; a product for each weight."""
    for found in gloo4.run(_backward_calls):
        assert found == [
            (False, ["x"], {"linear_scatter": 1}),
            (False, ["w"], {"mm": 1}),
            (False, ["x", "w", "v"], {"linear_scatter": 1, "mm": 2}),
            (True, ["x"], {"gather_linear": 1}),
            (True, ["w"], {"s_to_r": 1, "mm": 1}),
            (True, ["x", "w"], {"gather_linear": 1, "mm": 1}),
        ]


def _opchecked(rank: int, world: int) -> None:
    group = Groups(MESH, KEYS).name(KEYS[1])
    if rank > 1:
        return  # two processes do
    for dtype in (torch.float32, torch.bfloat16):
        x, *ws = drawn(rank, (2, 4, 6), (5, 6), (3, 6), dtype=dtype)
        tests = {} if dtype == torch.float32 else {"test_utils": ("test_schema", "test_faketensor")}
        torch.library.opcheck(ops.gather_linear.default, (x, ws, 1, 2, group), **tests)
        torch.library.opcheck(ops.linear_scatter.default, (x, ws[0], 1, 2, group), **tests)


@pytest.mark.nightly
@pytest.mark.timeout(180)
def test_opcheck_on_real_processes(gloo4):
    gloo4.run(_opchecked, timeout=150)


def _refused(rank: int, world: int, case: str) -> None:
    group = Groups(MESH, KEYS).name(KEYS[1])
    x, w = drawn(0, (2, 4, 6), (5, 6))
    with as_on_a_gpu():  # what torch's operators would refuse later, or not at all
        match case:
            case "size":
                ops.gather_linear(x, [w], 1, 4, group)
            case "dim":
                ops.gather_linear(x, [w], 2, 2, group)
            case "weight":
                ops.gather_linear(x, [w, w.t()], 1, 2, group)
            case "dtype":
                ops.linear_scatter(x, w.float(), 1, 2, group)
            case "part":
                ops.linear_scatter(x[:, :3], w, 1, 2, group)


@pytest.mark.parametrize(
    ("case", "text"),
    {
        "size": "size is 4 but group .* has 2 ranks",
        "dim": r"dim 2 of shape \(2, 4, 6\) is multiplied",
        "weight": r"no product of torch.float64\[2, 4, 6\] and torch.float64\[6, 5\]: a weight is \[N, K\]",
        "dtype": "no product of torch.float64",
        "part": "has size 3, which 2 ranks do not divide",
    }.items(),
)
def test_wrong_calls_are_refused_on_all_ranks(gloo4, case, text):
    for e in gloo4.run_raising(_refused, case):
        assert re.search(text, str(e)), str(e)


def test_this_torch_has_the_operators():
    assert symmetric_memory_lacks() is None
