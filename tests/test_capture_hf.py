"""Capture of Hugging Face models: no examples, no change to the model, its output types back."""

import copy

import pytest
import torch
from capture_models import gradients, run, worst
from torch.utils import _pytree as pytree

from moec.capture import capture, capture_key

transformers = pytest.importorskip("transformers")


def mixtral(**over):
    config = transformers.MixtralConfig(
        **{
            "vocab_size": 64,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        | {"num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 3, "max_position_embeddings": 64}
        | over
    )
    torch.manual_seed(3)
    return transformers.MixtralForCausalLM(config)


def qwen3_moe(**over):
    config = transformers.Qwen3MoeConfig(
        **{"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12, "head_dim": 8}
        | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4}
        | {"num_experts_per_tok": 2, "max_position_embeddings": 64, "tie_word_embeddings": True}
        | over
    )
    torch.manual_seed(3)
    return transformers.Qwen3MoeForCausalLM(config)


def batch(b, s):
    g = torch.Generator().manual_seed(b * 100 + s)
    ids, labels = torch.randint(0, 64, (2, b, s), generator=g)
    labels[0, : s // 2] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("make", [pytest.param(mixtral, marks=pytest.mark.nightly), qwen3_moe])
def test_loss_logits_and_gradients_at_other_sizes(make):
    model = make()
    model.config._experts_implementation = "eager"
    program = capture(model, training=True)
    assert [b.path for b in program.blocks] == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert program.blocks[0].guide.report is program.blocks[1].guide.report
    for b, s in ((1, 17), (4, 9)):
        want = model(**batch(b, s), use_cache=False)
        got = pytree.tree_unflatten(run(program, model, batch(b, s)), program.out_spec)
        assert type(got) is type(want)
        torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-6)
        assert worst(gradients(model, want.loss), gradients(model, got.loss)) < 1e-4


def test_the_model_and_its_config_are_left_alone():
    model = mixtral(num_hidden_layers=1).eval()
    model.config._experts_implementation = "grouped_mm"
    before = {n: id(p) for n, p in model.named_parameters()}
    capture(model, training=True)
    assert model.config._experts_implementation == "grouped_mm"
    assert not model.training and "forward" not in vars(model.model.layers[0].mlp.experts)
    assert before == {n: id(p) for n, p in model.named_parameters()}


def test_contract_of_inputs_outputs_and_parameters():
    model = qwen3_moe(num_hidden_layers=1)
    program = capture(model, training=True)
    assert {s.path: (s.batch_dim, s.static) for s in program.inputs.values()} == {
        "input_ids": (0, (None, None)),
        "labels": (0, (None, None)),
    }
    symbols = {str(n.meta["val"].shape[0]) for n in program.placeholders() if n.name in program.inputs}
    assert program.batch_symbols == symbols and len(symbols) == 2
    assert [o.path for o in program.outputs] == ["loss", "logits"]
    names = {n for n, _ in model.named_parameters()}
    assert {s.name for s in program.params.values() if not s.buffer} == names
    (tied,) = [s for s in program.params.values() if s.aliases]
    assert (tied.name, tied.aliases) == ("model.embed_tokens.weight", ("lm_head.weight",))
    assert not next(s for s in program.params.values() if s.buffer).persistent
    wheres = {n.meta["where"] for n in program.graph.nodes if n.op == "call_function"}
    assert {"model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts", "lm_head"} <= wheres
    assert all("val" in n.meta for n in program.graph.nodes if n.op != "output")
    assert not any("assert" in op for op in program.op_counts())


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        ghost = mixtral(num_hidden_layers=1)
    program = capture(ghost, training=True)
    assert len(program.blocks) == 1
    model = mixtral(num_hidden_layers=1)
    torch.testing.assert_close(run(program, model, batch(2, 7))[0], model(**batch(2, 7)).loss)


def test_eval_graph_is_another_graph():
    model = mixtral(num_hidden_layers=1, attention_dropout=0.5).train()
    program = capture(model, (), {"input_ids": torch.zeros(1, 4, dtype=torch.long), "use_cache": False}, training=False)
    assert [o.path for o in program.outputs] == ["logits"] and not program.training
    ids = batch(3, 6)["input_ids"]
    (logits,) = run(program, model, {"input_ids": ids})
    torch.testing.assert_close(logits, copy.deepcopy(model).eval()(input_ids=ids).logits)


def test_attention_dropout_is_refused_in_training():
    from moec.runtime.errors import MoecError

    with pytest.raises(MoecError, match=r"self_attn.*0\.5"):
        capture(mixtral(num_hidden_layers=1, attention_dropout=0.5), training=True)


def test_router_jitter_is_refused_in_training():
    from moec.runtime.errors import MoecError

    with pytest.raises(MoecError, match=r"model\.layers\.0\.mlp.*0\.9"):
        capture(mixtral(num_hidden_layers=1, router_jitter_noise=0.1), training=True)


def test_capture_key_knows_what_a_capture_bakes_in():
    ids = torch.zeros(4, 7, dtype=torch.long)
    base = capture_key(True, (ids,), {"mask": torch.ones(4, 7), "flag": True})
    assert hash(base) == hash(capture_key(True, (ids[:1, :3],), {"flag": True, "mask": torch.ones(1, 3)}))
    assert base == capture_key(True, (ids[:2],), {"mask": torch.ones(2, 7), "flag": True})
    others = [
        capture_key(False, (ids,), {"mask": torch.ones(4, 7), "flag": True}),
        capture_key(True, (ids,), {"mask": torch.ones(4, 7), "flag": False}),
        capture_key(True, (ids,), {"mask": torch.ones(1, 7), "flag": True}),
        capture_key(True, (ids,), {"mask": torch.ones(4, 7).double(), "flag": True}),
        capture_key(True, (ids[0],), {"mask": torch.ones(4, 7), "flag": True}),
        capture_key(True, (ids,), {"flag": True}),
    ]
    assert all(base != o for o in others)
