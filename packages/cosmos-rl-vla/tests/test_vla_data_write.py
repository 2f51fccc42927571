"""Datasets in LeRobot's format, written."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.data.lerobot import read_dataset
from cosmos_rl_vla.data.recording.files import FrameFiles
from cosmos_rl_vla.data.recording.writer import Demonstration, DemoWriter, ImageStats, number_stats


def writer(path, **keys):
    return DemoWriter(path, **{"fps": 5, "cameras": {"top": (16, 16)}, "state_dim": 2, "action_dim": 1, **keys})


def episode(length, *, task="go", level=7):
    return Demonstration(
        task=task,
        images={"top": np.full((length, 16, 16, 3), level, np.uint8)},
        states=np.zeros((length, 2), np.float32),
        actions=np.ones((length, 1), np.float32),
    )


def test_the_description_says_what_there_is(tmp_path):
    with writer(tmp_path / "demos", stored="video", robot="arm") as demos:
        for length, task in ((3, "go"), (2, "stop"), (4, "go")):
            demos.add(episode(length, task=task))
    info = json.loads((tmp_path / "demos/meta/info.json").read_text())
    assert (info["codebase_version"], info["robot_type"], info["fps"]) == ("v3.0", "arm", 5)
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (3, 9, 2)
    assert info["features"]["observation.images.top"]["shape"] == [16, 16, 3]
    dataset = read_dataset(tmp_path / "demos")
    assert dataset.tasks == {0: "go", 1: "stop"}
    assert [(found.length, found.tasks) for found in dataset.episodes] == [(3, ("go",)), (2, ("stop",)), (4, ("go",))]
    starts = [found.videos["observation.images.top"].start_s for found in dataset.episodes]
    np.testing.assert_allclose(starts, [0, 0.6, 1.0])


def test_tasks_are_indexed_by_their_words_as_pandas_would_write_them(tmp_path):
    with writer(tmp_path / "demos") as demos:
        demos.add(episode(1, task="go"))
    metadata = json.loads(pq.read_schema(tmp_path / "demos/meta/tasks.parquet").metadata[b"pandas"])
    assert metadata["index_columns"] == ["__index_level_0__"]


def test_an_interrupted_writing_leaves_a_marker_and_no_dataset(tmp_path):
    with pytest.raises(KeyboardInterrupt), writer(tmp_path / "demos") as demos:
        demos.add(episode(3))
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["demos.partial"]
    with pytest.raises(UserError, match=r"demos\.partial is left of an interrupted recording"):
        read_dataset(tmp_path / "demos")
    with writer(tmp_path / "demos") as demos:
        demos.add(episode(3))
    assert [path.name for path in tmp_path.iterdir()] == ["demos"]


def test_a_dataset_is_never_written_over(tmp_path):
    (tmp_path / "demos").mkdir()
    (tmp_path / "demos/kept").touch()
    with pytest.raises(UserError, match=r"demos exists: name another directory, or remove it"):
        writer(tmp_path / "demos")


def test_a_dataset_without_episodes_is_not_made(tmp_path):
    with pytest.raises(UserError, match="no episode to write"), writer(tmp_path / "demos"):
        pass
    assert not (tmp_path / "demos").exists()


def test_an_episode_of_other_shapes_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"an episode of shapes"), writer(tmp_path / "demos", action_dim=2) as demos:
        demos.add(episode(3))


def test_a_file_is_full_at_its_size_and_keeps_episodes_whole(tmp_path):
    import pyarrow as pa

    table = pa.table({"x": np.arange(100)})
    files = FrameFiles(lambda number: tmp_path / f"{number}.parquet", max_bytes=2 * table.nbytes)
    assert [files.add(table) for _ in range(5)] == [0, 0, 1, 1, 2]
    files.close()
    assert [pq.read_metadata(tmp_path / f"{number}.parquet").num_rows for number in range(3)] == [200, 200, 100]


def test_statistics_of_numbers():
    stats = number_stats(np.array([[0.0, 5.0], [1.0, 5.0], [2.0, 5.0]]))
    assert (stats["min"], stats["max"], stats["mean"], stats["q50"]) == ([0, 5], [2, 5], [1, 5], [1, 5])
    np.testing.assert_allclose(stats["std"], [(2 / 3) ** 0.5, 0])
    assert stats["count"] == [3]


def test_statistics_of_pictures_are_those_of_all_pixels():
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 9, 3), np.uint8)
    stats = ImageStats()
    for image in images:
        stats.add(image[None])
    found = {name: np.array(value) for name, value in stats.result().items()}
    pixels = images.reshape(-1, 3) / 255
    assert found["mean"].shape == (3, 1, 1) and found["count"].tolist() == [4]
    np.testing.assert_allclose(found["mean"].ravel(), pixels.mean(0))
    np.testing.assert_allclose(found["std"].ravel(), pixels.std(0))
    for name, share in (("min", 0), ("q10", 0.1), ("q50", 0.5), ("max", 1)):
        np.testing.assert_allclose(found[name].ravel(), np.quantile(pixels, share, axis=0, method="inverted_cdf"))
