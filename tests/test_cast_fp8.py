"""cast_fp8: which products, on the grid, the same on any number of ranks, and every mistake seen.

Legend: B batch, S sequence, H hidden, E experts.
"""

from dataclasses import replace

import fp8_model as model
import grid
import numpy as np
import pytest
import torch
from spmd import Batch, Shape, build, captured, compile_stages, oracle
from torch import fx
from witness import WitnessError, witness

import moec
from moec.check import _Oracle, _relative
from moec.compiler import PIPELINE, compile_program
from moec.passes import manager
from moec.passes.verify import verify
from moec.plan import Plan
from moec.precision import Precision
from moec.program import op_name
from moec.runtime.errors import MoecError
from moec.runtime.fp8 import RECIPES, Recipe

SHAPE = Shape(4, 2, biased=True)
BATCH = Batch(4, 6, 0, 4)
NOW = [name for name in RECIPES if name != "delayed"]
moec_ops = torch.ops.moec


def compiled(recipe, degrees=(1, 1, 1, 1), shape=SHAPE, stage="lower", exclude=("first", "last"), **options):
    plan = Plan(*degrees, precision=Precision(fp8=recipe, exclude=exclude), **options)
    return dict(compile_stages(captured(shape), plan))[stage]


def calls(program, *names):
    return [n for n in program.graph.nodes if n.op == "call_function" and op_name(n) in names]


class Recorder(fx.Interpreter):
    """Values of every node."""

    def run_node(self, n):
        self.values = getattr(self, "values", {})
        self.values[n] = super().run_node(n)
        return self.values[n]


def recorded(program):
    """Values of a one-rank program's nodes on a batch, and what its backward's FP8 products were given."""
    module, (ids, labels) = build(SHAPE), BATCH.tensors()
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    given = {s.path: t for s, t in zip(program.inputs.values(), (ids, labels), strict=True)}
    inputs = []
    for node in program.placeholders():
        if node.name in program.params:
            inputs.append(tensors[program.params[node.name].name].detach().clone().requires_grad_())
        else:
            inputs.append(given[program.inputs[node.name].path])
    recorder = Recorder(program.module)
    outs = recorder.run(*inputs)
    loss = next(o for o in outs if isinstance(o, torch.Tensor) and o.ndim == 0 and o.requires_grad)
    backward = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            backward.append((func._schema.name, args, out))
            return out

    with Seen():
        loss.backward()
    return recorder.values, backward


@pytest.mark.parametrize("recipe", NOW)
def test_every_operand_lies_on_the_recipes_grid(recipe):
    program = compiled(recipe, stage="cast_fp8")  # what is fused then has the same bits (test_fuse_quantise.py)
    values, backward = recorded(program)
    products = calls(program, "moec.fp8_linear", "moec.fp8_grouped_mm")
    assert len(products) == 5 + 2  # k v o, shared up and down; experts' up and down
    checked = 0
    for node in products:
        counts = 1 if op_name(node) == "moec.fp8_grouped_mm" else 0
        for q, scale in zip(
            node.args[2 + counts : 10 + counts : 2], node.args[3 + counts : 11 + counts : 2], strict=True
        ):
            source = q.args[0]
            assert op_name(source) == "moec.quantise" and scale.args[0] is source and scale.args[1] == q.args[1] + 1
            same_as_the_model(values[source.args[0]], values[source], source, q.args[1] == 3, values)
            checked += 1
    assert checked == 4 * len(products)
    found = [(name, args, out) for name, args, out in backward if name == "moec::quantise" and args[5] == "grad"]
    assert len(found) == len(products)
    for _, (g, _, _, counts, name, role, _), (_, *made) in found:
        for transposed in (False, True):
            check(g, counts, made[2 * transposed], made[2 * transposed + 1], name, role, transposed)
    ends = {n for n, *_ in backward} & {
        "moec::fp8_dgrad",
        "moec::fp8_wgrad",
        "moec::fp8_grouped_dgrad",
        "moec::fp8_grouped_wgrad",
    }
    assert len(ends) == 4
    for name, args, _ in backward:
        if name in ends:
            assert (
                sum(t.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) for t in args if isinstance(t, torch.Tensor))
                == 2
            )


def same_as_the_model(x, made, node, transposed, values):
    counts = values[node.args[3]] if node.args[3] is not None else None
    _, *q = made
    check(x, counts, q[2 * transposed], q[2 * transposed + 1], *node.args[4:6], transposed)


def check(x, counts, q, scale, recipe, role, transposed):
    x = x.detach()
    if counts is not None:
        alignment, rows = Recipe.parse(recipe).alignment, torch.zeros(x.shape[0], dtype=torch.bool)
        start = 0
        for n in counts.tolist():
            rows[start : start + n] = True
            start += -(-n // alignment) * alignment
        x = x * rows[:, None]
    many = x if role == "stack" else x.reshape(1, -1, x.shape[-1])
    if not transposed:
        q, scale = (t if role == "stack" else t.reshape(1, -1, t.shape[-1]) for t in (q, scale))
    else:
        q, scale = (t if role == "stack" else t[None] for t in (q, scale))
    for e in range(many.shape[0]):
        want_q, want_scale, _ = model.quantised(many[e].numpy(), recipe, role, transposed)
        assert np.array_equal(q[e].double().numpy(), want_q)
        assert np.array_equal(scale[e].float().double().numpy(), want_scale)


PLANS = {
    "dp tp ep": ((2, 2, 4, 1), {}), "etp": ((2, 2, 2, 2), {}), "fsdp": ((2, 1, 2, 1), {"fsdp": True}),
    "sp": ((1, 2, 2, 1), {"sequence_parallel": True}), "allgather": ((2, 1, 2, 1), {"dispatch": "allgather"}),
}  # fmt: skip
SOME = [("current", "dp tp ep"), ("rowwise", "etp"), ("current", "sp"), ("rowwise", "fsdp")]
ALL = [(r, p) for r in ("current", "rowwise") for p in PLANS if (r, p) not in SOME]


@pytest.mark.parametrize(("recipe", "plan"), [*SOME, *(pytest.param(*case, marks=pytest.mark.nightly) for case in ALL)])
def test_any_number_of_ranks_computes_what_one_does(recipe, plan):
    degrees, options = PLANS[plan]
    truth = oracle(build(SHAPE), BATCH)
    program = compiled(recipe, degrees, **options)
    got, want = truth._run(program), truth._run(compiled(recipe))
    assert any(e.kind == "m_to_i" and e.phase == "forward" for e in got.log)
    assert any(e.kind == "m_to_i" and e.phase == "backward" for e in got.log)
    same(program, got, want, 1e-12)
    exact = truth._run(dict(compile_stages(captured(SHAPE), Plan(1, 1, 1, 1)))["lower"])
    away = _relative(want.outputs["logits"], exact.outputs["logits"])
    assert 1e-3 < away < 0.3, "FP8 neither nothing nor noise"


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_tiles_are_those_of_one_rank(recipe):
    """Tokens dealt out to ranks in whole experts: forward to the last bit, weights' gradients but for tiles of
    tokens."""
    truth = oracle(build(SHAPE), BATCH)
    program = compiled(recipe, (2, 1, 2, 1))
    got, want = truth._run(program), truth._run(compiled(recipe))
    assert not any(e.kind == "m_to_i" for e in got.log)
    for path in want.outputs:
        assert _relative(got.outputs[path], want.outputs[path]) < 1e-12
    same(program, got, want, 0.03)


def same(program, got, want, tolerance):
    assert got.disagreement == 0
    scale = max(float(g.norm()) for g in want.grads.values() if g is not None) * 1e-2
    for name, g in want.grads.items():
        if g is not None:  # keys' biases have none in exact arithmetic
            assert float((got.grads[name] - g).norm()) <= tolerance * max(float(g.norm()), scale), program.params[
                name
            ].name


def test_what_stays_out():
    program = compiled("current", stage="cast_fp8")
    left = {n.args[1].name: op_name(n) for n in calls(program, "aten.linear", "moec.grouped_mm")}
    reasons = [w for w in program.why_not if "not FP8" in w]
    for path, why in (
        ("layers.0.attention.q", "first"),
        ("layers.0.moe.router", "router"),
        ("embed", "head"),
        ("layers.0.moe.shared_gate", "one vector"),
    ):
        assert any(w.startswith(path) and why in w for w in reasons), (path, reasons)
    assert len(left) == len(reasons)
    program = compiled("current", stage="cast_fp8", exclude=("*.attention.*", "layers.0.moe.down"))
    reasons = [w for w in program.why_not if "excludes it" in w]
    assert len(reasons) == 5 and len(calls(program, "moec.grouped_mm")) == 1
    assert len(calls(program, "moec.unalign_rows")) == 1, "what is in FP8 is aligned, and the rest is not"


def test_nothing_is_quantised_twice():
    program = compiled("mxfp8", stage="cast_fp8")
    sources = [(n.args[0], n.args[3], n.args[5]) for n in calls(program, "moec.quantise")]
    assert len(sources) == len(set(sources))


def test_rows_of_a_permute_are_aligned_by_it():
    program = compiled("blockwise", stage="fuse_experts")
    assert len(calls(program, "moec.permute_aligned")) == 1
    assert not calls(program, "moec.permute", "moec.align_rows", "moec.unalign_rows")
    assert not any("experts are computed op by op" in w for w in program.why_not), "fuse_quantise has yet to see them"
    aligned = calls(compiled("blockwise", (2, 1, 2, 1), stage="cast_fp8"), "moec.align_rows", "moec.unalign_rows")
    assert len(aligned) == 2


def test_a_dim_that_is_cut_inside_of_a_tile_is_refused():
    with pytest.raises(
        MoecError, match=r"layers.0.attention.*tiles of 32.*tp_etp leaves each rank 18 of the 36 features"
    ):
        compiled("mxfp8", (1, 2, 1, 2))


def test_a_missing_maximum_is_caught():
    """By the verifier and by the witness."""
    program = compiled("rowwise", (2, 1, 2, 1), stage="cast_fp8")
    verify(program)
    witness(program)
    kinds = {"moec.m_to_i": 0, "moec.i_to_m": 0}
    names = [n.name for n in calls(program, *kinds)]
    for name in names[::3]:
        broken = program.fork()
        node = next(n for n in broken.graph.nodes if n.name == name)
        kinds[op_name(node)] += 1
        end = next(iter(node.users)) if op_name(node) == "moec.m_to_i" else node
        end.replace_all_uses_with(node.args[0])
        broken.graph.eliminate_dead_code()
        with pytest.raises(MoecError):
            verify(broken)
        with pytest.raises(WitnessError):
            witness(broken)
    assert all(kinds.values())


def test_a_maximum_of_other_ranks_changes_the_numbers():
    """Sabotage in numbers: each rank's own maximum, forward or backward, is not what one rank computes."""
    truth = oracle(build(SHAPE), BATCH)
    program = compiled("current", (2, 1, 2, 1))
    want = truth._run(compiled("current"))
    for kind in ("m_to_i", "i_to_m"):
        broken = program.fork()
        for node in calls(broken, f"moec.{kind}"):
            other = broken.graph.call_function
            with broken.graph.inserting_before(node):
                own = other(torch.ops.aten.clone.default, (node.args[0],))
            own.meta.update(node.meta)
            node.replace_all_uses_with(own)
            for user in [u for u in own.users if "wait" in str(u.target)]:
                user.replace_all_uses_with(own)
        broken.graph.eliminate_dead_code()
        broken.module.recompile()
        got = truth._run(broken)
        with pytest.raises(AssertionError):
            same(broken, got, want, 1e-12)


def test_an_unpadded_group_is_caught():
    program = compiled("current", stage="fuse_experts")
    broken = program.fork()
    node = calls(broken, "moec.permute_aligned")[0]
    node.args = (*node.args[:3], 1, node.args[4])
    broken.module.recompile()
    with pytest.raises(MoecError, match="begin at multiples of 16"):
        recorded(broken)


def off_on_processes(rank, world, recipe, degrees):
    """How far loss and gradients of real processes are from those of one rank's program, simulated."""
    net, data = grid.build("plain"), grid.batch()
    precision = Precision(fp8=recipe)
    model = grid.parallelize("plain", net, Plan(*degrees, precision=precision), data)
    loss = model(**moec.shard_batch(data, model))["loss"]
    loss.backward()
    grads = moec.full_grads(model)
    program = compile_program(net, Plan(precision=precision), 1, (), data, training=True)
    truth = _Oracle(net, (), data, None)
    truth.cotangents = {at: g for at, g in truth.cotangents.items() if g.ndim == 0}  # of the loss alone
    want = truth._run(program)
    found = {"loss": _relative(loss.detach(), want.outputs["loss"])}
    scale = max(float(g.norm()) for g in want.grads.values() if g is not None) * grid.VANISHING
    for name, g in want.grads.items():
        spec = program.params[name]
        got = torch.stack([grads[m] for m in spec.members]) if spec.members else grads[spec.name]
        found[spec.name] = _relative(got, g, scale)
    return found


@pytest.mark.nightly  # four processes compile, on what may be two busy cores
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("recipe", "degrees"), [("current", (2, 2, 4, 1)), ("rowwise", (2, 2, 2, 2))])
def test_processes_compute_what_one_rank_does(gloo4, recipe, degrees):
    for found in gloo4.run(off_on_processes, recipe, degrees, timeout=280):
        assert max(found.values()) < 1e-9, found


def test_without_training_nothing_is_transposed():
    plan = Plan(1, 1, 1, 1, precision=Precision(fp8="mxfp8"))
    program = replace(captured(SHAPE).fork(), mesh=plan.mesh(1), training=False)
    program = manager.run(program, plan.resolve(1), PIPELINE)
    assert calls(program, "moec.quantise") and all(n.args[-1] is False for n in calls(program, "moec.quantise"))
