"""Which dtype an op wants its float operands in when a model computes in bf16: one table, read by ``cast_bf16``.

Classes (``class_of``):

* ``low``: products, and what is as costly and as robust.  Operands are narrowed; accumulation is the kernel's, in fp32.
* ``high``: sums of many numbers, exponentials, statistics of norms, routers, losses.  Operands are widened.
* ``move``: brings values elsewhere and changes none: as narrow as whoever reads them will have them.
* ``mixed``: as they come.
* everything else: the widest of its operands decides; a parameter follows the others.
"""

from __future__ import annotations

from torch import fx

from moec.passes.verify.dialect import meaning


def _ops(namespace: str, names: str) -> frozenset[str]:
    return frozenset(f"{namespace}.{n}" for n in names.split())


WEIGHTED = _ops("aten", "linear conv1d conv2d conv3d convolution embedding") | _ops(
    "moec", "grouped_mm grouped_add lookup"
)
"""With a parameter."""

BETWEEN = _ops("aten", "matmul mm bmm addmm baddbmm einsum dot mv")
"""Products of any two values."""

ATTENTION = _ops("aten", "scaled_dot_product_attention")

STATISTICS = _ops(
    "aten",
    """sum mean var std var_mean prod cumsum cumprod logcumsumexp norm linalg_vector_norm pow rsqrt sqrt reciprocal
    layer_norm native_layer_norm group_norm rms_norm batch_norm linalg_solve_triangular""",
)
EXPONENTIALS = _ops(
    "aten", "softmax _softmax log_softmax _log_softmax logsumexp exp exp2 expm1 log log2 log1p softplus"
)
LOSSES = _ops(
    "aten",
    """cross_entropy_loss nll_loss nll_loss_nd nll_loss_forward binary_cross_entropy binary_cross_entropy_with_logits
    mse_loss l1_loss smooth_l1_loss huber_loss kl_div""",
) | _ops("moec", "blocked_logsumexp pick logsumexp_pick cross_entropy")
ROUTERS = _ops("moec", "route route_counted drop balance tally inject") | _ops("aten", "topk sort")
HIGH = {STATISTICS: "a statistic", EXPONENTIALS: "an exponential", LOSSES: "a loss", ROUTERS: "a router"}

MOVES = _ops(
    "aten",
    """reshape view _unsafe_view expand permute transpose t unsqueeze squeeze slice select split split_with_sizes chunk
    unbind cat stack flatten unflatten repeat repeat_interleave index index_select gather constant_pad_nd pad clone
    detach alias contiguous flip roll narrow""",
) | _ops(
    "moec",
    """s_to_r s_to_i i_to_s r_to_s s_to_s i_to_r all_to_all all_to_all_rows all_to_all_equal sort_chunks permute
    permute_kept permute_aligned slots pad_rows take_rows""",
) | {"_c10d_functional.wait_tensor", "getitem"}  # fmt: skip

MIXED = _ops("moec", "unpermute unpermute_add")
"""They read rows and weights in the dtype of each, and add in fp32."""

RECURRENT = _ops("aten", "linalg_solve_triangular cumsum")
"""A module of its own that sums floats up along the sequence compares products with what they decay by: those of its
products that have no weight stay wide."""


def class_of(node: fx.Node) -> tuple[str, str]:
    """``(class, reason)`` of an op; class is empty for everything else."""
    name = meaning(node)
    if name in WEIGHTED:
        return "low", "a product with weights" if name not in ("aten.embedding", "moec.lookup") else "a table"
    if name in BETWEEN or name in ATTENTION:
        return "low", "attention" if name in ATTENTION else "a product"
    for names, reason in HIGH.items():
        if name in names:
            return "high", reason
    if name in MIXED:
        return "mixed", "adds in fp32"
    return ("move", "as its operand") if name in MOVES else ("", "")
