"""A dataset in LeRobot's format: meta files (features, episodes and their files), and the numeric columns of frames.

            v2.0, v2.1                                v3.0
info        meta/info.json                            the same
tasks       meta/tasks.jsonl                          meta/tasks.parquet
episodes    meta/episodes.jsonl                       meta/episodes/chunk-*/file-*.parquet
frames      a parquet file per episode                parquet files of many episodes
images      an mp4 per episode and camera, or         mp4 files of many episodes, or
            PNG in the parquet                        PNG in the parquet

Free of torch: the controller counts frames with this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.json_files import parse_json, read_lines
from cosmos_rl_vla.data.parquet import AGAIN, read_parquet, vectors, whole_numbers

if TYPE_CHECKING:
    import pyarrow as pa


VERSIONS = ("v2.0", "v2.1", "v3.0")
PARTIAL = ".partial"
"""Suffix of the name of a directory that is being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A column's entry in meta/info.json."""

    dtype: str
    """numpy's name, "string", "image" (in the parquet) or "video"."""
    shape: tuple[int, ...]
    is_depth: bool = False
    """An image whose pixels are distances."""

    @property
    def is_image(self) -> bool:
        return self.dtype in ("image", "video")

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of an image; channels may be first or last."""
        height, width = self.shape[:2] if self.shape[-1] in (1, 3, 4) else self.shape[1:]
        return height, width


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoAt:
    """Location of one camera's video of one episode."""

    path: Path
    start_s: float
    """Time of the episode's first frame in that file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeAt:
    """One episode and the locations of its files."""

    number: int
    length: int
    """Number of frames."""
    tasks: tuple[str, ...]
    """Its instructions."""
    data: Path
    """The parquet file with its frames."""
    videos: Mapping[str, VideoAt] = field(default_factory=dict)
    """By camera, for cameras stored as videos."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeRobotDataset:
    """Contents of a dataset's meta files."""

    path: Path
    fps: float
    features: Mapping[str, Feature]
    tasks: Mapping[int, str]
    """Instructions by task_index."""
    episodes: tuple[EpisodeAt, ...]
    """In the order of their numbers."""

    @property
    def cameras(self) -> tuple[str, ...]:
        """Image columns, in the order of meta/info.json."""
        return tuple(name for name, feature in self.features.items() if feature.is_image)

    def feature(self, column: str, *, key: str) -> Feature:
        """Return the feature of `column`, which the recipe's `key` names. Raises UserError for an unknown column."""
        if column not in self.features:
            raise UserError(
                f"{self.path / 'meta/info.json'}: no feature {column!r}, which [data] {key} names; it has "
                f"{', '.join(self.features)}"
            )
        return self.features[column]

    def select(self, numbers: Sequence[int]) -> tuple[EpisodeAt, ...]:
        """Return episodes by number; without any, all. Raises UserError for an unknown number."""
        if not numbers:
            return self.episodes
        known = {episode.number: episode for episode in self.episodes}
        if missing := [number for number in numbers if number not in known]:
            raise UserError(f"[data] episodes: {self.path} has no episode {missing[0]}; it has {len(known)}")
        return tuple(known[number] for number in numbers)


def read_dataset(path: str | Path) -> LeRobotDataset:
    """Read a dataset's meta files. Raises UserError with the file and the wrong key."""
    path = Path(path).expanduser()
    info, where = _info(path), path / "meta/info.json"
    version = info["codebase_version"]
    if version not in VERSIONS:
        raise UserError(f"{where}: codebase_version {version!r}; supported are {', '.join(VERSIONS)}. lerobot converts")
    features = {name: _feature(name, entry, where=where) for name, entry in info["features"].items()}
    layout = _Layout(path=path, info=info, videos=[name for name in features if features[name].dtype == "video"])
    try:
        tasks, episodes = (_tasks_v3, _episodes_v3) if version == "v3.0" else (_tasks_v2, _episodes_v2)
        dataset = LeRobotDataset(
            path=path,
            fps=float(info["fps"]),
            features=features,
            tasks=tasks(path),
            episodes=tuple(sorted(episodes(layout), key=lambda episode: episode.number)),
        )
    except KeyError as error:
        raise UserError(f"{path / 'meta'} has no {error} of tasks or episodes; {AGAIN}") from error
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"{path / 'meta'} has a value of the wrong type in tasks or episodes: {error}") from error
    if not dataset.episodes:
        raise UserError(f"{path} has no episodes; {AGAIN}")
    return dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Paths of a dataset's files."""

    path: Path
    info: Mapping[str, Any]
    videos: Sequence[str]

    def data(self, **place: int) -> Path:
        return self.path / self.info["data_path"].format(**place)

    def video(self, camera: str, **place: int) -> Path:
        return self.path / self.info["video_path"].format(video_key=camera, **place)


def _info(path: Path) -> dict[str, Any]:
    where = path / "meta/info.json"
    if not where.is_file():
        partial = path.with_name(path.name + PARTIAL)
        hint = f"; {partial} is left of an interrupted recording: record it again" if partial.is_dir() else ""
        raise UserError(f"{path} is not a dataset in LeRobot's format: {where} does not exist{hint}")
    info = _json(where.read_bytes(), where=where)
    keys = ["codebase_version", "fps", "features", "data_path"]
    for key in keys:
        if key not in info:
            raise UserError(f"{where} has no {key!r}; {AGAIN}")
    if not info.get("video_path") and any(entry.get("dtype") == "video" for entry in info["features"].values()):
        raise UserError(f"{where} has videos, but no 'video_path'; {AGAIN}")
    return info


def _feature(name: str, entry: Mapping[str, Any], *, where: Path) -> Feature:
    if "dtype" not in entry or "shape" not in entry:
        raise UserError(f"{where}: feature {name!r} has no dtype or no shape; {AGAIN}")
    described = [entry.get(key) or {} for key in ("info", "video_info")]
    is_depth = any(about.get(key) for about in described for key in ("is_depth_map", "video.is_depth_map"))
    feature = Feature(dtype=entry["dtype"], shape=tuple(entry["shape"]), is_depth=is_depth)
    if feature.is_image and len(feature.shape) != 3:
        raise UserError(f"{where}: feature {name!r} of shape {list(feature.shape)}; an image has height, width, 3")
    return feature


def _json(text: bytes, *, where: Path | str) -> dict[str, Any]:
    try:
        value = parse_json(text, where=f"{where}", finite=False)
    except UserError as error:
        raise UserError(f"{error}, as after an interruption; {AGAIN}") from None
    if not isinstance(value, dict):
        raise UserError(f"{where} is not a JSON object; {AGAIN}")
    return value


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise UserError(f"{path} does not exist: the dataset is incomplete; {AGAIN}")
    with path.open("rb") as file:
        return [_json(line, where=where) for where, line in read_lines(file, name=str(path))]


def _tasks_v2(path: Path) -> dict[int, str]:
    return {int(line["task_index"]): str(line["task"]) for line in _lines(path / "meta/tasks.jsonl")}


def _episodes_v2(layout: _Layout) -> list[EpisodeAt]:
    episodes = []
    for line in _lines(layout.path / "meta/episodes.jsonl"):
        number = int(line["episode_index"])
        place = {"episode_index": number, "episode_chunk": number // int(layout.info.get("chunks_size", 1000))}
        videos = {camera: VideoAt(path=layout.video(camera, **place), start_s=0.0) for camera in layout.videos}
        episodes.append(
            EpisodeAt(
                number=number,
                length=int(line["length"]),
                tasks=tuple(line["tasks"]),
                data=layout.data(**place),
                videos=videos,
            )
        )
    return episodes


def _tasks_v3(path: Path) -> dict[int, str]:
    from cosmos_rl_vla.data.parquet import open_parquet

    where = path / "meta/tasks.parquet"
    with open_parquet(where) as file:
        named = [name for name in ("task", "__index_level_0__") if name in file.schema_arrow.names]
    if not named:
        raise UserError(f"{where} has no column 'task'; {AGAIN}")
    table = read_parquet(where, ["task_index", named[0]])
    return dict(zip(table["task_index"].to_pylist(), table[named[0]].to_pylist()))


def _episodes_v3(layout: _Layout) -> list[EpisodeAt]:
    files = sorted((layout.path / "meta/episodes").glob("*/[!.]*.parquet"))
    if not files:
        raise UserError(f"{layout.path / 'meta/episodes'} has no parquet file: the dataset is incomplete; {AGAIN}")
    columns = ["episode_index", "length", "tasks", "data/chunk_index", "data/file_index"]
    for camera in layout.videos:
        columns += [f"videos/{camera}/{name}" for name in ("chunk_index", "file_index", "from_timestamp")]
    return [_episode_v3(layout, row) for file in files for row in read_parquet(file, columns).to_pylist()]


def _episode_v3(layout: _Layout, row: Mapping[str, Any]) -> EpisodeAt:
    def place(prefix: str) -> dict[str, int]:
        return {name: row[f"{prefix}/{name}"] for name in ("chunk_index", "file_index")}

    videos = {
        camera: VideoAt(
            path=layout.video(camera, **place(f"videos/{camera}")), start_s=row[f"videos/{camera}/from_timestamp"]
        )
        for camera in layout.videos
    }
    return EpisodeAt(
        number=row["episode_index"],
        length=row["length"],
        tasks=tuple(row["tasks"]),
        data=layout.data(**place("data")),
        videos=videos,
    )


_OWN = ("episode_index", "frame_index", "task_index", "timestamp")


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
    for path, members in by_file.items():
        table = read_parquet(path, [*_OWN, *sizes])
        runs = _runs(whole_numbers(table, "episode_index", origin=path))
        for episode in members:
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
        if (np.diff(whole_numbers(table, "frame_index", origin=path)) <= 0).any():
            raise UserError(f"{path}: column 'frame_index' of episode {number} does not increase; {AGAIN}")
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
