"""What people and the monitor see of a whole run: clips in TensorBoard, diversity, and what real clips earn."""

import io
from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image
from wfm_fixtures import lines_of, mock_data, recipe, shown

from cosmos_rl_core import run
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_wfm.rewards.pixels import DiversityReward, shrink

SINKS = ["jsonl", "tensorboard"] if find_spec("tensorboard") else ["jsonl"]
DATA = mock_data().model_dump(mode="json", exclude_none=True)
RECIPE = recipe(
    run={"domain": "wfm", "placement": "inline", "max_steps": 2},
    rollout={"group_size": 3, "sampling": {"num_steps": 3, "eval_num_steps": 3, "window": "fixed", "steps": [0]}},
    reward={"functions": [{"name": "brightness"}, {"name": "diversity", "weight": 0.0}]},
    eval={"every_steps": 1, "limit": 2, "data": DATA, "loss_data": DATA},
    monitor={"data_rows": 4},
    logging={"sinks": SINKS, "media_every": 1, "media_groups": 2},
)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """The directory of a run."""
    directory = tmp_path_factory.mktemp("watched") / "run"
    run(RECIPE, [f"run.output_dir={directory}"])
    return directory


def pictures(directory):
    """Name -> (step, GIF) of what TensorBoard reads."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (file,) = (directory / "tensorboard").iterdir()
    found = {}
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            if value.tag.startswith("samples/"):
                found.setdefault(value.tag, {})[event.step] = value.tensor.string_val
    return found


@pytest.mark.skipif("tensorboard" not in SINKS, reason="an extra of core")
def test_tensorboard_shows_the_samples_of_training_and_of_evaluations_as_they_run(watched):
    found = pictures(watched)
    assert {name: sorted(steps) for name, steps in found.items()} == {
        "samples/rollout-0": [0, 1],
        "samples/eval/rollout-0": [0, 1, 2],
    }
    width, height, gif = found["samples/rollout-0"][1]  # how TensorBoard reads an image summary
    assert gif == (watched / "media" / "step_000001" / "grid_rollout-0.gif").read_bytes()
    with Image.open(io.BytesIO(gif)) as video:
        assert (video.n_frames, video.size) == (4, (int(width), int(height)))


def test_diversity_goes_from_training_groups_to_metrics_and_to_the_monitor(watched):
    measured = [line["reward/diversity"] for line in lines_of(watched / "metrics.jsonl")]
    looks = lines_of(watched / "monitor.jsonl")
    assert all(0.05 < value < 1 for value in measured)
    assert [look.get("diversity") for look in looks] == [None, *measured]
    assert looks[-1]["state"]["start"]["diversity"] == measured[0]
    assert all("eval/reward/diversity" not in line for line in lines_of(watched / "eval.jsonl"))


def test_rewards_are_compared_with_what_real_clips_earn(watched):
    from cosmos_rl_core.recipe.load import load_domain
    from cosmos_rl_wfm.rewards.pixels import brightness

    domain, config = load_domain("wfm"), load_config(RECIPE)
    rows, _ = domain.load_rows(config.eval.loss_data)
    best = max(brightness(domain.row_media(config.eval.loss_data, row)["video"]) for row in rows[:4])
    evaluated = [line for line in lines_of(watched / "eval.jsonl") if "eval/beyond" in line]
    rollouts = [lines_of(watched / "rollouts" / f"eval_{version:06d}.jsonl") for version in (0, 1, 2)]
    assert [line["eval/beyond"] for line in evaluated] == [
        np.mean([r["reward"] > best for r in of_version]) for of_version in rollouts
    ]


def flat(value):
    return np.full((2, 4, 4, 3), value, np.uint8)


def test_diversity_is_the_mean_distance_to_the_others():
    assert DiversityReward()(shown(flat(0), flat(0), flat(255))) == pytest.approx([0.5, 0.5, 1.0])


def test_diversity_equals_brute_force():
    videos = np.random.default_rng(0).integers(0, 256, (5, 3, 6, 4, 3), dtype=np.uint8)
    unit = videos / 255
    pairs = [np.sqrt(np.mean((unit[i] - unit[j]) ** 2)) for i in range(5) for j in range(i)]
    assert np.mean(DiversityReward()(shown(*videos))) == pytest.approx(np.mean(pairs), rel=1e-12)


def test_equal_clips_and_a_clip_alone_have_no_diversity():
    assert DiversityReward()(shown(flat(201), flat(201))) == [0.0, 0.0]
    assert DiversityReward()(shown(flat(7))) == [0.0]


def test_large_clips_are_averaged_down_before_they_are_compared():
    video = np.zeros((1, 6, 10, 3), np.uint8)
    video[:, ::2] = 100
    assert shrink(video, side=5).shape == (1, 3, 5, 3)
    assert np.all(shrink(video, side=5) == 50)
    assert shrink(video, side=10) is video
