"""The always-on checks: a right program passes, and each kind of damage is caught by its checker, which names the node
and the module that it came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from sabotage import mistakes
from spmd import STAGES, Shape, compiled
from torch import fx

from moec.passes.verify import check_shapes, check_structure, check_types, verify
from moec.passes.verify.reinfer import _alike
from moec.placement import I, P, R, S
from moec.program import Program, op_name
from moec.runtime.collectives import TABLE, collective, is_start
from moec.runtime.errors import MoecError
from moec.runtime.torch_compat import WAIT

SHAPE, PLAN = Shape(12, biased=True), (2, 2, 4, 1)


def stage(name: str) -> Program:
    return dict(compiled(SHAPE, PLAN))[name].fork()


def find(program: Program, test: Callable[[fx.Node], bool]) -> fx.Node:
    return next(n for n in program.graph.nodes if n.op == "call_function" and test(n))


def of_kind(program: Program, kind: str, inside: str = "") -> fx.Node:
    return find(program, lambda n: n.target is TABLE[kind].op and n.meta["where"].startswith(inside))


def started(program: Program) -> tuple[fx.Node, fx.Node]:
    """A start in the MoE block and its wait."""
    start = find(program, lambda n: is_start(n.target) and n.meta["where"] == "layers.0.moe")
    return start, next(iter(start.users))


# -- damage: each returns the node that must be named ----------------------------------------------------------------


def wait_dropped(p: Program) -> fx.Node:
    start, wait = started(p)
    wait.replace_all_uses_with(start)
    p.graph.erase_node(wait)
    return start


def waited_for_twice(p: Program) -> fx.Node:
    start, wait = started(p)
    with p.graph.inserting_after(start):
        second = p.graph.call_function(WAIT, (start,))
    second.meta.update(wait.meta)
    next(iter(wait.users)).replace_input_with(wait, second)
    return start


def wait_of_a_wait(p: Program) -> fx.Node:
    _, wait = started(p)
    with p.graph.inserting_after(wait):
        second = p.graph.call_function(WAIT, (wait,))
    second.meta.update(wait.meta)
    wait.replace_all_uses_with(second, delete_user_cb=lambda u: u is not second)
    return second


def read_before_the_wait(p: Program) -> fx.Node:
    start, wait = started(p)
    next(iter(wait.users)).replace_input_with(wait, start)
    return start


def unknown_group(p: Program) -> fx.Node:
    start, _ = started(p)
    start.args = (*start.args[:-1], "dp_nowhere")
    return start


def group_of_another_size(p: Program) -> fx.Node:
    start, _ = started(p)
    start.args = (*start.args[:-2], start.args[-2] * 2, start.args[-1])
    return start


def group_out_of_order(p: Program) -> fx.Node:
    node = find(p, lambda n: collective(n.target) is not None and "," in n.args[-1] and n.meta["where"])
    node.args = (*node.args[:-1], ",".join(reversed(node.args[-1].split(","))))
    return node


def branch(p: Program) -> fx.Node:
    start, _ = started(p)
    with p.graph.inserting_before(start):
        node = p.graph.call_method("neg", (start.args[0],))
    node.meta.update(start.args[0].meta)
    start.args = (node, *start.args[1:])
    return node


def conversion_missing(p: Program) -> fx.Node:
    """A parameter used as it is stored (I) where its gradient is a sum over dp."""
    q = find(p, lambda n: op_name(n) == "aten.linear" and n.meta["where"] == "layers.0.attention.q")
    node = q.args[1]
    assert node.target is TABLE["i_to_r"].op
    user = next(iter(node.users))
    node.replace_all_uses_with(node.args[0])
    p.graph.erase_node(node)
    return user


def sum_left_pending(p: Program) -> fx.Node:
    node = of_kind(p, "p_to_i", "layers.0.attention")
    wait = next(iter(node.users))
    user = next(iter(wait.users))
    wait.replace_all_uses_with(node.args[0])
    return user


def sum_with_another_gradient(p: Program) -> fx.Node:
    node = of_kind(p, "p_to_i", "layers.0.attention")
    node.target = TABLE["p_to_r"].op
    return node


def gathered_along_another_dim(p: Program) -> fx.Node:
    node = of_kind(p, "s_to_i", "layers.0.moe")
    node.args = (node.args[0], 1, *node.args[2:])
    return node


def recorded_as_another_type(p: Program) -> fx.Node:
    node = find(p, lambda n: op_name(n) == "aten.scaled_dot_product_attention")
    node.meta["types"] = dict.fromkeys(node.meta["types"], I)
    return node


def routed_whole(p: Program) -> fx.Node:
    """Tokens that are not dealt over ep reach the experts."""
    node = find(p, lambda n: op_name(n) == "moec.permute")
    for slot in (0, 1):
        source = node.args[slot]
        with p.graph.inserting_before(node):
            whole = p.graph.call_function(TABLE["s_to_r"].op, (source, 0, 2, "tp_ep"))
            wait = p.graph.call_function(WAIT, (whole,))
        for n in (whole, wait):
            n.meta.update(source.meta)
            n.meta["types"] = {**source.meta["types"], "tp_ep": R}
        node.replace_input_with(source, wait)
        wait.args[0].args = (source, *wait.args[0].args[1:])
    return node


def local_size_wrong(p: Program) -> fx.Node:
    node = find(p, lambda n: op_name(n) == "aten.reshape" and n.meta["where"] == "layers.0.attention")
    node.args = (node.args[0], [s * 2 if s == 18 else s // 2 if s == 36 else s for s in node.args[1]])
    node.args = (node.args[0], [*node.args[1][:-1], node.args[1][-1] * 2])
    return node


def another_operator(p: Program) -> fx.Node:
    """It gets what the right one got."""
    node = find(p, lambda n: op_name(n) == "aten.rsqrt")
    node.target = torch.ops.aten.isnan.default
    return node


def another_operand(p: Program) -> fx.Node:
    node = find(p, lambda n: op_name(n) == "aten.rsqrt")
    node.args = (find(p, lambda n: op_name(n) == "aten.pow"),)
    return node


def another_argument(p: Program) -> fx.Node:
    """The dim is not kept."""
    node = find(p, lambda n: op_name(n) == "aten.mean")
    node.args = (*node.args[:2], False)
    return node


def recorded_shape_wrong(p: Program) -> fx.Node:
    node = find(p, lambda n: op_name(n) == "moec.route")
    getitem = next(iter(node.users))
    getitem.meta["val"] = getitem.meta["val"].unsqueeze(0)
    return getitem


def recorded_dtype_wrong(p: Program) -> fx.Node:
    node = find(p, lambda n: op_name(n) == "aten.scaled_dot_product_attention")
    node.meta["val"] = node.meta["val"].to(torch.float64)
    return node


def sharding_recorded_wrong(p: Program) -> fx.Node:
    """The value is whole over tp, and is recorded as sharded there."""
    node = find(p, lambda n: op_name(n) == "aten.linear" and n.meta["where"].endswith("attention.q"))
    node.meta["types"] = {a: R if t == S(2) else t for a, t in node.meta["types"].items()}
    return node


DAMAGE = [
    (check_structure, wait_dropped, "0 waits"),
    (check_structure, waited_for_twice, "2 waits"),
    (check_structure, wait_of_a_wait, "starts nothing"),
    (check_structure, read_before_the_wait, "2 users|not exactly one wait"),
    (check_structure, unknown_group, "dp_nowhere"),
    (check_structure, group_of_another_size, "of size 8"),
    (check_structure, group_out_of_order, "not a group"),
    (check_structure, branch, "may branch"),
    (check_types, conversion_missing, "needs an operand of type R"),
    (check_types, sum_left_pending, "gets P"),
    (check_types, sum_with_another_gradient, "follows as"),
    (check_types, gathered_along_another_dim, r"is fed S\(0\)"),
    (check_types, recorded_as_another_type, "is recorded as"),
    (check_types, routed_whole, r"not S\(0\)"),
    (check_shapes, local_size_wrong, "does not run on the shapes"),
    (check_shapes, another_operator, "is torch.bool"),
    (check_shapes, another_operand, "was recorded as"),
    (check_shapes, another_argument, "was recorded as"),
    (check_shapes, recorded_shape_wrong, "was recorded as"),
    (check_shapes, recorded_dtype_wrong, "float64"),
    (check_shapes, sharding_recorded_wrong, "on one rank"),
]


@pytest.mark.parametrize(("checker", "damage", "text"), DAMAGE, ids=[d.__name__ for _, d, _ in DAMAGE])
def test_damage_is_caught_by_its_checker(checker, damage, text) -> None:
    program = stage("shard")
    checker(program)
    culprit = damage(program)
    with pytest.raises(MoecError, match=text) as e:
        checker(program)
    assert culprit.name in str(e.value)
    assert culprit.meta["where"] and culprit.meta["where"] in str(e.value)


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("degrees", [PLAN, (1, 4, 1, 4), (4, 1, 2, 2)], ids=str)
def test_right_programs_pass(name, degrees) -> None:
    verify(dict(compiled(SHAPE, degrees))[name])


def test_a_reduction_that_the_epilogue_forgot() -> None:
    program = stage("lower")
    name = next(iter(program.grad_reductions))
    del program.grad_reductions[name]
    with pytest.raises(MoecError, match="is R on") as e:
        verify(program)
    assert program.params[name].name in str(e.value)


def test_a_pending_sum_never_leaves() -> None:
    program = stage("shard")
    loss = next(iter(reversed(program.graph.nodes))).args[0][0]
    loss.meta["types"] = dict.fromkeys(loss.meta["types"], P)
    with pytest.raises(MoecError, match=f"{loss.name}.*|pending sum"):
        check_types(program)


def test_every_sibling_is_told_apart() -> None:
    """P -> I and P -> R move the same data forward; the types know them apart without running anything."""
    swapped = [m for m in mistakes(stage("shard")) if "->" in m.what]
    assert len(swapped) > 5
    for m in swapped:
        with pytest.raises(MoecError):
            check_types(m.program)


@pytest.mark.parametrize("what", ["input", "output", "missing"])
def test_the_contract_of_inputs_and_outputs(what) -> None:
    program = stage("shard")
    if what == "input":
        program.inputs.pop(next(iter(program.inputs)))
    elif what == "output":
        program.outputs[0] = replace(program.outputs[0], index=99)
    else:
        program.inputs["ghost"] = next(iter(program.inputs.values()))
    with pytest.raises(MoecError, match=r"not exactly one of|names|no placeholder for"):
        check_structure(program)


def test_what_an_op_can_tell_apart_is_not_alike():
    """Or the result of another run would stand for what it gives."""
    x = torch.empty(4, 6, device="meta")
    assert _alike((x, [1, {"dim": slice(0, 2)}, None]), (torch.empty_like(x), [1, {"dim": slice(0, 2)}, None]))
    turned, behind = x.T.contiguous().T, x.new_empty(30)[6:].view(4, 6)
    for other in (turned, behind, x.new_empty(6, 4), x.double(), torch.empty(4, 6), None):
        assert not _alike(x, other), other
    pairs = ((1, True), (1, 1.0), (0, None), ([1], (1,)), ([1], [1, 2]), ({"a": 1}, {"b": 1}), (slice(1), slice(2)))
    for a, b in pairs:
        assert not _alike(a, b), (a, b)
