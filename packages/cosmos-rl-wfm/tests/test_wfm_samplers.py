from __future__ import annotations

import pytest
import torch
from torch import nn

from cosmos_rl_wfm.policy import GuidedVelocity
from cosmos_rl_wfm.samplers.sampler import DenoisingPlan, replay, sample, sample_noise
from cosmos_rl_wfm.samplers.steps import RULES
from cosmos_rl_wfm.samplers.times import edm_times, flow_times
from cosmos_rl_wfm.samplers.window import WindowSection as Window

SHAPE = (2, 3, 4)


# Guidance


class Linear:
    """A model whose velocity is linear, with a slope for each condition; counts its calls."""

    unguided = 1.0

    def __init__(self):
        self.slopes = {"towards": torch.tensor(2.0, requires_grad=True), "away": torch.tensor(0.5, requires_grad=True)}
        self.calls = []

    def velocity(self, x, times, condition):
        self.calls.append(condition.name)
        return self.slopes[condition.name] * x


class Named:
    """A condition with a name for a caption."""

    def __init__(self, name):
        self.name = name

    def with_text(self, other):
        return other


def guided(model, *, guidance):
    velocity = GuidedVelocity.of(model, Named("towards"), Named("away"), guidance=guidance)
    return velocity(torch.tensor([[1.0]]), torch.tensor([0.5]))


def test_guidance_by_hand():
    model = Linear()
    v = guided(model, guidance=4.0)
    assert v.item() == 2.0 + 3.0 * (2.0 - 0.5)
    v.backward()
    assert (model.slopes["towards"].grad, model.slopes["away"].grad) == (4.0, -3.0)


@pytest.mark.parametrize("guidance", [None, 1.0])
def test_guidance_off_makes_no_unconditional_pass(guidance):
    model = Linear()
    assert guided(model, guidance=guidance).item() == 2.0
    assert model.calls == ["towards"]


# Sampler


class Network(nn.Module):
    """A small velocity over SHAPE whose elements see one another."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        size = 2 * 3 * 4
        self.layers = nn.Sequential(nn.Linear(size + 1, 32), nn.SiLU(), nn.Linear(32, size))

    def forward(self, x, times):
        return self.layers(torch.cat([x.flatten(1), times[:, None]], dim=1)).view_as(x)


def plan_of(rule="flow_sde", *, window=None, num_steps=6):
    steps = (window or Window()).choose_steps(num_steps)
    return DenoisingPlan(times=flow_times(num_steps, shift=2.0), rule=rule, noise_level=0.6, steps=steps)


def rollouts(plan, *, seeds=(3, 4, 5), velocity=None):
    return sample(velocity or Network(), sample_noise(seeds, SHAPE), plan=plan, seeds=seeds)


def replayed(plan, trajectory, *, velocity):
    """Log-probabilities [B, T] of all steps at once, in one batch of B T rows."""
    before = trajectory.path[:, trajectory.path_from].flatten(0, 1)
    after = trajectory.path[:, trajectory.path_to].flatten(0, 1)
    count = len(trajectory.path)
    reached = replay(
        velocity,
        before,
        times=trajectory.times.repeat(count),
        next_times=trajectory.next_times.repeat(count),
        rule=plan.rule,
        noise_level=plan.noise_level,
        t_first=plan.t_first,
    )
    return reached.logprob(after).view(count, -1)


def test_noise_of_a_sample_depends_on_its_own_seed_and_stream():
    both, alone = sample_noise([1, 2], SHAPE), sample_noise([2], SHAPE)
    assert torch.equal(both[1], alone[0])
    assert not torch.equal(both[0], both[1])
    assert not torch.equal(alone, sample_noise([2], SHAPE, stream="step 0"))
    many = sample_noise(range(2000), (50,))
    assert (many.mean().item(), many.std().item()) == pytest.approx((0, 1), abs=0.015)
    assert sample_noise([], SHAPE).shape == (0, *SHAPE)


@pytest.mark.parametrize("rule", ["flow_sde", "dance_sde", "cps"])
def test_a_sample_does_not_depend_on_its_batch(rule):
    together = rollouts(plan_of(rule), seeds=(3, 4, 5))
    alone = rollouts(plan_of(rule), seeds=(4,))
    torch.testing.assert_close(together.clean[1], alone.clean[0], rtol=1e-5, atol=1e-6)  # matrix products round apart
    torch.testing.assert_close(together.logprobs[1], alone.logprobs[0], rtol=1e-5, atol=1e-6)


def test_samples_with_one_start_and_seeds_of_their_own_part_ways():
    start = sample_noise([9, 9], SHAPE)
    clean = sample(Network(), start, plan=plan_of(), seeds=[1, 2]).clean
    assert (clean[0] - clean[1]).abs().mean() > 0.1
    clean = sample(Network(), start, plan=DenoisingPlan(times=flow_times(6)), seeds=[1, 2]).clean
    torch.testing.assert_close(clean[0], clean[1])


@pytest.mark.parametrize("rule", sorted(set(RULES) - {"ode"}))
@pytest.mark.parametrize("window", [Window(), Window(window="fixed", steps=(0, 2, 4), elsewhere="sde")])
def test_replay_of_the_same_batch_gives_a_ratio_of_exactly_one(rule, window):
    velocity, plan = Network(), plan_of(rule, window=window)
    trajectory = rollouts(plan, velocity=velocity)
    for place in range(len(trajectory.times)):
        reached = replay(
            velocity,
            trajectory.path[:, trajectory.path_from[place]],
            times=trajectory.times[place].expand(3),
            next_times=trajectory.next_times[place].expand(3),
            rule=plan.rule,
            noise_level=plan.noise_level,
            t_first=plan.t_first,
        )
        logprobs = reached.logprob(trajectory.path[:, trajectory.path_to[place]])
        assert logprobs.requires_grad
        assert torch.equal((logprobs - trajectory.logprobs[:, place]).exp(), torch.ones(3))


def test_steps_of_all_times_can_be_replayed_in_one_batch():
    velocity, plan = Network(), plan_of()
    trajectory = rollouts(plan, velocity=velocity)
    ratio = (replayed(plan, trajectory, velocity=velocity) - trajectory.logprobs).exp()
    torch.testing.assert_close(ratio, torch.ones(3, 5), rtol=0, atol=1e-5)


def test_another_policy_has_another_ratio():
    velocity, plan = Network(), plan_of()
    trajectory = rollouts(plan, velocity=velocity)
    with torch.no_grad():
        velocity.layers[2].bias.add_(0.1)
    assert ((replayed(plan, trajectory, velocity=velocity) - trajectory.logprobs).abs() > 1e-4).all()


def test_a_trajectory_holds_only_the_states_of_trained_steps():
    neighbours = rollouts(plan_of(window=Window(window="fixed", steps=(1, 2))))
    assert neighbours.path.shape == (3, 3, *SHAPE)  # states 1, 2, 3
    assert (neighbours.path_from.tolist(), neighbours.path_to.tolist()) == ([0, 1], [1, 2])
    apart = rollouts(plan_of(window=Window(window="fixed", steps=(0, 3))))
    assert apart.path.shape == (3, 4, *SHAPE)  # states 0, 1, 3, 4
    assert (apart.path_from.tolist(), apart.path_to.tolist()) == ([0, 2], [1, 3])
    times = flow_times(6, shift=2.0)
    assert torch.equal(apart.times, times[[0, 3]])
    assert torch.equal(apart.next_times, times[[1, 4]])
    assert torch.equal(apart.path[:, 0], sample_noise((3, 4, 5), SHAPE))


def test_a_rollout_without_trained_steps_keeps_no_path():
    trajectory = rollouts(DenoisingPlan(times=flow_times(4)))
    assert trajectory.path.shape == (3, 0, *SHAPE)
    assert trajectory.logprobs.shape == (3, 0)
    assert trajectory.times.shape == trajectory.path_from.shape == (0,)


def test_the_ode_is_followed_outside_the_window():
    # Up to its first stochastic step a rollout is the deterministic one.
    late = rollouts(plan_of(window=Window(window="fixed", steps=(4,))))
    times, velocity, state = flow_times(6, shift=2.0), Network(), sample_noise((3, 4, 5), SHAPE)
    with torch.no_grad():
        for index in range(4):
            state = state + (times[index + 1] - times[index]) * velocity(state, times[index].expand(3))
    torch.testing.assert_close(late.path[:, 0], state)


def test_a_schedule_that_begins_below_one_scales_the_noise():
    plan = DenoisingPlan(
        times=edm_times(6), rule="cps", noise_level=0.2, steps=Window(window="fixed", steps=(0,)).choose_steps(6)
    )
    trajectory = rollouts(plan)
    torch.testing.assert_close(trajectory.path[:, 0], sample_noise((3, 4, 5), SHAPE) * (200 / 201))


def test_sampling_keeps_no_graph():
    assert not rollouts(plan_of()).clean.requires_grad
