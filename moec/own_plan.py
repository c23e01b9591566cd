"""The parallel plan that a Hugging Face model declares for itself, as patterns of parameter or module names -> styles.

Its classes and configs declare it piece by piece (``base_model_tp_plan`` and ``base_model_ep_plan`` of the config,
``_tp_plan`` of a class such as a causal language model); the model has merged them, with full names, when it is built.
``passes/shard/overrides.py`` says what the styles mean.
"""

from __future__ import annotations

from torch import nn


def own_plan(model: nn.Module) -> dict[str, dict[str, str]]:
    """The merged plans: ``{"tp": {pattern: style}, "ep": {pattern: style}}``; empty for a model without any."""
    for prefix, m in model.named_modules():  # the outermost model first: it knows of those inside
        found = {
            role: {f"{prefix}.{k}" if prefix else k: style for k, style in (vars(m).get(name) or {}).items()}
            for role, name in (("tp", "_tp_plan"), ("ep", "_ep_plan"))
        }
        if any(found.values()):
            return found
    return {}
