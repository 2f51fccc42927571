"""LIBERO's tasks and stored states, and its adapter against what hf-libero 0.1.4 was recorded to answer."""

import importlib
import importlib.util
import json
import os
import pickle
import re
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
from vla_fixtures import why_not_drawn

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_vla.data.rows import describe
from cosmos_rl_vla.sims.base import HELD_OUT
from cosmos_rl_vla.sims.libero import MAX_BYTES, MAX_STEPS, Libero, axis_angle, find_task, read_states, scenes, suites
from cosmos_rl_vla.sims.shared import stored_state

RECORDED = json.loads((Path(__file__).parent / "recordings" / "libero_object_0.json").read_text())
TASK = "libero_object/0"
SCENE = """
<mujoco>
  <worldbody>
    <light pos="2 0 3" dir="-2 0 -3" diffuse="1 1 1"/>
    <camera name="agentview" pos="0 0 2"/>
    <camera name="robot0_eye_in_hand" pos="0 0 1"/>
    <geom type="box" size=".2 .5 .1" pos=".4 0 0" rgba="1 0 0 1" group="1"/>
    <geom type="box" size="2 2 .01" pos="0 0 -.6" group="1"/>
    <geom type="box" size="2 2 .01" pos="0 0 .5" rgba="0 1 0 1" group="0"/>
    <body><freejoint/><geom size=".01" pos="0 0 -1"/></body>
  </worldbody>
</mujoco>
"""

WHY_NOT = why_not_drawn("mujoco")
needs_mujoco = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def save(path, content):
    """Write an archive as torch.save does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
        archive.writestr("archive/version", "3\n")
    return path


def observation(recorded):
    return {name: np.array(part["value"], part["dtype"]) for name, part in recorded.items()}


class Gripper:
    dof = 1
    current_action = np.ones(1)


class ControlEnv:
    """Answers what was recorded; its physics is a small scene."""

    def __init__(self, **asked):
        mujoco = importlib.import_module("mujoco")
        self.asked, self.calls, self.place = asked, [], 0
        self.model = mujoco.MjModel.from_xml_string(SCENE)
        self.data = mujoco.MjData(self.model)
        mujoco.mj_forward(self.model, self.data)
        self.sim = types.SimpleNamespace(
            model=types.SimpleNamespace(_model=self.model), data=types.SimpleNamespace(_data=self.data)
        )
        self.robots = [types.SimpleNamespace(gripper=Gripper())]

    def seed(self, seed):
        self.calls.append(("seed", seed))

    def reset(self):
        self.calls.append(("reset",))

    def set_init_state(self, state):
        self.calls.append(("state", state.tolist(), self.robots[0].gripper.current_action.tolist()))
        self.place = 0
        return observation(RECORDED["reset"])

    def step(self, action):
        self.calls.append(("step", action.tolist()))
        step = RECORDED["steps"][self.place]
        self.place += 1
        return observation(step["obs"]), step["reward"], step["done"], step["info"]

    def close(self):
        self.calls.append(("close",))


@pytest.fixture
def libero(monkeypatch, tmp_path):
    """A package `libero` that asks its question, has one task, and makes the environments above."""
    package = tmp_path / "site" / "libero" / "libero"
    (package / "assets").mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(
        "import json, os, pathlib\n"
        "file = os.path.join(os.environ['LIBERO_CONFIG_PATH'], 'config.yaml')\n"
        "if not os.path.exists(file):\n    raise EOFError('EOF when reading a line')\n"
        "def get_libero_path(key):\n    return json.loads(pathlib.Path(file).read_text())[key]\n"
        "def get_assets_path():\n    return get_libero_path('assets')\n"
    )
    found = find_task(TASK)
    states = np.random.default_rng(0).normal(size=(50, 4))
    save(package / "init_files" / found.suite / f"{found.name}.pruned_init", states)
    (package / "bddl_files" / found.suite).mkdir(parents=True)
    (package / "bddl_files" / found.suite / f"{found.name}.bddl").touch()
    made = []
    wrapper = types.ModuleType("libero.libero.envs.env_wrapper")
    wrapper.ControlEnv = lambda **asked: made.append(ControlEnv(**asked)) or made[-1]
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path / "config"))
    monkeypatch.setitem(sys.modules, "libero.libero.envs.env_wrapper", wrapper)
    one = scenes.__wrapped__()
    monkeypatch.setattr("cosmos_rl_vla.sims.libero.scenes", lambda: one)
    yield types.SimpleNamespace(made=made, states=states, package=package)
    for name in ("libero", "libero.libero"):
        sys.modules.pop(name, None)


@needs_mujoco
def test_an_episode_is_what_was_recorded(libero):
    simulator = Libero(image_size=24, settle_steps=1, max_steps=2)
    simulator.reset(TASK, 3)
    (env,) = libero.made
    assert env.calls == [
        ("seed", 0),
        ("reset",),
        ("state", libero.states[3].tolist(), [0.0]),
        ("step", [0, 0, 0, 0, 0, 0, -1]),
    ]
    assert env.asked["use_camera_obs"] is False and env.asked["has_offscreen_renderer"] is False
    steps = [simulator.step(np.full(7, value, np.float32)) for value in (0.5, 3.0)]
    assert env.calls[-2:] == [("step", [0.5] * 7), ("step", [1.0] * 7)]
    assert [(step.reward, step.truncated, step.success) for step in steps] == [(0.0, False, False), (0.0, True, False)]
    last = observation(RECORDED["steps"][2]["obs"])
    state = simulator.observe().state
    np.testing.assert_allclose(state[:3], last["robot0_eef_pos"], rtol=1e-6)
    np.testing.assert_allclose(state[3:6], axis_angle(last["robot0_eef_quat"]), rtol=1e-6)
    np.testing.assert_allclose(state[6:], last["robot0_gripper_qpos"], rtol=1e-6)


@needs_mujoco
def test_pictures_are_upright_with_left_and_right_exchanged_and_without_shapes_for_contacts(libero):
    simulator = Libero(image_size=24, settle_steps=0)
    simulator.reset(TASK, 0)
    image = simulator.observe().images["agentview"].astype(int)
    red = image[..., 0] > image[..., 1] + 50
    assert red[:, :12].any() and not red[:, 12:].any()  # the box is on the right
    assert not (image[..., 1] > image[..., 0] + 50).any()  # the green plane hides nothing


@needs_mujoco
def test_shadows_and_smooth_edges_are_left_where_robosuites_pictures_are_asked_for(libero):
    images = {}
    for drawing in ("fast", "robosuite", "fast"):
        simulator = Libero(image_size=24, settle_steps=0, drawing=drawing)
        simulator.reset(TASK, 0)
        images[drawing] = simulator.observe().images["agentview"].astype(int)
        simulator.close()
    _, own = (env.model for env in libero.made)  # the first scene is not left to the second player, but to the third
    assert own.light_castshadow.all() and (own.vis.quality.shadowsize, own.vis.quality.offsamples) == (4096, 4)
    darker = (images["fast"] - images["robosuite"]).min(2) > 40
    assert 0.02 < darker.mean() < 0.3


@needs_mujoco
def test_states_of_evaluations_are_never_trained_on(libero):
    simulator = Libero(cameras=(), settle_steps=0)
    for init in (0, 40, -1, HELD_OUT, HELD_OUT + 13):
        simulator.reset(TASK, init)
    (env,) = libero.made  # built once
    used = [call[1] for call in env.calls if call[0] == "state"]
    assert used == [libero.states[number].tolist() for number in (0, 0, 39, 40, 43)]


@needs_mujoco
def test_a_scene_is_left_to_the_next_who_plays_its_task(libero):
    first = Libero(settle_steps=0)
    first.reset(TASK, 0)
    first.close()
    Libero(settle_steps=0).reset(TASK, 1)
    assert len(libero.made) == 1


def test_libero_is_told_to_take_its_default_paths_without_a_terminal(libero):
    Libero()
    config = json.loads((Path(os.environ["LIBERO_CONFIG_PATH"]) / "config.yaml").read_text())
    assert config["bddl_files"] == str(libero.package / "bddl_files")
    assert set(config) == {"benchmark_root", "bddl_files", "init_states", "datasets", "assets"}


def test_missing_meshes_say_where_they_go(libero):
    (libero.package / "assets").rmdir()
    with pytest.raises(UserError, match=r"meshes are not at .*assets: its wheel has none"):
        Libero()


def test_a_missing_libero_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "libero", None)
    with pytest.raises(UserError, match=re.escape(pip_install("cosmos-rl-vla[libero]"))):
        Libero()


def test_a_camera_or_drawing_that_does_not_exist():
    with pytest.raises(UserError, match="no camera 'eye'; cameras: agentview"):
        Libero(cameras=["eye"])
    with pytest.raises(UserError, match="drawing is fast or robosuite, not 'egl'"):
        Libero(drawing="egl")


def test_the_suites():
    assert {suite: len(names) for suite, names in suites().items()} == dict.fromkeys(MAX_STEPS, 10) | {"libero_90": 90}


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ("libero_goal/open_the_middle_drawer_of_the_cabinet", "open the middle drawer of the cabinet"),
        ("libero_10/8", "put both moka pots on the stove"),
        ("libero_90/KITCHEN_SCENE10_close_the_top_drawer_of_the_cabinet", "close the top drawer of the cabinet"),
    ],
)
def test_the_name_of_a_task_is_its_sentence(task, sentence):
    assert describe("cosmos_rl_vla.sims.libero:Libero", [task], options={}) == {task: sentence}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("faucet-open", "no suite 'faucet-open': write a task as"),
        ("libero_goal/open_the_midle_drawer_of_the_cabinet", "did you mean 'open_the_middle_drawer_of_the_cabinet'"),
        ("libero_goal/10", "it has 10, from libero_goal/0 to libero_goal/9"),
    ],
)
def test_a_task_that_does_not_exist(task, message):
    with pytest.raises(UserError, match=message):
        find_task(task)


def test_stored_states_begin_again():
    train = {stored_state(init, states=50, held_out=10) for init in range(-100, 200)}
    held_out = {stored_state(HELD_OUT + init, states=50, held_out=10) for init in range(100)}
    assert (train, held_out) == (set(range(40)), set(range(40, 50)))


def test_states_are_read_without_loading_a_pickle(tmp_path):
    states = np.random.default_rng(0).normal(size=(5, 3))
    np.testing.assert_array_equal(read_states(save(tmp_path / "a.pruned_init", states)), states)
    with pytest.raises(UserError, match=r"asks for (posix|nt)\.mkdir"):
        read_states(save(tmp_path / "b.pruned_init", Makes(tmp_path / "made")))
    assert not (tmp_path / "made").exists()
    with pytest.raises(UserError, match=r"not float64 \[50, n\]"):
        read_states(save(tmp_path / "c.pruned_init", np.zeros(3)))
    (tmp_path / "d.pruned_init").write_bytes(b"PK")
    for name in ("d", "e"):
        with pytest.raises(UserError, match=rf"{name}\.pruned_init: LIBERO's initial states cannot be read"):
            read_states(tmp_path / f"{name}.pruned_init")


def test_states_that_unpack_to_more_than_memory_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "f.pruned_init", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("f/data.pkl", bytes(MAX_BYTES + 1))
    with pytest.raises(UserError, match=r"f\.pruned_init: 67,108,865 bytes of states, at most"):
        read_states(tmp_path / "f.pruned_init")


def test_a_damaged_archive_of_states_is_a_user_error(tmp_path):
    path = save(tmp_path / "g.pruned_init", np.zeros((5, 3)))
    whole = path.read_bytes()
    refused = 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        try:
            read_states(path)
        except UserError:
            refused += 1
    assert refused > len(whole) / 2


class Makes:
    """Makes a folder when it is loaded as pickles usually are."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("quaternion", "turn"),
    [
        ([0, 0, 0, 1], [0, 0, 0]),
        ([0, 0, np.sin(0.3), np.cos(0.3)], [0, 0, 0.6]),
        ([1, 0, 0, 0], [np.pi, 0, 0]),
        ([0, np.sin(2.0), 0, np.cos(2.0)], [0, 4.0, 0]),
    ],
)
def test_a_quaternion_as_axis_times_angle(quaternion, turn):
    np.testing.assert_allclose(axis_angle(np.array(quaternion, float)), turn, atol=1e-12)
