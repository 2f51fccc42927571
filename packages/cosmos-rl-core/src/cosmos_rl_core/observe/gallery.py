"""Galleries of samples: videos, grids and rewards of a few groups per step.

media/index.jsonl                       one line per group; the last line of a step and sample is valid
media/step_000012/grid.png              all groups of the step: one line per rollout, one column per frame
media/step_000012/grid.gif              the same groups as an animation: one line per group, one column per rollout
media/step_000012/sample_17.mp4         one group as a video (sample_17.png for images)
media/step_000012/sample_17.json        caption, rewards by name, advantages, policy versions

Of rollouts of text whose prompts show pictures or videos (`AnswerGallery`) sample_17.png has those of the prompt, the
record the answers, and grid.png all of it side by side.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Generic, TypeVar

import av
import numpy as np
from PIL import Image

from cosmos_rl_core.errors import MediaError
from cosmos_rl_core.observe.pages import (
    PageRow,
    Question,
    animation,
    answer_grid,
    as_gif,
    beside,
    contact_grid,
    fit_clip,
)
from cosmos_rl_core.observe.rollouts import finite
from cosmos_rl_core.types import Rollout, RolloutGroup

log = logging.getLogger(__name__)

KEPT_STEPS = 4
"""Number of steps whose grids can still grow: groups of an asynchronous run finish out of order."""
ROLLOUTS = 8
"""Most rollouts of a group that are shown."""
CELL, FRAMES = 96, 48
"""Of a clip in the gallery: pixels of its longer side, and maximum number of frames."""
PROMPT_CELL, PROMPT_FRAMES = 224, 8
"""The same of a prompt's pictures and videos."""
FPS = 8.0
"""Frame rate of clips whose row has no column `fps`."""


R = TypeVar("R")


class _Steps(Generic[R]):
    """The rows of the newest steps, and the index of their files."""

    of_rollouts: bool
    """Whether rollouts themselves are images or videos."""

    def __init__(self, directory: Path, *, groups_per_step: int = 2, every_steps: int = 1, name: str = "") -> None:
        """name: of the process, for the names of its files."""
        if min(groups_per_step, every_steps) < 1:
            raise ValueError("a gallery's counts must be above 0")
        self._directory = directory
        self._groups_per_step = groups_per_step
        self._every_steps = every_steps
        self._suffix = f"_{name}" if name else ""
        self._rows: dict[int, dict[int, R]] = {}

    def wants(self, step: int, group: RolloutGroup) -> bool:
        """Whether `save` would write this group: its step is one of those shown, and has fewer than its groups."""
        if not group.rollouts or (len(self._rows) == KEPT_STEPS and step < min(self._rows)):
            return False
        return step % self._every_steps == 0 and len(self._rows.get(step, ())) < self._groups_per_step

    def close(self) -> None:
        """Do nothing: each group is on disk once `save` returns."""

    def _keep(self, step: int, sample: int, row: R) -> list[R]:
        """Keep a row and return those of its step."""
        self._rows.setdefault(step, {})[sample] = row
        for old in sorted(self._rows)[:-KEPT_STEPS]:
            del self._rows[old]
        return list(self._rows.get(step, {}).values())

    def _folder(self, step: int) -> Path:
        folder = self._directory / f"step_{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _append_index(self, step: int, group: RolloutGroup, *, caption: str, file: Path, grid: Path) -> None:
        line = {
            "step": step,
            "sample": group.prompt.sample_id,
            "caption": caption,
            "file": file.relative_to(self._directory).as_posix(),
            "grid": grid.relative_to(self._directory).as_posix(),
            "reward_mean": finite(float(np.mean([rollout.reward for rollout in group.rollouts]))),
            "reward_max": finite(max(rollout.reward for rollout in group.rollouts)),
        }
        with (self._directory / f"index{self._suffix}.jsonl").open("a", encoding="utf-8") as file_:
            file_.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")


class Gallery(_Steps[PageRow]):
    """Writes a limited number of groups per step as videos, grids and an index.

    gallery = Gallery(run_dir / "media", groups_per_step=2)
    for group in scored_groups:
        gallery.save(step, group)         # None if the step has enough groups

    Several processes may share a directory if each has its own `name`, which is part of the file names.
    """

    of_rollouts = True

    def save(self, step: int, group: RolloutGroup) -> Path | None:
        """Write a scored group and return its video or image; None if the step needs no more groups.

        Raises:
            ValueError: a rollout has no `media["video"]`.
        """
        if not self.wants(step, group):
            return None
        shown = _best_to_worst(group.rollouts)
        row = PageRow(
            title=_caption(group),
            clips=tuple(fit_clip(_video(r), cell=CELL, max_frames=FRAMES) for r in shown),
            labels=tuple(map(_labels, shown)),
        )
        rows = self._keep(step, group.prompt.sample_id, row)
        folder = self._folder(step)
        frames = max(len(_video(rollout)) for rollout in shown)
        fps = _fps(group) * max(map(len, row.clips)) / frames  # a page has fewer frames, and lasts as long as the clips
        video = self._write_group(step, folder, group, row, fps=fps)
        grid = self._write_grids(step, folder, rows, fps=fps)
        self._append_index(step, group, caption=_caption(group), file=video, grid=grid)
        return video

    def write(self, stem: Path, group: RolloutGroup, place: int) -> Path:
        """Write one clip in its own size to `stem`.mp4, or an image to `stem`.png, and return the file.

        Raises:
            ValueError: the rollout has no `media["video"]`.
        """
        return _write_video(stem, _video(group.rollouts[place]), fps=_fps(group))

    def _write_group(self, step: int, folder: Path, group: RolloutGroup, row: PageRow, *, fps: float) -> Path:
        sample = group.prompt.sample_id
        pages = animation([row], heading=f"step {step} · sample {sample}")
        video = _write_video(folder / f"sample_{sample}", np.stack([np.asarray(page) for page in pages]), fps=fps)
        _write_json(folder / f"sample_{sample}.json", _record(step, group, caption=_caption(group)))
        return video

    def _write_grids(self, step: int, folder: Path, rows: Sequence[PageRow], *, fps: float) -> Path:
        """Write the grids of a step; return the animation, or the still grid for images."""
        heading = f"step {step}"
        still, grid = folder / f"grid{self._suffix}.png", contact_grid(rows, heading=heading)
        _replace(still, lambda path: grid.save(path, format="PNG"))
        if max(len(clip) for row in rows for clip in row.clips) == 1:
            return still
        running, video = still.with_suffix(".gif"), as_gif(animation(rows, heading=heading), fps=fps)
        _replace(running, lambda path: path.write_bytes(video))
        return running


class AnswerGallery(_Steps[Question]):
    """Writes a limited number of groups per step whose prompts show pictures or videos: the media beside the answers.

    gallery = AnswerGallery(run_dir / "media", question=question_of, groups_per_step=2)
    """

    of_rollouts = False

    def __init__(
        self,
        directory: Path,
        *,
        question: Callable[[RolloutGroup], str],
        groups_per_step: int = 2,
        every_steps: int = 1,
        name: str = "",
    ) -> None:
        """question: returns the text of a group's prompt."""
        super().__init__(directory, groups_per_step=groups_per_step, every_steps=every_steps, name=name)
        self._question = question

    def wants(self, step: int, group: RolloutGroup) -> bool:
        return bool(group.media) and super().wants(step, group)

    def save(self, step: int, group: RolloutGroup) -> Path | None:
        """Write a scored group and return the image of its prompt's media.

        None if the step needs no more groups, or the prompt has no media, or they cannot be read again.
        """
        if not self.wants(step, group):
            return None
        try:
            media = [media if media.ndim == 4 else media[None] for media in group.rollouts[0].media.values()]
        except MediaError as error:
            log.warning("sample %d is not in the gallery: %s", group.prompt.sample_id, error.reason)
            return None
        question, shown = self._question(group), _best_to_worst(group.rollouts)
        clips = [fit_clip(clip, cell=PROMPT_CELL, max_frames=PROMPT_FRAMES) for clip in media]
        row = Question(
            text=question,
            pictures=tuple(frame for clip in clips for frame in clip),
            answers=tuple((_labels(rollout), rollout.text) for rollout in shown),
        )
        rows, folder, sample = self._keep(step, group.prompt.sample_id, row), self._folder(step), group.prompt.sample_id
        file, grid = folder / f"sample_{sample}.png", folder / f"grid{self._suffix}.png"
        pictures, page = beside(row.pictures), answer_grid(rows, heading=f"step {step}")
        _replace(file, lambda path: pictures.save(path, format="PNG"))
        _replace(grid, lambda path: page.save(path, format="PNG"))
        record = _record(step, group, caption=question)
        for line, rollout in zip(record["rollouts"], group.rollouts, strict=True):
            line["response"] = rollout.text
        _write_json(file.with_suffix(".json"), {**record, "prompt_media": dict(group.media)})
        self._append_index(step, group, caption=question, file=file, grid=grid)
        return file

    def write(self, stem: Path, group: RolloutGroup, place: int) -> Path:
        raise AssertionError("rollouts of text have no media of their own")


def _best_to_worst(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts, highest reward first; of more than `ROLLOUTS` those of evenly spaced ranks."""
    ranked = sorted(rollouts, key=lambda rollout: -rollout.reward)
    chosen = np.linspace(0, len(ranked) - 1, min(ROLLOUTS, len(ranked))).round().astype(int)
    return [ranked[rank] for rank in chosen]


def _video(rollout: Rollout) -> np.ndarray:
    video = rollout.media.get("video")
    if video is None or video.dtype != np.uint8 or video.ndim != 4 or video.shape[-1] != 3 or 0 in video.shape:
        raise ValueError('a gallery shows rollout.media["video"], uint8 [F, H, W, 3]; this rollout has none')
    return video


def _caption(group: RolloutGroup) -> str:
    caption = group.prompt.row.get("caption")
    return caption if isinstance(caption, str) and caption else group.prompt_text or "(no caption)"


def _fps(group: RolloutGroup) -> float:
    fps = group.prompt.row.get("fps")
    return float(fps) if isinstance(fps, int | float) and fps > 0 else FPS


def _labels(rollout: Rollout) -> tuple[str, ...]:
    """The reward, then its parts if there are several, or a single one with another value."""
    parts = rollout.reward_breakdown
    alone = len(parts) == 1 and math.isclose(next(iter(parts.values())), rollout.reward)
    return (_number(rollout.reward), *(() if alone else (f"{name} {_number(value)}" for name, value in parts.items())))


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")


def _record(step: int, group: RolloutGroup, *, caption: str) -> dict[str, Any]:
    rollouts = [
        {
            "reward": finite(rollout.reward),
            "rewards": {name: finite(value) for name, value in rollout.reward_breakdown.items()},
            "advantage": finite(rollout.advantage),
            "versions": [int(rollout.versions.min()), int(rollout.versions.max())] if rollout.num_terms else [],
        }
        for rollout in group.rollouts
    ]
    return {"step": step, "sample": group.prompt.sample_id, "caption": caption, "rollouts": rollouts}


def _write_video(stem: Path, frames: np.ndarray, *, fps: float) -> Path:
    """Write `stem`.mp4, or `stem`.png for a single frame."""
    if len(frames) == 1:
        path = stem.with_suffix(".png")
        _replace(path, lambda temporary: Image.fromarray(frames[0]).save(temporary, format="PNG"))
    else:
        path = stem.with_suffix(".mp4")
        _replace(path, lambda temporary: write_video(temporary, frames, fps=fps))
    return path


def _write_json(path: Path, record: dict[str, Any]) -> None:
    text = json.dumps(record, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
    _replace(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically, so that viewers never read a partial one."""
    temporary = path.with_name(f".{path.stem}.tmp{path.suffix}")
    write(temporary)
    temporary.replace(path)


def write_video(path: str | Path, video: np.ndarray, *, fps: float) -> None:
    """Write uint8 [F, H, W, 3] as H.264. Odd heights and widths keep full colour resolution, in larger files."""
    frames, height, width, channels = video.shape
    assert video.dtype == np.uint8 and channels == 3 and frames, f"{video.dtype} {video.shape} is no video"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001), options={"crf": "17"})
        stream.height, stream.width = height, width
        stream.pix_fmt = "yuv444p" if height % 2 or width % 2 else "yuv420p"
        for image in video:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")))
        container.mux(stream.encode())
