"""The ingredients of cookbook/wfm_quickstart: its clips and its judge."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from wfm_fixtures import shown

COOKBOOK = Path(__file__).parents[3] / "cookbook/wfm_quickstart"
pytestmark = pytest.mark.skipif(not COOKBOOK.exists(), reason="the package is tested without the repository")


@pytest.fixture(scope="module")
def scripts():
    """The modules clips and judge, as a run with python_path finds them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(COOKBOOK))
        yield importlib.import_module("clips"), importlib.import_module("judge")


@pytest.fixture(scope="module")
def clips(scripts):
    return scripts[0]


@pytest.fixture(scope="module")
def dataset(clips, tmp_path_factory):
    directory = tmp_path_factory.mktemp("clips")
    clips.make_clips(directory, count=480, seed=5)
    return directory


@pytest.fixture(scope="module")
def read(clips, dataset):
    """Videos [480, 8, 16, 16, 3] and captions."""
    return clips.read_clips(dataset)


def drawn(clips, *, count, seed):
    """What the clips of a dataset show, from the same seeds."""
    return [clips.sample_motion(clips.CAPTIONS[i % 12], np.random.default_rng([seed, i])) for i in range(count)]


def test_clips_are_mp4_files_with_captions_beside_them(clips, dataset, read):
    videos, captions = read
    assert sorted(path.name for path in dataset.rglob("clip_00007.*")) == ["clip_00007.mp4", "clip_00007.txt"]
    assert (videos.shape, videos.dtype) == ((480, 8, 16, 16, 3), np.uint8)
    assert {caption: captions.count(caption) for caption in clips.CAPTIONS} == dict.fromkeys(clips.CAPTIONS, 40)
    assert captions[:2] == ["a square moving left", "a square moving right"]


def test_encoding_leaves_the_clips_as_they_were_drawn(clips, read):
    videos, _ = read
    error = abs(videos - np.stack([clips.render(motion) for motion in drawn(clips, count=480, seed=5)]).astype(int))
    assert error.mean() < 0.3
    assert error.max() <= 10
    assert (videos == videos[..., :1]).all()  # grey stays grey


def test_clips_repeat_with_their_seed_byte_for_byte(clips, dataset, tmp_path):
    clips.make_clips(tmp_path / "same", count=3, seed=5)  # fewer: a clip does not depend on the others
    clips.make_clips(tmp_path / "other", count=3, seed=6)
    for i in range(3):
        name = f"videos/clip_{i:05d}.mp4"
        assert (tmp_path / "same" / name).read_bytes() == (dataset / name).read_bytes()
        assert (tmp_path / "other" / name).read_bytes() != (dataset / name).read_bytes()


def test_shapes_stay_in_the_picture(clips):
    for motion in drawn(clips, count=240, seed=0):
        light = clips.render(motion).mean((1, 2, 3))
        assert light.min() > 0.93 * light.max(), motion


def test_measured_speed_is_the_speed_drawn(clips, read):
    videos, captions = read
    motions = drawn(clips, count=480, seed=5)
    measured = np.array([clips.speed_along(video, caption) for video, caption in zip(videos, captions)])
    error = abs(measured - [motion.speed for motion in motions])
    assert error.max() < 0.03
    assert error.mean() < 0.004
    backwards = [clips.speed_along(video[::-1], caption) for video, caption in zip(videos, captions)]
    assert backwards == pytest.approx(-measured)
    assert abs(clips.speed_along(videos[0], "a square moving up")) < 0.02  # it moves to the left


def test_brightness_follows_what_was_drawn_and_leaves_room(clips, read):
    videos, _ = read
    measured = np.array([clips.brightness(video) for video in videos])
    lit = [motion.brightness * motion.size**2 for motion in drawn(clips, count=480, seed=5)]
    assert np.corrcoef(measured, lit)[0, 1] > 0.98
    assert measured.mean() == pytest.approx(0.085, abs=0.005)
    assert measured.max() < 0.17
    assert clips.brightness(np.full_like(videos[0], 255)) == pytest.approx(1)


def test_the_judge_tells_prompts_apart_and_is_not_taken_in_by_light(scripts, read, tmp_path):
    _, judge = scripts
    videos, captions = read
    trained = judge.train_judge(videos[:400], captions[:400], steps=200, seed=1)
    held_out = videos[400:], captions[400:]
    shape, towards = judge.answers(trained, *held_out)
    assert shape.float().mean() > 0.8
    assert towards.float().mean() > 0.95
    assert judge.prompt_ok(trained, held_out[0][:, ::-1].copy(), held_out[1]) < 0.05  # everything moves the other way
    white = np.full_like(videos[:48], 255)
    assert judge.prompt_ok(trained, white, captions[:48]) == pytest.approx(1 / 12)

    save_file(trained.state_dict(), tmp_path / "judge.safetensors")
    scores = judge.PromptOk(path=str(tmp_path / "judge.safetensors"))(shown(*videos[400:404], caption=captions[400]))
    shape, towards = judge.answers(trained, videos[400:404], [captions[400]] * 4)
    assert scores == (shape & towards).float().tolist()
    assert scores[1] == 0  # the next clip moves the other way


def test_the_judge_repeats_with_its_seed(scripts, read):
    _, judge = scripts
    videos, captions = read
    state = torch.get_rng_state()
    first, second = (judge.train_judge(videos[:64], captions[:64], steps=3, seed=2) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))
    assert torch.equal(torch.get_rng_state(), state)
