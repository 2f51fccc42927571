"""How much is drawn: what may be asked for, and noise that becomes less while the policy learns."""

import math
from dataclasses import replace

import pytest
import torch
from vla_fixtures import small_pi

from cosmos_rl_vla.config import ActionNoiseSection as Noise
from cosmos_rl_vla.models.base import Inputs, Randomness
from cosmos_rl_vla.models.pi.family import random_pi

LESS = Noise(kind="fixed", level=0.4, level_end=0.1, level_steps=10)


@pytest.mark.parametrize(("version", "level"), [(-1, 0.4), (0, 0.4), (5, 0.25), (10, 0.1), (1000, 0.1)])
def test_the_level_goes_to_its_end_in_equal_parts(version, level):
    assert LESS.level_at(version) == pytest.approx(level)
    assert Noise(level=0.4).level_at(version) == 0.4


@pytest.mark.parametrize("kind", ["fixed", "sde", "cps"])
def test_a_batch_of_several_versions_is_trained_with_the_noise_of_each(kind):
    changes = {"kind": kind, "steps": "random", "ignore_last": True}
    model = random_pi(replace(small_pi(), noise=LESS.model_copy(update=changes)), seed=0)
    inputs = Inputs(
        images=torch.randint(0, 256, (2, 1, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)),
        state=torch.zeros(2, 3),
        tokens=torch.ones(2, 4, dtype=torch.int64),
        token_mask=torch.ones(2, 4, dtype=torch.bool),
    )
    acted = [
        model.act(inputs, randomness=Randomness(seeds=[1, 2], places=[0, 0], version=version)) for version in (0, 8)
    ]
    assert [a.replay["level"].tolist() for a in acted] == [pytest.approx([level] * 2) for level in (0.4, 0.16)]
    rows = torch.tensor([0, 3])  # the first sample by version 0, the second by version 8
    replay = {name: torch.cat([a.replay[name] for a in acted])[rows] for name in acted[0].replay}
    evaluated = model.evaluate(inputs, replay)
    torch.testing.assert_close(evaluated.logprobs, torch.cat([a.logprobs for a in acted])[rows], atol=1e-5, rtol=0)


def test_with_less_noise_an_action_comes_nearer_to_the_greedy_one():
    model = random_pi(replace(small_pi(), noise=LESS), seed=0)
    inputs = Inputs(
        images=torch.zeros(64, 1, 16, 16, 3, dtype=torch.uint8),
        state=torch.zeros(64, 3),
        tokens=torch.ones(64, 4, dtype=torch.int64),
        token_mask=torch.ones(64, 4, dtype=torch.bool),
    )
    draws = [Randomness(seeds=range(64), places=[0] * 64, version=version) for version in (0, 10)]
    greedy = model.act(inputs, randomness=draws[0], greedy=True).actions
    spread = [float((model.act(inputs, randomness=draw).actions - greedy).square().mean().sqrt()) for draw in draws]
    assert math.isclose(spread[0], 4 * spread[1], rel_tol=1e-4)
    assert spread[0] == pytest.approx(0.4, rel=0.1)


@pytest.mark.parametrize(
    ("noise", "num_steps", "said"),
    [
        (Noise(kind="cps", level=0.5, steps="last"), 4, "samples nothing"),
        (Noise(steps="last", ignore_last=True), 4, "ignore_last"),
        (Noise(steps="all", ignore_last=True), 1, "2 or more"),
        (Noise(kind="cps", level=0.5, steps="all"), 1, "single"),
        (Noise(std_low=0.2, std_high=0.1), 4, "std_low"),
        (Noise(level_end=0.1), 4, "level_end and level_steps together"),
        (Noise(level_steps=10), 4, "level_end and level_steps together"),
        (Noise(kind="cps", level=0.5, level_end=1.5, level_steps=10, steps="random"), 4, "level 1.5"),
        (Noise(kind="learned", level_end=0.1, level_steps=10), 4, "has no level"),
    ],
)
def test_noise_that_leaves_nothing_to_draw_is_refused(noise, num_steps, said):
    with pytest.raises(ValueError, match=said):
        noise.check(num_steps)
