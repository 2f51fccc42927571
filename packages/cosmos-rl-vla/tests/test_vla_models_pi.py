"""pi0 and pi0.5 at tiny sizes: rollout and training agree, batching changes nothing, and pi0 is transformers' pi0."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from vla_fixtures import small_pi

from cosmos_rl_vla.config import ActionNoiseSection as Noise
from cosmos_rl_vla.config import CriticSection as Critic
from cosmos_rl_vla.models.base import Inputs, Randomness
from cosmos_rl_vla.models.pi.backbone import to_pixels
from cosmos_rl_vla.models.pi.config import tiny
from cosmos_rl_vla.models.pi.expert import AdaptiveRMSNorm
from cosmos_rl_vla.models.pi.family import random_pi
from cosmos_rl_vla.models.pi.model import PiModel

CONFIG = small_pi()
PI0 = replace(CONFIG, family="pi0", state="suffix", value=Critic(place="expert", pool="mean", hidden=(16,)))


def observations(batch=4, *, cameras=1, length=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, length + 1, (batch, 1), generator=generator)
    return Inputs(
        images=torch.randint(0, 256, (batch, cameras, 16, 16, 3), generator=generator).to(torch.uint8),
        state=torch.randn(batch, 4, generator=generator),
        tokens=torch.randint(3, 20, (batch, length), generator=generator),
        token_mask=torch.arange(length) < lengths,
    )


def draw(batch=4):
    return Randomness(seeds=range(10, 10 + batch), places=[2] * batch)


def model_of(config, *, stirred=True):
    model = random_pi(config, seed=0)
    if stirred:  # what begins at zero (norms, the critic's end) does something
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


NOISES = [
    Noise(kind="fixed", level=0.3, steps="last"),
    Noise(kind="fixed", level=0.3, steps="random"),
    Noise(kind="sde", level=0.5, steps="random"),
    Noise(kind="sde", level=0.5, steps="random", ignore_last=True),
    Noise(kind="cps", level=0.5, steps="random"),
    Noise(kind="learned", steps="all"),
    Noise(kind="learned", steps="last"),
    Noise(kind="sde", level=0.5, steps="all", ignore_last=True),
]


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: f"{noise.kind}-{noise.steps}-{noise.ignore_last}")
@pytest.mark.parametrize("config", [CONFIG, PI0], ids=["pi05", "pi0"])
def test_training_finds_the_log_probs_and_values_of_the_rollout(config, noise):
    model, inputs = model_of(replace(config, noise=noise)), observations()
    acted = model.act(inputs, randomness=draw())
    evaluated = model.evaluate(inputs, acted.replay, with_entropy=True)
    assert acted.actions.shape == acted.logprobs.shape == evaluated.logprobs.shape == (4, 3, 2)
    torch.testing.assert_close(evaluated.logprobs, acted.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(evaluated.values, acted.values, atol=1e-5, rtol=0)
    assert (evaluated.entropy is not None) == (noise.kind == "learned")


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: f"{noise.kind}-{noise.steps}-{noise.ignore_last}")
def test_a_sample_draws_the_same_alone_and_in_a_batch(noise):
    model, inputs = model_of(replace(CONFIG, noise=noise)), observations()
    together = model.act(inputs, randomness=draw())
    alone = model.act(inputs.select(torch.tensor([2])), randomness=Randomness(seeds=[12], places=[2]))
    torch.testing.assert_close(alone.actions[0], together.actions[2], atol=1e-5, rtol=0)
    torch.testing.assert_close(alone.logprobs[0], together.logprobs[2], atol=1e-4, rtol=0)


def test_another_place_or_seed_draws_something_else():
    model, inputs = model_of(CONFIG), observations(1)
    draws = [Randomness(seeds=[1], places=[0]), Randomness(seeds=[1], places=[1]), Randomness(seeds=[2], places=[0])]
    actions = [model.act(inputs, randomness=draw).actions for draw in draws]
    assert not torch.allclose(actions[0], actions[1])
    assert not torch.allclose(actions[0], actions[2])


def test_a_random_step_is_drawn_for_each_sample_and_covers_all_that_may_draw():
    model = model_of(replace(CONFIG, num_steps=4, noise=Noise(kind="sde", level=0.5, steps="random", ignore_last=True)))
    index = model.act(observations(40), randomness=draw(40)).replay["index"]
    assert sorted(set(index.flatten().tolist())) == [0, 1, 2]


def test_the_log_prob_is_of_the_stochastic_step_alone():
    model, inputs = model_of(CONFIG), observations()
    acted = model.act(inputs, randomness=draw())
    before, after = acted.replay["before"][:, 0], acted.replay["after"][:, 0]
    prefix = model.backbone(inputs)
    velocity = model.denoiser(before, tau=torch.full((4,), 1 / 3), state=inputs.state, prefix=prefix).velocity
    mean = (before - velocity / 3)[:, :3, :2]
    torch.testing.assert_close(torch.distributions.Normal(mean, 0.3).log_prob(after), acted.logprobs)
    torch.testing.assert_close(after, acted.actions)


def test_the_joint_log_prob_is_the_mean_over_the_steps_and_the_first_noise():
    model, inputs = (
        model_of(replace(CONFIG, noise=Noise(kind="fixed", level=0.3, steps="all"))),
        observations(),
    )
    acted = model.act(inputs, randomness=draw())
    prefix, before, after = model.backbone(inputs), acted.replay["before"], acted.replay["after"]
    logprobs = [torch.distributions.Normal(0.0, 1.0).log_prob(before[:, 0, :3, :2])]
    for step in range(3):
        tau = torch.full((4,), 1 - step / 3)
        velocity = model.denoiser(before[:, step], tau=tau, state=inputs.state, prefix=prefix).velocity
        mean = (before[:, step] - velocity / 3)[:, :3, :2]
        logprobs.append(torch.distributions.Normal(mean, 0.3).log_prob(after[:, step]))
    torch.testing.assert_close(torch.stack(logprobs).mean(0), acted.logprobs)


def test_a_greedy_policy_follows_the_ode():
    model, inputs = model_of(CONFIG), observations()
    acted = model.act(inputs, randomness=draw(), greedy=True)
    x = torch.from_numpy(np.stack([g.standard_normal((4, 5), dtype=np.float32) for g in draw().generators()]))
    prefix = model.backbone(inputs)
    for step in range(3):
        tau = torch.full((4,), 1 - step / 3)
        x = x - model.denoiser(x, tau=tau, state=inputs.state, prefix=prefix).velocity / 3
    torch.testing.assert_close(acted.actions, x[:, :3, :2])
    assert acted.logprobs.abs().sum() == 0
    assert acted.replay == {}


def test_padding_of_the_instruction_changes_nothing():
    model, inputs = model_of(CONFIG), observations()
    longer = replace(
        inputs,
        tokens=torch.nn.functional.pad(inputs.tokens, (0, 3), value=7),
        token_mask=torch.nn.functional.pad(inputs.token_mask, (0, 3)),
    )
    acted, padded = (model.act(x, randomness=draw()) for x in (inputs, longer))
    torch.testing.assert_close(acted.actions, padded.actions, atol=1e-5, rtol=0)
    torch.testing.assert_close(acted.values, padded.values, atol=1e-5, rtol=0)


@pytest.mark.parametrize("changed", ["images", "state", "tokens"])
@pytest.mark.parametrize("config", [CONFIG, PI0], ids=["pi05", "pi0"])
def test_actions_depend_on_all_that_is_seen(config, changed):
    model, inputs = model_of(config), observations()
    other = replace(inputs, **{changed: getattr(observations(seed=1), changed)})
    acted, differently = (model.act(x, randomness=draw(), greedy=True) for x in (inputs, other))
    assert (acted.actions - differently.actions).abs().max() > 1e-4


def test_the_critic_does_not_move_what_it_reads():
    for config in (CONFIG, PI0):
        model, inputs = model_of(config), observations()
        acted = model.act(inputs, randomness=draw())
        model.evaluate(inputs, acted.replay).values.sum().backward()
        moved = {name.split(".")[0] for name, parameter in model.named_parameters() if parameter.grad is not None}
        assert moved == {"value_head"}


def test_the_critic_moves_the_trunk_where_it_is_asked_to():
    model, inputs = (
        model_of(replace(CONFIG, value=Critic(pool="mean", hidden=(16,), detach=False))),
        observations(),
    )
    acted = model.act(inputs, randomness=draw())
    model.evaluate(inputs, acted.replay).values.sum().backward()
    assert model.backbone.state_in.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("place", ["prefix", "expert"])
@pytest.mark.parametrize("pool", ["mean", "attention"])
def test_values_come_one_a_chunk_or_one_an_action(place, pool):
    for per, count in (("chunk", 1), ("action", 3)):
        value = Critic(place=place, per=per, pool=pool, hidden=(16,))
        model = model_of(replace(CONFIG, value=value, noise=Noise(kind="learned", steps="all")))
        acted = model.act(observations(), randomness=draw())
        assert acted.values.shape == (4, count) == (4, model.value_dim)
        torch.testing.assert_close(model.evaluate(observations(), acted.replay).values, acted.values)


def test_a_model_without_critic_has_no_values():
    model = model_of(replace(CONFIG, value=Critic(place="none")))
    assert model.act(observations(), randomness=draw()).values.shape == (4, 0)


def test_the_learned_std_has_gradient_and_entropy():
    model, inputs = model_of(replace(CONFIG, noise=Noise(kind="learned", steps="last"))), observations()
    acted = model.act(inputs, randomness=draw())
    evaluated = model.evaluate(inputs, acted.replay, with_entropy=True)
    low, high = (0.5 * np.log(2 * np.pi * np.e * std**2) for std in (0.08, 0.16))
    assert low <= evaluated.entropy.min() <= evaluated.entropy.max() <= high
    evaluated.entropy.sum().backward()
    assert model.denoiser.noise_head[0].weight.grad.abs().sum() > 0


def test_supervised_loss_is_that_of_the_velocity_over_real_dimensions():
    model, inputs = model_of(CONFIG), observations()
    actions, mask = torch.randn(4, 4, 2), torch.tensor([[True, True, True, False]] * 3 + [[False] * 4])
    losses = model.supervised(inputs, actions, mask, randomness=draw())
    generator = draw().generators()[1]
    tau = torch.tensor([0.999 * generator.random() ** (2 / 3) + 0.001], dtype=torch.float32)
    noise = torch.from_numpy(generator.standard_normal((1, 4, 5)).astype(np.float32))
    clean = torch.nn.functional.pad(actions[1:2], (0, 3))
    one = inputs.select(torch.tensor([1]))
    velocity = model.denoiser(
        tau * noise + (1 - tau) * clean, tau=tau, state=one.state, prefix=model.backbone(one)
    ).velocity
    expected = (velocity - (noise - clean))[0, :3, :2].square().mean()
    torch.testing.assert_close(losses.loss[1], expected, atol=1e-5, rtol=1e-5)
    assert losses.loss[3] == 0


def test_padded_dimensions_do_not_count():
    model, inputs = model_of(CONFIG), observations()
    mask = torch.ones(4, 4, dtype=torch.bool)
    model.supervised(inputs, torch.randn(4, 4, 2), mask, randomness=draw()).loss.sum().backward()
    assert model.denoiser.action_out_proj.weight.grad[2:].abs().sum() == 0
    assert model.denoiser.action_out_proj.weight.grad[:2].abs().sum() > 0


def test_auxiliary_targets_train_the_backbone_where_they_are():
    model, inputs = model_of(replace(CONFIG, aux_dim=2)), observations()
    aux = torch.tensor([[1.0, torch.nan]] * 3 + [[torch.nan, torch.nan]])
    mask = torch.zeros(4, 4, dtype=torch.bool)
    losses = model.supervised(inputs, torch.zeros(4, 4, 2), mask, randomness=draw(), aux=aux)
    assert losses.loss.tolist() == [0.0] * 4
    assert losses.aux[0] > 0
    assert losses.aux[3] == 0
    losses.aux.sum().backward()
    gradient = model.backbone.paligemma.vision_tower.embeddings.patch_embedding.weight.grad
    assert gradient.isfinite().all()
    assert gradient.abs().sum() > 0


def test_auxiliary_targets_for_a_model_without_say_so():
    with pytest.raises(ValueError, match="aux_dim"):
        model_of(CONFIG).supervised(
            observations(),
            torch.zeros(4, 4, 2),
            torch.ones(4, 4, dtype=torch.bool),
            randomness=draw(),
            aux=torch.zeros(4, 1),
        )


def test_flow_matching_learns_to_imitate():
    model, inputs = random_pi(replace(CONFIG, num_steps=4), seed=0), observations(8)
    target = torch.tensor([0.5, -0.5]).repeat(8, 4, 1) * torch.tensor([1.0, -1.0] * 4)[:, None, None]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(150):
        mask = torch.ones(8, 4, dtype=torch.bool)
        loss = model.supervised(
            inputs, target, mask, randomness=Randomness(seeds=range(8), places=[step] * 8)
        ).loss.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    acted = model.act(inputs, randomness=draw(8), greedy=True)
    assert (acted.actions - target[:, :3]).abs().mean() < 0.15


def test_a_model_from_scratch_tells_places_as_loudly_as_pixels():
    model = random_pi(tiny(vocab_size=20), seed=0)
    tower = model.backbone.paligemma.vision_tower
    noise = torch.randint(0, 256, (8, 64, 64, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    patches = tower.embeddings.patch_embedding(to_pixels(noise, size=64))
    assert tower.embeddings.position_embedding.weight.std() > 0.5 * patches.std()


def test_layers_may_be_computed_again_in_the_backward_pass():
    def gradients(remade):
        model, inputs = model_of(CONFIG), observations()
        if remade:
            for block in model.blocks():
                forward = block.forward
                block.forward = lambda *args, forward=forward, **kwargs: checkpoint(
                    forward, *args, use_reentrant=False, **kwargs
                )
        acted = model.act(inputs, randomness=draw())
        model.evaluate(inputs, acted.replay).logprobs.sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, again = gradients(False), gradients(True)
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, msg=name)


@pytest.mark.parametrize("config", [CONFIG, PI0], ids=["pi05", "pi0"])
def test_half_precision_keeps_rollout_and_training_equal(config):
    model, inputs = model_of(config), observations()
    exact = model.act(inputs, randomness=draw())
    kept = {id(parameter) for group in model.exact() for module in group for parameter in module.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.to(torch.bfloat16)
    acted = model.act(inputs, randomness=draw())
    evaluated = model.evaluate(inputs, acted.replay)
    assert acted.actions.dtype == acted.logprobs.dtype == acted.values.dtype == torch.float32
    torch.testing.assert_close(evaluated.logprobs, acted.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(acted.actions, exact.actions, atol=0.05, rtol=0)


def test_a_simulator_without_cameras_is_read_by_its_state():
    model, inputs = model_of(CONFIG), observations()
    blind = replace(inputs, images=torch.zeros(4, 0, 1, 1, 3, dtype=torch.uint8))
    acted = model.act(blind, randomness=draw())
    torch.testing.assert_close(model.evaluate(blind, acted.replay).logprobs, acted.logprobs)


def test_a_fresh_adaptive_norm_is_a_plain_one_with_an_open_gate():
    norm, x = AdaptiveRMSNorm(6), torch.randn(2, 3, 6)
    normed, gate = norm(x, torch.randn(2, 6))
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(x, (6,), eps=1e-6))
    assert (gate == 1).all()


def test_an_adaptive_norm_scales_shifts_and_gates_by_its_condition():
    norm, x, condition = AdaptiveRMSNorm(4), torch.randn(2, 3, 4), torch.randn(2, 4)
    torch.nn.init.normal_(norm.dense.weight)
    normed, gate = norm(x, condition)
    told = condition @ norm.dense.weight.T + norm.dense.bias
    scale, shift, expected_gate = (told[:, None, 4 * i : 4 * i + 4] for i in range(3))
    expected = torch.nn.functional.rms_norm(x, (4,), eps=1e-6) * (1 + scale) + shift
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(gate, expected_gate)


def test_images_of_another_size_keep_their_shape_between_black_bars():
    pixels = to_pixels(torch.full((1, 8, 16, 3), 255, dtype=torch.uint8), size=8)
    assert pixels.shape == (1, 3, 8, 8)
    assert (pixels[0, :, 2:6] == 1).all()
    assert (pixels[0, :, :2] == -1).all()
    assert (pixels[0, :, 6:] == -1).all()


def test_the_tiny_preset_is_as_small_as_it_says():
    model = PiModel(tiny(vocab_size=64, aux_dim=3))
    assert sum(parameter.numel() for parameter in model.parameters()) <= 700_000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"expert": replace(CONFIG.expert, depth=3)}, "depth"),
        ({"horizon": 5}, "horizon 5"),
        ({"action_dim": 7}, "action_dim 7"),
        ({"vision": replace(CONFIG.vision, patch_size=5)}, "patch_size"),
        ({"noise": Noise(kind="cps", level=0.5)}, "samples nothing"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        replace(CONFIG, **change).check()
