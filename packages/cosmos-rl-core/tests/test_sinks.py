"""Where metrics go."""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.observe.services import RunLabels
from cosmos_rl_core.observe.sinks import JsonLines, build_sinks, set_damage_aside


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_step_is_one_object_that_is_on_disk_at_once(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.log(0, {"loss": 0.5})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 0, "loss": 0.5}]
    sink.log(1, {"loss": 0.25, "reward_mean": 1.0})
    sink.close()
    assert lines(tmp_path / "metrics.jsonl")[1] == {"step": 1, "loss": 0.25, "reward_mean": 1.0}


def test_a_resumed_run_appends(tmp_path):
    for step in range(2):
        sink = JsonLines(tmp_path / "metrics.jsonl")
        sink.log(step, {"loss": 0.5})
        sink.close()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1]


def test_a_line_a_killed_run_left_half_written_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "loss": 0.5}\n{"step": 1, "lo')
    sink = JsonLines(path)
    sink.log(1, {"loss": 0.25})
    sink.close()
    assert lines(path) == [{"step": 0, "loss": 0.5}, {"step": 1, "loss": 0.25}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_json_does_not_know_becomes_null(tmp_path, value):
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.log(3, {"grad_norm": value})
    sink.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 3, "grad_norm": null}\n'


def test_tensorboard_curves_can_be_read_back(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    (sink,) = build_sinks(["tensorboard"], tmp_path)
    for step in range(3):
        sink.log(step, {"reward_mean": step / 4})
    sink.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    points = {
        event.step: event.summary.value[0].tensor.float_val[0]
        for event in reader.EventFileLoader(str(file)).Load()
        if event.summary.value
    }
    assert points == {0: 0.0, 1: 0.25, 2: 0.5}


def test_mlflow_has_the_curve_and_the_pictures(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grid.png").write_bytes(b"\x89PNG")
    (sink,) = build_sinks(["mlflow"], tmp_path, labels=RunLabels(name="sums", project="adding", group="seeds"))
    for step in range(3):
        sink.log(step, {"held-out/reward_mean": step / 4})
    sink.show(2, "samples/rollout-0", tmp_path / "grid.png")
    sink.close()
    client = mlflow.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("adding").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.tags["group"]) == ("sums", "FINISHED", "seeds")
    history = client.get_metric_history(run.info.run_id, "held-out/reward_mean")
    assert [(point.step, point.value) for point in history] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    [picture] = client.list_artifacts(run.info.run_id, "samples/rollout-0/step_000002")
    assert picture.path.endswith("grid.png")


TRACKIO = """
import json
import sys
from pathlib import Path
from cosmos_rl_core.observe.services import RunLabels
from cosmos_rl_core.observe.sinks import build_sinks
(sink,) = build_sinks(["trackio"], Path(sys.argv[1]), labels=RunLabels(name="sums", project="adding"))
for step in range(3):
    sink.log(step, {"reward_mean": step / 4})
sink.close()
from trackio.sqlite_storage import SQLiteStorage
points = SQLiteStorage.get_logs("adding", "sums")
print("found", json.dumps([(point["step"], point["reward_mean"]) for point in points]))
"""


def test_trackio_has_the_curve(tmp_path):
    """In a process of its own: trackio reads once where its database is."""
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed")
    place = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    command = [sys.executable, "-c", TRACKIO, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **place}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "found [[0, 0.0], [1, 0.25], [2, 0.5]]" in done.stdout
    assert [*(tmp_path / "trackio").glob("adding*")]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_missing_extra_names_the_line_that_installs_it(tmp_path):
    with pytest.raises(UserError) as caught:
        build_sinks(["wandb"], tmp_path)
    assert pip_install("cosmos-rl-core[wandb]") in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_where_one_cannot_be_opened_the_others_are_closed(tmp_path):
    def is_open():
        return str(tmp_path / "metrics.jsonl") in [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]

    with pytest.raises(UserError, match="pip install"):
        build_sinks(["jsonl", "wandb"], tmp_path)
    assert not is_open()
    (sink,) = build_sinks(["jsonl"], tmp_path)
    assert is_open()
    sink.close()


def test_an_unknown_sink_is_named_with_the_known_ones_before_any_is_opened(tmp_path):
    with pytest.raises(UserError, match="'mlfow': choose from jsonl, tensorboard, wandb, trackio, mlflow"):
        build_sinks(["jsonl", "mlfow"], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_sink_named_twice_is_built_once(tmp_path):
    (sink,) = build_sinks(["jsonl", "jsonl"], tmp_path)
    sink.close()


def test_a_file_that_was_removed_is_begun_again(tmp_path):
    sink = JsonLines(tmp_path / "run" / "metrics.jsonl")
    sink.log(0, {"loss": 0.5})
    shutil.rmtree(tmp_path / "run")
    sink.log(1, {"loss": 0.25})
    sink.close()
    assert lines(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "loss": 0.25}]


@pytest.mark.parametrize(
    "damaged",
    [b"{\x00\n", b"7\n", b'{"stEp": 1}\n', b'{"step": "1"}\n', b"\xff\xfe\n", b"9" * 5000 + b"\n", b"[" * 5000 + b"\n"],
    ids=lambda line: repr(line[:12]),
)
def test_lines_that_can_be_read_are_kept_and_the_damaged_file_is_set_aside(tmp_path, damaged):
    path, good = tmp_path / "metrics.jsonl", [b'{"step": 0, "loss": 1}\n', b'{"step": 2, "loss": null}\n']
    for number in ("", "1"):
        path.write_bytes(good[0] + damaged + good[1] + b'{"step": 3, "lo')
        assert set_damage_aside(path) == (
            f"{path} was damaged: 2 of 3 lines are kept; the original is metrics.jsonl.damaged{number}"
        )
        assert path.read_bytes() == b"".join(good)
        assert damaged in (tmp_path / f"metrics.jsonl.damaged{number}").read_bytes()
    JsonLines(path, first_step=2).close()
    assert path.read_bytes() == good[0]


def test_a_folder_in_the_place_of_a_file_is_set_aside(tmp_path):
    (tmp_path / "metrics.jsonl" / "mine").mkdir(parents=True)
    assert "0 of 0 lines are kept" in set_damage_aside(tmp_path / "metrics.jsonl")
    assert (tmp_path / "metrics.jsonl.damaged" / "mine").is_dir()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_whole_file_and_a_torn_end_are_left_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert set_damage_aside(path) == ""
    path.write_text('{"step": 0}\n{"st')
    assert set_damage_aside(path) == ""
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
