"""configure_router: what ``Plan.router`` asks of the routers: balancing losses, a bias, forced balance, a capacity.

Contract
    requires   routed: what a router computes is one ``moec.route``
    provides   configured
    preserves  nothing but what the plan does not name: what it computes from here on is what one device would
    never      leaves a block out: one whose router stayed the model's own is refused

Legend: B batch, S sequence, T = B*S tokens, E experts, K choices per token.

Algorithm, for every block (``router_losses.py`` writes the losses):

1. The values that its options ask for: the padding mask [T] (of the input ``Router.padding``), the numbers of the
   tokens (``force``), logits in ``Router.dtype``.
2. Buffers that the model lacks (``ParamSpec.initial``): ``<block>.expert_bias`` (fp32 [E]), added to the bias that
   the model may have, and ``<block>.aux_counts`` (int64 [E + 1]: counts since the last optimizer step, and of how many
   forwards; the module keeps it).
3. ``route`` with the changed ``RouteSpec``, and ``drop`` after it where there is a capacity, so that what was chosen
   and what was kept are two values.
4. In training the losses, injected where the weights are.  Each is a statistic ``<block>:<loss>``, and what this
   forward adds to ``aux_counts`` is ``<block>:aux_counts``.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from moec.passes.contract import Pass, PassContract
from moec.passes.rewrite import apply, fake, new
from moec.passes.router_losses import Inputs, losses
from moec.passes.tokens import Tokens, size_of
from moec.plan import Plan
from moec.program import ParamSpec, Program, op_name, placeholder_name
from moec.router import Router
from moec.runtime import ops  # noqa: F401  registers moec::route
from moec.runtime.errors import MoecError
from moec.runtime.route_spec import RouteSpec

aten, moec_ops = torch.ops.aten, torch.ops.moec
CONTRACTIONS = ("aten.linear", "aten.mm", "aten.matmul")


def _run(program: Program, plan: Plan) -> Program:
    assert plan.router is not None
    routes: dict[str, fx.Node] = {}
    for node in program.graph.find_nodes(op="call_function", target=moec_ops.route.default):
        path = node.meta.get("where", "")
        if path in routes:
            raise MoecError("its router runs twice in one forward", where=path, way_out="a plan without router options")
        routes[path] = node
    _refuse_what_is_not_routed(program, routes)
    program.router = plan.router
    configured = _Configure(program, plan, plan.router)
    for path, node in routes.items():
        try:
            configured.block(path, node)
        except MoecError as e:
            raise MoecError(e.message, where=path, way_out=e.way_out) from e
    program.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    program.graph.lint()
    program.module.recompile()
    return program


def _refuse_what_is_not_routed(program: Program, routes: dict[str, fx.Node]) -> None:
    if not program.blocks and not routes:
        reasons = [w for w in program.why_not if "not raised" in w]
        raise MoecError("; ".join(reasons) or "there is no MoE block in this model", where="plan.router")
    missing = [b.path for b in program.blocks if b.path not in routes]
    reasons = [w for w in program.why_not if any(w.startswith(f"{path}: ") for path in missing)]
    if missing:
        raise MoecError(
            f"the router of {', '.join(missing)} cannot be changed: {'; '.join(reasons) or 'it was not raised'}",
            where="plan.router",
            way_out="a plan without router options runs the model's own router; softmax or sigmoid scores and a top-k "
            "are what moec.runtime.route_spec describes",
        )


class _Configure:
    def __init__(self, program: Program, plan: Plan, router: Router) -> None:
        self.program, self.plan, self.router = program, plan, router
        self.graph = program.graph
        self.start = next(n for n in self.graph.nodes if n.op != "placeholder")
        self.tokens = Tokens(program)
        self.made: dict[Any, fx.Node] = {}
        """Values that all blocks share: the padding mask and the tokens' numbers."""

    def block(self, path: str, node: fx.Node) -> None:
        router, program = self.router, self.program
        logits_TE, bias_E, valid_T, token_T, text = node.args
        spec = self._spec(RouteSpec.parse(text))
        with self.graph.inserting_before(node):
            if router.dtype is not None:
                logits_TE = self._logits(node, logits_TE)
            padding_T = self.tokens.valid(logits_TE, router.padding)  # 1
            if padding_T is not None:
                both = valid_T is not None
                valid_T = apply(logits_TE, aten.logical_and.default, valid_T, padding_T) if both else padding_T
            if spec.force:
                token_T = self._numbers(logits_TE)
            if router.expert_bias is not None:  # 2
                mine = self._buffer(path, "expert_bias", (spec.num_experts,), torch.float32, node)
                if bias_E is not None:  # fp32 at least: in bf16, 1 + 0.001 is 1
                    mine = apply(logits_TE, aten.add.Tensor, mine, bias_E)
                bias_E = mine
            counts = None
            if "global" in router.losses:
                counts = self._buffer(path, "aux_counts", (spec.num_experts + 1,), torch.int64, node)
            free = replace(spec, capacity_factor=None, level="global", shards=1)  # 3
            weights, ids = _pair(node, moec_ops.route.default, logits_TE, bias_E, valid_T, token_T, free.text())
            if spec.capacity_factor is not None:
                weights, ids = _pair(node, moec_ops.drop.default, weights, ids, spec.text())
            if program.training and router.losses:  # 4
                seen = Inputs(logits_TE, valid_T, spec, self.tokens.input_of(logits_TE), counts)
                found = losses(seen, router.losses)
                weights = apply(weights, moec_ops.inject.default, weights, found.total)
                for name, value in found.statistics.items():
                    program.add_statistic(f"{path}:{name}", value)
            was = node.meta["val"][0].dtype  # that of the weights is the logits'
            if weights.meta["val"].dtype != was:
                weights = apply(weights, aten._to_copy.default, weights, dtype=was)
        for user in list(node.users):
            user.replace_all_uses_with((weights, ids)[user.args[1]])
            self.graph.erase_node(user)
        self.graph.erase_node(node)

    def _spec(self, spec: RouteSpec) -> RouteSpec:
        router = self.router
        if router.force_balance:
            spec = replace(spec, force=router.force_balance, seed=router.seed)
        if router.capacity_factor is None:
            return spec
        shards = (self.plan.dp or 1) if router.level == "dp_shard" else 1
        return replace(
            spec, capacity_factor=router.capacity_factor, min_capacity=router.min_capacity, drop=router.drop,
            level=router.level, shards=shards,
        )  # fmt: skip

    # -- 1

    def _logits(self, node: fx.Node, logits_TE: fx.Node) -> fx.Node:
        """The contraction that makes the logits, of operands in the dtype asked for; others keep the model's."""
        dtype = getattr(torch, self.router.dtype or "")
        product = logits_TE
        while op_name(product) in ("aten.reshape", "aten._to_copy"):
            product = product.args[0]
        if op_name(product) not in CONTRACTIONS:
            raise MoecError(
                f"dtype={self.router.dtype!r}: its logits are made by {op_name(product)}, not by a linear map",
                way_out="a plan without Router.dtype",
            )
        operands = [
            apply(x, aten._to_copy.default, x, dtype=dtype) if x.meta["val"].dtype != dtype else x
            for x in product.args if isinstance(x, fx.Node)
        ]  # fmt: skip
        out = apply(product, product.target, *operands)
        return apply(product, aten.reshape.default, out, [-1, logits_TE.meta["val"].shape[1]])

    def _numbers(self, logits_TE: fx.Node) -> fx.Node:
        """int64 [T]: b·S + s."""
        like = self.tokens.input_of(logits_TE)
        if like is None:
            raise MoecError("force_balance needs an input [B, S] or [B, S, …] whose tokens are the router's")
        if "numbers" not in self.made:
            with self.graph.inserting_before(self.start):
                B, S = (size_of(like, d) for d in range(2))
                at = {"dtype": torch.int64, "device": like.meta["val"].device}
                of_B, of_S = (apply(like, aten.arange.default, n, **at) for n in (B, S))
                first_B1 = apply(like, aten.mul.Tensor, apply(like, aten.unsqueeze.default, of_B, 1), S)
                token_BS = apply(like, aten.add.Tensor, first_B1, of_S)
                self.made["numbers"] = apply(like, aten.reshape.default, token_BS, [-1])
        return self.made["numbers"]

    # -- 2

    def _buffer(self, path: str, name: str, shape: tuple[int, ...], dtype: torch.dtype, like: fx.Node) -> fx.Node:
        full = f"{path}.{name}" if path else name
        if any(full in (s.name, *s.aliases) for s in self.program.params.values()):
            raise MoecError(f"the model has a {name} of its own there", way_out="another name in the model")
        last = self.program.placeholders()[-1]
        with self.graph.inserting_after(last):
            node = self.graph.placeholder(placeholder_name(full))
        logits = like.args[0].meta["val"]
        with logits.fake_mode:
            val = torch.empty(shape, dtype=dtype, device=logits.device)
        node.meta.update(val=val, where=path)
        self.program.params[node.name] = ParamSpec(
            node.name, full, shape, dtype, False, buffer=True, persistent=name == "expert_bias", initial=0.0
        )
        return node


def _pair(node: fx.Node, target, *args) -> tuple[fx.Node, fx.Node]:
    made = new(node, target, args, fake(target, *args))
    first, second = (new(node, operator.getitem, (made, i), made.meta["val"][i]) for i in range(2))
    return first, second


CONTRACT = PassContract(
    name="configure_router",
    requires=frozenset({"routed"}),
    provides=frozenset({"configured"}),
    conflicts_with=frozenset({"sharded", "configured"}),
    preserves_values=False,
)
configure_router = Pass(CONTRACT, _run, applies=lambda plan: plan.router is not None)
