"""Frames of video files, and files that give none."""

import struct

import av
import numpy as np
import pytest

from cosmos_rl_core.data.video import VideoFile, cut_off
from cosmos_rl_core.errors import MediaError

FPS = 10
FRAMES = 25


def box(kind, content=b"", *, size=None):
    return struct.pack(">I4s", 8 + len(content) if size is None else size, kind) + content


WHOLE = box(b"ftyp", b"isom") + box(b"mdat", bytes(100)) + box(b"moov", bytes(40))
LONG = box(b"ftyp", b"isom") + struct.pack(">I4sQ", 1, b"mdat", 116) + bytes(100)
NO_INDEX = "has no index (moov): the recording or the copy was ended before it was written"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (WHOLE, ""),
        (WHOLE[:-1], "is cut off: it has 167 bytes of at least 168"),
        (WHOLE[:60], "is cut off: it has 60 bytes of at least 120"),
        (WHOLE[:120], NO_INDEX),
        (WHOLE[:123], "is cut off: it has 123 bytes of at least 128"),
        (LONG, NO_INDEX),
        (LONG[:-1], "is cut off: it has 127 bytes of at least 128"),
        (box(b"moov", bytes(40)) + box(b"mdat", bytes(9), size=0), ""),
        (WHOLE + bytes(20), ""),
        (b"", "is empty: it has 0 bytes"),
        (b"RIFF" + struct.pack("<I", 92) + bytes(92), ""),
        (b"RIFF" + struct.pack("<I", 92) + bytes(40), "is cut off: it has 48 bytes of at least 100"),
        (b"RIFF" + b"\xff" * 4 + bytes(40), ""),
        (b"garbage" * 50, ""),
        (b"\x1aE\xdf\xa3" + bytes(40), ""),
    ],
)
def test_headers_tell_where_a_file_was_cut(content, said, tmp_path):
    (tmp_path / "a").write_bytes(content)
    assert cut_off(content) == cut_off(tmp_path / "a") == cut_off(str(tmp_path / "a")) == said


def test_a_file_that_is_not_there_is_not_cut_off(tmp_path):
    assert cut_off(tmp_path / "gone.mp4") == ""


def write(path, *, codec="libx264", options):
    """A flat grey a frame, 10 levels brighter each."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=FPS, options=options)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        for number in range(FRAMES):
            image = np.full((32, 48, 3), 10 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


OPTIONS = {
    "no frame depends on a later one": {"g": "6", "bf": "0", "crf": "5", "sc_threshold": "0"},
    "frames depend on later ones": {"g": "6", "bf": "3", "crf": "5", "sc_threshold": "0"},
    "even on those after the next keyframe": {
        "x264-params": "keyint=6:bframes=3:open-gop=1:b-adapt=0:scenecut=0",
        "crf": "5",
    },
    "one keyframe": {"g": "1000", "crf": "5", "sc_threshold": "0"},
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_each_frame_is_found_at_its_time(tmp_path, kind):
    write(tmp_path / "a.mp4", options=OPTIONS[kind])
    file, images = VideoFile(tmp_path / "a.mp4"), []
    for number in reversed(range(FRAMES)):
        (place,) = file.table.places(np.array([number / FPS + 0.03]), tolerance_s=0.04)
        run = file.table.run_of(place)
        assert file.table.runs[run] <= place < file.table.runs[run + 1]
        file.read([place], lambda frame, _: images.append(frame.to_ndarray(format="rgb24")))
        assert abs(float(images[-1].mean()) - 10 * number) < 3
    assert len(file.table.seeks) == (1 if kind == "one keyframe" else 5)


def test_a_time_that_has_no_frame_is_refused(tmp_path):
    write(tmp_path / "a.mp4", options={})
    table = VideoFile(tmp_path / "a.mp4").table
    for seconds, message in (
        ([2.4, 2.5], r"it ends at 2\.4000 s, before the time 2\.5000 s"),
        ([0.1, 0.201], r"no frame within 0\.1 ms of the time 0\.2010 s"),
        ([0.1, 0.2, 0.20005], r"two times have the frame at 0\.2000 s"),
    ):
        with pytest.raises(ValueError, match=message):
            table.places(np.array(seconds), tolerance_s=1e-4)


def test_all_frames_from_a_place_on_are_read_once_and_in_order(tmp_path):
    write(tmp_path / "a.mp4", options=OPTIONS["frames depend on later ones"])
    seen = []
    with VideoFile((tmp_path / "a.mp4").read_bytes()) as file:
        file.read(
            range(4, 20), lambda frame, place: seen.append((place, round(frame.to_ndarray(format="rgb24").mean(), -1)))
        )
    assert seen == [(place, 10 * place) for place in range(4, 20)]


def test_errors_name_the_file_and_the_remedy(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"not a video" * 100)
    with pytest.raises(MediaError, match=r"a\.mp4: cannot be decoded: Invalid data.*; download it again$"):
        VideoFile(tmp_path / "a.mp4", remedy="download it again")
    with pytest.raises(MediaError, match=r"^clip: is empty"):
        VideoFile(b"", name="clip")
