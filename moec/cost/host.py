"""host: the process that launches ops on a GPU, and which of them make it wait.

A host runs ahead of its GPU: it launches an op in ``Cluster.dispatch_s`` and goes on.  An op that reads on the host
what the GPU computes (how many rows go where) waits until the GPU has done all that was launched before, and
``Cluster.sync_s`` more; until the host has launched something again, the GPU has nothing to do.  Without ``dispatch_s``
the host computes itself, as on a CPU, and waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from moec.cost.cluster import Cluster
from moec.program import op_name
from moec.runtime.torch_compat import expr, is_unbacked

HOST = "host"
"""The stream of what the host waits for."""

READS = frozenset({
    "moec.all_to_all", "moec.all_to_all_rows", "moec.sort_chunks", "moec_te.grouped_mm", "moec_te.grouped_mm_wgrad",
    "moec_te.fp8_grouped_mm", "moec_te.fp8_grouped_dgrad", "moec_te.fp8_grouped_wgrad",
    "aten._local_scalar_dense", "aten.item", "aten.nonzero", "aten.masked_select",
})  # fmt: skip
"""Ops that ask a tensor on the host for its numbers."""


@dataclass(frozen=True)
class Host:
    dispatch_s: float
    sync_s: float
    reads: Callable[[fx.Node], bool]

    @staticmethod
    def of(cluster: Cluster) -> Host | None:
        """None where the host computes itself."""
        return Host(cluster.dispatch_s, cluster.sync_s, reads) if cluster.dispatch_s else None


def reads(node: fx.Node) -> bool:
    """Does the host have to know something that is computed before it can launch ``node``?  Also wherever a size of the
    result depends on data that no operand's size does."""
    if node.op != "call_function":
        return False
    if op_name(node) in READS:
        return True
    made = _symbols(node.meta.get("val"), sizes=False)
    return bool(made) and not made <= {s for a in node.all_input_nodes for s in _symbols(a.meta.get("val"))}


def _symbols(val: object, sizes: bool = True) -> set:
    """Symbols of data-dependent sizes; ``sizes``: of a number as well."""
    if isinstance(val, (tuple, list)):
        return {s for v in val for s in _symbols(v, sizes)}
    numbers = val.shape if isinstance(val, torch.Tensor) else [val] if sizes and isinstance(val, torch.SymInt) else []
    return {s for n in numbers if isinstance(n, torch.SymInt) for s in expr(n).free_symbols if is_unbacked(s)}
