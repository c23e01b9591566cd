"""use_transformer_engine: with ``Plan(backend="te")``, what Transformer Engine can express becomes ``moec_te::`` ops.

Contract
    requires   sharded
    provides   nothing
    preserves  values, up to the rounding of another implementation
    never      changes what a rank sends or receives; takes an op that TE would compute differently

Algorithm (runtime/transformer_engine.py says what each op may be given)
    1. TE must be there and agree with moec on this machine's GPU, or nothing is compiled.
    2. A router: its spec, no padding (TE has no −1), fp32 or less.
    3. A permute whose ids come from such a router, and whose numbering goes to unpermutes alone: all of them together,
       since the numbering becomes TE's own.
    4. Grouped products of bf16, fp16 or fp32.
    5. Products in FP8, linears and experts', of recipes and sizes that TE has (runtime/transformer_engine_fp8.py).
       Their operands stay quantised by the nodes that quantise them.
    What is declined stays moec's, and ``why_not`` says why.
"""

from __future__ import annotations

import torch
from torch import fx

from moec.passes.contract import Pass, PassContract
from moec.plan import Plan
from moec.program import Program, op_name
from moec.runtime import transformer_engine, transformer_engine_fp8
from moec.runtime.fp8 import Recipe
from moec.runtime.route_spec import RouteSpec
from moec.runtime.torch_compat import OpOverload

BACKEND = "te"
ours, theirs = torch.ops.moec, torch.ops.moec_te
FP8 = {
    ours.fp8_linear.default: theirs.fp8_linear.default,
    ours.fp8_grouped_mm.default: theirs.fp8_grouped_mm.default,
}


def _run(program: Program, plan: Plan) -> Program:
    transformer_engine.require()  # 1
    if plan.precision is not None and plan.precision.fp8 is not None:
        transformer_engine_fp8.require(plan.precision.fp8)
    for node in list(program.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target == ours.route.default:  # 2
            _take(program, {node: theirs.route.default}, _router(node))
        elif node.target in (ours.permute.default, ours.permute_kept.default):  # 3
            back = _unpermutes(node)
            targets = {node: theirs.permute.default, **dict.fromkeys(back, theirs.unpermute.default)}
            _take(program, targets, _permute(node, back))
        elif node.target == ours.grouped_mm.default:  # 4
            _take(program, {node: theirs.grouped_mm.default}, _dtype(node.args[0]))
        elif node.target in FP8:  # 5
            _take(program, {node: FP8[node.target]}, _fp8(node))
    program.graph.lint()
    program.module.recompile()
    return program


def _take(program: Program, targets: dict[fx.Node, OpOverload], reason: str | None) -> None:
    if reason is None:
        for node, target in targets.items():
            node.target = target
    else:
        node = next(iter(targets))
        where = f"{node.meta['where']}: " if node.meta.get("where") else ""
        program.why_not.append(f"{where}{op_name(node)} is not Transformer Engine's: {reason}")


def _dtype(value: fx.Node) -> str | None:
    dtype = value.meta["val"].dtype
    return None if dtype in transformer_engine.DTYPES else f"it computes no {str(dtype).removeprefix('torch.')}"


def _fp8(node: fx.Node) -> str | None:
    x, w, recipe = node.args[0], node.args[1].meta["val"], node.args[-2]
    features = tuple(int(n) for n in w.shape[-2:])
    return transformer_engine_fp8.refused(Recipe.parse(recipe), features, (x.meta["val"].dtype, w.dtype))


def _router(node: fx.Node) -> str | None:
    logits, bias, valid, _, text = node.args
    if valid is not None:
        return "padded tokens have no expert"
    return transformer_engine.refused(RouteSpec.parse(text), bias is not None) or _dtype(logits)


def _unpermutes(node: fx.Node) -> list[fx.Node]:
    """The users of a permute's numbering."""
    return [u for item in node.users if item.args[1] == 2 for u in item.users]


def _permute(node: fx.Node, back: list[fx.Node]) -> str | None:
    ids = node.args[1]
    source = ids.args[0] if ids.args else None
    if node.target == ours.permute_kept.default or getattr(source, "target", None) != theirs.route.default:
        return "its ids may be -1"
    for user in back:
        if user.target != ours.unpermute.default:
            return f"{op_name(user)} reads its numbering of the rows"
    return _dtype(node.args[0])


CONTRACT = PassContract(name="use_transformer_engine", requires=frozenset({"sharded"}))
use_transformer_engine = Pass(CONTRACT, _run, applies=lambda plan: plan.backend == BACKEND)
