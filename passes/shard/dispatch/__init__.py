"""Dispatchers: how tokens reach the ranks that own their experts, and how results come back.  One a file.

=============== ====================================================================================================
``alltoall``     a row for every pair travels (dropless, uneven all-to-all)
``allgather``    every rank gets all tokens of ep and computes the pairs of its experts; a reduce-scatter adds up
``dedup``        a token travels once to each rank that has some of its experts; their results are added there
``hierarchical`` the same twice: once to each node, then once to each rank inside it
``static``       of a router with a capacity: an equal number of slots for every expert, used or not
=============== ====================================================================================================

``base.Dispatcher`` is the interface: six stages that emit nodes.  A backend of its own (DeepEP, say) is one more file
with such a class and a line in ``DISPATCHERS``.
"""

from __future__ import annotations

from moec.passes.shard.dispatch.allgather import AllGather
from moec.passes.shard.dispatch.alltoall import AllToAll
from moec.passes.shard.dispatch.base import Dispatcher
from moec.passes.shard.dispatch.dedup import Dedup
from moec.passes.shard.dispatch.hierarchical import Hierarchical
from moec.passes.shard.dispatch.local import Local
from moec.passes.shard.dispatch.static import Static
from moec.plan import Plan

DISPATCHERS: dict[str, type[Dispatcher]] = {
    "alltoall": AllToAll,
    "allgather": AllGather,
    "dedup": Dedup,
    "hierarchical": Hierarchical,
    "static": Static,
}


def chosen(plan: Plan) -> type[Dispatcher]:
    """The dispatcher that a plan names; without expert parallelism nothing is dispatched, whatever it says.

    ``auto`` is ``static`` where each dp rank has a capacity of its own, else ``alltoall``: a capacity of the global
    batch would take many times the slots that are used.
    """
    if plan.ep == 1:
        return Local
    if plan.dispatch != "auto":
        return DISPATCHERS[plan.dispatch]
    per_rank = plan.router is not None and plan.router.capacity_factor is not None and plan.router.level == "dp_shard"
    return Static if per_rank else AllToAll


__all__ = ["DISPATCHERS", "Dispatcher", "Static", "chosen"]
