"""Families of networks: shapes, gradients, codecs, given frames, and life without torchvision."""

import functools
import sys

import pytest
import torch
from wfm_fixtures import FAMILIES, clips, image_to_video_model, noise, size_of, tiny_model

from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.models import codec
from cosmos_rl_wfm.models.build import build_model
from cosmos_rl_wfm.models.config import TextSection, WFMModelConfig

CAPTIONS = ["a red square moves left", "two discs"]
model = functools.cache(tiny_model)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_velocity_has_the_shape_of_the_latents_in_float32(family):
    built = model(family)
    latents = noise(built, 2)
    with torch.no_grad():
        v = built.velocity(latents, torch.tensor([0.3, 1.0]), built.encode_text(CAPTIONS))
    assert v.shape == latents.shape and v.dtype == torch.float32
    assert torch.isfinite(v).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_reach_every_parameter(family):
    built = tiny_model(family)
    v = built.velocity(noise(built, 2), torch.tensor([0.3, 0.8]), built.encode_text(CAPTIONS))
    v.pow(2).mean().backward()
    assert not [name for name, parameter in built.network.named_parameters() if parameter.grad is None]


@pytest.mark.parametrize("family", FAMILIES)
def test_time_and_caption_both_count(family):
    built = model(family)
    latents, condition = noise(built), built.encode_text(CAPTIONS)
    with torch.no_grad():
        first = built.velocity(latents, torch.tensor([0.2]), condition.select(torch.tensor([0])))
        later = built.velocity(latents, torch.tensor([0.9]), condition.select(torch.tensor([0])))
        other = built.velocity(latents, torch.tensor([0.2]), condition.select(torch.tensor([1])))
    assert not torch.equal(first, later)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_does_not_depend_on_its_neighbours(family):
    built = model(family)
    latents, times, condition = noise(built, 2), torch.tensor([0.4, 0.7]), built.encode_text(CAPTIONS)
    with torch.no_grad():
        together = built.velocity(latents, times, condition)
        alone = built.velocity(latents[1:], times[1:], condition.select(torch.tensor([1])))
    torch.testing.assert_close(together[1:], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_codecs_make_the_promised_shapes_and_give_no_gradient(family):
    built = model(family)
    video = clips(built, 2)
    latents = built.encode(video)
    assert latents.shape == (2, *built.latent_shape(size_of(built))) and latents.dtype == torch.float32
    decoded = built.decode(latents)
    assert decoded.shape == video.shape and decoded.dtype == torch.uint8
    assert not latents.requires_grad


def test_the_same_seed_makes_the_same_network_and_leaves_the_random_state():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, same = tiny_model().weights(), tiny_model().weights()
    assert torch.equal(torch.rand(1), expected)
    other = tiny_model(seed=1).weights()
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["proj_out.weight"], other["proj_out.weight"])


def test_a_part_that_was_not_asked_for_is_not_there():
    built = build_model(WFMModelConfig(family="wan", tiny=True, text=TextSection(encoder="words")))
    assert built.codec is None
    with pytest.raises(AssertionError, match="without its codec"):
        built.encode(torch.zeros(1, 5, 32, 32, 3, dtype=torch.uint8))


@pytest.mark.filterwarnings("ignore:Mismatch dtype:UserWarning")  # torch, of its slower norm under autocast
def test_a_network_held_in_float32_can_compute_in_bfloat16():
    built = tiny_model(dtype="bfloat16", parameter_dtype=torch.float32)
    assert {parameter.dtype for parameter in built.network.parameters()} == {torch.float32}
    condition = built.encode_text(CAPTIONS)
    v = built.velocity(noise(built, 2), torch.tensor([0.3, 1.0]), condition)
    v.sum().backward()
    exact = model("wan").velocity(noise(built, 2), torch.tensor([0.3, 1.0]), condition)
    assert v.dtype == torch.float32 and not torch.equal(v, exact)
    torch.testing.assert_close(v, exact, atol=0.05, rtol=0.05)


def test_bfloat16_weights_keep_in_float32_what_their_class_keeps():
    built = tiny_model(dtype="bfloat16")
    types = {name: parameter.dtype for name, parameter in built.network.named_parameters()}
    assert types["blocks.0.attn1.to_q.weight"] == torch.bfloat16
    assert types["condition_embedder.time_embedder.linear_1.weight"] == torch.float32
    assert built.velocity(noise(built, 2), torch.tensor([0.3, 1.0]), built.encode_text(CAPTIONS)).dtype == torch.float32


# ---- given frames


@pytest.mark.parametrize("family", ["wan", "cosmos"])
@torch.no_grad()
def test_on_given_frames_the_velocity_points_from_the_given_latents(family):
    built = model(family)
    condition = built.with_given(built.encode_text(CAPTIONS), clips(built, 2), counts=torch.tensor([1, 0]))
    times, fresh_noise = torch.tensor([0.25, 1.0]), noise(built, 2)
    t = times[:, None, None, None, None]
    v = built.velocity((1 - t) * condition.given + t * fresh_noise, times, condition)
    torch.testing.assert_close(v[0, :, 0], (fresh_noise - condition.given)[0, :, 0], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(v[0, :, 1], (fresh_noise - condition.given)[0, :, 1], atol=1e-2)
    assert not torch.allclose(v[1, :, 0], (fresh_noise - condition.given)[1, :, 0], atol=1e-2)  # none is given


@pytest.mark.parametrize("family", ["wan", "cosmos"])
@torch.no_grad()
def test_noise_on_given_frames_never_reaches_the_network(family):
    built = model(family)
    condition = built.with_given(built.encode_text(CAPTIONS[:1]), clips(built), counts=torch.tensor([1]))
    latents = noise(built)
    other = latents.clone()
    other[:, :, 0] += 3.0
    first, second = (built.velocity(x, torch.tensor([0.5]), condition) for x in (latents, other))
    assert torch.equal(first[:, :, 1:], second[:, :, 1:])


@torch.no_grad()
def test_what_comes_after_the_given_frames_is_not_told():
    for built in (model("wan"), model("cosmos"), image_to_video_model()):
        clip = clips(built)
        other = clip.clone()
        other[:, 1:] = 0
        text, latents = built.encode_text(CAPTIONS[:1]), noise(built)
        first, second = (
            built.velocity(latents, torch.tensor([0.5]), built.with_given(text, clip, counts=torch.tensor([1])))
            for clip in (clip, other)
        )
        torch.testing.assert_close(first, second)


@torch.no_grad()
def test_no_given_frame_is_the_same_as_none_given():
    for built in (model("wan"), model("cosmos")):
        text, latents = built.encode_text(CAPTIONS[:1]), noise(built)
        none = built.with_given(text, clips(built), counts=torch.tensor([0]))
        first, second = (built.velocity(latents, torch.tensor([0.5]), condition) for condition in (text, none))
        torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)


def test_gradients_come_from_the_other_frames_alone():
    built = tiny_model("cosmos")
    condition = built.with_given(built.encode_text(CAPTIONS[:1]), clips(built), counts=torch.tensor([1]))
    v = built.velocity(noise(built), torch.tensor([0.5]), condition)
    parameters = list(built.network.parameters())
    given = torch.autograd.grad(v[:, :, :1].sum(), parameters, retain_graph=True, allow_unused=True)
    assert not any(gradient.any() for gradient in given if gradient is not None)
    others = torch.autograd.grad(v[:, :, 1:].square().sum(), parameters)
    assert sum(bool(gradient.any()) for gradient in others) > len(parameters) / 2


def test_image_to_video_without_a_frame_is_an_error_with_the_remedy():
    built = image_to_video_model()
    with pytest.raises(UserError, match="min_frames"):
        built.velocity(noise(built), torch.tensor([0.5]), built.encode_text(CAPTIONS[:1]))


def test_a_network_without_given_frames_says_so():
    built = model("sana_video")
    condition = built.with_given(built.encode_text(CAPTIONS[:1]), clips(built), counts=torch.tensor([1]))
    with pytest.raises(UserError, match="max_frames = 0"):
        built.velocity(noise(built), torch.tensor([0.5]), condition)


# ---- torchvision


def test_the_stand_in_for_torchvision_takes_the_nearest_pixel():
    from diffusers.models.transformers import transformer_cosmos
    from diffusers.utils import is_torchvision_available

    if is_torchvision_available():
        pytest.skip("torchvision is installed")
    model("cosmos")
    transforms = transformer_cosmos.transforms
    image = torch.arange(16.0).view(1, 1, 4, 4)
    resized = transforms.functional.resize(image, [2, 2], interpolation=transforms.InterpolationMode.NEAREST)
    assert resized.tolist() == [[[[0.0, 2.0], [8.0, 10.0]]]]
    assert "torchvision" not in sys.modules


def test_clips_are_decoded_in_parts_of_a_bounded_number_of_pixels(monkeypatch):
    built = model("wan")
    latents = noise(built, 5)
    whole, passes = built.decode(latents), []
    decode = built.codec.decode
    monkeypatch.setattr(built.codec, "decode", lambda part: (passes.append(len(part)), decode(part))[1])
    monkeypatch.setattr(codec, "PIXELS_AT_ONCE", 2 * latents[0, 0].numel() * 4 * 8 * 8)
    in_parts = built.decode(latents)
    assert passes == [2, 2, 1]
    assert (whole.int() - in_parts.int()).abs().max() <= 1
