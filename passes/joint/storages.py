"""storages: which saved values lie in one piece of memory, or in a parameter's, noted for whoever counts memory.

A backward graph's placeholders look like tensors of their own.  Some are views of the same tensor of the forward (rows
and their transposed form), or of a parameter (a transposed weight), which is there anyhow.  ``meta["lies_in"]`` of a
placeholder says where: the name of a parameter, or a number that those have in common that share.
"""

from __future__ import annotations

from moec.cost import Sizes, Storages
from moec.passes.joint import JointGraphs


def note_storages(graphs: JointGraphs, params: set[str]) -> JointGraphs:
    """``params``: placeholders of parameters.  Returns the same graphs, with the notes."""
    nodes = list(graphs.forward.graph.nodes)
    storages = Storages(nodes, Sizes({}))
    owner = {s: n.name for n in nodes if n.op == "placeholder" and n.name in params for s in storages.of(n)}
    saved = nodes[-1].args[0][graphs.num_outputs :]
    placeholders = [n for n in graphs.backward.graph.find_nodes(op="placeholder") if n.name.startswith("saved_")]
    for value, placeholder in zip(saved, placeholders, strict=True):
        where = storages.of(value)
        if len(where) == 1:
            placeholder.meta["lies_in"] = owner.get(where[0], where[0])
    return graphs
