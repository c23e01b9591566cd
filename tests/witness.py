"""An independent witness of types: the published ``spmd_types`` checker walks a sharded graph and derives every type.

It shares no code with moec's rules.  What ordinary ops do to types and to sharded dims the library knows itself (its
own table of linear ops, DTensor's sharding strategies for dims: its *global* mode); what moec's ops and conversions do
is written in ``witness_moves.py`` and ``witness_rules.py`` in the library's vocabulary (``spmd_types.rules``).  Every
derived type is compared with the one that the sharding pass recorded.

The graph runs for rank 0 on small tensors of zeros, with peers that hold the same: no process group, no communication.

Two things are expressed in other words than moec's:

* Ragged rows (``V``) are ``S(0)``.  *Whose* rows they are is two axes of their own, the ``OWNERS`` (nodes, and ranks
  inside a node): expert weights are sharded on them, everything else is invariant; the exchange takes rows from I to
  S(0) on them and back.  A grouped GEMM whose rows were not dispatched, or a combine whose rows did not return, is ill
  typed.
* The library has no packed shard (``S(dim, parts=2)``): it is S(dim).  A split of such a dim in its parts, which
  DTensor would gather, is typed there (``PACKED``); a reshape, which makes packed dims and unmakes them, derives the
  parts; any other op takes and gives the same ones.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import spmd_types as spmd
import sympy
import torch
import torch.nn.functional as F
from spmd_types import rules
from spmd_types.checker import typecheck
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from witness_moves import CONVERSIONS, LOCAL, OWNERS, Axis, carry_parameters, derived, gather_low, spec_of
from witness_rules import LACKING, MOEC, PACKED

from moec.placement import Type, Types
from moec.program import Program, op_name
from moec.runtime.collectives import CARRY_PARAMETERS, LOW_GATHER, collective, is_wait
from moec.runtime.mesh import Mesh
from moec.runtime.torch_compat import expr

SIZES = {"batch": 4, "other": 8}
"""Local size of the batch, and of every other dim of an input that capture left free."""


class WitnessError(Exception):
    """The witness derives another type than the pass recorded, or none at all; names the node and its module."""


class Witness:
    def __init__(self, program: Program) -> None:
        self.program, self.mesh = program, program.mesh
        self.axes = axes_of(program.mesh)
        self.env: dict[fx.Node, Any] = {}
        self.by_rule: dict[str, int] = {}
        """Ops that were typed by a rule of this file, with how often."""

    def run(self) -> None:
        """Raise WitnessError at the first node whose type does not follow."""
        with spmd.set_current_mesh(self.axes), typecheck(local=False):
            for node in self.program.graph.nodes:
                try:
                    self.env[node] = self._step(node)
                except (spmd.SpmdTypeError, AssertionError, RuntimeError) as e:
                    raise WitnessError(f"{node.format_node()} ({node.meta.get('where', '')}): {e}") from e
                self._agree(node)

    # -- small tools of the rules below

    def einsum(self, equation: str, *xs: Any, linear_in: tuple = ()) -> rules.NdimWithSpmdType:
        """``rules.einsum`` of operands of which those without a gradient are I or R as the others need it, which the
        library does for ordinary ops only."""
        grads = [x for x in xs if not (isinstance(x, Tensor) and not x.requires_grad)]
        fixed = []
        for x in xs:
            local = dict(spmd.get_local_type(x))
            if not any(x is g for g in grads):
                rules.ignore(x)
                for a, t in local.items():
                    if t in (spmd.I, spmd.R):
                        invariant = all(spmd.get_axis_local_type(g, a) is spmd.I for g in grads or xs)
                        local[a] = spmd.I if invariant else spmd.R
                x, dims = rules.NdimWithSpmdType(x.ndim), self.dims(x)
                spmd.assert_type(x, local, partition_spec=spec_of(dims))
            fixed.append(x)
        return rules.einsum(equation, *fixed, linear_in=linear_in)

    def by_expert(self, x_NK: Any) -> rules.NdimWithSpmdType:
        """Rows [N, K] as [E, N, K]: over ep (and owners) they are dealt by expert, over edp by token."""
        ep = {self.axes[a] for a in (*self.mesh.role("ep"), *OWNERS)}
        rows, *rest = self.dims(x_NK)
        return self.made(x_NK, [[a for a in rows if a in ep], [a for a in rows if a not in ep], *rest])

    def as_rows(self, x_ENK: Any) -> rules.NdimWithSpmdType:
        experts, tokens, *rest = self.dims(x_ENK)
        order = list(self.axes.values())
        return self.made(x_ENK, [sorted(experts + tokens, key=order.index), *rest])

    def replicated(self, x: Any, axes: list[Axis]) -> Any:
        """``x`` whose copies do different work by owner from here on; on ep its recorded type says so already."""
        for owner in [self.axes[o] for o in OWNERS] if x.requires_grad else []:
            if owner in axes:
                x = rules.convert(x, owner, src=spmd.get_axis_local_type(x, owner), dst=spmd.R)
        return x

    def shifted(self, x: Any) -> rules.NdimWithSpmdType:
        """With a whole dim in front."""
        return self.made(x, [[], *self.dims(x)])

    def check_counts(self, counts_E: Any, weight: Any) -> None:
        """Counts must be those of the experts whose weights are here, and of the tokens that are here."""
        rules.ignore(counts_E)
        ep, edp = self.mesh.role("ep"), self.mesh.role("edp")
        wanted = {**dict.fromkeys((*ep, *OWNERS), None), **dict.fromkeys(edp, ("P", -1))}
        for a, want in wanted.items():
            have, want = derived(counts_E, self.axes[a]), want or derived(weight, self.axes[a])
            if have != want and not (have[0] in "IR" and want[0] in "IR"):
                raise spmd.SpmdTypeError(f"counts are {have} on {a}, not {want}")

    def dims(self, x: Any) -> list[list[Axis]]:
        spec = spmd.get_partition_spec(x) or (None,) * x.ndim
        return [list(e) if isinstance(e, tuple) else [e] if e else [] for e in spec]

    def made(self, x: Any, dims: list[list[Axis]]) -> rules.NdimWithSpmdType:
        out = rules.NdimWithSpmdType(len(dims))
        spmd.assert_type(out, dict(spmd.get_local_type(x)), partition_spec=spec_of(dims))
        return out

    def parts(self, types: Types | None, axis: str | None) -> int:
        """In how many blocks, each of which it cuts, ``axis`` finds a dim; 1 where nothing is recorded."""
        if axis is None or types is None:
            return 1
        return self.size(types[axis].parts, self.mesh.size(self.mesh.role("dp")))

    # -- nodes

    def _step(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            with spmd.no_typecheck():
                x = self._value(node)
            return self._typed(x, node)
        if node.op == "get_attr":
            with spmd.no_typecheck():
                x = self.program.constants[node.target].clone()
            return self._typed(x, node)
        if node.op == "output":
            return self._outputs(node)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.env.__getitem__)
        name = op_name(node).replace("moec_te.", "moec.")  # another implementation of the same
        if is_wait(node.target) or name == "moec.wait":
            return args[0]
        if name == "aten.sym_size":
            return args[0].shape[args[1]]
        if name.startswith("aten.new_"):  # an operand is metadata
            with spmd.no_typecheck():
                x = node.target(*args, **kwargs)
            return self._typed(x, node)
        if not any(isinstance(x, Tensor) for x in pytree.tree_leaves((args, kwargs))):
            with spmd.no_typecheck():
                x = node.target(*args, **kwargs)
            return self._typed(x, node) if isinstance(x, Tensor) else x
        if entry := collective(node.target):
            own = {LOW_GATHER: gather_low, CARRY_PARAMETERS: carry_parameters}
            move = own.get(entry.kind) or CONVERSIONS[entry.primitive]
            return move(self, node, entry, *args)
        rule = MOEC.get(name) or (PACKED.get(name) if self._cuts_packed(node) else None) or LACKING.get(name)
        if name == "aten.linear" and args[0].ndim < 4 and 1 not in args[0].shape[1:-1]:
            rule = None  # DTensor knows those (with a dim of size 1 it makes a batched product of it, which it refuses)
        if name == "aten.reshape" and (len(node.args[1]) != getattr(node.meta.get("val"), "ndim", -1)):
            rule = None  # counts by (rank, expert) are recorded with the shape of counts by expert
        if rule is not None:
            self.by_rule[name] = self.by_rule.get(name, 0) + 1
            typed = rule(self, node, *args, **kwargs)  # before the kernel, which may refuse what is ill typed
            with spmd.no_typecheck():
                out = node.target(*args, **kwargs)
            rules.output(out, typed)
            return out
        if node.target is operator.getitem:
            return args[0][args[1]]
        return function_of(name, node.target)(*args, **kwargs)

    def _cuts_packed(self, node: fx.Node) -> bool:
        if op_name(node) not in PACKED:
            return False
        x = node.args[0]
        dim = [*node.args[1:], 0][0 if op_name(node) == "aten.slice" else 1] % x.meta["val"].ndim
        return any(t.kind == "S" and t.dim == dim for t in x.meta["types"].values())

    def _value(self, node: fx.Node) -> Tensor:
        """Zeros of the local shape."""
        val, types = node.meta["val"], node.meta["types"]
        shape = [self.size(s) for s in val.shape]
        spec = self.program.params.get(node.name)
        if spec is not None:
            for d in range(len(shape)):
                n = self.mesh.size([a for a, t in spec.types.items() if t.kind == "S" and t.dim == d])
                shape[d] = -(-shape[d] // n)  # graphs see uneven parts padded
        out = torch.zeros(shape, dtype=val.dtype)
        return out.requires_grad_(bool(node.meta["grad"]) and types is not None)

    def size(self, size, batch_ranks: int = 1) -> int:
        """A recorded size as a number, global if the ranks that share the batch are said."""
        size = size if isinstance(size, sympy.Expr) else expr(size)
        symbols, batch = size.free_symbols, self.program.batch_symbols
        return int(
            size.subs({s: SIZES["batch"] * batch_ranks if str(s) in batch else SIZES["other"] for s in symbols})
        )

    def _typed(self, x: Any, node: fx.Node) -> Any:
        """A value as its recorded types say: placeholders, and what is made from nothing."""
        types = node.meta["types"]
        spmd.assert_type(
            x,
            {**{self.axes[a]: LOCAL[t.kind] for a, t in types.items()}, **self._owned(node, types)},
            partition_spec=self._spec(node, types, x.ndim),
        )
        return x

    def _owned(self, node: fx.Node, types: Types) -> dict:
        t = spmd.V if self._is_expert(node) else spmd.I if node.meta.get("grad") else spmd.R
        return {self.axes[o]: t for o in OWNERS}

    def _is_expert(self, node: fx.Node) -> bool:
        spec = self.program.params.get(node.name)
        ep = self.mesh.role("ep")
        return bool(ep) and spec is not None and any(spec.name in b.stacked for b in self.program.blocks)

    def _spec(self, node: fx.Node, types: Types, ndim: int) -> spmd.PartitionSpec | None:
        dims: list[list[Axis]] = [[] for _ in range(ndim)]
        # An axis of more parts cuts within the blocks that those of fewer parts deal out.
        for a, t in sorted(types.items(), key=lambda item: self.parts(types, item[0])):
            if t.kind in "SV":
                dims[max(t.dim, 0)].append(self.axes[a])
        if self._is_expert(node):
            dims[0] += [self.axes[o] for o in OWNERS]
        return spec_of(dims)

    def _outputs(self, node: fx.Node) -> None:
        for spec in self.program.outputs:
            if spec.index is not None:
                x = self.env[node.args[0][spec.index]]
                for a, t in spec.types.items():
                    kind, dim = derived(x, self.axes[a])
                    if kind == "P" or (kind == "R" and x.requires_grad):
                        raise spmd.SpmdTypeError(f"output {spec.path} is {kind} on {a}: its gradient is not the loss's")
                    if not same(x, kind, dim, t):
                        raise spmd.SpmdTypeError(f"output {spec.path} is {kind}({dim}) on {a}, the contract says {t}")

    def _agree(self, node: fx.Node) -> None:
        value, recorded = self.env[node], node.meta.get("types")
        if not isinstance(value, (Tensor, tuple, list)) or recorded is None or node.op == "output":
            return
        pairs = zip(value, recorded, strict=True) if isinstance(recorded, list) else [(value, recorded)]
        for x, types in pairs:
            for a, t in types.items():
                kind, dim = derived(x, self.axes[a])
                if not same(x, kind, dim, t) or (t.kind == "S" and self._other_blocks(node, a, types)):
                    raise WitnessError(
                        f"{node.format_node()} ({node.meta.get('where', '')}) is {kind}({dim}) on {a}, recorded as {t}"
                    )

    def _other_blocks(self, node: fx.Node, axis: str, types: Types) -> bool:
        """Does an operand lie in other blocks?  The library has no packed shard and takes one for the other; what makes
        one of the other has a rule in ``witness_rules.py``."""
        entry, name = collective(node.target), op_name(node)
        # The experts take packed weights and others.
        # Of tokens in blocks, chunks are the same tokens in none.
        makes = ("aten.reshape", "moec.pack", "moec.unpack", "moec.pack_bytes", "moec.unpack_bytes", "moec.experts",
                 "moec.experts_rows", *PACKED)  # fmt: skip
        makes += ("moec.split_tokens", "moec.join_tokens")
        if entry is not None or name in makes or node.op != "call_function":
            return False
        of = (n.meta["types"] for n in node.all_input_nodes if isinstance(n.meta.get("types"), dict))
        found = {self.parts(t, axis) for t in of if t[axis].kind == "S"}
        return not found <= {self.parts(types, axis)}


def witness(program: Program) -> Witness:
    """Re-derive every type of a sharded program; raises WitnessError where they differ."""
    w = Witness(program)
    w.run()
    return w


def axes_of(mesh: Mesh) -> dict[str, Axis]:
    """The library's axes: those of the mesh, and the owners beyond them."""
    out, stride = {}, 1
    for a in reversed(mesh.axes):
        out[a.name] = Axis.of(a.size, stride)
        stride *= a.size
    return {**{n: out[n] for n in mesh.names}, **{o: Axis.of(2, stride * 2**i) for i, o in enumerate(OWNERS)}}


def same(x: Tensor, kind: str, dim: int, t: Type) -> bool:
    if t.kind == "V" and not x.is_floating_point() and x.dtype != torch.uint8:  # bytes are payloads
        return kind in "SP"  # counts: here it is said whether of all experts (a pending sum) or of those that live here
    if t.kind == "M":
        return kind == "V"
    if kind == "S":
        return dim == 0 if t.kind == "V" else t.kind == "S" and t.dim == dim
    return kind == t.kind or (not x.requires_grad and kind in "IR" and t.kind in "IR")


# -- ordinary ops: what the library knows by torch's public functions -----------------------------------------------

PUBLIC = {
    "aten.linear": F.linear, "aten.scaled_dot_product_attention":
    F.scaled_dot_product_attention, "aten.expand": Tensor.expand, "aten.split_with_sizes": torch.split,
}  # fmt: skip


def function_of(name: str, target: Callable) -> Callable:
    short = name.removeprefix("aten.")
    return PUBLIC.get(name) or (getattr(torch, short, None) if name.startswith("aten.") else None) or target
