"""symmetric: whether a plan's transfers of tensor parallelism run over memory that GPUs read of each other.

``settled(plan)`` decides ``Overlap.symmetric_memory="auto"`` for this process's world, and refuses ``True`` where the
GPUs cannot.  Passes then see True or False; they never ask for a device.

What it needs: torch's fused operators, a GPU of its own for every rank, and in each tp group GPUs that can access each
other.  Ranks of one host say so of each other; whether GPUs of two hosts can (racks that one NVLink spans) torch finds
out when the memory is first used, so ``auto`` says no and True is taken at its word.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from moec.plan import Plan
from moec.runtime.errors import MoecError
from moec.runtime.torch_compat import symmetric_memory_lacks


@dataclass(frozen=True)
class Card:
    """What one rank has."""

    host: str
    index: int
    peers: frozenset[int]
    """Devices of the host that its own can access."""
    lacks: str | None = None
    """What its torch is without."""


def settled(plan: Plan, on_gpus: bool) -> Plan:
    """``plan`` with True or False for ``auto``.

    ``on_gpus``: every rank of the world has a GPU; then this is collective over the world, whatever the plan is.
    Raises MoecError, on all ranks the same, where True is asked for and cannot be."""
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    cards: list[Card] = []
    if on_gpus and world > 1:
        cards = [mine := _mine()] * world
        dist.all_gather_object(cards, mine)
    asked = plan.overlap.symmetric_memory if plan.overlap is not None else False
    if plan.overlap is None or asked is False or not plan.sequence_parallel or plan.tp == 1:
        return plan
    reason = why_not(plan, cards, sure=asked == "auto") if cards else "there is no GPU"
    if asked is True and cards and reason is not None:
        raise MoecError(
            f"symmetric_memory=True, but {reason}",
            where="plan.overlap",
            way_out="symmetric_memory='auto' (the default) does without it, and pipeline_tp cuts transfers into pieces",
        )
    return replace(plan, overlap=replace(plan.overlap, symmetric_memory=asked is True or reason is None))


def why_not(plan: Plan, cards: Sequence[Card], sure: bool) -> str | None:
    """Why GPUs of some tp group cannot read each other, None if all can.  ``sure``: nothing is taken on trust.

    ``cards``: by rank."""
    for rank, card in enumerate(cards):
        if card.lacks is not None:
            return f"{card.lacks} on rank {rank}"
    mesh = plan.mesh(len(cards))
    for group in mesh.groups(mesh.key(mesh.role("tp"))):
        hosts = sorted({cards[r].host for r in group})
        if sure and len(hosts) > 1:
            return f"ranks {list(group)} of a tp group are on the hosts {', '.join(hosts)}"
        for r in group:
            for other in group:
                a, b = cards[r], cards[other]
                if r == other or a.host != b.host:
                    continue
                if a.index == b.index:
                    return f"ranks {r} and {other} have the same GPU, cuda:{a.index} of {a.host}"
                if b.index not in a.peers:
                    return f"cuda:{a.index} (rank {r}) cannot access cuda:{b.index} (rank {other}) of {a.host}"
    return None


def _mine() -> Card:
    host = socket.gethostname()
    try:
        index = torch.cuda.current_device()
        others = (i for i in range(torch.cuda.device_count()) if i != index)
        peers = frozenset(i for i in others if torch.cuda.can_device_access_peer(index, i))
    except (RuntimeError, AssertionError) as e:  # the other ranks wait for an answer
        return Card(host, -1, frozenset(), f"CUDA does not work ({e})")
    return Card(host, index, peers, symmetric_memory_lacks())
