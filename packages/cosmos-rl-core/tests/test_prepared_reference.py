"""A reference that has to be set up is set up once for all microbatches of a batch."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.train.learner import PolicyLearner
from cosmos_rl_core.types import Microbatch, PolicyOutputs, TermBatch, TrainBatch


class Prepared:
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
    with ThreadPoolExecutor(max_workers=1) as compute:
        learner = PolicyLearner(
            SimpleNamespace(policy=None),  # pyright: ignore[reportArgumentType]
            publisher=None,
            reference=reference,
            compute=compute,
            timeline=Timeline("test"),
            max_skipped_steps=0,
        )
    batch = TrainBatch(microbatches=(microbatch(), microbatch()), num_terms=2, num_rollouts=2)
    (told,) = learner._with_logprobs([batch])
    assert reference.events == ["in", "forward", "forward", "out"]
    assert all(each.terms.ref_logprobs is not None for each in told.microbatches)
