"""Rules of ops whose dims move or that look dims up: one function an op, from a node to its :class:`Rule`.

Names end in an underscore, because many ops are called like Python's own functions.
"""

from __future__ import annotations

from functools import partial

from torch import fx

from moec.passes.shard.families import einsum
from moec.passes.shard.rule import Dims, Rule, is_one, operands, result_shapes, same_size, shape
from moec.passes.shard.views import moved, view_factors
from moec.program import op_name
from moec.runtime.errors import MoecError
from moec.runtime.route_spec import RouteSpec


def transpose_(node: fx.Node) -> Rule:
    rank = len(shape(operands(node)[0]))
    names = [f"f{i}" for i in range(rank)]
    out = list(names)
    if op_name(node) == "aten.permute":
        out = [names[d % rank] for d in node.args[1]]
    elif op_name(node) == "aten.t":
        out.reverse()
    else:
        a, b = node.args[1] % rank, node.args[2] % rank
        out[a], out[b] = out[b], out[a]
    return Rule((tuple(names),), (tuple(out),), carries="linear")


def unsqueeze_(node: fx.Node) -> Rule:
    names: list[str | None] = [f"f{i}" for i in range(len(shape(operands(node)[0])))]
    out = list(names)
    out.insert(node.args[1] % (len(names) + 1), None)
    return Rule((tuple(names),), (tuple(out),), carries="linear")


def view_(node: fx.Node) -> Rule:
    src, dst = shape(operands(node)[0]), result_shapes(node)[0]
    ins, outs = view_factors(src, dst)
    blocked = frozenset(n for n in ins if n and n.startswith("minor"))
    return Rule((ins,), (outs,), blocked, "linear", moves=partial(moved, src, dst))


def expand_(node: fx.Node) -> Rule:
    s, out = shape(operands(node)[0]), result_shapes(node)[0]
    off = len(out) - len(s)
    created = {f"f{i}" for i, d in enumerate(out) if (i < off or is_one(s[i - off])) and not is_one(d)}
    ops = tuple(None if f"f{off + i}" in created else f"f{off + i}" for i in range(len(s)))
    return Rule((ops,), (tuple(f"f{i}" for i in range(len(out))),), carries="linear", created=frozenset(created))


def cat_(node: fx.Node) -> Rule:
    ops = operands(node)
    rank = len(shape(ops[0]))
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0) % rank
    names = tuple(f"f{i}" for i in range(rank))
    return Rule(tuple(names for _ in ops), (names,), frozenset({f"f{dim}"}), "linear")


def stack_(node: fx.Node) -> Rule:
    ops = operands(node)
    rank = len(shape(ops[0]))
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0) % (rank + 1)
    names: list[str | None] = [f"f{i}" for i in range(rank)]
    out = list(names)
    out.insert(dim, None)
    return Rule(tuple(tuple(names) for _ in ops), (tuple(out),), carries="linear")


def slice_(node: fx.Node) -> Rule:
    rank = len(shape(operands(node)[0]))
    dim = (node.args[1] if len(node.args) > 1 else 0) % rank
    names = tuple(f"f{i}" for i in range(rank))
    blocked = frozenset() if _takes_every_nth(node, shape(operands(node)[0])[dim]) else frozenset({f"f{dim}"})
    return Rule((names,), (names,), blocked, "linear")


def _takes_every_nth(node: fx.Node, size) -> bool:
    """``x[start::step]`` with start < step: a part whose size step divides yields its part of the result (so can
    interleaved gate and up columns be cut)."""
    start, end, step = [*node.args[2:], *[None] * (5 - len(node.args))][-3:]
    if not all(x is None or isinstance(x, int) for x in (start, end, step)) or not isinstance(size, int):
        return False
    whole, step = end is None or end >= size, step or 1
    return whole and step > 1 and 0 <= (start or 0) < step and size % step == 0


def select_(node: fx.Node) -> Rule:
    rank = len(shape(operands(node)[0]))
    dim = node.args[1] % rank
    names = tuple(f"f{i}" for i in range(rank))
    return Rule((names,), (names[:dim] + names[dim + 1 :],), frozenset({f"f{dim}"}), "linear")


def split_parts(node: fx.Node) -> int:
    """The number of *equal* parts that a split makes (1 when they are unequal): a dim packed of that many blocks may be
    sharded block by block."""
    dim = node.args[2] if len(node.args) > 2 else 0
    sizes = [s[dim] for s in result_shapes(node)]
    return len(sizes) if all(isinstance(s, int) and s == sizes[0] for s in sizes) else 1


def split_(node: fx.Node) -> Rule:
    rank = len(shape(operands(node)[0]))
    dim = (node.args[2] if len(node.args) > 2 else 0) % rank
    names = tuple(f"f{i}" for i in range(rank))
    blocked = frozenset() if split_parts(node) > 1 else frozenset({f"f{dim}"})
    return Rule((names,), tuple(names for _ in result_shapes(node)), blocked, "linear")


def pad_(node: fx.Node) -> Rule:
    rank = len(shape(operands(node)[0]))
    padded = {rank - 1 - i // 2 for i, p in enumerate(node.args[1]) if p != 0}
    names = tuple(f"f{i}" for i in range(rank))
    return Rule((names,), (names,), frozenset(f"f{d}" for d in padded))


def index_(node: fx.Node) -> Rule:
    """Advanced indexing: dims without an index are shared, indexed dims blocked, index dims broadcast together."""
    data, indices = node.args[0], list(node.args[1])
    s, out = shape(data), result_shapes(node)[0]
    indices += [None] * (len(s) - len(indices))
    at = [i for i, ix in enumerate(indices) if ix is not None]
    width = max(len(shape(indices[i])) for i in at)
    adjacent = at == list(range(at[0], at[-1] + 1))
    start = at[0] if adjacent else 0
    data_dims: Dims = tuple(f"x{i}" if i in at else f"f{i}" for i in range(len(s)))
    kept: list[str | None] = [f"f{i}" for i in range(len(s)) if i not in at]
    ix_names: list[str | None] = [f"i{j}" for j in range(width)]
    res = kept[:start] + ix_names + kept[start:]
    ops: list[Dims] = [data_dims]
    for i in at:
        w = shape(indices[i])
        off = width - len(w)
        ops.append(
            tuple(None if is_one(d) and not is_one(out[start + off + j]) else f"i{off + j}" for j, d in enumerate(w))
        )
    return Rule(tuple(ops), (tuple(res),), frozenset(f"x{i}" for i in at))


def gather_(node: fx.Node) -> Rule:
    rank = len(shape(operands(node)[0]))
    dim = node.args[1] % rank
    names = tuple(f"f{i}" for i in range(rank))
    # An index may be shorter than the values in any dim; then it says nothing about the rest.
    x, index = (shape(o) for o in operands(node))
    shorter = {f"f{i}" for i in range(rank) if not same_size(x[i], index[i])}
    return Rule(tuple(names for _ in operands(node)), (names,), frozenset({f"f{dim}", *shorter}))


def embedding_(node: fx.Node) -> Rule:
    if any(node.args[3:]):
        raise MoecError(
            "an embedding with scale_grad_by_freq or sparse gradients",
            where=node.meta.get("where", ""),
            way_out="scale_grad_by_freq=False, sparse=False: the frequencies of a batch are not those of its slices",
        )
    ids = tuple(f"i{j}" for j in range(len(shape(node.args[1]))))
    return Rule((("v", "h"), ids), (ids + ("h",),), frozenset({"v"}))


def attention_(node: fx.Node) -> Rule:
    """q [b h s d], k and v [b h t d], mask broadcast to [b h s t]; grouped-query heads share the factor h."""
    # One key/value head for all query heads goes to every rank.
    kv = [None if is_one(shape(o)[1]) and not is_one(shape(node.args[0])[1]) else "h" for o in operands(node)[1:3]]
    qkv: tuple[Dims, ...] = (("b", "h", "s", "d"), ("b", kv[0], "t", "d"), ("b", kv[1], "t", "e"))
    mask: tuple[Dims, ...] = ()
    if len(operands(node)) == 4:
        m = shape(operands(node)[3])
        full = ("b", "h", "s", "t")[4 - len(m) :]
        mask = (tuple(None if is_one(d) else n for n, d in zip(full, m, strict=True)),)
    return Rule(qkv + mask, (("b", "h", "s", "e"),), frozenset({"s", "t", "d", "e"}))


def cross_entropy_(node: fx.Node) -> Rule:
    """logits [n c] or [n c d…]; target [n d…] of class indices, or of probabilities as the logits are.  Reduction sum
    and none are local to n (normalize turns most means into sum / count); a mean that is left needs all of it."""
    logits = shape(node.args[0])
    rest = tuple(f"d{i}" for i in range(len(logits) - 2))
    names = ("n", "c", *rest) if len(logits) > 1 else ("c",)
    each = tuple(n for n in names if n != "c")
    mode = node.args[3] if len(node.args) > 3 else node.kwargs.get("reduction", 1)
    ops: list[Dims] = [names, names if node.args[1].meta["val"].dtype.is_floating_point else each]
    if len(operands(node)) == 3:
        ops.append(("c",))
    return Rule(tuple(ops), (each if mode == 0 else (),), frozenset(names if mode == 1 else "c"))


def fused_cross_entropy_(node: fx.Node) -> Rule:
    """``moec::cross_entropy``: logits [n c], labels [n] -> the loss, [n] or its sum, and [n]."""
    mode = node.args[4]
    return Rule((("n", "c"), ("n",)), (("n",) if mode == 0 else (), ("n",)), frozenset("nc" if mode == 1 else "c"))


def norm_(node: fx.Node) -> Rule:
    """layer_norm and rms_norm: the normalised (trailing) dims are blocked; weight and bias have only those."""
    x = operands(node)[0]
    rank, n = len(shape(x)), len(node.args[1])
    names = tuple(f"f{i}" for i in range(rank))
    tail = names[rank - n :]
    # _fused_rms_norm and moec.rms_norm yield the scale of each row besides
    results = [names, *(names[: rank - n] + (None,) * n for _ in result_shapes(node)[1:])]
    return Rule((names,) + tuple(tail for _ in operands(node)[1:]), tuple(results), frozenset(tail))


def creation_(node: fx.Node) -> Rule:
    return Rule(
        tuple((None,) * len(shape(o)) for o in operands(node)),
        (tuple(f"f{i}" for i in range(len(result_shapes(node)[0]))),),
        created=frozenset(f"f{i}" for i in range(len(result_shapes(node)[0]))),
    )


def triangle_(node: fx.Node) -> Rule:
    """tril and triu look at positions in the last two dims."""
    names = tuple(f"f{i}" for i in range(len(shape(operands(node)[0]))))
    return Rule((names,), (names,), frozenset(names[-2:]), "linear")


def einsum_(node: fx.Node) -> Rule:
    """The equation is the rule: a letter is a factor; letters that the result lacks are summed.  An ellipsis stands for
    dims that broadcast, aligned on the right: factors of their own."""
    left, arrow, right = node.args[0].replace(" ", "").partition("->")
    if not arrow:
        letters = left.replace(".", "").replace(",", "")
        right = "..." * ("..." in left) + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    ops = operands(node)
    terms = [_named_dims(t, len(shape(o))) for t, o in zip(left.split(","), ops, strict=True)]
    out = _named_dims(right, len(result_shapes(node)[0]))
    # A letter that repeats within one operand takes a diagonal.
    twice = {c for t in terms for c in t if t.count(c) > 1}
    dims = [
        tuple(None if is_one(d) else c for c, d in zip(t, shape(o), strict=True))
        for t, o in zip(terms, ops, strict=True)
    ]
    return Rule(tuple(dims), (out,), frozenset(twice), "multilinear")


def _named_dims(term: str, rank: int) -> tuple[str, ...]:
    """``b...d`` of rank 5: b, the last three broadcast dims, d."""
    before, dots, after = term.partition("...")
    spread = rank - len(before) - len(after) if dots else 0
    return (*before, *(f"...{i}" for i in reversed(range(spread))), *after)


def histogram_(node: fx.Node) -> Rule:
    """Counts over all elements: a part of the elements gives a part of the counts."""
    return Rule((tuple(f"f{i}" for i in range(len(shape(operands(node)[0])))),), ((None,),))


def repeat_interleave_(node: fx.Node) -> Rule:
    """Each element so many times in a row: a contiguous part repeats to a contiguous part."""
    names = tuple(f"f{i}" for i in range(len(shape(operands(node)[0]))))
    if len(node.args) < 3 or node.args[2] is None or not isinstance(node.args[1], int):
        return Rule((names,), tuple((None,) for _ in result_shapes(node)), frozenset(names))
    return Rule((names,), (names,), carries="linear")


def scatter_add_(node: fx.Node) -> Rule:
    """self[index] += src along one dim: a part of (index, src) gives a part of the sums, if self is zeros."""
    rank, dim = len(shape(node.args[0])), node.args[1]
    base: Dims = tuple("d" if i == dim % rank else f"f{i}" for i in range(rank))
    added: Dims = tuple("x" if i == dim % rank else f"f{i}" for i in range(rank))
    to, at, source = (shape(o) for o in operands(node))
    shorter = {
        f"f{i}"
        for i in range(rank)
        if i != dim % rank and not (same_size(to[i], at[i]) and same_size(source[i], at[i]))
    }
    if not same_size(source[dim % rank], at[dim % rank]):
        shorter.add("x")
    from_zeros = op_name(node.args[0]) in ("aten.zeros", "aten.new_zeros", "aten.zeros_like")
    return Rule((base, added, added), (base,), frozenset({"d", *shorter} if from_zeros else {"d", "x", *shorter}))


def scatter_(node: fx.Node) -> Rule:
    """self[index] = src along one dim: that dim is blocked, and every other that index does not cover."""
    rank, dim = len(shape(node.args[0])), node.args[1]
    names = tuple(f"f{i}" for i in range(rank))
    ops = operands(node)
    partial = (i for i in range(rank) if any(not same_size(shape(o)[i], shape(ops[0])[i]) for o in ops[1:]))
    return Rule(tuple(names for _ in ops), (names,), frozenset({f"f{dim % rank}", *(f"f{i}" for i in partial)}))


def slice_scatter_(node: fx.Node) -> Rule:
    """x with src written to a slice of one dim, which is blocked; sums of both parts add up."""
    rank = len(shape(node.args[0]))
    dim = (node.args[2] if len(node.args) > 2 else 0) % rank
    names = tuple(f"f{i}" for i in range(rank))
    return Rule((names, names), (names,), frozenset({f"f{dim}"}), "linear")


def select_scatter_(node: fx.Node) -> Rule:
    rank = len(shape(node.args[0]))
    dim = node.args[2] % rank
    names = tuple(f"f{i}" for i in range(rank))
    return Rule((names, names[:dim] + names[dim + 1 :]), (names,), frozenset({f"f{dim}"}), "linear")


def complex_(node: fx.Node) -> Rule:
    """view_as_complex and view_as_real: the last dim of the real side is (re, im)."""
    real = len(result_shapes(node)[0]) > len(shape(operands(node)[0]))
    names = tuple(f"f{i}" for i in range(len(shape(operands(node)[0])) - (not real)))
    if real:
        return Rule((names,), ((*names, None),), carries="linear")
    return Rule(((*names, "pair"),), (names,), frozenset({"pair"}), "linear")


def conv1d_(node: fx.Node) -> Rule:
    """x [n c l], weight [c/groups …]: samples are shared; channels too where each is convolved on its own."""
    x, w = shape(node.args[0]), shape(node.args[1])
    # One input channel a group; the argument ``groups`` is local once the op is sharded, and says less.
    depthwise = is_one(w[1]) and isinstance(x[-2], int) and x[-2] == w[0]
    batch = tuple(f"b{i}" for i in range(len(x) - 2))
    c_in, c_out = ("c", "c") if depthwise else ("i", "o")
    ops = ((*batch, c_in, "l"), (c_out, None if depthwise else "k", "w"), (c_out,))
    blocked = frozenset({"l", "w"} if depthwise else {"l", "w", "i", "k", "o"})
    return Rule(ops[: len(operands(node))], ((*batch, c_out, "l"),), blocked)


def solve_triangular_(node: fx.Node) -> Rule:
    """A [… n m] X = B [… m k]; with left=False, X A = B, the columns of B are rows of X."""
    if node.kwargs.get("left", True):
        return einsum("... !n !m, ... !m k -> ... !n k", carries="none")(node)
    return einsum("... !n !m, ... k !n -> ... k !m", carries="none")(node)


def one_hot_(node: fx.Node) -> Rule:
    names = tuple(f"f{i}" for i in range(len(shape(operands(node)[0]))))
    return Rule((names,), (names + (None,),))


def route_(node: fx.Node) -> Rule:
    """logits [t e], then, each where it is given, bias [e], padding [t] and numbers of tokens [t] -> pairs [t k]."""
    given = zip((("t", "e"), ("e",), ("t",), ("t",)), node.args[:4], strict=True)
    ops: tuple[Dims, ...] = tuple(dims for dims, x in given if x is not None)
    return Rule(ops, (("t", "k"), ("t", "k")), _competing(node.args[4]) | {"e", "k"})


def tally_(node: fx.Node) -> Rule:
    """Choices [t k], then, each where it is given, those kept [t k], logits [t e], padding [t] -> sums over tokens."""
    given = zip((("t", "k"), ("t", "k"), ("t", "e"), ("t",)), node.args[:4], strict=True)
    return Rule(tuple(dims for dims, x in given if x is not None), ((None,),), frozenset({"k", "e"}))


def route_counted_(node: fx.Node) -> Rule:
    """As ``route_``, then which tokens count [t] -> pairs [t k], and sums over tokens."""
    given = zip((("t", "e"), ("e",), ("t",), ("t",), ("t",)), node.args[:5], strict=True)
    ops: tuple[Dims, ...] = tuple(dims for dims, x in given if x is not None)
    results: tuple[Dims, ...] = (("t", "k"), ("t", "k"), (None,), (None,), (None,))
    return Rule(ops, results, _competing(node.args[5]) | {"e", "k"})


def drop_(node: fx.Node) -> Rule:
    return Rule((("t", "k"), ("t", "k")), (("t", "k"), ("t", "k")), _competing(node.args[2]) | {"k"})


def inject_(node: fx.Node) -> Rule:
    names = tuple(f"f{i}" for i in range(len(shape(node.args[0]))))
    return Rule((names, ()), (names,), carries="linear", invariant=frozenset({1}))


def _competing(text: str) -> frozenset[str]:
    """Tokens that compete for places must be in one tensor; those of one dp rank's run are (see capacity.py)."""
    spec = RouteSpec.parse(text)
    alone = spec.capacity_factor is None or (spec.level == "dp_shard" and spec.shards == 1)
    return frozenset() if alone else frozenset({"t"})
