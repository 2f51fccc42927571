"""OpenVLA at tiny sizes: its tokens by hand, rollout and training agree, batching changes nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cosmos_rl_vla.config import CriticSection as Critic
from cosmos_rl_vla.models.base import Inputs, Randomness
from cosmos_rl_vla.models.openvla.config import tiny
from cosmos_rl_vla.models.openvla.family import random_openvla
from cosmos_rl_vla.models.openvla.model import ActionBins
from cosmos_rl_vla.models.openvla.prismatic import stretched

OFT = tiny("openvla_oft", num_words=20, horizon=3, action_dim=2, state_dim=4)
OPENVLA = tiny("openvla", num_words=20, horizon=1, action_dim=5, state_dim=0)
BOTH = pytest.mark.parametrize("config", [OPENVLA, OFT, replace(OPENVLA, horizon=2)], ids=["openvla", "oft", "chunks"])


def observations(batch=4, *, cameras=2, length=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([[6], [2], [5], [3]])[torch.arange(batch) % 4]
    return Inputs(
        images=torch.randint(0, 256, (batch, cameras, 40, 36, 3), generator=generator).to(torch.uint8),
        state=torch.randn(batch, 4, generator=generator),
        tokens=torch.randint(3, 20, (batch, length), generator=generator),
        token_mask=torch.arange(length) < lengths,
    )


def draw(batch=4):
    return Randomness(seeds=range(10, 10 + batch), places=[2] * batch)


def model_of(config):
    model = random_openvla(config, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # what begins at zero (the critic's end) does something
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def chosen(inputs, *rows):
    return inputs.select(torch.tensor(rows))


def test_a_token_is_a_bins_centre_counted_from_above():
    bins = ActionBins(first=100, count=5)  # edges -1, -.5, 0, .5, 1
    assert bins.decode(torch.arange(100, 105)).tolist() == [0.75, 0.75, 0.25, -0.25, -0.75]
    assert bins.encode(torch.tensor([-1.0, -0.5, -0.01, 0.0, 0.99, 1.0])).tolist() == [104, 103, 103, 102, 101, 100]
    assert bins.encode(torch.tensor([-7.0, 7.0])).tolist() == [104, 100]


def test_the_ids_are_the_last_of_the_vocabulary_before_its_padding():
    config = replace(OPENVLA, language={**OPENVLA.language, "vocab_size": 32_064}, vocab_padding=64)
    assert config.first_token == 32_064 - 64 - 256
    bins = ActionBins(first=config.first_token, count=256)
    # as OpenVLA has it: centre number clip(vocabulary - id - 1, 0, 254)
    edges = np.linspace(-1, 1, 256)
    centres, ids = (edges[:-1] + edges[1:]) / 2, np.arange(31_744, 32_000)
    expected = centres[np.clip(32_000 - ids - 1, 0, 254)].astype(np.float32)
    assert np.array_equal(bins.decode(torch.from_numpy(ids)).numpy(), expected)
    actions = np.random.default_rng(0).uniform(-1, 1, 1000)
    assert np.array_equal(bins.encode(torch.from_numpy(actions)).numpy(), 32_000 - np.digitize(actions, edges))


def test_what_a_number_is_read_as_is_at_most_half_a_bin_away():
    bins, actions = ActionBins(first=7, count=256), torch.linspace(-1, 1, 999)
    assert (bins.decode(bins.encode(actions)) - actions).abs().max() <= 1 / 255 + 1e-6


def test_log_probs_are_among_the_action_tokens_at_a_temperature():
    found = ActionBins(first=3, count=2).log_probs(torch.tensor([0.0, 2.0]), temperature=2.0)
    torch.testing.assert_close(found.exp(), torch.tensor([1.0, np.e]) / (1 + np.e), check_dtype=False)


def test_a_uniform_number_draws_the_token_whose_share_it_falls_into():
    bins = ActionBins(first=50, count=3)
    log_probs = torch.tensor([0.2, 0.5, 0.3]).log().expand(5, 3)
    uniforms = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.999999])
    assert bins.pick(log_probs, uniforms).tolist() == [50, 50, 51, 51, 52]
    assert bins.pick(log_probs, None).tolist() == [51] * 5


@BOTH
def test_training_finds_the_log_probs_and_values_of_the_rollout(config):
    model, inputs = model_of(replace(config, temperature=1.6)), observations()
    acted = model.act(inputs, randomness=draw())
    evaluated = model.evaluate(inputs, acted.replay, with_entropy=True)
    assert acted.actions.shape == acted.logprobs.shape == (4, config.horizon, config.action_dim)
    torch.testing.assert_close(evaluated.logprobs, acted.logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(evaluated.values, acted.values, atol=1e-5, rtol=1e-5)
    assert evaluated.entropy.shape == acted.logprobs.shape
    assert ((evaluated.entropy > 0) & (evaluated.entropy < np.log(256) + 1e-5)).all()


def test_the_distribution_is_that_of_a_plain_llama_over_the_last_real_ids():
    model, inputs = model_of(replace(OPENVLA, temperature=1.6)), chosen(observations(), 0)
    acted = model.act(inputs, randomness=draw(1))
    tokens, language = acted.replay["tokens"][0].long(), model.language_model
    pictures = model.projector(model.vision_backbone(inputs.images))
    words = language.model.embed_tokens(inputs.tokens)
    embedded = torch.cat([words[:, :1], pictures, words[:, 1:], language.model.embed_tokens(tokens[:, :-1])], dim=1)
    logits = language(inputs_embeds=embedded).logits[0, -5:, -256 - 64 : -64] / 1.6
    expected = torch.log_softmax(logits, dim=-1).gather(-1, (tokens - OPENVLA.first_token).T)[:, 0]
    torch.testing.assert_close(acted.logprobs[0, 0], expected, atol=1e-5, rtol=1e-5)


@BOTH
def test_an_episode_draws_the_same_alone_and_among_others(config):
    model, inputs = model_of(config), observations()
    together = model.act(inputs, randomness=draw())
    alone = model.act(chosen(inputs, 1), randomness=Randomness(seeds=[11], places=[2]))
    assert torch.equal(alone.replay["tokens"], together.replay["tokens"][1:2])
    torch.testing.assert_close(alone.logprobs, together.logprobs[1:2], atol=1e-5, rtol=1e-5)


@BOTH
def test_words_that_are_not_there_are_not_read(config):
    model, inputs = model_of(config), chosen(observations(), 1)
    shorter = replace(inputs, tokens=inputs.tokens[:, :2], token_mask=inputs.token_mask[:, :2])
    acted = model.act(inputs, randomness=draw(1))
    same = model.evaluate(shorter, acted.replay)
    torch.testing.assert_close(same.logprobs, acted.logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(same.values, acted.values, atol=1e-5, rtol=1e-5)


def test_a_token_of_openvla_depends_on_those_before_it_and_not_on_those_after():
    model, inputs = model_of(OPENVLA), observations(1)
    tokens = torch.full((1, 1, 5), OPENVLA.first_token)
    other = tokens.clone()
    other[0, 0, 2] += 100
    found, changed = (model.evaluate(inputs, {"tokens": x}, with_entropy=True).entropy[0, 0] for x in (tokens, other))
    torch.testing.assert_close(found[:3], changed[:3], atol=1e-6, rtol=1e-6)
    assert ((found - changed)[3:].abs() > 1e-6).all()


def test_tokens_of_a_chunk_of_oft_are_independent_of_one_another():
    model, inputs = model_of(OFT), observations(1)
    tokens = torch.full((1, 3, 2), OFT.first_token)
    found = model.evaluate(inputs, {"tokens": tokens}, with_entropy=True)
    changed = model.evaluate(inputs, {"tokens": tokens + 100}, with_entropy=True)
    assert torch.equal(found.entropy, changed.entropy)


@BOTH
def test_greedy_takes_the_likeliest_and_says_nothing_of_chance(config):
    model, inputs = model_of(config), observations()
    acted = model.act(inputs, randomness=draw(), greedy=True)
    cold = random_openvla(replace(config, temperature=1e-4), seed=0)
    cold.load_state_dict(model.state_dict())
    assert torch.equal(acted.actions, cold.act(inputs, randomness=draw()).actions)
    assert not acted.logprobs.any() and not acted.replay


@pytest.mark.parametrize("camera", [0, 1])
def test_every_camera_is_seen(camera):
    model, inputs = model_of(OFT), observations(1)
    images = inputs.images.clone()
    images[:, camera] = 0
    acted = model.act(inputs, randomness=draw(1))
    assert not torch.allclose(model.evaluate(replace(inputs, images=images), acted.replay).logprobs, acted.logprobs)


def test_state_is_read_up_to_its_bounds():
    model, inputs = model_of(OFT), replace(observations(1), state=torch.tensor([[1.0, -1.0, 0.2, 0.3]]))
    acted = model.act(inputs, randomness=draw(1))
    beyond, other = (replace(inputs, state=torch.tensor([[x, -9.0, 0.2, 0.3]])) for x in (5.0, 0.5))
    assert torch.equal(model.evaluate(beyond, acted.replay).logprobs, model.evaluate(inputs, acted.replay).logprobs)
    assert not torch.allclose(model.evaluate(other, acted.replay).logprobs, acted.logprobs)


@pytest.mark.parametrize(("keys", "count"), [({"place": "none"}, 0), ({"per": "chunk"}, 1), ({"per": "action"}, 3)])
def test_a_critic_gives_as_many_values_as_it_was_asked_for(keys, count):
    model = random_openvla(replace(OFT, critic=Critic(**keys, hidden=(8,))), seed=0)
    assert model.act(observations(), randomness=draw()).values.shape == (4, count) and model.value_dim == count


@pytest.mark.parametrize("detach", [True, False])
def test_the_critics_gradient_stays_in_it_if_it_is_detached(detach):
    model = random_openvla(replace(OFT, critic=Critic(pool="mean", hidden=(8,), detach=detach)), seed=0)
    inputs = observations()
    model.evaluate(inputs, model.act(inputs, randomness=draw()).replay).values.sum().backward()
    moved = {name.partition(".")[0] for name, p in model.named_parameters() if p.grad is not None}
    assert "value_head" in moved and (moved == {"value_head"}) == detach


@BOTH
def test_imitation_is_cross_entropy_of_the_demonstrated_tokens(config):
    model, inputs = model_of(replace(config, temperature=2.0)), observations(2)
    actions = torch.linspace(-1.2, 1, 2 * config.horizon * config.action_dim).view(2, config.horizon, -1)
    mask = torch.ones(2, config.horizon, dtype=torch.bool)
    mask[1] = False
    loss = model.supervised(inputs, actions, mask, randomness=draw(2)).loss
    model.config = replace(config, temperature=1.0)
    logprobs = model.evaluate(inputs, {"tokens": model.bins.encode(actions)}).logprobs
    torch.testing.assert_close(loss, torch.stack([-logprobs[0].mean(), torch.tensor(0.0)]), atol=1e-5, rtol=1e-5)


@BOTH
def test_a_policy_learns_what_it_is_shown(config):
    model, inputs = random_openvla(config, seed=0), observations(2)
    actions = torch.tensor([-0.6, 0.4]).view(2, 1, 1).expand(2, config.horizon, config.action_dim)
    mask = torch.ones(2, config.horizon, dtype=torch.bool)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(25):
        optimizer.zero_grad()
        model.supervised(inputs, actions, mask, randomness=draw(2)).loss.mean().backward()
        optimizer.step()
    acted = model.act(inputs, randomness=draw(2), greedy=True).actions
    assert (acted - actions).abs().max() < 0.01


def test_pictures_are_stretched_from_their_middle():
    images = torch.zeros(1, 20, 10, 3, dtype=torch.uint8)
    images[:, 5:15, 2:7] = 255  # a quarter of the area: rows 5 .. 15, columns 2 .. 7
    whole, middle = (stretched(images, size=10, crop=crop) for crop in (1.0, 0.25))
    assert whole.shape == (1, 3, 10, 10) and 0 < whole.mean() < 0.4
    assert middle.min() == 1


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="no room for 256 action tokens"):
        replace(OFT, language={**OFT.language, "vocab_size": 300}).check()
    with pytest.raises(ValueError, match=r"towers have \[4, 8\] patches"):
        replace(OFT, towers=(OFT.towers[0], replace(OFT.towers[1], patch_size=4))).check()
