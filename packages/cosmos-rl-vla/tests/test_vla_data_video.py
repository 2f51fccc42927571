"""A dataset's videos: files that are damaged, cut off or too short are named."""

import struct

import av
import numpy as np
import pytest

from cosmos_rl_core.data.video import VideoFile
from cosmos_rl_core.errors import MediaError, UserError
from cosmos_rl_vla.config import VLADataConfig
from cosmos_rl_vla.data.demos import Demonstrations
from cosmos_rl_vla.data.images import frames_in
from cosmos_rl_vla.data.recording.writer import Demonstration, DemoWriter

FPS = 10


def test_what_is_no_video_is_named(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"not a video" * 100)
    with pytest.raises(UserError, match=r"a\.mp4 \(top\) cannot be read, as after an interruption"):
        frames_in(tmp_path / "a.mp4", camera="top")
    with pytest.raises(UserError, match=r"b\.mp4 \(top\) does not exist: the dataset is incomplete"):
        frames_in(tmp_path / "b.mp4", camera="top")


def demos(path, lengths=(12, 13)):
    with DemoWriter(path, fps=FPS, cameras={"top": (32, 48)}, state_dim=1, action_dim=1, stored="video") as writer:
        for length in lengths:
            levels = np.arange(length, dtype=np.uint8)[:, None, None, None]
            ones = np.ones((length, 1), np.float32)
            images = {"top": np.broadcast_to(10 * levels, (length, 32, 48, 3))}
            writer.add(Demonstration(task="go", images=images, states=ones, actions=ones))
    return VLADataConfig(demos=str(path)), path / "videos/observation.images.top/chunk-000/file-000.mp4"


def test_a_video_shorter_than_its_parquet_is_named_before_training_begins(tmp_path):
    data, video = demos(tmp_path / "demos")
    _, short = demos(tmp_path / "short", lengths=(12, 8))
    short.replace(video)
    with pytest.raises(
        UserError,
        match=r"file-000\.mp4 \(observation\.images\.top\), episode 1, 20 frames for 25 rows: it ends at 1\.9",
    ):
        Demonstrations.open(data)


def test_a_file_that_was_cut_off_is_named(tmp_path):
    data, video = demos(tmp_path / "demos")
    video.write_bytes(video.read_bytes()[:500])
    with pytest.raises(
        UserError, match=r"file-000\.mp4 \(observation\.images\.top\) is cut off: it has 500 bytes of at"
    ):
        Demonstrations.open(data)
    with pytest.raises(MediaError, match=r"file-000\.mp4: is cut off: it has 500 bytes of at least"):
        VideoFile(video)


def test_frames_of_a_damaged_run_are_named_and_the_others_are_read(tmp_path):
    data, video = demos(tmp_path / "demos")
    with av.open(str(video)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    assert [number for number, packet in enumerate(packets) if packet.is_keyframe] == [0, 10, 12, 22]
    first, size = packets[11].pos, packets[11].size
    content = bytearray(video.read_bytes())
    content[first : first + size] = bytes(size)
    video.write_bytes(content)
    samples = Demonstrations.open(data).read([{"episode": 0, "frame": frame} for frame in range(12)], horizon=1)
    assert sorted(samples.unreadable) == [10, 11]
    assert "file-000.mp4: is damaged: not all frames after" in samples.unreadable[10]
    for frame, image in enumerate(samples.images):
        assert round(float(image.mean()), -1) == (0 if frame >= 10 else 10 * frame)


@pytest.mark.parametrize(("matrix", "turns"), [((-1, 0, 0, -1), 2), ((1, 0, 0, -1), None)], ids=["turned", "mirrored"])
def test_frames_are_shown_as_the_display_matrix_says(tmp_path, matrix, turns):
    """As of a camera that hangs upside down, whose files say so to players and to policies in use."""
    shown = np.kron(np.array([[20, 90], [160, 230]], np.uint8), np.ones((16, 24), np.uint8))
    ones, images = np.ones((3, 1), np.float32), np.broadcast_to(shown[None, :, :, None], (3, 32, 48, 3))
    with DemoWriter(tmp_path, fps=FPS, cameras={"top": (32, 48)}, state_dim=1, action_dim=1, stored="video") as writer:
        writer.add(Demonstration(task="go", images={"top": images}, states=ones, actions=ones))
    video = tmp_path / "videos/observation.images.top/chunk-000/file-000.mp4"
    data = video.read_bytes()
    a, b, c, d = (number << 16 for number in matrix)
    at = data.index(b"tkhd") + 4 + 40  # after the box's type, in version 0 (ISO/IEC 14496-12, 8.3.2)
    video.write_bytes(data[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[at + 36 :])
    [images] = (
        Demonstrations.open(VLADataConfig(demos=str(tmp_path))).read([{"episode": 0, "frame": 1}], horizon=1).images
    )
    expected = shown[::-1] if turns is None else np.rot90(shown, turns)
    assert np.abs(images.reshape(32, 48, 3)[..., 0].astype(int) - expected).mean() < 4
