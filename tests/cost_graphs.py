"""Small graphs written by hand, for tests of the cost model."""

import operator

import torch
from torch import fx

from moec import cost
from moec.runtime.mesh import Mesh
from moec.runtime.torch_compat import WAIT


class Graph:
    """Values are meta tensors; nothing runs.  Starts are all-reduces over one of the axes of ``mesh``."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.sizes = cost.Sizes({})
        self.mesh = Mesh.of(dp=2, tp=2, etp=2)

    def value(self, *shape, dtype=torch.float32):
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        return node

    def call(self, target, *args, shape):
        node = self.graph.call_function(target, args)
        several = isinstance(shape, list)
        vals = [torch.empty(s, device="meta") for s in (shape if several else [shape])]
        node.meta["val"] = tuple(vals) if several else vals[0]
        return node

    def item(self, node, i, shape):
        return self.call(operator.getitem, node, i, shape=shape)

    def start(self, x, shape, group="dp_edp"):
        return self.call(torch.ops.moec.p_to_i.default, x, 0, 2, group, shape=shape)

    def wait(self, start):
        return self.call(WAIT, start, shape=tuple(start.meta["val"].shape))

    def compute(self, *operands, name="compute"):
        node = self.call(torch.ops.aten.neg.default, *operands[:1], shape=tuple(operands[0].meta["val"].shape))
        node.args = (operands[0],)
        node.name = name
        return node

    def work(self, node):
        return cost.work(node, self.sizes)
