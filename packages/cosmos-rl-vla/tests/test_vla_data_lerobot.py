"""Datasets in LeRobot's format, read."""

import json
import subprocess
import sys

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.config import VLADataConfig
from cosmos_rl_vla.data.demos import Demonstrations, demonstrated_rows
from cosmos_rl_vla.data.lerobot import read_dataset
from cosmos_rl_vla.data.recording.writer import Demonstration, DemoWriter

CAMERA = "observation.images.top"
LENGTHS = (7, 4, 5)


def picture(episode, frame):
    """32x48, flat: videos keep it."""
    return np.full((32, 48, 3), (40 * episode, 30 * frame, 90), np.uint8)


def demonstration(episode, length):
    frames = np.arange(length, dtype=np.float32)
    return Demonstration(
        task=f"task {episode % 2}",
        images={"top": np.stack([picture(episode, frame) for frame in range(length)])},
        states=np.stack([frames, np.full(length, episode, np.float32)], 1),
        actions=np.stack([100 * episode + frames], 1),
        columns={"cup": np.stack([frames, frames**2], 1)},
    )


@pytest.fixture(params=["image", "video"])
def written(tmp_path, request):
    with DemoWriter(
        tmp_path / "demos",
        fps=10,
        cameras={"top": (32, 48)},
        state_dim=2,
        action_dim=1,
        columns={"cup": 2},
        stored=request.param,
    ) as writer:
        for episode, length in enumerate(LENGTHS):
            writer.add(demonstration(episode, length))
    return tmp_path / "demos"


def write_v21(path):
    """A dataset as lerobot 0.3 lays it out: a parquet and an mp4 an episode, JSON lines beside them."""
    feature = {"dtype": "float32", "shape": [2], "names": None}
    count = {"dtype": "int64", "shape": [1], "names": None}
    info = {
        "codebase_version": "v2.1",
        "fps": 10,
        "chunks_size": 2,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        "features": {
            CAMERA: {"dtype": "video", "shape": [32, 48, 3], "names": ["height", "width", "channels"]},
            "observation.state": feature,
            "action": {**feature, "shape": [1]},
            "timestamp": {**feature, "shape": [1]},
            **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), count),
        },
    }
    (path / "meta").mkdir(parents=True)
    (path / "meta/info.json").write_text(json.dumps(info))
    lines = [{"task_index": number, "task": f"task {number}"} for number in range(2)]
    (path / "meta/tasks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    lines = [
        {"episode_index": number, "tasks": [f"task {number % 2}"], "length": n} for number, n in enumerate(LENGTHS)
    ]
    (path / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for number, length in enumerate(LENGTHS):
        episode, frames = demonstration(number, length), np.arange(length)
        place = {"episode_index": number, "episode_chunk": number // 2}
        data = path / info["data_path"].format(**place)
        data.parent.mkdir(parents=True, exist_ok=True)
        table = {
            "observation.state": pa.array(list(episode.states)),
            "action": episode.actions[:, 0],
            "timestamp": (frames / 10).astype(np.float32),
            "frame_index": frames,
            "episode_index": np.full(length, number),
            "index": frames,
            "task_index": np.full(length, number % 2),
        }
        pq.write_table(pa.table(table), data)
        write_video(path / info["video_path"].format(video_key=CAMERA, **place), episode.images["top"])


def write_video(path, images):
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10, options={"crf": "10"})
        stream.height, stream.width, stream.pix_fmt = *images.shape[1:3], "yuv420p"
        for image in images:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


def opened(path, **keys):
    return Demonstrations.open(VLADataConfig(demos=str(path), **keys))


def check_samples(path):
    rows = demonstrated_rows(VLADataConfig(demos=str(path)))
    assert len(rows) == sum(LENGTHS)
    samples = opened(path).read(rows, horizon=3)
    assert not samples.unreadable
    for place, row in enumerate(rows):
        episode, frame = row["episode"], row["frame"]
        assert samples.instructions[place] == row["task"] == f"task {episode % 2}"
        assert samples.states[place].tolist() == [frame, episode]
        there = min(3, LENGTHS[episode] - frame)
        assert samples.action_mask[place].tolist() == [True] * there + [False] * (3 - there)
        wanted = [100 * episode + frame + ahead if ahead < there else 0 for ahead in range(3)]
        assert samples.actions[place, :, 0].tolist() == wanted
        assert np.abs(samples.images[place, 0].astype(int) - picture(episode, frame)).max() <= 4


def test_frames_of_v3_are_what_was_written(written):
    check_samples(written)


def test_frames_of_v21_are_what_was_written(tmp_path):
    write_v21(tmp_path / "demos")
    check_samples(tmp_path / "demos")


def test_without_memory_every_picture_is_decoded_again_and_the_same(written):
    rows = list(demonstrated_rows(VLADataConfig(demos=str(written))))[::-1]
    little, much = (opened(written, cache_bytes=size).read(rows, horizon=1).images for size in (0, 10**8))
    assert np.array_equal(little, much)


def test_chosen_episodes_alone_give_rows_statistics_and_instructions(written):
    data = VLADataConfig(demos=str(written), episodes=(1,))
    rows = demonstrated_rows(data)
    assert [(row["episode"], row["frame"]) for row in rows] == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert rows[-1] == rows[3] and [dict(row) for row in rows[1:3]] == [rows[1], rows[2]]
    demonstrations = Demonstrations.open(data)
    assert demonstrations.instructions == ("task 1",)
    np.testing.assert_allclose(demonstrations.stats.action.mean, [101.5])


def test_auxiliary_columns_have_mean_0_and_deviation_1(written):
    demonstrations = opened(written, aux_columns=("cup",))
    rows = demonstrated_rows(VLADataConfig(demos=str(written)))
    aux = demonstrations.read(rows, horizon=1).aux
    assert aux.shape == (sum(LENGTHS), demonstrations.aux_dim) == (16, 2)
    np.testing.assert_allclose(aux.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(aux.std(0), 1, atol=1e-6)


def test_frames_without_an_action_have_targets_and_do_not_count_in_the_statistics(tmp_path):
    look = Demonstration(
        task="look",
        images={},
        states=np.zeros((1, 2), np.float32),
        actions=np.full((1, 1), 9e9, np.float32),
        has_action=np.zeros(1, bool),
        columns={"cup": np.full((1, 2), np.nan, np.float32)},
    )
    with DemoWriter(
        tmp_path / "demos", fps=10, cameras={}, state_dim=2, action_dim=1, columns={"cup": 2}, stored="image"
    ) as writer:
        writer.add(Demonstration(**{**fields(demonstration(0, 5)), "images": {}}))
        writer.add(look)
    demonstrations = opened(tmp_path / "demos", aux_columns=("cup",))
    samples = demonstrations.read([{"episode": 1, "frame": 0}], horizon=2)
    assert not samples.action_mask.any() and not samples.actions.any()
    assert np.isnan(samples.aux).all()
    assert samples.images.shape[:2] == (1, 0)
    assert demonstrations.stats.action.q99[0] < 5


def fields(episode):
    return {name: getattr(episode, name) for name in Demonstration.__slots__}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"action_column": "actions"}, r"info.json: no feature 'actions', which \[data\] action_column names; it has"),
        ({"state_column": CAMERA}, r"'observation.images.top', which \[data\] state_column names, is (image|video)"),
        ({"aux_columns": ("mug",)}, r"no feature 'mug', which \[data\] aux_columns names"),
        ({"cameras": ("action",)}, r"\[data\] cameras: 'action' holds float32, not images"),
        ({"episodes": (0, 3)}, r"has no episode 3; it has 3"),
    ],
)
def test_what_a_recipe_names_wrongly_is_named(written, keys, message):
    with pytest.raises(UserError, match=message):
        opened(written, **keys)


def test_what_is_no_dataset_is_named(tmp_path):
    with pytest.raises(UserError, match=r"is not a dataset in LeRobot's format: .*info\.json does not exist"):
        read_dataset(tmp_path / "demos")


def test_an_interrupted_recording_is_named(tmp_path):
    (tmp_path / "demos.partial").mkdir()
    with pytest.raises(UserError, match=r"demos\.partial is left of an interrupted recording: record it again"):
        read_dataset(tmp_path / "demos")


def test_an_unknown_version_is_named(written):
    change_info(written, codebase_version="v1.6")
    with pytest.raises(UserError, match=r"info\.json: codebase_version 'v1\.6'; supported are v2\.0, v2\.1, v3\.0"):
        read_dataset(written)


def test_a_missing_key_is_named(written):
    info = json.loads((written / "meta/info.json").read_text())
    del info["fps"]
    (written / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match=r"info\.json has no 'fps'"):
        read_dataset(written)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"episode_index": 0, "tasks": ["a"], "length": "x"}', "meta has a value of the wrong type"),
        ('{"episode_index": %s}' % ("9" * 5000), r"episodes\.jsonl:1: an integer of more than 4300 digits"),
        ("[" * 5000, r"episodes\.jsonl:1: lists and objects are nested"),
        ("[]", r"episodes\.jsonl:1 is not a JSON object"),
        ("\xff", r"episodes\.jsonl:1: not valid JSON"),
    ],
    ids=lambda value: value[:40],
)
def test_a_damaged_line_of_v21_is_named(tmp_path, line, message):
    write_v21(tmp_path)
    (tmp_path / "meta/episodes.jsonl").write_text(line)
    with pytest.raises(UserError, match=message):
        read_dataset(tmp_path)


def change_info(path, **keys):
    info = json.loads((path / "meta/info.json").read_text())
    (path / "meta/info.json").write_text(json.dumps({**info, **keys}))


def test_a_truncated_file_is_named(written):
    (data,) = (written / "data").rglob("*.parquet")
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"file-000\.parquet cannot be read, as after an interruption"):
        opened(written)


def test_a_missing_file_is_named(written):
    next((written / "meta/episodes").rglob("*.parquet")).unlink()
    with pytest.raises(UserError, match=r"meta/episodes has no parquet file"):
        opened(written)


def change_data(path, change):
    (data,) = (path / "data").rglob("*.parquet")
    pq.write_table(change(pq.read_table(data)), data)


def replaced(column, values):
    return lambda table: table.drop_columns([column]).append_column(column, values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.drop_columns(["action"]), r"file-000\.parquet has no column 'action'; it has"),
        (lambda table: table.slice(0, 15), r"'episode_index' has 4 frames of episode 2, meta/ has 5"),
        (
            replaced("observation.state", pa.array(np.zeros((16, 3)).tolist())),
            r"'observation\.state' has 3 numbers per frame, meta/info\.json has 2",
        ),
        (replaced("action", pa.array(["left"] * 16)), r"'action' holds string, not numbers"),
        (
            replaced("action", pa.array([None] * 16, pa.float32())),
            r"column 'action' holds numbers that are not finite, or nulls",
        ),
        (replaced("task_index", pa.array([7] * 16)), r"frames of task_index 7, which meta/tasks does not name"),
    ],
)
def test_columns_that_are_not_what_they_should_be_are_named(written, change, message):
    change_data(written, change)
    with pytest.raises(UserError, match=message):
        opened(written)


def test_a_picture_that_is_none_is_named_and_the_others_are_read(tmp_path):
    with DemoWriter(tmp_path / "demos", fps=10, cameras={"top": (32, 48)}, state_dim=2, action_dim=1) as writer:
        writer.add(Demonstration(**{**fields(demonstration(0, 3)), "columns": {}}))

    def damaged(table):
        column = table.column(CAMERA).to_pylist()
        column[1]["bytes"] = b"no picture"
        at = table.column_names.index(CAMERA)
        return table.set_column(at, CAMERA, pa.array(column, table.schema.field(CAMERA).type))

    change_data(tmp_path / "demos", damaged)
    samples = opened(tmp_path / "demos").read([{"episode": 0, "frame": frame} for frame in range(3)], horizon=1)
    assert list(samples.unreadable) == [1]
    assert "file-000.parquet: observation.images.top of row 1 is not an image" in samples.unreadable[1]
    assert samples.images.reshape(3, -1).any(1).tolist() == [True, False, True]


def test_pictures_of_several_sizes_cannot_be_stacked(tmp_path):
    cameras = {"top": (32, 48), "wrist": (16, 16)}
    with DemoWriter(tmp_path / "demos", fps=10, cameras=cameras, state_dim=2, action_dim=1) as writer:
        images = {**demonstration(0, 3).images, "wrist": np.zeros((3, 16, 16, 3), np.uint8)}
        writer.add(Demonstration(**{**fields(demonstration(0, 3)), "images": images, "columns": {}}))
    with pytest.raises(UserError, match=r"images of several sizes.*set \[data\] cameras to those of one size"):
        opened(tmp_path / "demos")
    chosen = opened(tmp_path / "demos", cameras=(CAMERA,)).read([{"episode": 0, "frame": 0}], horizon=1)
    assert chosen.images.shape == (1, 1, 32, 48, 3)


def test_small_pictures_are_kept_exactly(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (1, 20, 24, 3), np.uint8)
    with DemoWriter(tmp_path / "demos", fps=10, cameras={"top": (20, 24)}, state_dim=2, action_dim=1) as writer:
        writer.add(Demonstration(**{**fields(demonstration(0, 1)), "images": {"top": image}, "columns": {}}))
    found = opened(tmp_path / "demos").read([{"episode": 0, "frame": 0}], horizon=1).images
    assert np.array_equal(found[0], image)


def test_the_controller_counts_frames_without_torch(written):
    script = (
        "import sys; from cosmos_rl_vla.domain import VLA; "
        f"rows, _ = VLA.load_rows(VLA.Data(demos={str(written)!r})); assert len(rows) == 16; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
