"""The parallel plan that a Hugging Face model declares for itself, as patterns of parameter or module names -> styles.

Its classes and configs declare it piece by piece (``base_model_tp_plan`` and ``base_model_ep_plan`` of the config,
``_tp_plan`` of a class such as a causal language model); the model has merged them, with full names, when it is built.
``passes/shard/overrides.py`` says what the styles mean.
"""

from __future__ import annotations

from torch import nn


def own_plan(model: nn.Module) -> dict[str, str]:
    """The merged plan, its expert part last (which wins); empty for a model without one."""
    found: dict[str, str] = {}
    for prefix, m in model.named_modules():
        for name in ("_tp_plan", "_ep_plan"):
            plan = vars(m).get(name) or {}
            found |= {f"{prefix}.{k}" if prefix else k: style for k, style in plan.items()}
        if found:  # the outermost model knows of those inside
            break
    return found
