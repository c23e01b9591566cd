"""Which gathered parameters the backward needs, and so gathers again when they are resharded after the forward.

Autograd itself is asked: the graph runs once on fake tensors of one rank's shapes, and what is saved for the backward
is looked at.  No data, no communication.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from moec.placement import local_shape
from moec.program import Program
from moec.runtime.once import ONCE
from moec.runtime.torch_compat import WAIT, fake_mode_of, python_dispatcher


def saved_gathers(program: Program) -> dict[fx.Node, list[tuple[fx.Node, int]]]:
    """The last node (in graph order) that saves a gathered parameter -> what its backward gathers again: the start of
    the gather, and how many elements come of it, since of several parameters only those that are saved are."""
    mode = fake_mode_of(n.meta["val"] for n in program.placeholders() if "val" in n.meta)
    gathers = program.resharded()
    if mode is None or not gathers:
        return {}
    values: dict[StorageWeakRef, fx.Node] = {}
    saved_by: dict[fx.Node, fx.Node] = {}  # start -> the last node that saves what it gathered
    elements: dict[fx.Node, dict[fx.Node, int]] = defaultdict(dict)  # start -> value that is saved -> elements
    now: fx.Node | None = None

    def pack(saved: Tensor) -> None:
        value = values.get(StorageWeakRef(saved.untyped_storage()))
        if value is not None and now is not None:
            how = gathers[value]
            saved_by[how.start] = now
            elements[how.start][value] = env[how.shard].numel() * how.start.args[-2]

    env: dict[fx.Node, Any] = {}
    with (
        mode,
        python_dispatcher(),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed),
    ):
        for now in program.graph.nodes:
            if now.op == "placeholder" and now.name == ONCE and program.once is not None:
                by_name = {n.name: n for n in program.placeholders()}
                env[now] = program.once.module(*(_operand(program, by_name[n]) for n in program.once.params))
            elif now.op == "placeholder":
                env[now] = _operand(program, now)
            elif now.op == "get_attr":
                env[now] = mode.from_tensor(program.constants[now.target])
            elif now.op == "call_function":
                args, kwargs = fx.node.map_arg((now.args, now.kwargs), env.__getitem__)
                env[now] = args[0] if now.target is WAIT else now.target(*args, **kwargs)
                if now in gathers:
                    values[StorageWeakRef(env[now].untyped_storage())] = now
    found: dict[fx.Node, list[tuple[fx.Node, int]]] = defaultdict(list)
    for start, node in saved_by.items():
        found[node].append((start, sum(elements[start].values())))
    return dict(found)


def _operand(program: Program, node: fx.Node) -> Tensor | None:
    spec = program.params.get(node.name)
    if spec is None:
        return node.meta.get("val")  # a bound graph has one placeholder more, which is no tensor
    shape = local_shape(spec.shape, spec.types, program.mesh)
    return torch.empty(shape, dtype=spec.dtype, requires_grad=spec.differentiable)
