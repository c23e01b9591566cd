"""Steps of optimizers, heard by whoever keeps something that was computed of parameters (``narrow.py``, ``once.py``).

Fused and foreach optimizers change parameters behind their version counter, so every step is heard.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from torch.optim.optimizer import register_optimizer_step_post_hook


class Expires(Protocol):
    def expire(self) -> None:
        """Every parameter may have changed."""


def hear_steps(keeper: Expires) -> None:
    """Call ``keeper.expire()`` after every step of any ``torch.optim.Optimizer``, for as long as ``keeper`` lives.

    The hook stays when it is gone, and does nothing then: garbage may be collected while an optimizer goes through its
    hooks, and taking one out meanwhile makes the step fail."""
    alive = weakref.ref(keeper)
    register_optimizer_step_post_hook(lambda *_: found.expire() if (found := alive()) else None)
