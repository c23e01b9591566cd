"""cost: what the nodes of a graph are expected to take on a cluster, and what a step of a rank then looks like.

    cluster = moec.cost.cluster("h100-nvl8-400g")               # or the path of a file that `moec calibrate` wrote
    sizes = moec.cost.Sizes.of(program, {"input_ids": (4, 4096)}, graphs=(joint.forward.graph, joint.backward.graph))
    moec.cost.seconds(node, cluster, program.mesh, sizes)       # one node
    moec.cost.predict(joint.forward.graph.nodes, cluster, program.mesh, sizes).step_s

Compute is a roofline (floating-point operations or bytes of memory, whichever takes longer, and an overhead an op);
communication is latency and bandwidth by link and kind of collective (alpha-beta).  Nothing here runs anything, and
everything is the same on every rank: schedulers may decide by it.
"""

from moec.cost.cluster import Cluster, Link, cluster, presets
from moec.cost.host import Host
from moec.cost.memory import Storages
from moec.cost.roofline import Work, link, seconds, stream, transfer, wire, work
from moec.cost.sizes import Sizes
from moec.cost.timeline import COMPUTE, Span, Timeline, predict, simulate
from moec.cost.trace import trace

__all__ = [
    "COMPUTE",
    "Cluster",
    "Host",
    "Link",
    "Sizes",
    "Span",
    "Storages",
    "Timeline",
    "Work",
    "cluster",
    "link",
    "predict",
    "presets",
    "seconds",
    "simulate",
    "stream",
    "trace",
    "transfer",
    "wire",
    "work",
]
