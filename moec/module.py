"""ParallelModule: a compiled program with its parameters, as an ordinary ``nn.Module``.

* Parameters and buffers (:mod:`moec.parameters`) have their **original** dotted names (experts of a ``ModuleList`` are
  one parameter with ``*`` for the index); tied weights are one Parameter under all their names.  With several ranks
  parameters are DTensors on one device mesh of the atomic axes and hold this rank's part only; with one rank they are
  plain tensors.  The source model is copied from, never kept.
* ``forward`` takes this rank's dp slice of the global batch, passes the preflight, runs the program, and gives the
  user's own return type back: scalars are global, tensors with the batch dim are this rank's slice (logits beside a
  loss as a DTensor whose vocabulary tp shards).
* Gradients arrive in ``.grad`` complete and placed like the parameters (see :mod:`moec.epilogue`).
* ``train()``, ``eval()`` and other non-tensor arguments select among programs, compiled when first needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from moec import shards
from moec.accounts import AUX_COUNTS, Accounts, expert_load, pending_groups
from moec.delayed import Histories
from moec.epilogue import Reduction, enter, to_local
from moec.inputs import Call, bind, canonical, counts_as_tensors
from moec.parameters import Parameters
from moec.placement import R, Types, show
from moec.preflight import Report, alone, digest, exchange, local_problems, values_digest
from moec.program import EQUAL_LENGTHS, OutputSpec, Program
from moec.runtime.direct import direct
from moec.runtime.errors import MoecError
from moec.runtime.groups import Groups
from moec.runtime.mesh import Mesh
from moec.runtime.narrow import NARROW, NarrowCopies, narrow_copy
from moec.runtime.once import ONCE, Once, Source
from moec.runtime.reshard import RESHARDING, Resharding
from moec.runtime.torch_compat import boxed, local_of, observed
from moec.scheduled import Execute, Parameter, Runner

CompileFn = Callable[[bool, tuple[Any, ...], dict[str, Any]], Program]
"""(training, args, kwargs) -> lowered Program on the same mesh."""


class ParallelModule(Parameters):
    """Args:
    source: the user's model, the same on all ranks (checked), on the meta device or with values.
    program: the lowered program of the first call.
    groups: process groups of ``program.mesh``; None with one rank.
    compile_fn: compiles the program of another kind of call; communicates nothing.
    bind_fn: ties what ``compile_fn`` returned to process groups; collective.
    example_args, example_kwargs: the call that ``program`` was captured from.
    """

    def __init__(
        self,
        source: nn.Module,
        program: Program,
        groups: Groups | None,
        compile_fn: CompileFn,
        example_args: tuple[Any, ...] = (),
        example_kwargs: Mapping[str, Any] | None = None,
        bind_fn: Callable[[Program], Program] = lambda program: program,
    ) -> None:
        super().__init__(program.mesh, groups, _rank_of(program.mesh, groups))
        self._signature = inspect.signature(source.forward)
        self._compile_fn = compile_fn
        self._bind_fn = bind_fn
        self._build_tree(source, program)
        if groups is not None:
            keys = {shards.sharding(s.types, self._mesh) for s in self._slots.values()}
            groups.ensure((keys | set(program.grad_reductions.values()) | pending_groups(program)) - {""})
        self._check_same_values(source)
        self._program = program
        first = bind(self._signature, tuple(example_args), dict(example_kwargs or {}))
        self._programs: dict[str, Program] = {first.key(program.training): self._accepted(program)}
        self._runners: dict[str, Runner] = {}
        self._direct: dict[str, fx.GraphModule] = {}
        """Graphs that autograd records, by key, as they run where nobody watches."""
        self._execute: Execute = boxed
        self.narrow_copies = NarrowCopies()
        self.once = Once()
        self.accounts = Accounts()
        self.histories = Histories(self._mesh.world)
        self._fitting: dict[str, dict[str, tuple[int, ...]]] = {}
        """Shapes of the last call, by key, that met what was assumed of sizes."""
        self.last_sizes: dict[str, tuple[int, ...]] = {}
        """Shapes of this rank's inputs in the last forward, by path (what ``moec.explain`` states bytes for)."""
        super().train(source.training)

    # ------------------------------------------------------------------------------------------- what users ask
    @property
    def program(self) -> Program:
        """The program that ran last (before the first call: the one compiled first)."""
        return self._program

    @property
    def groups(self) -> Groups | None:
        """Process groups of the mesh; None with one rank."""
        return self._groups

    @property
    def dp_size(self) -> int:
        return self._mesh.size(self._mesh.role("dp"))

    @property
    def dp_rank(self) -> int:
        """Which slice of the global batch this rank takes."""
        return self._mesh.index(self._rank, self._mesh.role("dp"))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = counts_as_tensors(kwargs)
        call = bind_or_report(self, args, kwargs)
        key = call.key(self.training)
        program = self._programs.get(key)
        if program is None:
            program = self._compile(key, args, kwargs)
        tensors = self._preflight(key, program, call)
        self._program = program
        self.last_sizes = {s.path: tuple(tensors[s.placeholder].shape) for s in program.inputs.values()}
        running = {f"{s.name.rpartition('.')[0]}:{AUX_COUNTS}": s.value for s in self._slots.values() if s.running}
        self.accounts.begin((s.value for s in self._slots.values() if s.spec.requires_grad), running, self.training)
        past = {n: self._slots[s.name].value for n, s in program.params.items() if s.history}
        tensors |= self.histories.enter(past, self.accounts.steps, self.training)
        results = self._scheduled(key, program, tensors) if program.step else self._recorded(key, program, tensors)
        self.accounts.forward(program, results, self.training)
        for x in results:
            if x.requires_grad:
                x.register_hook(self.accounts.backward)
        leaves = [o.constant if o.index is None else self._leaf(o, results[o.index]) for o in program.outputs]
        return pytree.tree_unflatten(leaves, program.out_spec)

    def _recorded(self, key: str, program: Program, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Run the graph under autograd, which records its backward."""
        if key not in self._direct:
            self._direct[key] = direct(program.module)
        run = program.module if observed() else self._direct[key]
        reshards = torch.is_grad_enabled() and any(n.name == RESHARDING for n in program.placeholders())
        copies, once = self._narrow(program), self._once(program, key)
        owners = [(to_local(s.value), s.value) for s in self._slots.values()]
        owners += [(copy, self._slots[program.params[name].name].value) for name, copy in copies.items()]
        resharding = Resharding(owners) if reshards else None
        operands = self._operands(program, {**tensors, RESHARDING: resharding, NARROW: copies, ONCE: once})
        with resharding.hooks() if resharding is not None else nullcontext():
            return run(*operands)

    def _scheduled(self, key: str, program: Program, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Run the forward and the backward graph."""
        assert program.step is not None
        if key not in self._runners:
            self._runners[key] = Runner(program.step, self._execute)
        slots = {name: self._slots[spec.name] for name, spec in program.params.items()}
        values: dict[str, Any] = {n: self._enter(s, s.value) for n, s in slots.items()}
        values |= {narrow_copy(n): copy for n, copy in self._narrow(program).items()}
        values[ONCE] = self._once(program, key)
        trained = {n: Parameter(s.value, partial(self._leave, s)) for n, s in slots.items() if s.value.requires_grad}
        trained |= {n: Parameter(tensors[n], lambda grad: grad) for n, s in slots.items() if s.spec.history}
        return self._runners[key](values | tensors, trained)

    def _leaf(self, spec: OutputSpec, local: Tensor) -> Tensor:
        """An output as users see it: what tp shards (logits beside a loss) is a DTensor over the tp axes of this rank's
        batch slice."""
        axes = tuple(a for a in self._mesh.role("tp") if spec.types.get(a, R).kind == "S")
        if not axes:
            return local
        assert self._groups is not None and self._groups.device_mesh is not None
        types, mesh = {a: spec.types[a] for a in axes}, self._mesh
        shape = [n * mesh.size([a for a in axes if types[a].dim == d]) for d, n in enumerate(local.shape)]
        return shards.distribute(local, tuple(shape), types, mesh, self._groups.device_mesh[axes])

    @contextmanager
    def executed_by(self, execute: Execute) -> Iterator[None]:
        """Inside, ``execute`` runs the graphs of plans with ``overlap`` (``moec.record``)."""
        before = self._execute, self._runners
        self._execute, self._runners = execute, {}
        try:
            yield
        finally:
            self._execute, self._runners = before

    def expert_load(self) -> dict[str, Tensor]:
        """Tokens per expert of each MoE block in the last forward, over the global batch.  Collective."""
        return expert_load(self.accounts.last, self._program, self._groups)

    # ------------------------------------------------------------------------------------------- building
    def _accepted(self, program: Program) -> Program:
        """A program of this module: its mesh and its layouts are those of the parameters that exist."""
        if program.mesh != self._mesh:
            raise MoecError(f"compiled for the mesh {program.mesh.names}, not {self._mesh.names}", where="program")
        for spec in program.params.values():
            slot = self._slots.get(spec.name)
            if slot is None:
                raise MoecError("this kind of call needs a parameter that the first one did not", where=spec.name)
            if not _same_layout(spec.types, slot.types, self._mesh):
                raise MoecError(
                    f"this kind of call lays the parameter out as {show(spec.types) or 'replicated'}, it is stored as "
                    f"{show(slot.types) or 'replicated'}",
                    where=spec.name,
                    way_out="pin its style with Plan.layout",
                )
        return program

    # ------------------------------------------------------------------------------------------- calling
    def _compile(self, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        """Compile on all ranks or on none.  Collective: ranks agree on the call first and on success afterwards."""
        self._agree(Report(key))
        program, problems, error = None, [], None
        try:
            with torch.inference_mode(False), torch.enable_grad():  # a program serves with and without gradients
                program = self._accepted(self._compile_fn(self.training, args, kwargs))
        except Exception as e:  # whatever it is, the other ranks must hear of it
            if self._mesh.world == 1:
                raise
            problems, error = [str(e) if isinstance(e, MoecError) else f"{type(e).__name__}: {e}"], e
        try:
            order = program.step.render() if program and program.step else None
            self._agree(Report(f"{key} {digest(order):x}" if order else key, "compile", problems))
        except MoecError as e:
            raise e from error
        assert program is not None
        program = self._bind_fn(program)
        if self._groups is not None:
            self._groups.ensure((set(program.grad_reductions.values()) | pending_groups(program)) - {""})
        self._programs[key] = program
        return program

    def _agree(self, report: Report) -> None:
        if self._mesh.world == 1:
            alone(report)
        elif exchange(report, self._mesh, self._device):
            self.once.expire()

    def _preflight(self, key: str, program: Program, call: Call) -> dict[str, Tensor]:
        """Check the call on all ranks; the tensors by placeholder."""
        specs = [(canonical(self._signature, s.path), s) for s in program.inputs.values()]
        params = {s.name: local_of(s.value) for s in self._slots.values()}
        problems = local_problems(specs, call.tensors, params, self._mesh.world) + self._param_problems(program)
        if not problems:
            shapes = {spec.placeholder: tuple(call.tensors[path].shape) for path, spec in specs}
            if self._fitting.get(key) != shapes:
                problems += program.size_problems(shapes, self.dp_size)
            if not problems:
                self._fitting[key] = shapes
        if program.step and self._mesh.world == 1:
            problems += [
                f"input {path!r} requires a gradient, and the graphs of Plan.overlap give them to parameters alone: "
                "pass x.detach(), or leave overlap out"
                for path, x in call.tensors.items()
                if x.requires_grad and torch.is_grad_enabled()
            ]
        report = Report(key, problems=problems)
        if self._mesh.world > 1:
            found = [(path, spec, call.tensors[path]) for path, spec in specs if path in call.tensors]
            report.shapes = {path: tuple(x.shape) for path, _, x in found}
            report.scalars = {path: x.item() for path, _, x in found if x.ndim == 0}
            batched = [(p, s.batch_dim, x) for p, s, x in found if s.batch_dim is not None and s.batch_dim < x.ndim]
            report.batch = {path: x.shape[dim] for path, dim, x in batched}
            report.equal_lengths = EQUAL_LENGTHS in program.facts
            shared = self._mesh.role("cp") + self._mesh.role("tp")
            report.values = values_digest(x for _, _, x in found) if shared else 0
        report.anew = program.once is not None and not self.once.current(key, self._sources(program))
        self._agree(report)
        return {spec.placeholder: call.tensors[path] for path, spec in specs}

    def _param_problems(self, program: Program) -> list[str]:
        """What was done to the parameters since they were compiled for."""
        problems = []
        for spec in program.params.values():
            p = self._slots[spec.name].value
            if p.dtype != spec.dtype:
                problems.append(f"{spec.name} is {p.dtype}, compiled for {spec.dtype}: convert before parallelizing")
            if p.requires_grad and not spec.requires_grad:
                problems.append(f"{spec.name} was frozen when the model was compiled: unfreeze it before parallelizing")
        return problems

    def _narrow(self, program: Program) -> dict[str, Tensor]:
        """The narrow copies that the graph reads, by parameter placeholder; cast anew where a parameter changed."""
        found = {}
        for name, dtype in program.narrowed.items():
            spec = program.params[name]
            slot = self._slots[spec.name]
            value = slot.value
            enter = partial(self._enter, slot, value)
            found[name] = self.narrow_copies.copy(spec.name, value, to_local(value), enter, dtype)
        return found

    def _once(self, program: Program, key: str) -> tuple[Tensor, ...]:
        """What the graph reads of weights in FP8; made anew where a parameter changed."""
        if program.once is None:
            return ()
        sources, once = self._sources(program), program.once

        def make() -> tuple[Tensor, ...]:
            specs = [program.params[n] for n in once.params]
            return once.module(*(self._enter(self._slots[s.name], self._slots[s.name].value) for s in specs))

        return self.once.get(key, sources, make)

    def _sources(self, program: Program) -> list[Source]:
        assert program.once is not None
        values = [self._slots[program.params[n].name].value for n in program.once.params]
        return [(v, to_local(v)) for v in values]

    def _operands(self, program: Program, values: dict[str, Any]) -> Iterator[Any]:
        """Placeholder values in order, to ``values`` of what is no parameter, or a history.  Trainable parameters come
        through the gradient epilogue."""
        names = [n.name for n in program.placeholders()]
        trained = []
        for name in names:
            if (spec := program.params.get(name)) is None or name in values:
                continue
            slot = self._slots[spec.name]
            value = slot.value
            if torch.is_grad_enabled() and value.requires_grad:
                trained.append(name)
            values[name] = self._enter(slot, value)
        params = [self._slots[program.params[n].name] for n in trained]
        if self._mesh.world == 1:
            values |= {n: s.value for n, s in zip(trained, params, strict=True)}
        else:
            reductions = [
                Reduction(program.grad_reductions.get(n, ""), partial(self._enter, s), partial(self._leave, s))
                for n, s in zip(trained, params, strict=True)
            ]
            values |= zip(trained, enter([s.value for s in params], reductions, self._groups), strict=True)
        return (values[n] for n in names)

    @property
    def _device(self) -> torch.device:
        """Where small collectives of the default group live."""
        if "nccl" in str(dist.get_backend()):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


def _rank_of(mesh: Mesh, groups: Groups | None) -> int:
    """This process's rank.  Raises MoecError where there are not the processes that the mesh needs."""
    world = mesh.world
    if world == 1:
        return 0
    if not dist.is_initialized() or groups is None:
        raise MoecError(
            f"the plan has {world} ranks and there is no process group",
            where="plan",
            way_out="start one process a rank (torchrun) and call torch.distributed.init_process_group first",
        )
    if dist.get_world_size() != world:
        raise MoecError(
            f"the plan has {world} ranks, the process group has {dist.get_world_size()}",
            where="plan",
            way_out="let dp, tp fill the world, or start as many processes as the plan has ranks",
        )
    return dist.get_rank()


def bind_or_report(model: ParallelModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Bind the arguments; where that fails on some rank, all ranks hear of it."""
    try:
        return bind(model._signature, args, kwargs)
    except MoecError as e:
        model._agree(Report("", problems=[str(e)]))
        raise


def _same_layout(a: Types, b: Types, mesh: Mesh) -> bool:
    # I and R hold the same values.
    return all(x == y or not (x.sharded or y.sharded) for x, y in ((a.get(n, R), b.get(n, R)) for n in mesh.names))
