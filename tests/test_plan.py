"""Plan: dict and YAML, what the world fills in, and one error that lists all that is wrong."""

from math import log2
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from moec.overlap import Overlap
from moec.plan import Limit, Plan, matches
from moec.precision import Precision
from moec.program import InputSpec, MoEBlock, OutputSpec, ParamSpec
from moec.runtime.errors import MoecError
from moec.runtime.mesh import Mesh

degrees = st.sampled_from([1, 2, 3, 4, 6, 8])
exclude = st.sampled_from([("first", "last"), (), ("*.mlp", "last")])
compute = st.sampled_from(["fp32", "bf16"])
payloads = st.sampled_from([None, "bf16"])
precisions = st.builds(
    Precision, compute=compute, fp8=st.just("blockwise"), dispatch=payloads | st.just("fp8"),
    combine=payloads | st.just("fp8"), exclude=exclude,
) | st.builds(
    Precision, compute=compute, fp8=st.just("delayed"), dispatch=payloads | st.just("fp8"), combine=payloads,
    exclude=exclude, history=st.sampled_from([1, 16]), margin=st.sampled_from([0, 2]),
)  # fmt: skip
plans = st.builds(
    Plan,
    dp=st.none() | degrees,
    tp=degrees,
    ep=degrees,
    etp=st.none() | degrees,
    cp=st.sampled_from([1, 1, 2, 3]),
    sequence_parallel=st.booleans(),
    fuse=st.booleans(),
    fsdp=st.booleans() | st.sampled_from([2, 3]),
    layout=st.just("auto") | st.dictionaries(st.sampled_from(["a.*", "*.w"]), st.sampled_from(["column", "row"])),
    inputs=st.none() | st.dictionaries(st.sampled_from(["ids", "0"]), st.none() | st.integers(0, 2)),
    outputs=st.sampled_from(["sharded", "full", {"logits": "drop"}]),
    overlap=st.none()
    | st.builds(
        Overlap,
        chunks=st.sampled_from([1, 3, "auto"]),
        schedule=st.booleans(),
        bucket_mb=st.sampled_from(["auto", None, 2.5]),
        memory_gb=st.sampled_from([None, 4]),
        pipeline_tp=st.sampled_from([1, 2]),
        cluster=st.sampled_from(["cpu2-1gbit", "lab.yaml"]),
    ),
    precision=st.none() | precisions,
)


@given(plans)
def test_yaml_and_dict_give_the_same_plan_back(plan):
    assert Plan.from_dict(plan.to_dict()) == plan
    assert Plan.from_yaml(plan.to_yaml()) == plan


def test_only_what_differs_from_the_defaults_is_written():
    assert Plan().to_dict() == {}
    assert Plan(tp=2, outputs="drop").to_dict() == {"tp": 2, "outputs": "drop"}
    assert Plan.from_yaml("") == Plan()


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"compute": "fp16"}, "compute='fp16' is none of 'fp32', 'bf16'"),
        ({"fp8": "rowise", "dispatch": "int8"}, "fp8='rowise' is none of .*; dispatch='int8' is none of"),
        ({"combine": "fp16"}, "combine='fp16' is none of"),
        ({"fp8": "delayed", "combine": "fp8"}, "combine='fp8' rounds gradients row by row"),
        ({"fp8": "delayed", "history": 0}, "history=0 is not an integer of at least 1"),
        ({"fp8": "current", "margin": 1}, "margin=1 is for fp8='delayed'"),
        ({"exclude": ["lm_head"]}, "without an fp8 recipe"),
        ({"fp8": "current", "exclude": "lm_head"}, "exclude='lm_head' is not a list"),
        ({"bf16": True}, "unknown field 'bf16'"),
    ],
)
def test_a_precision_without_meaning_is_refused(fields, wrong):
    with pytest.raises(MoecError, match=rf"plan.precision: .*{wrong}"):
        Plan.from_dict({"precision": fields})


def test_unknown_field_names_the_nearest_one():
    with pytest.raises(MoecError, match=r"'eep' \(did you mean 'ep'\?\).*'oututs' \(did you mean 'outputs'\?\)"):
        Plan.from_dict({"eep": 4, "oututs": "full", "tp": 2})
    with pytest.raises(MoecError, match="mapping"):
        Plan.from_yaml("- tp: 2")
    with pytest.raises(MoecError, match="YAML"):
        Plan.from_yaml("tp: [")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"chunks": 0}, "chunks=0 is not a positive integer"),
        ({"chunks": "many"}, "chunks='many' is not"),
        ({"pipeline_tp": True}, "pipeline_tp=True is not"),
        ({"bucket_mb": -1, "memory_gb": float("nan")}, "memory_gb=nan is not a positive number; bucket_mb=-1 is not"),
        ({"schedule": 1}, "schedule=1 is not a bool"),
        ({"cluster": None}, "cluster=None is neither"),
        ({"chunk": 2}, "unknown field 'chunk'"),
    ],
)
def test_overlap_without_meaning(fields, why):
    with pytest.raises(MoecError, match=rf"plan\.overlap: {why}"):
        Plan.from_dict({"overlap": fields})
    with pytest.raises(MoecError, match=r"overlap=2 is not a moec\.Overlap"):
        Plan(overlap=2).validate(1)


@pytest.mark.parametrize(
    ("plan", "world", "dp", "etp"),
    [
        (Plan(), 1, 1, 1),
        (Plan(tp=4), 4, 1, 4),  # etp defaults to tp when ep is 1
        (Plan(tp=2, ep=4), 4, 2, 1),
        (Plan(tp=2, ep=2, etp=2), 8, 4, 2),
        (Plan(dp=2, tp=2), 4, 2, 2),
    ],
)
def test_resolve(plan, world, dp, etp):
    full = plan.resolve(world)
    assert (full.dp, full.etp) == (dp, etp)
    assert full.resolve(world) == full
    assert plan.mesh(world) == Mesh.of(dp=dp, tp=plan.tp, ep=plan.ep, etp=etp)


@given(plans, st.sampled_from([1, 2, 4, 6, 8, 12]))
def test_a_plan_is_refused_exactly_when_it_has_no_mesh(plan, world):
    plan = Plan(plan.dp, plan.tp, plan.ep, plan.etp, plan.cp, fsdp=plan.fsdp)
    dp = plan.dp or max(1, world // (plan.cp * plan.tp))
    etp = plan.etp or (plan.tp if plan.ep == 1 else 1)
    shared = dp if plan.fsdp is True else plan.fsdp or 1
    try:
        fits = Mesh.of(dp, plan.tp, plan.ep, etp, plan.cp, shared).world == world and dp * plan.cp * plan.tp == world
    except MoecError:
        fits = False
    if fits:
        plan.resolve(world)
        assert plan.mesh(world).world == world
    else:
        with pytest.raises(MoecError, match="nearest degrees that work"):
            plan.validate(world)
        with pytest.raises(MoecError):
            plan.resolve(world) and plan.mesh(world)


@pytest.mark.parametrize(
    ("degrees", "names", "sharing"),
    [
        ({"dp": 8, "fsdp": 2}, ["dpr_edp", "dp_edp"], {"fsdp": ["dp_edp"], "efsdp": ["dp_edp"]}),
        ({"dp": 4, "tp": 2, "ep": 4, "fsdp": 4}, ["dp_edp", "dp_ep", "tp_ep"],
         {"fsdp": ["dp_edp", "dp_ep"], "efsdp": ["dp_edp"]}),
        ({"dp": 2, "cp": 2, "tp": 2, "ep": 4}, ["dp_edp", "cp_ep", "tp_ep"], {"fsdp": [], "efsdp": []}),
        # Whole experts beside tp: the tp ranks hold the same ones, and share them.
        ({"dp": 2, "tp": 2, "fsdp": 2}, ["dp_edp", "tp_edp"], {"fsdp": ["dp_edp"], "efsdp": ["dp_edp", "tp_edp"]}),
    ],
)  # fmt: skip
def test_ranks_that_share_a_sequence_or_parameters_are_axes_too(degrees, names, sharing):
    mesh = Mesh.of(**degrees)
    assert list(mesh.names) == names
    assert {role: list(mesh.role(role)) for role in sharing} == sharing
    for role in ("dp", "cp", "tp"):
        assert mesh.size(mesh.role(role)) == degrees.get(role, 1)


@settings(max_examples=25)
@given(plans, st.sampled_from([1, 2, 4, 6, 8, 12]), st.sampled_from([4, 6, 12]), st.sampled_from([2, 3, 8]))
def test_nearest_works_and_nothing_nearer_does(plan, world, experts, heads):
    limits = [Limit("ep", experts, "experts"), Limit("tp", heads, "heads")]
    plan = Plan(plan.dp, plan.tp, plan.ep, plan.etp)
    near = plan.nearest(world, limits)
    near.validate(world, limits=limits)

    def distance(p):
        want = (plan.dp or max(1, world // plan.tp), plan.tp, plan.ep, plan.etp or (plan.tp if plan.ep == 1 else 1))
        return sum(abs(log2(a / b)) for a, b in zip((p.dp, p.tp, p.ep, p.etp), want, strict=True))

    every = range(1, world + 1)
    for tp, ep, etp in ((t, e, x) for t in every for e in every for x in every if world % t == 0):
        other = Plan(world // tp, tp, ep, etp)
        if distance(other) < distance(near) - 1e-6:
            with pytest.raises(MoecError):
                other.validate(world, limits=limits)


def program():
    param = ParamSpec("w", "layers.0.q_proj.weight", (8, 8), torch.float32, True)
    return SimpleNamespace(
        params={"w": param},
        inputs={"x": InputSpec("x", "input_ids", 0, 2, torch.int64)},
        outputs=[OutputSpec("loss", 0), OutputSpec("logits", 1)],
        blocks=(MoEBlock("layers.0.mlp", 6, 2, ()),),
    )


def test_everything_wrong_is_listed_at_once():
    plan = Plan(
        tp=4,
        ep=4,
        layout={"layers.*.q_proj": "colunm", "layers.*.v_proj": "row"},
        inputs={"input_id": 0, "input_ids": 2},
        outputs={"logits": "dropped", "logit": "drop"},
        backend="eagre",
    )
    limits = [Limit("tp", 2, "key/value heads", "layers.0.self_attn.k_proj", "one head is never split")]
    with pytest.raises(MoecError) as e:
        plan.validate(8, program(), limits)
    for text in [
        "layers.0.self_attn.k_proj: tp=4 does not divide the 2 key/value heads (one head is never split)",
        "layers.0.mlp: ep=4 does not divide the 6 experts",
        "unknown style 'colunm' (did you mean 'column'?) for 'layers.*.q_proj'",
        "pattern 'layers.*.v_proj' (did you mean 'layers.0.q_proj'?) matches no parameter",
        "'input_id' (did you mean 'input_ids'?) is not an input; inputs are input_ids",
        "'input_ids' has 2 dims, batch dim 2 is not one of them",
        "unknown mode 'dropped' (did you mean 'drop'?) for 'logits'",
        "'logit' (did you mean 'logits'?) is not an output",
        "unknown backend 'eagre' (did you mean 'eager'?)",
        "nearest degrees that work: dp=4, tp=2, ep=2, etp=1",
    ]:
        assert text in str(e.value), text
    assert "9 problems" in str(e.value)


def test_a_good_plan_passes_with_its_program():
    plan = Plan(
        tp=2, ep=2, layout={"layers.*.q_proj": "column"}, inputs={"input_ids": None}, outputs={"logits": "drop"}
    )
    plan.validate(4, program(), [Limit("tp", 2, "heads")])
    assert matches("layers.*.q_proj", "layers.0.q_proj.weight") and matches("*.weight", "layers.0.q_proj.weight")
    assert not matches("layers.0", "layers.0.q_proj.weight")
    assert (plan.output_mode("logits"), plan.output_mode("loss")) == ("drop", "sharded")


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (Plan(tp=3), r"tp=3 does not divide the 4 ranks"),
        (Plan(dp=2, tp=4), r"dp\*tp = 2\*4 = 8 is not the world of 4 ranks"),
        (Plan(ep=8), r"ep\*etp = 8\*1 = 8 does not divide the 4 ranks"),
        (Plan(tp=0, ep=2.0), r"tp=0 is not a positive integer\n.*ep=2.0 is not"),
        (Plan(layout="fancy"), "layout='fancy'"),
        (Plan(outputs="all"), "unknown mode 'all'"),
    ],
)
def test_single_errors(plan, text):
    with pytest.raises(MoecError, match=text):
        plan.validate(4)


def test_factorisations_that_do_not_nest():
    with pytest.raises(MoecError, match="do not nest") as e:
        Plan(dp=2, tp=3, ep=2).validate(6)
    assert "nearest degrees that work" in str(e.value)
