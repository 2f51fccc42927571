"""Clips of a step's rows: the same after every restart; one that is bad is named once, left out and counted."""

import logging

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from cosmos_rl_core.data.source import TOLERATED, PromptSource
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.observe.gallery import write_video
from cosmos_rl_core.types import Prompt
from cosmos_rl_wfm.data.cache import TensorCache
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.data.loader import ClipLoader
from cosmos_rl_wfm.data.rows import load_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five clips of 12 frames that get brighter, as dark as their number; one of 4 frames, and one that is none."""
    root = tmp_path_factory.mktemp("clips")
    (root / "metas").mkdir()
    (root / "videos").mkdir()
    for number in range(7):
        (root / f"metas/{number}.txt").write_text(f"clip {number}")
        video = np.full((4 if number == 5 else 12, 24, 40, 3), 40 * number, np.uint8)
        video += np.arange(len(video), dtype=np.uint8)[:, None, None, None]
        write_video(root / f"videos/{number}.mp4", video, fps=8)
    (root / "videos/6.mp4").write_bytes(b"no video")
    return root


def config(path, **keys):
    size = {"frames": 5, "height": 16, "width": 16}
    return WFMDataConfig.model_validate({"path": str(path), "size": size, **keys})


def rows_of(config, *keys):
    """The rows with these keys, or all."""
    rows, _ = load_rows(config)
    return [row for row in rows if not keys or row["key"] in keys]


def good(config):
    return rows_of(config, "0", "1", "2", "3", "4")


def stream(rows, *, count, first=0):
    """Prompts of a stream over rows, as core draws them for a step."""
    source = PromptSource(rows, origin="clips", seed=3)
    return [source[first + place] for place in range(count)]


def seen(clips):
    """What tells clips apart: caption, and brightness of the first frame, which tells where it was cut."""
    return [None if clip is None else (clip.caption, float(clip.video[0].mean())) for clip in clips]


def test_clips_come_in_the_order_of_their_rows_with_captions(folder):
    data = config(folder, start="first")
    prompts = stream(good(data), count=10)
    clips = list(ClipLoader(data, seed=0).load(prompts))
    assert [clip.caption for clip in clips] == [prompt.row["caption"] for prompt in prompts]
    for clip in clips:
        assert clip.video.shape == (5, 16, 16, 3)
        assert abs(clip.video[0].mean() - 40 * int(clip.caption.split()[1])) < 4


@pytest.mark.parametrize("first", [1, 5, 7])
@pytest.mark.parametrize("keys", ["01234", "0123456"])
def test_a_stream_that_goes_on_gives_the_clips_it_would_have_given(folder, first, keys):
    data = config(folder, caption_dropout=0.3)
    rows = rows_of(data, *keys)
    whole = seen(ClipLoader(data, seed=3).load(stream(rows, count=12)))
    assert seen(ClipLoader(data, seed=3).load(stream(rows, count=12 - first, first=first))) == whole[first:]


def test_the_number_of_threads_changes_nothing(folder):
    prompts = stream(good(config(folder)), count=12)
    one, many = (seen(ClipLoader(config(folder, workers=workers), seed=3).load(prompts)) for workers in (1, 4))
    assert one == many


def test_a_row_is_cut_elsewhere_in_the_next_epoch_and_with_another_seed(folder):
    data = config(folder)
    clips = seen(ClipLoader(data, seed=3).load(stream(good(data), count=40)))
    places = {caption: {brightness for name, brightness in clips if name == caption} for caption, _ in clips}
    assert all(len(found) > 2 for found in places.values())
    assert seen(ClipLoader(data, seed=4).load(stream(good(data), count=40))) != clips


def test_captions_are_dropped_at_their_share_and_embeddings_with_them():
    data = config("", kind="mock", mock={"rows": 1, "embedding_tokens": 2}, caption_dropout=0.25)
    clips = list(ClipLoader(data, seed=0).load(stream(rows_of(data), count=400)))
    dropped = [clip.caption == "" for clip in clips]
    assert 70 <= sum(dropped) <= 130
    assert all((clip.text is None) == without for clip, without in zip(clips, dropped))


def test_bad_clips_are_named_once_and_none_stands_in_their_places(folder, caplog):
    data = config(folder)
    prompts = stream(rows_of(data), count=21)
    with caplog.at_level(logging.WARNING):
        clips = list(ClipLoader(data, seed=0).load(prompts))
    assert [clip is None for clip in clips] == [prompt.row["key"] in "56" for prompt in prompts]
    short, damaged = sorted(caplog.messages, key=lambda message: "6.mp4" in message)
    assert "5.mp4: is too short for 5 frames: it has 4" in short
    assert "6.mp4: cannot be decoded" in damaged
    assert "of 21 rows so far" in short


def test_a_bad_clip_is_not_tried_again(folder, tmp_path):
    data = config(folder)
    row = {**good(data)[0], "video": str(tmp_path / "late.mp4")}
    loader = ClipLoader(data, seed=0)
    prompts = [Prompt(sample_id=0, row=row)]
    assert seen(loader.load(prompts)) == [None]
    write_video(tmp_path / "late.mp4", np.zeros((12, 16, 16, 3), np.uint8), fps=8)
    assert seen(loader.load(prompts)) == [None]
    assert seen(ClipLoader(data, seed=0).load(prompts)) != [None]


def test_rows_that_are_mostly_bad_end_the_run_with_the_reasons(folder):
    data = config(folder)
    loader = ClipLoader(data, seed=0)
    prompts = stream(rows_of(data, "5", "6"), count=TOLERATED)
    assert seen(loader.load(prompts)) == [None] * TOLERATED
    wanted = rf"{TOLERATED + 1} of {TOLERATED + 1} rows so far give no clip .*: .*5\.mp4: is too short for 5 frames"
    with pytest.raises(UserError, match=wanted):
        list(loader.load(prompts[:1]))


def test_bad_rows_end_no_run_that_has_more_good_ones(folder):
    data = config(folder)
    clips = seen(ClipLoader(data, seed=0).load(stream(rows_of(data, "0", "1", "5", "6"), count=40)))
    assert clips.count(None) == 20


def test_a_wrong_embedding_is_a_fault_of_its_row(folder, tmp_path, caplog):
    np.save(tmp_path / "x.npy", np.zeros(3))
    row = {**good(config(folder))[0], "text_embedding": str(tmp_path / "x.npy")}
    assert seen(ClipLoader(config(folder), seed=0).load([Prompt(sample_id=0, row=row)])) == [None]
    assert "x.npy" in caplog.text


def test_an_embedding_of_another_width_is_a_fault_of_its_row(folder, tmp_path, caplog):
    (tmp_path / "x.safetensors").write_bytes(save({"x": np.ones((3, 4), np.float32)}))
    row = {**good(config(folder))[0], "text_embedding": str(tmp_path / "x.safetensors")}
    prompts = [Prompt(sample_id=0, row=row)]
    (clip,) = ClipLoader(config(folder), seed=0, text_width=4).load(prompts)
    assert clip.text.shape == (3, 4)
    assert seen(ClipLoader(config(folder), seed=0, text_width=8).load(prompts)) == [None]
    assert "x.safetensors: an embedding of shape [3, 4]" in caplog.text


def test_a_prompt_alone_is_a_fault_of_its_row(folder, caplog):
    row = {"key": "p.txt:1", "caption": "x", "video": ""}
    assert seen(ClipLoader(config(folder), seed=0).load([Prompt(sample_id=0, row=row)])) == [None]
    assert "p.txt:1: is a prompt without a clip" in caplog.text


def test_a_store_that_refuses_is_no_fault_of_a_row_and_ends_the_step(folder):
    row = {**good(config(folder))[0], "video": "nosuchstore://bucket/a.mp4"}
    with pytest.raises(UserError, match=r"nosuchstore://bucket/a\.mp4"):
        list(ClipLoader(config(folder), seed=0).load([Prompt(sample_id=0, row=row)]))


@pytest.fixture
def cached(folder, tmp_path):
    """Make a loader that keeps latents in a folder of this test."""

    def make(**keys):
        changed = {name: keys.pop(name) for name in ("codec", "needs_video") if name in keys}
        data = config(keys.pop("path", folder), start="first", **keys)
        cache = TensorCache(tmp_path / "cache", max_bytes=2**20)
        return ClipLoader(data, **{"seed": 0, "cache": cache, "codec": "a", "needs_video": False, **changed})

    return make


def test_a_clip_whose_latents_are_kept_is_not_decoded_again(folder, cached):
    prompts = stream(good(config(folder)), count=5)
    loader = cached()
    first = list(loader.load(prompts))
    for number, clip in enumerate(first):
        loader.keep(clip, torch.full((1, 2, 2, 2), float(number)))
    again = list(cached().load(prompts))
    assert [float(clip.latents.mean()) for clip in again] == [0, 1, 2, 3, 4]
    assert all(clip.video is None for clip in again)
    assert [clip.rng.integers(2**32) for clip in again] == [clip.rng.integers(2**32) for clip in first]
    assert all(clip.video is not None for clip in cached(needs_video=True).load(prompts))


@pytest.mark.parametrize(
    "changed", [{"stride": 2}, {"fps": 4.0}, {"size": {"frames": 3, "height": 16, "width": 16}}, {"codec": "b"}]
)
def test_latents_of_clips_that_are_cut_or_encoded_otherwise_are_not_taken(folder, cached, changed):
    prompts = stream(good(config(folder)), count=1)
    loader = cached()
    (clip,) = loader.load(prompts)
    loader.keep(clip, torch.zeros(1, 2, 2, 2))
    (same,), (other,) = cached().load(prompts), cached(**changed).load(prompts)
    assert same.latents is not None
    assert other.latents is None


def test_a_clip_that_went_away_is_a_fault_of_its_row_with_a_cache_too(folder, cached, tmp_path, caplog):
    row = {**good(config(folder))[0], "video": str(tmp_path / "gone.mp4")}
    assert seen(cached().load([Prompt(sample_id=0, row=row)])) == [None]
    assert "gone.mp4" in caplog.text
