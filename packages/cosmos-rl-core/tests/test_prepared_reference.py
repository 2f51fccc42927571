"""A reference that has to be set up is set up once for all microbatches of a batch."""

from contextlib import contextmanager

import torch

from cosmos_rl_core.interfaces import Reference
from cosmos_rl_core.train.learner import FrozenModels
from cosmos_rl_core.types import Microbatch, PolicyOutputs, TermBatch


class Prepared(Reference):
    """Says what is done to it."""

    def __init__(self):
        self.events = []

    @contextmanager
    def prepared(self):
        self.events.append("in")
        yield
        self.events.append("out")

    def forward(self, microbatch, *, with_entropy=False):
        self.events.append("forward")
        return PolicyOutputs(logprobs=torch.ones(1))


def microbatch():
    one = torch.ones(1)
    terms = TermBatch(
        rollout_logprobs=one, advantages=one, loss_mask=one, rollout_index=torch.zeros(1).long(), num_rollouts=1
    )
    return Microbatch(inputs={}, terms=terms)


def test_it_is_set_up_once_for_all_microbatches():
    reference = Prepared()
    microbatches = FrozenModels(reference=reference).complete([microbatch(), microbatch()])
    assert reference.events == ["in", "forward", "forward", "out"]
    assert all(each.terms.ref_logprobs is not None for each in microbatches)
