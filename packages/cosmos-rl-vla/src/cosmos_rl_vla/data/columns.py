"""The numeric columns of a dataset, in memory: some hundred megabytes for a million frames of two robot arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.data.lerobot import EpisodeAt
from cosmos_rl_vla.data.parquet import AGAIN, read_parquet, vectors, whole_numbers

if TYPE_CHECKING:
    import pyarrow as pa

_OWN = ("episode_index", "task_index", "timestamp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """N frames of several episodes, concatenated."""

    numbers: Mapping[str, np.ndarray]
    """[N, n] float32 by column."""
    seconds: np.ndarray
    """[N] float64: time since the episode's beginning."""
    task_index: np.ndarray
    """[N] int64."""
    first: Mapping[int, int]
    """Index of an episode's first frame in these arrays, by episode number."""
    first_in_file: Mapping[int, int]
    """Index of its first frame in its parquet file."""


def read_frames(episodes: Sequence[EpisodeAt], sizes: Mapping[str, int]) -> Frames:
    """Read the columns of `sizes`, {name: numbers per frame}.

    Raises UserError for a column that is missing or of another type, and for an incomplete episode.
    """
    by_file: dict[Path, list[EpisodeAt]] = {}
    for episode in episodes:
        by_file.setdefault(episode.data, []).append(episode)
    parts: list[_Part] = []
    for path, held in by_file.items():
        table = read_parquet(path, [*_OWN, *sizes])
        runs = _runs(whole_numbers(table, "episode_index", origin=path))
        for episode in held:
            start, stop = runs.get(episode.number, (0, 0))
            if stop - start != episode.length:
                raise UserError(
                    f"{path}: column 'episode_index' has {stop - start} frames of episode {episode.number}, meta/ has "
                    f"{episode.length}; {AGAIN}"
                )
            parts.append(_Part.of(table.slice(start, stop - start), sizes, number=episode.number, at=start, path=path))
    ends = np.cumsum([len(part.seconds) for part in parts])
    return Frames(
        numbers={column: np.concatenate([part.numbers[column] for part in parts]) for column in sizes},
        seconds=np.concatenate([part.seconds for part in parts]),
        task_index=np.concatenate([part.task_index for part in parts]),
        first={part.episode: int(end) - len(part.seconds) for part, end in zip(parts, ends)},
        first_in_file={part.episode: part.at for part in parts},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The frames of one episode."""

    episode: int
    at: int
    numbers: Mapping[str, np.ndarray]
    seconds: np.ndarray
    task_index: np.ndarray

    @classmethod
    def of(cls, table: pa.Table, sizes: Mapping[str, int], *, number: int, at: int, path: Path) -> _Part:
        return cls(
            episode=number,
            at=at,
            numbers={name: vectors(table, name, size=size, origin=path) for name, size in sizes.items()},
            seconds=vectors(table, "timestamp", size=1, origin=path)[:, 0].astype(np.float64),
            task_index=whole_numbers(table, "task_index", origin=path),
        )


def _runs(numbers: np.ndarray) -> dict[int, tuple[int, int]]:
    """Return {number: (start, stop)} of each run of equal numbers."""
    edges = np.flatnonzero(np.diff(numbers)) + 1
    starts, stops = [0, *edges.tolist()], [*edges.tolist(), len(numbers)]
    return {int(numbers[start]): (start, stop) for start, stop in zip(starts, stops) if stop > start}
