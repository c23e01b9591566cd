"""Work of one op: floating-point operations of its matrix products, and bytes of memory.

Legend: T tokens, K choices a token, N rows (pairs), H hidden, M columns of a product, E experts.

A multiplication and an addition are two operations.  Formulas are those of the ops' definitions (``runtime/ops/``) and,
for aten, of ``torch.utils.flop_counter``.  An op without a formula has no operations and moves its inputs and outputs
once; :attr:`Work.formula` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from moec.cost.sizes import Sizes
from moec.program import op_name
from moec.runtime.torch_compat import OpOverload

E4M3 = "float8_e4m3fn"
"""Of the operands of FP8 products (or E5M2, which is as fast)."""

PLAIN = "inputs + outputs"
"""The formula of an op that has none of its own."""


@dataclass(frozen=True)
class Work:
    flops: float = 0.0
    bytes: float = 0.0
    dtype: str = ""
    """Of the products' operands."""
    products: int = 1
    """How many products of equal size ``flops`` are, one after the other."""
    formula: str = PLAIN


class _Node:
    """A node's operands and results as numbers."""

    def __init__(self, node: fx.Node, sizes: Sizes) -> None:
        self.node, self.sizes = node, sizes

    def val(self, at: int) -> Any:
        arg = self.node.args[at] if at < len(self.node.args) else None
        if isinstance(arg, (tuple, list)):
            return [a.meta.get("val") for a in arg if isinstance(a, fx.Node)]
        return arg.meta.get("val") if isinstance(arg, fx.Node) else None

    def shape(self, at: int) -> tuple[int, ...]:
        return self.sizes.shape(self.val(at))

    def shapes(self, at: int) -> list[tuple[int, ...]]:
        return [self.sizes.shape(v) for v in self.val(at)]

    def result(self, i: int | None = None) -> tuple[int, ...]:
        val = self.node.meta["val"]
        return self.sizes.shape(val if i is None else val[i])

    def bytes(self, *at: int) -> int:
        return sum(self.sizes.bytes(self.val(i)) for i in at)

    @property
    def out(self) -> int:
        return self.sizes.bytes(self.node.meta.get("val"))

    @property
    def quantised(self) -> int:
        """Of the results, but for the first one, a carrier, which has no memory."""
        return sum(self.sizes.bytes(v) for v in self.node.meta["val"][1:])

    @property
    def all(self) -> int:
        return sum(self.sizes.bytes(a.meta.get("val")) for a in self.node.all_input_nodes) + self.out


# Each formula: (floating-point operations, bytes, number of equal products).
Formula = Callable[[_Node], tuple[float, float, int]]


def _grouped_mm(n: _Node) -> tuple[float, float, int]:
    """x_NK, w_EKM, counts_E -> [N, M]"""
    (N, K), (E, _, M) = n.shape(0), n.shape(1)
    return 2 * N * K * M, n.all, min(E, N)


def _grouped_mm_wgrad(n: _Node) -> tuple[float, float, int]:
    """x_NK, g_NM, counts_E -> [E, K, M]"""
    (N, K), (_, M), (E,) = n.shape(0), n.shape(1), n.shape(2)
    return 2 * N * K * M, n.all, min(E, N)


def _fp8_forward(w: int, first: int) -> Formula:
    """``moec::fp8_linear`` and ``fp8_grouped_mm``: x [.., K], w [E, K, M] or [M, K] at ``w``, and, from ``first``, q
    and scales, of which a forward reads the first four.  Carriers have no memory."""

    def formula(n: _Node) -> tuple[float, float, int]:
        out, K, groups = n.result(0), n.shape(0)[-1], n.shape(w)[:-2]
        return 2 * prod(out) * K, n.out + n.bytes(*range(first, first + 4)), max(1, min(prod(groups), out[0]))

    return formula


def _fp8_dgrad(n: _Node) -> tuple[float, float, int]:
    """g_q [.., M], g_s, w_qT [.., K, M] or [M, K], w_sT -> [.., K]"""
    out, groups = n.result(), n.shape(2)[:-2]
    return 2 * prod(out) * n.shape(0)[-1], n.all, max(1, min(prod(groups), out[0]))


def _fp8_wgrad(n: _Node) -> tuple[float, float, int]:
    """A matrix of N rows, scales, another one, scales -> [.., M, K]"""
    N, *groups = n.shape(0)[0], *n.result()[:-2]
    return 2 * N * prod(n.result()[-2:]), n.all, max(1, min(prod(groups), N))


def _fp8_grouped_act(n: _Node) -> tuple[float, float, int]:
    """x [N, K] and every w [E, K, M] in FP8 -> [N, I] in FP8 and [N, A]; carriers have no memory."""
    (N, K), weights = n.shape(0), n.shapes(1)
    carriers = n.bytes(0) + sum(n.sizes.bytes(v) for v in n.val(1))
    read = sum(n.sizes.bytes(a.meta.get("val")) for a in n.node.all_input_nodes) - carriers
    return sum(2 * N * K * w[2] for w in weights), read + n.quantised, max(1, min(weights[0][0], N)) * len(weights)


def _experts(w_in: int, w_out: int, h: Callable[[_Node], tuple[int, ...]], times: int) -> Formula:
    """Forward: rows times each w_in [E, H, M] and w_out [E, I, H].  Backward (``times`` 2): the gradients of rows and
    of weights, a product each; of a frozen weight there is none."""

    def formula(n: _Node) -> tuple[float, float, int]:
        N = h(n)[0]
        weights = [*n.shapes(w_in), n.shape(w_out)]
        need = n.node.args[-1] if times == 2 else []
        rows = sum(prod(w[1:]) for w in weights)
        products = times
        flops = 2 * N * rows * times
        if isinstance(need, (tuple, list)) and need:
            own = [*need[len(need) - len(_held(n, w_in, w_out)) :]]
            own = own[: len(weights) - 1] + [own[len(weights) - 1 + len(n.node.args[w_in + 1])]]
            flops -= sum(2 * N * prod(w[1:]) for w, wanted in zip(weights, own, strict=True) if not wanted)
        E = weights[0][0]
        return flops, n.all, max(1, min(E, N)) * len(weights) * products

    return formula


def _held(n: _Node, w_in: int, w_out: int) -> list[Any]:
    """The weights and biases among the operands, as ``need`` counts them."""
    args = n.node.args
    return [*args[w_in], *args[w_in + 1], args[w_out], *([] if args[w_out + 1] is None else [args[w_out + 1]])]


def _attention(flops_of_scores: int, scores: Callable[[_Node], tuple[float, bool]]) -> Formula:
    def formula(n: _Node) -> tuple[float, float, int]:
        size, causal = scores(n)
        return flops_of_scores * size * (0.5 if causal else 1), n.all, 1

    return formula


def _scores(q: int, k: int, causal: int) -> Callable[[_Node], tuple[float, bool]]:
    """B · heads · S_q · S_k · D, and whether half of it is skipped."""

    def size(n: _Node) -> tuple[float, bool]:
        *batch, S, D = n.shape(q)
        args = n.node.args
        flag = args[causal] if len(args) > causal else n.node.kwargs.get("is_causal", False)
        return prod(batch) * S * n.shape(k)[-2] * D, bool(flag)

    return size


def _gather(at: int) -> Formula:
    """Reads of a table what it puts out, and the indices."""
    return lambda n: (0, 2 * n.out + n.bytes(at), 1)


def _scatter(at: int) -> Formula:
    """Fills the result, and adds each of the rows at ``at`` to it."""
    return lambda n: (0, n.out + 3 * n.bytes(at), 1)


def _writes(n: _Node) -> tuple[float, float, int]:
    return 0, n.out, 1


def _linear(n: _Node) -> tuple[float, float, int]:
    return 2 * prod(n.result()) * n.shape(0)[-1], n.all, 1


def _gather_linear(n: _Node) -> tuple[float, float, int]:
    """x […, K] of every rank, and every w [N, K]; what is gathered is written and read."""
    whole, products = n.result(0), n.shapes(1)
    flops = sum(2 * prod(whole) * w[0] for w in products)
    return flops, n.all + n.sizes.bytes(n.node.meta["val"][0]), len(products)


def _linear_scatter(n: _Node) -> tuple[float, float, int]:
    """x […, K], w [N, K]; of the product each rank's part is sent and the own part of all ranks added up."""
    ranks = n.node.args[-2]
    return 2 * prod(n.shape(0)) * n.shape(1)[0], n.all + 2 * ranks * n.out, 1


FORMULAS: dict[str, Formula] = {
    "aten.linear": _linear,
    "moec.gather_linear": _gather_linear,
    "moec.linear_scatter": _linear_scatter,
    "aten.scaled_dot_product_attention": _attention(4, _scores(0, 1, 5)),
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention(4, _scores(0, 1, 4)),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention(10, _scores(1, 2, 7)),
    "aten.embedding": _gather(1),
    "aten.index": _gather(1),
    "aten.index_select": _gather(2),
    "aten.gather": _gather(2),
    "aten.embedding_dense_backward": _scatter(0),
    "aten.zeros_like": _writes,
    "aten.ones_like": _writes,
    "aten.full_like": _writes,
    "aten.new_zeros": _writes,
    "aten.new_ones": _writes,
    "aten.new_full": _writes,
    "aten.new_empty": lambda n: (0, 0, 1),
    "aten.empty_like": lambda n: (0, 0, 1),
    "aten.empty": lambda n: (0, 0, 1),
    "moec.grouped_mm": _grouped_mm,
    "moec.grouped_mm_wgrad": _grouped_mm_wgrad,
    "moec.experts": _experts(3, 5, lambda n: n.result(1), 1),
    "moec.experts_rows": _experts(2, 4, lambda n: n.result(1), 1),
    "moec.experts_backward": _experts(3, 5, lambda n: n.shape(7), 2),
    "moec.experts_rows_backward": _experts(2, 4, lambda n: n.shape(6), 2),
    "moec.permute": _gather(1),
    "moec.permute_kept": _gather(1),
    "moec.permute_aligned": _gather(1),
    "moec.permute_backward": _gather(1),
    "moec.fp8_linear": _fp8_forward(1, 2),
    "moec.fp8_dgrad": _fp8_dgrad,
    "moec.fp8_wgrad": _fp8_wgrad,
    "moec.fp8_grouped_mm": _fp8_forward(1, 3),
    "moec.fp8_grouped_dgrad": _fp8_dgrad,
    "moec.fp8_grouped_wgrad": _fp8_wgrad,
    "moec.fp8_grouped_act": _fp8_grouped_act,
    "moec.permute_quantised": lambda n: (0, 2 * n.quantised + n.bytes(0, 1), 1),
    "moec.past_amax": lambda n: (0, n.out + n.bytes(0), 1),  # of what it scales it reads the shape
    "moec.quantise": lambda n: (0, n.quantised + n.bytes(0, 1, 2), 1),
    "moec.unpermute": lambda n: (0, n.out + n.bytes(0, 1, 2), 1),
    "moec.unpermute_add": lambda n: (0, n.out + n.bytes(0, 1, 2, 3), 1),
    "moec.unpermute_backward": lambda n: (0, n.out + 2 * n.bytes(1), 1),
    "moec.lookup": _gather(2),
    "moec.lookup_backward": _scatter(0),
    "moec.pick": _gather(2),
    "moec.pick_backward": _scatter(0),
    "moec.place_rows": lambda n: (0, 2 * n.out + n.bytes(1), 1),
    "moec.cross_entropy": lambda n: (0, n.all, 1),
    "moec.cross_entropy_backward": lambda n: (0, n.all, 1),
    "moec.rms_norm": lambda n: (0, n.all, 1),
    "moec.rms_norm_backward": lambda n: (0, n.all, 1),
}


def work(node: fx.Node, sizes: Sizes) -> Work:
    """What a node that is neither a view nor a collective does."""
    n, name = _Node(node, sizes), op_name(node).replace("moec_te.", "moec.")
    dtype = E4M3 if name.startswith("moec.fp8_") else _dtype(node)
    if name in FORMULAS:
        flops, nbytes, products = FORMULAS[name](n)
        return Work(flops, nbytes, dtype, products, name)
    known = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if known is not None:
        values = [v if isinstance(v, torch.Tensor) else a for a in node.args for v in [_val(a)]]
        shapes = [sizes.shape(v) if isinstance(v, torch.Tensor) else v for v in values]
        val = node.meta["val"]
        out = (
            sizes.shape(val)
            if isinstance(val, torch.Tensor)
            else [sizes.shape(v) for v in val if isinstance(v, torch.Tensor)]
        )
        return Work(float(known(*shapes, out_val=out, **node.kwargs)), n.all, dtype, 1, name)
    return Work(0.0, n.all, dtype)


def is_view(node: fx.Node) -> bool:
    """Does it give another look at its operand's memory?"""
    if op_name(node) in ("aten._unsafe_view", "aten.reshape", "aten.detach", "moec.boundary"):
        return True
    if not isinstance(node.target, OpOverload):
        return False
    returns = node.target._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _val(arg: Any) -> Any:
    return arg.meta.get("val") if isinstance(arg, fx.Node) else None


def _dtype(node: fx.Node) -> str:
    """Of the first operand that holds floating-point numbers."""
    for a in node.all_input_nodes:
        val = a.meta.get("val")
        if isinstance(val, torch.Tensor) and val.dtype.is_floating_point:
            return str(val.dtype).removeprefix("torch.")
    return ""
