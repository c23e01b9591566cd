"""fuse_norm: a norm by the root mean square that a model spells out becomes one op.

Contract
    requires   sharded
    provides   fused_norm
    preserves  values: in fp32 and fp64, the mean of a row may be summed in another order
    never      moves a collective

Why: ``weight * (x * rsqrt(mean(x²) + eps))`` is six reads of x forward and about fifteen backward, and what autograd
keeps of it is three times as large as x.

Algorithm, for each ``aten.rsqrt``:
    1. It is of the mean over the last dim of the squares of some x, plus a number.
    2. It is multiplied by x, and that by a vector as long as a row, all of one dtype; nobody else reads the two.
       (A model in bf16 rounds what the weight multiplies: that stays as it is.)
    3. One ``moec.rms_norm`` in the place of the last product.
"""

from __future__ import annotations

import torch
from torch import fx

from moec.passes.contract import Pass, PassContract
from moec.passes.typed import dtype_of, result, sweep, typed
from moec.plan import Plan
from moec.program import Program

aten = torch.ops.aten
WIDE = (torch.float32, torch.float64)


def _run(program: Program, plan: Plan) -> Program:
    for rsqrt in program.graph.find_nodes(op="call_function", target=aten.rsqrt.default):
        found = _squares(rsqrt)
        if found is None:
            continue
        if (reason := _join(program, rsqrt, *found)) is not None:
            program.why_not.append(f"{rsqrt.meta.get('where') or 'a norm'}: the norm is not fused: {reason}")
    program.graph.lint()
    program.module.recompile()
    return program


def _squares(rsqrt: fx.Node) -> tuple[fx.Node, float] | None:  # 1
    """x and eps."""
    add = rsqrt.args[0]
    if add.target not in (aten.add.Tensor, aten.add.Scalar) or not isinstance(add.args[1], (int, float)) or add.kwargs:
        return None
    mean = add.args[0]
    if mean.target is not aten.mean.dim or len(mean.args) != 3 or mean.args[2] is not True or mean.kwargs:
        return None
    square = mean.args[0]
    if list(mean.args[1]) not in ([-1], [square.meta["val"].ndim - 1]):
        return None
    if square.target is aten.pow.Tensor_Scalar and square.args[1] == 2 and not square.kwargs:
        x = square.args[0]
    elif square.target is aten.mul.Tensor and square.args[0] is square.args[1]:
        x = square.args[0]
    else:
        return None
    return x, float(add.args[1])


def _join(program: Program, rsqrt: fx.Node, x: fx.Node, eps: float) -> str | None:  # 2 and 3
    """None when done; else why not."""
    unit = _product(rsqrt)
    if unit is None or x not in unit.args or unit.args[0] is unit.args[1]:
        return "its scale is not only multiplied by its input"
    product = _product(unit)
    if product is None:
        return "its rows are not only multiplied by a weight"
    (weight,) = [a for a in product.args if a is not unit] or [None]
    shape = tuple(weight.meta["val"].shape) if isinstance(weight, fx.Node) else ()
    size, length = x.meta["val"].shape[-1], shape[0] if len(shape) == 1 else 1
    if length == 1 or not isinstance(length, int) or (isinstance(size, int) and size != length):
        return "its rows are not only multiplied by a weight"  # as long as they are: a free size can be no other
    if dtype_of(x) not in WIDE or dtype_of(weight) != dtype_of(x):
        return f"it is formed in {dtype_of(x)}, its weight is {dtype_of(weight)}"
    joined = typed(program, product, torch.ops.moec.rms_norm.default, x, [length], weight, eps)
    y = result(program, joined, 0)
    y.meta.update({k: v for k, v in product.meta.items() if k not in ("val", "types")})
    product.replace_all_uses_with(y)
    sweep(product)
    return None


def _product(node: fx.Node) -> fx.Node | None:
    """The product that alone reads ``node``."""
    (user, *others) = node.users or [None]
    return user if user is not None and not others and user.target is aten.mul.Tensor and not user.kwargs else None


CONTRACT = PassContract(
    name="fuse_norm",
    requires=frozenset({"sharded"}),
    provides=frozenset({"fused_norm"}),
    conflicts_with=frozenset({"fused_norm", "lowered"}),
)
fuse_norm = Pass(CONTRACT, _run, applies=lambda plan: plan.fuse)
