"""What the functions of Transformer Engine that moec calls compute, after their documentation, in plain PyTorch: where
TE cannot be imported, ``installed(monkeypatch)`` puts these in its place.

Legend: T tokens, K choices per token, E experts, H hidden.
"""

import sys
from types import ModuleType

import torch


def fused_topk_with_score_function(
    logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias
):
    assert logits.dtype != torch.float64
    scores = {
        "softmax": lambda z: z.softmax(1) if use_pre_softmax else z,
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda z: torch.nn.functional.softplus(z).sqrt(),
    }[score_function](logits)
    choose_by = scores if expert_bias is None else scores + expert_bias
    if num_groups is not None:
        by_group = choose_by.view(len(logits), num_groups, -1)
        value = by_group.topk(topk // group_topk, dim=2)[0].sum(2)
        kept = torch.zeros_like(value, dtype=torch.bool).scatter(1, value.topk(group_topk, dim=1)[1], True)
        choose_by = torch.where(kept[:, :, None], by_group, -torch.inf).flatten(1)
    ids = choose_by.topk(topk, dim=1)[1].sort(1)[0]
    chosen = scores.gather(1, ids)
    if score_function == "softmax" and not use_pre_softmax:
        chosen = chosen.softmax(1)
    elif score_function != "softmax" and topk > 1:
        chosen = chosen / (chosen.sum(1, keepdim=True) + 1e-20)
    probs = torch.zeros_like(logits).scatter(1, ids, chosen * scaling_factor)
    return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)


def moe_permute(inp, routing_map, num_out_tokens, max_token_num=-1, map_type="mask"):
    assert map_type == "index" and routing_map.dtype == torch.int32 and routing_map.min() >= 0
    T, K = routing_map.shape
    assert num_out_tokens == T * K
    order = routing_map.flatten().argsort(stable=True)
    row_id_map = torch.empty(K, T, dtype=torch.int32)
    row_id_map[order % K, order // K] = torch.arange(T * K, dtype=torch.int32)
    return inp[order // K], row_id_map.flatten()


def moe_permute_index_map_backward(grad_permuted_act, row_id_map, num_tokens, topK):
    rows = grad_permuted_act[row_id_map.view(topK, num_tokens)]
    return rows.float().sum(0).to(grad_permuted_act.dtype)


def moe_unpermute(inp, row_id_map, merging_probs=None, restore_shape=None, map_type="mask"):
    assert map_type == "index" and row_id_map.dtype == torch.int32 and merging_probs.dtype == torch.float32
    T, K = merging_probs.shape
    return (inp[row_id_map.view(K, T)].float() * merging_probs.t()[..., None]).sum(0).to(inp.dtype)


def moe_unpermute_index_map_backward(unpermuted_act_grad, fwd_input, row_id_map, probs):
    T, K = probs.shape
    at = row_id_map.view(K, T).long()
    act = torch.empty_like(fwd_input)
    act[at] = (unpermuted_act_grad.float() * probs.t()[..., None]).to(act.dtype)
    return act, (unpermuted_act_grad.float() * fwd_input[at].float()).sum(2).t().contiguous()


def general_grouped_gemm(A, B, out, quantization_params, out_dtype, layout="TN", m_splits=None, single_output=False):
    assert all(t.is_contiguous() for t in (*A, *B)) and len(A) == len(B) == len(quantization_params)
    products = {"TN": lambda a, b: b @ a.t(), "NN": lambda a, b: b @ a, "NT": lambda a, b: b.t() @ a}[layout]
    results = [products(a, b).to(out_dtype) for a, b in zip(A, B, strict=True)]
    if single_output:
        assert [len(b) for b in B] == m_splits
        out[0].copy_(torch.cat(results))
    else:
        for y, result in zip(out, results, strict=True):
            y.copy_(result)


FILES = {
    "pytorch.router": [fused_topk_with_score_function],
    "pytorch.permutation": [
        moe_permute, moe_permute_index_map_backward, moe_unpermute, moe_unpermute_index_map_backward,
    ],
    "pytorch.cpp_extensions.gemm": [general_grouped_gemm],
}  # fmt: skip


def installed(monkeypatch, **instead) -> None:
    """``import transformer_engine.pytorch…`` finds the functions above, or those given by name."""
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.cpp_extensions"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for file, functions in FILES.items():
        module = ModuleType(f"transformer_engine.{file}")
        for f in functions:
            setattr(module, f.__name__, instead.get(f.__name__, f))
        monkeypatch.setitem(sys.modules, module.__name__, module)
