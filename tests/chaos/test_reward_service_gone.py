"""The reward service of a run is killed: groups without scores wait, are retried or dropped, and never score 0."""

import os
import signal

import pytest

from cosmos_rl_core.checkpoint.manifest import list_steps

pytestmark = [pytest.mark.ci, pytest.mark.slow, pytest.mark.timeout(400)]

REWARD = "def seven(group):\n    return [7.0 + place for place in range(len(group.rollouts))]\n"
STEPS = 12


@pytest.fixture
def serve(tmp_path, start):
    """Start the service: `server, url = serve()`; at the address of an earlier one with `at=url`."""
    (tmp_path / "scores.py").write_text(REWARD)

    def begin(*, at="http://127.0.0.1:0"):
        port = at.rpartition(":")[2].rstrip("/")
        server = start(
            *("reward-server", "--reward", "scores:seven", "--port", port, "--token-file", tmp_path / "reward.token"),
            cwd=tmp_path,
        )
        return server, server.stdout.readline().split()[2]

    return begin


@pytest.fixture
def begun(tmp_path, bandit, write_recipe, start):
    """Start a run with the service's reward, with these options and [rollout] max_attempts."""

    def begin(url, *, deadline_s, max_attempts):
        options = {"reward": "seven", "url": url, "token_file": str(tmp_path / "reward.token"), "media": "none"}
        reward = {
            "name": "cosmos_rl_core.reward.remote:RemoteReward",
            "label": "seven",
            "options": options | {"deadline_s": deadline_s},
        }
        tables = bandit(
            tmp_path / "run",
            run__max_steps=STEPS,
            reward__functions=[reward],
            reward__timeout_s=deadline_s + 10.0,
            rollout__options={"delay_s": 0.1},
            rollout__max_attempts=max_attempts,
            checkpoint__every_steps=1,
        )
        return start("run", write_recipe(tmp_path / "run.toml", tables))

    return begin


def scores(run_dir, rows_of):
    files = sorted((run_dir / "rollouts").glob("step_*.jsonl"))
    return [row["rewards"]["seven"] for file in files for row in rows_of(file)]


def test_groups_of_a_short_outage_wait_for_the_next_service(tmp_path, serve, begun, wait_for, finished, rows_of):
    server, url = serve()
    process = begun(url, deadline_s=120.0, max_attempts=1)
    wait_for(lambda: len(rows_of(tmp_path / "run" / "metrics.jsonl")) >= 3, "three steps")
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    serve(at=url)
    finished(process, timeout_s=240)
    lines = rows_of(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert set(scores(tmp_path / "run", rows_of)) == {7.0, 8.0, 9.0, 10.0}


def test_an_outage_that_lasts_ends_the_run_with_the_reason_and_the_last_step_saved(
    tmp_path, serve, begun, wait_for, finished, rows_of
):
    server, url = serve()
    process = begun(url, deadline_s=1.0, max_attempts=2)
    wait_for(lambda: len(rows_of(tmp_path / "run" / "metrics.jsonl")) >= 3, "three steps")
    os.kill(server.pid, signal.SIGKILL)
    _, errors = finished(process, 2, timeout_s=240)
    assert "17 samples in a row failed, the last with: reward 'seven'" in errors
    assert "raised ConnectionError: no scores within" in errors
    steps = len(rows_of(tmp_path / "run" / "metrics.jsonl"))
    assert 3 <= steps < STEPS
    assert max(list_steps(tmp_path / "run" / "checkpoints")) in (steps - 1, steps)
    assert set(scores(tmp_path / "run", rows_of)) == {7.0, 8.0, 9.0, 10.0}
