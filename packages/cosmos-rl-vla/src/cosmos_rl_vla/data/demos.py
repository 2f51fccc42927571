"""Demonstrations for imitation: a row is a frame, a sample its observation and the actions from it on.

    row {"episode", "frame", "task"} --> images, state, instruction, M actions with a mask, auxiliary targets

The last frames of an episode have fewer actions than M, and frames whose column `has_action` is false none: they train
the auxiliary targets alone. Statistics are measured exactly on the selected episodes; those of meta/stats.json are of
all episodes, averaged.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_rl_core.data.source import Faults
from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.config import VLADataConfig
from cosmos_rl_vla.data.images import Images
from cosmos_rl_vla.data.lerobot import EpisodeAt, Frames, LeRobotDataset, read_dataset, read_frames
from cosmos_rl_vla.normalise import Spread

HAS_ACTION = "has_action"
"""Column of flags of frames with an action; without it, all have one."""


class FrameRows(Sequence[Mapping[str, Any]]):
    """Every frame of some episodes: {"episode", "frame", "task"}."""

    def __init__(self, episodes: Sequence[EpisodeAt]) -> None:
        self._episodes = episodes
        self._ends = list(accumulate(episode.length for episode in episodes))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        number = range(len(self))[place]
        at = bisect_right(self._ends, number)
        episode = self._episodes[at]
        frame = number - (self._ends[at] - episode.length)
        return {"episode": episode.number, "frame": frame, "task": "; ".join(episode.tasks)}


def demonstrated_rows(data: VLADataConfig) -> FrameRows:
    """Return the rows of a dataset, from its meta files alone. Raises UserError for a damaged dataset."""
    return FrameRows(read_dataset(data.demos).select(data.episodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationBatch:
    """B samples."""

    images: np.ndarray
    """uint8 [B, cameras, H, W, 3]; black where they cannot be read."""
    states: np.ndarray
    """[B, n] float32, as recorded."""
    instructions: tuple[str, ...]
    """[B]"""
    actions: np.ndarray
    """[B, M, D] float32, as recorded; 0 where masked."""
    action_mask: np.ndarray
    """[B, M] bool: demonstrated actions."""
    aux: np.ndarray | None
    """[B, n] float32: auxiliary targets of mean 0 and std 1, NaN where missing; None without columns."""
    unreadable: Mapping[int, str]
    """Errors of images that could not be read, by index in the batch."""


class Demonstrations:
    """An open dataset. Any thread may read samples."""

    def __init__(self, data: VLADataConfig, dataset: LeRobotDataset, frames: Frames, images: Images) -> None:
        self.data = data
        self._dataset, self._frames, self._images = dataset, frames, images
        numbers = frames.numbers
        self._actions, self._states = numbers[data.action_column], numbers[data.state_column]
        self._shown = numbers[HAS_ACTION][:, 0] > 0 if HAS_ACTION in numbers else np.ones(len(self._actions), bool)
        self._aux = _standardised([numbers[column] for column in data.aux_columns])
        self._lengths = {episode.number: episode.length for episode in dataset.select(data.episodes)}
        self.stats = ActionStats(
            action=_measured(self._actions[self._shown], column=data.action_column, path=dataset.path),
            state=_measured(self._states, column=data.state_column, path=dataset.path),
        )
        """Statistics of actions and states of these episodes."""
        shown = self._actions[self._shown]
        self.action_bounds = shown.min(axis=0), shown.max(axis=0)
        """The least and the most of these actions, [D] each."""
        self.faults = Faults("have no images")
        """Rows whose images could not be read."""
        self.instructions = tuple(dict.fromkeys(dataset.tasks[int(task)] for task in np.unique(frames.task_index)))
        """Instructions of these episodes."""

    @classmethod
    def open(cls, data: VLADataConfig) -> Demonstrations:
        """Read all numbers of [data] demos, and check its image files.

        Raises UserError, with file and key, for a missing or damaged file, and for a column that is missing or of
        another type.
        """
        dataset = read_dataset(data.demos)
        episodes = dataset.select(data.episodes)
        keys = {data.state_column: "state_column", data.action_column: "action_column"}
        keys |= dict.fromkeys(data.aux_columns, "aux_columns")
        sizes = {column: _vector_size(dataset, column, key=key) for column, key in keys.items()}
        if HAS_ACTION in dataset.features:
            sizes[HAS_ACTION] = 1
        frames = read_frames(episodes, sizes)
        if unknown := set(np.unique(frames.task_index).tolist()) - set(dataset.tasks):
            raise UserError(f"{dataset.path}: frames of task_index {min(unknown)}, which meta/tasks does not name")
        images = Images(
            dataset,
            data.cameras or dataset.cameras,
            episodes=episodes,
            frames=frames,
            cache_bytes=data.cache_bytes,
        )
        return cls(data, dataset, frames, images)

    @property
    def aux_dim(self) -> int:
        """Dimensions of a sample's auxiliary target."""
        return 0 if self._aux is None else self._aux.shape[1]

    def read(self, rows: Sequence[Mapping[str, Any]], *, horizon: int) -> DemonstrationBatch:
        """Return the samples of rows, each with up to `horizon` actions from its frame on."""
        places = np.array([self._frames.first[row["episode"]] + row["frame"] for row in rows])
        left = np.array([self._lengths[row["episode"]] - row["frame"] for row in rows])
        ahead = np.arange(horizon)
        chunks = places[:, None] + np.minimum(ahead, left[:, None] - 1)
        mask = (ahead < left[:, None]) & self._shown[chunks]
        images, unreadable = self._images.read([(row["episode"], row["frame"]) for row in rows])
        return DemonstrationBatch(
            images=images,
            states=self._states[places],
            instructions=tuple(self._dataset.tasks[int(task)] for task in self._frames.task_index[places]),
            actions=np.where(mask[..., None], self._actions[chunks], 0).astype(np.float32),
            action_mask=mask,
            aux=None if self._aux is None else self._aux[places],
            unreadable=unreadable,
        )


def _vector_size(dataset: LeRobotDataset, column: str, *, key: str) -> int:
    """Return the size of a column's vectors. Raises UserError for a column of another type."""
    feature = dataset.feature(column, key=key)
    try:
        kind = np.dtype(feature.dtype).kind
    except TypeError:
        kind = ""
    if kind not in tuple("biuf") or len(feature.shape) != 1:
        raise UserError(
            f"{dataset.path / 'meta/info.json'}: {column!r}, which [data] {key} names, is {feature.dtype} of shape "
            f"{list(feature.shape)}; must be a vector of numbers"
        )
    return feature.shape[0]


def _measured(values: np.ndarray, *, column: str, path: Path) -> Spread:
    if not len(values):
        raise UserError(f"{path}: no frame has an action in column {column!r}: there is nothing to imitate")
    if not np.isfinite(values).all():
        raise UserError(f"{path}: column {column!r} holds numbers that are not finite, or nulls")
    return Spread.of(values, name=f"{path}, column {column!r}")


def _standardised(columns: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return all columns [N, n] with mean 0 and std 1 over the frames that have them; 0 for constant numbers."""
    if not columns:
        return None
    values = np.concatenate(columns, axis=1)
    is_finite = np.isfinite(values)
    count = np.maximum(is_finite.sum(0), 1)
    mean = np.where(is_finite, values, 0).sum(0, dtype=np.float64) / count
    std = np.sqrt(np.where(is_finite, (values - mean) ** 2, 0).sum(0) / count)
    return np.where(is_finite, (values - mean) / np.where(std > 1e-6, std, 1), np.nan).astype(np.float32)
