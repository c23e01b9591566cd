"""normalize: one spelling for every thing that sharding looks at.

Contract
    requires   captured
    provides   normalized
    preserves  values (to rounding: a mean loss becomes a sum over a count)
    never      changes a placeholder, an output or a MoE op

Rewrites
    1. Drop what only guards or copies: metadata asserts, clones, aliases, no-op slices, casts to the same dtype,
       ``x + 0``; ``type_as`` becomes a cast.
    2. ``view``, ``_unsafe_view``, ``squeeze``, ``(un)flatten`` become ``reshape``: whether a view is possible depends
       on strides, which sharding changes.  ``pad`` becomes ``constant_pad_nd``, ``chunk`` becomes ``split``;
       parts written into an empty tensor become a ``cat``.
    3. An index by ``arange`` over the first dim is a batch dim, not a lookup: ``x[arange(B)[:, None], j]`` with j free
       of b becomes ``x[:, j]``, so that the batch can be sharded there.
    4. A fused projection of different numbers of heads becomes one a part (``fused.py``).
    5. A mean that runs over the batch becomes sum / count, the mean of a loss too: local sums and local counts add
       up over ranks, whatever each rank's share (ignored labels, other lengths) is.  What takes an entry at a label
       becomes ``moec.pick`` (``losses.py``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from moec.passes import losses
from moec.passes.contract import Pass, PassContract
from moec.passes.fused import split_projection
from moec.passes.rewrite import fake as _fake
from moec.passes.rewrite import new as _new
from moec.passes.rewrite import replace as _replace
from moec.plan import Plan
from moec.program import Program, op_name
from moec.runtime.errors import MoecError
from moec.runtime.torch_compat import expr

aten = torch.ops.aten
INT_MAX = 2**63 - 1


def _run(program: Program, plan: Plan) -> Program:
    graph = program.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        rewrite = _REWRITES.get(op_name(node))
        if rewrite is not None:
            with graph.inserting_before(node):
                rewrite(program, node)
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):  # now that views have one spelling
        with graph.inserting_before(node):
            split_projection(program, node)
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    graph.lint()
    program.module.recompile()
    return program


# -- 1


def _drop(program: Program, node: fx.Node) -> None:
    if node.users:
        raise MoecError(f"{node.name} ({op_name(node)}) has users", where=node.meta.get("where", ""))
    node.graph.erase_node(node)


def _forward(program: Program, node: fx.Node) -> None:
    _replace(node, node.args[0])


def _slice(program: Program, node: fx.Node) -> None:
    args = list(node.args) + [0, None, None, 1][len(node.args) - 1 :]
    x, dim, start, end, step = args[:5]
    same = node.meta["val"].shape[dim] == x.meta["val"].shape[dim] if end != INT_MAX and end is not None else True
    if start in (0, None) and step == 1 and (end in (None, INT_MAX) or same is True):
        _replace(node, x)


def _cast(program: Program, node: fx.Node) -> None:
    if (
        node.meta["val"].dtype == node.args[0].meta["val"].dtype
        and node.meta["val"].device == node.args[0].meta["val"].device
    ):
        _replace(node, node.args[0])


def _type_as(program: Program, node: fx.Node) -> None:
    """The other tensor is only asked for its dtype (and device)."""
    x, other = (a.meta["val"] for a in node.args[:2])
    if x.dtype == other.dtype and x.device == other.device:
        _replace(node, node.args[0])
    else:
        kwargs = {"dtype": other.dtype} | ({"device": other.device} if x.device != other.device else {})
        _replace(node, _new(node, aten._to_copy.default, (node.args[0],), node.meta["val"], **kwargs))


def _add(program: Program, node: fx.Node) -> None:
    x, other = node.args[:2]
    if isinstance(other, int) and other == 0 and x.meta["val"].dtype == node.meta["val"].dtype:
        _replace(node, x)


# -- 2


def _reshape(program: Program, node: fx.Node) -> None:
    x, shape = node.args[0], list(node.meta["val"].shape)
    if [expr(s) for s in x.meta["val"].shape] == [expr(s) for s in shape]:
        _replace(node, x)
        return
    if op_name(node) in ("aten.flatten", "aten.unflatten", "aten.squeeze"):
        # One -1 at most; sizes that remain symbolic are sizes of x (flatten merges into one dim, squeeze into none).
        symbolic = [s for s in shape if not isinstance(s, int)]
        merged = next(
            (s for s in symbolic if all(expr(s) != expr(d) for d in x.meta["val"].shape)),
            symbolic[0] if symbolic else None,
        )
        shape = [s if isinstance(s, int) else -1 if s is merged else _size_of(node, x, s) for s in shape]
    else:
        shape = list(node.args[1])
    _replace(node, _new(node, aten.reshape.default, (x, shape), node.meta["val"]))


def _size_of(node: fx.Node, x: fx.Node, size) -> fx.Node:
    dim = next(d for d, s in enumerate(x.meta["val"].shape) if expr(s) == expr(size))
    return _new(node, aten.sym_size.int, (x, dim), x.meta["val"].shape[dim])


def _pad(program: Program, node: fx.Node) -> None:
    mode = node.args[2] if len(node.args) > 2 else "constant"
    if mode != "constant":
        return
    value = node.args[3] if len(node.args) > 3 and node.args[3] is not None else 0.0
    _replace(node, _new(node, aten.constant_pad_nd.default, (node.args[0], node.args[1], value), node.meta["val"]))


def _chunk(program: Program, node: fx.Node) -> None:
    dim = node.args[2] if len(node.args) > 2 else 0
    sizes = [v.shape[dim] for v in node.meta["val"]]
    if all(isinstance(s, int) for s in sizes):
        _replace(node, _new(node, aten.split.Tensor, (node.args[0], sizes[0], dim), node.meta["val"]))


def _slice_scatter(program: Program, node: fx.Node) -> None:
    """Parts written side by side until they cover a dim are a cat of them; what was there before is not looked at."""
    args: list = list(node.args) + [0, None, None, 1][len(node.args) - 2 :]
    _, part, at, start, end, step = args
    if start in (0, None) and end in (None, INT_MAX) and step == 1:  # all of a dim of whatever size
        if part.meta["val"].dtype == node.meta["val"].dtype:
            _replace(node, part)
        return
    rank = node.meta["val"].ndim
    parts: dict[int, tuple[int, fx.Node]] = {}
    dim, base = None, node
    while base.op == "call_function" and op_name(base) == "aten.slice_scatter":
        args = list(base.args) + [0, None, None, 1][len(base.args) - 2 :]
        _, part, at, start, end, step = args
        size = base.meta["val"].shape[at]
        numbers = all(isinstance(x, int) for x in (size, start or 0, end or 0))
        if dim not in (None, at % rank) or step != 1 or not numbers or part.meta["val"].dtype != node.meta["val"].dtype:
            return
        start, end, dim = start or 0, size if end is None else min(end, size), at % rank
        if not 0 <= start < end or any(s < end and start < e for s, (e, _) in parts.items()):
            return
        parts[start] = (end, part)
        covered = 0
        while covered in parts:
            covered = parts[covered][0]
        if covered == size:
            ordered = [p for _, (_, p) in sorted(parts.items())]
            _replace(node, _new(node, aten.cat.default, (ordered, dim), node.meta["val"]))
            return
        base = base.args[0]


# -- 3


def _index(program: Program, node: fx.Node) -> None:
    data, indices = node.args[0], list(node.args[1])
    if len(indices) < 2 or any(i is None for i in indices):
        return
    width = max(i.meta["val"].ndim for i in indices)
    if width == 1 and data.meta["val"].ndim == len(indices) == 2:
        if indices[0].meta["val"].ndim == 1 and _is_iota(indices[0], indices[0].meta["val"].shape[0]):
            losses.at_labels(program, node, data, *indices)
        return
    if not _is_iota(indices[0], data.meta["val"].shape[0]):
        return
    first = indices[0].meta["val"].shape
    if len(first) != width or any(s != 1 for s in first[1:]) or width < 2:
        return
    rest = indices[1:]
    if any(
        i.meta["val"].ndim == width and not (isinstance(i.meta["val"].shape[0], int) and i.meta["val"].shape[0] == 1)
        for i in rest
    ):
        return
    # x[:, j] has shape [B, *j.shape]; j has a leading 1 where the batch was, if it is as wide as the index was.
    trimmed = []
    for i in rest:
        if i.meta["val"].ndim == width:
            i = _new(node, aten.select.int, (i, 0, 0), _fake(lambda t: t.select(0, 0), i))
        trimmed.append(i)
    out = _new(node, aten.index.Tensor, (data, [None, *trimmed]), node.meta["val"])
    _replace(node, out)


def _is_iota(node: fx.Node, length) -> bool:
    """arange(length), seen through unsqueeze and no-op slices."""
    while node.op == "call_function" and op_name(node) in ("aten.unsqueeze", "aten.reshape"):
        node = node.args[0]
    if (
        node.op != "call_function"
        or op_name(node) != "aten.arange"
        or node.kwargs.get("step", 1) != 1
        or len(node.args) > 1
    ):
        return False
    return bool(expr(node.meta["val"].shape[0]) == expr(length))


# -- 4


def _carries_batch(program: Program, size) -> bool:
    return any(str(s) in program.batch_symbols for s in expr(size).free_symbols)


def _mean(program: Program, node: fx.Node) -> None:
    x = node.args[0]
    shape = x.meta["val"].shape
    dims = node.args[1] if len(node.args) > 1 else None
    over = range(len(shape)) if not dims else [d % len(shape) for d in dims]
    if not any(_carries_batch(program, shape[d]) for d in over) or node.kwargs.get("dtype") is not None:
        return
    rest = (list(over), *(node.args[2:3] or (False,)))
    total = _new(node, aten.sum.dim_IntList, (x, *rest), node.meta["val"])
    ones = _new(node, aten.ones_like.default, (x,), _fake(torch.ones_like, x))
    count = _new(node, aten.sum.dim_IntList, (ones, *rest), node.meta["val"])
    _replace(node, _new(node, aten.div.Tensor, (total, count), node.meta["val"]))


def _elementwise_loss(program: Program, node: fx.Node) -> None:
    """mse_loss and the like: the loss of every element, then its mean or sum."""
    at = 4 if op_name(node) == "aten.binary_cross_entropy_with_logits" else 2
    reduction = node.args[at] if len(node.args) > at else node.kwargs.get("reduction", 1)
    if reduction == 0:
        return
    args = [*node.args, *[None] * (at - len(node.args))][:at] + [0, *node.args[at + 1 :]]
    kwargs = {k: v for k, v in node.kwargs.items() if k != "reduction"}
    x, target = node.args[:2]
    each = _new(node, node.target, tuple(args), _fake(lambda a, b: a + b, x, target), **kwargs)
    if reduction == 2:
        _replace(node, _new(node, aten.sum.default, (each,), node.meta["val"]))
        return
    mean = _new(node, aten.mean.default, (each,), node.meta["val"])
    _replace(node, mean)
    _mean(program, mean)


def _broadcast(program: Program, node: fx.Node) -> None:
    """broadcast_tensors: each result is its operand, expanded where it is smaller."""
    sources = node.args[0]
    for item in list(node.users):
        x = sources[item.args[1]]
        size = item.meta["val"].shape
        if [expr(s) for s in x.meta["val"].shape] != [expr(s) for s in size]:
            x = _new(item, aten.expand.default, (x, [_some_size(node, sources, s) for s in size]), item.meta["val"])
        _replace(item, x)
    node.graph.erase_node(node)


def _some_size(node: fx.Node, sources: list[fx.Node], size):
    if isinstance(size, int):
        return size
    x = next(x for x in sources if any(expr(s) == expr(size) for s in x.meta["val"].shape))
    return _size_of(node, x, size)


_REWRITES: dict[str, Callable[[Program, fx.Node], None]] = {
    "aten._assert_tensor_metadata": _drop, "aten._assert_scalar": _drop, "aten.sym_constrain_range_for_size": _drop,
    "aten.clone": _forward, "aten.alias": _forward, "aten.lift_fresh_copy": _forward, "aten.contiguous": _forward,
    "aten.slice": _slice, "aten._to_copy": _cast, "aten.type_as": _type_as, "aten.add": _add,
    "aten.view": _reshape, "aten._unsafe_view": _reshape, "aten.reshape": _reshape,
    "aten.squeeze": _reshape, "aten.flatten": _reshape, "aten.unflatten": _reshape,
    "aten.pad": _pad, "aten.chunk": _chunk, "aten.slice_scatter": _slice_scatter,
    "aten.index": _index,
    "aten.mean": _mean, "aten.broadcast_tensors": _broadcast, **losses.REWRITES,
    "aten.mse_loss": _elementwise_loss, "aten.l1_loss": _elementwise_loss, "aten.smooth_l1_loss": _elementwise_loss,
    "aten.huber_loss": _elementwise_loss, "aten.binary_cross_entropy_with_logits": _elementwise_loss,
}  # fmt: skip

CONTRACT = PassContract(
    name="normalize",
    requires=frozenset({"captured"}),
    provides=frozenset({"normalized"}),
    conflicts_with=frozenset({"sharded"}),
)
normalize = Pass(CONTRACT, _run)
