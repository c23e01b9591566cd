"""What the functions of Transformer Engine that moec calls compute, after their documentation, in plain PyTorch: where
TE cannot be imported, ``installed(monkeypatch)`` puts these in its place.

Legend: T tokens, K choices per token, E experts, H hidden; an operand of a product is [R, D], D being summed over.
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


# -- products, and FP8 operands of them


TE_DType = {torch.float8_e4m3fn: "kFloat8E4M3", torch.float8_e5m2: "kFloat8E5M2"}
FORMAT = {name: dtype for dtype, name in TE_DType.items()}


def is_fp8_available(return_reason=False):
    return (True, "") if return_reason else True


is_fp8_block_scaling_available = is_mxfp8_available = is_fp8_available


class Storage:
    """An operand [R, D] of which only the layout for products over D is there."""

    data: torch.Tensor
    fp8_dtype: str

    def raw(self):
        assert self.data.dtype == torch.uint8 and self.data.is_contiguous() and self.data.ndim == 2
        return self.data.view(FORMAT[self.fp8_dtype]).float()

    @property
    def shape(self):
        return self.data.shape

    def values(self):
        raise NotImplementedError


class Float8TensorStorage(Storage):
    def __init__(self, *, data, fp8_scale_inv, fp8_dtype):
        self.data, self.scale, self.fp8_dtype = data, fp8_scale_inv, fp8_dtype

    def values(self):
        assert self.scale.dtype == torch.float32 and self.scale.numel() == 1
        return self.raw() * self.scale


class Float8BlockwiseQTensorStorage(Storage):
    def __init__(
        self, rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, fp8_dtype, quantizer, is_2D_scaled
    ):
        assert columnwise_data is None and columnwise_scale_inv is None and quantizer is None
        self.data, self.scale, self.fp8_dtype, self.is_2D_scaled = (
            rowwise_data, rowwise_scale_inv, fp8_dtype, is_2D_scaled,
        )  # fmt: skip

    def values(self):
        (R, D), scale = self.shape, self.scale
        assert scale.dtype == torch.float32 and scale.is_contiguous()
        of_row, of_column = torch.arange(R), torch.arange(D) // 128
        if self.is_2D_scaled:
            assert scale.shape == (up(R, 128) // 128, up(up(D, 128) // 128, 4))
            return self.raw() * scale[of_row // 128][:, of_column]
        assert scale.shape == (up(D, 128) // 128, up(R, 4))
        return self.raw() * scale[of_column][:, of_row].t()


class MXFP8TensorStorage(Storage):
    def __init__(
        self, rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, fp8_dtype, quantizer,
        with_gemm_swizzled_scales,
    ):  # fmt: skip
        assert columnwise_data is None and columnwise_scale_inv is None and quantizer is None
        assert not with_gemm_swizzled_scales
        self.data, self.scale, self.fp8_dtype = rowwise_data, rowwise_scale_inv, fp8_dtype

    def values(self):
        (R, D), scale = self.shape, self.scale
        assert scale.dtype == torch.uint8 and scale.is_contiguous() and scale.shape == (up(R, 128), up(D // 32, 4))
        power = scale[:R, torch.arange(D) // 32].int() - 127
        return torch.ldexp(self.raw(), power)


def up(n, multiple):
    return -(-n // multiple) * multiple


def product(a, b, layout, use_split_accumulator):
    """Of plain tensors in any layout, of FP8 ones in that which all GPUs have."""
    if not isinstance(a, Storage):
        assert a.is_contiguous() and b.is_contiguous()
        return {"TN": lambda: b @ a.t(), "NN": lambda: b @ a, "NT": lambda: b.t() @ a}[layout]()
    assert layout == "TN" and type(a) is type(b) and use_split_accumulator
    assert {a.fp8_dtype, b.fp8_dtype} != {"kFloat8E5M2"}, "cuBLAS multiplies no E5M2 by E5M2"
    assert not (getattr(a, "is_2D_scaled", False) and getattr(b, "is_2D_scaled", False))
    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    assert b.shape[1] == k and m and n
    of = {Float8TensorStorage: (16, 16), Float8BlockwiseQTensorStorage: (8, 128), MXFP8TensorStorage: (32, 32)}
    assert m % of[type(a)][0] == n % of[type(a)][0] == k % of[type(a)][1] == 0
    return b.values() @ a.values().t()


def general_gemm(A, B, out_dtype=None, layout="TN", use_split_accumulator=False):
    return product(A, B, layout, use_split_accumulator).to(out_dtype), None, None, None


def general_grouped_gemm(
    A, B, out, quantization_params, out_dtype, layout="TN", m_splits=None, use_split_accumulator=False,
    single_output=False,
):  # fmt: skip
    assert len(A) == len(B) == len(quantization_params) == len(m_splits)
    results = [product(a, b, layout, use_split_accumulator).to(out_dtype) for a, b in zip(A, B, strict=True)]
    assert all(y.dtype == out_dtype for y in out)
    if single_output:
        assert [b.shape[0] for b in B] == m_splits and len(out) == 1
        out[0].copy_(torch.cat(results))
    else:
        for y, result in zip(out, results, strict=True):
            y.copy_(result)


FILES = {
    "pytorch.router": ["fused_topk_with_score_function"],
    "pytorch.permutation": [
        "moe_permute", "moe_permute_index_map_backward", "moe_unpermute", "moe_unpermute_index_map_backward",
    ],
    "pytorch.cpp_extensions.gemm": ["general_gemm", "general_grouped_gemm"],
    "pytorch.constants": ["TE_DType"],
    "pytorch.quantization": ["is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available"],
    "pytorch.tensor.storage.float8_tensor_storage": ["Float8TensorStorage"],
    "pytorch.tensor.storage.float8_blockwise_tensor_storage": ["Float8BlockwiseQTensorStorage"],
    "pytorch.tensor.storage.mxfp8_tensor_storage": ["MXFP8TensorStorage"],
}  # fmt: skip


def installed(monkeypatch, **instead) -> None:
    """``import transformer_engine.pytorch…`` finds what is above, or what is given by name."""
    for file, names in FILES.items():
        module = ModuleType(f"transformer_engine.{file}")
        for name in names:
            setattr(module, name, instead.get(name, globals()[name]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        parent = module.__name__.rpartition(".")[0]
        while parent and parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
            parent = parent.rpartition(".")[0]
