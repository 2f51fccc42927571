"""Episodes of robot policies as Rerun recordings: cameras, state, actions, rewards and success on one time axis.

    export_episodes(Path("runs/demo/eval/step_200"), Path("episodes"))     # episodes/000003_0.rrd, ...

Reads the files of `cosmos-rl generate` and `eval`: rollouts.jsonl, and of each episode the videos of its cameras and an
.npz file with its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.inference.rollouts_file import ROLLOUTS
from cosmos_rl_core.storage.json_files import parse_json

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

QUALITY = 90
"""Of the JPEG images in a recording, in percent."""
STEP = "step"
"""The time axis: steps of the simulator."""


def export_episodes(directory: Path, out: Path) -> list[Path]:
    """Write an .rrd file for each episode below `directory`, and return the files.

    Raises UserError without rerun-sdk, and for a directory that has no episodes.
    """
    try:
        import rerun  # pyright: ignore[reportMissingImports]  an extra: 160 MB
    except ModuleNotFoundError as error:
        raise UserError(f"recordings need Rerun: {pip_install('cosmos-rl-core[rerun]')}") from error
    try:
        text = (directory / ROLLOUTS).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{directory}: no {ROLLOUTS}; name the --out folder of cosmos-rl generate or eval") from error
    lines = [parse_json(line, where=f"{directory / ROLLOUTS}") for line in text.splitlines()]
    videos = [(line, directory / line["media"][0]) for line in lines if line.get("media")]
    episodes = [(line, video) for line, video in videos if video.with_suffix(".npz").is_file()]
    if not episodes:
        raise UserError(f"{directory}: no episodes; robot policies write them, without --no-media")
    out.mkdir(parents=True, exist_ok=True)
    return [_export(rerun, line, video, out / f"{video.stem}.rrd") for line, video in episodes]


def _export(rerun: Any, line: Mapping[str, Any], video: Path, path: Path) -> Path:
    with np.load(video.with_suffix(".npz"), allow_pickle=False) as arrays:
        state, decided_at = arrays["state"], arrays["decided_at"]
        actions, rewards, success = arrays["actions"], arrays["step_rewards"], bool(arrays["success"][0])
    recording = rerun.RecordingStream("cosmos-rl", recording_id=f"{video.parent.resolve()}/{video.stem}")
    recording.save(path)
    reward = "" if line.get("reward") is None else f", reward {line['reward']:.3g}"
    about = f"{line['prompt']}\n\n{line['response']}{reward}, weights of version {line['policy_version']}"
    recording.log("episode", rerun.TextDocument(about), static=True)
    seen_at = [*decided_at.tolist(), len(actions)]
    others = sorted(video.parent.glob(f"{video.stem}_camera*.mp4"), key=lambda file: (len(file.name), file.name))
    videos = [] if video.suffix == ".npz" else [video, *others]  # an episode without a camera
    for camera, file in enumerate(videos):
        _log_camera(rerun, recording, f"camera/{camera}", file, seen_at)
    for at, values in zip(decided_at, state, strict=True):
        recording.set_time(STEP, sequence=int(at))
        recording.log("state", rerun.Scalars(values))
    for at, (action, earned) in enumerate(zip(actions, rewards, strict=True)):
        recording.set_time(STEP, sequence=at)
        recording.log("action", rerun.Scalars(action))
        recording.log("reward", rerun.Scalars([earned]))
    recording.set_time(STEP, sequence=len(actions))
    recording.log("success", rerun.Scalars([float(success)]))
    recording.flush()
    recording.disconnect()
    return path


def _log_camera(rerun: Any, recording: Any, name: str, file: Path, steps: Sequence[int]) -> None:
    """Log the frames of a video at their steps; the last observation has the first camera alone."""
    from cosmos_rl_core.data.video import VideoFile

    def log(frame: VideoFrame, place: int) -> None:
        recording.set_time(STEP, sequence=steps[place])
        recording.log(name, rerun.Image(frame.to_ndarray(format="rgb24")).compress(jpeg_quality=QUALITY))

    with VideoFile(file) as video:
        video.read(range(min(len(steps), len(video.table.pts))), log)
