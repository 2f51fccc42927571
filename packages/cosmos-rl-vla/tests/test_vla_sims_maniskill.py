"""ManiSkill's adapter against what ManiSkill 3.0.1 was recorded to answer, and against ManiSkill where it is there."""

import importlib.util
import json
import re
import sys
import types
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_vla.data.rows import describe
from cosmos_rl_vla.sims.maniskill import ManiSkill, ManiSkillBatch, SceneOptions

TASK = "PickCube-v1"
RECORDED = json.loads((Path(__file__).parent / "recordings" / "maniskill_pick_cube.json").read_text())
ACTIONS = np.array([step["action"] for step in RECORDED["steps"]], np.float32)


def tensors(recorded, places):
    """Return a recorded part for copies that stand at these places of the recording."""
    if "value" in recorded[0]:
        dtype = getattr(torch, recorded[0]["dtype"])
        return torch.stack([torch.tensor(recorded[place]["value"][0], dtype=dtype) for place in places])
    return {name: tensors([part[name] for part in recorded], places) for name in recorded[0]}


class Goal:
    def __init__(self):
        self.shown = False

    def show_visual(self):
        self.shown = True


class Replayed(gymnasium.Env):
    """Copies that go through the recording; a step moves all of them, as a GPU's physics does."""

    action_space = observation_space = gymnasium.spaces.Discrete(1)

    def __init__(self, *, num_envs, obs_mode, reward_mode, sim_backend, render_backend, **asked):
        if render_backend == "gpu" and asked["sensor_configs"]["width"] == 13:
            raise RuntimeError("vk::createInstanceUnique: ErrorIncompatibleDriver")
        if sim_backend == "physx_cuda" and asked["sensor_configs"]["width"] == 17:
            raise RuntimeError('failed to find device "cuda"')
        if reward_mode == "dense":
            raise NotImplementedError("Unsupported reward mode: dense")
        self.asked, self._obs_mode, self.device = asked | {"sim": sim_backend}, obs_mode, torch.device("cpu")
        self.goal = Goal()
        self._hidden_objects = [self.goal]
        self.places, self.renders, self.resets, self.actions = [0] * num_envs, 0, [], []

    def get_obs(self):
        if self._obs_mode == "none":
            return {}
        self.renders += 1
        return tensors([RECORDED["reset"]["obs"], *(step["obs"] for step in RECORDED["steps"])], self.places)

    def reset(self, *, seed=None, options=None):
        self.resets.append((seed, options))
        for copy in range(len(self.places)) if options is None else options["env_idx"].tolist():
            self.places[copy] = 0
        return self.get_obs(), {}

    def step(self, actions):
        self.actions.append(actions)
        before, self.places = self.places, [min(place + 1, len(RECORDED["steps"])) for place in self.places]
        parts = [tensors([step[name] for step in RECORDED["steps"]], before) for name in ("reward", "terminated")]
        info = {"success": tensors([step["info"]["success"] for step in RECORDED["steps"]], before)}
        return self.get_obs(), *parts, torch.zeros(len(before), dtype=torch.bool), info

    def get_state_dict(self):
        return {"actors": {"cube": torch.tensor(self.places)}, "controller": {}}

    def set_state_dict(self, state, copies):
        for copy, place in zip(copies.tolist(), state["actors"]["cube"].tolist(), strict=True):
            self.places[copy] = place


@pytest.fixture
def maniskill(monkeypatch):
    for name in ("mani_skill", "mani_skill.envs"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    made = []
    for task in (TASK, "PegInsertionSide-v1"):
        gymnasium.register(task, entry_point=lambda **given: made.append(Replayed(**given)) or made[-1])
        gymnasium.registry[task].disable_env_checker = True
    yield made
    for task in (TASK, "PegInsertionSide-v1"):
        del gymnasium.registry[task]


def test_an_episode_is_what_was_recorded(maniskill):
    simulator = ManiSkill(image_size=4)
    simulator.reset(TASK, 3)
    first = simulator.observe()
    seen = RECORDED["reset"]["obs"]
    expected = seen["agent"]["qpos"]["value"][0] + seen["extra"]["tcp_pose"]["value"][0]
    np.testing.assert_array_equal(first.state, np.array(expected, np.float32))
    assert first.images["base_camera"].tolist() == seen["sensor_data"]["base_camera"]["rgb"]["value"][0]
    steps = [simulator.step(action) for action in ACTIONS]
    recorded = [step["reward"]["value"][0] for step in RECORDED["steps"]]
    np.testing.assert_allclose([step.reward for step in steps], recorded, atol=1e-6)
    assert [(step.terminated, step.truncated, step.success) for step in steps] == [(False, False, False)] * 3
    (env,) = maniskill
    np.testing.assert_array_equal(torch.cat(env.actions).numpy(), ACTIONS)
    last = RECORDED["steps"][-1]["obs"]["sensor_data"]["base_camera"]["rgb"]["value"][0]
    assert simulator.observe().images["base_camera"].tolist() == last


def test_the_recorded_limits_of_actions_are_those_of_the_spec():
    space = RECORDED["action_space"]
    spec = SceneOptions().spec
    assert (list(spec.action_low), list(spec.action_high)) == (space["low"], space["high"])


def test_only_looking_renders_and_goals_are_seen(maniskill):
    simulator = ManiSkill(image_size=4, max_steps=2)
    simulator.reset(TASK, 3)
    (env,) = maniskill
    assert env.goal.shown and env._hidden_objects == []
    assert [simulator.step(action).truncated for action in ACTIONS[:2]] == [False, True]
    assert env.renders == 0
    simulator.observe(), simulator.observe()
    assert env.renders == 1


def test_any_init_is_a_seed(maniskill):
    simulator = ManiSkill(image_size=4)
    for init in (-1, 5, 2**31 + 5):
        simulator.reset(TASK, init)
    (env,) = maniskill
    assert env.resets == [([2**32 - 1], None), ([5], None), ([2**31 + 5], None)]


def test_other_slots_of_a_gpu_stand_still(maniskill):
    batch = ManiSkillBatch(slots=3, task=TASK, image_size=4)
    (env,) = maniskill
    assert env.asked["sim"] == "physx_cuda"
    for slot in range(3):
        batch.reset(slot, task=TASK, init=7 + slot)
    assert [(seed, options["env_idx"].tolist()) for seed, options in env.resets] == [
        ([7] * 3, [0]),
        ([8] * 3, [1]),
        ([9] * 3, [2]),
    ]
    assert len(batch.step([2, 0], ACTIONS[[1, 0]])) == 2
    assert env.places == [1, 0, 1]
    np.testing.assert_array_equal(env.actions[0].numpy(), np.stack([ACTIONS[0], np.zeros(7), ACTIONS[1]]))
    batch.reset(0, task=TASK, init=1)
    assert env.places == [0, 0, 1]
    before = env.renders
    states = [batch.observe(slot).state for slot in range(3)]
    assert env.renders == before + 1 and np.array_equal(states[0], states[1])
    assert not np.array_equal(states[0], states[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cameras": ["eye"]}, "no camera 'eye'; cameras: base_camera, hand_camera"),
        ({"control": "pd"}, "control is one of pd_ee_delta_pose"),
        ({"reward": "big"}, "reward is normalized_dense, dense or sparse, not 'big'"),
        ({"render": "tpu"}, "render is cpu or gpu"),
    ],
)
def test_options_that_do_not_exist(options, message):
    with pytest.raises(UserError, match=message):
        ManiSkill(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"render": "gpu", "image_size": 13}, "ErrorIncompatibleDriver: no Vulkan device .* set VK_DRIVER_FILES"),
        ({"reward": "dense"}, "PickCube-v1: Unsupported reward mode: dense"),
    ],
)
def test_what_maniskill_refuses_is_told_with_what_to_do(maniskill, options, message):
    with pytest.raises(UserError, match=message):
        ManiSkill(**options).reset(TASK, 0)


def test_what_a_gpu_batch_cannot_do(maniskill):
    with pytest.raises(UserError, match="physics on a GPU needs an NVIDIA GPU"):
        ManiSkillBatch(slots=2, task=TASK, image_size=17)
    with pytest.raises(UserError, match="PegInsertionSide-v1 randomises sizes of objects"):
        ManiSkillBatch(slots=2, task="PegInsertionSide-v1")
    with pytest.raises(UserError, match="made for PickCube-v1 and cannot play PushCube-v1"):
        ManiSkillBatch(slots=2, task=TASK).reset(0, task="PushCube-v1", init=0)


def test_instructions_are_known_where_maniskill_is_not():
    for name in ("ManiSkill", "ManiSkillBatch"):
        told = describe(f"cosmos_rl_vla.sims.maniskill:{name}", [TASK], options={})
        assert told == {TASK: "pick up the red cube and hold it at the green ball"}
    with pytest.raises(UserError, match="no task 'PickCub-v1'; did you mean 'PickCube-v1'"):
        ManiSkill.instruction("PickCub-v1")


def test_a_missing_maniskill_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mani_skill.envs", None)
    with pytest.raises(UserError, match=re.escape(pip_install("cosmos-rl-vla[maniskill]"))):
        ManiSkill()


@pytest.mark.skipif(importlib.util.find_spec("mani_skill") is None, reason="mani_skill is not installed")
@pytest.mark.filterwarnings("ignore")  # of ManiSkill and SAPIEN, by the hundred
@pytest.mark.parametrize("task", ["PickCube-v1", "PushCube-v1"])
def test_the_real_one_plays_one_episode_for_one_init(task):
    simulator = ManiSkill(image_size=32, reward="sparse")

    def play(init):
        simulator.reset(task, init)
        for action in np.random.default_rng(0).uniform(-1, 1, (8, 7)).astype(np.float32):
            simulator.step(action)
        seen = simulator.observe()
        return seen.state.tobytes() + seen.images["base_camera"].tobytes()

    assert play(3) != play(4)
    assert play(3) == play(3)
    simulator.close()
