"""Typing rules in the vocabulary of ``spmd_types``: of moec's dialect, and of the few ordinary ops that the
library cannot type.  ``witness.py`` walks graphs with them; ``w`` is the walk.

A rule looks at every operand and gives the type of the result (``rules.NdimWithSpmdType``) or raises SpmdTypeError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import spmd_types as spmd
from spmd_types import rules
from torch import Tensor, fx
from witness_fp8 import FP8, fp8_tiles
from witness_moves import OWNERS, Axis, belong, derived, pack, pack_bytes, spec_of, unpack, unpack_bytes

from moec.program import op_name

# -- moec's ops ------------------------------------------------------------------------------------------------------


def _permute(w, node, x_TH, ids_TK, num_experts):
    rows = w.einsum("th,t_->th", x_TH, ids_TK)
    return rows, w.einsum("t_->_", ids_TK), w.einsum("t_->t_", ids_TK)


def _permute_aligned(w, node, x_TH, ids_TK, *_):
    rows, counts, row_of = _permute(w, node, x_TH, ids_TK, None)
    return rows, w.einsum("th,t_->t_", x_TH, ids_TK), counts, row_of


def _permute_quantised(w, node, x_TH, ids_TK, num_experts, amax, amax_T, recipe, both):
    rows, counts, row_of = _permute(w, node, x_TH, ids_TK, None)
    return *FP8["moec.quantise"](w, node, rows, amax, amax_T, counts, recipe, "rows", both), counts, row_of


def _unpermute(w, node, rows_NH, weights_TK, row_of_TK):
    _, choices = w.dims(row_of_TK)
    if not choices:
        # The rows of this rank's tokens: one label, so that rows which are elsewhere do not fit.
        return w.einsum("th,t_,t_->th", rows_NH, weights_TK, row_of_TK, linear_in=(0,))
    # Each rank adds the choices that it owns: a pending sum over ep, of which the owner is another name.
    rows, rest = w.dims(rows_NH)
    rows_TKH = w.made(rows_NH, [[a for a in rows if a not in choices], [a for a in rows if a in choices], rest])
    weights_TK = w.replicated(weights_TK, choices)
    y = w.einsum("tkh,t_,tk->th", rows_TKH, weights_TK, row_of_TK, linear_in=(0,))
    for owner in OWNERS:
        y = rules.all_reduce(y, w.axes[owner], src=spmd.P, dst=spmd.I)
    return y


def _permute_kept(w, node, x_TH, ids_TK, num_experts):
    """Rows of the experts that live here: of tokens that were sent here, or of tokens that all ranks have, each of
    which keeps the choices that it owns (dim 1 of the ids)."""
    tokens, choices = w.dims(ids_TK)
    x_TH = w.replicated(x_TH, choices)
    typed = w.einsum("th,tk->tkh", x_TH, ids_TK)
    order = list(w.axes.values())
    rows = w.made(typed, [sorted(tokens + choices, key=order.index), w.dims(typed)[2]])
    return rows, _own_counts(w, ids_TK, tokens + choices), w.einsum("tk->tk", ids_TK)


def _own_counts(w, x, cut: list[Axis]):
    """Counts of rows that ``cut`` cuts: over ep each rank has those of its own experts, over others addends."""
    ours = {w.axes[a] for a in (*w.mesh.role("ep"), *OWNERS)}
    counts, local = rules.NdimWithSpmdType(1), dict(spmd.get_local_type(x))
    local |= {a: spmd.P for a in cut if a not in ours}
    spmd.assert_type(counts, local, partition_spec=spec_of([[a for a in cut if a in ours]]))
    return counts


def _split_tokens(w, node, x, count, lead, blocks):
    """Each rank's own tokens in chunks: what cut the tokens' dims cuts the rows of a chunk."""
    typed, order = w.einsum("...->...", x, linear_in=(0,)), list(w.axes.values())
    rows = sorted((a for dim in w.dims(typed)[:lead] for a in dim), key=order.index)
    return [w.made(typed, [rows, *[[] for _ in range(lead - 1)], *w.dims(typed)[lead:]])] * count


def _join_tokens(w, node, chunks, sizes, blocks):
    """The way back; which of the tokens' dims an axis cuts is no longer in the rows, but is recorded."""
    every = tuple(range(len(chunks)))
    typed = w.einsum(",".join(["..."] * len(chunks)) + "->...", *chunks, linear_in=(every,))
    rows, *rest = w.dims(typed)
    if len(sizes) == 1:
        return typed
    cut: list[list[Axis]] = [[], []]
    for name in w.mesh.names:
        t = node.meta["types"][name]
        if (w.axes[name] in rows) != (t.kind == "S" and t.dim < 2):
            raise spmd.SpmdTypeError(f"{name} cuts the rows of the chunks or the joined tokens, not both")
        if w.axes[name] in rows:
            cut[t.dim].append(w.axes[name])
    return w.made(typed, [*cut, *rest[1:]])


def _slots(w, node, x_TH, ids_TK, *_):
    return w.einsum("th,t_->th", x_TH, ids_TK), w.einsum("t_->t_", ids_TK)


def _equal_counts(w, node, x_NH, num_experts):
    return _own_counts(w, x_NH, w.dims(x_NH)[0])


def _own_ids(w, node, ids_TK, numbers_N):
    if not w.dims(numbers_N)[0]:
        raise spmd.SpmdTypeError("the numbers of all experts are nobody's own")
    rules.ignore(numbers_N)
    typed: Any = w.einsum("tk->tk", ids_TK)
    shared = [a for a in w.dims(numbers_N)[0] if derived(ids_TK, a)[0] in "IR"]
    for a in [*shared, *(w.axes[o] for o in OWNERS)] if shared else []:
        typed = rules.convert(typed, a, src=spmd.get_axis_local_type(typed, a), dst=spmd.S(1))
    return typed


def _destinations(w, node, ids_TK, *_):
    return w.einsum("t_->t_", ids_TK)


def _place_rows(w, node, x_TC, row_of_TD, *_):
    return w.einsum("tc,t_->tc", x_TC, row_of_TD)


def _add_rows(w, node, y_NC, row_of_TD):
    return w.einsum("tc,t_->tc", y_NC, row_of_TD, linear_in=(0,))


def _grouped_mm(w, node, x_NK, weight_EKM, counts_E):
    w.check_counts(counts_E, weight_EKM)
    return w.as_rows(w.einsum("enk,ekm->enm", w.by_expert(x_NK), weight_EKM, linear_in=(0, 1)))


def _grouped_add(w, node, x_NM, bias_EM, counts_E):
    w.check_counts(counts_E, bias_EM)
    return w.as_rows(w.einsum("enm,em->enm", w.by_expert(x_NM), bias_EM, linear_in=((0, 1),)))


def _experts_rows(w, node, rows_NK, counts_E, w_in, b_in, w_out, b_out, body):
    """Product, bias, a function of all of it, product, bias; and the first products side by side."""
    h = [_grouped_mm(w, node, rows_NK, weight, counts_E) for weight in w_in]
    h = [_grouped_add(w, node, x, b, counts_E) for x, b in zip(h, b_in, strict=True)] if b_in else h
    beside = w.einsum(",".join(["nm"] * len(h)) + "->nm", *h)
    y = _grouped_mm(w, node, beside, w_out, counts_E)
    return _grouped_add(w, node, y, b_out, counts_E) if b_out is not None else y, beside


def _fp8_grouped_act(w, node, x, weights, biases, counts, *rest):
    x_q, x_s, w_q, w_s, x_qT, x_sT, w_qT, w_sT, _, recipe, both = rest
    h = []
    for i, weight in enumerate(weights):
        one = (x_q, x_s, w_q[i], w_s[i], x_qT, x_sT, w_qT[i], w_sT[i], None, recipe, False)
        h.append(FP8["moec.fp8_grouped_mm"](w, node, x, weight, counts, *one)[0])
        # Where ranks share a gradient's tile, a product by itself would have had taps.
        if any(fp8_tiles(w, h[-1], recipe, t) for t in (False, True)):
            raise spmd.SpmdTypeError("ranks have parts of a tile of the gradient, and no maximum over them")
    h = [_grouped_add(w, node, y, b, counts) for y, b in zip(h, biases, strict=True)] if biases else h
    beside = w.einsum(",".join(["nm"] * len(h)) + "->nm", *h)
    return *FP8["moec.quantise"](w, node, beside, None, None, counts, recipe, "rows", both), beside


def _experts(w, node, x_TH, ids_TK, weights_TK, *weights, **_):
    *weights, kept = weights
    rows, counts, row_of = (_permute_kept if kept else _permute)(w, node, x_TH, ids_TK, None)
    y, h = _experts_rows(w, node, rows, counts, *weights)
    # The number of each pair's row is typed like its id; of the two only the id is a value without a gradient.
    return _unpermute(w, node, y, weights_TK, ids_TK), h, row_of, counts


def _sort_chunks(w, node, x_NH, counts_RE, inverse):
    if any(derived(x_NH, w.axes[o]) != ("S", 0) or derived(counts_RE, w.axes[o]) != ("S", 1) for o in OWNERS):
        raise spmd.SpmdTypeError("only rows of the experts that live here can be sorted by their counts")
    rules.ignore(counts_RE)
    return w.einsum("nh->nh", x_NH, linear_in=(0,))


def _own_rows(w, node, x, *_):
    return w.einsum("...->...", x, linear_in=(0,))


def _carry(w, node, carrier, data, *_):
    """What the op that moved the bytes would make of rows like the carrier."""
    move = node.args[1]
    if op_name(move) == "getitem":
        move = move.args[0]
    args = fx.node.map_arg(move.args[1:], w.env.__getitem__)
    typed = MOEC[op_name(move)](w, move, carrier, *args)
    typed = typed[0] if isinstance(typed, tuple) else typed
    belong(w, data, typed)
    return typed


def _carry_home(w, node, carrier, data, *_):
    belong(w, data, carrier)
    return w.einsum("...->...", carrier, linear_in=(0,))


def _lookup(w, node, table_VH, numbers_V, ids, *_):
    # A part of the numbers finds a part of the ids: addends of what all find.
    return w.einsum("vh,v,...->...h", table_VH, numbers_V, ids, linear_in=(0,))


def _pick(w, node, x_V, numbers_V, ids_K, *_):
    return w.einsum("...v,v,...k->...k", x_V, numbers_V, ids_K, linear_in=(0,))


def _blocked_logsumexp(w, node, x_V, *_):
    return w.einsum("...v->...v", x_V)


def _route(w, node, logits_TE, bias_E, valid_T, token_T, spec):
    each = zip(("t_", "_", "t", "t"), (logits_TE, bias_E, valid_T, token_T), strict=True)
    given = [(dims if _alone(spec) else "_" * len(dims), x) for dims, x in each if x is not None]
    out = w.einsum(",".join(dims for dims, _ in given) + ("->t_" if _alone(spec) else "->__"), *(x for _, x in given))
    return out, out


def _drop(w, node, weights_TK, ids_TK, spec):
    out = w.einsum("t_,t_->t_" if _alone(spec) else "__,__->__", weights_TK, ids_TK)
    return out, out


def _balance(w, node, logits_NTE, valid_NT, *_):
    lead = "n" * (logits_NTE.ndim - 2)
    given = (logits_NTE,) if valid_NT is None else (logits_NTE, valid_NT)
    out = w.einsum(f"{lead}t_" + f",{lead}t" * (len(given) - 1) + f"->{lead}_", *given)
    return out, out


def _inject(w, node, x, loss):
    for a in w.axes.values():
        have = spmd.get_axis_local_type(loss, a)
        if have is not spmd.I and (have is not spmd.R or loss.requires_grad):
            raise spmd.SpmdTypeError(f"the loss is {have} on {a}, and every rank would state its gradient in full")
    rules.ignore(loss)
    return w.einsum("...->...", x, linear_in=(0,))


def _tally(w, node, *xs):
    given = [x for x in xs if isinstance(x, Tensor)]
    return w.einsum(",".join("t" + "_" * (x.ndim - 1) for x in given) + "->_", *given)


def _route_counted(w, node, logits_TE, bias_E, valid_T, token_T, counted_T, spec, balanced):
    pairs, _ = _route(w, node, logits_TE, bias_E, valid_T, token_T, spec)
    given = [x for x in (logits_TE, valid_T, token_T, counted_T) if x is not None]
    terms = ",".join("t" + "_" * (x.ndim - 1) for x in given)
    sums = w.einsum((terms if _alone(spec) else terms.replace("t", "_")) + "->_", *given)
    return pairs, pairs, sums, sums, sums


def _unpermute_add(w, node, addends, rows_NH, weights_TK, row_of_TK):
    y = _unpermute(w, node, rows_NH, weights_TK, row_of_TK)
    each = tuple(range(1 + len(addends)))
    return w.einsum(",".join(["th"] * len(each)) + "->th", y, *addends, linear_in=(each,))


def _logsumexp_pick(w, node, x_V, numbers_V, ids_1, blocks):
    total = w.einsum("...v->...", x_V, linear_in=(0,))
    return _blocked_logsumexp(w, node, x_V), _pick(w, node, x_V, numbers_V, ids_1), total


def _cross_entropy(w, node, logits_NV, labels_N, ignore, smoothing, reduction):
    lse = w.einsum("n_,n->n", logits_NV, labels_N)
    each = {0: "n_,n->n", 1: "__,_->", 2: "n_,n->"}[reduction]
    return w.einsum(each, logits_NV, labels_N), lse


def _rms_norm(w, node, x, shape, weight_H, eps):
    return w.einsum("..._,_->..._", x, weight_H), w.einsum("..._->..._", x)


def _alone(spec: str) -> bool:
    """Whether no token competes with one that may be elsewhere."""
    fields = json.loads(spec)
    return "capacity_factor" not in fields or (fields.get("level") == "dp_shard" and "shards" not in fields)


MOEC: dict[str, Callable] = {
    "moec.permute": _permute, "moec.unpermute": _unpermute, "moec.grouped_mm": _grouped_mm,
    "moec.grouped_add": _grouped_add, "moec.experts": _experts, "moec.experts_rows": _experts_rows,
    "moec.split_tokens": _split_tokens, "moec.join_tokens": _join_tokens,
    "moec.sort_chunks": _sort_chunks, "moec.pad_rows": _own_rows,
    "moec.take_rows": _own_rows, "moec.lookup": _lookup, "moec.pick": _pick,
    "moec.permute_kept": _permute_kept, "moec.own_ids": _own_ids,
    "moec.slots": _slots, "moec.swap_chunks": _own_rows, "moec.equal_counts": _equal_counts,
    "moec.destinations": _destinations, "moec.place_rows": _place_rows, "moec.add_rows": _add_rows,
    "moec.blocked_logsumexp": _blocked_logsumexp, "moec.boundary": _own_rows, "moec.route": _route, "moec.drop": _drop,
    "moec.balance": _balance, "moec.inject": _inject, "moec.tally": _tally,
    "moec.route_counted": _route_counted, "moec.unpermute_add": _unpermute_add,
    "moec.fp8_grouped_act": _fp8_grouped_act, "moec.permute_aligned": _permute_aligned,
    "moec.permute_quantised": _permute_quantised,
    "moec.carry_home": _carry_home,
    **dict.fromkeys(("moec.carry_rows", "moec.carry_sorted", "moec.carry_swapped", "moec.carry_aligned"), _carry),
    "moec.logsumexp_pick": _logsumexp_pick, "moec.cross_entropy": _cross_entropy,
    "moec.rms_norm": _rms_norm,
    "moec.pack": pack, "moec.pack_empty": pack, "moec.unpack": unpack,
    "moec.pack_bytes": pack_bytes, "moec.unpack_bytes": unpack_bytes, **FP8,
}  # fmt: skip


# -- what the library cannot say -------------------------------------------------------------------------------------


def _parts(w, node, x, *_, **__):
    """A packed dim cut in its parts, each of which keeps its shard."""
    one = w.einsum("...->...", x, linear_in=(0,))
    return [one] * len(node.meta["val"]) if isinstance(node.meta["val"], (tuple, list)) else one


def _reshape(w, node, x, shape):
    """DTensor refuses to split a sharded dim in several, and knows no packed one.  Dims fall into groups of equal
    (global) size.  A shard cuts a group at a place: the product of the dims before its own, times the blocks (parts)
    each of which it cuts; in the result it cuts the last dim that begins at or before this place, in each of the blocks
    in between."""
    ranks = w.mesh.size(w.mesh.role("dp"))
    sizes = [[w.size(s, ranks) for s in n.meta["val"].shape] for n in (node.args[0], node)]
    source, recorded = node.args[0].meta.get("types"), node.meta["types"]
    names = {w.axes[a]: a for a in w.mesh.names}
    old, new = ([i for i, s in enumerate(side) if s != 1] for side in sizes)
    dims, out = w.dims(x), [[] for _ in sizes[1]]
    while old and new:
        left, right = [old.pop(0)], [new.pop(0)]
        a, b = sizes[0][left[0]], sizes[1][right[0]]
        while a != b:
            if a < b:
                left.append(old.pop(0))
                a *= sizes[0][left[-1]]
            else:
                right.append(new.pop(0))
                b *= sizes[1][right[-1]]
        for n, i in enumerate(left):
            for axis in dims[i]:
                parts = w.parts(source, names.get(axis))
                place = math.prod(sizes[0][d] for d in left[:n]) * parts
                begins = [math.prod(sizes[1][d] for d in right[:k]) for k in range(len(right))]
                k = max(k for k, begin in enumerate(begins) if begin <= place)
                if place % begins[k]:
                    raise spmd.SpmdTypeError(f"reshape to {shape} would interleave the shards of dim {i}")
                if (have := w.parts(recorded, names.get(axis))) != place // begins[k]:
                    raise spmd.SpmdTypeError(f"{axis} cuts each of {place // begins[k]} blocks, recorded are {have}")
                out[right[k]].append(axis)
    return w.made(w.einsum("...->...", x, linear_in=(0,)), out)


def _attention(w, node, q, k, v, mask=None, *_, **__):
    def term(x: Tensor) -> str:
        heads = "h" if x.shape[-3] > 1 or q.shape[-3] == 1 else "_"
        return ("b" if x.shape[0] == q.shape[0] else "_") + heads + "__"

    terms, values = [term(x) for x in (q, k, v)], [q, k, v]
    if mask is not None:
        full = ["b", "h", "_", "_"][4 - mask.ndim :]
        terms.append("".join("_" if n == 1 else f for f, n in zip(full, mask.shape, strict=True)))
        values.append(mask)
    return w.einsum(",".join(terms) + "->bh__", *values)


def _linear(w, node, x, weight, bias=None):
    """DTensor has no strategy for four dims, or a middle one of size 1."""
    out = w.einsum("...k,nk->...n", x, weight, linear_in=(0, 1))
    return out if bias is None else w.einsum("...n,n->...n", out, bias, linear_in=((0, 1),))


def _conv1d(w, node, x, weight, bias=None, *_, **__):
    """DTensor would exchange halos, with a process group."""
    each = weight.shape[1] == 1 and x.shape[-2] == weight.shape[0]  # every channel by itself
    batch, c = "n" * (x.ndim - 2), "c" if each else "_"
    out = w.einsum(f"{batch}{c}_,{c}__->{batch}{c}_", x, weight)
    return out if bias is None else w.einsum(f"{batch}{c}_,{c}->{batch}{c}_", out, bias)


def _expand(w, node, x, *_):
    """A dim that is made can be made in parts: every rank's copies are a part of all copies."""
    typed = w.einsum("...->...", x, linear_in=(0,))
    new = node.meta["val"].ndim - x.ndim
    typed = w.made(typed, [[] for _ in range(new)] + w.dims(typed))
    was = node.args[0].meta["val"].shape  # the whole size: a shard of a dim may have size 1
    made = [i for i in range(node.meta["val"].ndim) if i < new or was[i - new] == 1]
    for a, t in node.meta["types"].items():
        if t.kind == "S" and t.dim in made:
            have = spmd.get_axis_local_type(x, w.axes[a])
            if have is not spmd.R and x.requires_grad:
                raise spmd.SpmdTypeError(f"copies of {have} made in parts would owe a gradient over {a}")
            typed = rules.convert(typed, w.axes[a], src=have, dst=spmd.S(t.dim))
    return typed


def _cast(w, node, x, **to):
    """The library takes a cast between floats for non-linear."""
    floats = x.dtype.is_floating_point and node.meta["val"].dtype.is_floating_point
    return w.einsum("...->...", x, linear_in=(0,) if floats else ())


PACKED: dict[str, Callable] = dict.fromkeys(("aten.split", "aten.split_with_sizes", "aten.slice"), _parts)
LACKING: dict[str, Callable] = {
    "aten.reshape": _reshape, "aten.scaled_dot_product_attention": _attention, "aten.expand": _expand,
    "aten.linear": _linear, "aten.conv1d": _conv1d, "aten._to_copy": _cast,
}  # fmt: skip
