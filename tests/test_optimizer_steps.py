"""Steps of optimizers are heard by what lives, and disturbed by nothing that is gone."""

import gc
import weakref

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from moec.runtime.narrow import NarrowCopies
from moec.runtime.once import Once
from moec.runtime.optimizer_steps import hear_steps


class Counts:
    def __init__(self):
        self.heard = 0
        hear_steps(self)

    def expire(self):
        self.heard += 1


def step():
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    torch.optim.SGD([p], lr=0.1).step()


def test_every_step_of_any_optimizer_is_heard():
    first, second = Counts(), Counts()
    step()
    step()
    assert (first.heard, second.heard) == (2, 2)
    gone = weakref.ref(second)
    del second
    gc.collect()
    step()
    assert gone() is None and first.heard == 3


@pytest.mark.parametrize("kind", [NarrowCopies, Once, Counts])
def test_a_model_may_go_in_the_middle_of_a_step(kind):
    """When garbage is collected nobody knows: also while an optimizer goes through its hooks."""
    models = [kind()]
    alive = weakref.ref(models[0])
    hook = register_optimizer_step_post_hook(lambda *_: models.clear())
    after = Counts()  # behind it in the line
    try:
        step()
    finally:
        hook.remove()
    gc.collect()
    assert alive() is None and after.heard == 1
