"""A covering set of plans: every pair of values of two axes that can stand together is in at least one plan.

The axes are dp, tp, cp, ep, etp, sequence parallelism and FSDP (none, over all of dp, over half of it).  All plans of a
world are listed, and a greedy cover takes the one with the most pairs that are still missing, the first such in order;
so the set is small, and the same everywhere.
"""

from __future__ import annotations

from itertools import combinations, product

from moec.plan import Plan
from moec.runtime.errors import MoecError


def all_plans(world: int) -> list[Plan]:
    sizes = [d for d in range(1, world + 1) if world % d == 0]
    found = []
    for tp, cp, ep, etp in product(sizes, repeat=4):
        if world % (tp * cp) or world % (ep * etp):
            continue
        dp = world // (tp * cp)
        for sp, fsdp in product((False, True), (False, True, 2)):
            plan = Plan(dp, tp, ep, etp, cp, sequence_parallel=sp, fsdp=fsdp)
            # sequence_parallel without tp, FSDP without dp, and half of dp where it is all or nothing, say nothing new
            if (sp and tp == 1) or (fsdp and dp == 1) or (fsdp == 2 and fsdp is not True and dp <= 2):
                continue
            try:
                plan.mesh(world)
            except MoecError:
                continue
            found.append(plan)
    return found


def values(plan: Plan) -> list[tuple[str, object]]:
    fsdp = {False: "no", True: "dp"}.get(plan.fsdp, "half") if isinstance(plan.fsdp, bool) else "half"
    return [
        ("dp", plan.dp), ("tp", plan.tp), ("cp", plan.cp), ("ep", plan.ep), ("etp", plan.etp),
        ("sp", plan.sequence_parallel), ("fsdp", fsdp),
    ]  # fmt: skip


def pairs(plan: Plan) -> set[tuple]:
    return set(combinations(values(plan), 2))


def covering(world: int) -> list[Plan]:
    plans = all_plans(world)
    missing = set().union(*map(pairs, plans))
    chosen = []
    while missing:
        best = max(plans, key=lambda p: len(pairs(p) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def name(plan: Plan) -> str:
    text = "-".join(f"{k}{v}" for k, v in values(plan) if k in ("dp", "tp", "cp", "ep", "etp") and v != 1)
    return text + ("-sp" if plan.sequence_parallel else "") + ("" if plan.fsdp is False else f"-fsdp{plan.fsdp:d}")
