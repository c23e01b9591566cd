"""Export: ``capture`` a model as a ``Program``.

1. Examples: the caller's, or a Hugging Face model's own ``dummy_inputs``; only their shapes are used.
2. If asked to, look for runs of equal layers: capture with most of them hollow first (``thin``), the long way if that
   does not work out.
3. A skeleton of the model is run once on fake tensors, to find its MoE blocks (``blocks``).
4. Another skeleton is exported with ``torch.export`` (not strict, every dim of every input dynamic) while the guides of
   the raised blocks stand for their forwards.
5. What ``torch.no_grad()`` covered is detached explicitly, because the next step forgets it.
6. ``run_decompositions({})`` leaves a functional graph of high-level aten operations.
7. Randomness, writes to inputs and buffers, and blocks that did not export are refused.
8. ``build`` makes the Program.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from moec.grouped import PlainGroupedMM
from moec.program import Program
from moec.runtime import torch_compat
from moec.runtime.errors import MoecError

from .blocks import Blocks, find_blocks, forwards_replaced, guided
from .build import build, where_of
from .examples import Call, dotted, dummy_examples, fabricate, flatten_call
from .layers import Used, find_repeats
from .observe import randomness
from .skeleton import device_of, skeleton
from .thin import Irregular, Thin, closed

RECOGNISED = (
    "moec raises blocks that compute sum_k weight[t, k] * expert_ids[t, k](x[t]), the weight applied before, inside or "
    "after the expert, with isomorphic experts (a ModuleList, or stacked parameters [E, ...]): loops over experts, "
    "weights gathered per token, dense masks, padded or dispatched slots; the simplest is a loop with torch.where and "
    "index_add_"
)


class Returned:
    """How the model's output was flattened.  An object that pytree does not look into: export puts attributes that are
    containers back to what they were."""

    def __init__(self) -> None:
        self.leaves: list[tuple[str, Any, bool]] = []
        """(path, constant, whether the graph computes it)"""
        self.out_spec: pytree.TreeSpec | None = None


class Root(nn.Module):
    """What is exported: the model, called with a dict of tensors; returns a flat tuple of tensors."""

    def __init__(self, model: nn.Module, call: Any, loss_fn: Callable | None) -> None:
        super().__init__()
        self.model = model
        self.call = call
        self.loss_fn = loss_fn
        self.returned = Returned()

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Any, ...]:
        args, kwargs = self.call.rebuild(inputs)
        # What is captured is what the model does when it runs: some have a longer way round for other exporters (a
        # triangular solve as 63 updates of a row).
        with torch_compat.as_in_eager():
            out = self.model(*args, **kwargs)
        if self.loss_fn is not None:
            out = {"loss": self.loss_fn(out, *args, **kwargs), "output": out}
        register_dataclasses(out)
        leaves, self.returned.out_spec = flatten_output(out)
        self.returned.leaves = [(path, None if _computed(x) else x, _computed(x)) for path, x in leaves]
        return tuple(x for _, x in leaves if _computed(x))


def _computed(x: Any) -> bool:
    return isinstance(x, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))


def capture(
    model: nn.Module,
    args: tuple = (),
    kwargs: dict[str, Any] | None = None,
    *,
    training: bool,
    inputs: Mapping[str, int | None] | None = None,
    loss_fn: Callable | None = None,
    reduced: bool = False,
) -> Program:
    """Capture ``model`` called with ``args`` and ``kwargs`` (only the shapes of tensors matter), in train or eval mode.

    Without arguments the model's own ``dummy_inputs`` are used.  ``inputs`` overrides which dim of an input is the
    batch (path -> dim or None).  With ``loss_fn`` the graph also computes ``loss_fn(output, *args, **kwargs)``, called
    with what the model was called with, and the program returns ``{"loss": …, "output": …}``.

    With ``reduced`` the program may hold a few of many equal layers (``Program.repeats``, which ``expand`` fills in).
    """
    kwargs = dict(kwargs or {})
    if not args and not kwargs:
        args, kwargs = dummy_examples(model, training=training)  # 1
    call = flatten_call(args, kwargs)
    given = call.tensors()
    unknown = sorted(set(inputs or {}) - set(given))
    if unknown:
        raise MoecError(
            f"no tensor input is called {unknown[0]!r}", where="inputs", way_out=f"name one of {sorted(given)}"
        )

    def run(thin: Thin) -> Program:
        with PlainGroupedMM():
            return _capture(model, call, training, dict(inputs or {}), loss_fn, thin)

    repeats = find_repeats(model) if reduced else ()  # 2
    why_not = []
    if repeats:
        try:
            return run(Thin(model, repeats))
        except Exception as e:  # whatever it is: the long way works, or says better what does not
            why_not = [f"{r.path}: equal layers are captured one by one: {_reason(e)}" for r in repeats]
    program = run(Thin(model, ()))
    program.why_not += why_not
    return program


def _capture(
    model: nn.Module,
    call: Call,
    training: bool,
    inputs: dict[str, int | None],
    loss_fn: Callable | None,
    thin: Thin,
) -> Program:
    given = call.tensors()
    shapes = fabricate(given)
    blocks = _find(model, call, shapes, training, thin)  # 3

    twin, mode = skeleton(model, training=training, hollow=thin.hollow)
    thin.prepare(twin)
    root = Root(twin, call, loss_fn)
    examples = _fakes(mode, shapes, given, model)
    auto = torch.export.Dim.AUTO
    dynamic = {"inputs": {p: dict.fromkeys(range(t.dim()), auto) for p, t in examples.items()}}
    try:
        with forwards_replaced(twin, guided(twin, blocks)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with thin.watched(twin):
                exported = torch.export.export(root, (examples,), dynamic_shapes=dynamic, strict=False)  # 4
            leaves, out_spec = root.returned.leaves, root.returned.out_spec
            _detach_no_grad(exported)  # 5
            exported = exported.run_decompositions({})  # 6
    except (MoecError, Irregular, Used):
        raise
    except Exception as e:
        raise _not_exported(model, blocks, e) from e
    if training:
        _refuse_randomness(exported.graph)  # 7
    assert out_spec is not None
    program = build(  # 8
        exported,
        model,
        given,
        blocks,
        leaves=leaves,
        out_spec=out_spec,
        overrides=inputs,
        training=training,
    )
    if thin.repeats:
        closed(program.graph, thin.repeats)
        program.module.recompile()
        program.repeats = thin.repeats
    return program


def _reason(error: Exception) -> str:
    text = error.message if isinstance(error, MoecError) else str(error)
    kind = "" if isinstance(error, (MoecError, Irregular, Used)) else f"{type(error).__name__}: "
    return kind + (text.strip().splitlines() or [""])[0]


def _find(model: nn.Module, call: Call, shapes: dict[str, Tensor], training: bool, thin: Thin) -> Blocks:
    twin, mode = skeleton(model, training=training, hollow=thin.hollow)
    thin.prepare(twin)
    device = device_of(model)
    stand_ins = {
        p: torch_compat.symbolic_fake(mode, torch.empty(t.shape, dtype=t.dtype, device=device), f"input_{i}")
        for i, (p, t) in enumerate(shapes.items())
    }
    args, kwargs = call.rebuild(stand_ins)

    def run() -> None:
        with thin.watched(twin):
            twin(*args, **kwargs)

    with mode, torch_compat.python_dispatcher():
        return find_blocks(model, twin, run, training=training, without=thin.hollow)


def _fakes(mode: Any, shapes: dict[str, Tensor], given: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    out = {}
    with mode:
        for p, t in shapes.items():
            device = device_of(model) if given[p].is_meta else given[p].device
            out[p] = torch.empty(t.shape, dtype=t.dtype, device=device, requires_grad=given[p].requires_grad)
    return out


def register_dataclasses(out: Any) -> None:
    """A user's own dataclass comes back as such: let pytree see into it."""
    if isinstance(out, type) or out is None:
        return
    if dataclasses.is_dataclass(out) and pytree.tree_structure(out).is_leaf():
        torch.export.register_dataclass(type(out))
    leaves = pytree.tree_leaves(out)
    if not (len(leaves) == 1 and leaves[0] is out):
        for x in leaves:
            if dataclasses.is_dataclass(x):
                register_dataclasses(x)


def flatten_output(out: Any) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    try:
        with_paths, spec = pytree.tree_flatten_with_path(out)
    except ValueError:  # a type registered without keys
        leaves, spec = pytree.tree_flatten(out)
        return [(str(i), x) for i, x in enumerate(leaves)], spec
    return [(dotted(path) or "output", x) for path, x in with_paths], spec


# 5 ------------------------------------------------------------------------------------------------------------------


def _detach_no_grad(exported: torch.export.ExportedProgram) -> None:
    graph = exported.graph
    needs_grad = {s.arg.name for s in exported.graph_signature.input_specs if s.target is None}
    trained = {n for n, p in exported.named_parameters() if p.requires_grad}
    needs_grad |= {s.arg.name for s in exported.graph_signature.input_specs if s.target in trained}
    flows: set[fx.Node] = set()
    for n in list(graph.nodes):
        if n.op == "placeholder":
            if n.name in needs_grad and _is_float(n.meta.get("val")):
                flows.add(n)
            continue
        if not any(a in flows for a in n.all_input_nodes):
            continue
        if torch_compat.is_no_grad_region(n.target) and n.args[0] is False:
            for item in list(n.users):
                if _is_float(item.meta.get("val")):
                    with graph.inserting_after(item):
                        d = graph.call_function(torch.ops.aten.detach.default, (item,))
                    d.meta = dict(item.meta)
                    item.replace_all_uses_with(d, delete_user_cb=lambda u, d=d: u is not d)
            continue
        if n.target is not torch.ops.aten.detach.default:
            flows.add(n)
    exported.graph_module.recompile()


def _is_float(val: Any) -> bool:
    return isinstance(val, Tensor) and val.is_floating_point()


# 7 ------------------------------------------------------------------------------------------------------------------


_RANDOM = ("bernoulli", "rand", "normal", "uniform", "exponential", "multinomial", "dropout")


def _refuse_randomness(graph: fx.Graph) -> None:
    for n in graph.nodes:
        if n.op != "call_function" or not isinstance(n.target, torch_compat.OpOverload):
            continue
        name = n.target._schema.name.split("::")[1]
        where = where_of(n)
        if "dropout" in name:
            p = n.args[1] if len(n.args) > 1 else 0.5
            if p and (len(n.args) < 3 or n.args[2]):
                raise randomness(name, f"p = {p}", where)
        elif name == "scaled_dot_product_attention":
            p = n.args[4] if len(n.args) > 4 else n.kwargs.get("dropout_p", 0.0)
            if p:
                raise randomness(name, f"dropout_p = {p}", where)
        elif name.startswith(_RANDOM) or name.startswith("native_dropout"):
            raise randomness(name, ", ".join(str(a) for a in n.args if not isinstance(a, fx.Node)), where)


def _not_exported(model: nn.Module, blocks: Blocks, error: Exception) -> MoecError:
    reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    if blocks.refused:
        path, why = next(iter(blocks.refused.items()))
        return MoecError(
            f"this MoE block is not in a form that capture knows ({why}), "
            f"and it does not export as it stands ({reason})",
            where=path or type(model).__name__,
            way_out=RECOGNISED,
        )
    return MoecError(
        f"torch.export cannot trace this model: {reason}",
        where=type(model).__name__,
        way_out="make the forward free of branches on tensor values; " + RECOGNISED,
    )
