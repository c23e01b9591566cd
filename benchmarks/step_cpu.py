"""A training step of a small Mixtral on one CPU thread: compiled by moec for a single device, and the untouched module.

    python benchmarks/step_cpu.py [--json] [--rounds N]

Two layers, H 256, I 256, 16 experts, 4 a token, 4 sequences of 512 tokens, fp32, with the loss; forward and backward,
no optimizer.  ``moec.parallelize(model, moec.Plan())`` against the module itself with Hugging Face's ``grouped_mm``
experts (its fastest on a CPU).  Both start from the same parameters; that losses and gradients agree is checked in the
same run, before and after what is timed.  The two take turns; times are medians.  ``vs_module`` = module / ours: above
1, ours is faster.  ``load``: the machine's load average when all was done (1: nothing else ran).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import moec

CONFIG = {
    "hidden_size": 256, "intermediate_size": 256, "num_local_experts": 16, "num_experts_per_tok": 4,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024,
    "max_position_embeddings": 512, "router_jitter_noise": 0.0,
}  # fmt: skip
BATCH, LENGTH = 4, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**CONFIG)).train()
    model.config._experts_implementation = "grouped_mm"
    ours = moec.parallelize(model, moec.Plan())
    ids, labels = (torch.randint(0, CONFIG["vocab_size"], (BATCH, LENGTH)) for _ in range(2))

    def step(module: torch.nn.Module) -> float:
        module.zero_grad(set_to_none=True)
        loss = module(input_ids=ids, labels=labels).loss
        loss.backward()
        return float(loss.detach())

    def check() -> float:
        losses = [step(m) for m in (model, ours)]
        theirs = {n: p.grad for n, p in model.named_parameters()}
        for name, grad in moec.full_grads(ours).items():
            torch.testing.assert_close(grad, theirs[name], rtol=1e-3, atol=1e-5)
        assert abs(losses[0] - losses[1]) < 1e-5 * abs(losses[0]), losses
        return losses[1]

    loss = check()
    times: dict[str, list[float]] = {"module": [], "moec": []}
    for _ in range(args.rounds):
        for name, module in (("module", model), ("moec", ours)):
            start = time.perf_counter()
            step(module)
            times[name].append(time.perf_counter() - start)
    assert check() == loss, "the same step, the same loss"
    ms = {name: round(1e3 * statistics.median(t), 1) for name, t in times.items()}
    result = {
        "model": CONFIG, "tokens": [BATCH, LENGTH], "vs_module": round(ms["module"] / ms["moec"], 3), "ms": ms,
        "loss": loss, "torch": torch.__version__, "threads": 1, "dtype": "float32", "load": os.getloadavg()[0],
    }  # fmt: skip
    print(f"torch {torch.__version__}, one thread, float32; ms of a step, medians of {args.rounds}")
    print(f"module {ms['module']:.1f}, moec {ms['moec']:.1f}: {result['vs_module']:.2f} times as fast; loss {loss:.5f}")
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
