"""Plain, single-device models for the demo.  None of them knows about moec or about processes.

``mixtral`` and ``qwen3_moe`` are Hugging Face's classes with random weights; ``plain`` is what a user may have written:
a ``ModuleList`` of experts and a loop over it.  All take ``(input_ids, labels=None)``, shift the labels themselves and
return a mapping with ``loss`` (when labels are given) and ``logits``.

Shape suffixes: B batch, S sequence, T = B*S tokens, H hidden, N heads, D head dim, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Sizes:
    vocab: int = 256
    hidden: int = 128
    ffn: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    experts: int = 8
    top_k: int = 2


def mixtral(z: Sizes) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=z.vocab,
            hidden_size=z.hidden,
            intermediate_size=z.ffn,
            num_hidden_layers=z.layers,
            num_attention_heads=z.heads,
            num_key_value_heads=z.kv_heads,
            num_local_experts=z.experts,
            num_experts_per_tok=z.top_k,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def qwen3_moe(z: Sizes) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=z.vocab,
            hidden_size=z.hidden,
            moe_intermediate_size=z.ffn,
            intermediate_size=z.ffn,
            num_hidden_layers=z.layers,
            num_attention_heads=z.heads,
            num_key_value_heads=z.kv_heads,
            head_dim=z.hidden // z.heads,
            num_experts=z.experts,
            num_experts_per_tok=z.top_k,
            norm_topk_prob=True,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


class RMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        return x_BSH * torch.rsqrt(x_BSH.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self, z: Sizes) -> None:
        super().__init__()
        self.heads = z.heads
        self.q = nn.Linear(z.hidden, z.hidden, bias=False)
        self.k = nn.Linear(z.hidden, z.hidden, bias=False)
        self.v = nn.Linear(z.hidden, z.hidden, bias=False)
        self.o = nn.Linear(z.hidden, z.hidden, bias=False)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        B, S, H = x_BSH.shape
        q_BNSD, k_BNSD, v_BNSD = (
            proj(x_BSH).view(B, S, self.heads, H // self.heads).transpose(1, 2) for proj in (self.q, self.k, self.v)
        )
        y_BNSD = F.scaled_dot_product_attention(q_BNSD, k_BNSD, v_BNSD, is_causal=True)
        return self.o(y_BNSD.transpose(1, 2).reshape(B, S, H))


class Expert(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, ffn, bias=False)
        self.w2 = nn.Linear(ffn, hidden, bias=False)
        self.w3 = nn.Linear(hidden, ffn, bias=False)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x_TH)) * self.w3(x_TH))


class MoE(nn.Module):
    def __init__(self, z: Sizes) -> None:
        super().__init__()
        self.top_k = z.top_k
        self.gate = nn.Linear(z.hidden, z.experts, bias=False)
        self.experts = nn.ModuleList(Expert(z.hidden, z.ffn) for _ in range(z.experts))

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        x_TH = x_BSH.reshape(-1, x_BSH.shape[-1])
        weight_TK, ids_TK = self.gate(x_TH).softmax(-1).topk(self.top_k)
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        out_TH = torch.zeros_like(x_TH)
        for e in range(len(self.experts)):
            idx, k = torch.where(ids_TK == e)
            if idx.numel() == 0:
                continue
            out_TH.index_add_(0, idx, self.experts[e](x_TH[idx]) * weight_TK[idx, k, None])
        return out_TH.view_as(x_BSH)


class Layer(nn.Module):
    def __init__(self, z: Sizes) -> None:
        super().__init__()
        self.norm1, self.attention = RMSNorm(z.hidden), Attention(z)
        self.norm2, self.moe = RMSNorm(z.hidden), MoE(z)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        x_BSH = x_BSH + self.attention(self.norm1(x_BSH))
        return x_BSH + self.moe(self.norm2(x_BSH))


class Plain(nn.Module):
    def __init__(self, z: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(z.vocab, z.hidden)
        self.layers = nn.ModuleList(Layer(z) for _ in range(z.layers))
        self.norm = RMSNorm(z.hidden)
        self.head = nn.Linear(z.hidden, z.vocab, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x_BSH = self.embed(input_ids)
        for layer in self.layers:
            x_BSH = layer(x_BSH)
        logits_BSV = self.head(self.norm(x_BSH))
        if labels is None:
            return {"logits": logits_BSV}
        loss = F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits_BSV}


def plain(z: Sizes) -> nn.Module:
    return Plain(z)


BUILDERS: dict[str, Callable[[Sizes], nn.Module]] = {"mixtral": mixtral, "qwen3_moe": qwen3_moe, "plain": plain}
