"""Forward and backward as graphs: in lockstep they give what autograd gives; each of equal pieces is traced once."""

from collections import Counter

import hand_made
import pytest
import torch
from deep_models import Alternating, Deep, batch
from torch import Tensor

import moec
import moec.hf
from moec import shards, simulate
from moec.passes.joint import JointGraphs, joint_graphs
from moec.passes.joint.vjp import writes
from moec.program import Program
from moec.runtime.collectives import TABLE, collective, is_start, is_wait
from moec.runtime.mesh import Mesh
from moec.runtime.world import LockstepWorld

IDS, LABELS = batch()
IDS6, LABELS6 = batch(S=6)


def compiled(model, plan: moec.Plan, world: int) -> Program:
    return moec.compile_program(model, plan, world, (IDS, LABELS), {}, training=True)


def run(program: Program, graphs: JointGraphs, model, data: tuple[Tensor, Tensor] = (IDS, LABELS)) -> None:
    """Outputs and full gradients must be those of the model."""
    mesh, world = program.mesh, LockstepWorld(program.mesh)
    tensors = dict(model.named_parameters())
    params = {ph: tensors[s.name] for ph, s in program.params.items()}
    inputs = {ph: data[int(s.path)] for ph, s in program.inputs.items()}
    cotangents = {"0": torch.ones((), dtype=torch.float64), "1": torch.randn(*data[0].shape, 24, dtype=torch.float64)}
    ranks = range(mesh.world)
    values = [simulate._rank_values(program, params, inputs, mesh, r) for r in ranks]
    with torch.no_grad():
        results = world.run(graphs.forward, [[v[n.name] for n in program.placeholders()] for v in values])
        specs = {o.index: o for o in program.outputs}
        back = []
        for r in ranks:
            given = [shards.cut(cotangents[specs[i].path], specs[i].types, mesh, r) for i in graphs.differentiable]
            back.append([*results[r][graphs.num_outputs :], *given])
        grads = world.run(graphs.backward, back)
    outputs = {
        o.path: simulate._assemble([results[r][o.index] for r in ranks], o.types, mesh)[0] for o in program.outputs
    }
    full = {}
    for i, ph in enumerate(graphs.params):
        parts = [grads[r][i] for r in ranks]
        if key := program.grad_reductions.get(ph):
            parts = simulate._reduce(parts, key, mesh)
        full[ph], apart = simulate._assemble(parts, program.params[ph].types, mesh)
        assert apart < 1e-12
    loss, logits = model(*data)
    torch.autograd.backward([loss, logits], [cotangents["0"], cotangents["1"]])
    torch.testing.assert_close(outputs, {"0": loss.detach(), "1": logits.detach()}, rtol=1e-12, atol=1e-13)
    want = {ph: tensors[program.params[ph].name].grad for ph in graphs.params}
    torch.testing.assert_close(full, want, rtol=1e-11, atol=1e-12)


def assert_collectives(program: Program, graphs: JointGraphs) -> None:
    """The forward's are the program's; the backward's are their duals where a gradient flows; each start has a wait."""

    def kinds(graph) -> Counter:
        return Counter(c.kind for n in graph.nodes if n.op == "call_function" and (c := collective(n.target)))

    assert kinds(graphs.forward.graph) == kinds(program.graph)
    duals = Counter(
        TABLE[c.dual].kind
        for n in program.graph.nodes
        if n.op == "call_function" and (c := collective(n.target)) and c.dual and n.args[0].meta["grad"]
    )
    assert kinds(graphs.backward.graph) == duals
    for graph in (graphs.forward.graph, graphs.backward.graph):
        assert not any(map(writes, graph.nodes))
        for n in graph.nodes:
            if n.op == "call_function" and is_start(n.target):
                readers = [u for u in n.users if u.target is not torch.ops.aten.sym_size.int]  # a size is no data
                assert [is_wait(u.target) for u in readers] == [True], n.format_node()


def test_gradients_of_equal_layers():
    model = Deep(layers=5).double()
    program = compiled(model, moec.Plan(dp=2, tp=2, ep=4), 4)
    graphs = joint_graphs(program)
    assert (graphs.pieces, graphs.distinct) == (6, 3)
    assert_collectives(program, graphs)
    run(program, graphs, model)
    where = {n.meta["where"].split(".experts")[0] for n in graphs.backward.graph.nodes if "all_to_all" in n.name}
    assert {"layers.3", "layers.4"} <= where


@pytest.mark.nightly
def test_in_one_piece_without_boundaries():
    model = Deep(layers=1).double()
    program = compiled(model, moec.Plan(dp=2), 2)
    graphs = joint_graphs(program)
    assert (graphs.pieces, graphs.distinct) == (1, 1)
    assert_collectives(program, graphs)
    run(program, graphs, model)


def test_only_whole_lowered_programs():
    with pytest.raises(moec.MoecError, match="lowered"):
        joint_graphs(hand_made.program(Mesh(), None, 0))


@pytest.mark.nightly
def test_gradients_of_layers_in_turn():
    model = Alternating().double()
    program = compiled(model, moec.Plan(tp=4, ep=2, etp=2), 4)
    graphs = joint_graphs(program)
    assert graphs.pieces == 6 and graphs.distinct == 3
    assert_collectives(program, graphs)
    run(program, graphs, model)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "plan",
    [
        moec.Plan(dp=2, tp=2, sequence_parallel=True, ep=2),
        moec.Plan(dp=4, fsdp=4, ep=2),
        moec.Plan(dp=2, fsdp=True, cp=2, ep=4),
    ],
    ids=str,
)
def test_gradients_over_other_axes(plan):
    model = Deep(layers=5).double()
    program = moec.compile_program(model, plan, 4, (IDS6, LABELS6), {}, training=True)
    graphs = joint_graphs(program)
    assert (graphs.pieces, graphs.distinct) == (6, 3)
    assert_collectives(program, graphs)
    run(program, graphs, model, (IDS6, LABELS6))


@pytest.mark.nightly
def test_a_hugging_face_model_against_autograd():
    """Same program, run by autograd and as two graphs, in float32 (its casts to float32 are part of it)."""
    model = moec.hf.build("deepseek_v3", 6, first_k_dense_replace=1)
    ids = torch.randint(0, 100, (4, 9))
    program = moec.compile_program(model, moec.Plan(dp=2, tp=2, ep=4), 4, (), {"input_ids": ids, "labels": ids.clone()},
                                   training=True)  # fmt: skip
    graphs = joint_graphs(program)
    assert (graphs.pieces, graphs.distinct) == (6, 3)
    assert_collectives(program, graphs)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    params = {ph: tensors[s.name].detach() for ph, s in program.params.items()}
    inputs = dict.fromkeys(program.inputs, ids)
    want = simulate.run(program, params, inputs, {"loss": torch.ones(())})
    mesh, world = program.mesh, LockstepWorld(program.mesh)
    with torch.no_grad():
        values = [simulate._rank_values(program, params, inputs, mesh, r) for r in range(4)]
        results = world.run(graphs.forward, [[v[n.name] for n in program.placeholders()] for v in values])
        of = {o.index: o.path for o in program.outputs}
        given = [torch.ones(()) if of[i] == "loss" else torch.zeros_like(results[0][i]) for i in graphs.differentiable]
        grads = world.run(graphs.backward, [[*r[graphs.num_outputs :], *given] for r in results])
    for i, ph in enumerate(graphs.params):
        parts = [g[i] for g in grads]
        if key := program.grad_reductions.get(ph):
            parts = simulate._reduce(parts, key, mesh)
        got, expected = simulate._assemble(parts, program.params[ph].types, mesh)[0], want.grads[ph]
        assert float((got - expected).norm()) <= 1e-5 * float(expected.norm()) + 1e-9, ph
