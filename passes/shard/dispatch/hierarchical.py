"""hierarchical: dedup twice, so that a token crosses to another node once, however many of its experts live there.

Ranks of ep are nodes × ranks inside a node (``Plan.ranks_per_node`` cuts the mesh there).  First a token goes to the
rank with its own place in each node that has some of its experts, then inside that node to their ranks.  On the way
back sums are formed on the ranks, then in the node, then at home.  Routing limited to few nodes (``RouteSpec.groups``)
lowers what crosses further.
"""

from __future__ import annotations

from moec.passes.shard.dispatch.dedup import Dedup


class Hierarchical(Dedup):
    def levels(self) -> list[tuple[str, ...]]:
        across = tuple(a for a in self.ep if self.mesh.axis(a).nodes)
        inside = tuple(a for a in self.ep if not self.mesh.axis(a).nodes)
        return [axes for axes in (across, inside) if axes]
