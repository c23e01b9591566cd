"""Every Hugging Face MoE family, shrunk, under every plan: exact.

The families differ in what sharding has to get right: grouped-query and latent attention, sinks and sliding windows,
the gated delta net, softmax, sigmoid and group-limited routers, shared experts, dense layers before the MoE layers,
packed and interleaved gate and up, expert biases.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moec
from moec.capture.examples import dummy_examples
from moec.compiler import compile_program
from moec.hf import build
from moec.plan import Plan

pytest.importorskip("transformers")

PLANS = [(4, 1, 4, 1), (2, 2, 4, 1), (2, 2, 2, 2), (1, 4, 1, 4), (1, 4, 4, 1)]
TINY = {"hidden_size": 32, "intermediate_size": 24, "vocab_size": 40}
"""Narrower than ``moec.hf`` makes them, for speed."""

FAMILIES: dict[str, dict] = {
    "mixtral": {"sliding_window": 4, "num_key_value_heads": 2},
    "qwen2_moe": {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 20, "mlp_only_layers": [0]},
    "qwen3_moe": {"moe_intermediate_size": 12},
    "olmoe": {"clip_qkv": 0.5},
    "deepseek_v2": {"first_k_dense_replace": 1, "moe_intermediate_size": 12},
    "deepseek_v3": {"moe_intermediate_size": 12},
    "gpt_oss": {},
    "glm4_moe": {"moe_intermediate_size": 12, "use_qk_norm": True},
    "qwen3_next": {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 20},
    "qwen3_vl_moe": {"moe_intermediate_size": 12},
}
"""Fields beside ``TINY``; query heads are grouped (8 on 4, Mixtral's 8 on 2: fewer than ranks) as in the original."""

BY_DEFAULT = {
    "mixtral": (1, 4, 1, 4), "qwen2_moe": (2, 2, 2, 2), "qwen3_moe": (1, 4, 4, 1), "olmoe": (2, 2, 2, 2),
    "deepseek_v2": (1, 4, 1, 4), "deepseek_v3": (2, 2, 4, 1), "gpt_oss": (2, 2, 2, 2), "glm4_moe": (2, 2, 4, 1),
    "qwen3_next": (2, 2, 2, 2), "qwen3_vl_moe": (4, 1, 4, 1),
}  # fmt: skip


def make(family: str, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    model = build(family, layers, **TINY, **FAMILIES[family])
    generator = torch.Generator().manual_seed(1)
    values = [*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("correction_bias"))]
    with torch.no_grad():  # what starts as zeros or ones would hide what it is multiplied with
        for t in values:
            if t.ndim < 2 or not t.any():
                t += 0.1 * torch.randn(t.shape, generator=generator)
    return model


def prove(family: str, plan: tuple[int, int, int, int]) -> None:
    report = moec.check(make(family), Plan(*plan), world_size=4)
    assert report.ok, report
    assert report.passes[-1].name == "lower"


@pytest.mark.nightly  # by day five families meet one plan each in test_covering.py
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str) -> None:
    prove(family, BY_DEFAULT[family])


@pytest.mark.nightly
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_family_under_every_plan(family: str, plan: tuple[int, int, int, int]) -> None:
    prove(family, plan)


@pytest.mark.parametrize(
    ("family", "placed"),
    [
        ("deepseek_v3", {"q_b_proj.weight": "S(0)", "kv_b_proj.weight": "S(0)", "o_proj.weight": "S(1)"}),
        pytest.param(
            "gpt_oss",
            {"sinks": "S(0)", "q_proj.bias": "S(0)", "o_proj.weight": "S(1)", "experts.gate_up_proj": "S(2)"},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_heads_are_dealt_to_the_ranks(family: str, placed: dict[str, str]) -> None:
    """Not only exact: a layout that keeps everything whole would be exact too."""
    model = make(family, layers=1)
    args, kwargs = dummy_examples(model, training=True)
    program = compile_program(model, Plan(1, 4, 1, 4), 4, args, kwargs, training=True)
    for name, kind in placed.items():
        found = [str(t) for s in program.params.values() if s.name.endswith(name) for t in s.types.values()]
        assert found == [kind], name


def test_shrunk_configs_keep_what_makes_the_family() -> None:
    with torch.device("meta"):
        config = build("qwen3_next", 2).config
        assert config.layer_types == ["linear_attention", "full_attention"]
        assert build("gpt_oss", 1).config.layer_types == ["full_attention"]
        config = build("deepseek_v3", 3).config
        assert (config.n_group, config.topk_group, config.num_experts_per_tok) == (4, 2, 4)
        assert config.first_k_dense_replace == 2
        config = build("mixtral", 1, num_attention_heads=4, num_local_experts=2).config
        assert (config.num_key_value_heads, config.num_experts_per_tok) == (2, 1)
        assert build("olmoe", 1, num_key_value_heads=2).config.num_key_value_heads == 2
