"""Build: make a ``Program`` of an ``ExportedProgram``.

1. Names: the root's ``model.`` prefix goes; tied parameters become one placeholder under their first name.
2. ``aten.stack`` over the E members of one expert role becomes one placeholder ``[E, …]`` whose name has ``*``.
3. Constants lifted by export become ``get_attr`` nodes.
4. Assertions about metadata and dead code go; ``copy`` (a functionalised ``copy_``, which has no derivative) becomes
   its source, cast and expanded; every parameter stays listed.
5. The batch: dim 0 of inputs that carry it, unless overridden.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from moec.guards import size_guards
from moec.program import InputSpec, MoEBlock, OutputSpec, ParamSpec, Program, placeholder_name
from moec.runtime.errors import MoecError
from moec.runtime.torch_compat import expr

from .blocks import Blocks
from .examples import batch_size

_CHECKS = frozenset({"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size"})


def where_of(node: fx.Node) -> str:
    """Dotted path of the innermost module that the node came from."""
    stack = node.meta.get("nn_module_stack") or {}
    for path, _ in reversed(list(stack.values())):
        name = str(path).split("@")[0]
        parts = name.split(".")
        if "model" in parts:
            return ".".join(parts[parts.index("model") + 1 :])
    return ""


@dataclass(frozen=True)
class _Source:
    """A tensor of the model: its canonical name and every other."""

    name: str
    aliases: tuple[str, ...]
    tensor: Tensor
    buffer: bool
    persistent: bool


def build(
    exported: torch.export.ExportedProgram,
    model: nn.Module,
    given: dict[str, Tensor],
    blocks: Blocks,
    *,
    leaves: list[tuple[str, Any, bool]],
    out_spec: pytree.TreeSpec,
    overrides: dict[str, int | None],
    training: bool,
) -> Program:
    sources = _sources(model)
    signature = exported.graph_signature
    _refuse_writes(exported)
    graph = fx.Graph()
    module = fx.GraphModule(nn.Module(), graph)
    env: dict[fx.Node, Any] = {}
    constants: dict[str, Tensor] = {}
    params: dict[str, ParamSpec] = {}
    inputs: dict[str, InputSpec] = {}
    made: dict[str, fx.Node] = {}
    kinds = {s.arg.name: s for s in signature.input_specs}
    by_placeholder = dict(zip([_safe(p) for p in given], given, strict=True))

    stacks = _stacks(exported, blocks, kinds)
    merged = {m for s in stacks.values() for m in s.members}

    # 1, 2
    for node in exported.graph.find_nodes(op="placeholder"):
        spec = kinds[node.name]
        if spec.kind.name in ("PARAMETER", "BUFFER"):
            source = sources[spec.target.removeprefix("model.")]
            if source.name in made:
                env[node] = made[source.name]
            elif source.name not in merged:
                env[node] = made[source.name] = _placeholder(graph, placeholder_name(source.name), node.meta["val"])
                params[env[node].name] = _param(env[node].name, source)
    for stack in stacks.values():
        if stack.name not in made:
            holder = made[stack.name] = _placeholder(graph, placeholder_name(stack.name), stack.node.meta["val"])
            params[holder.name] = _stacked_param(holder.name, stack, sources)
        env[stack.node] = made[stack.name]
    for node in exported.graph.find_nodes(op="placeholder"):
        if kinds[node.name].kind.name == "USER_INPUT":
            name = next((k for k in by_placeholder if node.name == f"inputs_{k}"), None)
            path = by_placeholder.get(name or "")
            if path is None:
                raise MoecError(f"export renamed an input to {node.name!r}", where="capture")
            env[node] = _placeholder(graph, path if path.isidentifier() else f"input_{name}", node.meta["val"])
            inputs[env[node].name] = _input(env[node], path, given, overrides)
    # 3
    for node in exported.graph.find_nodes(op="placeholder"):
        if kinds[node.name].kind.name == "CONSTANT_TENSOR":
            target = "c_" + _safe(kinds[node.name].target.removeprefix("model."))
            constants[target] = exported.constants[kinds[node.name].target].detach()
            _refuse_recorded(constants[target], blocks)
            module.register_buffer(target, constants[target], persistent=False)
            env[node] = graph.get_attr(target)
            env[node].meta["val"] = node.meta["val"]
            env[node].meta["where"] = ""
    # 4
    for node in exported.graph.nodes:
        if node.op == "placeholder" or node in env:
            continue
        if node.op == "output":
            graph.output(tuple(_mapped(a, env) for a in node.args[0]))
            continue
        if _is_check(node):
            continue
        missing = [a for a in node.all_input_nodes if a not in env]
        if missing:
            raise MoecError(
                f"expert parameter {missing[0].name} is also used on its own, by {node.target}",
                where=where_of(node),
                way_out="use expert parameters in the loop over the experts only",
            )
        if node.target is torch.ops.aten.copy.default:
            env[node] = _copied(graph, node, *(env[a] for a in node.args[:2]))
            continue
        env[node] = graph.node_copy(node, lambda a: env[a])
        env[node].meta["where"] = where_of(node)
    module.graph = graph
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()

    return Program(
        module=module,
        params=params,
        inputs=inputs,
        outputs=_outputs(graph, leaves),
        out_spec=out_spec,
        batch_symbols=frozenset(_batch_symbols(inputs, graph)),
        training=training,
        blocks=tuple(
            MoEBlock(path, r.guide.owner.num_experts, r.guide.found.top_k, _block_params(path, r, sources), r)
            for path, r in blocks.raised.items()
        ),
        constants=constants,
        size_guards=size_guards(graph),
        why_not=[f"{path or type(model).__name__}: MoE block not raised: {y}" for path, y in blocks.refused.items()],
    )


def _safe(name: str) -> str:
    return re.sub(r"\W", "_", name.replace("*", "x"))


def _placeholder(graph: fx.Graph, name: str, val: Any) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = val
    node.meta["where"] = ""
    return node


def _mapped(a: Any, env: dict[fx.Node, Any]) -> Any:
    return env[a] if isinstance(a, fx.Node) else a


def _copied(graph: fx.Graph, node: fx.Node, to: fx.Node, source: fx.Node) -> fx.Node:
    """What ``to.copy_(source)`` leaves in ``to``."""
    aten, want, have = torch.ops.aten, node.meta["val"], source.meta["val"]

    def new(target: Any, args: tuple, val: Any, **kwargs: Any) -> fx.Node:
        made = graph.call_function(target, args, kwargs)
        made.meta = {**node.meta, "val": val, "where": where_of(node)}
        return made

    if have.dtype != want.dtype:
        source = new(aten._to_copy.default, (source,), have.to(want.dtype), dtype=want.dtype)
    if [expr(s) for s in have.shape] != [expr(s) for s in want.shape]:
        size = [s if isinstance(s, int) else new(aten.sym_size.int, (to, d), s) for d, s in enumerate(want.shape)]
        source = new(aten.expand.default, (source, size), want)
    return source


def _is_check(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name.split("::")[1] in _CHECKS


def _refuse_writes(exported: torch.export.ExportedProgram) -> None:
    for spec in exported.graph_signature.output_specs:
        if spec.kind.name.endswith("_MUTATION"):
            name = str(spec.target).removeprefix("model.").removeprefix("inputs_")
            raise MoecError(
                "is written to by the model's forward, which capture does not carry back",
                where=name,
                way_out="write to a copy of it, or keep such statistics outside of the model",
            )


def _refuse_recorded(constant: Tensor, blocks: Blocks) -> None:
    """What was observed must not become part of the graph: a block that hands values of its loop to the
    outside in a way that capture does not see (a list, a closure) would freeze them."""
    for path, r in blocks.raised.items():
        tape = r.guide.tape
        for v in r.guide.found.region.tainted | r.guide.found.outs:
            t = tape.values[v]
            if t is not None and t.numel() and t.untyped_storage().data_ptr() == constant.untyped_storage().data_ptr():
                raise MoecError(
                    "hands values of its routing to the rest of the model in a way that capture cannot follow",
                    where=path,
                    way_out="return it from the block's forward, or keep it in an attribute of the block",
                )


# 1, 2 ---------------------------------------------------------------------------------------------------------------


def _sources(model: nn.Module) -> dict[str, _Source]:
    """Every name of every parameter and buffer -> the tensor under its first name."""
    found: dict[str, _Source] = {}
    everything = [
        (model.named_parameters(remove_duplicate=False), False),
        (model.named_buffers(remove_duplicate=False), True),
    ]
    for named, buffer in everything:
        names: dict[int, list[str]] = {}
        tensors: dict[int, Tensor] = {}
        for n, t in named:
            names.setdefault(id(t), []).append(n)
            tensors[id(t)] = t
        for key, all_names in names.items():
            owner, _, leaf = all_names[0].rpartition(".")
            persistent = not buffer or leaf not in model.get_submodule(owner)._non_persistent_buffers_set
            source = _Source(all_names[0], tuple(all_names[1:]), tensors[key], buffer, persistent)
            found.update(dict.fromkeys(all_names, source))
    return found


def _param(placeholder: str, s: _Source) -> ParamSpec:
    t = s.tensor
    return ParamSpec(
        placeholder, s.name, tuple(t.shape), t.dtype, t.requires_grad, s.buffer, s.persistent, aliases=s.aliases
    )


@dataclass(frozen=True)
class _Stack:
    node: fx.Node
    name: str
    members: tuple[str, ...]


def _stacks(exported: torch.export.ExportedProgram, blocks: Blocks, kinds: dict[str, Any]) -> dict[str, _Stack]:
    """The stack nodes that raising emitted."""
    roles: dict[tuple[str, ...], str] = {}
    for path, r in blocks.raised.items():
        prefix = f"{path}." if path else ""
        if not r.guide.owner.stacked:
            for role, names in r.guide.owner.roles.items():
                roles[tuple(prefix + n for n in names)] = prefix + role
    found = {}
    for node in exported.graph.find_nodes(op="call_function", target=torch.ops.aten.stack.default):
        spec = [kinds.get(a.name) for a in node.args[0]]
        members = tuple(s.target.removeprefix("model.") if s is not None and s.target else "" for s in spec)
        if members in roles:
            found[node.name] = _Stack(node, roles[members], members)
    return found


def _stacked_param(placeholder: str, stack: _Stack, sources: dict[str, _Source]) -> ParamSpec:
    members = [sources[m] for m in stack.members]
    frozen = [s.name for s in members if not s.tensor.requires_grad]
    if frozen and len(frozen) < len(members):
        raise MoecError(
            f"{len(frozen)} of {len(members)} experts are frozen ({frozen[0]}, …)",
            where=stack.name,
            way_out="set requires_grad alike for all experts of a block: they become one parameter",
        )
    tied = [s for s in members if s.aliases]
    if tied or len({s.name for s in members}) < len(members):
        raise MoecError("experts share a parameter", where=stack.name, way_out="give each expert its own parameters")
    first = members[0].tensor
    return ParamSpec(
        placeholder, stack.name, (len(members), *first.shape), first.dtype, not frozen, members=stack.members
    )


def _block_params(path: str, raised: Any, sources: dict[str, _Source]) -> tuple[str, ...]:
    prefix = f"{path}." if path else ""
    owner, body = raised.guide.owner, raised.guide.found.body
    used = set(body.params.values())
    return tuple(
        sources[prefix + role].name if owner.stacked else prefix + role for role in owner.roles if role in used
    )


# 5 ------------------------------------------------------------------------------------------------------------------


def _input(node: fx.Node, path: str, given: dict[str, Tensor], overrides: dict[str, int | None]) -> InputSpec:
    val = node.meta["val"]
    static = tuple(int(s) if expr(s).is_number else None for s in val.shape)
    if path in overrides:
        dim = overrides[path]
    else:
        dim = 0 if _carries_batch(given[path], given) else None
    return InputSpec(node.name, path, dim, val.dim(), val.dtype, static)


def _carries_batch(t: Tensor, given: dict[str, Tensor]) -> bool:
    b = batch_size(given)
    if t.dim() >= 2:
        return t.shape[0] == b
    if t.dim() == 1:
        sequences = {x.shape[1] for x in given.values() if x.dim() >= 2}
        return t.shape[0] == b and b not in sequences
    return False


def _batch_symbols(inputs: dict[str, InputSpec], graph: fx.Graph) -> set[str]:
    found: set[str] = set()
    for node in graph.find_nodes(op="placeholder"):
        spec = inputs.get(node.name)
        if spec is not None and spec.batch_dim is not None:
            size = expr(node.meta["val"].shape[spec.batch_dim])
            found.update(str(s) for s in size.free_symbols)
    return found


def _outputs(graph: fx.Graph, leaves: list[tuple[str, Any, bool]]) -> list[OutputSpec]:
    results = graph.output_node().args[0]
    out, index = [], 0
    for path, constant, computed in leaves:
        if not computed:
            out.append(OutputSpec(path, None, constant))
            continue
        val = results[index].meta.get("val") if isinstance(results[index], fx.Node) else results[index]
        shape = tuple(val.shape) if isinstance(val, Tensor) else ()
        out.append(OutputSpec(path, index, global_shape=shape))
        index += 1
    return out
