"""Named Hugging Face architectures and local config files, shrunk in depth and width, with random weights.

Shrinking is a table of fields, the same for every architecture: widths become those of ``SMALL`` where the config has
the field, counts are capped by ``AT_MOST``.  What one field needs of another is said once, in ``_fit``.
"""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path
from typing import Any

from torch import nn

from moec.runtime.errors import MoecError

SMALL: dict[str, int] = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48,
    "num_attention_heads": 8, "head_dim": 8, "vocab_size": 128, "max_position_embeddings": 128,
    "num_local_experts": 8, "num_experts": 8, "n_routed_experts": 8,
    # multi-head latent attention; its rotary part is what head_dim says
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "qk_head_dim": 20,
    "v_head_dim": 12,
    # gated delta net
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip

AT_MOST: dict[str, int] = {"n_group": 4, "topk_group": 2, "sliding_window": 4}


def build(name: str, layers: int | None = None, **overrides: Any) -> nn.Module:
    """A causal language model by architecture name (``mixtral``, ``qwen3_moe``, …) or from a local ``config.json``.

    The config is shrunk to ``layers`` layers (default 2) and the widths of ``SMALL``; ``overrides`` set single fields
    (others follow where they must agree).  Of an architecture that also sees or hears, the text model is built.
    """
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    except ImportError as e:
        raise MoecError(
            "Hugging Face architectures need transformers", where=name, way_out="pip install 'moec[hf]'"
        ) from e
    path = Path(name)
    try:
        config = (
            AutoConfig.from_pretrained(path.parent if path.is_file() else path)
            if path.exists()
            else AutoConfig.for_model(name)
        )
    except ValueError as e:
        raise MoecError(
            f"transformers knows no architecture {name!r}: {str(e).splitlines()[0]}",
            where="--hf",
            way_out="a name such as mixtral or qwen3_moe, or the path of a config.json",
        ) from e
    config = config.get_text_config()
    grouped_query = _get(config, "num_key_value_heads") != _get(config, "num_attention_heads")
    for key, value in SMALL.items():
        if _get(config, key) is not None:
            setattr(config, key, value)
    for key, value in AT_MOST.items():
        if _get(config, key) is not None:
            setattr(config, key, min(_get(config, key), value))
    _set(config, overrides)
    if _get(config, "num_key_value_heads") is not None:
        config.num_key_value_heads = config.num_attention_heads // (2 if grouped_query else 1)
    _fit(config, layers or 2)
    _set(config, overrides)
    config.pad_token_id = None
    try:
        return AutoModelForCausalLM.from_config(config)
    except ValueError:  # a text model without a head of its own
        return AutoModel.from_config(config)


def _fit(config: Any, layers: int) -> None:
    """Depth, and the fields that must agree with others."""
    config.num_hidden_layers = layers
    for key in ("layer_types", "mlp_layer_types"):
        if _get(config, key):
            setattr(config, key, _every_kind(_get(config, key), layers))
    if _get(config, "first_k_dense_replace") is not None:
        config.first_k_dense_replace = min(config.first_k_dense_replace, layers - 1)
    counts = (_get(config, k) for k in ("num_experts", "num_local_experts", "n_routed_experts"))
    experts = next((n for n in counts if n), None)
    if experts is not None and hasattr(config, "num_experts_per_tok"):
        # Group-limited routers pick among topk_group of n_group groups, and rate a group by its two best experts.
        groups, kept = _get(config, "n_group") or 1, _get(config, "topk_group") or 1
        config.num_experts_per_tok = min(config.num_experts_per_tok or 2, experts // 2, experts * kept // groups)


def _every_kind(types: list[str], layers: int) -> list[str]:
    """``layers`` layers in the order of the original, moved so far that each kind of layer is among them if it can."""
    first_with_all = next(n for n in range(1, len(types) + 1) if set(types[:n]) == set(types))
    return list(islice(cycle(types), max(first_with_all - layers, 0), max(first_with_all, layers)))


def _set(config: Any, fields: dict[str, Any]) -> None:
    for key, value in fields.items():
        setattr(config, key, value)


def _get(config: Any, key: str) -> Any:
    return getattr(config, key, None)
