"""The experts of a block on one CPU thread: moec's fused op, Hugging Face's ``grouped_mm`` experts, the GEMM floor.

    python benchmarks/experts_cpu.py [--json] [--rounds N]

Each case runs, fp32, gather → first product → SwiGLU → second product → weighted sum, forward and backward, with
gradients of tokens, routing weights and both parameters.  Routing is drawn: K distinct experts of a token, all alike
likely, so that groups are uneven.

* ours: ``moec::experts``, which is what ``fuse_experts`` makes of the block, on the parameters of the other;
* HF: ``transformers``' experts module of Mixtral with ``experts_implementation="grouped_mm"``;
* floor: three times (forward, gradient of the rows, gradient of the weights) the better of two ways to compute the two
  forward products alone on rows that lie sorted already: a loop of ``torch.mm`` over the experts, each with its rows,
  into memory that is there, and one ``torch.bmm`` over experts padded to the largest.

Contenders take turns; times are medians over the rounds.  ``vs_hf`` = HF / ours (above 1: ours is faster), ``vs_floor``
= ours / floor (1: nothing but products), ``saved_vs_hf``: bytes that autograd keeps between forward and backward,
parameters apart, ours / HF; ``load`` is the machine's load average when all was done (1: nothing else ran).  That both
compute the same is checked before anything is timed.  The last line with ``--json`` is one object: ``{"cases":
[{"shape", "vs_hf", "vs_floor", "saved_vs_hf", …}], …}``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import moec.runtime  # noqa: F401  registers the ops

SHAPES = ((2048, 256, 256, 16, 4), (2048, 256, 128, 64, 8), (256, 256, 128, 64, 8))
"""T, H, I, E, K."""
SWIGLU = "g = chunk(h0, 2, 0); u = chunk(h0, 2, 1); t0 = silu(g); t1 = mul(t0, u); return t1"


class Case:
    def __init__(self, T: int, H: int, I: int, E: int, K: int) -> None:  # noqa: E741
        torch.manual_seed(0)
        config = MixtralConfig(hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=K)
        config._experts_implementation = "grouped_mm"
        self.module = MixtralExperts(config)
        for p in self.module.parameters():
            torch.nn.init.normal_(p, std=0.05)
        self.x_TH, self.grad_TH = torch.randn(T, H, requires_grad=True), torch.randn(T, H)
        self.ids_TK = torch.rand(T, E).topk(K).indices
        self.weights_TK = torch.rand(T, K).softmax(1).requires_grad_()
        self.counts = torch.bincount(self.ids_TK.flatten(), minlength=E).tolist()

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x_TH, self.weights_TK, self.module.gate_up_proj, self.module.down_proj]

    def hf(self) -> Tensor:
        return self.module(self.x_TH, self.ids_TK, self.weights_TK)

    def ours(self) -> Tensor:
        w_in, w_out = (p.transpose(1, 2) for p in (self.module.gate_up_proj, self.module.down_proj))
        return torch.ops.moec.experts(
            self.x_TH, self.ids_TK, self.weights_TK, [w_in], [], w_out, None, SWIGLU, False
        )[0]

    def step(self, forward: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            for leaf in self.leaves:
                leaf.grad = None
            forward().backward(self.grad_TH)

        return run

    def floors(self) -> dict[str, Callable[[], None]]:
        """The two forward products alone, in two ways."""
        H, I = self.x_TH.shape[1], self.module.down_proj.shape[2]  # noqa: E741
        w_in, w_out = (p.detach().transpose(1, 2) for p in (self.module.gate_up_proj, self.module.down_proj))
        N, E, most = sum(self.counts), len(self.counts), max(self.counts)
        x, h, a, y = (torch.randn(N, n) for n in (H, 2 * I, I, H))
        parts = [
            list(zip(*[t.split(self.counts) for t in tensors], w.unbind(0), strict=True))
            for tensors, w in (((x, h), w_in), ((a, y), w_out))
        ]
        padded = [torch.randn(E, most, n) for n in (H, 2 * I, I, H)]

        def loop() -> None:
            for part in parts:
                for rows, out, w in part:
                    torch.mm(rows, w, out=out)

        def bmm() -> None:
            torch.bmm(padded[0], w_in, out=padded[1])
            torch.bmm(padded[2], w_out, out=padded[3])

        return {"loop": loop, "bmm": bmm}

    def check(self) -> None:
        results = []
        for forward in (self.hf, self.ours):
            self.step(forward)()
            results.append([forward().detach(), *[leaf.grad for leaf in self.leaves]])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)

    def saved(self, forward: Callable[[], Tensor]) -> int:
        """Bytes of the storages that autograd keeps, parameters apart."""
        kept = {}
        own = {p.untyped_storage().data_ptr() for p in self.module.parameters()}

        def pack(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = forward()
        del y
        return sum(kept.values())


def measure(shape: tuple[int, ...], rounds: int) -> dict:
    case = Case(*shape)
    case.check()
    contenders = {"hf": case.step(case.hf), "ours": case.step(case.ours), **case.floors()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(rounds + 2):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            if i >= 2:  # warm
                times[name].append(time.perf_counter() - start)
    ms = {name: 1e3 * statistics.median(t) for name, t in times.items()}
    floor = 3 * min(ms["loop"], ms["bmm"])
    saved = {name: case.saved(forward) for name, forward in (("hf", case.hf), ("ours", case.ours))}
    return {
        "shape": dict(zip("THIEK", shape, strict=True)),
        "vs_hf": round(ms["hf"] / ms["ours"], 3),
        "vs_floor": round(ms["ours"] / floor, 3),
        "saved_vs_hf": round(saved["ours"] / saved["hf"], 3),
        "ms": {"hf": round(ms["hf"], 2), "ours": round(ms["ours"], 2), "floor": round(floor, 2)},
        "saved_bytes": saved,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--rounds", type=int, default=25)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = []
    print(f"torch {torch.__version__}, one thread, float32; ms forward and backward, medians of {args.rounds}\n")
    print(f"{'T, H, I, E, K':<24} {'HF':>8} {'ours':>8} {'floor':>8} {'vs_hf':>8} {'vs_floor':>9} {'saved_vs_hf':>12}")
    for shape in SHAPES:
        case = measure(shape, args.rounds)
        cases.append(case)
        ms = case["ms"]
        print(
            f"{', '.join(map(str, shape)):<24} {ms['hf']:>8.1f} {ms['ours']:>8.1f} {ms['floor']:>8.1f} "
            f"{case['vs_hf']:>8.2f} {case['vs_floor']:>9.2f} {case['saved_vs_hf']:>12.3f}"
        )
    if args.json:
        load = os.getloadavg()[0]
        print(json.dumps({"cases": cases, "torch": torch.__version__, "threads": 1, "dtype": "float32", "load": load}))


if __name__ == "__main__":
    main()
