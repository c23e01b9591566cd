"""Re-inference: every op runs again on fake tensors, and shapes and dtypes must be the recorded ones.

Before ``shard`` the recorded shapes are compared as they are.  After it, fakes have local shapes, and each dim must
satisfy ``local * shards == global`` by the recorded types (the batch symbol is local in the graph: global is
local * dp).
Ragged dims have a size of their own and are skipped.  Local fakes are kept in ``node.meta["local"]``.
"""

from __future__ import annotations

import operator

import sympy
import torch
from torch import fx

from moec.placement import Types, local_shape
from moec.program import Program
from moec.runtime.errors import MoecError
from moec.runtime.torch_compat import WAIT, expr, fake_mode_of, is_unbacked, python_dispatcher


def check_shapes(program: Program) -> None:
    fake_mode = fake_mode_of(n.meta["val"] for n in program.placeholders())
    if fake_mode is None:
        return
    sharded = "sharded" in program.facts
    env: dict[fx.Node, object] = {}
    with fake_mode, python_dispatcher(), torch.no_grad():
        for node in program.graph.nodes:
            if node.op == "placeholder":
                env[node] = local_placeholder(program, node, sharded)
            elif node.op == "get_attr":
                env[node] = fake_mode.from_tensor(program.constants[node.target])
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                try:
                    env[node] = args[0] if node.target is WAIT else node.target(*args, **kwargs)
                except MoecError:
                    raise
                except Exception as e:
                    raise MoecError(
                        f"{node.format_node()} does not run on the shapes that reach it: {e}",
                        where=node.meta.get("where", ""),
                    ) from e
                if sharded:
                    node.meta["local"] = env[node]
                if node.meta.get("val") is not None:
                    _compare(program, node, node.meta["val"], env[node], node.meta.get("types"), sharded)


def local_placeholder(program: Program, node: fx.Node, sharded: bool):
    val = node.meta["val"]
    spec = program.params.get(node.name)
    if spec is None or not sharded:
        return val
    shape = local_shape(spec.shape, spec.types, program.mesh)
    return torch.empty(shape, dtype=spec.dtype, device=val.device)


def _compare(program: Program, node: fx.Node, recorded, found, types, sharded: bool) -> None:
    if isinstance(recorded, (tuple, list)):
        if node.target is operator.getitem or not isinstance(found, (tuple, list)) or len(found) != len(recorded):
            raise MoecError(f"{node.name} yields {type(found).__name__}", where=node.meta.get("where", ""))
        for i, (r, f) in enumerate(zip(recorded, found, strict=True)):
            _compare(program, node, r, f, types[i] if isinstance(types, list) else types, sharded)
        return
    if not isinstance(recorded, torch.Tensor):
        return
    if not isinstance(found, torch.Tensor) or found.dtype != recorded.dtype or found.ndim != recorded.ndim:
        if sharded and isinstance(found, torch.Tensor) and any(t.kind == "V" for t in types.values()):
            return  # counts by (rank, expert) stand for the counts by expert
        raise MoecError(
            f"{node.name} was recorded as {_show(recorded)}, and is {_show(found)}", where=node.meta.get("where", "")
        )
    for d, (r, f) in enumerate(zip(recorded.shape, found.shape, strict=True)):
        if sharded and d == 0 and ("padded" in node.meta or any(t.kind == "V" for t in types.values())):
            continue
        if not _same(program, expr(r), expr(f), types, d, sharded):
            raise MoecError(
                f"dim {d} of {node.name} ({node.format_node()}) was recorded as {r} with types {types}, "
                f"and is {f} on one rank",
                where=node.meta.get("where", ""),
            )


def _same(
    program: Program, recorded: sympy.Expr, found: sympy.Expr, types: Types | None, dim: int, sharded: bool
) -> bool:
    if is_unbacked(recorded) and is_unbacked(found):
        return True  # a size that depends on data gets a new name whenever it is inferred
    if sharded and types is not None:
        mesh = program.mesh
        dp = mesh.size(mesh.role("dp"))
        recorded = recorded.subs({s: s * dp for s in recorded.free_symbols if str(s) in program.batch_symbols})
        found = found * mesh.size([a for a, t in types.items() if t.kind == "S" and t.dim == dim])
    return sympy.expand(recorded - found) == 0


def _show(x) -> str:
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
