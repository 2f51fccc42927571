"""Episodes as files, and as recordings of Rerun."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.inference.episodes import export_episodes
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup
from cosmos_rl_vla.trajectory import EpisodeGallery

K, T, CAMERAS = 3, 5, 2


@pytest.fixture
def written(tmp_path):
    """The folder of `cosmos-rl eval` with one episode of two cameras."""
    images = np.zeros((K, CAMERAS, 32, 32, 3), np.uint8)
    images[:, 1] = 200
    rollout = Rollout(
        arrays={"images": images, "state": np.arange(K * 2, dtype=np.float32).reshape(K, 2)},
        rollout_logprobs=np.zeros(K, np.float32),
        versions=np.zeros(K, np.int32),
        loss_mask=np.ones(K, bool),
        text="success in 5 steps",
        media={
            "video": np.concatenate([images[:, 0], images[:1, 0] + 90]),
            "actions": np.arange(T * 3, dtype=np.float32).reshape(T, 3),
            "step_rewards": np.array([0, 0, 0, 0, 1], np.float32),
            "decided_at": np.array([0, 2, 4], np.int32),
            "success": np.array([True]),
        },
    )
    group = RolloutGroup(prompt=Prompt(sample_id=3, row={}), prompt_text="reach the red square", rollouts=(rollout,))
    (tmp_path / "media").mkdir()
    video = EpisodeGallery(tmp_path / "media").write(tmp_path / "media" / "000003_0", group, 0)
    line = {"sample": 3, "rollout": 0, "prompt": group.prompt_text, "response": rollout.text, "policy_version": 4}
    line |= {"media": [f"media/{video.name}"], "reward": 1.0}
    lines = [line, {"sample": 4, "error": "lost"}]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return tmp_path


def test_an_episode_is_written_with_its_numbers_and_every_camera(written):
    assert sorted(path.name for path in (written / "media").iterdir()) == [
        "000003_0.mp4",
        "000003_0.npz",
        "000003_0_camera1.mp4",
    ]
    with np.load(written / "media" / "000003_0.npz", allow_pickle=False) as arrays:
        assert {name: arrays[name].shape for name in arrays} == {
            "state": (K, 2),
            "decided_at": (K,),
            "actions": (T, 3),
            "step_rewards": (T,),
            "success": (1,),
        }


def test_an_episode_becomes_a_recording_with_cameras_state_actions_rewards_and_success(written, tmp_path):
    pytest.importorskip("rerun", reason="rerun-sdk is not installed")
    [file] = export_episodes(written, tmp_path / "out")
    assert file.name == "000003_0.rrd"

    def rerun(*arguments):
        command = [sys.executable, "-m", "rerun", "rrd", *arguments, str(file)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    verified = rerun("verify")
    assert verified.returncode == 0, verified.stderr
    rows = {}
    for line in rerun("print").stdout.splitlines():
        for entity in ("camera/0", "camera/1", "state", "action", "reward", "success", "episode"):
            if f"/{entity} " in line or f"/{entity}\t" in line or f"'/{entity}'" in line:
                rows[entity] = line
    assert sorted(rows) == ["action", "camera/0", "camera/1", "episode", "reward", "state", "success"]


def test_without_rerun_or_episodes_the_error_says_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "rollouts.jsonl").write_text(json.dumps({"sample": 0, "prompt": "1 + 1", "response": "2"}) + "\n")
    monkeypatch.setitem(sys.modules, "rerun", None)
    with pytest.raises(UserError, match=r"cosmos-rl-core\[rerun\]"):
        export_episodes(tmp_path, tmp_path / "out")
    monkeypatch.setitem(sys.modules, "rerun", object())
    with pytest.raises(UserError, match="no episodes"):
        export_episodes(tmp_path, tmp_path / "out")
    with pytest.raises(UserError, match="generate or eval"):
        export_episodes(tmp_path / "none", tmp_path / "out")
