"""FSDP gathers FP8 weights (part of ``commute_quantise``): each rank quantises its part, and bytes are gathered.

Legend: K and M in and out features of a weight, E experts.

1. A weight is taken if its gathered value is read by one ``moec::quantise`` alone, through transposes; if FSDP cuts it
   evenly and not inside of tiles; and if FP8 is fewer bytes: operands whose two layouts have the same tiles (the
   tensor, squares) travel once and are laid out anew behind (``moec::turn``), others twice.  Else ``why_not`` says what
   keeps it.
2. Its part is quantised before the gather.  Where ranks have parts of one tile the largest magnitude is reduced over
   them first, or histories have it (``delayed``), so scales and numbers are those of the whole weight, to the bit.
3. The weights of a unit (``units.py``) over the same ranks travel together: numbers and scales as one vector of bytes.
4. Their gradients go the way back: ``moec::carry_parameters`` sums them for the parameters, in the dtype of these.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import fx

from moec.passes.cast_fp8 import Cast
from moec.passes.commute_quantise.histories import SHAPES, is_delayed, learn, past_of
from moec.passes.commute_quantise.operands import erase_maximum
from moec.passes.typed import bring_before, dtype_of, result, sweep, typed
from moec.passes.units import behind, gather_starts, packed_types, parameter_of, unit_names
from moec.placement import R, Types, local_shape
from moec.program import Program, op_name
from moec.runtime.collectives import CARRY_PARAMETERS, LOW_GATHER, TABLE, group_of
from moec.runtime.errors import MoecError
from moec.runtime.fp8 import Recipe
from moec.runtime.ops.pack import flatten_shapes
from moec.runtime.torch_compat import WAIT

aten, moec_ops = torch.ops.aten, torch.ops.moec
ROLES = ("weight", "stack")
VIEWS = (aten.transpose.int, aten.t.default)


@dataclass
class Weight:
    """A weight that travels as FP8."""

    quantise: fx.Node
    start: fx.Node
    """The gather of its own numbers."""
    views: list[fx.Node]
    """From what is gathered to what is quantised."""
    role: str
    layouts: int

    @property
    def wait(self) -> fx.Node:
        return next(iter(self.start.users))

    @property
    def part(self) -> fx.Node:
        return self.start.args[0]

    @property
    def master(self) -> fx.Node:
        return self.start.args[1 if self.start.target is TABLE[LOW_GATHER].op else 0]

    @property
    def dim(self) -> int:
        """Along which its parts lie."""
        return self.start.args[-3]


def commute_weights(program: Program, recipe: Recipe) -> int:
    """How many weights travel as FP8 now."""
    starts = gather_starts(program)
    buckets: dict[tuple, list[Weight]] = defaultdict(list)
    for start, unit in zip(starts, unit_names(program, starts), strict=True):
        found = _weight(program, recipe, start)  # 1
        if isinstance(found, str):
            name = program.params[parameter_of(start).name].name  # type: ignore[union-attr]  # it gathers one
            program.why_not.append(f"{name}: its gather is not FP8: {found}")
        elif found is not None:
            buckets[unit, group_of(start), dtype_of(found.wait), found.master.meta["grad"]].append(found)
    for bucket in buckets.values():
        _Bucket(program, recipe, bucket).write()
    return sum(map(len, buckets.values()))


# -- 1


def _weight(program: Program, recipe: Recipe, start: fx.Node) -> Weight | str | None:
    """None: nothing quantises it."""
    wait, value = next(iter(start.users)), behind(start)
    readers = _readers(value)
    quantise = [r for r in readers if op_name(r) == "moec.quantise" and r.args[5] in ROLES]
    if not quantise:
        return None
    of_amax = {n for n in readers if op_name(n) in ("moec.amax", SHAPES)}
    if len(quantise) > 1 or set(readers) - of_amax != set(quantise):
        others = sorted({op_name(r) for r in set(readers) - of_amax - set(quantise[:1])})
        return f"the whole weight is read by {', '.join(others)} too"
    if value is not wait:
        return "its parts are of different sizes"
    if start.target not in (TABLE["s_to_r"].op, TABLE[LOW_GATHER].op):
        return "its gradient is not summed where it is gathered"
    (node,) = quantise
    role, both = node.args[5:]
    once = not both or recipe.tile(role, False) == recipe.tile(role, True)
    if not once and dtype_of(wait).itemsize <= 2:
        return f"in {recipe.name} its two layouts have scales of their own, as many bytes as {dtype_of(wait)}"
    weight = Weight(node, start, _views(wait, node.args[0]), role, 1 if once else 2)
    return _cut_inside(program, recipe, weight) or weight


def _readers(value: fx.Node) -> list[fx.Node]:
    """Who reads a value, through views."""
    found = []
    for user in value.users:
        found += _readers(user) if user.target in VIEWS else [user]
    return found


def _views(wait: fx.Node, x: fx.Node) -> list[fx.Node]:
    views = []
    while x is not wait:
        views.append(x)
        x = x.args[0]
    return views[::-1]


def _cut_inside(program: Program, recipe: Recipe, weight: Weight) -> str:
    """Where its part would be cut inside of a tile of which scales are made alone: a complaint."""
    shape, types = weight.quantise.args[0].meta["val"].shape, _part_types(weight)
    cast = Cast(program, recipe)
    for dim in (-2, -1):
        try:
            cast.check_size(shape[dim], types, len(shape) + dim, "the parameter")
        except MoecError as e:
            return e.message
    return ""


def _part_types(weight: Weight) -> Types:
    """Of its part, as it is quantised."""
    types = weight.part.meta["types"]
    for view in weight.views:
        a, b = _swapped(view)
        types = {k: _moved(t, {a: b, b: a}) for k, t in types.items()}
    return types


def _moved(t, to: dict[int, int]):
    return type(t)(t.kind, to.get(t.dim, t.dim), t.parts) if t.kind == "S" else t


def _swapped(view: fx.Node) -> tuple[int, int]:
    ndim = view.meta["val"].ndim
    dims = view.args[1:] if view.target is aten.transpose.int else (0, 1)
    return dims[0] % ndim, dims[1] % ndim


def _through(views: list[fx.Node], dim: int) -> int:
    for view in views:
        a, b = _swapped(view)
        dim = {a: b, b: a}.get(dim, dim)
    return dim


# -- 2 to 4


@dataclass
class _Travelling:
    """A tensor among others: whose layout it is, and along which of its dims the ranks' parts lie."""

    node: fx.Node
    dim: int
    turned: bool = False


class _Bucket:
    """Weights that travel together."""

    def __init__(self, program: Program, recipe: Recipe, weights: list[Weight]) -> None:
        self.program, self.recipe, self.weights = program, recipe, weights
        first = weights[0].start
        self.at, self.size, self.group = first, first.args[-2], group_of(first)
        self.axes = self.group.split(",")

    def write(self) -> None:
        operands = [self._quantised(w) for w in self.weights]  # 2
        gathered = self._gathered([t for o in operands for t in o.values() if isinstance(t, _Travelling)])  # 3
        carriers = self._carriers()  # 4
        for i, (w, mine) in enumerate(zip(self.weights, operands, strict=True)):
            whole = {k: gathered[t.node] if isinstance(t, _Travelling) else t for k, t in mine.items()}
            if w.layouts == 1 and w.quantise.args[6]:
                whole[3] = self._turned(w, whole[1])
                whole[4] = whole[2]
            for k in (1, 3):
                if k in whole:
                    whole[k].meta["gathered"] = ()
            self._put(w, {0: self._viewed(w, carriers[i], w.quantise), **whole})
        for w in reversed(self.weights):
            part = w.part
            self.program.graph.erase_node(w.start)
            sweep(part)

    def _quantised(self, w: Weight) -> dict[int, _Travelling | fx.Node]:
        """By position among the results of ``moec::quantise``: what of its part travels, or is the whole's already."""
        bring_before([w.part, w.master], self.at)
        part = w.part
        if part.meta["grad"]:  # the gradient goes with the carrier
            part = typed(self.program, self.at, aten.detach.default, part)
            part.meta["grad"] = False
        x = self._viewed(w, part, self.at)
        q, scale, q_T, scale_T = self._operands(w, x)
        both = w.quantise.args[6]
        dim = _through(w.views, w.dim)

        def of_all(s: fx.Node) -> _Travelling | fx.Node:
            cut = any(s.meta["types"][a].kind == "S" for a in self.axes)
            return _Travelling(s, dim) if cut else s

        found: dict[int, _Travelling | fx.Node] = {1: _Travelling(q, dim, w.role == "stack"), 2: of_all(scale)}
        if w.layouts == 2:
            return found | {3: _Travelling(q_T, dim, w.role == "weight"), 4: of_all(scale_T)}
        if not both:
            return found | {3: q_T, 4: scale_T}
        for unused in (q_T, scale_T):
            self.program.graph.erase_node(unused)
        return found

    def _operands(self, w: Weight, x: fx.Node) -> list[fx.Node]:
        """``q, scale, q_T, scale_T``; there is no carrier: the gathered one has the gradient."""
        twice = w.layouts == 2 and w.quantise.args[6]
        cast = Cast(self.program, self.recipe)  # over the ranks of FSDP too
        if is_delayed(w.quantise):
            amax = past_of(self.program, self.at, w.quantise, x)
            learn(self.program, self.at, list(w.quantise.args[0].users), x)
        else:
            amax = cast.amax(self.at, x, w.role, None, False)
        tensor = self.recipe.shared == "tensor"
        amax_T = None if not twice else amax if tensor else cast.amax(self.at, x, w.role, None, True)
        args = (x, amax, amax_T, None, self.recipe.text(), w.role, twice)
        node = typed(self.program, self.at, moec_ops.quantise.default, *args)
        made = [result(self.program, node, i) for i in range(1, 5)]
        for n in made:
            n.meta["grad"] = False
        return made

    def _viewed(self, w: Weight, x: fx.Node, at: fx.Node) -> fx.Node:
        for view in w.views:
            x = typed(self.program, at, view.target, x, *view.args[1:])
        return x

    def _gathered(self, parts: list[_Travelling]) -> dict[fx.Node, fx.Node]:
        """Of each part the whole."""
        nodes, dims, turned = [p.node for p in parts], [p.dim for p in parts], [p.turned for p in parts]
        kinds = [n.meta["types"] for n in nodes]
        whole = [{**t, **dict.fromkeys(self.axes, R)} for t in kinds]
        # Of the recorded shapes, that of one rank is what the collective moves.
        vals = [n.meta["val"] for n in nodes]
        shapes = [local_shape(v.shape, t, self.program.mesh) for v, t in zip(vals, whole, strict=True)]
        names = [str(v.dtype).removeprefix("torch.") for v in vals]
        length = sum(torch.Size(s).numel() * v.dtype.itemsize for s, v in zip(shapes, vals, strict=True))
        flat, cut = vals[0].new_empty((length,), dtype=torch.uint8), packed_types(kinds, self.axes)
        done = {**cut, **dict.fromkeys(self.axes, R)}
        packed = self._call(moec_ops.pack_bytes.default, (nodes, turned), flat, cut)
        started = self._call(TABLE["s_to_r"].op, (packed, 0, self.size, self.group), flat, done)
        waited = self._call(WAIT, (started,), flat, done)
        args = (waited, self.size, dims, turned, flatten_shapes(shapes), ",".join(names))
        apart = self._call(moec_ops.unpack_bytes.default, args, vals, whole)
        return {n: self._call(operator.getitem, (apart, i), vals[i], whole[i], n) for i, n in enumerate(nodes)}

    def _carriers(self) -> list[fx.Node]:
        masters, dims = [w.master for w in self.weights], [w.dim for w in self.weights]
        wide = dtype_of(self.weights[0].wait)
        args = (masters, dims, wide, self.size, self.group)
        made = typed(
            self.program, self.at, TABLE[CARRY_PARAMETERS].op, *args, val=[w.wait.meta["val"] for w in self.weights]
        )
        return [result(self.program, made, i) for i in range(len(masters))]

    def _turned(self, w: Weight, q: fx.Node) -> fx.Node:
        made = typed(self.program, w.quantise, moec_ops.turn.default, q, w.role)
        made.meta["grad"] = False
        return made

    def _call(self, target, args: tuple, val, types, like: fx.Node | None = None) -> fx.Node:
        with self.program.graph.inserting_before(self.at):
            made = self.program.graph.call_function(target, args)
        made.meta.update(val=val, types=types, grad=False, where=(like or self.at).meta["where"])
        return made

    def _put(self, w: Weight, operands: dict[int, fx.Node]) -> None:
        """In the place of what was quantised whole."""
        graph = self.program.graph
        amaxes = [n for n in w.quantise.args[1:3] if n is not None]
        for item in list(w.quantise.users):
            item.replace_all_uses_with(operands[item.args[1]])
            graph.erase_node(item)
        graph.erase_node(w.quantise)
        for amax in dict.fromkeys(amaxes):
            erase_maximum(amax)
        for view in reversed(w.views):
            sweep(view)
        graph.erase_node(w.wait)
