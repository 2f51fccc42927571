"""Whole runs of the tiny domain: real processes, real sockets, a bandit that learns in seconds."""

import asyncio
import hashlib
import json
import os
import re

import pytest
import torch

from cosmos_rl_core import run
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.errors import UserError, WorkerFailed
from cosmos_rl_core.observe.metrics import metric
from cosmos_rl_core.observe.record import read_outcome
from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.wire.channel import ConnectionClosed
from cosmos_rl_core.workers.context import WorkerContext
from cosmos_rl_core.workers.main import serve_role
from cosmos_rl_core.workers.rollout import RolloutRole


def recipe(tmp_path, **changes):
    tables = {
        "run": {
            "domain": "cosmos_rl_core.testing.tiny:TINY",
            "name": "tiny",
            "output_dir": str(tmp_path / "run"),
            "max_steps": 30,
        },
        "model": {},
        "data": {},
        "algorithm": {"name": "grpo"},
        "policy": {"prompts_per_step": 10, "threads": 1, "optimizer": {"learning_rate": 0.1}},
        "rollout": {"group_size": 8, "threads": 1, "sampling": {"max_tokens": 3}},
        "reward": {"functions": [{"name": "hits"}]},
        "sync": {"backend": "cosmos_rl_core.testing.file_sync:FileSync"},
        "eval": {"data": {}},
        "logging": {"sinks": ["jsonl"]},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        tables[section][name] = value
    return tables


@pytest.mark.parametrize("placement", ["inline", "local"])
def test_the_bandit_learns(tmp_path, placement):
    result = run(recipe(tmp_path, run__placement=placement))
    assert result.steps == 30
    assert result.evaluations[0]["eval/reward_mean"] < 0.5
    assert result.evaluations[30]["eval/reward_mean"] > 0.9
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(30))
    assert max(line["staleness_max"] for line in lines) <= 1
    assert {name for line in [*lines, *result.evaluations.values()] for name in line if metric(name) is None} == set()
    assert result.samples["issued"] == sum(n for state, n in result.samples.items() if state != "issued")
    check_records(result.run_dir)


def test_with_an_interval_each_step_trains_on_the_last_version_divisible_by_it(tmp_path):
    tables = recipe(tmp_path, run__placement="inline", run__max_steps=8, policy__prompts_per_step=2)
    tables["sync"] |= {"interval": 3, "max_staleness": 2}
    result = run(tables)
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["staleness_max"] for line in lines] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert [line["staleness_mean"] for line in lines] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert set(result.evaluations) == {0, 8}
    log = (result.run_dir / "logs" / "rollout-0.log").read_text()
    assert [int(n) for n in re.findall(r"weights of version (\d+)", log)] == [0, 3, 6, 8]


@pytest.mark.parametrize(
    ("change", "wrong"), [({"interval": 3}, "max_staleness = 2"), ({"interval": 2, "delta": True}, "sync.delta")]
)
def test_an_interval_that_the_staleness_forbids_is_refused(tmp_path, change, wrong):
    tables = recipe(tmp_path)
    tables["sync"] |= change
    with pytest.raises(UserError, match=rf"sync\.interval = {change['interval']}: .*{wrong}"):
        run(tables)


def test_a_deterministic_run_trains_with_deterministic_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "removed, and set to what it was after the test")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        run(recipe(tmp_path, run__placement="inline", run__max_steps=1, run__deterministic=True))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8", "or cuBLAS refuses every product on a GPU"
    finally:
        torch.use_deterministic_algorithms(False)


def check_records(run_dir):
    """What explains the run afterwards."""
    start = json.loads((run_dir / "run.json").read_text())
    assert start["pid"] == os.getpid()
    assert start["recipe_sha256"] == hashlib.sha256((run_dir / "resolved.toml").read_bytes()).hexdigest()
    outcome = json.loads((run_dir / "outcome.json").read_text())
    assert (outcome["state"], outcome["step"], outcome["resume"]) == ("done", 30, "")
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert [events[0]["kind"], events[-1]["kind"]] == ["start", "end"]
    assert any(event["kind"] == "evaluation" for event in events)
    status = [json.loads(line) for line in (run_dir / "status.jsonl").read_text().splitlines()]
    assert status[-1]["phase"] == "finished"
    assert status[-1]["waits"] == []
    names = {
        worker: {json.loads(line)["name"] for line in (run_dir / "spans" / f"{worker}.jsonl").read_text().splitlines()}
        for worker in ("policy-0", "rollout-0")
    }
    assert {"build", "wait for batch", "wait for commit", "forward_backward", "publish"} <= names["policy-0"]
    assert {"build", "generate", "score", "wait for leases", "wait for weights", "switch weights"} <= names["rollout-0"]
    assert "weights of version 30" in (run_dir / "logs" / "rollout-0.log").read_text()
    assert "ready at version 0" in (run_dir / "logs" / "policy-0.log").read_text()


def test_a_limit_of_open_files_too_low_for_the_replicas_is_noted_at_the_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("cosmos_rl_core.launch.run.raise_descriptor_limit", lambda: 515)
    run(recipe(tmp_path, run__placement="inline", run__max_steps=1, logging__sinks=["console"]))
    assert "2 replicas take up to 516 open files" in " ".join(capsys.readouterr().out.split())


def test_a_worker_of_this_process_that_lost_its_connection_ends_the_run(tmp_path, monkeypatch):
    async def lose(self):
        raise ConnectionClosed("the connection broke")

    monkeypatch.setattr(RolloutRole, "run", lose)
    with pytest.raises(WorkerFailed, match="rollout-0: the connection broke"):
        run(recipe(tmp_path, run__placement="inline"))
    outcome = read_outcome(tmp_path / "run")
    assert (outcome.state, outcome.worker, outcome.exit_code) == ("failed", "rollout-0", 1)
    assert outcome.message == "rollout-0: the connection broke"
    assert outcome.resume == f"cosmos-rl run {tmp_path}/run/resolved.toml --resume auto"


def test_a_worker_that_comes_when_the_run_is_over_leaves():
    class Ended:
        closed = False

        async def receive(self):
            return p.Stop(reason="over")

        def close(self):
            self.closed = True

    connection, context = (
        Ended(),
        WorkerContext(name="rollout-0", token=b"", controller="", timeline=Timeline(process="x"), threads=1),
    )
    assert asyncio.run(serve_role("rollout", context, connection)) == 0
    assert connection.closed
