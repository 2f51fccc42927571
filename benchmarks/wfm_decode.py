"""Clips per second of a local dataset and of bare PyAV loops over the same files, clip by clip in turn, in one process.

.venv/bin/python benchmarks/wfm_decode.py [--quick]

Each side cuts the same clip out of the middle of each video, scaled and cropped to one size. Ours is the loader that
training reads from, with one thread that decodes: with rows, the times of all frames, the choice of frames and the
naming of bad videos. It is created for each round, since it caches clips with a fixed start. The plain loop is a first
implementation, with `to_ndarray` of each frame; the careful one has one scaler per clip and one thread, as ours does.
Neither checks anything. The targets are for processor time, which other work on the machine does not change.
"""

from __future__ import annotations

import argparse
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, cycle
from pathlib import Path
from statistics import median

import av
import numpy as np
from _metrics import Figure, report
from av.container import InputContainer
from av.video.reformatter import Interpolation, VideoReformatter

from cosmos_rl_core.observe.gallery import write_video
from cosmos_rl_core.types import Prompt
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.data.loader import ClipLoader
from cosmos_rl_wfm.data.rows import load_rows

FRAMES = 17
HEIGHT, WIDTH = 192, 336


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller videos and fewer rounds")
    quick = parser.parse_args().quick
    videos, frames, height, width, rounds = (8, 48, 240, 416, 10) if quick else (12, 96, 480, 832, 8)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_dataset(root / "clips", videos=videos, frames=frames, height=height, width=width)
        make_shard(root / "clips", root / "clips.tar")
        files = sorted((root / "clips" / "videos").iterdir())
        sides = {
            "plain": plain_loop(files),
            "folder": our_clips(root / "clips"),
            "careful": careful_loop(files),
            "shard": our_clips(root / "clips.tar"),
        }
        walls, processor = measure(sides, clips=videos * rounds, warm=videos)
    size = f"{videos} videos of {frames} frames, {height}x{width} H.264 -> {FRAMES} frames, {HEIGHT}x{WIDTH}"
    note = (
        f"{size}; each {rounds} times; medians over clips; the ratios are of the same clip, one right after the other"
    )
    report(
        "wfm_decode",
        [
            Figure(metric="plain PyAV loop", value=1 / median(walls["plain"]), unit="clips/s", note=note),
            Figure(metric="careful PyAV loop", value=1 / median(walls["careful"]), unit="clips/s"),
            Figure(metric="our loader, folder", value=1 / median(walls["folder"]), unit="clips/s"),
            Figure(metric="our loader, tar shard", value=1 / median(walls["shard"]), unit="clips/s"),
            *(
                ratio(seconds, ours, theirs, unit=unit, target=target)
                for seconds, unit, target in ((walls, "by the clock", ""), (processor, "by processor time", ">= 0.9"))
                for ours, theirs in (("folder", "plain"), ("folder", "careful"), ("shard", "careful"))
            ),
        ],
    )


def ratio(seconds: Mapping[str, Sequence[float]], ours: str, theirs: str, *, unit: str, target: str = "") -> Figure:
    value = median(b / a for a, b in zip(seconds[ours], seconds[theirs]))
    return Figure(metric=f"{ours} / {theirs} loop", value=value, unit=unit, target=target)


def measure(
    sides: Mapping[str, Iterator[object]], *, clips: int, warm: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the wall-clock and processor seconds of each clip by side; the first `warm` are not counted."""
    walls: dict[str, list[float]] = {name: [] for name in sides}
    processor: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(warm + clips):
        for name, side in sides.items():
            start, busy = time.perf_counter(), time.process_time()
            next(side)
            if number >= warm:
                walls[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - busy)
    return walls, processor


def our_clips(path: Path) -> Iterator[np.ndarray]:
    """Load clips as training does, one row at a time."""
    config = WFMDataConfig.model_validate(
        {
            "path": str(path),
            "size": {"frames": FRAMES, "height": HEIGHT, "width": WIDTH},
            "start": "centre",
            "workers": 1,
            "cache_path": str(path.parent / "cache"),
        }
    )
    rows, _ = load_rows(config)
    for epoch in count():
        loader = ClipLoader(config, seed=0)
        for number, row in enumerate(rows):
            (clip,) = loader.load([Prompt(sample_id=epoch * len(rows) + number, row=row)])
            assert clip is not None and clip.video is not None
            yield clip.video


def plain_loop(files: Sequence[Path]) -> Iterator[np.ndarray]:
    """Cut clips with the simplest code."""
    for path in cycle(files):
        with av.open(str(path)) as container:
            stream, wanted = middle_of(container)
            images = []
            for frame in container.decode(stream):
                if frame.pts is not None and frame.pts >= wanted:
                    images.append(frame.to_ndarray(width=WIDTH, height=HEIGHT, format="rgb24", interpolation="BICUBIC"))
                if len(images) == FRAMES:
                    break
        yield np.stack(images)


def careful_loop(files: Sequence[Path]) -> Iterator[np.ndarray]:
    """Cut clips with one scaler each, in one thread."""
    for path in cycle(files):
        scaler = VideoReformatter()
        with av.open(str(path)) as container:
            stream, wanted = middle_of(container)
            images = []
            for frame in container.decode(stream):
                if frame.pts is not None and frame.pts >= wanted:
                    scaled = scaler.reformat(
                        frame, WIDTH, HEIGHT, "rgb24", interpolation=Interpolation.BICUBIC, threads=1
                    )
                    images.append(scaled.to_ndarray())
                if len(images) == FRAMES:
                    break
        yield np.stack(images)


def middle_of(container: InputContainer) -> tuple[av.VideoStream, int]:
    """Seek to a clip in the middle. Returns the stream and the time of the clip's first frame."""
    stream = container.streams.video[0]
    stream.codec_context.thread_count = 1
    assert stream.average_rate is not None and stream.time_base is not None
    wanted = round((stream.frames - FRAMES) // 2 / stream.average_rate / stream.time_base)
    container.seek(wanted, stream=stream)
    return stream, wanted


def make_dataset(root: Path, *, videos: int, frames: int, height: int, width: int) -> None:
    """Write videos of a textured plane that moves, with a little noise, like that of a camera."""
    (root / "metas").mkdir(parents=True)
    (root / "videos").mkdir()
    for number in range(videos):
        rng = np.random.default_rng(number)
        tiles = rng.integers(0, 200, (height // 8, width // 8 + frames, 3), np.uint8)
        plane = np.kron(tiles, np.ones((8, 8, 1), np.uint8))
        noise = rng.integers(0, 12, (height, width, 3), np.uint8)
        video = np.stack([plane[:, 3 * step : 3 * step + width] + np.roll(noise, step, 1) for step in range(frames)])
        (root / f"metas/{number:03d}.txt").write_text(f"a plane of colours, number {number}")
        write_video(root / f"videos/{number:03d}.mp4", video, fps=24)


def make_shard(root: Path, shard: Path) -> None:
    with tarfile.open(shard, "w") as archive:
        for video in sorted((root / "videos").iterdir()):
            archive.add(video, video.name)
            archive.add(root / "metas" / f"{video.stem}.txt", f"{video.stem}.txt")


if __name__ == "__main__":
    main()
