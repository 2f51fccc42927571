"""Passes of one shape give an observation the same bits alone and among others."""

from __future__ import annotations

import pytest
import torch

from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.config import VLAModelConfig
from cosmos_rl_vla.engines.torch import act_steadily
from cosmos_rl_vla.models.base import Inputs, Randomness
from cosmos_rl_vla.models.families import load

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT, ROWS, LENGTH = 11, 4, 7


@pytest.mark.parametrize("family", ["pi05", "openvla_oft", "mlp"])
def test_what_a_policy_says_does_not_depend_on_who_else_asks(family):
    words = ("reach the red square",)
    sizes = {"action_dim": 3, "state_dim": 4, "words": words}
    model = load(VLAModelConfig(family=family, **sizes), stats=ActionStats.unit(3)).model
    generator = torch.Generator().manual_seed(0)
    inputs = Inputs(
        images=torch.randint(0, 256, (COUNT, 1, 16, 16, 3), generator=generator, dtype=torch.uint8),
        state=torch.randn(COUNT, 4, generator=generator),
        tokens=torch.arange(3).repeat(COUNT, 1),
        token_mask=torch.ones(COUNT, 3, dtype=torch.bool),
    )

    def act(places):
        draw = Randomness(seeds=places, places=[0] * len(places))
        return act_steadily(
            model, inputs.select(torch.tensor(places)), randomness=draw, greedy=False, rows=ROWS, length=LENGTH
        )

    together = act(list(range(COUNT)))
    for places in ([3], [9, 3], [10, 7, 5, 3, 0]):
        found = act(places)
        assert torch.equal(found.actions, together.actions[places])
        assert torch.equal(found.logprobs, together.logprobs[places])
        assert torch.equal(found.values, together.values[places])
        assert all(torch.equal(found.replay[name], x[places]) for name, x in together.replay.items())
