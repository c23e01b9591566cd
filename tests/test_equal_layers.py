"""Equal layers are captured three times and copied: the program is the one that capture in full gives, or is that."""

import copy
import re
from dataclasses import replace

import pytest
import torch
from deep_models import UNALIKE, UNEQUAL, Alternating, Collected, Deep, batch

import moec
import moec.hf
from moec import compiler
from moec.capture import capture
from moec.capture.examples import flatten_call
from moec.capture.export import _capture
from moec.capture.layers import Unknown, Used, find_repeats
from moec.capture.thin import Irregular, Thin
from moec.passes.expand import Unlike, expand_layers
from moec.passes.verify.reinfer import check_shapes
from moec.placement import I
from moec.program import Program, Repeat, op_name
from moec.runtime.torch_compat import expr, is_unbacked

PLAN, WORLD = moec.Plan(dp=2, tp=2, ep=4), 4
OTHER_AXES = [
    moec.Plan(dp=2, tp=2, sequence_parallel=True, ep=2),
    moec.Plan(dp=4, fsdp=4, ep=2),
    moec.Plan(dp=2, cp=2, ep=4),
]


def compile_both(model, kwargs, monkeypatch, plan=PLAN, world=WORLD) -> tuple[Program, Program]:
    """The short way and the long way."""
    seen = []
    short = moec.compile_program(
        model, plan, world, (), kwargs, training=True, observe=lambda name, p: seen.append((name, bool(p.repeats)))
    )
    assert seen[0] == ("captured", True) and seen[-1] == ("expand", False), short.why_not
    with monkeypatch.context() as patched:
        full_capture = compiler.capture
        patched.setattr(compiler, "capture", lambda *a, reduced, **k: full_capture(*a, **k))
        return short, moec.compile_program(model, plan, world, (), kwargs, training=True)


def text(program: Program) -> list[str]:
    """The rendered graph without the numbers that tell nodes of one name apart."""
    return [re.sub(r"_\d+\b", "", line) for line in program.render().splitlines()]


def assert_equal(short: Program, full: Program) -> None:
    assert text(short) == text(full)
    for field in ("params", "grad_reductions", "statistics", "layout_reasons", "outputs", "inputs", "size_guards"):
        assert getattr(short, field) == getattr(full, field), field
    assert list(short.params) == list(full.params)
    strip = [[(b.path, b.num_experts, b.top_k, b.stacked) for b in p.blocks] for p in (short, full)]
    assert strip[0] == strip[1]
    assert not short.why_not and not full.why_not


def kwargs() -> dict[str, torch.Tensor]:
    return dict(zip(("ids", "labels"), batch(), strict=True))


def test_the_program_is_that_of_the_long_way(monkeypatch):
    short, full = compile_both(Deep(), kwargs(), monkeypatch)
    assert_equal(short, full)


def test_proved_with_all_layers():
    report = moec.check(Deep(layers=5), moec.Plan(tp=2, ep=2), example_kwargs=kwargs(), world_size=2)
    assert report.ok and report.passes[-1].name == "expand", report


def test_runs_with_all_layers():
    model = Deep(layers=5).double()
    ours = moec.parallelize(model, moec.Plan(), example_kwargs=kwargs())
    (loss, logits), (want, want_logits) = ours(**kwargs()), model(**kwargs())
    loss.backward(), want.backward()
    torch.testing.assert_close((loss, logits), (want, want_logits))
    torch.testing.assert_close(moec.full_grads(ours), {n: p.grad for n, p in model.named_parameters()})


@pytest.mark.parametrize("name", UNEQUAL)
def test_unequal_layers_are_seen(name):
    assert find_repeats(Deep()) == (Repeat("layers", 0, 1, 6),)
    assert find_repeats(UNEQUAL[name]()) == ()


def test_periods():
    assert find_repeats(Alternating()) == (Repeat("layers", 0, 2, 5),)


@pytest.mark.parametrize("name", UNALIKE)
def test_equal_layers_that_are_used_differently(name):
    model = UNALIKE[name]()
    (repeat,) = find_repeats(model)
    with pytest.raises((Irregular, Used, moec.MoecError)):
        _capture(model, flatten_call((), kwargs()), True, {}, None, Thin(model, (repeat,)))


def test_the_long_way_is_taken_and_said():
    program = capture(UNALIKE["branches on its index"](), kwargs=kwargs(), training=True, reduced=True)
    assert program.repeats == () and len(program.blocks) == 6
    assert any("captured one by one: its forward computes with the layer's index" in w for w in program.why_not)


@pytest.fixture(scope="module")
def captured() -> Program:
    return capture(Deep(), kwargs=kwargs(), training=True, reduced=True)


def third(program: Program, target) -> torch.fx.Node:
    found = [n for n in program.graph.nodes if n.target is target and n.meta["where"].startswith("layers.2")]
    return found[0]


DAMAGE = {
    "another operation": lambda p, n: setattr(n, "target", torch.ops.aten.relu.default),
    "another operand": lambda p, n: setattr(n, "args", (n.args[0].args[0],)),
    "another shape": lambda p, n: n.meta.update(val=n.meta["val"].new_empty(3)),
    "another type": lambda p, n: n.meta.update(types={"tp": I}),
    "from elsewhere": lambda p, n: n.meta.update(where="head"),
    "used outside": lambda p, n: p.graph.output_node().update_arg(0, (*p.graph.output_node().args[0], n)),
    "a constant": lambda p, n: third(p, torch.ops.aten.topk.default).update_arg(1, 1),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_third_layer_that_is_not_the_second_is_not_copied(captured, name):
    program = captured.fork()
    for n, m in zip(captured.graph.nodes, program.graph.nodes, strict=True):
        m.meta = dict(n.meta)
    DAMAGE[name](program, third(program, torch.ops.aten.silu.default))
    with pytest.raises(Unlike):
        expand_layers(program)
    assert len(expand_layers(captured.fork()).blocks) == 6


def test_parameters_must_be_placed_alike(captured):
    program = captured.fork()
    spec = program.params["p_layers_2_router_weight"]
    program.params[spec.placeholder] = replace(spec, types={"tp": I})
    with pytest.raises(Unlike, match="parameter"):
        expand_layers(program)


def test_what_layers_leave_behind_is_seen_in_the_graph():
    program = capture(Collected(), kwargs=kwargs(), training=True, reduced=True)
    assert program.repeats
    with pytest.raises(Unlike, match="hand on"):
        expand_layers(program)


@pytest.mark.nightly
def test_what_layers_leave_behind_takes_the_long_way():
    seen = []
    program = moec.compile_program(
        Collected(), moec.Plan(), 1, (), kwargs(), training=True, observe=lambda name, p: seen.append(name)
    )
    assert len(program.blocks) == 6 and "one by one" in "".join(program.why_not)
    assert seen.count("captured") == 2 and seen[-1] == "lower"


def test_an_index_can_be_handed_on_and_nothing_else():
    index = Unknown("layers.0.layer_idx")
    assert isinstance(index, int) and copy.deepcopy(index) is index
    for use in (lambda: index + 1, lambda: index == 1, lambda: [0, 1][index], lambda: f"{index}", lambda: bool(index),
                lambda: {index: 1}, lambda: torch.ones(2) * index):  # fmt: skip
        with pytest.raises(Used):
            use()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_hugging_face(name, monkeypatch):
    dense = {"first_k_dense_replace": 1} if name == "deepseek_v3" else {}
    model = moec.hf.build(name, 10 if name == "gpt_oss" else 6, **dense)
    ids = torch.randint(0, 100, (4, 9))
    assert_equal(*compile_both(model, {"input_ids": ids, "labels": ids.clone()}, monkeypatch))
    report = moec.check(model, PLAN, world_size=WORLD)
    assert report.ok and report.passes[-1].name == "expand", report


@pytest.mark.nightly
@pytest.mark.parametrize("plan", OTHER_AXES, ids=str)
def test_every_axis(captured, plan, monkeypatch):
    full = capture(Deep(), kwargs=kwargs(), training=True)
    programs = []
    for start in (captured, full):
        monkeypatch.setattr(compiler, "capture", lambda *_, start=start, **__: start.fork())
        programs.append(moec.compile_program(Deep(), plan, WORLD, (), kwargs(), training=True))
    assert_equal(*programs)


@pytest.mark.nightly
def test_two_kinds_of_layers_in_turn(monkeypatch):
    assert_equal(*compile_both(Alternating(), kwargs(), monkeypatch))


def test_copies_of_a_layer_have_sizes_of_their_own():
    """What depends on data in one layer is no size of another, though the same ops get the same shapes there."""
    stages = {}
    moec.compile_program(
        Deep(layers=5), moec.Plan(dp=2, ep=2), 2, batch(), {}, training=True, observe=lambda n, p: stages.update({n: p})
    )
    program = compiler.expanded(stages["shard"])
    check_shapes(program)
    sizes = [expr(n.meta["local"].shape[0]) for n in program.graph.nodes if op_name(n) == "moec.all_to_all"]
    assert len(sizes) == len(set(sizes)) == 10 and all(map(is_unbacked, sizes))
