"""Re-inference: every op runs again on fake tensors, and shapes and dtypes must be the recorded ones.

Before ``shard`` the recorded shapes are compared as they are.  After it, fakes have local shapes, and each dim must
satisfy ``local * shards == global`` by the recorded types (the batch symbol is local in the graph: global is
local * dp).
Ragged dims have a size of their own and are skipped.  Local fakes are kept in ``node.meta["local"]``.

Most passes leave most nodes alone.  What an op gave is kept with what it was given (``node.meta["inferred"]``); where
the same op gets the same again, it gives the same again and does not run.  Every comparison is made all the same.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from moec.placement import Types, local_shape
from moec.program import Program
from moec.runtime.errors import MoecError
from moec.runtime.torch_compat import WAIT, expr, fake_mode_of, is_unbacked, python_dispatcher


class _Inferred(NamedTuple):
    """One run of an op on fakes."""

    name: str
    """Of the node: a copy of it in another layer has sizes of its own where they depend on data."""
    target: object
    given: tuple
    """Positional and named arguments, values in the place of nodes."""
    found: object


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
                try:
                    env[node] = _infer(node, env)
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


def _infer(node: fx.Node, env: dict[fx.Node, object]) -> object:
    given = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
    args, kwargs = given
    if node.target is WAIT:
        return args[0]
    last = node.meta.get("inferred")
    if last is None or last[:2] != (node.name, node.target) or not _alike(last.given, given):
        last = node.meta["inferred"] = _Inferred(node.name, node.target, given, node.target(*args, **kwargs))
    return last.found


def _alike(a: Any, b: Any) -> bool:
    """Does no op tell these arguments apart?  Fakes have nothing but sizes, strides, dtype and device."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_alike(v, b[k]) for k, v in a.items())
    if isinstance(a, slice):
        return _alike((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, torch.Tensor):
        return (
            (a.dtype, a.device, a.ndim) == (b.dtype, b.device, b.ndim)
            and getattr(a, "constant", None) is getattr(b, "constant", None)  # a fake may know its value
            and _alike((*a.shape, *a.stride(), a.storage_offset()), (*b.shape, *b.stride(), b.storage_offset()))
        )
    if isinstance(a, torch.SymInt):
        return expr(a) == expr(b)
    return isinstance(a, (int, float, str, torch.dtype, torch.device)) and a == b


def local_placeholder(program: Program, node: fx.Node, sharded: bool):
    val = node.meta["val"]
    spec = program.params.get(node.name)
    if spec is None or not sharded:
        return val
    shape = local_shape(spec.shape, spec.types, program.mesh)
    last = node.meta.get("inferred")  # the same fake again, so that what is computed of it is known
    if last is None or tuple(last.shape) != tuple(shape) or (last.dtype, last.device) != (spec.dtype, val.device):
        last = node.meta["inferred"] = torch.empty(shape, dtype=spec.dtype, device=val.device)
    return last


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
    return recorded == found or sympy.expand(recorded - found) == 0


def _show(x) -> str:
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
