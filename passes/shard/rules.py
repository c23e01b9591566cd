"""Factor rules: how each op's dims relate, and so how sharding passes through it.  One line an op.

A *factor* is a loop of the op.  ``linear: "... k, n k -> ... n"`` has the factors of the leading dims, ``k`` and
``n``: an operand that is sharded on a factor's dim makes the result sharded on that factor's dim, and a sharded factor
that the result lacks (``k``) makes the result a pending sum (P).  A *blocked* factor cannot be sharded: the operand is
gathered first.  Size-1 dims that broadcast have no factor.

``carries`` says how pending sums pass: ``linear`` ops map P operands to a P result when all operands are P,
``multilinear`` ops when exactly one is and the others are R, ``first`` ops (a / b) when the first one is.

An op without a rule is an error that names the op and its module, never a silent gather.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx

from moec.passes.shard.views import view_factors
from moec.program import op_name
from moec.runtime.errors import MoecError
from moec.runtime.torch_compat import expr

Dims = tuple[str | None, ...]
aten = torch.ops.aten


@dataclass(frozen=True)
class Rule:
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    blocked: frozenset[str] = field(default_factory=frozenset)
    carries: str = "none"
    created: frozenset[str] = field(default_factory=frozenset)
    """Factors that the op itself makes (an expanded dim): free to be sharded, no operand has them."""
    added: frozenset[int] = field(default_factory=frozenset)
    """Operands that are added to the result (a bias): P where it is P, so that they count once."""


def operands(node: fx.Node) -> list[fx.Node]:
    """The tensor operands of a node, one entry a slot (a value used twice is there twice), in argument order."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda n: found.append(n))
    return [n for n in found if isinstance(n.meta.get("val"), torch.Tensor)]


def rule_for(node: fx.Node) -> Rule:
    """The factor rule of a ``call_function`` node, for its recorded (global) shapes."""
    maker = _RULES.get(op_name(node))
    if maker is None:
        raise MoecError(
            f"no sharding rule for {node.target} (node {node.name})",
            where=node.meta.get("where", ""),
            way_out="add one line to the table in passes/shard/rules.py, or keep this module on plans with dp only "
            "if the op is local to a sample",
        )
    return maker(node)


def has_rule(node: fx.Node) -> bool:
    return op_name(node) in _RULES


# -- building blocks ------------------------------------------------------------------------------------------------


def shape(node: fx.Node) -> tuple:
    return tuple(node.meta["val"].shape)


def _result_shapes(node: fx.Node) -> list[tuple]:
    val = node.meta["val"]
    return [tuple(v.shape) for v in (val if isinstance(val, (tuple, list)) else [val])]


def _same(a, b) -> bool:
    return bool(expr(a) == expr(b))


def _is_one(size) -> bool:
    return isinstance(size, int) and size == 1


def pointwise(carries: str = "none") -> Callable[[fx.Node], Rule]:
    """Broadcast: dims are aligned from the right; every factor is shared."""

    def make(node: fx.Node) -> Rule:
        out = _result_shapes(node)[0]
        rank = len(out)
        ops = []
        for o in operands(node):
            s = shape(o)
            off = rank - len(s)
            ops.append(
                tuple(None if _is_one(d) and not _is_one(out[off + i]) else f"f{off + i}" for i, d in enumerate(s))
            )
        how = carries
        if carries == "linear" and len(ops) == 1 and len([a for a in node.args[:2] if not isinstance(a, fx.Node)]) == 1:
            other = node.args[0] if isinstance(node.args[1], fx.Node) else node.args[1]
            how = "linear" if other == 0 else "none"  # P + constant would add the constant once a rank
        return Rule(tuple(ops), (tuple(f"f{i}" for i in range(rank)),), carries=how)

    return make


def like(node: fx.Node) -> Rule:
    """zeros_like and friends: the operand is metadata, the result is laid out as it is."""
    dims = tuple(f"f{i}" for i in range(len(shape(operands(node)[0]))))
    return Rule((dims,), (dims,), carries="none")


def einsum(spec: str, carries: str = "multilinear", added: int | None = None) -> Callable[[fx.Node], Rule]:
    """A rule written as dims: ``"... k, n k -> ... n"``.  ``!x`` blocks a factor, ``...`` aligns leading dims from the
    right, ``1`` is a dim without factor."""
    left, right = spec.split("->")

    def make(node: fx.Node) -> Rule:
        shapes = [shape(o) for o in operands(node)]
        blocked: set[str] = set()

        def expand(term: str, s: tuple) -> Dims:
            names = term.split()
            if "..." in names:
                i = names.index("...")
                extra = len(s) - (len(names) - 1)
                names[i : i + 1] = [f"b{extra - j}" for j in range(extra)]
            out: list[str | None] = []
            for n, d in zip(names, s, strict=True):
                if n.startswith("!"):
                    n = n[1:]
                    blocked.add(n)
                broadcast = n == "1" or (n.startswith("b") and n[1:].isdigit() and _is_one(d))
                out.append(None if broadcast else n)
            return tuple(out)

        terms = left.split(",")
        ops = tuple(expand(t, s) for t, s in zip(terms, shapes, strict=False))
        res = tuple(expand(t, s) for t, s in zip(right.split(","), _result_shapes(node), strict=True))
        if added is not None and added < len(ops):  # P operands would have to be P together with the bias
            return Rule(ops, res, frozenset(blocked), "none", added=frozenset({added}))
        return Rule(ops, res, frozenset(blocked), carries)

    return make


def along(dim_arg: int, default: int = -1, carries: str = "none", kwarg: str = "dim") -> Callable[[fx.Node], Rule]:
    """Ops that mix values along one dim (softmax, topk, cumsum …): that dim is blocked, the others are shared."""

    def make(node: fx.Node) -> Rule:
        rank = len(shape(operands(node)[0]))
        dim = node.kwargs.get(kwarg, node.args[dim_arg] if len(node.args) > dim_arg else default)
        names = tuple(f"f{i}" for i in range(rank))
        results = tuple(
            names if len(s) == rank else tuple(n for i, n in enumerate(names) if i != dim % rank)
            for s in _result_shapes(node)
        )
        return Rule(
            tuple(names for _ in operands(node)),
            results,
            frozenset({f"f{dim % rank}"}) if rank else frozenset(),
            carries,
        )

    return make


def _overload(node: fx.Node) -> str:
    return getattr(node.target, "_overloadname", "")


def reduction(is_sum: bool) -> Callable[[fx.Node], Rule]:
    """sum (a sharded reduced factor gives P) or mean, amax, … (the reduced dims are blocked)."""

    def make(node: fx.Node) -> Rule:
        rank = len(shape(operands(node)[0]))
        if "other" in _overload(node):  # max(x, y) is no reduction
            return pointwise()(node)
        at = [a.name for a in node.target._schema.arguments]
        given = dict(zip(at, node.args, strict=False)) | dict(node.kwargs)
        dims = given.get("dim")
        if isinstance(dims, int):
            dims = [dims]
        gone = {d % rank for d in (dims if dims else range(rank))} if rank else set()
        keep = given.get("keepdim", False)
        names = tuple(f"f{i}" for i in range(rank))
        res = tuple(None if i in gone else n for i, n in enumerate(names) if keep or i not in gone)
        blocked = frozenset() if is_sum else frozenset(f"f{i}" for i in gone)
        return Rule((names,), tuple(res for _ in _result_shapes(node)), blocked, "linear" if is_sum else "none")

    return make


def _matmul(node: fx.Node) -> Rule:
    """``... m k, ... k n -> ... m n``; a vector has no m or n."""
    a, b = (len(shape(o)) for o in operands(node))
    left = "k" if a == 1 else "... m k"
    right = "k" if b == 1 else "... k n"
    out = " ".join(["..."] * (max(a, b) > 2) + ["m"] * (a > 1) + ["n"] * (b > 1))
    return einsum(f"{left}, {right} -> {out}")(node)


def _cast(node: fx.Node) -> Rule:
    """Sums pass through a cast between floats or between integers, but not from one to the other."""
    x, y = operands(node)[0].meta["val"].dtype, node.meta["val"].dtype
    same = x.is_floating_point == y.is_floating_point and y != torch.bool
    return pointwise("linear" if same else "none")(node)


def _div(node: fx.Node) -> Rule:
    rounded = node.kwargs.get("rounding_mode") is not None
    return pointwise("first" if isinstance(node.args[0], fx.Node) and not rounded else "none")(node)


def _where(node: fx.Node) -> Rule:
    """Choice is pointwise; with one operand it lists what is true, in order."""
    if len(operands(node)) > 1:
        return pointwise()(node)
    names = tuple(f"f{i}" for i in range(len(shape(operands(node)[0]))))
    return Rule((names,), tuple((None,) for _ in _result_shapes(node)), frozenset(names))


def _argmax(node: fx.Node) -> Rule:
    """Of one dim, or of everything."""
    if len(node.args) > 1 and node.args[1] is not None:
        return along(1)(node)
    names = tuple(f"f{i}" for i in range(len(shape(operands(node)[0]))))
    return Rule((names,), ((None,) * len(_result_shapes(node)[0]),), frozenset(names))


def _flip(node: fx.Node) -> Rule:
    rank = len(shape(operands(node)[0]))
    names = tuple(f"f{i}" for i in range(rank))
    return Rule((names,), (names,), frozenset(f"f{d % rank}" for d in node.args[1]), "linear")


# -- ops whose dims move --------------------------------------------------------------------------------------------


def _transpose(node: fx.Node) -> Rule:
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


def _unsqueeze(node: fx.Node) -> Rule:
    names: list[str | None] = [f"f{i}" for i in range(len(shape(operands(node)[0])))]
    out = list(names)
    out.insert(node.args[1] % (len(names) + 1), None)
    return Rule((tuple(names),), (tuple(out),), carries="linear")


def _view(node: fx.Node) -> Rule:
    ins, outs = view_factors(shape(operands(node)[0]), _result_shapes(node)[0])
    blocked = frozenset(n for n in ins if n and n.startswith("minor"))
    return Rule((ins,), (outs,), blocked, "linear")


def _expand(node: fx.Node) -> Rule:
    s, out = shape(operands(node)[0]), _result_shapes(node)[0]
    off = len(out) - len(s)
    created = {f"f{i}" for i, d in enumerate(out) if (i < off or _is_one(s[i - off])) and not _is_one(d)}
    ops = tuple(None if f"f{off + i}" in created else f"f{off + i}" for i in range(len(s)))
    return Rule((ops,), (tuple(f"f{i}" for i in range(len(out))),), carries="linear", created=frozenset(created))


def _cat(node: fx.Node) -> Rule:
    ops = operands(node)
    rank = len(shape(ops[0]))
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0) % rank
    names = tuple(f"f{i}" for i in range(rank))
    return Rule(tuple(names for _ in ops), (names,), frozenset({f"f{dim}"}), "linear")


def _stack(node: fx.Node) -> Rule:
    ops = operands(node)
    rank = len(shape(ops[0]))
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0) % (rank + 1)
    names: list[str | None] = [f"f{i}" for i in range(rank)]
    out = list(names)
    out.insert(dim, None)
    return Rule(tuple(tuple(names) for _ in ops), (tuple(out),), carries="linear")


def _slice(node: fx.Node) -> Rule:
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


def _select(node: fx.Node) -> Rule:
    rank = len(shape(operands(node)[0]))
    dim = node.args[1] % rank
    names = tuple(f"f{i}" for i in range(rank))
    return Rule((names,), (names[:dim] + names[dim + 1 :],), frozenset({f"f{dim}"}), "linear")


def split_parts(node: fx.Node) -> int:
    """The number of *equal* parts that a split makes (1 when they are unequal): a dim packed of that many blocks may be
    sharded block by block."""
    dim = node.args[2] if len(node.args) > 2 else 0
    sizes = [s[dim] for s in _result_shapes(node)]
    return len(sizes) if all(isinstance(s, int) and s == sizes[0] for s in sizes) else 1


def _split(node: fx.Node) -> Rule:
    rank = len(shape(operands(node)[0]))
    dim = (node.args[2] if len(node.args) > 2 else 0) % rank
    names = tuple(f"f{i}" for i in range(rank))
    blocked = frozenset() if split_parts(node) > 1 else frozenset({f"f{dim}"})
    return Rule((names,), tuple(names for _ in _result_shapes(node)), blocked, "linear")


def _pad(node: fx.Node) -> Rule:
    rank = len(shape(operands(node)[0]))
    padded = {rank - 1 - i // 2 for i, p in enumerate(node.args[1]) if p != 0}
    names = tuple(f"f{i}" for i in range(rank))
    return Rule((names,), (names,), frozenset(f"f{d}" for d in padded))


def _index(node: fx.Node) -> Rule:
    """Advanced indexing: dims without an index are shared, indexed dims blocked, index dims broadcast together."""
    data, indices = node.args[0], list(node.args[1])
    s, out = shape(data), _result_shapes(node)[0]
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
            tuple(None if _is_one(d) and not _is_one(out[start + off + j]) else f"i{off + j}" for j, d in enumerate(w))
        )
    return Rule(tuple(ops), (tuple(res),), frozenset(f"x{i}" for i in at))


def _gather(node: fx.Node) -> Rule:
    rank = len(shape(operands(node)[0]))
    dim = node.args[1] % rank
    names = tuple(f"f{i}" for i in range(rank))
    # An index may be shorter than the values in any dim; then it says nothing about the rest.
    x, index = (shape(o) for o in operands(node))
    shorter = {f"f{i}" for i in range(rank) if not _same(x[i], index[i])}
    return Rule(tuple(names for _ in operands(node)), (names,), frozenset({f"f{dim}", *shorter}))


def _embedding(node: fx.Node) -> Rule:
    ids = tuple(f"i{j}" for j in range(len(shape(node.args[1]))))
    return Rule((("v", "h"), ids), (ids + ("h",),), frozenset({"v"}))


def _attention(node: fx.Node) -> Rule:
    """q [b h s d], k and v [b h t d], mask broadcast to [b h s t]; grouped-query heads share the factor h."""
    # One key/value head for all query heads goes to every rank.
    kv = [None if _is_one(shape(o)[1]) and not _is_one(shape(node.args[0])[1]) else "h" for o in operands(node)[1:3]]
    qkv: tuple[Dims, ...] = (("b", "h", "s", "d"), ("b", kv[0], "t", "d"), ("b", kv[1], "t", "e"))
    mask: tuple[Dims, ...] = ()
    if len(operands(node)) == 4:
        m = shape(operands(node)[3])
        full = ("b", "h", "s", "t")[4 - len(m) :]
        mask = (tuple(None if _is_one(d) else n for n, d in zip(full, m, strict=True)),)
    return Rule(qkv + mask, (("b", "h", "s", "e"),), frozenset({"s", "t", "d", "e"}))


def _cross_entropy(node: fx.Node) -> Rule:
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


def _norm(node: fx.Node) -> Rule:
    """layer_norm and rms_norm: the normalised (trailing) dims are blocked; weight and bias have only those."""
    x = operands(node)[0]
    rank, n = len(shape(x)), len(node.args[1])
    names = tuple(f"f{i}" for i in range(rank))
    tail = names[rank - n :]
    # _fused_rms_norm yields the scale of each row besides
    results = [names, *(names[: rank - n] + (None,) * n for _ in _result_shapes(node)[1:])]
    return Rule((names,) + tuple(tail for _ in operands(node)[1:]), tuple(results), frozenset(tail))


def _creation(node: fx.Node) -> Rule:
    return Rule(
        tuple((None,) * len(shape(o)) for o in operands(node)),
        (tuple(f"f{i}" for i in range(len(_result_shapes(node)[0]))),),
        created=frozenset(f"f{i}" for i in range(len(_result_shapes(node)[0]))),
    )


def _triangle(node: fx.Node) -> Rule:
    """tril and triu look at positions in the last two dims."""
    names = tuple(f"f{i}" for i in range(len(shape(operands(node)[0]))))
    return Rule((names,), (names,), frozenset(names[-2:]), "linear")


def _einsum(node: fx.Node) -> Rule:
    """The equation is the rule: a letter is a factor; letters that the result lacks are summed."""
    equation = node.args[0].replace(" ", "")
    if "..." in equation:
        raise MoecError(
            f"einsum {equation!r}: an ellipsis has no factors", where=node.meta.get("where", ""),
            way_out="name the dims in the equation",
        )  # fmt: skip
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        right = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    # A letter that repeats within one operand takes a diagonal.
    twice = {c for t in terms for c in t if t.count(c) > 1}
    dims = [
        tuple(None if _is_one(d) else c for c, d in zip(t, shape(o), strict=True))
        for t, o in zip(terms, operands(node), strict=True)
    ]
    return Rule(tuple(dims), (tuple(right),), frozenset(twice), "multilinear")


def _histogram(node: fx.Node) -> Rule:
    """Counts over all elements: a part of the elements gives a part of the counts."""
    return Rule((tuple(f"f{i}" for i in range(len(shape(operands(node)[0])))),), ((None,),))


def _repeat_interleave(node: fx.Node) -> Rule:
    """Each element so many times in a row: a contiguous part repeats to a contiguous part."""
    names = tuple(f"f{i}" for i in range(len(shape(operands(node)[0]))))
    if len(node.args) < 3 or node.args[2] is None or not isinstance(node.args[1], int):
        return Rule((names,), tuple((None,) for _ in _result_shapes(node)), frozenset(names))
    return Rule((names,), (names,), carries="linear")


def _scatter_add(node: fx.Node) -> Rule:
    """self[index] += src along one dim: a part of (index, src) gives a part of the sums, if self is zeros."""
    rank, dim = len(shape(node.args[0])), node.args[1]
    base: Dims = tuple("d" if i == dim % rank else f"f{i}" for i in range(rank))
    added: Dims = tuple("x" if i == dim % rank else f"f{i}" for i in range(rank))
    to, at, source = (shape(o) for o in operands(node))
    shorter = {
        f"f{i}" for i in range(rank) if i != dim % rank and not (_same(to[i], at[i]) and _same(source[i], at[i]))
    }
    if not _same(source[dim % rank], at[dim % rank]):
        shorter.add("x")
    from_zeros = op_name(node.args[0]) in ("aten.zeros", "aten.new_zeros", "aten.zeros_like")
    return Rule((base, added, added), (base,), frozenset({"d", *shorter} if from_zeros else {"d", "x", *shorter}))


def _scatter(node: fx.Node) -> Rule:
    """self[index] = src along one dim: that dim is blocked, and every other that index does not cover."""
    rank, dim = len(shape(node.args[0])), node.args[1]
    names = tuple(f"f{i}" for i in range(rank))
    ops = operands(node)
    partial = (i for i in range(rank) if any(not _same(shape(o)[i], shape(ops[0])[i]) for o in ops[1:]))
    return Rule(tuple(names for _ in ops), (names,), frozenset({f"f{dim % rank}", *(f"f{i}" for i in partial)}))


def _slice_scatter(node: fx.Node) -> Rule:
    """x with src written to a slice of one dim, which is blocked; sums of both parts add up."""
    rank = len(shape(node.args[0]))
    dim = (node.args[2] if len(node.args) > 2 else 0) % rank
    names = tuple(f"f{i}" for i in range(rank))
    return Rule((names, names), (names,), frozenset({f"f{dim}"}), "linear")


def _select_scatter(node: fx.Node) -> Rule:
    rank = len(shape(node.args[0]))
    dim = node.args[2] % rank
    names = tuple(f"f{i}" for i in range(rank))
    return Rule((names, names[:dim] + names[dim + 1 :]), (names,), frozenset({f"f{dim}"}), "linear")


def _complex(node: fx.Node) -> Rule:
    """view_as_complex and view_as_real: the last dim of the real side is (re, im)."""
    real = len(_result_shapes(node)[0]) > len(shape(operands(node)[0]))
    names = tuple(f"f{i}" for i in range(len(shape(operands(node)[0])) - (not real)))
    if real:
        return Rule((names,), ((*names, None),), carries="linear")
    return Rule(((*names, "pair"),), (names,), frozenset({"pair"}), "linear")


def _conv1d(node: fx.Node) -> Rule:
    """x [n c l], weight [c/groups …]: samples are shared; channels too where each is convolved on its own."""
    x, w = shape(node.args[0]), shape(node.args[1])
    # One input channel a group; the argument ``groups`` is local once the op is sharded, and says less.
    depthwise = _is_one(w[1]) and isinstance(x[-2], int) and x[-2] == w[0]
    batch = tuple(f"b{i}" for i in range(len(x) - 2))
    c_in, c_out = ("c", "c") if depthwise else ("i", "o")
    ops = ((*batch, c_in, "l"), (c_out, None if depthwise else "k", "w"), (c_out,))
    blocked = frozenset({"l", "w"} if depthwise else {"l", "w", "i", "k", "o"})
    return Rule(ops[: len(operands(node))], ((*batch, c_out, "l"),), blocked)


def _solve_triangular(node: fx.Node) -> Rule:
    """A [… n m] X = B [… m k]; with left=False, X A = B, the columns of B are rows of X."""
    if node.kwargs.get("left", True):
        return einsum("... !n !m, ... !m k -> ... !n k", carries="none")(node)
    return einsum("... !n !m, ... k !n -> ... k !m", carries="none")(node)


def _one_hot(node: fx.Node) -> Rule:
    names = tuple(f"f{i}" for i in range(len(shape(operands(node)[0]))))
    return Rule((names,), (names + (None,),))


# -- the table ------------------------------------------------------------------------------------------------------

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
    "aten.matmul": _matmul,
    # linear
    **{f"aten.{n}": pointwise("linear") for n in ("add", "sub", "neg", "clone", "alias", "detach")},
    "aten._to_copy": _cast, "aten.view_as_complex": _complex, "aten.view_as_real": _complex,
    "aten.polar": pointwise(),
    "aten.mul": pointwise("multilinear"),
    "aten.div": _div, "aten.where": _where,
    # pointwise
    **{
        f"aten.{n}": pointwise()
        for n in _POINTWISE
    },
    # losses without reduction (normalize takes the mean or sum apart)
    **{f"aten.{n}": pointwise() for n in _LOSSES},
    **{f"aten.{n}": like for n in ("zeros_like", "ones_like", "empty_like", "full_like")},
    # mixing along one dim
    **{f"aten.{n}": along(1) for n in _ALONG_LAST},
    "aten.topk": along(2), "aten.sort": along(1), "aten.argmax": _argmax,
    "aten.argmin": _argmax, "aten.flip": _flip,
    "aten.diff": along(2), "aten.gather": _gather,
    # reductions
    "aten.sum": reduction(True),
    **{f"aten.{n}": reduction(False) for n in _REDUCTIONS},
    # moving dims
    **{f"aten.{n}": _transpose for n in ("transpose", "permute", "t")},
    "aten.reshape": _view,  # normalize writes view, squeeze, flatten and unflatten so
    "aten.unsqueeze": _unsqueeze, "aten.expand": _expand, "aten.cat": _cat, "aten.stack": _stack, "aten.slice": _slice,
    "aten.select": _select, "aten.split": _split, "aten.split_with_sizes": _split,
    "aten.constant_pad_nd": _pad, "aten.pad": _pad,
    # lookups
    "aten.embedding": _embedding, "aten.index": _index, "aten.one_hot": _one_hot,
    "aten.scatter": _scatter, "aten.slice_scatter": _slice_scatter, "aten.select_scatter": _select_scatter,
    "aten.scatter_add": _scatter_add, "aten.histc": _histogram, "aten.bincount": _histogram,
    "aten.repeat_interleave": _repeat_interleave,
    "aten.tril": _triangle, "aten.triu": _triangle, "aten.einsum": _einsum,
    # blocks
    "aten.scaled_dot_product_attention": _attention, "aten.cross_entropy_loss": _cross_entropy,
    "aten.layer_norm": _norm, "aten.rms_norm": _norm, "aten._fused_rms_norm": _norm, "aten.conv1d": _conv1d,
    "aten.linalg_solve_triangular": _solve_triangular,
    # creation
    **{f"aten.{n}": _creation for n in _CREATION},
    # experts (rows are ragged over ep and edp: see experts.py; these lines hold for etp)
    "moec.grouped_mm": einsum("!t k, !e k m, !e -> !t m"),
    "moec.grouped_add": einsum("!t m, !e m, !e -> !t m", carries="none"),
}
# fmt: on


def differentiable(value) -> bool:
    """Can a value of this dtype have a gradient?"""
    return value.dtype.is_floating_point or value.dtype.is_complex


def is_creation(node: fx.Node) -> bool:
    """Makes a value from nothing: a tensor operand (``new_zeros``) is only metadata."""
    return op_name(node).removeprefix("aten.") in _CREATION


def is_getitem(node: fx.Node) -> bool:
    return node.target is operator.getitem
