"""Writes a dataset in LeRobot's format, v3.0: numbers in parquet, images in mp4 or, small ones, as PNG in the parquet.

    add(episode), ... --> DIR.partial/  -- close --> DIR/

The directory gets its final name when it is complete: after an interruption it is called `.partial`, and readers refuse
it.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.data.demos import HAS_ACTION
from cosmos_rl_vla.data.lerobot import PARTIAL
from cosmos_rl_vla.data.recording.files import FILES_PER_CHUNK, FrameFiles, VideoFiles

if TYPE_CHECKING:
    import pyarrow as pa

Stored = Literal["auto", "image", "video"]

STATE, ACTION = "observation.state", "action"
CAMERA = "observation.images."
"""Prefix of a camera's column."""
SMALL = 128 * 128
"""Maximum number of pixels of images that "auto" stores losslessly, as PNG."""

_DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
_MEGABYTES = {"data_files_size_in_mb": 100, "video_files_size_in_mb": 200}
_COUNTED = ("frame_index", "episode_index", "index", "task_index")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """An episode of T frames."""

    task: str
    """The instruction."""
    images: Mapping[str, np.ndarray]
    """uint8 [T, H, W, 3] by camera: the observation before each action."""
    states: np.ndarray
    """[T, n] float32."""
    actions: np.ndarray
    """[T, D] float32, in the simulator's units."""
    has_action: np.ndarray | None = None
    """[T] bool: frames with a demonstrated action; None: all."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """[T, n] float32 by name: further measurements."""


class DemoWriter:
    """Writes episodes one by one.

        with DemoWriter("demos", fps=10, cameras={"board": (32, 32)}, state_dim=2, action_dim=2) as writer:
            writer.add(demonstration)

    Files are in demos.partial until the end, when the directory is renamed.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        fps: int,
        cameras: Mapping[str, tuple[int, int]],
        state_dim: int,
        action_dim: int,
        columns: Mapping[str, int] | None = None,
        stored: Stored = "auto",
        robot: str = "",
    ) -> None:
        """Begin a dataset.

        Args:
            path: a directory that does not exist yet.
            fps: frames per second.
            cameras: height and width by name.
            columns: numbers per frame of further columns, by name.
            stored: format of images; "auto": up to `SMALL` pixels as PNG, others as video.

        Raises UserError if `path` exists.
        """
        self._path = Path(path).expanduser()
        self._partial = self._path.with_name(self._path.name + PARTIAL)
        if self._path.exists() and (not self._path.is_dir() or any(self._path.iterdir())):
            raise UserError(f"{self._path} exists: name another directory, or remove it")
        shutil.rmtree(self._partial, ignore_errors=True)  # of an interrupted recording
        self._partial.mkdir(parents=True)
        self._fps, self._robot = fps, robot
        self._vectors = {STATE: state_dim, ACTION: action_dim, **(columns or {})}
        self._cameras = {CAMERA + name: size for name, size in cameras.items()}
        self._as_video = {
            camera: stored == "video" or (stored == "auto" and size[0] * size[1] > SMALL)
            for camera, size in self._cameras.items()
        }
        self._data = FrameFiles(self._data_path, max_bytes=_MEGABYTES["data_files_size_in_mb"] * 2**20)
        self._videos = {camera: self._video_files(camera) for camera, video in self._as_video.items() if video}
        self._seen = {camera: ImageStats() for camera in self._cameras}
        self._numbers: dict[str, list[np.ndarray]] = {}
        self._episodes: list[dict[str, Any]] = []
        self._tasks: dict[str, int] = {}

    @property
    def num_episodes(self) -> int:
        """Number of episodes so far."""
        return len(self._episodes)

    @property
    def num_frames(self) -> int:
        """Number of frames so far."""
        return sum(row["length"] for row in self._episodes)

    def add(self, episode: Demonstration) -> None:
        """Write an episode. Raises ValueError for arrays of other shapes than the dataset's."""
        vectors = {STATE: episode.states, ACTION: episode.actions, **episode.columns}
        images = {CAMERA + name: video for name, video in episode.images.items()}
        length = self._check(vectors, images)
        shown = np.ones(length, bool) if episode.has_action is None else episode.has_action
        counted = self._counted(length, self._tasks.setdefault(episode.task, len(self._tasks)))
        row: dict[str, Any] = {"episode_index": self.num_episodes, "tasks": [episode.task], "length": length}
        row |= {"dataset_from_index": self.num_frames, "dataset_to_index": self.num_frames + length}
        for camera, files in self._videos.items():
            number, start_s = files.add(images[camera])
            row |= {f"videos/{camera}/{name}": index for name, index in _place(number).items()}
            row |= {f"videos/{camera}/from_timestamp": start_s}
            row |= {f"videos/{camera}/to_timestamp": start_s + length / self._fps}
        number = self._data.add(self._table(vectors, images, shown, counted))
        row |= {f"data/{name}": index for name, index in _place(number).items()}
        self._episodes.append(row | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0})
        for column, values in {**vectors, **counted, HAS_ACTION: shown}.items():
            self._numbers.setdefault(column, []).append(np.asarray(values).reshape(length, -1))
        for camera, video in images.items():
            self._seen[camera].add(video)

    def close(self) -> None:
        """Finish the dataset and give it its final name. Raises UserError without any episode."""
        self._close_files()
        if not self._episodes:
            raise UserError(f"{self._path}: no episode to write")
        import pyarrow as pa
        import pyarrow.parquet as pq

        meta = self._partial / "meta"
        (meta / "episodes/chunk-000").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(self._episodes), meta / "episodes/chunk-000/file-000.parquet")
        pq.write_table(_task_table(self._tasks), meta / "tasks.parquet")
        stats = {column: number_stats(np.concatenate(values)) for column, values in self._numbers.items()}
        stats |= {camera: seen.result() for camera, seen in self._seen.items()}
        (meta / "stats.json").write_text(json.dumps(stats, indent=4) + "\n")
        (meta / "info.json").write_text(json.dumps(self._info(), indent=4) + "\n")
        self._partial.replace(self._path)

    def __enter__(self) -> DemoWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._close_files()

    def _close_files(self) -> None:
        for files in (self._data, *self._videos.values()):
            files.close()

    def _check(self, vectors: Mapping[str, np.ndarray], images: Mapping[str, np.ndarray]) -> int:
        """Return the number of frames of an episode."""
        length = len(vectors[STATE])
        expected: dict[str, tuple[int, ...]] = {column: (length, size) for column, size in self._vectors.items()}
        expected |= {camera: (length, *size, 3) for camera, size in self._cameras.items()}
        given = {name: array.shape for name, array in (*vectors.items(), *images.items())}
        if not length or given != expected:
            raise ValueError(f"an episode of shapes {given}: needs {expected} with at least one frame")
        return length

    def _counted(self, length: int, task: int) -> dict[str, np.ndarray]:
        frames = np.arange(length)
        arrays = (frames, np.full(length, self.num_episodes), frames + self.num_frames, np.full(length, task))
        return {"timestamp": (frames / self._fps).astype(np.float32), **dict(zip(_COUNTED, arrays))}

    def _table(
        self,
        vectors: Mapping[str, np.ndarray],
        images: Mapping[str, np.ndarray],
        shown: np.ndarray,
        counted: Mapping[str, np.ndarray],
    ) -> pa.Table:
        import pyarrow as pa

        columns: dict[str, Any] = {
            camera: pa.array([{"bytes": _png(image), "path": None} for image in video], _image_type())
            for camera, video in images.items()
            if not self._as_video[camera]
        }
        for column, values in vectors.items():
            flat = pa.array(values.astype(np.float32).reshape(-1))
            single = values.shape[1] == 1  # scalars in lerobot
            columns[column] = flat if single else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
        return pa.table({**columns, HAS_ACTION: pa.array(shown), **counted})

    def _info(self) -> dict[str, Any]:
        features: dict[str, dict[str, Any]] = {
            camera: {
                "dtype": "video" if self._as_video[camera] else "image",
                "shape": [*size, 3],
                "names": ["height", "width", "channels"],
            }
            for camera, size in self._cameras.items()
        }
        features |= {column: _feature("float32", size) for column, size in self._vectors.items()}
        features |= {HAS_ACTION: _feature("bool"), "timestamp": _feature("float32")}
        features |= {name: _feature("int64") for name in _COUNTED}
        return {
            "codebase_version": "v3.0",
            "robot_type": self._robot,
            "total_episodes": self.num_episodes,
            "total_frames": self.num_frames,
            "total_tasks": len(self._tasks),
            "chunks_size": FILES_PER_CHUNK,
            **_MEGABYTES,
            "fps": self._fps,
            "splits": {"train": f"0:{self.num_episodes}"},
            "data_path": _DATA,
            "video_path": _VIDEO if self._videos else None,
            "features": features,
        }

    def _data_path(self, number: int) -> Path:
        return self._partial / _DATA.format(**_place(number))

    def _video_files(self, camera: str) -> VideoFiles:
        def path(number: int) -> Path:
            return self._partial / _VIDEO.format(video_key=camera, **_place(number))

        max_bytes = _MEGABYTES["video_files_size_in_mb"] * 2**20
        return VideoFiles(path, size=self._cameras[camera], fps=self._fps, max_bytes=max_bytes)


def _place(number: int) -> dict[str, int]:
    chunk, file = divmod(number, FILES_PER_CHUNK)
    return {"chunk_index": chunk, "file_index": file}


def _feature(dtype: str, size: int = 1) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [size], "names": None}


def _image_type() -> Any:
    import pyarrow as pa

    return pa.struct({"bytes": pa.binary(), "path": pa.string()})


def _png(image: np.ndarray) -> bytes:
    from PIL import Image

    written = io.BytesIO()
    Image.fromarray(image).save(written, format="png", compress_level=1)
    return written.getvalue()


def _task_table(tasks: Mapping[str, int]) -> pa.Table:
    """Return the tasks in pandas' format: with the instruction as the index, by which lerobot finds them."""
    import pyarrow as pa

    index = "__index_level_0__"
    kinds = {"task_index": ("int64", "int64", "task_index"), index: ("unicode", "object", None)}
    described = [
        {"name": name, "field_name": column, "pandas_type": kind, "numpy_type": numpy_kind, "metadata": None}
        for column, (kind, numpy_kind, name) in kinds.items()
    ]
    pandas = {"index_columns": [index], "column_indexes": [], "columns": described, "pandas_version": "2.0.0"}
    table = pa.table({"task_index": pa.array(tasks.values(), pa.int64()), index: pa.array(tasks.keys(), pa.string())})
    return table.replace_schema_metadata({b"pandas": json.dumps(pandas).encode()})


_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_LEVELS = 256


def number_stats(values: np.ndarray) -> dict[str, Any]:
    """Return min, max, mean, std and percentiles [n] of the finite values in [N, n], and their count."""
    values = values.astype(np.float64)
    stats = {name: np.nanquantile(values, share, axis=0) for name, share in _QUANTILES.items()}
    stats |= {"min": np.nanmin(values, axis=0), "max": np.nanmax(values, axis=0)}
    stats |= {"mean": np.nanmean(values, axis=0), "std": np.nanstd(values, axis=0)}
    return {name: number.tolist() for name, number in stats.items()} | {"count": [len(values)]}


class ImageStats:
    """Histograms of the levels of each colour, from which all statistics follow exactly."""

    def __init__(self) -> None:
        self._counts = np.zeros((3, _LEVELS), np.int64)
        self._images = 0

    def add(self, images: np.ndarray) -> None:
        """Count uint8 [N, H, W, 3]."""
        self._images += len(images)
        for channel, counts in enumerate(self._counts):
            counts += np.bincount(images[..., channel].reshape(-1), minlength=_LEVELS)

    def result(self) -> dict[str, Any]:
        """Return the statistics of each colour [3, 1, 1] in [0, 1], and the number of images."""
        levels = np.arange(_LEVELS) / (_LEVELS - 1)
        shares = self._counts / self._counts.sum(1, keepdims=True)
        mean = shares @ levels
        stats = {"mean": mean, "std": np.sqrt(np.maximum(shares @ levels**2 - mean**2, 0))}
        below = np.cumsum(shares, axis=1)
        for name, share in {**_QUANTILES, "max": 1.0}.items():
            stats[name] = levels[(below >= share - 1e-12).argmax(1)]
        stats["min"] = levels[(self._counts > 0).argmax(1)]
        return {name: number.reshape(3, 1, 1).tolist() for name, number in stats.items()} | {"count": [self._images]}
