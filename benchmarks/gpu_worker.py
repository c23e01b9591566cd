"""The process that does what benchmarks/gpu.py asks for: one item after another, a line of JSON before and after each.

    python benchmarks/gpu_worker.py [--dry]             items as JSON on stdin
    python benchmarks/gpu_worker.py [--dry] --about     the machine, and all items
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent

# name: (E, H, I, K, T)
SHAPES = {
    "qwen3_moe 32768": (128, 2048, 768, 8, 32768),
    "mixtral 8192": (8, 4096, 14336, 2, 8192),
    "deepseek_v3 8192": (256, 7168, 2048, 8, 8192),
    "qwen3_moe 4096": (128, 2048, 768, 8, 4096),
}
TINY = {"tiny": (5, 32, 16, 2, 24)}
FP8 = ("rowwise", "blockwise", "blockwise fused", "mxfp8", "mxfp8 fused")
"""A recipe; ``fused``: operands are quantised where they are made (``fuse_quantise``)."""


def import_runtime() -> None:
    """``moec.runtime`` from the checkout, without the rest of moec (which wants packages that need not be here)."""
    package = ModuleType("moec")
    package.__path__ = []
    sys.modules["moec"] = package
    folder = ROOT / "runtime"
    spec = importlib.util.spec_from_file_location(
        "moec.runtime", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["moec.runtime"] = module
    spec.loader.exec_module(module)


class Worker:
    def __init__(self, dry: bool) -> None:
        global torch, gpu_cases
        if dry:
            os.environ["TRITON_INTERPRET"] = "1"
        import torch

        import_runtime()
        import gpu_cases

        self.dry = dry
        self.device = "cpu" if dry else "cuda"
        self.shapes = TINY if dry else SHAPES
        self.dtype = torch.float32 if dry else torch.bfloat16  # the stock interpreter knows no bf16
        self.flush: Any = None

    def items(self) -> list[str]:
        """In order of how much one wants to know them."""
        cases = gpu_cases.cases(self.dry)
        if self.dry:  # the stock interpreter computes neither bf16 nor fp8 right
            cases = [replace(c, dtypes=("float32",)) for c in cases if c.limit is None]
        checks = [f"check/{c.name}/{d}" for c in cases for d in c.dtypes]
        times = []
        for name in self.shapes:
            times += [f"experts/{name}/{who}" for who in ("moec", "hf", *FP8)]
        times += [f"{what}/{name}" for name in self.shapes for what in ("router", "permute", "unpermute")]
        times += [f"experts/{name}/inductor" for name in self.shapes]
        return ["ceilings", *checks, *times]

    def run(self, item: str) -> dict[str, Any]:
        kind, _, rest = item.partition("/")
        if kind == "ceilings":
            return self.ceilings()
        if kind == "check":
            name, _, dtype = rest.rpartition("/")
            return self.check(name, dtype)
        if kind == "experts":
            name, _, who = rest.rpartition("/")
            return self.experts(self.shapes[name], who)
        return getattr(self, kind)(self.shapes[rest])

    # -- 1

    def ceilings(self) -> dict[str, Any]:
        n, m = (1 << 12, 64) if self.dry else (1 << 29, 8192)
        x = torch.empty(n, dtype=torch.bfloat16, device=self.device)
        y = torch.empty_like(x)
        a = torch.randn(m, m, device=self.device).to(torch.bfloat16)
        copy, gemm = self.median(lambda: y.copy_(x)), self.median(lambda: a @ a)
        return {"copy_gb_s": 4 * n / copy / 1e6, "gemm_tflop_s": 2 * m**3 / gemm / 1e9}

    # -- 2

    def check(self, name: str, dtype: str) -> dict[str, Any]:
        case = next(c for c in gpu_cases.cases(self.dry) if c.name == name)
        drawn = getattr(torch, dtype)
        exact = gpu_cases.outputs(case, "cpu", torch.float64 if case.limit is None else drawn, drawn)
        with self.kernels(case.covers):
            got = gpu_cases.outputs(case, self.device, drawn, drawn)
            again = gpu_cases.outputs(case, self.device, drawn, drawn)
        error = gpu_cases.error(got, exact)
        pairs = zip(got, again, strict=True)
        repeats = all(torch.equal(gpu_cases.bits(a), gpu_cases.bits(b)) for a, b in pairs)
        limit = gpu_cases.LIMIT[dtype] if case.limit is None else case.limit
        return {"error": error, "limit": limit, "repeats": repeats, "ok": error <= limit and repeats}

    def kernels(self, names: Sequence[str]) -> Any:
        """Within, ops run what a GPU would run, also in a dry run."""
        from moec.runtime.torch_compat import cuda_kernels_on_cpu

        ops = [f"moec::{op}" for name in names for op in (name, f"{name}_backward")]
        return cuda_kernels_on_cpu(ops if self.dry else [])

    # -- 3

    def median(self, fn: Callable[[], Any], seconds: float = 0.6) -> float:
        """Milliseconds; the L2 cache is cold at each start."""
        fn()
        if self.dry:
            start = time.perf_counter()
            fn()
            return (time.perf_counter() - start) * 1e3
        if self.flush is None:
            self.flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        times, until = [], time.monotonic() + seconds
        while (time.monotonic() < until and len(times) < 200) or len(times) < 5:
            self.flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            fn()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return sorted(times)[len(times) // 2]

    def draw(self, *shape: int, scale: float = 1.0) -> Any:
        return torch.randn(shape, device=self.device, dtype=self.dtype) * scale

    def routing(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        E, _, _, K, T = shape
        logits = torch.randn(T, E, device=self.device)
        weights, ids = logits.softmax(1).topk(K)
        return (weights / weights.sum(1, keepdim=True)), ids

    def experts(self, shape: tuple[int, ...], who: str) -> dict[str, Any]:
        E, H, I, K, T = shape  # noqa: E741
        weights, ids = self.routing(shape)
        dtype = self.dtype if who in ("moec", *FP8) else torch.bfloat16  # all that Inductor takes
        x = self.draw(T, H).to(dtype)
        gate_up = self.draw(E, 2 * I, H, scale=H**-0.5).to(dtype)
        down = self.draw(E, H, I, scale=I**-0.5).to(dtype)
        leaves = [t.requires_grad_() for t in (x, weights, gate_up, down)]
        grad = self.draw(T, H).to(dtype)

        def moec() -> Any:
            w_in, w_out = [gate_up.transpose(1, 2)], down.transpose(1, 2)
            return torch.ops.moec.experts(x, ids, weights, w_in, [], w_out, None, gpu_cases.SWIGLU, False)[0]

        def hf() -> Any:
            return hf_experts(x, ids, weights, gate_up, down)

        def fp8() -> Any:
            recipe, _, fused = who.partition(" ")
            return (fused_fp8_experts if fused else fp8_experts)(x, ids, weights, gate_up, down, recipe)

        compiled = torch.compile(hf, dynamic=False, backend="aot_eager" if self.dry else "inductor")
        fn = {"moec": moec, "hf": hf, "inductor": compiled}.get(who, fp8)
        with self.kernels(["experts"]):
            with torch.no_grad():
                forward = self.median(fn)
            both = self.median(lambda: torch.autograd.grad(fn(), leaves, grad))
        flops = 6 * T * K * H * I  # three products of [T·K, H] and [H, I]
        result = {"ms": {"forward": forward, "forward_backward": both}}
        return result | {"tflop_s": {"forward": flops / forward / 1e9, "forward_backward": 3 * flops / both / 1e9}}

    def router(self, shape: tuple[int, ...]) -> dict[str, Any]:
        E, _, _, K, T = shape
        logits = torch.randn(T, E, device=self.device)
        spec = json.dumps({"num_experts": E, "top_k": K, "normalize": True})

        def eager() -> Any:
            weights, ids = logits.softmax(1).topk(K)
            return weights / weights.sum(1, keepdim=True), ids, torch.histc(ids.float(), E, 0, E - 1)

        ms = {"moec": self.median(lambda: torch.ops.moec.route_counted(logits, None, None, None, None, spec, False))}
        ms["moec, nothing counted"] = self.median(lambda: torch.ops.moec.route(logits, None, None, None, spec))
        ms["eager"] = self.median(eager)
        return self.per_second({"ms": ms}, 4 * T * E + 12 * T * K)

    def permute(self, shape: tuple[int, ...]) -> dict[str, Any]:
        E, H, _, K, T = shape
        (_, ids), x = self.routing(shape), self.draw(T, H)

        def eager() -> Any:
            return x[ids.flatten().argsort(stable=True) // K]

        ms = {"moec": self.median(lambda: torch.ops.moec.permute(x, ids, E)), "eager": self.median(eager)}
        return self.per_second({"ms": ms}, x.element_size() * (T + T * K) * H + 16 * T * K)

    def unpermute(self, shape: tuple[int, ...]) -> dict[str, Any]:
        E, H, _, K, T = shape
        (weights, ids), rows = self.routing(shape), self.draw(T * K, H)
        _, _, row_of = torch.ops.moec.permute(rows[:T], ids, E)

        def eager() -> Any:
            return (rows[row_of].view(T, K, H) * weights[..., None].to(rows.dtype)).sum(1)

        ms = {"moec": self.median(lambda: torch.ops.moec.unpermute(rows, weights, row_of)), "eager": self.median(eager)}
        return self.per_second({"ms": ms}, rows.element_size() * (T + T * K) * H + 12 * T * K)

    @staticmethod
    def per_second(result: dict[str, Any], least: int) -> dict[str, Any]:
        """``least``: bytes that have to move at least."""
        return result | {"bytes": least, "gb_s": {who: least / ms / 1e6 for who, ms in result["ms"].items()}}

    def serve(self, items: list[str]) -> None:
        for item in items:
            print(json.dumps({"started": item}), flush=True)
            try:
                result = self.run(item)
            except Exception as e:
                result = {"failed": f"{type(e).__name__}: {' '.join(str(e).split())[:400]}"}
                print(json.dumps({"item": item} | result), flush=True)
                if "CUDA error" in str(e) or "device-side assert" in str(e):
                    os._exit(1)  # nothing works in this process any more
                continue
            finally:
                if not self.dry:
                    torch.cuda.empty_cache()
            print(json.dumps({"item": item} | result), flush=True)


def fp8_experts(x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, recipe: str) -> Any:
    """The experts as ``cast_fp8`` writes them, beside ``moec`` in bf16."""
    ops, alignment = torch.ops.moec, {"blockwise": 128, "mxfp8": 32}.get(recipe, 16)
    rows, _, counts, row_of = ops.permute_aligned(x, ids, gate_up.shape[0], alignment, "none")

    def product(rows: Any, weight: Any) -> Any:
        a = ops.quantise(rows, None, None, counts, recipe, "rows", True)
        b = ops.quantise(weight.transpose(1, 2), None, None, None, recipe, "stack", True)
        return ops.fp8_grouped_mm(a[0], b[0], counts, *a[1:3], *b[1:3], *a[3:], *b[3:], None, recipe, False)[0]

    gate, up = product(rows, gate_up).chunk(2, 1)
    return ops.unpermute(product(torch.nn.functional.silu(gate) * up, down), weights, row_of)


def fused_fp8_experts(x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, recipe: str) -> Any:
    """The same as ``fuse_quantise`` leaves them."""
    ops, E = torch.ops.moec, gate_up.shape[0]
    *a, counts, row_of = ops.permute_quantised(x, ids, E, None, None, recipe, True)
    first, second = (ops.quantise(w.transpose(1, 2), None, None, None, recipe, "stack", True) for w in (gate_up, down))
    q = [[t] for t in first]
    *a, _ = ops.fp8_grouped_act(
        a[0], q[0], [], counts, *a[1:3], *q[1:3], *a[3:], *q[3:], gpu_cases.SWIGLU, recipe, True
    )
    y = ops.fp8_grouped_mm(
        a[0], second[0], counts, *a[1:3], *second[1:3], *a[3:], *second[3:], None, recipe, False
    )[0]
    return ops.unpermute(y, weights, row_of)


def hf_experts(x: Any, ids: Any, weights: Any, gate_up: Any, down: Any) -> Any:
    """The experts as Hugging Face composes them for ``experts_implementation="grouped_mm"``: sort, gather, grouped
    product, activation, grouped product, weigh, back to the tokens' order, sum."""
    from moec.runtime.torch_compat import GROUPED_MM

    T, K = ids.shape
    expert = ids.reshape(-1)
    order = expert.argsort()
    counts = torch.histc(expert.float(), gate_up.shape[0], 0, gate_up.shape[0] - 1)
    offsets = counts.cumsum(0, dtype=torch.int32)
    gate, up = GROUPED_MM(x[order // K], gate_up.transpose(1, 2), offs=offsets).chunk(2, -1)
    rows = GROUPED_MM(torch.nn.functional.silu(gate) * up, down.transpose(1, 2), offs=offsets)
    rows = rows * weights.reshape(-1)[order][:, None].to(rows.dtype)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return rows[back].view(T, K, -1).sum(1)


def about(one: Worker) -> dict[str, Any]:
    import triton

    head: dict[str, Any] = {"card": "dry", "torch": torch.__version__, "triton": triton.__version__}
    if not one.dry:
        card = torch.cuda.get_device_properties(0)
        head |= {"card": card.name, "memory_gb": card.total_memory / 1e9, "multiprocessors": card.multi_processor_count}
        head |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return head | {"commit": commit.stdout.strip() or None, "items": one.items()}


if __name__ == "__main__":
    one = Worker("--dry" in sys.argv)
    if "--about" in sys.argv:
        print(json.dumps(about(one)))
    else:
        one.serve(json.load(sys.stdin))
