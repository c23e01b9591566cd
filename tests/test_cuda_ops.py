"""What ops run on a GPU, without one: on tensors of the meta device, which have shapes and no values.

Every step of a kernel's Python must stay on the device: a tensor made on the CPU by oversight would meet one of the
GPU.  (Fake CUDA tensors cannot be indexed on a build without CUDA.)  Triton kernels are not launched: the interpreter
runs them elsewhere.  Where an op asks for a value, a GPU has to be waited for: ``WAITS`` says which ops do, and why.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from moec.runtime.kernels import scaled_grouped_mm, scaled_mm, scaled_rows
from moec.runtime.torch_compat import custom_ops, kernel

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import gpu_cases

WAITS = {
    "sort_chunks": "rows have to be cut where the counts say, on the host",
    "permute_kept": "the number of its rows depends on the ids",
    "place_rows": "pairs that have a row are counted",
}
CASES = {case.name: case for case in gpu_cases.cases(tiny=True)}


class Calls(TorchDispatchMode):
    """What ``moec::`` ops were called with, backwards included."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.startswith("moec::"):
            self.found.append((func._schema.name, args))
        return func(*args, **kwargs or {})


class OneDevice(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor)]
        there = {t.device.type for t in tensors if t.ndim or t.device.type == "meta"}  # numbers may come from the CPU
        assert len(there) <= 1, f"{func} of tensors on different devices"
        return func(*args, **kwargs or {})


def on_device(name, args):
    """Run what a GPU would run; whether it asked for a value."""
    function = kernel(name, "cuda")
    assert function is not None, f"{name} has no kernel for CUDA tensors"
    args = tree_map_only(
        torch.Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), args
    )
    try:
        with OneDevice(), torch.no_grad():
            out = function(*args)
    except (RuntimeError, NotImplementedError) as e:
        if "meta" not in str(e).lower():
            raise
        return True
    assert all(t.device.type == "meta" for t in tree_leaves(out) if isinstance(t, torch.Tensor)), name
    return False


@pytest.fixture
def no_launches(monkeypatch):
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setattr(interpreter.InterpretedFunction, "run", lambda *_, **__: None)


@pytest.mark.parametrize("name", CASES)
def test_it_stays_on_the_device(no_launches, name):
    with Calls() as calls:
        gpu_cases.outputs(CASES[name], "cpu", torch.float32, torch.float32)
    assert calls.found
    waited = {op.removeprefix("moec::") for op, args in calls.found if on_device(op, args)}
    assert waited <= set(WAITS), "an op waits for the GPU"


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("fp8_")])
def test_generated_fp8_products_stay_on_the_device(no_launches, monkeypatch, name):
    """As a B200 has them: it has a generated one for every recipe."""
    for module in (scaled_mm, scaled_grouped_mm):
        monkeypatch.setattr(module, "capability", lambda x: (10, 0))
    ran = []
    monkeypatch.setattr(scaled_rows, "launch", lambda spec, *tensors: ran.append(spec))
    with Calls() as calls:
        gpu_cases.outputs(CASES[name], "cpu", torch.float32, torch.float32)
    assert not any(on_device(op, args) for op, args in calls.found)
    assert ran or name == "fp8_linear, current", "which torch multiplies"


def test_every_op_has_a_kernel_for_cuda():
    assert not [name for name in custom_ops() if name.startswith("moec::") and kernel(name, "cuda") is None]


def test_a_tensor_left_on_the_cpu_is_seen(monkeypatch):
    def wrong(x, *_):
        return x + torch.arange(x.shape[1])

    monkeypatch.setattr(sys.modules[__name__], "kernel", lambda *_: wrong)
    with pytest.raises(Exception, match="different devices"):
        on_device("moec::swap_chunks", (torch.zeros(4, 4), 2, 2))
