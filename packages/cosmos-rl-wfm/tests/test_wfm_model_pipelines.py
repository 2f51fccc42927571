"""Conventions of time, sign and guidance: two Euler steps of ours are those of each family's own pipeline."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from wfm_fixtures import FAMILIES, clips, image_to_video_model, noise, size_of, tiny_model

from cosmos_rl_wfm.models.build import build_model
from cosmos_rl_wfm.models.config import WFMModelConfig
from cosmos_rl_wfm.models.networks.tiny import tiny_network
from cosmos_rl_wfm.policy import GuidedVelocity

CAPTIONS = ["a red square moves left", "two discs"]
model = functools.cache(tiny_model)


def euler(built, latents, scheduler, *, condition, unconditional=None, scale=0.0):
    """Sample by dx = v dt over the scheduler's sigmas."""
    guidance = None if unconditional is None else scale
    velocity = GuidedVelocity.of(built, condition, unconditional, guidance=guidance)
    for now, after in zip(scheduler.sigmas, scheduler.sigmas[1:]):
        latents = latents + (after - now) * velocity(latents, now.expand(len(latents)).float())
    return latents


def scheduler():
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=3.0)


def vae_of(built):
    return built.codec._vae


def shared(built, pipeline, *, scale, **more):
    """Arguments of a pipeline's call."""
    pipeline.set_progress_bar_config(disable=True)
    size = size_of(built)
    return {
        "height": size.height,
        "width": size.width,
        "num_inference_steps": 2,
        "guidance_scale": scale,
        "output_type": "latent",
        "return_dict": False,
        **more,
    }


@torch.no_grad()
def test_wan_text_to_video_samples_as_its_pipeline():
    from diffusers import WanPipeline

    built = model("wan")
    condition = built.encode_text([CAPTIONS[0]])
    blank = condition.with_text(built.encode_text([""]))
    latents = noise(built)
    pipeline = WanPipeline(
        tokenizer=None, text_encoder=None, vae=vae_of(built), scheduler=scheduler(), transformer=built.network
    )
    call = shared(built, pipeline, scale=5.0, num_frames=5, latents=latents)
    expected = pipeline(prompt_embeds=condition.text, negative_prompt_embeds=blank.text, **call)[0]
    found = euler(built, latents, pipeline.scheduler, condition=condition, unconditional=blank, scale=5.0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_skyreels_samples_as_its_pipeline():
    from diffusers import SkyReelsV2Pipeline

    like = model("wan")  # of the same autoencoder and widths
    network = {"_class_name": "SkyReelsV2Transformer3DModel", **tiny_network("wan")}
    config = {"family": "flow", "network": network, "codec": "pixels", "text": {"encoder": "words"}}
    built = build_model(WFMModelConfig.model_validate(config), parts=("network", "text"))
    condition = built.encode_text([CAPTIONS[0]])
    blank = condition.with_text(built.encode_text([""]))
    latents = noise(like)
    pipeline = SkyReelsV2Pipeline(
        tokenizer=None, text_encoder=None, vae=vae_of(like), scheduler=scheduler(), transformer=built.network
    )
    call = shared(like, pipeline, scale=5.0, num_frames=5, latents=latents)
    expected = pipeline(prompt_embeds=condition.text, negative_prompt_embeds=blank.text, **call)[0]
    found = euler(built, latents, pipeline.scheduler, condition=condition, unconditional=blank, scale=5.0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_wan_image_to_video_samples_as_its_pipeline():
    from diffusers import WanImageToVideoPipeline

    built = image_to_video_model()
    clip, latents = clips(built), noise(built)
    condition = built.encode_text([CAPTIONS[0]])
    given = built.with_given(condition, clip, counts=torch.tensor([1]))
    blank = given.with_text(built.encode_text([""]))
    pipeline = WanImageToVideoPipeline(
        tokenizer=None, text_encoder=None, vae=vae_of(built), scheduler=scheduler(), transformer=built.network
    )
    call = shared(built, pipeline, scale=5.0, num_frames=5, latents=latents)
    texts = {"prompt_embeds": condition.text, "negative_prompt_embeds": blank.text}
    expected = pipeline(image=Image.fromarray(clip[0, 0].numpy()), **texts, **call)[0]
    found = euler(built, latents, pipeline.scheduler, condition=given, unconditional=blank, scale=5.0)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


class Unguarded:
    """In place of the gated safety checker."""

    def to(self, device):
        return self


def cosmos_pipeline(built):
    from diffusers import Cosmos2_5_PredictBasePipeline

    return Cosmos2_5_PredictBasePipeline(
        text_encoder=None,
        tokenizer=None,
        transformer=built.network,
        vae=vae_of(built),
        scheduler=scheduler(),
        safety_checker=Unguarded(),
    )


def to_tensor(image):
    """An image -> float32 [3, H, W] in [0, 1]."""
    return torch.from_numpy(np.array(image) / np.float32(255)).movedim(-1, 0)


@pytest.mark.parametrize("with_image", [False, True])
@torch.no_grad()
def test_cosmos_samples_as_its_pipeline(monkeypatch, with_image):
    from diffusers.pipelines.cosmos import pipeline_cosmos2_5_predict

    # torchvision is not installed: the one function of it that the pipeline calls
    stand_in = SimpleNamespace(transforms=SimpleNamespace(functional=SimpleNamespace(to_tensor=to_tensor)))
    monkeypatch.setattr(pipeline_cosmos2_5_predict, "torchvision", stand_in, raising=False)
    built = model("cosmos")
    clip, latents, pipeline = clips(built), noise(built), cosmos_pipeline(built)
    text = condition = built.encode_text([CAPTIONS[0]])
    if with_image:
        condition = built.with_given(text, clip, counts=torch.tensor([1]))
    blank = condition.with_text(built.encode_text([""]))
    call = shared(built, pipeline, scale=3.0, num_frames=5, latents=latents)
    image = Image.fromarray(clip[0, 0].numpy()) if with_image else None
    texts = {"prompt_embeds": text.text, "negative_prompt_embeds": blank.text}
    expected = pipeline(image=image, **texts, **call)[0]
    found = euler(built, latents, pipeline.scheduler, condition=condition, unconditional=blank, scale=3.0)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_stable_diffusion_3_samples_as_its_pipeline():
    from diffusers import StableDiffusion3Pipeline

    built = model("sd3")
    latents, condition = noise(built), built.encode_text([CAPTIONS[0]])
    blank = condition.with_text(built.encode_text([""]))
    missing = dict.fromkeys([f"{part}{n}" for part in ("text_encoder", "tokenizer") for n in ("", "_2", "_3")])
    pipeline = StableDiffusion3Pipeline(transformer=built.network, scheduler=scheduler(), vae=vae_of(built), **missing)
    pooled = {"pooled_prompt_embeds": condition.pooled, "negative_pooled_prompt_embeds": blank.pooled}
    call = shared(built, pipeline, scale=4.5, latents=latents[:, :, 0], **pooled)
    expected = pipeline(prompt_embeds=condition.text, negative_prompt_embeds=blank.text, **call)[0]
    found = euler(built, latents, pipeline.scheduler, condition=condition, unconditional=blank, scale=4.5)
    torch.testing.assert_close(found[:, :, 0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["sana", "sana_video"])
@torch.no_grad()
def test_sana_samples_as_its_pipeline(family):
    from diffusers import SanaPipeline, SanaVideoPipeline

    built = model(family)
    latents, condition = noise(built), built.encode_text([CAPTIONS[0]])
    blank = condition.with_text(built.encode_text([CAPTIONS[1]]))
    kind = SanaPipeline if family == "sana" else SanaVideoPipeline
    pipeline = kind(
        tokenizer=None, text_encoder=None, vae=vae_of(built), transformer=built.network, scheduler=scheduler()
    )
    length = {} if family == "sana" else {"frames": 5}
    call = shared(built, pipeline, scale=4.5, use_resolution_binning=False, **length)
    expected = pipeline(
        latents=latents[:, :, 0] if family == "sana" else latents,
        prompt_embeds=condition.text,
        prompt_attention_mask=condition.text_mask.long(),
        negative_prompt=None,
        negative_prompt_embeds=blank.text,
        negative_prompt_attention_mask=blank.text_mask.long(),
        **call,
    )[0]
    found = euler(built, latents, pipeline.scheduler, condition=condition, unconditional=blank, scale=4.5)
    found = found[:, :, 0] if family == "sana" else found
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_unguided_scale_leaves_the_velocity_of_the_caption(family):
    built = model(family)
    condition, blank = built.encode_text(CAPTIONS[:1]), built.encode_text([""])
    latents, times = noise(built), torch.tensor([0.5])
    guided = GuidedVelocity.of(built, condition, blank, guidance=built.unguided)(latents, times)
    assert torch.equal(guided, built.velocity(latents, times, condition))
    twice = GuidedVelocity.of(built, condition, blank, guidance=built.unguided + 1)(latents, times)
    assert not torch.allclose(twice, guided)
