"""Every private torch name that moec uses (``torch._*``, ``torch.distributed._*``), behind small functions.

Tested with torch 2.13 and written for 2.11 to 2.13: a name that differs between these versions is chosen here and
nowhere else.  When a new torch breaks moec, this is the file to look at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import sympy
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._C._distributed_c10d import _register_work, _resolve_process_group
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import LocalSource
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._sympy.symbol import SymT, symbol_is_type

from .errors import MoecError

OpOverload = torch._ops.OpOverload
"""What an FX node's target is when it is an operator."""

DispatchMode = TorchDispatchMode
"""Sees every operator call below autograd."""

LazyGraphModule = _LazyGraphModule
"""An ``fx.GraphModule`` whose code is generated when it first runs, not whenever its graph changes."""

GROUPED_MM = torch._grouped_mm
"""What ``torch.nn.functional.grouped_mm`` calls."""

SCALED_GROUPED_MM = torch._scaled_grouped_mm
"""FP8 products of groups; ``torch.nn.functional.scaled_grouped_mm``, which is public, has no fake kernel (2.13)."""

WAIT = torch.ops._c10d_functional.wait_tensor.default
"""The wait node of a start op: returns its input once the collective that fills it has finished (differentiable)."""

# torch 2.13 renamed the two flat collectives and warns about the old names.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def kernel(op: str, device_type: str) -> Callable | None:
    """The Python function that a ``torch.library.custom_op`` runs for tensors of a device, None where there is none."""
    found = OPDEFS[op]._backend_fns
    return found.get(device_type) or found.get(None)


def derivative(op: OpOverload) -> tuple[Callable | None, Callable | None]:
    """``(formula, setup_context)`` that were registered for a ``torch.library.custom_op``; no formula: it has none."""
    found = OPDEFS[op._schema.name]
    return found._backward_fn, found._setup_context_fn


def lists_tensors(argument: torch.Argument) -> bool:
    """Is an argument or result of an operator's schema a list of tensors?"""
    return str(argument.type) in ("List[Tensor]", "List[Optional[Tensor]]")


below_autograd = torch._C._AutoDispatchBelowAutograd
"""Inside, operators are called as autograd calls them: nothing is recorded."""


def observed() -> bool:
    """Does a profiler, a dispatch mode, a transform or a compiler watch the operators that this thread calls?"""
    return (
        torch.autograd._profiler_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch.compiler.is_compiling()
    )


def assert_on_device(condition: Tensor, message: str) -> None:
    """Stop a GPU, without waiting for it, unless its one-element tensor is true."""
    torch._assert_async(condition, message)


def custom_ops() -> list[str]:
    """``namespace::name`` of every ``torch.library.custom_op`` there is."""
    return sorted(OPDEFS)


@contextlib.contextmanager
def cuda_kernels_on_cpu(ops: Iterable[str]) -> Iterator[None]:
    """CPU tensors get the functions that CUDA tensors would: for a dry run through Triton's interpreter."""
    exchanged = {op: (kernel(op, "cpu"), kernel(op, "cuda")) for op in ops if op in OPDEFS}
    try:
        for op, (_, function) in exchanged.items():
            OPDEFS[op].register_kernel("cpu")(function)
        yield
    finally:
        for op, (function, _) in exchanged.items():
            OPDEFS[op].register_kernel("cpu")(function)


def wait(x: Tensor) -> Tensor:
    """Block until the collective that fills ``x`` (or the buffer that it views) has finished."""
    return WAIT(x)


def process_group(name: str) -> dist.ProcessGroup:
    """The process group of a c10d ``group_name``, which is what collectives name in a lowered graph."""
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]  # a NewType of str
    except (RuntimeError, ValueError) as e:
        raise MoecError(
            f"there is no process group named {name!r} in this process",
            where="group",
            way_out="initialise torch.distributed and lower the graph: lowering replaces group keys (mesh axis names) "
            "by the names of process groups",
        ) from e


def on_wait(x: Tensor, work: dist.Work) -> None:
    """Make ``wait(x)`` wait for ``work``.  Works for any view of the buffer: the registry is keyed by storage."""
    _register_work(x, work)


def symmetric_memory_lacks() -> str | None:
    """What this torch lacks of fused products over symmetric memory; None: nothing."""
    try:
        import torch.distributed._symmetric_memory  # defines the operators
    except ImportError as e:
        return f"torch {torch.__version__} has no torch.distributed._symmetric_memory ({e})"
    missing = [n for n in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter") if not hasattr(SYMM_MEM, n)]
    return f"torch {torch.__version__} has no torch.ops.symm_mem.{missing[0]}" if missing else None


SYMM_MEM = torch.ops.symm_mem


def use_symmetric_memory(group: str) -> None:
    """Let the process group of a c10d name have symmetric memory; up to some version torch wants to be told once."""
    from torch.distributed import _symmetric_memory as symmetric

    enable = symmetric.enable_symm_mem_for_group
    if not hasattr(enable, "__deprecated__") and not symmetric.is_symm_mem_enabled_for_group(group):  # type: ignore[arg-type]
        enable(group)  # type: ignore[arg-type]  # a NewType of str


def strided_shard(dim: int, split_factor: int) -> Placement:
    """DTensor placement of a packed dim: each of ``split_factor`` equal blocks is sharded, not the dim as a whole."""
    return _StridedShard(dim, split_factor=split_factor)


def local_of(x: Tensor) -> Tensor:
    """This rank's part of a DTensor, without ``to_local``'s node of autograd; any other tensor itself."""
    return x._local_tensor if isinstance(x, DTensor) else x


def placed_like(local: Tensor, x: DTensor) -> DTensor:
    """This rank's part of a DTensor that lies as ``x`` does, without ``from_local``'s checks and node of autograd."""
    return DTensor(local, x._spec, requires_grad=False)


class PackedDTensor(DTensor):
    """A DTensor whose local shard is several boxes of the global tensor (packed dims), as checkpoints must see it.

    torch's own checkpoint code takes every local shard for one box and would write a packed one to the wrong place
    without a word.  ``chunks`` are ``(global offset, local offset, size)`` for each box.  Results of operations are
    plain DTensors.
    """

    chunks: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]

    @staticmethod
    def wrap(x: DTensor, chunks: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]) -> PackedDTensor:
        out = PackedDTensor(x._local_tensor.detach(), x._spec, requires_grad=False)
        out.chunks = chunks
        return out

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size(at), sizes=torch.Size(size)) for at, _, size in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for at, local, size in self.chunks:
            if index.offset == torch.Size(at):
                return self._local_tensor[tuple(slice(o, o + n) for o, n in zip(local, size, strict=True))]
        raise MoecError(f"no shard of this rank starts at {tuple(index.offset or ())}", where=index.fqn)


def expr(size: int | torch.SymInt) -> sympy.Expr:
    """The sympy expression of a recorded size."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def hint(size: int | torch.SymInt) -> int | None:
    """The size that a recorded size had while tracing; None if it depends on data."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def size_of(e: sympy.Expr, like: Tensor) -> int | torch.SymInt:
    """A size with the expression ``e``, of the shape environment of the fake tensor ``like``."""
    e = sympy.cancel(e)
    if e.is_Integer:
        return int(e)
    env = like.fake_mode.shape_env  # type: ignore[attr-defined]
    known = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val  # the name since torch 2.12
    return env.create_symintnode(e, hint=None if is_unbacked(e) else int(e.xreplace(known)))


def fresh_size(like: Tensor, name: str, value: int) -> torch.SymInt:
    """A size of its own symbol, ``value`` in the examples, of the shape environment of the fake tensor ``like``."""
    mode = like.fake_mode  # type: ignore[attr-defined]
    return symbolic_fake(mode, torch.empty(value, dtype=torch.uint8), name).shape[0]  # type: ignore[return-value]


def resized(fake: Tensor, shape: Iterable[int | torch.SymInt | sympy.Expr]) -> Tensor:
    """A tensor of the mode and dtype of ``fake`` and of another shape; expressions are sizes too.  Plain tensors work
    as well, with numbers."""
    sizes = [size_of(s, fake) if isinstance(s, sympy.Expr) else s for s in shape]
    mode = fake.fake_mode if isinstance(fake, FakeTensor) else contextlib.nullcontext()
    with mode:
        return torch.empty(sizes, dtype=fake.dtype, device=fake.device)


class _Boxed(fx.graph.CodeGen):
    """Arguments come in a list that the function empties, so that each one is let go of after its last use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **kwargs: object) -> str:
        names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if v != "self"]
        taken = f"\n    {', '.join(names)}, = operands\n    operands.clear()" if names else ""
        return f"def {self._func_name}(self, operands){maybe_return_annotation}:{taken}"


def boxed(module: fx.GraphModule) -> Callable[[list], tuple]:
    """A graph as a function of the list of its operands, which it empties."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    graph.set_codegen(_Boxed())
    return fx.GraphModule(module, graph).forward


# -- capture ---------------------------------------------------------------------------------------------------------


def fake_mode() -> contextlib.AbstractContextManager:
    """A mode of its own whose tensors have shapes (symbolic ones too) and no data."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def symbolic_fake(mode, tensor: Tensor, name: str) -> Tensor:
    """A fake tensor of ``mode``, shaped like ``tensor``, with a symbol for every dim."""
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * tensor.dim())
    return mode.from_tensor(tensor, static_shapes=False, source=LocalSource(name), symbolic_context=context)


def python_dispatcher() -> contextlib.AbstractContextManager:
    """Inside, composite operators take symbolic sizes (as they do while exporting)."""
    return enable_python_dispatcher()


@contextlib.contextmanager
def as_in_eager() -> Iterator[None]:
    """Inside, a model that asks ``torch.compiler.is_exporting()`` is told no."""
    was, torch.compiler._is_exporting_flag = torch.compiler._is_exporting_flag, False
    try:
        yield
    finally:
        torch.compiler._is_exporting_flag = was


def without_modes() -> contextlib.AbstractContextManager:
    """Inside, no fake or tracing dispatch mode is on: tensors are what they are."""
    return _disable_current_modes()


def in_backward() -> bool:
    """Is this thread running a backward (and so a forward in it a recomputation)?"""
    return torch._C._current_graph_task_id() != -1


def is_fake(x: object) -> bool:
    return isinstance(x, FakeTensor)


def is_no_grad_region(target: object) -> bool:
    """Is this the higher-order op that ``torch.export`` puts around ``with torch.no_grad()``?"""
    return target is torch.ops.higher_order.wrap_with_set_grad_enabled


def shape_guards(values: Iterable[object]) -> list[sympy.Basic]:
    """What tracing had to assume of symbolic sizes (``values``: fake tensors of the trace)."""
    mode = fake_mode_of(values)
    return [g.expr for g in mode.shape_env.guards] if mode is not None and mode.shape_env is not None else []


def fake_mode_of(values: Iterable[object]) -> FakeTensorMode | None:
    """The mode of the first fake tensor among ``values``."""
    return next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)


def settled_sizes(mode: FakeTensorMode) -> dict[sympy.Symbol, sympy.Expr]:
    """Sizes of inputs that tracing found to be numbers or other sizes."""
    found = {} if mode.shape_env is None else mode.shape_env.replacements
    return {s: e for s, e in found.items() if not is_unbacked(s)}


def forget_unbacked(mode: FakeTensorMode) -> None:
    """Forget which data-dependent sizes were made outside of a trace: tracing expects to find each one in a result."""
    if mode.shape_env is not None:
        mode.shape_env.pending_fresh_unbacked_symbols.clear()


def is_unbacked(size: sympy.Expr) -> bool:
    """Does a size depend on data, so that tracing gave it a symbol of its own?"""
    return any(symbol_is_type(s, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)) for s in size.free_symbols)


def _forget_wrong_shapes() -> None:
    """torch registers the reference of ``F.nll_loss`` as the decomposition of ``aten.nll_loss``, whose fourth argument
    is another one: with ``reduction="none"`` fake tensors then get the shape of a sum, and so does a cross entropy.
    Without that entry torch takes the operator's own composite form, which is right."""
    op = torch.ops.aten.nll_loss.default
    decomposition_table.pop(op, None)
    op.py_kernels.pop(DispatchKey.Meta, None)
    op._dispatch_cache.clear()


_forget_wrong_shapes()
