"""RoboTwin's adapter against a transcript of RoboTwin 2.0's interface. RoboTwin itself is not run."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.data.rows import describe
from cosmos_rl_vla.sims.base import SimulatorError
from cosmos_rl_vla.sims.robotwin import RoboTwin

TRANSCRIPT = Path(__file__).parent / "recordings" / "robotwin_place_empty_cup.json"
STEPS = json.loads(TRANSCRIPT.read_text())["steps"]
TASK = "place_empty_cup"

CLASS = f"""
import json, pathlib
import numpy as np
from .utils.create_actor import UnStableError

TRANSCRIPT = json.loads(pathlib.Path({str(TRANSCRIPT)!r}).read_text())
CALLS = []

class place_empty_cup:
    def setup_demo(self, **kwargs):
        CALLS.append(kwargs)
        if kwargs["seed"] in (8, 13):
            raise UnStableError("cup")
        self.take_action_cnt, self.eval_success = 0, False
        self.size = kwargs["head_camera_h"], kwargs["head_camera_w"]

    def take_action(self, action, action_type="qpos"):
        assert action_type == "qpos" and self.take_action_cnt < self.step_lim and not self.eval_success
        CALLS.append(action.tolist())
        self.take_action_cnt += 1
        self.eval_success = TRANSCRIPT["steps"][min(self.take_action_cnt, 2)]["eval_success"]

    def get_obs(self):
        step = TRANSCRIPT["steps"][min(self.take_action_cnt, 2)]
        observation = {{name: dict.fromkeys(parts) for name, parts in TRANSCRIPT["layout"]["observation"].items()}}
        for place, camera in enumerate(observation.values()):
            camera["rgb"] = np.full((*self.size, 3), place + 1, np.uint8)
        vector = [*step["left_arm"], step["left_gripper"], *step["right_arm"], step["right_gripper"]]
        return {{"observation": observation, "joint_action": {{**step, "vector": np.array(vector)}}}}

    def close_env(self, clear_cache=False):
        CALLS.append(("close", clear_cache))
"""


@pytest.fixture
def clone(monkeypatch, tmp_path):
    """A clone with one task."""
    files = {
        "envs/__init__.py": "",
        "envs/_base_task.py": "",
        "envs/utils/__init__.py": "",
        "envs/utils/create_actor.py": "class UnStableError(Exception):\n    pass\n",
        f"envs/{TASK}.py": CLASS,
        "task_config/demo_clean.yml": "embodiment: [aloha-agilex]\ncamera: {head_camera_type: D435}\n",
        "task_config/two.yml": "embodiment: [franka-panda, franka-panda, 0.6]\ncamera: {head_camera_type: D435}\n",
        "task_config/_embodiment_config.yml": "aloha-agilex: {file_path: ./robots/aloha}\n",
        "task_config/_camera_config.yml": "D435: {fovy: 37, w: 8, h: 6}\n",
        "robots/aloha/config.yml": "arm_joints_name: [[a], [b]]\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setenv("ROBOTWIN_PATH", str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "envs"]:
        del sys.modules[name]


def calls():
    return sys.modules[f"envs.{TASK}"].CALLS


def test_an_episode_is_that_of_the_transcript(clone):
    simulator = RoboTwin()
    assert Path.cwd() == clone
    simulator.reset(TASK, 5)
    first = simulator.observe()
    assert {name: (image.shape, int(image[0, 0, 0])) for name, image in first.images.items()} == {
        "head_camera": ((6, 8, 3), 1),
        "left_camera": ((6, 8, 3), 2),
        "right_camera": ((6, 8, 3), 3),
    }
    expected = [*STEPS[0]["left_arm"], 1.0, *STEPS[0]["right_arm"], 1.0]
    np.testing.assert_allclose(first.state, expected, rtol=1e-6)
    steps = [simulator.step(np.full(14, value, np.float32)) for value in (0.5, 9.0)]
    assert [(step.reward, step.terminated, step.success) for step in steps] == [(0.0, False, False), (1.0, True, True)]
    asked, half, most = calls()
    assert (asked["seed"], asked["is_test"], asked["task_name"], asked["eval_mode"]) == (5, True, TASK, True)
    assert asked["left_embodiment_config"] == {"arm_joints_name": [["a"], ["b"]]} and asked["render_freq"] == 0
    assert half == [0.5] * 14
    np.testing.assert_allclose(most, ([2 * np.pi] * 6 + [1.0]) * 2)


def test_a_layout_that_will_not_rest_gives_way_to_a_further_seed(clone):
    simulator = RoboTwin()
    simulator.reset(TASK, 8)
    assert [call["seed"] for call in calls() if isinstance(call, dict)] == [8, 8 + 1_000_003]
    simulator.reset(TASK, 2**32 + 9)  # 9 is another episode
    assert calls()[-1]["seed"] == 9


def test_an_episode_is_cut_off_here_and_not_by_robotwin(clone):
    simulator = RoboTwin(max_steps=1)
    simulator.reset(TASK, 0)
    assert simulator.step(np.zeros(14, np.float32)).truncated
    assert simulator._task.step_lim == 2


def test_no_layout_at_all_is_an_episode_lost(clone, monkeypatch):
    simulator = RoboTwin()
    monkeypatch.setattr("cosmos_rl_vla.sims.robotwin._NEXT_SEED", 0)
    with pytest.raises(SimulatorError, match="do not come to rest with 20 seeds from 8"):
        simulator.reset(TASK, 8)


def test_memory_is_cleared_now_and_then(clone):
    simulator = RoboTwin()
    for init in range(6):
        simulator.reset(TASK, init)
    closed = [call[1] for call in calls() if isinstance(call, tuple)]
    assert closed == [False, False, False, False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "nowhere"}, r"simulator robotwin is not at nowhere: clone RoboTwin 2\.0, .* set ROBOTWIN_PATH"),
        ({"config": "messy"}, "no configuration 'messy'; it has: demo_clean, two"),
        ({"config": "two"}, "this adapter supports one robot with two arms"),
        ({"cameras": ["eye"]}, "no camera 'eye'; cameras: head_camera"),
    ],
)
def test_options_that_do_not_fit(clone, options, message):
    with pytest.raises(UserError, match=message):
        RoboTwin(**options)


def test_without_a_clone_the_variable_is_named(monkeypatch):
    monkeypatch.delenv("ROBOTWIN_PATH", raising=False)
    with pytest.raises(UserError, match=r"ROBOTWIN_PATH \(not set\)"):
        RoboTwin()


def test_a_clone_whose_packages_are_missing(clone):
    (clone / "envs" / "utils" / "create_actor.py").write_text("import sapien_is_not_here\n")
    with pytest.raises(UserError, match=r"cannot be imported \(No module named 'sapien_is_not_here'\)"):
        RoboTwin()


def test_a_task_that_does_not_exist(clone):
    with pytest.raises(UserError, match="no task 'fly'; tasks: place_empty_cup"):
        RoboTwin().reset("fly", 0)


def test_words_are_those_of_the_name():
    where = "cosmos_rl_vla.sims.robotwin:RoboTwin"
    assert describe(where, [TASK], options={}) == {TASK: "place empty cup"}
    with pytest.raises(UserError, match=r"no task '\.\./x'"):
        describe(where, ["../x"], options={})
