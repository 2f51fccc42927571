"""Make a dataset of real mp4 files: soft shapes that move, with the captions that describe them.

    DIR/videos/clip_00000.mp4    8 frames of 16 x 16 grey pixels, H.264, 8 frames a second
    DIR/metas/clip_00000.txt     "a square moving left", one of 12 captions

python cookbook/wfm_quickstart/clips.py DIR [--count 2000] [--seed 0]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np

from cosmos_rl_wfm import DIRECTIONS, brightness, direction, read_clip, speed

SHAPES = ("square", "disc", "cross")
CAPTIONS = tuple(f"a {shape} moving {towards}" for shape in SHAPES for towards in DIRECTIONS)
FRAMES, SIDE, FPS = 8, 16, 8
MARGIN = 4.0
"""Pixels between the centre of a shape and the edge, at least: no shape leaves the picture."""
QUALITY = {"crf": "2", "x264-params": "no-mbtree=1"}
"""Nearly lossless. The usual 23 would smear a picture of 16 pixels: its blocks are as large as the shapes.

Without mbtree, whose assembly gives other bytes for the same frames in about 3 of 1,000 encodings.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Motion:
    """The shape and movement of a clip."""

    caption: str
    brightness: float
    """Of the shape, .5 to 1; the background is black."""
    size: float
    """Factor on the shape's sides, .8 to 1.15."""
    speed: float
    """Pixels a frame, .3 to .9."""
    start: tuple[float, float]
    """Row and column of the centre in the first frame."""


def sample_motion(caption: str, rng: np.random.Generator) -> Motion:
    """Sample the properties that the caption does not fix."""
    pace = rng.uniform(0.3, 0.9)
    travel = pace * (FRAMES - 1)
    low, high = MARGIN, SIDE - 1 - MARGIN
    row, column = (
        rng.uniform(low + max(0.0, -step) * travel, high - max(0.0, step) * travel) for step in direction(caption)
    )
    light, size = rng.uniform(0.5, 1.0), rng.uniform(0.8, 1.15)
    return Motion(caption=caption, brightness=light, size=size, speed=pace, start=(row, column))


def render(motion: Motion) -> np.ndarray:
    """Return the clip, uint8 [F, H, W, 3]. Edges are one pixel wide, so that motion is finer than a pixel."""
    steps = motion.speed * np.arange(FRAMES)[:, None, None]
    down, right = direction(motion.caption)
    row, column = np.mgrid[:SIDE, :SIDE]
    row, column = row - motion.start[0] - down * steps, column - motion.start[1] - right * steps
    outside = motion.size * _distance(motion.caption, row / motion.size, column / motion.size)
    pixels = np.rint(255 * motion.brightness * np.clip(0.5 - outside, 0, 1)).astype(np.uint8)
    return np.repeat(pixels[..., None], 3, axis=-1)


def make_clips(directory: Path, *, count: int = 2000, seed: int = 0) -> None:
    """Write `count` clips, all captions equally often. Clip i is the same whatever the count."""
    for folder in ("videos", "metas"):
        (directory / folder).mkdir(parents=True, exist_ok=True)
    for name, motion in _motions(count, seed):
        write_mp4(directory / "videos" / f"{name}.mp4", render(motion))
        (directory / "metas" / f"{name}.txt").write_text(f"{motion.caption}\n", encoding="utf-8")


def write_mp4(path: Path, video: np.ndarray) -> None:
    """Write uint8 [F, H, W, 3] as H.264 that any player shows: 4:2:0, so that colours lose detail and grey does not."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options=QUALITY)
        stream.height, stream.width, stream.pix_fmt = *video.shape[1:3], "yuv420p"
        stream.thread_count = 1  # starting threads takes longer than the clip
        for image in video:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


def read_clips(directory: Path) -> tuple[np.ndarray, list[str]]:
    """Return all clips, uint8 [N, F, H, W, 3], and their captions, by name."""
    metas = sorted((directory / "metas").glob("*.txt"))
    paths = [directory / "videos" / f"{meta.stem}.mp4" for meta in metas]
    videos = [read_clip(path, frames=FRAMES, sizes=[(SIDE, SIDE)]).video for path in paths]
    return np.stack(videos), [meta.read_text(encoding="utf-8").strip() for meta in metas]


def speed_along(video: np.ndarray, caption: str) -> float:
    """Return the speed of what is bright in uint8 [F, H, W, 3] along the caption's direction, in pixels a frame."""
    return speed(video, direction(caption))


def _motions(count: int, seed: int) -> Iterator[tuple[str, Motion]]:
    for i in range(count):
        yield f"clip_{i:05d}", sample_motion(CAPTIONS[i % len(CAPTIONS)], np.random.default_rng([seed, i]))


def _distance(caption: str, row: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Distance of points to a shape around 0, in pixels, negative inside. All have about 30 pixels."""
    if "square" in caption:
        return np.maximum(abs(row), abs(column)) - 2.7
    if "disc" in caption:
        return np.hypot(row, column) - 3.1
    across = np.maximum(abs(row) - 1.25, abs(column) - 3.6)
    return np.minimum(across, np.maximum(abs(row) - 3.6, abs(column) - 1.25))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_clips(arguments.directory, count=arguments.count, seed=arguments.seed)

    videos, captions = read_clips(arguments.directory)
    rendered = np.stack([render(motion) for _, motion in _motions(len(videos), arguments.seed)])
    error = abs(videos.astype(int) - rendered)
    light, pace = [brightness(video) for video in videos], [speed_along(*clip) for clip in zip(videos, captions)]
    print(f"{len(videos)} clips; after H.264 a pixel of 0..255 is off by {error.mean():.2f}, at most {error.max()}")
    print(f"brightness {np.mean(light):.4f}, at most {max(light):.4f}")
    print(f"speed along the caption {np.mean(pace):.3f} px/frame, at most {max(pace):.3f}")


if __name__ == "__main__":
    main()
