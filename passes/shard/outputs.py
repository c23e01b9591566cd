"""Outputs: what each rank hands back, as the contract with users says.

Scalars are invariant.  A tensor that carries the batch stays this rank's slice over dp, logits beside a loss stay
sharded by the vocabulary over tp, anything else becomes whole; ``Plan.outputs`` chooses ``full`` or ``drop`` instead.
Statistics leave the graph behind the outputs, pending sums as what they are.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from moec.placement import R, S, Type
from moec.program import OutputSpec, Statistic, op_name
from moec.runtime.errors import MoecError


def place_outputs(ctx, node: fx.Node) -> None:
    """``ctx`` is the pass (``Sharder``), ``node`` the graph's output."""
    leaves = list(node.args[0])
    # Entries are taken at labels: what they are taken from is logits beside a loss.
    beside_loss = any(op_name(n) == "moec.pick" for n in ctx.graph.nodes if n.op == "call_function")
    kept: list[fx.Node] = []
    specs: list[OutputSpec] = []
    for spec in ctx.program.outputs:
        if spec.index is None:
            specs.append(spec)
            continue
        value = leaves[spec.index]
        val = value.meta["val"]
        mode = ctx.plan.output_mode(spec.path) if val.ndim else "sharded"
        if mode == "drop":
            specs.append(replace(spec, index=None, constant=None))
            continue
        vocabulary = beside_loss and bool(val.ndim) and val.shape[-1] == ctx.vocabulary_size
        value = ctx.convert(value, {a: _type(ctx, value, a, spec, mode, vocabulary) for a in ctx.mesh.names})
        specs.append(
            replace(spec, index=len(kept), types=dict(value.meta["types"]), global_shape=tuple(value.meta["val"].shape))
        )
        kept.append(value)
    ctx.program.outputs = specs
    for name, statistic in ctx.program.statistics.items():
        value = leaves[statistic.index]
        if split := [a for a, t in value.meta["types"].items() if t.kind not in "IRP"]:
            raise MoecError(f"a part of it each on the ranks of {', '.join(split)}", where=f"statistic {name}")
        ctx.program.statistics[name] = Statistic(len(kept), dict(value.meta["types"]))
        kept.append(value)
    node.args = (tuple(kept),)


def _type(ctx, value: fx.Node, axis: str, spec: OutputSpec, mode: str, vocabulary: bool) -> Type:
    t: Type = value.meta["types"][axis]
    shape = value.meta["val"].shape
    if mode != "full":
        if t.kind == "S" and axis in ctx.dp and ctx.sizes.carries_batch(shape[t.dim]):
            return t
        if vocabulary and axis in ctx.tp and t == S(len(shape) - 1):
            return t
    if t == R and value.meta["grad"]:
        raise MoecError(
            f"output {spec.path!r} would be replicated over {axis} with a gradient that is summed once a rank",
            where=value.meta.get("where", ""),
            way_out="report this model: the layout should leave it invariant",
        )
    return ctx.default_type(value)
