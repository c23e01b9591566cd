"""Factor rules: how each op's dims relate, and so how sharding passes through it.  One line an op.

A *factor* is a loop of the op.  ``linear: "... k, n k -> ... n"`` has the factors of the leading dims, ``k`` and
``n``: an operand that is sharded on a factor's dim makes the result sharded on that factor's dim, and a sharded factor
that the result lacks (``k``) makes the result a pending sum (P).  A *blocked* factor cannot be sharded: the operand is
gathered first.  Size-1 dims that broadcast have no factor.

``carries`` says how pending sums pass: ``linear`` ops map P operands to a P result when all operands are P,
``multilinear`` ops when exactly one is and the others are R, ``first`` ops (a / b) when the first one is.

An op without a rule is an error that names the op and its module, never a silent gather.  Users declare rules of
their own ops (``custom.py``).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from moec.passes.shard import singles as one
from moec.passes.shard.declared import declared_rule
from moec.passes.shard.families import (
    along,
    argmax_rule,
    cast_rule,
    div_rule,
    einsum,
    flip_rule,
    like,
    matmul_rule,
    pointwise,
    reduction,
    where_rule,
)
from moec.passes.shard.rule import Rule
from moec.program import op_name
from moec.runtime.errors import MoecError


def rule_for(node: fx.Node) -> Rule:
    """The factor rule of a ``call_function`` node, for its recorded (global) shapes."""
    maker = _RULES.get(op_name(node).replace("moec_te.", "moec.")) or declared_rule(node)
    if maker is None:
        raise MoecError(
            f"no sharding rule for {node.target} (node {node.name})",
            where=node.meta.get("where", ""),
            way_out=f'declare its dims, say moec.sharding_rule("{_qualified(node)}", "... k, n k -> ... n"), or write '
            "the module with other ops; one rank needs no rules",
        )
    return maker(node)


def _qualified(node: fx.Node) -> str:
    return op_name(node).replace(".", "::", 1)


def in_table(op: str) -> bool:
    """Whether moec has rules of its own for the op of this qualified name (``"aten::linear"``)."""
    return op.replace("::", ".") in _RULES or op.startswith("moec::")


def is_creation(node: fx.Node) -> bool:
    """Makes a value from nothing: a tensor operand (``new_zeros``) is only metadata."""
    return op_name(node).removeprefix("aten.") in _CREATION


# fmt: off
_POINTWISE = (
    "abs", "acos", "asin", "atan", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "celu", "clamp",
    "clamp_max", "clamp_min", "cos", "cosh", "elu", "eq", "erf", "exp", "exp2", "expm1", "floor", "floor_divide",
    "fmod", "ge", "gelu", "gt", "hardsigmoid", "hardswish", "hardtanh", "isfinite", "isinf", "isnan", "isneginf", "le",
    "leaky_relu", "log", "log10", "log1p", "log2", "log_sigmoid", "logical_and", "logical_not", "logical_or",
    "logical_xor", "logit", "lt", "masked_fill", "maximum", "minimum", "mish", "nan_to_num", "ne", "pow", "reciprocal",
    "relu", "relu6", "remainder", "round", "rsqrt", "rsub", "selu", "sigmoid", "sign", "silu", "sin", "sinh",
    "softplus", "sqrt", "square", "tan", "tanh", "true_divide", "trunc", "xlogy", "__and__", "__or__",
    "__xor__",
)
_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits")
_ALONG_LAST = ("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "argsort")
_REDUCTIONS = ("mean", "amax", "amin", "max", "min", "logsumexp", "any", "all", "prod", "var", "std")
_CREATION = (
    "arange", "zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor",
    "eye", "triu_indices", "tril_indices",
)
_RULES: dict[str, Callable[[fx.Node], Rule]] = {
    # contractions
    "aten.linear": einsum("... k, n k, n -> ... n", added=2),
    "aten.mm": einsum("m k, k n -> m n"),
    "aten.bmm": einsum("b m k, b k n -> b m n"),
    "aten.matmul": matmul_rule,
    # linear
    **{f"aten.{n}": pointwise("linear") for n in ("add", "sub", "neg", "clone", "alias", "detach")},
    "aten._to_copy": cast_rule, "aten.view_as_complex": one.complex_, "aten.view_as_real": one.complex_,
    "aten.polar": pointwise(),
    "aten.mul": pointwise("multilinear"),
    "aten.div": div_rule, "aten.where": where_rule,
    # pointwise
    **{f"aten.{n}": pointwise() for n in _POINTWISE},
    # losses without reduction (normalize takes the mean or sum apart)
    **{f"aten.{n}": pointwise() for n in _LOSSES},
    **{f"aten.{n}": like for n in ("zeros_like", "ones_like", "empty_like", "full_like")},
    # mixing along one dim
    **{f"aten.{n}": along(1) for n in _ALONG_LAST},
    "aten.topk": along(2), "aten.sort": along(1), "aten.argmax": argmax_rule,
    "aten.argmin": argmax_rule, "aten.flip": flip_rule,
    "aten.diff": along(2), "aten.gather": one.gather_,
    # reductions
    "aten.sum": reduction(True),
    **{f"aten.{n}": reduction(False) for n in _REDUCTIONS},
    # moving dims
    **{f"aten.{n}": one.transpose_ for n in ("transpose", "permute", "t")},
    "aten.reshape": one.view_,  # normalize writes view, squeeze, flatten and unflatten so
    "aten.unsqueeze": one.unsqueeze_, "aten.expand": one.expand_, "aten.cat": one.cat_,
    "aten.stack": one.stack_, "aten.slice": one.slice_,
    "aten.select": one.select_, "aten.split": one.split_, "aten.split_with_sizes": one.split_,
    "aten.constant_pad_nd": one.pad_, "aten.pad": one.pad_,
    # lookups
    "aten.embedding": one.embedding_, "aten.index": one.index_, "aten.one_hot": one.one_hot_,
    "aten.scatter": one.scatter_, "aten.slice_scatter": one.slice_scatter_, "aten.select_scatter": one.select_scatter_,
    "aten.scatter_add": one.scatter_add_, "aten.histc": one.histogram_, "aten.bincount": one.histogram_,
    "aten.repeat_interleave": one.repeat_interleave_,
    "aten.tril": one.triangle_, "aten.triu": one.triangle_, "aten.einsum": one.einsum_,
    # blocks
    "aten.scaled_dot_product_attention": one.attention_, "aten.cross_entropy_loss": one.cross_entropy_,
    "aten.layer_norm": one.norm_, "aten.rms_norm": one.norm_, "aten._fused_rms_norm": one.norm_,
    "aten.conv1d": one.conv1d_,
    "aten.linalg_solve_triangular": one.solve_triangular_,
    # over a vocabulary in parts (see vocab.py): a part of the numbers gives a part of the sum
    "moec.lookup": einsum("v h, v, ... -> ... h"), "moec.pick": einsum("... v, v, ... k -> ... k"),
    "moec.blocked_logsumexp": einsum("... v -> ... v", carries="none"),
    "moec.logsumexp_pick": einsum("... v, v, ... k -> ... v, ... k, ...", carries="none"),
    "moec.cross_entropy": one.fused_cross_entropy_, "moec.rms_norm": one.norm_,
    "moec.boundary": pointwise("linear"),
    # creation
    **{f"aten.{n}": one.creation_ for n in _CREATION},
    # routers: tokens are independent, except where they compete for places
    "moec.route": one.route_, "moec.route_counted": one.route_counted_,
    "moec.drop": one.drop_, "moec.tally": one.tally_,
    "moec.balance": einsum("... t !e, ... t -> ... e, ... e", carries="none"), "moec.inject": one.inject_,
    # experts (rows are ragged over ep and edp: see experts.py; these lines hold for etp)
    "moec.grouped_mm": einsum("!t k, !e k m, !e -> !t m"),
    "moec.grouped_add": einsum("!t m, !e m, !e -> !t m", carries="none"),
}
# fmt: on
