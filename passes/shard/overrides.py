"""What the user or the model's own plan says of the layout, laid over what ``auto`` found.

A dict layout speaks in patterns of names and three styles: *column* is the output of a weight as the GEMM sees it (a
packed one is cut part by part), *row* its input, *replicate* neither; of a table they mean what they mean of a head
that is tied to it.  A bias or another vector that goes with a column weight may be column.  What no pattern names stays
as ``auto`` placed it.

``hf`` reads the styles that a Hugging Face model declares for itself (``base_model_tp_plan``, ``base_model_ep_plan``,
``_tp_plan`` of its classes).  Those name *stored* dims (colwise the last but one, rowwise the last) and how a module
communicates; here only the former is placed, and the types decide all communication.  Parameters that the plan does not
name are whole.

1. Each parameter's style: the last pattern that matches it (dict), or its own entry before its module's (hf).
2. The dim that the style means; a style that means nothing of a parameter is declined in ``why_not``.
3. For hf, dims that ``auto`` would have made in parts are so only where weights of their module still are.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from moec.passes.shard.layout import Layout, tables_of
from moec.passes.shard.weight import GEMMS, Weight, weight_of
from moec.placement import S, Type
from moec.plan import Plan, matches
from moec.program import ParamSpec, Program, op_name
from moec.runtime.errors import MoecError

STORED = {"colwise": -2, "colwise_rep": -2, "colwise_gather_output": -2, "packed_colwise": -2,
          "rowwise": -1, "rowwise_rep": -1, "rowwise_split_input": -1, "packed_rowwise": -1,
          "embedding_rowwise": -2, "embedding_colwise": -1}  # fmt: skip
"""Hugging Face's style -> the stored dim of a weight that it cuts."""
WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params")
"""Styles of whole parameters: what their gradients owe follows from the types."""
MODULES = ("moe_tp_experts", "ep_dispatch_experts", "moe_identity_expert", "all_reduce", "sequence_parallel")
"""Styles of how a module communicates, not of parameters."""


def override(program: Program, plan: Plan, out: Layout) -> None:
    """Change ``out`` as ``plan.layout`` says."""
    if isinstance(plan.layout, Mapping):
        _by_patterns(_Params(program, out), plan.layout)
    elif plan.layout == "hf":
        _by_own_plan(_Params(program, out))


class _Params:
    """The parameters, seen as a style sees them."""

    def __init__(self, program: Program, out: Layout) -> None:
        self.program, self.out = program, out
        self.tables = tables_of(program)
        self.gemms: dict[str, tuple[str, Weight]] = {
            w.placeholder: (op_name(n), w)
            for n in program.graph.nodes
            if n.op == "call_function" and op_name(n) in GEMMS
            if (w := weight_of(n, program))
        }

    def role(self, ph: str) -> str:
        """Over which ranks its width is cut."""
        expert = "ep" in self.out.dims.get(ph, {}) or self.gemms.get(ph, ("", None))[0] == "moec.grouped_mm"
        return "etp" if expert else "tp"

    def place(self, ph: str, t: Type | None, why: str) -> None:
        """Place a parameter, or keep it whole; its experts stay dealt over ep."""
        kept = self.out.dims.pop(ph, {})
        self.out.dims[ph] = {k: v for k, v in kept.items() if k == "ep"}
        self.out.at_use.discard(ph)
        if t is not None:
            self.out.dims[ph][self.role(ph)] = t
        self.out.reasons[ph] = why

    def styled(self, ph: str, style: str) -> Type | None:
        """What column or row means of a parameter, None where it means nothing."""
        if ph in self.gemms:
            op, w = self.gemms[ph]
            if style == "row":
                return S(w.dims[GEMMS[op][1]])
            return self.out.columns.get(ph, S(w.dims[GEMMS[op][0]]))
        if ph in self.tables:  # column: the rows, which a tied head yields as columns
            return S(0 if style == "column" else 1)
        return self.out.columns.get(ph) if style == "column" else None

    def decline(self, spec: ParamSpec, style: str, pattern: str) -> None:
        self.program.why_not.append(
            f"layout: {style!r} by {pattern!r} means nothing of {spec.name} {list(spec.shape)}, which stays whole"
        )


def _by_patterns(params: _Params, layout: Mapping[str, str]) -> None:
    for ph, spec in params.program.params.items():
        found = [(p, style) for p, style in layout.items() if matches(p, spec.name)]  # 1
        if not found:
            continue
        pattern, style = found[-1]
        t = None if style == "replicate" else params.styled(ph, style)  # 2
        # The bias of a row weight is whole: that is what its style means.
        if t is None and style == "column":
            params.decline(spec, style, pattern)
        params.place(ph, t, f"plan: {style} by {pattern!r}")


def _by_own_plan(params: _Params) -> None:
    program, out = params.program, params.out
    own = program.own_plan
    if not own:
        raise MoecError(
            "layout='hf', and the model declares no parallel plan of its own",
            where="plan",
            way_out="layout='auto' needs none; a dict of patterns says it by hand",
        )
    roles = {r for a in program.mesh.axes for r in (a.dense, a.expert)}
    for ph, spec in program.params.items():
        said, t = [], None
        for role in ("ep", "tp"):
            # Experts are dealt over ep as one plan says, and cut over etp as the other does, if there are such ranks.
            if role not in own or ("ep" in out.dims.get(ph, {}) and {"tp": "etp"}.get(role, role) not in roles):
                continue
            pattern, style = _own_style(spec, own[role])  # 1
            if not style:
                continue
            said.append(f"hf: {style} by {pattern!r}")
            if role == "tp":
                t = _own_type(params, ph, style)  # 2
            dealt = style == "grouped_gemm" and "ep" in out.dims.get(ph, {})
            known = dealt or style in (*WHOLE, *MODULES) or (style in STORED and (t or spec.name.endswith("bias")))
            if not known:
                params.decline(spec, style, pattern)
        why = "; ".join(said) or "hf: whole, the model's plan does not name it"
        if ph in out.at_use and t is not None:
            out.reasons[ph] = f"{why}; key/value heads are fewer than the ranks, so each computes them all"
            continue
        params.place(ph, t, why)
    for (node, dim), role in list(out.created.items()):  # 3
        inside = node.meta.get("where", "") + "."
        if not any(role in out.dims.get(ph, {}) for ph, s in program.params.items() if s.name.startswith(inside)):
            del out.created[node, dim]


def _own_style(spec: ParamSpec, own: Mapping[str, str]) -> tuple[str, str]:
    """The entry of a parameter, else that of its module; ("", "") without one.  Later entries win."""
    names = [*(spec.members[:1] or [spec.name]), *spec.aliases]
    for name in (*names, *(n.rpartition(".")[0] for n in names)):
        for pattern, style in reversed(list(own.items())):
            if fnmatchcase(name, pattern):
                return pattern, style
    return "", ""


def _own_type(params: _Params, ph: str, style: str) -> Type | None:
    if style not in STORED:
        return None
    columns = params.out.columns.get(ph)
    if ph not in params.gemms and ph not in params.tables:  # a bias: cut with the columns of its weight
        return columns if STORED[style] == -2 else None
    if style.startswith("embedding") or ph not in params.gemms:
        return S(0 if STORED[style] == -2 else 1) if ph in params.tables else None
    op, w = params.gemms[ph]
    dim = len(params.program.params[ph].shape) + STORED[style]
    if dim == w.dims[GEMMS[op][0]]:
        return columns or S(dim)
    return S(dim) if dim == w.dims[GEMMS[op][1]] else None
