"""Order: what must hold of a graph in which communication has been moved about.  Raises MoecError naming the node.

1. The graph is a straight line of calls: every rank that runs it issues the same collectives in the same order over
   each group.  (``collective_order`` states it; ranks compare its digest before the first step.)
2. Every start has exactly one wait, a wait waits for a start, and nothing else reads what a start returns (but sizes).
   An op that is over when it returns (``collectives.FUSED``) has none, and is a collective like any other for the rest.
3. A collective names a group of the mesh, of the right size.
4. Exchanges of tokens share no communicator with anything else.
5. Scheduling changed no dataflow: the same nodes, with the same operands, in another order (``check_same_dataflow``).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from moec.passes.joint.purposes import EXCHANGES
from moec.runtime.collectives import collective, group_of, is_start, is_wait
from moec.runtime.errors import MoecError
from moec.runtime.mesh import Mesh


def check_order(graph: fx.Graph, mesh: Mesh) -> None:
    graph.lint()
    users: dict[str, dict[bool, fx.Node]] = defaultdict(dict)  # communicator -> does it exchange tokens? -> by whom
    for node in graph.nodes:
        if node.op not in ("placeholder", "get_attr", "call_function", "output"):
            raise _wrong(node, f"{node.name} is a {node.op}, which may branch")  # 1
        if node.op != "call_function":
            continue
        if is_wait(node.target) and not (isinstance(node.args[0], fx.Node) and is_start(node.args[0].target)):
            raise _wrong(node, f"{node.name} waits for {node.args[0]}, which starts nothing")
        entry = collective(node.target)
        if entry is None:
            continue
        _check_group(node, mesh)
        if is_start(node.target):
            _check_wait(node)
        if entry.communicates:
            users[group_of(node)].setdefault(entry.primitive in EXCHANGES, node)
    for key, by in users.items():  # 4
        if len(by) > 1:
            text = f"{by[True].name} exchanges tokens over the communicator {key!r} of {by[False].name}"
            raise _wrong(by[True], text)


def _check_wait(start: fx.Node) -> None:
    waits = [u for u in start.users if is_wait(u.target)]
    readers = [u for u in start.users if not is_wait(u.target) and not _is_size(u)]
    if len(waits) != 1 or readers:
        others = f", and {readers[0].name} reads its result" if readers else ""
        raise _wrong(start, f"{start.name} has {len(waits)} waits, not one{others}")


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def _check_group(node: fx.Node, mesh: Mesh) -> None:
    key, size = group_of(node), node.args[-2]
    if not isinstance(key, str) or not mesh.is_key(key) or mesh.size(key) != size:
        raise _wrong(node, f"{node.name} names the group {key!r} of size {size}, not a group of {mesh.axes}")


def collective_order(graph: fx.Graph) -> dict[str, list[str]]:
    """Communicator -> the collectives that a rank issues over it, in order, with what each moves."""
    found: dict[str, list[str]] = defaultdict(list)
    for node in graph.nodes:
        entry = collective(node.target) if node.op == "call_function" else None
        if entry is not None and entry.communicates:
            val = node.meta.get("val")
            vals = [v for v in (val if isinstance(val, (tuple, list)) else [val]) if isinstance(v, torch.Tensor)]
            shape = " ".join(f"{v.dtype}{[str(s) for s in v.shape]}" for v in vals)
            found[group_of(node)].append(f"{entry.kind} {node.name} {shape}")
    return dict(found)


def dataflow(graph: fx.Graph) -> dict[str, Any]:
    """Node by name -> what it calls on which operands."""
    return {n.name: (n.op, str(n.target), str(n.args), str(n.kwargs)) for n in graph.nodes}


def check_same_dataflow(before: dict[str, Any], graph: fx.Graph) -> None:
    """``before``: the ``dataflow`` of the graph that ``graph`` is an order of."""
    after = dataflow(graph)
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name):
            raise MoecError(
                f"scheduling changed {name}: {before.get(name, 'absent')} became {after.get(name, 'absent')}",
                where="overlap",
            )


def _wrong(node: fx.Node, text: str) -> MoecError:
    return MoecError(text, where=node.meta.get("where", ""))
