"""Clips and embeddings of single rows."""

import numpy as np
import pytest

from cosmos_rl_core.data.video import ByteCache
from cosmos_rl_core.errors import MediaError
from cosmos_rl_core.observe.gallery import write_video
from cosmos_rl_wfm.data.clips import ClipReader
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.data.rows import load_rows
from cosmos_rl_wfm.data.video import Clip


def config(path, **keys):
    size = {"frames": 9, "height": 16, "width": 16}
    return WFMDataConfig.model_validate({"path": str(path), "size": size, **keys})


def test_a_prompt_alone_is_no_clip(tmp_path):
    with pytest.raises(MediaError, match=r"p\.txt:1: is a prompt without a clip"):
        ClipReader(config(tmp_path)).clip({"key": "p.txt:1", "caption": "x", "video": ""}, np.random.default_rng(0))


def test_a_missing_file_is_a_fault_of_its_row(tmp_path):
    row = {"key": "gone", "caption": "x", "video": str(tmp_path / "gone.mp4")}
    for place in ({}, {"video_at": [0, 10]}):
        with pytest.raises(MediaError, match=r"gone.*No such file"):
            ClipReader(config(tmp_path)).clip({**row, **place}, np.random.default_rng(0))


def test_mock_rows_have_clips_in_every_bucket_and_embeddings():
    mock = config(
        "", kind="mock", mock={"rows": 6, "embedding_tokens": 3, "embedding_width": 8}, buckets=["16x16", "8x24"]
    )
    rows, _ = load_rows(mock)
    reader = ClipReader(mock, text_width=8)
    shapes = {reader.clip(row, np.random.default_rng(0)).video.shape for row in rows}
    assert shapes == {(9, 16, 16, 3), (9, 8, 24, 3)}
    assert all(reader.text(row).shape == (3, 8) for row in rows)


def test_clips_that_begin_where_they_always_do_are_decoded_once(tmp_path):
    path = tmp_path / "clip.mp4"
    write_video(path, np.zeros((4, 16, 16, 3), np.uint8), fps=8)
    row = {"video": str(path), "key": "clip", "caption": "", "fps": 0.0}
    config = {"path": str(tmp_path), "size": {"frames": 4, "height": 16, "width": 16}}
    first = ClipReader(WFMDataConfig.model_validate({**config, "start": "first"}))
    anywhere = ClipReader(WFMDataConfig.model_validate({**config, "start": "random"}))
    clips = [reader.clip(row, np.random.default_rng(0)).video for reader in (first, anywhere)]
    path.unlink()
    assert np.array_equal(first.clip(row, np.random.default_rng(1)).video, clips[0])
    with pytest.raises(MediaError):
        anywhere.clip(row, np.random.default_rng(1))


def test_only_so_many_decoded_clips_are_kept():
    held = ByteCache[Clip](100, evict=False)
    small, large = (Clip(video=np.zeros(size, np.uint8), fps=8.0) for size in (60, 90))
    held.put("small", small, small.nbytes)
    held.put("large", large, large.nbytes)
    assert held.get("small") is small
    assert held.get("large") is None
