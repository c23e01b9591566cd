"""The models, plans and batches that parallel models are compared on, and the comparison itself (four processes).

Sizes are small and uneven: 8 experts, 3 a token, widths that are no powers of two, a number of tokens that tp does not
divide, ignored labels spread unevenly (the first dp rank of four has no valid one at all).
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import moec
from moec import compiler

spec = importlib.util.spec_from_file_location("example_models", Path(__file__).parent.parent / "examples" / "models.py")
assert spec is not None and spec.loader is not None
models = sys.modules.setdefault("example_models", importlib.util.module_from_spec(spec))
spec.loader.exec_module(models)

VOCAB, EXPERTS = 40, 8
SIZES = models.Sizes(vocab=VOCAB, hidden=24, ffn=20, layers=1, heads=4, kv_heads=4, experts=EXPERTS, top_k=3)
KINDS = ("plain", "mixtral", "qwen3_moe")
PLANS = [(4, 1, 1, 1), (1, 4, 1, 1), (1, 4, 1, 4), (2, 2, 1, 2), (4, 1, 4, 1), (2, 2, 4, 1), (2, 2, 2, 2), (1, 4, 4, 1)]

VANISHING = 1e-4
"""A gradient smaller than this share of the largest one is compared on that scale."""


def build(kind: str, sizes=SIZES) -> nn.Module:
    torch.manual_seed(0)
    return models.BUILDERS[kind](sizes).double()


def reference(model: nn.Module) -> nn.Module:
    """A single-device twin.  Hugging Face's grouped_mm does not take float64; its loop over the experts does."""
    twin = copy.deepcopy(model)
    if hasattr(twin, "config"):
        twin.config._experts_implementation = "eager"
    return twin


def batch(B: int = 8, S: int = 9, seed: int = 1) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, VOCAB, (B, S), generator=g) for _ in range(2))
    labels[: B // 4] = -100  # rank 0 of four has nothing to learn from
    labels[B // 4, : S // 2] = -100
    labels[-1, -2:] = -100
    return {"input_ids": ids, "labels": labels}


def relative(got: Tensor | None, want: Tensor | None, floor: float = 0.0) -> float:
    got, want = (torch.zeros((), dtype=torch.float64) if t is None else t.detach() for t in (got, want))
    if isinstance(got, DTensor):  # logits whose vocabulary is sharded
        got = got.full_tensor()
    return float((got - want).norm() / max(float(want.norm()), floor, 1e-300))


def worst_grad(got: dict[str, Tensor | None], ref: nn.Module) -> tuple[float, str]:
    want = {n: p.grad for n, p in ref.named_parameters(remove_duplicate=False)}
    assert got.keys() == want.keys()
    floor = VANISHING * max(float(g.norm()) for g in want.values() if g is not None)
    return max((relative(got[n], want[n], floor), n) for n in want)


def worst_value(model: moec.ParallelModule, ref: nn.Module) -> tuple[float, str]:
    got, want = moec.full_state_dict(model), ref.state_dict()
    assert list(got) == list(want)
    return max((relative(got[n], want[n]), n) for n in want if want[n].is_floating_point())


def routing_counts(ref: nn.Module, data: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tokens per expert of each block of a single-device model, seen by hooks on its routers."""
    seen: dict[str, Tensor] = {}

    def watch(path: str):
        def hook(_, args, out):
            if isinstance(out, tuple):  # a Hugging Face router returns its choice last
                ids = out[-1]
            else:
                ids = out.softmax(-1).topk(SIZES.top_k).indices
            seen[path] = torch.bincount(ids.reshape(-1), minlength=EXPERTS)

        return hook

    hooks = [
        m.register_forward_hook(watch(n.rpartition(".")[0])) for n, m in ref.named_modules() if n.endswith(".gate")
    ]
    with torch.no_grad():
        ref(**data)
    for h in hooks:
        h.remove()
    return seen


@functools.cache
def _captured(kind: str, training: bool):
    data = batch()
    return compiler_capture(build(kind), (), data, training=training)


compiler_capture = compiler.capture


def parallelize(kind: str, model: nn.Module, plan: moec.Plan, data: dict[str, Tensor]) -> moec.ParallelModule:
    """``moec.parallelize``, with one capture of each kind of model in each process: it knows nothing of the plan, and
    is most of the time that compiling takes."""

    def capture(model, args, kwargs, *, training, inputs=None, loss_fn=None, reduced=False):
        assert not args and inputs is None and loss_fn is None
        return _captured(kind, training).fork()

    compiler.capture = capture
    try:
        return moec.parallelize(model, plan, example_kwargs=data)
    finally:
        compiler.capture = compiler_capture
