"""Clips are cut out of videos at the right frames, scaled and cropped; what gives no clip is named."""

import io
import struct
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from cosmos_rl_core.errors import MediaError
from cosmos_rl_core.observe.gallery import write_video
from cosmos_rl_wfm.data.video import choose_frames, nearest_size, read_clip

SIZE = ((32, 48),)


def steps(frames, *, height=32, width=48):
    """A video whose grey tells the frame: 10, 30, 50, ..."""
    video = np.empty((frames, height, width, 3), np.uint8)
    video[:] = (10 + 20 * np.arange(frames))[:, None, None, None]
    return video


def numbers(clip):
    """The frames of a clip of `steps`."""
    return [round((float(frame.mean()) - 10) / 20) for frame in clip.video]


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    path = tmp_path_factory.mktemp("video") / "video.mp4"
    write_video(path, steps(12), fps=8)
    return path


def test_a_written_video_comes_back(video):
    clip = read_clip(video, frames=12, sizes=SIZE)
    assert clip.video.shape == (12, 32, 48, 3) and clip.video.dtype == np.uint8
    assert clip.fps == 8
    assert numbers(clip) == list(range(12))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"frames": 3}, [0, 1, 2]),
        ({"frames": 4, "start": "centre"}, [4, 5, 6, 7]),
        ({"frames": 3, "stride": 4}, [0, 4, 8]),
        ({"frames": 3, "stride": 5, "start": "centre"}, [0, 5, 10]),
        ({"frames": 4, "fps": 4.0}, [0, 2, 4, 6]),
        ({"frames": 5, "fps": 2.0}, None),
        ({"frames": 3, "fps": 2.0, "start": "centre"}, [1, 5, 9]),
        ({"frames": 3, "fps": 3.0}, [0, 3, 5]),
        ({"frames": 1, "start": "centre"}, [5]),
    ],
)
def test_the_right_frames_are_taken(video, keys, expected):
    if expected is None:
        with pytest.raises(MediaError, match=r"video\.mp4: is too short for 5 frames at 2/s: it has 12 in 1\.5 s"):
            read_clip(video, sizes=SIZE, **keys)
    else:
        assert numbers(read_clip(video, sizes=SIZE, **keys)) == expected


def test_the_rate_of_a_clip_is_that_of_its_frames(video):
    assert read_clip(video, frames=3, sizes=SIZE, stride=4).fps == 2
    assert read_clip(video, frames=3, sizes=SIZE, fps=3.0).fps == 3


def test_a_random_start_reaches_every_frame_and_the_same_generator_the_same_clip(video):
    starts = {
        numbers(read_clip(video, frames=9, sizes=SIZE, start="random", rng=np.random.default_rng(n)))[0]
        for n in range(30)
    }
    assert starts == {0, 1, 2, 3}
    one, other = (
        read_clip(video, frames=9, sizes=SIZE, start="random", rng=np.random.default_rng(5)) for _ in range(2)
    )
    assert np.array_equal(one.video, other.video)


@pytest.mark.parametrize("keys", [{}, {"fps": 8.0}, {"start": "centre"}, {"start": "random", "fps": 8.0}])
def test_a_video_with_exactly_the_frames_is_a_clip(video, keys):
    clip = read_clip(video, frames=12, sizes=SIZE, rng=np.random.default_rng(0), **keys)
    assert numbers(clip) == list(range(12))


def test_bytes_are_a_video_too(video):
    assert numbers(read_clip(video.read_bytes(), frames=2, sizes=SIZE)) == [0, 1]


MATRICES = [(1, 0, 0, 1), (-1, 0, 0, 1), (-1, 0, 0, -1), (1, 0, 0, -1), (0, 1, 1, 0), (0, 1, -1, 0), (0, -1, -1, 0)]
MATRICES += [(0, -1, 1, 0)]
"""(a, b, c, d) of orientation 1 to 8 of EXIF: (column, row) -> (a column + c row, b column + d row)."""


def pattern():
    """Four shades of grey, 32 x 48, that no turn and no mirror leaves as they are."""
    return np.kron(np.array([[20, 90], [160, 230]], np.uint8), np.ones((16, 24), np.uint8))[..., None].repeat(3, -1)


def oriented(tag):
    """`pattern` as Pillow shows it in an orientation of EXIF."""
    image = Image.fromarray(pattern())
    image.getexif()[0x0112] = tag
    return np.asarray(ImageOps.exif_transpose(image))


@pytest.mark.parametrize("tag", range(1, 9))
def test_a_video_is_shown_as_its_matrix_says_turned_or_mirrored(tmp_path, tag):
    """As of a phone held sideways, or of a selfie. The size nearest to the upright shape is taken."""
    write_video(tmp_path / "video.mp4", np.stack([pattern()] * 2), fps=8)
    data = (tmp_path / "video.mp4").read_bytes()
    a, b, c, d = (number << 16 for number in MATRICES[tag - 1])
    matrix = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    at = data.index(b"tkhd") + 4 + 40  # after the box's type, in version 0 (ISO/IEC 14496-12, 8.3.2)
    clip = read_clip(data[:at] + matrix + data[at + 36 :], frames=2, sizes=((32, 48), (48, 32)))
    assert clip.video.shape[1:3] == oriented(tag).shape[:2]
    assert np.abs(clip.video[0].astype(int) - oriented(tag)).mean() < 4


@pytest.mark.parametrize("format", ["jpeg", "png", "webp"])
@pytest.mark.parametrize("tag", range(1, 9))
def test_a_picture_is_shown_as_its_orientation_says(tag, format):
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = tag
    Image.fromarray(pattern()).save(file, format=format, exif=exif)
    clip = read_clip(file.getvalue(), frames=1, sizes=((32, 48), (48, 32)))
    assert clip.video.shape[1:3] == oriented(tag).shape[:2]
    assert np.abs(clip.video[0].astype(int) - oriented(tag)).mean() < 4


def test_a_transparent_picture_is_over_white(tmp_path):
    Image.new("RGBA", (24, 16), (0, 0, 0, 0)).save(tmp_path / "a.png")
    assert (read_clip(tmp_path / "a.png", frames=1, sizes=SIZE).video == 255).all()


def test_a_damaged_picture_is_named(tmp_path):
    Image.fromarray(pattern()).save(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    with pytest.raises(MediaError, match=r"a\.png: a damaged picture"):
        read_clip(tmp_path / "a.png", frames=1, sizes=SIZE)


def test_frames_behind_later_keyframes_are_those_of_decoding_from_the_start(tmp_path):
    path = tmp_path / "keyframes.mp4"
    rng = np.random.default_rng(0)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25, options={"g": "7", "bf": "2", "sc_threshold": "0"})
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        for _ in range(40):
            image = np.kron(rng.integers(0, 255, (4, 6, 3), np.uint8), np.ones((8, 8, 1), np.uint8))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    every = read_clip(path, frames=40, sizes=SIZE).video
    for seed in range(12):
        first = np.random.default_rng(seed).integers(36)
        clip = read_clip(path, frames=5, sizes=SIZE, start="random", rng=np.random.default_rng(seed))
        assert np.array_equal(clip.video, every[first : first + 5])


def test_variable_frame_times_are_taken_by_the_clock():
    held = np.array([0.0, 0.1, 0.2, 0.9, 1.0, 1.1])
    assert choose_frames(held, frames=3, fps=2.0).tolist() == [0, 2, 4]  # 0.5 s is nearer to 0.2 than to 0.9


def test_a_video_much_slower_than_asked_for_is_refused_and_a_little_slower_is_not():
    with pytest.raises(ValueError, match=r"has 8 frames a second, fewer than data\.fps = 24"):
        choose_frames(np.arange(40) / 8, frames=5, fps=24.0)
    assert len(choose_frames(np.arange(40) / 23.976, frames=5, fps=24.0)) == 5


@given(
    count=st.integers(1, 60),
    frames=st.integers(1, 20),
    stride=st.integers(1, 4),
    start=st.sampled_from(["random", "centre", "first"]),
)
def test_strided_frames_are_even_and_inside(count, frames, stride, start):
    held = np.arange(count) / 25
    if count < (frames - 1) * stride + 1:
        with pytest.raises(ValueError, match="too short"):
            choose_frames(held, frames=frames, stride=stride, start=start, rng=np.random.default_rng(0))
        return
    chosen = choose_frames(held, frames=frames, stride=stride, start=start, rng=np.random.default_rng(0))
    assert chosen[0] >= 0 and chosen[-1] < count
    assert np.all(np.diff(chosen) == stride)


@given(
    count=st.integers(2, 60),
    frames=st.integers(1, 20),
    native=st.sampled_from([24, 25, 29.97, 30, 60]),
    fps=st.floats(1, 24),
)
def test_frames_by_the_clock_are_the_nearest_ones(count, frames, native, fps):
    held = np.arange(count) / native
    try:
        chosen = choose_frames(held, frames=frames, fps=fps, start="random", rng=np.random.default_rng(1))
    except ValueError:
        assert (count - 0.5) / native < (frames - 1) / fps
        return
    wanted = held[chosen[0]] + np.arange(frames) / fps
    assert np.all(np.abs(held[chosen] - wanted) <= 0.5 / native + 1e-9)


def test_the_middle_is_kept_and_scaled_to_cover(tmp_path):
    image = np.zeros((40, 120, 3), np.uint8)
    image[:, 40:80] = (250, 10, 10)
    Image.fromarray(image).save(tmp_path / "wide.png")
    (square,) = read_clip(tmp_path / "wide.png", frames=1, sizes=((20, 20),)).video
    assert square.shape == (20, 20, 3)
    assert np.abs(square[:, 2:-2].astype(int) - (250, 10, 10)).max() <= 4


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
def test_an_image_is_a_clip_of_one_frame(tmp_path, suffix):
    path = tmp_path / f"grey.{suffix}"
    Image.fromarray(np.full((24, 24, 3), 90, np.uint8)).save(path)
    for source in (path, path.read_bytes()):
        clip = read_clip(source, frames=1, sizes=((8, 8),))
        assert clip.fps == 0 and abs(clip.video.astype(int) - 90).max() <= 3
    with pytest.raises(MediaError, match=r"is too short for 2 frames: it has 1"):
        read_clip(path, frames=2, sizes=((8, 8),))


def test_a_clip_gets_the_size_nearest_in_shape(video):
    assert read_clip(video, frames=1, sizes=((16, 16), (16, 24), (24, 16))).video.shape[1:3] == (16, 24)
    assert nearest_size(480, 832, [(64, 64), (48, 80), (80, 48)]) == (48, 80)
    assert nearest_size(832, 480, [(64, 64), (48, 80), (80, 48)]) == (80, 48)


def test_odd_sizes_are_written_too(tmp_path):
    write_video(tmp_path / "odd.mp4", steps(3, height=31, width=47), fps=29.97)
    clip = read_clip(tmp_path / "odd.mp4", frames=3, sizes=((31, 47),))
    assert numbers(clip) == [0, 1, 2]
    assert clip.fps == pytest.approx(29.97, rel=1e-3)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"garbage" * 50, "cannot be decoded: Invalid data"),
        ("cut", "is cut off: it has 900 bytes of at least"),
        (None, "cannot be decoded: No such file"),
    ],
)
def test_what_cannot_be_decoded_is_named(video, tmp_path, content, reason):
    path = tmp_path / "bad.mp4"
    if content is not None:
        path.write_bytes(video.read_bytes()[:900] if content == "cut" else content)
    with pytest.raises(MediaError, match=rf"bad\.mp4: {reason}") as caught:
        read_clip(path, frames=2, sizes=SIZE)
    assert caught.value.final


def test_a_recording_that_was_ended_before_its_index_says_so(video):
    data = video.read_bytes()
    with pytest.raises(MediaError, match=r"clip: has no index \(moov\)"):
        read_clip(data[: data.index(b"moov") - 4], frames=2, sizes=SIZE, name="clip")


def test_a_hole_in_the_data_is_a_fault_and_no_grey_clip(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (10, 32, 48, 3), np.uint8)
    write_video(tmp_path / "whole.mp4", noise, fps=8)
    data = bytearray((tmp_path / "whole.mp4").read_bytes())
    start = data.index(b"mdat") + 4
    data[start : start + len(data) // 2] = bytes(len(data) // 2)
    with pytest.raises(MediaError, match=r"holed: (cannot be decoded|is damaged)"):
        read_clip(bytes(data), frames=10, sizes=SIZE, name="holed")


def test_sound_alone_is_no_video(tmp_path):
    with av.open(str(tmp_path / "sound.wav"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(MediaError, match="there is no video in it"):
        read_clip(Path(tmp_path / "sound.wav"), frames=1, sizes=SIZE)
