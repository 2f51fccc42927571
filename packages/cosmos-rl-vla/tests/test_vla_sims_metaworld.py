"""MetaWorld: one episode for one seed, frames that show something, experts that succeed."""

import numpy as np
import pytest
from vla_fixtures import why_not_drawn

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.gpus import Nvml
from cosmos_rl_vla.sims.metaworld import INSTRUCTIONS, instruction
from cosmos_rl_vla.sims.rendering import choose_gl
from doubles.fake_nvml import FakeNvml

WHY_NOT = why_not_drawn("metaworld")
needs_metaworld = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
CAMERA = "corner2"


@pytest.fixture
def make():
    from cosmos_rl_vla.sims.metaworld import MetaWorld

    made = []

    def make(**options):
        made.append(MetaWorld(**options))
        return made[-1]

    yield make
    for simulator in made:
        simulator.close()


def episode(simulator, task, init, steps=6):
    """Return all that is seen of an episode, as bytes."""
    simulator.reset(task, init)
    rng = np.random.default_rng(init)
    seen = [simulator.observe().images[CAMERA], simulator.full_state()]
    for _ in range(steps):
        stepped = simulator.step(rng.uniform(-1, 1, 4).astype(np.float32))
        seen += [simulator.full_state(), np.float64(stepped.reward)]
    return b"".join(array.tobytes() for array in (*seen, simulator.observe().images[CAMERA]))


@needs_metaworld
def test_all_tasks_have_words():
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    assert {f"{task}-v3" for task in INSTRUCTIONS} == set(ALL_V3_ENVIRONMENTS)
    assert len(set(INSTRUCTIONS.values())) == 50


@needs_metaworld
@pytest.mark.parametrize("task", ["faucet-open", "stick-pull", "reach"])
def test_an_episode_is_the_same_whatever_ran_before(make, task):
    simulator, other = make(), make()
    first = episode(simulator, task, 5)
    episode(simulator, task, 6, steps=30)
    assert episode(simulator, task, 5) == first
    episode(other, task, 7, steps=3)
    assert episode(other, task, 5) == first
    assert episode(other, task, 8) != first


@needs_metaworld
def test_an_episode_is_metaworlds_own(make):
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    simulator = make(state="full")
    simulator.reset("door-open", 3)
    theirs = ALL_V3_ENVIRONMENTS["door-open-v3"]()
    theirs._set_task_called, theirs._freeze_rand_vec, theirs.seeded_rand_vec = True, False, True
    theirs._partially_observable = False
    del theirs.sawyer_observation_space
    theirs.seed(3)
    full, _ = theirs.reset()
    assert np.array_equal(simulator.full_state(), full)
    action = np.full(4, 0.5, np.float32)
    for _ in range(5):
        full, reward, *_ = theirs.step(action)
        assert simulator.step(action).reward == reward
        assert np.array_equal(simulator.full_state(), full)
    assert np.array_equal(simulator.observe().state, full.astype(np.float32))


@needs_metaworld
def test_frames_show_the_task(make):
    simulator = make(image_size=96)
    frames = {}
    for task in ("faucet-open", "door-unlock", "button-press-topdown"):
        simulator.reset(task, 2)
        frames[task] = simulator.observe().images[CAMERA].astype(int)
        assert frames[task].shape == (96, 96, 3)
        assert frames[task].std() > 20 and 40 < frames[task].mean() < 220
    assert np.abs(frames["faucet-open"] - frames["door-unlock"]).mean() > 3
    yellow = (frames["button-press-topdown"] * [1, 1, -2]).sum(2) > 200
    assert yellow.mean() > 0.01  # the button's box


@needs_metaworld
def test_frames_of_one_slot_do_not_change_when_others_come_and_go(make, monkeypatch):
    from cosmos_rl_vla.sims import rendering

    monkeypatch.setattr(rendering, "_MAX_MODELS", 2)
    simulator = make()
    simulator.reset("faucet-open", 1)
    before = simulator.observe().images[CAMERA]
    for size in (32, 33, 34):  # more than are kept: models make room for others
        other = make(image_size=size)
        other.reset("faucet-close", 2)
        other.observe()
        other.close()
    assert np.array_equal(simulator.observe().images[CAMERA], before)


@needs_metaworld
def test_cameras_are_upright_and_many(make):
    simulator = make(cameras=("corner2", "topview", "gripperPOV"), image_size=32)
    simulator.reset("reach", 0)
    assert {name: image.shape for name, image in simulator.observe().images.items()} == dict.fromkeys(
        ("corner2", "topview", "gripperPOV"), (32, 32, 3)
    )


@needs_metaworld
def test_the_state_does_not_tell_where_things_are(make):
    simulator = make()
    states = []
    for init in (1, 2):
        simulator.reset("faucet-open", init)
        states.append(simulator.observe().state)
    assert simulator.spec.state_dim == 4
    assert np.allclose(*states, atol=1e-3)  # the hand begins at one place


@needs_metaworld
@pytest.mark.parametrize("task", ["faucet-open", "reach", "push"])
def test_the_expert_succeeds(make, task):
    simulator = make(max_steps=200)
    simulator.reset(task, 11)
    for _ in range(200):
        stepped = simulator.step(simulator.expert_action())
        if stepped.terminated:
            break
    assert stepped.success and stepped.terminated and not stepped.truncated


@needs_metaworld
def test_an_episode_is_cut_off_at_its_limit(make):
    simulator = make(max_steps=3)
    simulator.reset("faucet-open", 0)
    assert [simulator.step(np.zeros(4, np.float32)).truncated for _ in range(3)] == [False, False, True]


@needs_metaworld
def test_physics_that_diverged_is_an_error_and_leaves_no_file(make, tmp_path, monkeypatch):
    from cosmos_rl_vla.sims.base import SimulatorError

    monkeypatch.chdir(tmp_path)
    simulator = make()
    simulator.reset("faucet-open", 0)
    simulator._scene._data.qvel[:] = 1e12
    with pytest.raises(SimulatorError, match="diverged"):
        simulator.step(np.zeros(4, np.float32))
    simulator.reset("faucet-open", 0)
    simulator.step(np.zeros(4, np.float32))
    assert not list(tmp_path.iterdir())


@needs_metaworld
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cameras": ("corner9",)}, "no camera 'corner9'; cameras: corner2, "),
        ({"max_steps": 501}, "max_steps is 1 to 500"),
        ({"state": "all"}, "proprioception or full"),
    ],
)
def test_options_that_do_not_fit_are_told(make, options, message):
    with pytest.raises(UserError, match=message):
        make(**options)


def test_a_task_that_does_not_exist_is_told_with_the_nearest():
    with pytest.raises(UserError, match="no task 'facet-open'; did you mean 'faucet-open'"):
        instruction("facet-open")


@pytest.mark.parametrize(
    ("installed", "given", "chosen"),
    [
        ({"OSMesa", "EGL"}, {}, "osmesa"),
        ({"OSMesa", "EGL"}, {"CUDA_VISIBLE_DEVICES": "3"}, "egl"),
        ({"OSMesa", "EGL"}, {"CUDA_VISIBLE_DEVICES": "3", "MUJOCO_GL": "osmesa"}, "osmesa"),
        ({"OSMesa"}, {"CUDA_VISIBLE_DEVICES": "3"}, "osmesa"),
        ({"EGL"}, {}, "egl"),
        ({"OSMesa", "EGL"}, {"MUJOCO_GL": "egl"}, "egl"),
        (set(), {"MUJOCO_GL": "glfw"}, "glfw"),
    ],
)
def test_gl_is_chosen_by_what_is_there_unless_the_user_has(installed, given, chosen):
    environment = dict(given)
    find = lambda name: name if name in installed else None  # noqa: E731
    assert choose_gl(environment, find=find, nvml=Nvml(None)) == chosen
    assert environment["MUJOCO_GL"] == chosen


@pytest.mark.parametrize(
    ("given", "device"),
    [
        ({"CUDA_VISIBLE_DEVICES": "5,6"}, "5"),
        ({"CUDA_VISIBLE_DEVICES": "5", "MUJOCO_EGL_DEVICE_ID": "0"}, "0"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f2"}, None),  # MuJoCo takes numbers alone
        ({}, None),
    ],
)
def test_a_replica_renders_on_its_own_gpu(given, device):
    environment = {"MUJOCO_GL": "egl", **given}
    choose_gl(environment, find=lambda name: name, nvml=Nvml(None))
    assert environment.get("MUJOCO_EGL_DEVICE_ID") == device


@pytest.mark.parametrize(
    ("given", "message"),
    [({}, "finds no OpenGL library"), ({"MUJOCO_GL": "osmesa"}, "libOSMesa is not on this machine")],
)
def test_a_missing_gl_library_says_what_to_install_and_to_set(given, message):
    with pytest.raises(UserError, match=rf"{message}.*install libosmesa6.*MUJOCO_GL"):
        choose_gl(dict(given), find=lambda name: None)


def test_a_gpu_named_by_its_uuid_renders_its_own_episodes():
    """In a container with part of a node, EGL counts the container's GPUs, as NVML does."""
    nvml = Nvml.open(FakeNvml({"GPU-1a2b": (), "GPU-77ff-2": ()}))
    environment = {"CUDA_VISIBLE_DEVICES": "GPU-77ff"}
    assert choose_gl(environment, find=lambda name: name, nvml=nvml) == "egl"
    assert environment["MUJOCO_EGL_DEVICE_ID"] == "1"
    unknown = {"CUDA_VISIBLE_DEVICES": "MIG-5"}
    choose_gl(unknown, find=lambda name: name, nvml=nvml)
    assert "MUJOCO_EGL_DEVICE_ID" not in unknown
