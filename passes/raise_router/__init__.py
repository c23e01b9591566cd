"""raise_router: the routers of raised blocks become ``moec.route``, where numbers say that they compute what it does.

Contract
    requires   raised
    provides   routed: what a router computes is said by its ``RouteSpec``, or the reason why not is in ``why_not``
    preserves  values, where no two experts of a token tie (of equal scores torch's top-k takes any); a router that a
               model computes below fp32 is computed in fp32
    never      accepts a router because of how it is written; touches what others use of a router's values

For every pair ``permute … unpermute``

1. **Locate** (``region.py``) ids, weights, and values [tokens, E] that both are computed from, together with nothing
   but constants and vectors [E] (a selection bias): the logits are one of these values, tried from the first on.
2. **Fit** (``fit.py``): the nodes between run in float64 on drawn logits, as ordinary, all negative, large and skewed
   ones, with drawn vectors.  The one ``RouteSpec`` is searched that makes ``moec::route`` choose the same experts with
   the same weights and the same gradients, token by token.  Regions that print the same are fitted once.
3. **Replace**: ids and weights of the block are those of the new node (in the user's own dtype and layout).  What
   nobody uses any more goes; what others use (router logits, a loss of the model's own) stays as it is.

Where the pairs (token, choice) are rows of their own, what becomes of them may depend on which choice they are; there a
router must choose in the order of ``moec::route`` too.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from moec.passes.contract import Pass, PassContract
from moec.passes.raise_router.fit import Fit, fit
from moec.passes.raise_router.region import Locator, Region, Unfit
from moec.passes.rewrite import apply, new
from moec.plan import Plan
from moec.program import Program
from moec.runtime import ops  # noqa: F401  registers moec::route

aten, moec_ops = torch.ops.aten, torch.ops.moec


def _run(program: Program, plan: Plan) -> Program:
    locator = Locator(program)
    known: dict[str, Fit | Unfit] = {}
    for permute in program.graph.find_nodes(op="call_function", target=moec_ops.permute.default):
        try:
            _raise(permute, locator, known)
        except Unfit as e:
            where = permute.meta.get("where") or "the model"
            program.why_not.append(f"{where}: the router stays as the model computes it: {e}")
    program.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    program.graph.lint()
    program.module.recompile()
    return program


def _raise(permute: fx.Node, locator: Locator, known: dict[str, Fit | Unfit]) -> None:
    ids, weights, taker = _operands(permute)
    refused: list[Unfit] = []
    for region in locator.regions(ids, weights, permute.args[2]):  # 1
        key = region.text()
        if key not in known:  # 2
            try:
                known[key] = fit(region)
            except Unfit as e:
                known[key] = e
        found = known[key]
        if isinstance(found, Unfit):
            refused.append(found)
        elif not found.in_order and ids.meta["val"].shape[1] != found.spec.top_k:
            text = f"{found.spec.text()} fits, but a token's choices come in another order"
            refused.append(Unfit(text, (-1.0,)))
        else:
            _replace(permute, taker, region, found)  # 3
            return
    if refused:
        raise min(refused, key=lambda e: e.distance)
    raise Unfit("its ids and weights do not follow from a value [tokens, E], constants and vectors [E] alone")


def _operands(permute: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Ids, weights, and the node that takes the weights: the unpermute, or what gives every pair's row its weight."""
    x, ids = permute.args[:2]
    row_of = next(u for u in permute.users if u.args[1] == 2)
    unpermute = next(u for u in row_of.users if u.target is moec_ops.unpermute.default)
    weights = unpermute.args[1]
    if weights.target is not aten.ones_like.default:
        return ids, weights, unpermute
    while x.target is aten._to_copy.default:
        x = x.args[0]
    if x.target is aten.mul.Tensor:
        return ids, x.args[1], x
    if x.target is aten.cat.default:
        return ids, x.args[0][-1], x
    raise Unfit("where its weights enter was not found")


def _replace(permute: fx.Node, taker: fx.Node, region: Region, found: Fit) -> None:
    first, experts = region.logits[0], found.spec.num_experts
    with permute.graph.inserting_before(region.after):
        logits_TE = first if first.meta["val"].ndim == 2 else apply(permute, aten.reshape.default, first, [-1, experts])
        bias_E = None if found.bias is None else region.vectors[found.bias]
        if bias_E is not None and bias_E.meta["val"].ndim != 1:
            bias_E = apply(permute, aten.reshape.default, bias_E, [experts])
        routed = apply(permute, moec_ops.route.default, logits_TE, bias_E, None, None, found.spec.text())
        for i, (old, user) in enumerate(((region.weights, taker), (region.ids, permute))):
            value = new(permute, operator.getitem, (routed, i), routed.meta["val"][i])
            was, now = old.meta["val"], value.meta["val"]
            if was.dtype != now.dtype:
                value = apply(permute, aten._to_copy.default, value, dtype=was.dtype)
            if was.shape[1] != now.shape[1]:
                value = apply(permute, aten.reshape.default, value, [-1, was.shape[1]])
            user.replace_input_with(old, value)


CONTRACT = PassContract(
    name="raise_router",
    requires=frozenset({"raised"}),
    provides=frozenset({"routed"}),
    conflicts_with=frozenset({"sharded", "routed"}),
)
raise_router = Pass(CONTRACT, _run)
