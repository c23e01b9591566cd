"""One case or more for every line of the table of factor rules: an op and arguments of drawn shapes.

A case is a function of a :class:`Draw` that returns ``(op, args, kwargs)``; tensors among them become operands.  Equal
names are equal sizes; sizes are drawn from 1 (broadcast), 5 (which no degree divides) and multiples of the degrees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from moec.runtime.route_spec import SCORES, RouteSpec

aten, moec_ops = torch.ops.aten, torch.ops.moec
SIZES = (4, 12, 24, 5)


class Draw:
    """Sizes by name, values on a grid of 1/64 (so that pending sums of integers are exact)."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.sizes: dict[str, int] = {}
        self.constants: set[int] = set()
        """ids of operands that torch has no gradient for."""
        self.gen = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))

    def pick(self, *options: Any) -> Any:
        return self.data.draw(st.sampled_from(options))

    def size(self, name: str) -> int:
        if name not in self.sizes:
            self.sizes[name] = self.pick(*SIZES)
        return self.sizes[name]

    def shape(self, dims: str) -> list[int]:
        return [int(d) if d.isdigit() else self.size(d) for d in dims.split()]

    def x(self, dims: str, low: float = -2.0, high: float = 2.0) -> Tensor:
        u = torch.rand(self.shape(dims), generator=self.gen, dtype=torch.float64)
        return (u * (high - low) + low).mul(64).round().div(64)

    def ids(self, dims: str, high: int) -> Tensor:
        return torch.randint(0, high, self.shape(dims), generator=self.gen)

    def mask(self, dims: str) -> Tensor:
        return self.ids(dims, 2).bool()

    def rank3(self) -> str:
        """A random operand: two or three dims, in any order."""
        return self.pick("a b c", "a b", "c b a", "b")

    def broadcast(self, dims: str) -> str:
        """Dims that broadcast against ``dims``: some leading ones missing, some of size 1."""
        names = dims.split()
        names = names[self.pick(*range(len(names))) :]
        return " ".join(self.pick(n, n, "1") for n in names)


Case = Callable[[Draw], tuple[Any, tuple, dict]]
CASES: dict[str, list[Case]] = {}


def case(*names: str) -> Callable[[Callable], Callable]:
    """Register ``make(draw, op_packet)`` for every op named."""

    def register(make: Callable) -> Callable:
        for name in names:
            space, _, op = name.partition(".")
            packet = getattr(getattr(torch.ops, space), op)
            CASES.setdefault(name, []).append(lambda d, packet=packet: _full(make(d, packet)))
        return make

    return register


def _full(made: tuple) -> tuple[Any, tuple, dict]:
    return made if len(made) == 3 else (*made, {})


def aten_names(text: str) -> list[str]:
    return [f"aten.{n}" for n in text.split()]


def last_overload(packet: Any, *wanted: str) -> Any:
    return getattr(packet, next(w for w in wanted if w in packet.overloads()))


# -- contractions ----------------------------------------------------------------------------------------------------


@case("aten.linear")
def _(d, op):
    x, w = d.x(d.pick("a b k", "b k", "k")), d.x("n k")
    return op.default, (x, w, d.x("n")) if d.pick(True, False) else (x, w)


@case("aten.mm")
def _(d, op):
    return op.default, (d.x("m k"), d.x("k n"))


@case("aten.bmm")
def _(d, op):
    return op.default, (d.x("b m k"), d.x("b k n"))


MATMULS = ("a b m k, b k n", "b m k, k n", "m k, b k n", "1 m k, b k n", "m k, k", "k, b k n", "k, k")


@case("aten.matmul")
def _(d, op):
    a, b = d.pick(*(t.split(", ") for t in MATMULS))
    return op.default, (d.x(a), d.x(b))


@case("moec.grouped_mm")
def _(d, op):
    x, w = d.x("t k"), d.x("e k m")
    return op.default, (x, w, _counts(d))


@case("moec.grouped_add")
def _(d, op):
    return op.default, (d.x("t m"), d.x("e m"), _counts(d))


@case("moec.route")
def _route(d, op):
    E = d.sizes["e"] = d.pick(4, 12)
    if E == 4:
        spec = RouteSpec(E, 2, d.pick(*SCORES))
    else:
        how = {"groups": 2, "kept_groups": 1, "group_score": "top2", "force": d.pick(None, "random")}
        spec = RouteSpec(E, 3, d.pick(*SCORES), normalize=True, capacity_factor=d.pick(None, None, 1.0), **how)
    bias = d.x("e") if d.pick(True, False) else None
    d.constants.add(id(bias))
    valid = d.mask("t") if d.pick(True, False) else None
    return op.default, (d.x("t e"), bias, valid, d.ids("t", 99) if spec.force else None, spec.text())


@case("moec.route_counted")
def _(d, op):
    _, (*given, spec) = _route(d, op)
    return op.default, (*given, d.mask("t") if d.pick(True, False) else None, spec, d.pick(True, False))


@case("moec.drop")
def _(d, op):
    spec = RouteSpec(4, 2, capacity_factor=d.pick(0.5, None), drop=d.pick("probs", "position"))
    return op.default, (d.x("t 2", 0.1, 1.0), d.ids("t 2", 5) - 1, spec.text())


@case("moec.balance")
def _(d, op):
    lead = d.pick("", "n ")
    valid = d.mask(f"{lead}t") if d.pick(True, False) else None
    return op.default, (d.x(f"{lead}t 4"), valid, 2, d.pick(*SCORES))


@case("moec.inject")
def _(d, op):
    return op.default, (d.x(d.rank3()), d.x(""))


@case("moec.tally")
def _(d, op):
    chosen = d.ids("t 2", 4)
    kept, logits = chosen.masked_fill(d.mask("t 2"), -1), d.x("t 4")
    d.constants.add(id(logits))
    given = [x if d.pick(True, False) else None for x in (kept, logits, d.mask("t"))]
    return op.default, (chosen, *given, 4, d.pick(*SCORES))


@case("moec.boundary")
def _(d, op):
    return op.default, (d.x("a b c"), "layers.0:1")


def _counts(d: Draw) -> Tensor:
    return torch.bincount(d.ids("t", d.size("e")), minlength=d.size("e"))


@case("aten.linalg_solve_triangular")
def _(d, op):
    a = d.x(d.pick("c 4 4", "4 4")) / 8 + torch.eye(4, dtype=torch.float64)
    b, left = d.pick(("c 4 n", True), ("c n 4", False), ("1 4 n", True))
    return op.default, (a, d.x(b)), {"upper": True, "left": left}


# -- pointwise -------------------------------------------------------------------------------------------------------

UNARY = """abs asin acos atan ceil celu cos cosh elu erf exp exp2 expm1 floor gelu hardsigmoid hardswish hardtanh
isfinite isinf isnan isneginf leaky_relu log log1p log2 log10 log_sigmoid logical_not logit mish nan_to_num neg
reciprocal relu relu6 round rsqrt selu sigmoid sign silu sin sinh softplus sqrt square tan tanh trunc clone alias
detach"""
BINARY = """add sub mul div eq ne lt le gt ge maximum minimum fmod remainder true_divide xlogy logical_and logical_or
logical_xor"""


@case(*aten_names(UNARY))
def _(d, op):
    return op.default, (d.x(d.rank3(), 0.25, 0.75),)


@case(*aten_names("relu sign ceil exp tanh neg"))
def _(d, op):
    return op.default, (d.x(d.rank3()),)


@case(*aten_names(BINARY))
def _(d, op):
    dims = d.rank3()
    pair = [d.x(dims, 0.25, 2.0), d.x(d.broadcast(dims), 0.25, 2.0)]
    if d.pick(True, False):
        pair.reverse()
    return last_overload(op, "Tensor", "default"), tuple(pair)


@case(*aten_names("add sub mul div"))
def _(d, op):
    x = d.x(d.rank3())
    if op is aten.div:
        return op.Tensor, (x, d.pick(2.0, x + 3))
    return op.Tensor, (x, d.pick(2.0, 0, x))


@case("aten.add", "aten.sub")
def _(d, op):
    return op.Tensor, (d.x("a b"), d.x("a b")), {"alpha": 3}


@case("aten.div")
def _(d, op):
    return op.Tensor_mode, (d.x("a b"), d.x("b", 0.5, 1.0)), {"rounding_mode": d.pick("floor", "trunc", None)}


@case("aten._to_copy")
def _(d, op):
    return op.default, (d.x(d.rank3(), -9, 9),), {"dtype": d.pick(torch.float64, torch.int64, torch.bool)}


@case("aten.polar")
def _(d, op):
    return op.default, (d.x("a b", 0.5, 1.0), d.x("a b"))


@case("aten.view_as_complex")
def _(d, op):
    return op.default, (d.x("a b 2"),)


@case("aten.view_as_real")
def _(d, op):
    return op.default, (torch.view_as_complex(d.x("a b 2")),)


@case("aten.rsub", "aten.pow", "aten.clamp_max", "aten.clamp_min", "aten.eq", "aten.ge")
def _(d, op):
    return last_overload(op, "Tensor_Scalar", "Scalar", "default"), (d.x(d.rank3(), 0.25, 2.0), 1.25)


@case("aten.pow")
def _(d, op):
    return op.Tensor_Tensor, (d.x("a b", 0.25, 2.0), d.x("b"))


@case("aten.floor_divide")
def _(d, op):
    return op.default, (d.ids("a b", 99), d.ids(d.pick("a b", "b"), 9) + 1)


@case("aten.clamp")
def _(d, op):
    x = d.x("a b")
    return d.pick((op.default, (x, -0.5, 0.5)), (op.Tensor, (x, d.x("b", -1, 0), d.x("a 1", 0, 1))))


@case(*aten_names("bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__"))
def _(d, op):
    return op.Tensor, (d.ids("a b", 8), d.ids(d.pick("a b", "b", "1 b"), 8))


@case("aten.bitwise_not")
def _(d, op):
    return op.default, (d.ids("a b", 8),)


@case("aten.masked_fill")
def _(d, op):
    return op.Scalar, (d.x("a b c"), d.mask(d.pick("a b c", "b c", "a 1 c")), -3.0)


@case("aten.where")
def _(d, op):
    return op.self, (d.mask(d.pick("a b", "b", "a 1")), d.x("a b"), d.x(d.pick("a b", "b", "1")))


@case("aten.where")
def _(d, op):
    # The positions of what is true.  A fixed pattern, so that the recorded size is one that shards could have had.
    mask = torch.zeros(d.size("a"), 4, dtype=torch.bool)
    mask[:, 1] = True
    return op.default, (mask,)


@case("aten.tril", "aten.triu")
def _(d, op):
    return op.default, (d.x(d.pick("a b", "c a b")), d.pick(0, 1, -2))


@case(*aten_names("zeros_like ones_like full_like empty_like"))
def _(d, op):
    return op.default, (d.x(d.rank3()), 3.0) if op is aten.full_like else (d.x(d.rank3()),)


# -- along one dim ---------------------------------------------------------------------------------------------------


def a_dim(d: Draw, x: Tensor) -> int:
    return d.pick(*range(-x.ndim, x.ndim))


@case(*aten_names("softmax log_softmax"))
def _(d, op):
    x = d.x(d.rank3())
    return op.int, (x, a_dim(d, x))


@case(*aten_names("_softmax _log_softmax"))
def _(d, op):
    x = d.x(d.rank3())
    return op.default, (x, a_dim(d, x), False)


@case(*aten_names("cumsum cumprod argsort"))
def _(d, op):
    x = d.x(d.rank3(), 0.5, 1.5)
    return op.default, (x, a_dim(d, x))


@case("aten.topk")
def _(d, op):
    x = d.x("a b") + torch.arange(d.size("b")) / 64  # no ties that shards could break otherwise
    return op.default, (x, 3, d.pick(0, -1))


@case("aten.sort")
def _(d, op):
    x = d.x(d.rank3())
    dim = a_dim(d, x)
    return d.pick((op.stable, (x,), {"stable": True, "dim": dim}), (op.default, (x, dim)))


@case("aten.argmax", "aten.argmin")
def _(d, op):
    x = d.x(d.rank3())
    return op.default, d.pick((x, a_dim(d, x)), (x, a_dim(d, x), True), (x,), (x, None))


@case("aten.flip")
def _(d, op):
    x = d.x("a b c")
    return op.default, (x, d.pick([0], [1, -1], [2]))


@case("aten.diff")
def _(d, op):
    x = d.x("a b c")
    return op.default, (x, 1, a_dim(d, x))


@case("aten.gather")
def _(d, op):
    x, dim = d.x("a b"), d.pick(0, 1, -1)
    index = d.ids(d.pick("a b", "4 b", "a 4", "4 4"), min(d.size("a"), d.size("b")))
    return op.default, (x, dim, index)


@case("aten.scatter_add")
def _(d, op):
    base, index = d.x("12 b"), d.ids(d.pick("a b", "4 b", "a 4"), 4 if d.size("b") == 4 else 5)
    return op.default, (base[:, : d.size("b")], 0, index, d.x(" ".join(map(str, index.shape))))


@case("aten.scatter")
def _(d, op):
    index = torch.arange(4)[:, None].expand(4, d.size("b") if d.pick(True, False) else 4)
    if d.pick(True, False):
        return op.value, (d.x("12 b"), 0, index, 9.0)
    return op.src, (d.x("b 12").t() if d.pick(True, False) else d.x("12 b"), 0, index, d.x(f"4 {index.shape[1]}"))


@case("aten.slice_scatter")
def _(d, op):
    x, dim = d.x("12 b"), d.pick(0, -2, 1)
    return op.default, (x, d.x("4 b") if dim != 1 else d.x("12 4"), dim, 0, 4)


@case("aten.select_scatter")
def _(d, op):
    x, dim = d.x("a b c"), d.pick(0, 1, -1)
    return op.default, (x, d.x({0: "b c", 1: "a c", -1: "a b"}[dim]), dim, 1)


@case("aten.histc")
def _(d, op):
    return op.default, (d.x("a b"), 4, -2, 2)


@case("aten.bincount")
def _(d, op):
    return op.default, (d.ids("a", 6),), {"minlength": 7}


@case("aten.repeat_interleave")
def _(d, op):
    return op.self_int, (d.x("a b"), 3, d.pick(0, 1))


# -- reductions ------------------------------------------------------------------------------------------------------


@case("aten.sum", "aten.mean", "aten.logsumexp", "aten.amax", "aten.amin")
def _(d, op):
    x = d.x("a b c")
    dims, keep = d.pick([0], [1], [-1], [0, 2], [-1, 1]), d.pick(True, False)
    return last_overload(op, "dim_IntList", "dim", "default"), (x, dims, keep)


@case("aten.sum", "aten.mean", "aten.max", "aten.min", "aten.any", "aten.all", "aten.prod", "aten.var", "aten.std")
def _(d, op):
    x = d.x(d.rank3(), 0.75, 1.25)
    return op.default, (x > 1 if op in (aten.any, aten.all) else x,) if op not in (aten.var, aten.std) else (x, True)


@case("aten.max", "aten.min", "aten.any", "aten.all", "aten.prod")
def _(d, op):
    x = d.x("a b c", 0.75, 1.25)
    x = x > 1 if op in (aten.any, aten.all) else x
    return last_overload(op, "dim_int", "dim"), (x, a_dim(d, x), d.pick(True, False))


@case("aten.max", "aten.min")
def _(d, op):
    return op.other, (d.x("a b"), d.x(d.pick("a b", "b", "1 b")))


@case("aten.sum")
def _(d, op):
    return op.dim_IntList, (d.mask("a b"), d.pick([0], [1]))


@case("aten.var", "aten.std")
def _(d, op):
    x = d.x("a b c")
    return d.pick(
        (op.dim, (x, d.pick([0], [-1]), d.pick(True, False), d.pick(True, False))),
        (op.correction, (x, d.pick([0], [-1])), {"correction": 0, "keepdim": d.pick(True, False)}),
    )


# -- moving dims -----------------------------------------------------------------------------------------------------


@case("aten.transpose")
def _(d, op):
    x = d.x("a b c")
    return op.int, (x, a_dim(d, x), a_dim(d, x))


@case("aten.permute")
def _(d, op):
    return op.default, (d.x("a b c"), d.pick([1, 0, 2], [2, 0, 1], [-1, 1, 0]))


@case("aten.t")
def _(d, op):
    return op.default, (d.x(d.pick("a b", "b")),)


@case("aten.reshape")
def _(d, op):
    a, b, c = d.size("a"), d.size("b"), d.size("c")
    new = d.pick([a * b, c], [a, b * c], [a * b * c], [a, 1, b, c], [a, b, 1, c], [a * b, 1, c])
    return op.default, (d.x("a b c"), new)


@case("aten.reshape")
def _(d, op):
    a, b = d.size("a"), d.size("b")
    return op.default, (d.x("a b").reshape(a * b), d.pick([a, b], [1, a * b], [b, a]))


@case("aten.reshape")
def _(d, op):
    a = d.size("a")
    return op.default, (d.x("24 a"), d.pick([2, 12, a], [12, 2 * a], [4, 6, a], [8, 3 * a]))


@case("aten.unsqueeze")
def _(d, op):
    x = d.x("a b")
    return op.default, (x, d.pick(-3, -2, -1, 0, 1, 2))


@case("aten.expand")
def _(d, op):
    dims = d.pick("a b", "1 b", "a 1", "b")
    return op.default, (d.x(dims), d.pick([4, d.size("a"), d.size("b")], [d.size("a"), d.size("b")]))


@case("aten.cat")
def _(d, op):
    return op.default, ([d.x("a b"), d.x("a b"), d.x("a b")][: d.pick(1, 2, 3)], d.pick(0, 1, -1))


@case("aten.stack")
def _(d, op):
    return op.default, ([d.x("a b"), d.x("a b")], d.pick(0, 1, 2, -1))


@case("aten.slice")
def _(d, op):
    return op.Tensor, (d.x("a b"), d.pick(0, 1, -1), 1, d.pick(3, 2**63 - 1))


@case("aten.select")
def _(d, op):
    return op.int, (d.x("a b c"), d.pick(0, 1, -1), d.pick(0, 2, -1))


@case("aten.split")
def _(d, op):
    x = d.x("a b")
    return op.Tensor, (x, d.pick(2, 3, 4, 12), d.pick(0, 1, -1))


@case("aten.split", "aten.split_with_sizes")
def _(d, op):
    sizes = d.pick([12, 12], [8, 8, 8], [4, 20])
    return last_overload(op, "sizes", "default"), (d.x(d.pick("24 b", "24 1")), sizes, 0)


@case("aten.constant_pad_nd")
def _(d, op):
    return op.default, (d.x("a b"), d.pick([1, 2], [0, 0, 1, 0], [0, 0]), 7.0)


@case("aten.pad")
def _(d, op):
    return op.default, (d.x("a b c"), [1, 2], d.pick("reflect", "replicate"))


# -- lookups and blocks ----------------------------------------------------------------------------------------------


@case("aten.embedding")
def _(d, op):
    return op.default, (d.x("v h"), d.ids(d.pick("a b", "a"), d.size("v")))


@case("moec.lookup")
def _(d, op):
    numbers = torch.arange(d.size("v"))
    return op.default, (d.x("v h"), numbers, d.ids(d.pick("a b", "a"), d.size("v")), d.pick(-1, 2))


@case("moec.pick")
def _(d, op):
    lead = d.pick("a b", "a", "")
    return op.default, (d.x(f"{lead} v"), torch.arange(d.size("v")), d.ids(f"{lead} k", d.size("v") + 2))


@case("moec.blocked_logsumexp")
def _(d, op):
    d.sizes["v"] = d.pick(12, 24)
    return op.default, (d.x(d.pick("a b v", "a v", "v")), d.pick(4, 12, 2, 3))


@case("moec.logsumexp_pick")
def _(d, op):
    V = d.sizes["v"] = d.pick(12, 24)
    lead = d.pick("a b", "a", "")
    return op.default, (d.x(f"{lead} v"), torch.arange(V), d.ids(f"{lead} 1", V + 2), d.pick(4, 12, 2, 3))


@case("moec.cross_entropy")
def _(d, op):
    labels = d.ids("n", d.size("c"))
    labels[0] = -100
    return op.default, (d.x("n c"), labels, -100, d.pick(0.0, 0.25), d.pick(0, 1, 2))


@case("aten.index")
def _(d, op):
    x, n = d.x("a b c"), 4
    i, j = d.ids(d.pick("m", "m n"), n), d.ids(d.pick("m n", "n", "1"), n)
    if i.ndim == 1 and i.shape != j.shape:
        j = d.ids("1", n)
    return op.Tensor, (x, d.pick([i], [None, i], [i, j], [i, None, j], [None, i, j]))


@case("aten.one_hot")
def _(d, op):
    return op.default, (d.ids(d.pick("a b", "a"), 5), 5)


@case("aten.scaled_dot_product_attention")
def _(d, op):
    d.sizes["t"] = d.size("s")
    kv = d.pick("h", "h", "1", "2")
    if kv == "2":
        d.sizes["h"] = 12
    d.sizes["d"] = 5
    q, k, v = d.x("b h s d"), d.x(f"b {kv} t d"), d.x(f"b {kv} t e")
    if v.shape[-1] != q.shape[-1]:
        v = d.x(f"b {kv} t d")
    mask = d.pick(None, d.x(d.pick("s t", "b 1 s t", "1 1 s t", "b h s t")))
    kwargs = {"enable_gqa": True} if kv != "h" else {}
    return op.default, (q, k, v, *([mask] if mask is not None else [])), kwargs


@case("aten.cross_entropy_loss")
def _(d, op):
    logits = d.pick("n c", "n c a")
    target = d.ids(logits.replace(" c", ""), d.size("c"))
    target[..., 0] = -100
    weight = d.pick(None, d.x("c", 0.5, 1.5))
    d.constants.add(id(weight))
    return op.default, (d.x(logits), target, weight, d.pick(0, 1, 2), -100, d.pick(0.0, 0.0, 0.25))


@case("aten.cross_entropy_loss")
def _(d, op):
    return op.default, (d.x("n c"), d.x("n c", 0, 1), None, d.pick(0, 1, 2))


@case("aten.conv1d")
def _(d, op):
    depthwise = d.pick(True, False)
    if depthwise:
        d.sizes["m"] = d.size("c")
    bias = d.pick((), (d.x("m"),))
    if depthwise:
        return op.default, (d.x(d.pick("n c 6", "c 6")), d.x("c 1 3"), *(bias or (None,)), [1], [2], [1], d.size("c"))
    return op.default, (d.x("n c 6"), d.x("m c 3"), *bias)


@case("aten.layer_norm")
def _(d, op):
    x, tail = d.x("a b c"), d.pick("c", "b c")
    extra = d.pick((), (d.x(tail),), (d.x(tail), d.x(tail)))
    return op.default, (x, d.shape(tail), *extra)


@case("aten.rms_norm")
def _(d, op):
    tail = d.pick("c", "b c")
    return op.default, (d.x("a b c"), d.shape(tail), *d.pick((), (d.x(tail),)))


@case("moec.rms_norm")
def _(d, op):
    return op.default, (d.x("a b c"), d.shape("c"), d.x("c"), 1e-5)


@case("aten._fused_rms_norm")
def _(d, op):
    tail = d.pick("c", "b c")
    return op.default, (d.x("a b c"), d.shape(tail), d.x(tail), 1e-5)


# -- creation --------------------------------------------------------------------------------------------------------


@case(*aten_names("zeros ones empty eye"))
def _(d, op):
    if op is aten.eye:
        return op.default, (d.size("a"),)
    return last_overload(op, "memory_format", "default"), (d.shape("a b"),)


@case("aten.full")
def _(d, op):
    return op.default, (d.shape("a b"), 2.0)


@case("aten.arange", "aten.scalar_tensor")
def _(d, op):
    return op.default, (d.size("a"),)


@case("aten.triu_indices", "aten.tril_indices")
def _(d, op):
    return op.default, (d.size("a"), d.size("b"))


@case(*aten_names("new_zeros new_ones new_empty new_full"))
def _(d, op):
    return op.default, (d.x("a b"), d.shape("b c"), *([2.0] if op is aten.new_full else []))


# -- spelled by users --------------------------------------------------------------------------------------------------


@case("aten.einsum")
def _(d, op):
    equation, a, b = d.pick(
        ("bsnd,btnd->bnst", "b s n d", "b t n d"), ("ab,bc->ac", "a b", "b c"), ("ab,cb", "a b", "c b"),
        ("abc,c->b", "a b c", "c"), ("aab,b->ab", "a a b", "b"), ("...k,nk->...n", "a b k", "n k"),
        ("a...,c...->ac...", "a x b", "c b"), ("k...k,...", "k a k", "a"), ("...k,...k->k", "a b k", "b k"),
    )  # fmt: skip
    return op.default, (equation, [d.x(a), d.x(b)])


@case("aten.mse_loss", "aten.l1_loss", "aten.smooth_l1_loss", "aten.huber_loss")
def _(d, op):
    return op.default, (d.x("a b"), d.x("a b"), 0)


@case("aten.binary_cross_entropy_with_logits")
def _(d, op):
    return op.default, (d.x("a b"), d.x("a b", 0, 1), None, None, 0)


@case("aten.slice")
def _(d, op):
    """Every n-th, which is local to a part (an interleaved gate and up), and its near misses."""
    start, end, step = d.pick((0, 2**63 - 1, 2), (1, 2**63 - 1, 2), (2, 24, 3), (2, 2**63 - 1, 2), (0, 20, 2))
    return op.Tensor, (d.x(d.pick("24 b", "24 1")), d.pick(0, -2), start, end, step)
