"""`cosmos-rl serve-policy`: what it loads, what it refuses before a robot moves, and both protocols of one process."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from vla_lerobot import RemotePolicyConfig, TimedObservation, lerobot_helpers, robot
from vla_serving import served, small_policy
from websockets.asyncio.client import connect

from cosmos_rl_core import run
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.wire.listening import Address, listen
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.serving.openpi import packed, unpacked
from cosmos_rl_vla.serving.serve import ServePolicyRequest, load_policy, serve_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_policy(tmp_path_factory.mktemp("served") / "policy")


def ask(place, **options):
    return ServePolicyRequest(checkpoint=str(place), threads=1, max_batch=2, **options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"host": "0.0.0.0"}, "--host 0.0.0.0 can be reached from other machines: add --token-file FILE"),
        ({"host": "0.0.0.0", "lerobot_port": 1}, "can be reached from other machines: add --without-token"),
        ({"token_file": "t", "lerobot_port": 1}, "lerobot's client has no token"),
    ],
)
def test_other_machines_need_a_token_or_a_word(folder, options, error):
    with pytest.raises(UserError, match=error):
        serve_policy(ask(folder, **options), say=print)


def test_what_cannot_be_served_is_said_before_anything_listens(folder, tmp_path):
    with pytest.raises(UserError, match="does not say what its cameras are called: add --camera NAME"):
        load_policy(ask(folder))
    with pytest.raises(UserError, match=r"--step 3: .* is a model"):
        load_policy(ask(folder, step=3, cameras=("board",)))
    with pytest.raises(UserError, match="no checkpoint there"):
        load_policy(ask(tmp_path))
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "bare" / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(UserError, match="has no action statistics"):
        load_policy(ask(tmp_path / "bare", cameras=("board",)))
    ActionStats.unit(3).save(tmp_path / "bare")
    with pytest.raises(UserError, match="statistics of 3-dimensional actions"):
        load_policy(ask(tmp_path / "bare", cameras=("board",)))
    with listen(Address(host="127.0.0.1"), allow_remote=False) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is in use"):
            serve_policy(ask(folder, cameras=("board",), port=port), say=print)


def test_a_folder_is_served_with_overrides_and_the_cameras_of_the_options(folder):
    policy = load_policy(ask(folder, cameras=("observation.images.board",)), ["model.horizon=3"])
    layout = policy.layout
    assert (layout.horizon, layout.action_dim, layout.state_dim, layout.image_size) == (3, 2, 2, None)
    image = np.zeros((64, 64, 3), np.uint8)
    seen = layout.read({"images": {"board": image}, "state": np.zeros(2), "prompt": "reach the red square"})
    assert [chunk.shape for chunk in policy.act([policy.admit(seen, seed=0, place=0)] * 2)] == [(3, 2)] * 2


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_a_run_is_served_with_the_sizes_of_its_simulator_and_its_trained_weights(folder, tmp_path):
    recipe = {
        "run": {"domain": "vla", "placement": "inline", "max_steps": 1, "output_dir": str(tmp_path / "run")},
        "model": {"path": str(folder)},
        "data": {"simulator": "reach", "tasks": ["red"], "options": {"image_size": 16}},
        "algorithm": {"name": "ppo"},
        "policy": {"prompts_per_step": 2, "threads": 1, "optimizer": {"learning_rate": 0.1}},
        "rollout": {"group_size": 1, "threads": 1, "sampling": {"max_steps": 8}},
        "reward": {"functions": [{"name": "success"}]},
    }
    recipe["rollout"]["options"] = {"processes": 1, "slots": 2}
    run(recipe)
    trained, first = load_policy(ask(tmp_path / "run")), load_policy(ask(folder, cameras=("board",)))
    assert (trained.layout.cameras, trained.layout.image_size) == (("board",), (16, 16))
    image = np.zeros((16, 16, 3), np.uint8)
    sent = {"board": image, "state": np.zeros(2), "prompt": "reach the red square"}
    chunks = [one.act([one.admit(one.layout.read(sent), seed=0, place=0)])[0] for one in (trained, first)]
    assert np.abs(chunks[0] - chunks[1]).max() > 1e-3


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_one_process_serves_both_protocols_and_prints_percentiles_at_its_end(folder):
    image = np.zeros((8, 8, 3), np.uint8)

    async def drive(openpi_port, lerobot_port):
        async with connect(f"ws://127.0.0.1:{openpi_port}") as one, robot(lerobot_port) as other:
            await one.recv()
            await one.send(packed({"board": image, "state": np.zeros(2), "prompt": "reach the red square"}))
            actions = unpacked(await one.recv())["actions"]
            image_feature = {"dtype": "image", "shape": (8, 8, 3), "names": ["height", "width", "channels"]}
            state_feature = {"dtype": "float32", "shape": (2,), "names": ["x.pos", "y.pos"]}
            features = {"observation.images.board": image_feature, "observation.state": state_feature}
            await other.start(RemotePolicyConfig("pi05", "policy", features, 3))
            raw = {"x.pos": 0.0, "y.pos": 0.0, "board": image, "task": "reach the red square"}
            await other.send(TimedObservation(0.0, 5, raw, True))
            return actions.shape, [action.timestep for action in await other.actions()]

    with served(folder, "--camera", "board", "--port", "0", "--lerobot-port", "0", "--max-batch", "2") as server:
        lerobot_port = server.wait_for(r"127.0.0.1:(\d+) \(lerobot")[1]
        openpi_port = server.wait_for(r"ws://127.0.0.1:(\d+)")[1]
        with lerobot_helpers():
            assert asyncio.run(drive(openpi_port, lerobot_port)) == ((4, 2), [5, 6, 7])
        code, printed = server.stop()
    assert code == 130
    assert json.dumps(printed).count("requests 2  refused 0") == 1
