"""Videos of Qwen-VL: sizes of frames, order of pixels and files of the processing, as in transformers."""

import json
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from transformers.image_utils import IMAGENET_STANDARD_MEAN, OPENAI_CLIP_MEAN

from cosmos_rl_core.errors import MediaError
from cosmos_rl_llm.config import MediaSection
from cosmos_rl_llm.engines.vllm.towers import stand_in
from cosmos_rl_llm.media.qwen import QwenVision
from cosmos_rl_llm.media.source import Video, decode_video
from cosmos_rl_llm.media.vision import find_family

pytest.importorskip("av")
pytest.importorskip("PIL")

from PIL import Image
from tiny_vision import QWEN, WITH_VIDEOS, family_of, make, mp4, picture

pytestmark = pytest.mark.skipif(find_spec("torchvision") is not None, reason="a stand-in takes torchvision's place")


@pytest.fixture(scope="module")
def theirs():
    """The video processors' files, which import torchvision for their resizing."""
    with stand_in():
        names = {"qwen2": "qwen2_vl", "qwen3": "qwen3_vl"}
        modules = {key: f"transformers.models.{name}.video_processing_{name}" for key, name in names.items()}
        return {key: import_module(name) for key, name in modules.items()}


def write(directory, **values):
    (directory / "video_preprocessor_config.json").write_text(json.dumps(values))


def moving(count, height, width):
    """Frames that differ, two a second."""
    frames = np.random.default_rng(count).integers(0, 255, (count, height, width, 3), dtype=np.uint8)
    return Video(frames=frames, times=np.arange(count) / 2, fps=2.0, duration=count / 2)


SHAPES = [(1, 24, 32), (2, 24, 32), (3, 24, 32), (4, 100, 60), (5, 100, 60), (5, 3, 40), (7, 40, 3), (9, 4, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", QWEN)
def test_frames_have_the_size_that_transformers_gives_them(theirs, tmp_path, name, shape):
    family = family_of(make(name), tmp_path)
    count, height, width = shape
    for least, most in ((64, 8192), (64, 2048), (6000, 8192)):
        write(tmp_path, size={"shortest_edge": least, "longest_edge": most})
        family = find_family(str(tmp_path), make(name).config)
        item = family.video(moving(*shape))
        limits = {"factor": 8, "min_pixels": least, "max_pixels": most}
        if name.startswith("qwen2"):
            tall, wide = theirs["qwen2"].smart_resize(height, width, **limits)
        else:  # transformers refuses one frame, and ours is shown twice
            tall, wide = theirs["qwen3"].smart_resize(max(2, count), height, width, temporal_factor=2, **limits)
        assert item.grid == ((count + 1) // 2, tall // 4, wide // 4)


@pytest.mark.parametrize("count", [2, 5, 6])
@pytest.mark.parametrize("name", QWEN)
def test_a_moving_video_has_the_patches_of_transformers(theirs, tmp_path, name, count):
    family_of(make(name), tmp_path)
    mean, deviation = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]  # not those of pictures
    write(tmp_path, size={"shortest_edge": 64, "longest_edge": 8192}, image_mean=mean, image_std=deviation)
    family = find_family(str(tmp_path), make(name).config)
    assert isinstance(family, QwenVision)
    shown = moving(count, 24, 32)
    kind = "qwen2" if name.startswith("qwen2") else "qwen3"
    processor = getattr(theirs[kind], f"{kind.title()}VLVideoProcessor")

    def patches(frames):
        scaled = (torch.from_numpy(frames) / 255 - torch.tensor(mean)) / torch.tensor(deviation)
        given = scaled.permute(0, 3, 1, 2)[None]
        found, *grid = processor.patchify(None, given, patch_size=4, merge_size=2, temporal_patch_size=2)
        return found[0].numpy(), tuple(grid)

    wanted, grid = patches(shown.frames)
    item = family.video(shown)
    assert item.grid == grid
    np.testing.assert_allclose(item.pixels, wanted, rtol=0, atol=1e-5)
    swapped, _ = patches(shown.frames[[1, 0, *range(2, count)]])
    assert np.abs(item.pixels - swapped).max() > 1


@pytest.mark.parametrize("name", QWEN)
def test_without_a_file_for_videos_that_of_pictures_holds(tmp_path, name):
    """As transformers' `get_video_processor_dict`."""
    config = make(name).config
    family_of(make(name), tmp_path)
    (tmp_path / "video_preprocessor_config.json").unlink()
    file = tmp_path / "preprocessor_config.json"
    values = {"size": {"shortest_edge": 64, "longest_edge": 1000}, "image_mean": [0.1, 0.2, 0.3]}
    values["image_std"] = [0.4, 0.5, 0.6]
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    family = find_family(str(tmp_path), config)
    pixels = 16 * np.prod(family.video(moving(4, 40, 40)).grid[1:])
    assert pixels == (24 * 24 if name.startswith("qwen2") else 8 * 8)
    still = picture(16, 24, seed=0)
    twice = Video(frames=np.stack([np.asarray(still)] * 2), times=np.arange(2.0), fps=1.0, duration=2.0)
    np.testing.assert_array_equal(family.video(twice).pixels, family.image(still).pixels)


def test_defaults_of_the_file_are_those_of_transformers(theirs, tmp_path):
    for name in ("qwen2_vl", "qwen3_vl"):
        family_of(make(name), tmp_path)
        write(tmp_path, do_sample_frames=True)
        videos = find_family(str(tmp_path), make(name).config).videos
        processor = getattr(theirs[name[:5]], f"{name[:5].title()}VLVideoProcessor")
        assert (videos.least, videos.most) == tuple(processor.size.values())
        np.testing.assert_allclose(videos.mean, OPENAI_CLIP_MEAN if name == "qwen2_vl" else IMAGENET_STANDARD_MEAN)
        np.testing.assert_allclose(videos.deviation, processor.image_std)
        write(tmp_path, cap_pixels_per_frame=True)
        capped = find_family(str(tmp_path), make(name).config).videos
        assert (videos.max_tokens, capped.max_tokens) == (None, processor.max_video_tokens)


@pytest.mark.parametrize(("name", "pixels"), [("qwen2_5_vl", 32 * 32), ("qwen3_vl", 16 * 16)])
def test_a_file_may_cap_the_pixels_of_a_frame(tmp_path, name, pixels):
    """40 frames of 64 x 64: 0.9 x 500 tokens of 64 pixels for both frames of each step, or 5 tokens for a frame."""
    family_of(make(name), tmp_path)
    size, tokens = {"shortest_edge": 64, "longest_edge": 10**6}, 500 if name == "qwen2_5_vl" else 5
    write(tmp_path, size=size, cap_pixels_per_frame=True, max_video_tokens=tokens)
    grid = find_family(str(tmp_path), make(name).config).video(moving(40, 64, 64)).grid
    assert 16 * grid[1] * grid[2] == pixels


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_limits_of_the_recipe_hold_for_every_number_of_frames(tmp_path, name):
    family = family_of(make(name), tmp_path)
    for count in (1, 2, 3, 5, 8):
        _, height, width = family.video(moving(count, 50, 70), MediaSection(max_pixels=1200)).grid
        assert 600 < 16 * height * width <= 1200
        time, height, width = family.video(moving(count, 50, 70), MediaSection(total_pixels=4800)).grid
        assert 2 * time * 16 * height * width <= 4800


def test_strips_are_refused(tmp_path):
    for name in ("qwen2_5_vl", "qwen3_vl"):
        with pytest.raises(MediaError, match=r"frames of 1700 x 8 pixels: .*200"):
            family_of(make(name), tmp_path).video(moving(2, 8, 1700))


@pytest.mark.parametrize("name", WITH_VIDEOS)
def test_frames_resized_while_they_are_decoded_give_the_same_item(tmp_path, name):
    family, limits = family_of(make(name), tmp_path), MediaSection(fps=4.0)
    whole, shown = decode_video(mp4(), limits), decode_video(mp4(), limits, family.fit(limits))
    assert whole.stored == shown.stored == (24, 32)
    assert family.video(shown).digest == family.video(whole).digest
    if name in QWEN:
        limits = MediaSection(max_pixels=400)
        small = decode_video(mp4(), limits, family.fit(limits))
        assert small.frames.shape == (6, 16, 16, 3)
        assert family.video(small, limits).digest == family.video(decode_video(mp4(), limits), limits).digest


def test_a_video_of_too_many_pixels_is_an_error_before_its_frames_are_decoded(tmp_path):
    limits = MediaSection(max_video_pixels=2000)
    with pytest.raises(MediaError, match=r"6 frames of 32 x 24 pixels, more than .*max_video_pixels = 2,000"):
        decode_video(mp4(), limits)
    family = family_of(make("qwen3_vl"), tmp_path)
    small = MediaSection(max_video_pixels=2000, max_pixels=300)
    assert decode_video(mp4(), small, family.fit(small)).frames.shape == (6, 8, 16, 3)


def test_frames_are_resized_as_pictures_are(tmp_path):
    family = family_of(make("qwen2_5_vl"), tmp_path)
    frame = np.asarray(picture(50, 70, seed=1))
    found = family.fit(MediaSection(max_pixels=1200))(1, 50, 70)(frame)
    wanted = Image.fromarray(frame).resize((found.shape[1], found.shape[0]), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(found, np.asarray(wanted))
