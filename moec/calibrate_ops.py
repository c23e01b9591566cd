"""calibrate_ops: what the ops of a typical layer take on a machine beyond what their operations and bytes say.

Legend: B sequences, S their length, T = B * S tokens, H hidden, E experts, K choices a token, V words, M width.

Square products and additions have curves of their own (``moec.calibrate``).  Others have reasons to be slower: an
attention kernel is no matrix product, an exponential no addition, a router is many small steps, and a layer's products
are no squares.

1. A function that uses each of them, and its gradients, is traced below autograd, for few tokens and for many.
2. A trace runs op by op, several times, and every op is timed.  What it takes for few tokens is its overhead; that of
   products, which read all weights for few tokens too, is any op's.
3. What it takes longer for many, over all nodes of one op, is held against the roofline of the cluster so far: the
   ratio of the two is how much slower the op is.
4. An op that is another one in all that matters (``LIKE``) has its figures.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from moec.cost.cluster import Cluster
from moec.cost.roofline import is_free, roofline
from moec.cost.sizes import Sizes
from moec.program import op_name
from moec.runtime.route_spec import RouteSpec

H, E, K, V, M, HEADS = 512, 8, 2, 1024, 256, 8
BODY = "g = whole(h0); u = whole(h1); a = silu(g); y = mul(a, u); return y"
FEW, MANY = (1, 16), (2, 512)
"""B, S; of many the tensors have 2 MB: neither in a small cache nor beyond what an allocator keeps."""
MOST = 1000.0
"""Of the ratio; beyond it something else was measured.  None is below 1: of that the curves are to say."""
PRODUCTS = ("aten.mm", "moec.experts", "moec.experts_backward")
LIKE = {
    "aten.addmm": "aten.mm", "moec.experts_rows": "moec.experts", "moec.experts_rows_backward": "moec.experts_backward",
}  # fmt: skip

PASSES = 5
LEAST = 1e-6
"""Seconds of work that an op must have had for a ratio to mean anything."""


def ops(cluster: Cluster, device: str, mean: Callable[[float], float]) -> dict[str, tuple[float, float]]:
    """Op -> (overhead in seconds, how many times its roofline it takes beyond that).

    ``cluster``: the curves.  ``mean``: of a number over the ranks, who all measure."""
    few, many = (_measured(cluster, device, *size) for size in (FEW, MANY))
    found = {}
    for name in sorted(many):
        product = name in PRODUCTS
        overhead = cluster.op_overhead_s if product else mean(few[name].took / few[name].calls)
        beyond = mean(many[name].took) - many[name].calls * overhead
        expected = many[name].expected - (0.0 if product else few[name].expected)
        ratio = beyond / expected if expected > LEAST * many[name].calls else 1.0  # 3
        found[name] = (overhead, min(max(ratio, 1.0), MOST))
    return found | {name: found[other] for name, other in LIKE.items() if other in found}  # 4


@dataclass
class _Sum:
    calls: int = 0
    took: float = 0.0
    expected: float = 0.0
    """By the roofline, without overhead."""


def _measured(cluster: Cluster, device: str, B: int, S: int) -> dict[str, _Sum]:
    module, operands = _traced(device, B, S)  # 1
    sums, sizes = defaultdict[str, _Sum](_Sum), Sizes({})
    passes = [_one_pass(module, operands, device) for _ in range(PASSES + 1)][1:]  # 2
    for node in module.graph.nodes:
        if node.op == "call_function" and not is_free(node):
            one = sums[op_name(node)]
            one.calls += 1
            one.took += median(took[node] for took in passes)
            one.expected += roofline(node, cluster, sizes)
    return sums


def _one_pass(module: fx.GraphModule, operands: Sequence[Tensor], device: str) -> dict[fx.Node, float]:
    """Seconds of every node, one after the other as in a step: what an op needs is where the others left it.  Notes the
    nodes' values."""
    given, env, took = list(operands), dict[fx.Node, Any](), dict[fx.Node, float]()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            env[node] = given.pop(0)
        elif node.op == "get_attr":
            env[node] = getattr(module, str(node.target))
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            began = time.perf_counter()
            env[node] = node.target(*args, **kwargs)
            if device != "cpu":
                torch.cuda.synchronize()
            took[node] = time.perf_counter() - began
        node.meta["val"] = env.get(node)
    return took


def _traced(device: str, B: int, S: int) -> tuple[fx.GraphModule, list[Tensor]]:
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device)

    def weight(*shape: int) -> Tensor:
        """As large as those of a layer: of larger logits exponentials vanish, which takes a processor longer."""
        return draw(*shape) * H**-0.5

    ids_T = torch.randint(0, V, (B * S,), generator=g).to(device)
    learned = [
        weight(V, H), draw(H), *(draw(B, HEADS, S, H // HEADS) for _ in range(3)), draw(B * S, E), weight(H, H),
        weight(H // 4, H), weight(E, H, M), weight(E, H, M), weight(E, M, H),
    ]  # fmt: skip

    def joint(ids_T: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in operands]
        return torch.autograd.grad(_layer(B, ids_T, *leaves), leaves)

    return make_fx(joint)(ids_T, *learned), [ids_T, *learned]


def _layer(
    B: int,
    ids_T: Tensor,
    table_VH: Tensor,
    scale_H: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logits_TE: Tensor,
    wide_HH: Tensor,
    narrow_DH: Tensor,
    up_EHM: Tensor,
    gate_EHM: Tensor,
    down_EMH: Tensor,
) -> Tensor:
    """``q``, ``k``, ``v``: [B, heads, S, D].  Experts where they are compiled for the processor: on a CPU."""
    moec, T = torch.ops.moec, len(ids_T)
    x_TH = F.embedding(ids_T, table_VH)
    normed_TH = x_TH * torch.rsqrt(x_TH.pow(2).mean(-1, keepdim=True) + 1e-6) * scale_H
    a_TH = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(T, H)
    x_TH = F.layer_norm(x_TH + F.linear(a_TH, wide_HH), (H,), scale_H)
    x_TH = moec.rms_norm(x_TH, [H], scale_H, 1e-6)[0]
    weights_TK, ids_TK, *_ = moec.route_counted(logits_TE, None, None, None, None, RouteSpec(E, K).text(), False)
    rows_NH, counts_E, row_of_TK = moec.permute(normed_TH, ids_TK, E)
    counts_2E = torch.stack([counts_E[: E // 2], counts_E[E // 2 :]])
    rows_NH = moec.sort_chunks(moec.sort_chunks(rows_NH, counts_2E, False), counts_2E, True)
    y_TH = moec.unpermute_add([x_TH], F.gelu(rows_NH) + F.silu(rows_NH), weights_TK, row_of_TK)
    y_TH = moec.join_tokens(moec.split_tokens(y_TH, 2, 1, 1), [T], 1)
    if y_TH.device.type == "cpu":
        y_TH = moec.experts(y_TH, ids_TK, weights_TK, [gate_EHM, up_EHM], [], down_EMH, None, BODY, False)[0]
    loss = moec.cross_entropy(F.linear(y_TH, table_VH), ids_T, -100, 0.0, 1)[0] + F.linear(y_TH, narrow_DH).sum()
    return loss + F.mse_loss(y_TH, normed_TH) + torch.softmax(y_TH, -1).sum()
