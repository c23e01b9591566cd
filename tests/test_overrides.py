"""Layouts that are said, not inferred: by a dict of patterns, or by the Hugging Face model's own plan."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_zoo import make
from torch import Tensor, nn
from user_models import FusedAttention, Net, tokens

import moec
from moec.capture.examples import dummy_examples
from moec.compiler import compile_program
from moec.hf import build
from moec.plan import Plan
from moec.program import Program
from moec.runtime.errors import MoecError

HIDDEN, WIDTH = 8, 12


class Mlp(nn.Module):
    """A packed gate_up with a bias, as a block of a residual stream, between a table and its tied head."""

    def __init__(self, own: dict[str, str] | None = None) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(16, HIDDEN), nn.LayerNorm(HIDDEN)
        self.gate_up, self.down = nn.Linear(HIDDEN, 2 * WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.head = nn.Linear(HIDDEN, 16, bias=False)
        self.head.weight = self.embed.weight
        if own is not None:
            self._tp_plan = own  # as transformers leaves it on its models

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        x = x + self.down(F.silu(gate) * up)
        return {"loss": self.head(x).logsumexp(-1).mean()}


def compiled(model: nn.Module, plan: Plan, *args: Tensor, world: int = 4) -> Program:
    return compile_program(model, plan, world, args, {}, training=True)


def placed(program: Program) -> dict[str, str]:
    """Parameter -> how it is cut, '' if it is whole."""
    return {s.name: "".join(str(t) for t in s.types.values() if t.kind == "S") for s in program.params.values()}


def exact(model: nn.Module, plan: Plan, *args: Tensor) -> None:
    report = moec.check(model, plan, example_inputs=args, world_size=4)
    assert report.ok, report


IDS = torch.randint(0, 16, (4, 3), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("layout", "gate_up", "bias", "down", "embed"),
    [
        ("auto", "S(0,parts=2)", "S(0,parts=2)", "S(1)", "S(0)"),
        ({"gate_up": "column", "down": "row"}, "S(0,parts=2)", "S(0,parts=2)", "S(1)", "S(0)"),
        ({"*": "replicate", "gate_up*": "column"}, "S(0,parts=2)", "S(0,parts=2)", "", ""),
        ({"gate_up.weight": "row", "gate_up.bias": "replicate"}, "S(1)", "", "S(1)", "S(0)"),
        ({"embed": "row", "*gate_up*": "replicate"}, "", "", "S(1)", "S(1)"),
    ],
    ids=str,
)
def test_patterns_are_right_part_by_part(layout, gate_up, bias, down, embed) -> None:
    plan = Plan(dp=2, tp=2, layout=layout)
    where = placed(compiled(Mlp(), plan, IDS))
    assert where["gate_up.weight"] == gate_up and where["gate_up.bias"] == bias
    assert where["down.weight"] == down and where["embed.weight"] == embed
    exact(Mlp(), plan, IDS)


def test_a_fused_qkv_is_cut_in_its_three_parts() -> None:
    model, args = Net(FusedAttention(), nn.LayerNorm), tokens()
    plan = Plan(2, 2, 1, 1, layout={"*": "replicate", "attention.qkv": "column", "attention.out": "row"})
    program = compiled(model, plan, *args)
    where = placed(program)
    assert where["attention.qkv.weight"] == where["attention.qkv.bias"] == "S(0,parts=3)"
    assert where["attention.out.weight"] == "S(1)"
    assert program.layout_reasons["attention.qkv.bias"] == "plan: column by 'attention.qkv'"
    exact(model, plan, *args)


def test_a_style_that_means_nothing_is_declined() -> None:
    program = compiled(Mlp(), Plan(dp=2, tp=2, layout={"norm": "column"}), IDS)
    assert placed(program)["norm.weight"] == ""
    assert any("'column' by 'norm' means nothing of norm.weight [8], which stays whole" in w for w in program.why_not)


# -- the model's own plan --------------------------------------------------------------------------------------------

OWN = {"gate_up": "packed_colwise", "down": "rowwise", "norm": "sequence_parallel", "embed": "embedding_rowwise"}


def test_the_models_own_plan_is_read() -> None:
    program = compiled(Mlp(OWN), Plan(dp=2, tp=2, layout="hf"), IDS)
    where = placed(program)
    assert where["gate_up.weight"] == where["gate_up.bias"] == "S(0,parts=2)"
    assert where["down.weight"] == "S(1)" and where["down.bias"] == "" and where["embed.weight"] == "S(0)"
    assert program.layout_reasons["gate_up.weight"] == "hf: packed_colwise by 'gate_up'"
    assert program.layout_reasons["norm.weight"] == "hf: sequence_parallel by 'norm'"
    exact(Mlp(OWN), Plan(dp=2, tp=2, layout="hf"), IDS)


def test_what_the_own_plan_does_not_name_is_whole() -> None:
    program = compiled(Mlp({"down": "rowwise"}), Plan(tp=4, layout="hf"), IDS)
    assert placed(program) == dict.fromkeys(placed(program), "") | {"down.weight": "S(1)"}
    assert "does not name it" in program.layout_reasons["gate_up.weight"]
    exact(Mlp({"down": "rowwise"}), Plan(tp=4, layout="hf"), IDS)


@pytest.mark.parametrize(
    "own",
    [
        {"gate_up": "rowwise", "down": "colwise"},  # the wrong way round
        {"gate_up": "colwise_gather_output", "down": "rowwise_split_input"},
        {"norm": "colwise", "down": "packed_rowwise", "embed": "embedding_colwise", "head": "all_reduce"},
        {"gate_up": "no such style", "down": "replicated_with_grad_allreduce"},
    ],
    ids=str,
)
def test_whatever_the_own_plan_says_the_numbers_are_right(own) -> None:
    exact(Mlp(own), Plan(dp=2, tp=2, layout="hf"), IDS)


def test_styles_that_mean_nothing_are_declined() -> None:
    own = {"norm": "colwise", "gate_up": "no such style", "down": "grouped_gemm"}
    declined = "\n".join(compiled(Mlp(own), Plan(dp=2, tp=2, layout="hf"), IDS).why_not)
    for words in ("'colwise' by 'norm'", "'no such style' by 'gate_up'", "'grouped_gemm' by 'down'"):
        assert words in declined


def test_a_model_without_a_plan_of_its_own_is_refused() -> None:
    with pytest.raises(MoecError, match="the model declares no parallel plan of its own") as e:
        compiled(Mlp(), Plan(dp=2, tp=2, layout="hf"), IDS)
    assert "auto" in e.value.way_out


@pytest.mark.nightly
def test_experts_are_cut_over_etp_as_the_own_plan_says() -> None:
    """With tp alone (and so etp) its tensor-parallel part speaks of experts, with ep its expert part."""
    pytest.importorskip("transformers")
    model = build("qwen3_moe", 1, hidden_size=32, moe_intermediate_size=12)
    args, kwargs = dummy_examples(model, training=True)
    program = compile_program(model, Plan(1, 4, 1, 4, layout="hf"), 4, args, kwargs, training=True)
    where = placed(program)
    assert where["model.layers.0.mlp.experts.gate_up_proj"] == "S(1,parts=2)"
    assert where["model.layers.0.mlp.experts.down_proj"] == "S(2)"


def hugging_face(family: str, plan: tuple[int, int, int, int]) -> None:
    layers = 2 if family in ("qwen2_moe", "deepseek_v2") else 1  # the first layer of these has no experts
    report = moec.check(make(family, layers), Plan(*plan, layout="hf"), world_size=4)
    assert report.ok, report


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        *(pytest.param(f, marks=pytest.mark.nightly) for f in ("mixtral", "deepseek_v3", "olmoe", "gpt_oss")),
    ],
)
def test_hugging_face_plans_are_exact(family) -> None:
    pytest.importorskip("transformers")
    hugging_face(family, (2, 2, 2, 1))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "family", ["mixtral", "deepseek_v3", "qwen2_moe", "deepseek_v2", "glm4_moe", "qwen3_next", "qwen3_vl_moe"]
)
def test_hugging_face_plans_are_exact_over_etp(family) -> None:
    pytest.importorskip("transformers")
    hugging_face(family, (2, 2, 2, 2))


def test_explain_says_who_decided_what() -> None:
    pytest.importorskip("transformers")
    model = build("qwen3_moe", 1, hidden_size=32, moe_intermediate_size=12)
    args, kwargs = dummy_examples(model, training=True)
    program = compile_program(model, Plan(2, 2, 2, 1, layout="hf"), 4, args, kwargs, training=True)
    why = {p.name.removeprefix("model.layers.0."): p for p in moec.explain(program).parameters}
    assert why["self_attn.q_proj.weight"].reason == "hf: colwise by 'model.layers.*.self_attn.q_proj'"
    assert why["self_attn.q_proj.weight"].types == "tp_ep:S(0)"
    assert why["self_attn.q_norm.weight"].reason.startswith("hf: replicated_with_grad_allreduce by")
    assert why["mlp.experts.gate_up_proj"].reason.startswith("hf: grouped_gemm by")
    assert why["lm_head.weight"].reason == "hf: colwise_gather_output by 'lm_head'"
    assert why["input_layernorm.weight"].reason == "hf: whole, the model's plan does not name it"
