"""parallelize: the pipeline on one screen.

capture → normalize → causal_attention → raise_moe → raise_router → configure_router (where asked for) → statistics
→ shard → redundant → bundle → cast_bf16, fsdp, chunk_experts, pipeline_tp, cast_fp8, commute_quantise, units,
use_transformer_engine (where asked for) → fuse_router, fuse_experts, fuse_quantise (of FP8), fuse_permute,
fuse_cross_entropy, fuse_norm (unless turned off) → fuse_tp (where asked for) → lower → expand, rejoin (where layers are
equal) → bind to process groups → ParallelModule
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from moec.bounds import with_bounds
from moec.capture import capture
from moec.capture.examples import dummy_examples
from moec.capture.skeleton import replica
from moec.chunks import choose
from moec.cost import Sizes
from moec.inputs import call_shapes, counts_as_tensors, program_shapes
from moec.kernel_listing import write_kernels
from moec.module import ParallelModule
from moec.own_plan import own_plan
from moec.passes import manager
from moec.passes.bundle import bundle
from moec.passes.cast_bf16 import cast_bf16
from moec.passes.cast_fp8 import cast_fp8
from moec.passes.causal_attention import causal_attention
from moec.passes.chunk_experts import chunk_experts
from moec.passes.commute_quantise import commute_quantise
from moec.passes.configure_router import configure_router
from moec.passes.contract import Pass
from moec.passes.expand import Unlike, expand, expand_layers
from moec.passes.fsdp import fsdp
from moec.passes.fuse_cross_entropy import fuse_cross_entropy
from moec.passes.fuse_experts import fuse_experts
from moec.passes.fuse_norm import fuse_norm
from moec.passes.fuse_permute import fuse_permute
from moec.passes.fuse_quantise import fuse_quantise
from moec.passes.fuse_router import fuse_router
from moec.passes.fuse_tp import fuse_tp
from moec.passes.joint import JointGraphs, joint_graphs
from moec.passes.joint.storages import note_storages
from moec.passes.lower import bind, group_keys, lower
from moec.passes.normalize import normalize
from moec.passes.pipeline_tp import pipeline_tp
from moec.passes.raise_moe import raise_moe
from moec.passes.raise_router import raise_router
from moec.passes.redundant import redundant
from moec.passes.rejoin import rejoin
from moec.passes.shard import shard
from moec.passes.shard.custom import sharding_rule
from moec.passes.statistics import statistics
from moec.passes.step import make_step
from moec.passes.units import units
from moec.passes.use_transformer_engine import use_transformer_engine
from moec.plan import Plan
from moec.preflight import agree, digest
from moec.program import Program
from moec.runtime.errors import MoecError
from moec.runtime.groups import Groups
from moec.schedule import schedule
from moec.symmetric import settled

__all__ = [
    "PIPELINE", "JointGraphs", "compile_program", "expand", "expanded", "joint_graphs", "note_storages", "parallelize",
    "sharding_rule",
]  # fmt: skip

PIPELINE: tuple[Pass, ...] = (
    normalize, causal_attention, raise_moe, raise_router, configure_router, statistics, shard, redundant, bundle,
    cast_bf16, fsdp, chunk_experts, pipeline_tp, cast_fp8, commute_quantise, units, use_transformer_engine, fuse_router,
    fuse_experts, fuse_quantise, fuse_permute, fuse_cross_entropy, fuse_norm, fuse_tp, lower,
)  # fmt: skip


def compile_program(
    model: nn.Module,
    plan: Plan,
    world_size: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    training: bool,
    loss_fn: Callable[..., Any] | None = None,
    dump: str | Path | None = None,
    observe: manager.Observer | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Program:
    """Capture ``model`` and run every pass for a world of ``world_size`` ranks.  No process group is needed.

    ``shapes``: sizes of a rank's inputs that ``Plan.overlap`` schedules for, by path (default: of this call).
    ``observe(name, program)`` is called after capture and after every pass.  Until ``expand`` has run, the program may
    hold a few of many equal layers (``expanded`` gives them all)."""
    plan.validate(world_size)
    plan = plan.resolve(world_size)
    mesh, dump = plan.mesh(world_size), dump or os.environ.get("MOEC_DUMP")

    known = call_shapes(model, args, kwargs) if shapes is None else shapes

    def passed(captured: Program, plan: Plan, first: int = 0, **how: Any) -> Program:
        passes = (*PIPELINE, expand, rejoin) if captured.repeats else PIPELINE
        program = manager.run(captured, plan, passes[first:], **how)
        if plan.overlap is not None and not training and plan.precision is not None and plan.precision.fp8 is not None:
            program.why_not.append("what FP8 evaluates has no backward: it runs in the graph's own order")
        elif plan.overlap is not None:
            program.step = make_step(program, plan, program_shapes(model, program, known))
        return program

    def run(reduced: bool, declined: list[str]) -> Program:
        program = with_bounds(
            capture(model, args, dict(kwargs), training=training, inputs=plan.inputs, loss_fn=loss_fn, reduced=reduced)
        )
        program.mesh, program.own_plan = mesh, own_plan(model)
        program.why_not += declined
        chosen = plan
        if plan.overlap is not None and plan.overlap.chunks == "auto" and plan.ep > 1:
            at, sizes = PIPELINE.index(chunk_experts), program_shapes(model, program, known)
            whole = manager.run(program.fork(), plan, PIPELINE[:at], check=False)  # of every candidate the same
            numbers = Sizes.of(program, sizes).values
            sequences = min((numbers[s] for s in program.batch_symbols if s in numbers), default=0)
            chosen, why = choose(plan, lambda p: passed(whole.fork(), p, at, check=False), sizes, sequences)
            program.why_not.append(why)
        program = passed(program, chosen, dump=dump, observe=observe)
        if dump:
            write_kernels(program, Path(dump) / "kernels")
            if program.step is not None:
                program.step.write(Path(dump))
                (Path(dump) / "step_schedule.txt").write_text(f"{schedule(program)}\n")
        return program

    try:
        return run(True, [])
    except Unlike as e:  # from the start, with all layers: ``observe`` hears "captured" once more
        return run(False, [f"equal layers are compiled one by one: {e.message}"])


def expanded(program: Program) -> Program:
    """``program`` with every layer, at whatever stage it is; itself if none is left out.  Raises ``Unlike``."""
    return expand_layers(program.fork()) if program.repeats else program


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    example_inputs: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    dump: str | Path | None = None,
) -> ParallelModule:
    """Compile a plain, single-device model for this process's world.

    Args:
        model: the user's model, the same on every rank; it is copied from, never changed.
        plan: degrees and layout.  With one process no process group is needed.
        example_inputs, example_kwargs: one *local* call; sizes are free, ranks and dtypes are not.  Hugging Face models
            need none.
        loss_fn: ``loss_fn(output, *args, **kwargs)``, called with what the model was called with and captured into the
            graph, so that the loss is that of the global batch; the module then returns ``{"loss": …, "output": …}``.
        dump: directory for the readable graph after every pass (also ``MOEC_DUMP``), for the scheduled ones and what
            runs beside what in them.

    Raises:
        MoecError: on all ranks, when the model or the plan cannot be taken by one of them, or they differ.
    """
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    args, kwargs = tuple(example_inputs), counts_as_tensors(example_kwargs or {})
    bare: nn.Module | None = None
    shapes: dict[str, tuple[int, ...]] = {}  # later calls, which may differ from rank to rank, are scheduled for these

    def compile_fn(training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        assert bare is not None
        return compile_program(
            bare, plan, world, args, kwargs, training=training, loss_fn=loss_fn, dump=dump, shapes=shapes
        )

    gpus = _on_gpus(world)
    if gpus:  # ranks tell each other what they have (``settled``), all of them or none
        agree(f"plan {plan.to_dict()}", _problem(plan, world), "parallelize")
    # Nothing else up to here and in the next lines communicates, so whatever goes wrong, no rank waits for another one.
    first, error = None, None
    try:
        _needs_a_world(plan, world)
        plan.validate(world)
        plan = settled(plan, gpus)
        if not args and not kwargs:
            args, kwargs = dummy_examples(model, training=model.training)
        shapes = call_shapes(model, args, kwargs)
        # Other kinds of calls are compiled later: keep the model's structure, not its storage.
        bare = replica(
            model, lambda t, is_param: t.detach().to("meta") if is_param else t.detach(), training=model.training
        )
        first = compile_fn(model.training, args, kwargs)
    except Exception as e:  # the other ranks must hear of it
        if world == 1:
            raise
        error = e
    if world == 1:
        assert first is not None
        return ParallelModule(model, bind(first, {}), None, compile_fn, args, kwargs, lambda program: bind(program, {}))
    step = first and first.step and first.step.render()
    agree(f"plan {plan.to_dict()}, program {digest((first and first.render(), step)):x}", error, "parallelize")
    assert first is not None
    groups = Groups(first.mesh)

    def bind_fn(program: Program) -> Program:
        keys = sorted(group_keys(program) - {""})
        groups.ensure(keys)
        return bind(program, {k: groups.name(k) for k in keys})

    return ParallelModule(model, bind_fn(first), groups, compile_fn, args, kwargs, bind_fn)


def _on_gpus(world: int) -> bool:
    return world > 1 and "nccl" in str(dist.get_backend())


def _problem(plan: Plan, world: int) -> Exception | None:
    try:
        plan.validate(world)
    except Exception as e:
        return e
    return None


def _needs_a_world(plan: Plan, world: int) -> None:
    asked = [d for d in (plan.dp, plan.cp, plan.tp, plan.ep, plan.etp) if isinstance(d, int) and d > 1]
    if asked and world == 1 and not (dist.is_available() and dist.is_initialized()):
        raise MoecError(
            f"the plan {plan.to_dict()} asks for more ranks than one, and there is no process group",
            where="plan",
            way_out="start one process a rank (torchrun) and call torch.distributed.init_process_group first; "
            "moec.check and moec.compile_program need neither",
        )
