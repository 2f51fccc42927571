"""`cosmos-rl node`: three machines, here addresses of the loopback interface, with a directory each."""

import contextlib
import os
import secrets
import signal
import socket
from pathlib import Path

import pytest

from cosmos_rl_core.checkpoint.manifest import read_state

PROMPTS = 4


@pytest.fixture
def machine(tmp_path, bandit, write_recipe, start, monkeypatch):
    """Start one of three machines: `machine(1)`."""
    monkeypatch.setenv("COSMOS_RL_TOKEN", secrets.token_hex(32))
    port = three_ports()

    def begin(index, **changes):
        home = tmp_path / f"machine-{index}"
        home.mkdir(exist_ok=True)
        fixed = {"run__bind": "127.0.0.1", "rollout__replicas": 2, "logging__sinks": ["console", "jsonl"]}
        recipe = write_recipe(tmp_path / "run.toml", bandit("run", **{**fixed, **changes}))
        monkeypatch.setenv("COSMOS_RL_ADVERTISE", f"127.0.0.{index + 1}")
        flags = ("--nodes", 3, "--node", index, "--head", "127.0.0.1", "--port", port)
        return start("node", recipe, *flags, cwd=home)

    return begin


def three_ports():
    """The first of three free ports."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            for other in (port + 1, port + 2):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", other))
            return port


def tree_of(process):
    """The number of a process and those of all that it has started."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    tree = [process.pid]
    for pid in tree:
        tree += [child for child, parent in parents.items() if parent == pid]
    return tree


def lose(process):
    """Kill a process and all that it has started: a machine that lost its power."""
    for pid in tree_of(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def must_have_trained_each_sample_once(run_dir, rows_of, *, steps):
    assert [line["step"] for line in rows_of(run_dir / "metrics.jsonl")][:steps] == list(range(steps))
    files = [run_dir / "rollouts" / f"step_{step:06d}.jsonl" for step in range(steps)]
    assert len({row["sample"] for file in files for row in rows_of(file)}) == steps * PROMPTS


@pytest.mark.ci
def test_three_machines_train_to_the_end_and_exit_alike(tmp_path, machine, finished, rows_of):
    machines = [machine(index, run__max_steps=6) for index in (2, 0, 1)]
    for process in machines:
        finished(process, timeout_s=170)
    rows = rows_of(tmp_path / "machine-0" / "run" / "metrics.jsonl")
    assert len(rows) == 6
    assert rows[-1]["members"] == 3
    must_have_trained_each_sample_once(tmp_path / "machine-0" / "run", rows_of, steps=6)


ENDLESS = {"run__max_steps": 100_000, "rollout__options": {"delay_s": 0.05}}


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 0])
def test_a_lost_machine_returns_and_all_end_alike(tmp_path, machine, start, finished, wait_for, rows_of, lost):
    run_dir = tmp_path / "machine-0" / "run"
    # rank 1 of the policy is on machine 1, both rollouts on machine 2
    layout = {**ENDLESS, "policy__num_nodes": 2, "policy__ranks_per_node": 1, "checkpoint__every_steps": 2}
    machines = [machine(index, **layout) for index in range(3)]
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 3, "three steps", timeout_s=170)
    lose(machines[lost])
    machines[lost] = machine(lost, **layout)
    steps = len(rows_of(run_dir / "metrics.jsonl"))
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= steps + 3, "three steps more", timeout_s=170)
    wait_for(lambda: rows_of(run_dir / "metrics.jsonl")[-1]["members"] == 3, "all members", timeout_s=170)
    finished(start("stop", run_dir))
    for process in machines:
        finished(process, 130, timeout_s=170)
    steps = len(rows_of(run_dir / "metrics.jsonl"))
    assert read_state(run_dir / "checkpoints" / f"step_{steps}").step == steps
    must_have_trained_each_sample_once(run_dir, rows_of, steps=steps)


@pytest.mark.slow
def test_an_error_of_the_run_is_the_exit_code_of_all(machine, finished):
    machines = [machine(index, prompts__epochs=1, policy__prompts_per_step=100_000) for index in range(3)]
    texts = [finished(process, 2, timeout_s=170) for process in machines]
    assert "too few for one step" in texts[0][0]
    reason = "the run has ended with exit code 2; node 0 has the reason"
    assert [errors.splitlines()[-1] for _, errors in texts[1:]] == [reason] * 2  # after notes on the recipe


@pytest.mark.slow
def test_sigterm_takes_a_machine_out_of_the_run_and_at_node_0_ends_it(tmp_path, machine, finished, wait_for, rows_of):
    run_dir = tmp_path / "machine-0" / "run"
    machines = [machine(index, **ENDLESS) for index in range(3)]
    wait_for(lambda: [row["members"] for row in rows_of(run_dir / "metrics.jsonl")][-1:] == [3], "all", timeout_s=170)
    machines[2].terminate()
    finished(machines[2], 130, timeout_s=170)
    steps = len(rows_of(run_dir / "metrics.jsonl"))
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= steps + 3, "three steps more", timeout_s=170)
    assert rows_of(run_dir / "metrics.jsonl")[-1]["members"] == 2
    machines[0].terminate()
    for process in machines[:2]:
        finished(process, 130, timeout_s=170)
    steps = len(rows_of(run_dir / "metrics.jsonl"))
    assert read_state(run_dir / "checkpoints" / f"step_{steps}").step == steps


@pytest.mark.slow
def test_a_part_of_the_only_policy_without_restarts_left_ends_all_nodes_alike(tmp_path, machine, wait_for, rows_of):
    run_dir = tmp_path / "machine-0" / "run"
    layout = {**ENDLESS, "policy__num_nodes": 2, "policy__ranks_per_node": 1, "elastic__restart_workers": 0}
    machines = [machine(index, **layout) for index in range(3)]
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 3, "three steps", timeout_s=170)
    (rank,) = (pid for pid in tree_of(machines[1]) if "rank_main" in Path(f"/proc/{pid}/cmdline").read_text())
    os.kill(rank, signal.SIGKILL)
    outputs = [process.communicate(timeout=120) for process in machines]
    codes = {process.returncode for process in machines}
    assert len(codes) == 1 and codes.isdisjoint({0, 2}), (codes, outputs)
