"""Grids of samples on disk, shown by sinks."""

import json
import struct

import pytest

from cosmos_rl_core.observe.services import RunLabels, Wandb, size_of
from cosmos_rl_core.observe.sinks import Grids, build_sinks

PNG = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + struct.pack(">II", 320, 200)
GIF = b"GIF89a" + struct.pack("<HH", 48, 36)


class Wall:
    """A sink that remembers what it was shown."""

    def __init__(self):
        self.shown = []

    def log(self, step, metrics):
        pass

    def show(self, step, name, picture):
        self.shown.append((step, name, picture.read_bytes()))

    def close(self):
        pass


def leave(media, step, *, replica="rollout-0", content=GIF, end="\n"):
    """As a gallery does."""
    grid = f"step_{step:06d}/grid_{replica}.gif"
    (media / grid).parent.mkdir(parents=True, exist_ok=True)
    (media / grid).write_bytes(content)
    with (media / f"index_{replica}.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "grid": grid}) + end)


def test_each_new_sheet_is_shown_once_under_the_name_of_its_replica(tmp_path):
    wall = Wall()
    grids = Grids(tmp_path, [wall])
    grids.show_new()
    leave(tmp_path, 0)
    leave(tmp_path, 0)
    leave(tmp_path, 0, replica="rollout-1")
    leave(tmp_path / "eval", 2)
    grids.show_new()
    grids.show_new()
    assert wall.shown == [
        (2, "samples/eval/rollout-0", GIF),
        (0, "samples/rollout-0", GIF),
        (0, "samples/rollout-1", GIF),
    ]


def test_a_line_that_names_no_sheet_is_passed_over(tmp_path):
    wall = Wall()
    grids = Grids(tmp_path, [wall])
    leave(tmp_path, 0)
    with (tmp_path / "index_rollout-0.jsonl").open("a") as file:
        file.write('7\n{"grid": 1}\n{"grid": "x"}\nno json\n' + "[" * 5000 + "\n")
    grids.show_new()
    assert wall.shown == [(0, "samples/rollout-0", GIF)]


def test_a_grid_that_has_grown_is_shown_again(tmp_path):
    wall = Wall()
    grids = Grids(tmp_path, [wall])
    for content in (GIF, GIF + b"more"):
        leave(tmp_path, 4, content=content)
        grids.show_new()
    assert [content for _, _, content in wall.shown] == [GIF, GIF + b"more"]


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path):
    wall = Wall()
    grids = Grids(tmp_path, [wall])
    leave(tmp_path, 4, end="")
    grids.show_new()
    assert wall.shown == []
    with (tmp_path / "index_rollout-0.jsonl").open("a") as file:
        file.write("\n")
    grids.show_new()
    assert [step for step, _, _ in wall.shown] == [4]


def test_what_an_earlier_life_of_the_run_left_was_shown_by_it(tmp_path):
    leave(tmp_path, 0)
    wall = Wall()
    grids = Grids(tmp_path, [wall])
    leave(tmp_path, 1)
    grids.show_new()
    assert [step for step, _, _ in wall.shown] == [1]


def test_a_grid_that_was_cleaned_away_and_an_index_without_grids_do_no_harm(tmp_path):
    wall = Wall()
    grids = Grids(tmp_path, [wall])
    leave(tmp_path, 0)
    (tmp_path / "step_000000" / "grid_rollout-0.gif").unlink()
    (tmp_path / "index_other.jsonl").write_text('{"step": 0}\n')
    grids.show_new()
    assert wall.shown == []


def test_the_size_of_a_picture_stands_at_its_beginning():
    assert (size_of(PNG), size_of(GIF)) == ((320, 200), (48, 36))


@pytest.mark.parametrize(("name", "content"), [("grid.gif", GIF), ("grid.png", PNG)])
def test_tensorboard_shows_pictures_beside_curves(tmp_path, name, content):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    (tmp_path / name).write_bytes(content)
    (sink,) = build_sinks(["tensorboard"], tmp_path)
    sink.log(3, {"loss": 0.5})
    sink.show(2, "samples/rollout-0", tmp_path / name)
    sink.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = [event for event in reader.EventFileLoader(str(file)).Load() if event.summary.value]
    assert [(event.step, event.summary.value[0].tag) for event in events] == [(3, "loss"), (2, "samples/rollout-0")]
    width, height = size_of(content)
    assert list(events[1].summary.value[0].tensor.string_val) == [str(width).encode(), str(height).encode(), content]


class FakeWandb:
    """The parts of the package that are used, with its rule that steps never fall."""

    def __init__(self):
        self.logged, self.dropped, self.settings = [], [], {}

    def init(self, **settings):
        self.settings = settings
        return self

    def log(self, values, *, step):
        falls = bool(self.logged) and step < self.logged[-1][0]
        (self.dropped if falls else self.logged).append((step, values))

    def finish(self):
        self.logged.append((self.logged[-1][0], "finished"))

    @staticmethod
    def Video(path, caption):
        return ("video", path, caption)

    @staticmethod
    def Image(path, caption):
        return ("image", path, caption)


def test_weights_and_biases_is_shown_films_and_images_beside_the_newest_metrics(tmp_path):
    wandb = FakeWandb()
    sink = Wandb(tmp_path / "run", RunLabels(name="run", project="adding", group="seeds"), wandb)
    video, image = tmp_path / "grid.gif", tmp_path / "grid.png"
    sink.show(0, "samples/eval/rollout-0", video)
    sink.log(4, {"loss": 0.5})
    sink.show(2, "samples/rollout-0", video)
    sink.show(5, "samples/rollout-0", image)
    sink.log(5, {"loss": 0.4})
    sink.close()
    assert {key: wandb.settings[key] for key in ("name", "project", "group")} == {
        "name": "run",
        "project": "adding",
        "group": "seeds",
    }
    assert wandb.dropped == []
    assert wandb.logged == [
        (0, {"samples/eval/rollout-0": ("video", str(video), "step 0")}),
        (4, {"loss": 0.5}),
        (4, {"samples/rollout-0": ("video", str(video), "step 2")}),
        (5, {"samples/rollout-0": ("image", str(image), "step 5")}),
        (5, {"loss": 0.4}),
        (5, "finished"),
    ]
