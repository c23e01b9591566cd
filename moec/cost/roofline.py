"""Seconds of one node: a roofline for compute, latency and bandwidth for communication.

* An op takes the longer of its floating-point operations at the rate of a matrix product of that size and its bytes at
  the rate of memory, and an overhead.  Of ops that were measured (``Cluster.ops``) both are their own.  Views, waits
  and sizes take nothing.
* A collective takes ``alpha + bytes / beta`` of its link, the bytes being those that one rank sends in a ring.  A group
  that spans nodes is as slow as the slower of the two links: in a ring a node's ranks share what crosses; in an
  exchange each sends its own.
* Tensor parallelism's ops that compute beside their own transfer (``collectives.FUSED``) do so part by part, a part a
  rank: the longer of the two, and a part of the shorter one, beside which there is nothing yet (or nothing any more).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import fx

from moec.cost.cluster import Cluster
from moec.cost.operations import Work, is_view, work
from moec.cost.sizes import Sizes
from moec.program import op_name
from moec.runtime.collectives import collective, group_of, is_fused, is_start, is_wait
from moec.runtime.mesh import Mesh

__all__ = [
    "COMPUTE", "Work", "ends", "launch", "link", "own_transfer", "seconds", "stream", "transfer", "wire", "work",
]  # fmt: skip

COMPUTE = "compute"
EXCHANGES = ("all_to_all", "exchange", "counts", "equal")


@dataclass(frozen=True)
class _Layout:
    """How a group lies on a cluster: ranks, and how many of them share a node with rank 0."""

    ranks: int
    inside: int

    @property
    def crosses(self) -> bool:
        return self.inside < self.ranks


def group_key(node: fx.Node) -> str:
    """The group key of a collective, whether or not the graph is bound to process groups."""
    return node.meta.get("group_key") or group_of(node)


def stream(node: fx.Node, mesh: Mesh) -> str:
    """Where ``node`` runs: ``"compute"``, or ``"comm:<group key>"`` for a start."""
    return f"comm:{group_key(node)}" if is_start(node.target) else COMPUTE


def link(where: str, cluster: Cluster, mesh: Mesh) -> str:
    """``network`` or ``node``: the slower link that a stream's group needs."""
    return "network" if _layout(where.removeprefix("comm:"), mesh, cluster.ranks_per_node).crosses else "node"


@lru_cache(maxsize=1024)
def _layout(key: str, mesh: Mesh, ranks_per_node: int) -> _Layout:
    ranks = mesh.groups(key)[0]
    return _Layout(len(ranks), sum(r // ranks_per_node == ranks[0] // ranks_per_node for r in ranks))


def wire(node: fx.Node, mesh: Mesh, sizes: Sizes) -> int:
    """Bytes that one rank sends for a collective, in a ring; of an exchange, those that leave the rank."""
    entry = collective(node.target)
    assert entry is not None
    return entry.wire_bytes(*ends(node, sizes), mesh.size(group_key(node)))


def ends(node: fx.Node, sizes: Sizes) -> tuple[int, int]:
    """Bytes of what goes into a collective, and of what comes out of it."""
    entry, val = collective(node.target), node.meta.get("val")
    assert entry is not None
    taken = sizes.bytes(node.args[0].meta.get("val"))
    if entry.primitive == "gather_products":
        return taken, sizes.bytes(val[0])
    given = sizes.bytes(val)
    if entry.primitive == "products_scatter":
        return given * node.args[-2], given
    if entry.primitive == "exchange":  # the larger has rows that do not travel
        taken = given = min(taken, given)
    return taken, given


def seconds(node: fx.Node, cluster: Cluster, mesh: Mesh, sizes: Sizes) -> float:
    """Of a start: how long the communication takes; the start itself takes an op's overhead."""
    if node.op != "call_function" or is_wait(node.target) or is_free(node):
        return 0.0
    if is_start(node.target):
        return _communication(node, cluster, mesh, sizes)
    overhead, times = cluster.ops.get(op_name(node), (cluster.op_overhead_s, 1.0))
    computed = times * roofline(node, cluster, sizes)
    if is_fused(node.target):
        sent = _communication(node, cluster, mesh, sizes)
        return overhead + max(computed, sent) + min(computed, sent) / node.args[-2]
    return overhead + computed


def own_transfer(node: fx.Node, cluster: Cluster, mesh: Mesh, sizes: Sizes) -> tuple[float, float]:
    """Of an op that computes beside its transfer: seconds that the transfer takes, and those of them that are hidden
    behind its products."""
    overhead, times = cluster.ops.get(op_name(node), (cluster.op_overhead_s, 1.0))
    sent = _communication(node, cluster, mesh, sizes)
    alone = overhead + times * roofline(node, cluster, sizes)
    return sent, sent - (seconds(node, cluster, mesh, sizes) - alone)


def roofline(node: fx.Node, cluster: Cluster, sizes: Sizes) -> float:
    """The longer of a node's operations and its bytes, each at its own rate."""
    w = work(node, sizes)
    compute = w.flops / cluster.matmul(w.dtype, w.flops / max(w.products, 1)) if w.flops else 0.0
    memory = w.bytes / cluster.memory(w.bytes) if w.bytes else 0.0
    return max(compute, memory)


def is_free(node: fx.Node) -> bool:
    """Does a node that is no collective take no time?"""
    val = node.meta.get("val")
    numbers = isinstance(val, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))
    return node.target is operator.getitem or numbers or is_view(node)


def launch(node: fx.Node, cluster: Cluster, mesh: Mesh, sizes: Sizes) -> float:
    """Seconds of compute that a start takes: its overhead, and what it copies itself (a sum is formed in a copy, and
    rows of an exchange that stay at home are moved)."""
    entry = collective(node.target)
    assert entry is not None
    taken = sizes.bytes(node.args[0].meta.get("val"))
    copied = 0
    if entry.primitive in ("all_reduce", "all_reduce_max"):
        copied = taken
    elif entry.primitive in EXCHANGES:
        copied = max(0, min(taken, sizes.bytes(node.meta.get("val"))) - wire(node, mesh, sizes))
    moved = 2 * copied / cluster.memory(2 * copied) if copied else 0.0
    return cluster.op_overhead_s + cluster.launch_s + moved


def _communication(node: fx.Node, cluster: Cluster, mesh: Mesh, sizes: Sizes) -> float:
    entry = collective(node.target)
    assert entry is not None
    primitive = {"gather_products": "all_gather", "products_scatter": "reduce_scatter"}.get(
        entry.primitive, entry.primitive
    )
    return transfer(primitive, wire(node, mesh, sizes), group_key(node), cluster, mesh)


def transfer(primitive: str, sent: float, key: str, cluster: Cluster, mesh: Mesh) -> float:
    """Seconds of a collective of the group ``key`` of which a rank would send ``sent`` bytes in a ring."""
    group = _layout(key, mesh, cluster.ranks_per_node)
    if group.ranks == 1:
        return 0.0
    if not group.crosses:
        alpha, beta = cluster.link("node").of(primitive)
        return alpha + sent / beta
    alpha, beta = cluster.link("network").of(primitive)
    if primitive in EXCHANGES:
        each = sent / (group.ranks - 1)
        across, inside = each * (group.ranks - group.inside), each * (group.inside - 1)
    else:  # a node's ranks share what crosses
        nodes = group.ranks // group.inside
        whole = sent * group.ranks / (group.ranks - 1)
        across, inside = whole * (nodes - 1) / nodes / group.inside, sent if group.inside > 1 else 0.0
    took = across / beta
    if inside:
        took = max(took, inside / cluster.link("node").of(primitive)[1])
    return alpha + took
