"""The contenders of ``collectives.py`` and ``peers.py``: each lays one Hugging Face model out over the ranks and runs a
training step.

A contender is made by ``CONTENDERS[name](source, path)`` on every rank: ``source`` is the untouched model, ``path`` a
folder with the same model as Hugging Face saves it.  ``step(batch)`` takes the global batch, runs forward and backward
on this rank's share and returns the loss; ``grads()`` gives full gradients by original name (collective).

torch's own peers are what a careful user writes with ``parallelize_module`` and ``fully_shard``: attention, embedding
and head by torch's styles, the loss by ``loss_parallel``; for stacked experts torch has no style, so ``_ExpertsOverTp``
shards their width and sums once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import moec

Batch = dict[str, Tensor]


@dataclass
class Contender:
    model: nn.Module
    step: Callable[[Batch], Tensor]
    grads: Callable[[], dict[str, Tensor | None]]


def share(batch: Batch, dp: int, tp: int) -> Batch:
    """This rank's slice: ranks are (dp, tp), row-major."""
    return {k: v.chunk(dp)[dist.get_rank() // tp] for k, v in batch.items()}


def _backward(model: nn.Module, batch: Batch) -> Tensor:
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()


# -- torch


class _ExpertsOverTp(ParallelStyle):
    """Stacked experts, every expert's width sharded: gate_up ``[E, 2I, H]`` half by half, down ``[E, H, I]``."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rank, size = device_mesh.get_local_rank(), device_mesh.size()
        halves = [half.chunk(size, 1)[rank] for half in module.gate_up_proj.detach().chunk(2, 1)]
        module.gate_up_proj = nn.Parameter(torch.cat(halves, 1).clone())
        module.down_proj = nn.Parameter(module.down_proj.detach().chunk(size, 2)[rank].clone())

        def partial_gradient(module: nn.Module, args: tuple) -> tuple:
            return tuple(
                DTensor.from_local(a, device_mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
                if a.is_floating_point()
                else a
                for a in args
            )

        def summed(module: nn.Module, args: tuple, out: Tensor) -> Tensor:
            return DTensor.from_local(out, device_mesh, [Partial()], run_check=False).full_tensor()

        module.register_forward_pre_hook(partial_gradient)
        module.register_forward_hook(summed)
        return module


def torch_tp(source: nn.Module, path: str, tp: int) -> Contender:
    mesh = init_device_mesh("cpu", (tp,))
    model = copy.deepcopy(source)
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        "model.layers.*.self_attn.q_proj": ColwiseParallel(),
        "model.layers.*.self_attn.k_proj": ColwiseParallel(),
        "model.layers.*.self_attn.v_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.experts": _ExpertsOverTp(),
    }
    parallelize_module(model, mesh, plan)

    def step(batch: Batch) -> Tensor:
        out = model(input_ids=batch["input_ids"])
        with loss_parallel():
            logits, labels = out.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
            loss = F.cross_entropy(logits, labels)
            total = loss.full_tensor() if isinstance(loss, DTensor) else loss
            if out.aux_loss is not None:
                total = total + model.router_aux_loss_coef * out.aux_loss
            total.backward()
        return total.detach()

    def grads() -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = {}
        for name, p in model.named_parameters():
            g = p.grad
            if isinstance(g, DTensor):
                g = g.full_tensor()
            elif g is not None and ".experts." in name:
                parts = [torch.empty_like(g) for _ in range(tp)]
                dist.all_gather(parts, g.contiguous(), group=mesh.get_group())
                if name.endswith("gate_up_proj"):
                    g = torch.cat([x.chunk(2, 1)[half] for half in range(2) for x in parts], 1)
                else:
                    g = torch.cat(parts, 2)
            found[name] = g
        return found

    return Contender(model, step, grads)


def torch_fsdp(source: nn.Module, path: str, dp: int) -> Contender:
    mesh = init_device_mesh("cpu", (dp,))
    model = copy.deepcopy(source)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Contender(model, lambda batch: _backward(model, share(batch, dp, 1)), lambda: _full_grads(model))


def _full_grads(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters()}


# -- Hugging Face


def hugging_face(source: nn.Module, path: str, tp: int = 1, fsdp: int = 1, **config: Any) -> Contender:
    setup = DistributedConfig(tp_size=tp, fsdp_size=fsdp, **config)
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=setup, dtype=torch.float32)
    model.train()
    return Contender(model, lambda batch: _backward(model, share(batch, fsdp, tp)), lambda: _full_grads(model))


# -- DeepSpeed (where it is installed)


def auto_ep(source: nn.Module, path: str, ep: int) -> Contender:
    """Copies of the rest of the model, experts over ``ep`` ranks."""
    import deepspeed
    from transformers.utils import output_capturing

    class ByName(output_capturing._CanRecordRegistry):
        """deepspeed names classes and gives a default, as transformers' registry took it up to 5.12."""

        def get(self, key, default=None):
            return dict.get(self, key, default) if isinstance(key, str) else super().get(key)

        def __setitem__(self, key, value):
            dict.__setitem__(self, key, value) if isinstance(key, str) else super().__setitem__(key, value)

    output_capturing._CAN_RECORD_REGISTRY.__class__ = ByName
    model = copy.deepcopy(source)
    config = {
        "train_batch_size": dist.get_world_size(), "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
        "expert_parallel": {"enabled": True, "autoep_size": ep, "preset_model": source.config.model_type},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(batch: Batch) -> Tensor:
        loss = engine(**share(batch, dist.get_world_size(), 1)).loss
        engine.backward(loss)
        return loss.detach()

    return Contender(engine, step, dict)


# -- moec


def with_moec(source: nn.Module, path: str, **plan: Any) -> Contender:
    model = moec.parallelize(source, moec.Plan(outputs={"logits": "drop"}, **plan))
    return Contender(
        model, lambda batch: _backward(model, moec.shard_batch(batch, model)), lambda: moec.full_grads(model)
    )


CONTENDERS: dict[str, Callable[[nn.Module, str], Contender]] = {
    "torch parallelize_module, tp 4": partial(torch_tp, tp=4),
    "Hugging Face, tp 4": partial(hugging_face, tp=4),
    "moec, tp 4": partial(with_moec, tp=4),
    "torch fully_shard, fsdp 4": partial(torch_fsdp, dp=4),
    "Hugging Face, fsdp 4": partial(hugging_face, fsdp=4),
    "moec, fsdp 4": partial(with_moec, dp=4, fsdp=True, ep=1),
    "Hugging Face, fsdp 2, tp 2": partial(hugging_face, tp=2, fsdp=2),
    "moec, fsdp 2, tp 2": partial(with_moec, dp=2, tp=2, fsdp=True, etp=2),
    "Hugging Face, tp 4, ep 4, all-to-all": partial(hugging_face, tp=4, ep_size=4, ep_implementation="all_to_all"),
    "Hugging Face, tp 4, ep 4, all-reduce": partial(hugging_face, tp=4, ep_size=4, ep_implementation="all_reduce"),
    "moec, tp 4, ep 4": partial(with_moec, tp=4, ep=4),
    "Hugging Face, fsdp 4, ep 4, all-to-all": partial(hugging_face, fsdp=4, ep_size=4, ep_implementation="all_to_all"),
    "moec, fsdp 4, ep 4": partial(with_moec, dp=4, fsdp=True, ep=4),
    "Hugging Face, fsdp 2, tp 2, ep 4, all-to-all": partial(
        hugging_face, tp=2, fsdp=2, ep_size=4, ep_implementation="all_to_all"
    ),
    "moec, fsdp 2, tp 2, ep 4": partial(with_moec, dp=2, tp=2, fsdp=True, ep=4),
}

RIVALS = {
    "moec, tp 4": ["torch parallelize_module, tp 4", "Hugging Face, tp 4"],
    "moec, fsdp 4": ["torch fully_shard, fsdp 4", "Hugging Face, fsdp 4"],
    "moec, fsdp 2, tp 2": ["Hugging Face, fsdp 2, tp 2"],
    "moec, tp 4, ep 4": ["Hugging Face, tp 4, ep 4, all-to-all"],
    "moec, fsdp 4, ep 4": ["Hugging Face, fsdp 4, ep 4, all-to-all"],
    "moec, fsdp 2, tp 2, ep 4": ["Hugging Face, fsdp 2, tp 2, ep 4, all-to-all"],
}
"""Whose bytes (and, beside Hugging Face, whose number of collectives) must not be exceeded by whom."""
