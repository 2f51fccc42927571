"""Frames of rows: by number where a video has as many frames as the parquet has rows, else by time."""

import io
import json
from fractions import Fraction

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.config import VLADataConfig
from cosmos_rl_vla.data.demos import Demonstrations
from cosmos_rl_vla.data.recording.writer import Demonstration, DemoWriter

VIDEO = "videos/observation.images.top/chunk-000/file-000.mp4"
STEP = 12
"""Levels of grey between a frame and the next one."""


def level(frame):
    return STEP * (frame % 20)


def record(path, lengths=(12, 13), fps=10):
    with DemoWriter(path, fps=fps, cameras={"top": (16, 16)}, state_dim=1, action_dim=1, stored="video") as writer:
        for length in lengths:
            levels = np.array([level(frame) for frame in range(length)], np.uint8)[:, None, None, None]
            ones = np.ones((length, 1), np.float32)
            images = {"top": np.broadcast_to(levels, (length, 16, 16, 3))}
            writer.add(Demonstration(task="go", images=images, states=ones, actions=ones))
    return path


def write_video(path, frames, *, rate):
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate, options={"crf": "4", "g": "10"})
        stream.height = stream.width = 16
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            image = np.full((16, 16, 3), level(frame), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


def change(path, pattern, **columns):
    """Replace columns of the parquet files of a pattern; a function takes the old values."""
    for file in path.glob(pattern):
        table = pq.read_table(file)
        for name, new in columns.items():
            values = new(table.column(name).to_numpy())
            table = table.set_column(table.column_names.index(name), name, pa.array(values))
        pq.write_table(table, file)


def seen(path, rows):
    """Return the frame that each row's image shows."""
    data = VLADataConfig(demos=str(path))
    samples = Demonstrations.open(data).read([{"episode": e, "frame": f} for e, f in rows], horizon=1)
    assert not samples.unreadable
    return [round(float(image.mean()) / STEP) for image in samples.images]


def test_rows_at_30_a_second_have_the_frames_of_the_same_number_at_29_97(tmp_path):
    path = record(tmp_path / "demos", lengths=(620,), fps=30)
    write_video(path / VIDEO, range(620), rate=Fraction(30000, 1001))
    rows = (0, 499, 500, 501, 618, 619)
    assert seen(path, [(0, row) for row in rows]) == [row % 20 for row in rows]


def test_rows_at_29_97_a_second_have_the_frames_of_the_same_number_at_30(tmp_path):
    path = record(tmp_path / "demos", lengths=(620,), fps=30)
    change(path, "data/*/*.parquet", timestamp=lambda old: (old * 1.001).astype(np.float32))
    assert seen(path, [(0, 619)]) == [619 % 20]


def test_starts_that_drift_by_a_millisecond_an_episode_change_no_frame(tmp_path):
    path = record(tmp_path / "demos", lengths=(2,) * 80, fps=30)
    start = "videos/observation.images.top/from_timestamp"
    change(path, "meta/episodes/*/*.parquet", **{start: lambda old: old + 1e-3 * np.arange(80)})
    assert seen(path, [(episode, row) for episode in (0, 17, 40, 79) for row in (0, 1)]) == [0, 1] * 4


def test_frames_are_found_by_their_times_in_a_video_with_others(tmp_path):
    path = record(tmp_path / "demos", lengths=(12,))
    write_video(path / VIDEO, range(15), rate=10)
    assert seen(path, [(0, row) for row in range(12)]) == list(range(12))
    change(path, "data/*/*.parquet", timestamp=lambda old: old + np.float32(0.2))
    assert seen(path, [(0, row) for row in range(12)]) == list(range(2, 14))


@pytest.mark.parametrize(
    ("shift", "message"),
    [
        (lambda old: old * np.float32(1.001), r"15 frames for 12 rows: no frame within 0\.1 ms of the time 0\.1001 s"),
        (lambda old: old * np.float32(0), r"episode 0, .*: two times have the frame at 0\.0000 s"),
        (lambda old: old + np.float32(0.5), r"it ends at 1\.4000 s, before the time 1\.6000 s"),
    ],
    ids=["rate", "same", "short"],
)
def test_times_that_name_no_frame_are_refused_before_training_begins(tmp_path, shift, message):
    path = record(tmp_path / "demos", lengths=(12,))
    write_video(path / VIDEO, range(15), rate=10)
    change(path, "data/*/*.parquet", timestamp=shift)
    with pytest.raises(UserError, match=rf"file-000\.mp4 \(observation\.images\.top\).*{message}"):
        Demonstrations.open(VLADataConfig(demos=str(path)))


def test_rows_that_are_out_of_order_are_refused(tmp_path):
    path = record(tmp_path / "demos", lengths=(12,))
    change(path, "data/*/*.parquet", frame_index=lambda old: old[::-1].copy())
    with pytest.raises(UserError, match=r"column 'frame_index' of episode 0 does not increase"):
        Demonstrations.open(VLADataConfig(demos=str(path)))


@pytest.mark.parametrize("marked", ["is_depth_map", "video.is_depth_map"])
@pytest.mark.parametrize("place", ["info", "video_info"])
def test_a_depth_map_is_no_camera(tmp_path, marked, place):
    path = record(tmp_path / "demos")
    info = json.loads((path / "meta/info.json").read_text())
    info["features"]["observation.images.top"][place] = {marked: True}
    (path / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match=r"'observation\.images\.top' is a depth map.*\[data\] cameras"):
        Demonstrations.open(VLADataConfig(demos=str(path)))


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_images_of_more_than_8_bits_are_refused(tmp_path, dtype):
    with DemoWriter(tmp_path / "demos", fps=10, cameras={"top": (16, 16)}, state_dim=1, action_dim=1) as writer:
        ones, images = np.ones((3, 1), np.float32), np.zeros((3, 16, 16, 3), np.uint8)
        writer.add(Demonstration(task="go", images={"top": images}, states=ones, actions=ones))
    encoded = io.BytesIO()
    Image.fromarray(np.full((16, 16), 1500, dtype)).save(encoded, format="png" if dtype == np.uint16 else "tiff")
    (file,) = (tmp_path / "demos").glob("data/*/*.parquet")
    table = pq.read_table(file)
    cells = pa.array([{"bytes": encoded.getvalue(), "path": None}] * 3)
    at = table.column_names.index("observation.images.top")
    pq.write_table(table.set_column(at, "observation.images.top", cells), file)
    demonstrations = Demonstrations.open(VLADataConfig(demos=str(tmp_path / "demos")))
    unreadable = demonstrations.read([{"episode": 0, "frame": 0}], horizon=1).unreadable
    assert "observation.images.top of row 0 has pixels of mode" in unreadable[0] and "a depth map" in unreadable[0]


@pytest.mark.parametrize("layout", ["gray10le", "gray12le"])
def test_videos_of_grey_with_more_than_8_bits_are_refused(tmp_path, layout):
    path = record(tmp_path / "demos", lengths=(12,))
    with av.open(str(path / VIDEO), "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=10)
        stream.height = stream.width = 16
        stream.pix_fmt = layout
        for _ in range(12):
            frame = av.VideoFrame(16, 16, layout)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(UserError, match=rf"file-000\.mp4 \(observation\.images\.top\) has pixels of {layout}.*a depth"):
        Demonstrations.open(VLADataConfig(demos=str(path)))
