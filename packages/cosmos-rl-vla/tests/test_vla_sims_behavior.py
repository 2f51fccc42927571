"""BEHAVIOR-1K's adapter against a transcript of OmniGibson's interface. OmniGibson itself is not run."""

import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.data.rows import describe
from cosmos_rl_vla.sims.base import HELD_OUT
from cosmos_rl_vla.sims.behavior import Behavior

TRANSCRIPT = json.loads((Path(__file__).parent / "recordings" / "behavior_turning_on_radio.json").read_text())
TASK = TRANSCRIPT["activity"]
PLACES = {name: np.r_[slice(*span)] for name, span in TRANSCRIPT["proprioception_indices"].items()}
BODY = torch.arange(30, dtype=torch.float32)


class Entity:
    is_system, exists = False, True

    def __init__(self, calls):
        self.calls = calls

    def load_state(self, state, serialized):
        self.calls.append(("load", state["root_link"]["pos"].tolist(), serialized))

    def keep_still(self):
        self.calls.append("still")


class Environment:
    """Answers what the transcript says."""

    def __init__(self, configs):
        self.configs, self.calls, self.place = configs, [], 0
        self.task = types.SimpleNamespace(object_scope={"radio.n.01_1": Entity(self.calls)})
        self.scene = types.SimpleNamespace(
            update_initial_file=lambda: self.calls.append("kept"), write_task_metadata=lambda key, data: None
        )
        sensors = {name: types.SimpleNamespace() for name in TRANSCRIPT["sensors"]}
        self.robots = [types.SimpleNamespace(sensors=sensors, set_position_orientation=self.stand)]

    def stand(self, position, orientation):
        self.calls.append(("stand", position.tolist(), orientation.tolist()))

    def load_observation_space(self):
        self.calls.append("space")

    def get_obs(self):
        seen = {"proprio": BODY + self.place}
        for number, (name, sensor) in enumerate(self.robots[0].sensors.items()):
            seen[name] = {"rgb": torch.full((sensor.image_height, sensor.image_width, 4), number, dtype=torch.uint8)}
        return {TRANSCRIPT["robot"]: seen}, {}

    def reset(self):
        self.calls.append("reset")
        self.place = 0
        return self.get_obs()

    def step(self, action):
        assert isinstance(action, torch.Tensor) and action.dtype == torch.float32
        self.calls.append(("step", action.tolist()))
        step = TRANSCRIPT["steps"][self.place]
        self.place += 1
        return self.get_obs()[0], step["reward"], step["terminated"], False, step["info"]


def convert(content):
    """Make tensors of lists of numbers, as OmniGibson does."""
    if isinstance(content, dict):
        return {key: convert(held) for key, held in content.items()}
    if isinstance(content, list) and not isinstance(content[0], dict):
        return torch.tensor(content)
    return [convert(held) for held in content] if isinstance(content, list) else content


@pytest.fixture
def og(monkeypatch, tmp_path):
    """OmniGibson with one activity of 30 instances."""
    scene = TRANSCRIPT["scene_model"]
    folder = tmp_path / "json" / f"{scene}_task_{TASK}_instances"
    folder.mkdir(parents=True)
    for number in range(1, 31):
        state = json.loads(json.dumps(TRANSCRIPT["tro_state"]))
        state["radio.n.01_1"]["root_link"]["pos"][0] = float(number)
        (folder / f"{scene}_task_{TASK}_0_{number}_template-tro_state.json").write_text(json.dumps(state))
        (folder / f"{scene}_task_{TASK}_0_{number}_template.json").write_text("{}")
    config = {
        "scene": {"scene_model": scene},
        "task": {"activity_name": TASK, "activity_definition_id": 0, "termination_config": {}},
    }
    made = []
    sim = types.SimpleNamespace(render=lambda: made[-1].calls.append("render"), step_physics=lambda: None)

    def environment(configs):
        made.append(Environment(configs))
        fake.sim = sim
        return made[-1]

    fake = types.SimpleNamespace(sim=None, Environment=environment, made=made, folder=folder, shutdown=lambda: None)
    modules = {
        "omnigibson": fake,
        "omnigibson.macros": types.SimpleNamespace(gm=types.SimpleNamespace()),
        "omnigibson.learning.utils.eval_utils": types.SimpleNamespace(
            PROPRIOCEPTION_INDICES={"R1Pro": PLACES},
            generate_basic_environment_config=lambda *, task_name, task_cfg: config,
        ),
        "omnigibson.utils.asset_utils": types.SimpleNamespace(get_task_instance_path=lambda scene: str(tmp_path)),
        "omnigibson.utils.python_utils": types.SimpleNamespace(recursively_convert_to_torch=convert),
        "gello.robots.sim_robot.og_teleop_utils": types.SimpleNamespace(
            load_available_tasks=lambda: {TASK: [{}], "picking_up_trash": [{}]},
            generate_robot_config=lambda *, task_name, task_cfg: {"name": TRANSCRIPT["robot"]},
        ),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return fake


def test_an_episode_is_that_of_the_transcript(og):
    simulator = Behavior(task=TASK, head_size=6, wrist_size=4)
    simulator.reset(TASK, 2)
    (env,) = og.made
    assert env.calls[:3] == [
        "space",
        ("stand", [1.0, 2.0, 0.0], [0.0, 0.0, 0.0, 1.0]),
        ("load", [3.0, 0.5, 1.0], False),
    ]
    assert env.calls[3:] == ["still"] * 25 + ["kept", "reset"] + ["render"] * 4
    first = simulator.observe()
    assert {name: (image.shape, int(image[0, 0, 0])) for name, image in first.images.items()} == {
        "head": ((6, 6, 3), 0),
        "left_wrist": ((4, 4, 3), 1),
        "right_wrist": ((4, 4, 3), 2),
    }
    assert first.state.tolist() == [*range(7), *range(10, 24), 24 + 25, 26 + 27]
    steps = [simulator.step(np.full(23, value, np.float32)) for value in (0.5, -2.0, 0.0)]
    assert env.calls[-2] == ("step", [-1.0] * 23)
    assert [(step.reward, step.terminated, step.success) for step in steps] == [
        (0.0, False, False),
        (0.5, False, False),
        (1.0, True, True),
    ]
    assert env.robots[0].sensors[TRANSCRIPT["sensors"][0]].horizontal_aperture == 40.0
    assert env.configs["robots"][0]["obs_modalities"] == ["proprio", "rgb"]


def test_instances_of_evaluations_are_never_trained_on(og):
    simulator = Behavior(task=TASK)
    for init in (0, 19, 20, HELD_OUT, HELD_OUT + 9):
        simulator.reset(TASK, init)
    (env,) = og.made
    assert [call[1][0] for call in env.calls if call[0] == "load"] == [1, 20, 1, 21, 30]


def test_the_limit_is_kept_here(og):
    simulator = Behavior(task=TASK, max_steps=1)
    simulator.reset(TASK, 0)
    assert simulator.step(np.zeros(23, np.float32)).truncated
    (env,) = og.made
    assert env.configs["task"]["termination_config"]["max_steps"] == 2


def test_one_a_process_and_one_activity(og):
    simulator = Behavior(task=TASK)
    with pytest.raises(UserError, match=r"once per process: set \[rollout.options\] slots = 1"):
        Behavior(task=TASK)
    with pytest.raises(UserError, match="made for turning_on_radio and cannot play picking_up_trash"):
        simulator.reset("picking_up_trash", 0)


def test_an_activity_that_does_not_exist(og):
    with pytest.raises(UserError, match="no activity 'fly'; activities: picking_up_trash, turning_on_radio"):
        Behavior(task="fly")


def test_instances_that_are_not_there(og):
    for file in sorted(og.folder.glob("*tro_state.json"))[:25]:
        file.unlink()
    with pytest.raises(UserError, match="has 5 instances of turning_on_radio; download"):
        Behavior(task=TASK)


def test_a_missing_behavior_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "omnigibson", None)
    with pytest.raises(UserError, match=r"install BEHAVIOR-1K with its setup\.sh"):
        Behavior(task=TASK)


def test_words_are_those_of_the_name():
    assert describe("cosmos_rl_vla.sims.behavior:Behavior", [TASK], options={}) == {TASK: "turning on radio"}
