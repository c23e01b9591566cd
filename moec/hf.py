"""Named Hugging Face architectures and local config files, shrunk in depth and width, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from moec.runtime.errors import MoecError

SMALL: dict[str, int] = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8, "vocab_size": 128,
    "max_position_embeddings": 128, "num_local_experts": 8, "num_experts": 8, "n_routed_experts": 8,
}  # fmt: skip


def build(name: str, layers: int | None = None, **overrides: Any) -> nn.Module:
    """A causal language model by architecture name (``mixtral``, ``qwen3_moe``, …) or from a local ``config.json``.

    The config is shrunk to ``layers`` layers (default 2) and the widths of ``SMALL``; ``overrides`` set single fields.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
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
    config.num_hidden_layers = layers or 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    for key, value in {**{k: v for k, v in SMALL.items() if getattr(config, k, None) is not None}, **overrides}.items():
        setattr(config, key, value)
    config.pad_token_id = None
    return AutoModelForCausalLM.from_config(config)
