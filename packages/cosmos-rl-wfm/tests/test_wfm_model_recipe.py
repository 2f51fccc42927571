"""What a [model] section can ask for: pixels, words, cached captions, sizes, and what it is refused."""

import functools
import sys

import pytest
import torch
from wfm_fixtures import tiny_model

from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.models.base import ClipSize, Grid
from cosmos_rl_wfm.models.build import build_model
from cosmos_rl_wfm.models.config import GivenSection, TextSection, WFMModelConfig
from cosmos_rl_wfm.models.networks.families import make_family
from cosmos_rl_wfm.models.networks.tiny import tiny_network

PARTS = ("network", "codec", "text")


CAPTIONS = ["a red square moves left", "two discs"]
model = functools.cache(tiny_model)


def test_pixels_come_back_exactly():
    network = tiny_network("wan", codec="pixels")
    config = WFMModelConfig(family="wan", network=network, codec="pixels", text=TextSection(encoder="words"))
    built = build_model(config, parts=PARTS)
    clips = torch.arange(256, dtype=torch.uint8).repeat(12)[: 2 * 2 * 16 * 16 * 3 // 4].view(1, 2, 8, 16, 3)
    latents = built.encode(clips)
    assert latents.shape == (1, 3, 2, 8, 16) and latents.min() >= -1 and latents.max() <= 1
    assert torch.equal(built.decode(latents), clips)


def test_a_network_of_one_channel_works_on_grey():
    network = {**tiny_network("wan"), "in_channels": 1, "out_channels": 1, "patch_size": [2, 4, 4]}
    config = WFMModelConfig(family="wan", network=network, codec="pixels", text=TextSection(encoder="words"))
    built = build_model(config, parts=PARTS)
    assert built.latent_shape(ClipSize(frames=8, height=16, width=16)) == (1, 8, 16, 16)
    grey = torch.full((1, 8, 16, 16, 3), 77, dtype=torch.uint8)
    assert torch.equal(built.decode(built.encode(grey)), grey)
    with pytest.raises(UserError, match="patch_size"):
        condition = built.with_given(built.encode_text(["a"]), grey, counts=torch.tensor([2]))
        built.velocity(torch.zeros(1, 1, 8, 16, 16), torch.tensor([0.5]), condition)


def test_a_codec_of_pixels_wants_colours_or_grey():
    network = {**tiny_network("wan"), "in_channels": 16}
    config = WFMModelConfig(family="wan", network=network, codec="pixels", text=TextSection(encoder="words"))
    with pytest.raises(UserError, match="3 or 1"):
        build_model(config, parts=PARTS)


def test_a_word_has_the_same_vector_in_every_caption_and_the_empty_caption_none():
    condition = model("wan").encode_text(["red square", "Square, blue", ""])
    assert torch.equal(condition.text[0, 1], condition.text[1, 0])
    assert not torch.equal(condition.text[0, 0], condition.text[0, 1])
    assert condition.text_mask.sum(dim=1).tolist() == [2, 3, 0]
    assert not condition.text[2].any()


def test_cached_captions_know_the_empty_one_alone():
    config = WFMModelConfig(family="wan", tiny=True, text=TextSection(encoder="cached", length=4))
    built = build_model(config, parts=PARTS)
    assert built.encode_text([""]).text.shape == (1, 4, 32)
    with pytest.raises(UserError, match="'a cat' has no embedding"):
        built.encode_text(["a cat"])
    padded = built.cached_text([torch.ones(2, 32), torch.ones(6, 32)])
    assert padded.text_mask.sum(dim=1).tolist() == [2, 4] and not padded.text[0, 2:].any()
    with pytest.raises(UserError, match=r"clip7 is \[2, 31\]; the network takes \[tokens, 32\]"):
        built.cached_text([torch.ones(2, 31)], where=["clip7"])


# ---- sizes


@pytest.mark.parametrize(
    ("family", "wrong", "nearest"),
    [
        ("wan", (6, 30, 40), "5 frames of 32 x 32"),
        ("wan", (1, 32, 4000), "1 frame of 32 x 1024"),
        ("cosmos", (93, 32, 32), "61 frames of 32 x 32"),
        ("sd3", (5, 33, 32), "1 frame of 32 x 32"),
    ],
)
def test_a_size_that_does_not_go_is_named_with_the_nearest_that_does(family, wrong, nearest):
    size = ClipSize(frames=wrong[0], height=wrong[1], width=wrong[2])
    with pytest.raises(UserError, match=f"the nearest size is {nearest}"):
        model(family).check(size)
    model(family).check(model(family).grid.nearest(size))


def test_patches_in_time_count_in_frames():
    grid = Grid(channels=16, temporal=4, spatial=8, patch=(2, 2, 2))
    assert [grid.nearest(ClipSize(frames=n, height=16, width=16)).frames for n in (1, 5, 8, 10, 13)] == [
        5,
        5,
        5,
        13,
        13,
    ]


# ---- what is not supported says so


def test_a_network_that_wants_more_than_text_is_refused_by_name():
    config = {"patch_size": 1, "in_channels": 4, "joint_attention_dim": 8}
    with pytest.raises(UserError, match="FluxTransformer2DModel needs img_ids in its forward pass"):
        make_family("FluxTransformer2DModel", config)
    with pytest.raises(UserError, match="ZImageTransformer2DModel needs cap_feats, t, x"):
        make_family("ZImageTransformer2DModel", config)


@torch.no_grad()
def test_another_network_of_diffusers_works_by_its_signature_alone():
    network = {"_class_name": "SkyReelsV2Transformer3DModel", **tiny_network("wan", codec="pixels")}
    config = WFMModelConfig(family="flow", network=network, codec="pixels", text=TextSection(encoder="words"))
    built = build_model(config, parts=PARTS)
    latents = torch.randn(2, *built.latent_shape(ClipSize(frames=3, height=8, width=8)))
    condition = built.encode_text(CAPTIONS)
    v = built.velocity(latents, torch.tensor([0.2, 0.6]), condition)
    expected = built.network(
        hidden_states=latents, timestep=torch.tensor([200.0, 600.0]), encoder_hidden_states=condition.text
    ).sample
    torch.testing.assert_close(v, expected)


def test_a_network_that_takes_an_embedded_image_says_what_is_missing():
    network = {**tiny_network("wan"), "in_channels": 36, "image_dim": 8, "added_kv_proj_dim": 24}
    config = WFMModelConfig(family="wan", tiny=True, network=network, text=TextSection(encoder="words"))
    built = build_model(config, parts=PARTS)
    with pytest.raises(UserError, match="which has the image_encoder"):
        built.velocity(torch.zeros(1, 16, 2, 4, 4), torch.tensor([0.5]), built.encode_text(["a"]))


def test_an_unknown_class_and_an_unknown_argument_are_named():
    text = TextSection(encoder="words")
    with pytest.raises(UserError, match="no model class 'WanTransformerModel'"):
        values = {"_class_name": "WanTransformerModel"}
        build_model(WFMModelConfig(family="flow", network=values, codec="pixels", text=text))
    with pytest.raises(UserError, match=r"no argument n_layers; it has .*num_layers"):
        values = {**tiny_network("wan", codec="pixels"), "n_layers": 2}
        build_model(WFMModelConfig(family="wan", network=values, codec="pixels", text=text))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "needs family"),
        ({"family": "wan"}, "tiny = true or"),
        ({"path": "x", "tiny": True}, "tiny is for a model from scratch"),
        ({"path": "x", "network": {"num_layers": 1}}, "network is for a model from scratch"),
        ({"family": "wan", "tiny": True}, 'text.encoder = "words"'),
        ({"family": "wan", "network": {"a": 1}, "text": {"encoder": "words"}}, 'codec = "pixels"'),
        ({"family": "flow", "network": {"a": 1}, "codec": "pixels", "text": {"encoder": "words"}}, "_class_name"),
        ({"family": "wan", "tiny": True, "revision": "main", "text": {"encoder": "words"}}, "revision"),
        ({"family": "wann", "tiny": True}, "wan"),
    ],
)
def test_a_section_that_does_not_fit_together_says_what_to_change(keys, message):
    with pytest.raises(ValueError, match=message):
        WFMModelConfig(**keys)


def test_given_frames_are_in_order():
    with pytest.raises(ValueError, match="min_frames = 2 is above max_frames = 1"):
        GivenSection(min_frames=2, max_frames=1)


def test_the_section_is_read_without_torch_or_diffusers():
    import subprocess

    code = "import sys, cosmos_rl_wfm.models.config; print([m for m in ('torch', 'diffusers') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"
