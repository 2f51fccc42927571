"""`cosmos-rl scale`: the number of workers of a live run changes, and the run goes on."""

import json
import re
import signal

import pytest

pytestmark = pytest.mark.ci

PROMPTS = 4
WINDOW = 2 * PROMPTS  # of max_staleness = 1, the default


@pytest.fixture
def scaled(start, finished):
    """Run `cosmos-rl scale` to its end and return the lines that it prints, or its error."""

    def scale(*arguments, code=0):
        out, errors = finished(start("scale", *arguments), code)
        return out.splitlines() if code == 0 else errors

    return scale


def steps_done(run_dir, rows_of):
    return len(rows_of(run_dir / "metrics.jsonl"))


def test_workers_are_started_and_drained_and_every_sample_is_trained_once(
    tmp_path, bandit, write_recipe, start, wait_for, rows_of, finished, scaled, monkeypatch
):
    run_dir = tmp_path / "run"
    tables = bandit(
        run_dir,
        run__max_steps=100_000,
        policy__prompts_per_step=PROMPTS,
        rollout__replicas=2,
        rollout__options={"delay_s": 0.05},
        logging__sinks=["console", "jsonl"],
    )
    process = start("run", write_recipe(tmp_path / "run.toml", tables))
    wait_for(lambda: steps_done(run_dir, rows_of) >= 2, "two steps")

    lines = scaled(run_dir, "rollout=3", "policy=2")
    assert sorted(lines[:2]) == ["policy-1 starts", "rollout-2 starts"]
    assert sorted(lines[2:4]) == ["policy-1 is ready", "rollout-2 is ready"]
    assert lines[4:] == ["ready: 2 policy, 3 rollout"]
    guest = start("worker", "--role", "rollout", "--name", "guest", "--run", run_dir)  # of any machine
    wait_for(lambda: rows_of(run_dir / "metrics.jsonl")[-1]["members"] == 6.0, "a step with six members")

    lines = scaled(run_dir, "rollout=1", "policy=1")
    youngest = {"guest", "rollout-2", "policy-1"}
    assert {f"{name} leaves" for name in youngest} < set(lines[:4])
    assert {f"{name} has left" for name in youngest} < set(lines[4:8])
    assert lines[8:] == ["ready: 1 policy, 1 rollout"]
    finished(guest)
    status = run_dir / "status.json"
    wait_for(lambda: json.loads(status.read_text())["samples"]["leased"] > WINDOW / 2, "the share of both rollouts")
    assert "rollout-3 starts" in scaled(run_dir, "rollout=2"), "a name is never used again"
    monkeypatch.setenv("COSMOS_RL_TOKEN", "00" * 32)
    assert "does not have this run's token" in scaled(run_dir, "rollout=2", code=2)
    done = steps_done(run_dir, rows_of)
    wait_for(lambda: steps_done(run_dir, rows_of) >= done + 2, "steps with the new number")
    process.send_signal(signal.SIGINT)
    out, errors = finished(process, 130)

    assert "has refused a connection: its peer has another token" in errors
    assert "workers wanted: 3 rollout, 2 policy" in out
    assert "died" not in out and "lost" not in out
    steps = steps_done(run_dir, rows_of)
    trained = [
        {row["sample"] for row in rows_of(run_dir / "rollouts" / f"step_{step:06d}.jsonl")} for step in range(steps)
    ]
    assert [len(samples) for samples in trained] == [PROMPTS] * steps
    assert len(set().union(*trained)) == PROMPTS * steps, "a sample was trained twice"


def test_without_a_launcher_the_command_is_printed_and_workers_are_drained(
    controller, start, wait_for, rows_of, finished, scaled
):
    process, run_dir, (policy, rollout) = controller(run__max_steps=100_000, rollout__options={"delay_s": 0.05})
    workers = [start(*policy), start(*rollout, "--name", "first")]
    wait_for(lambda: steps_done(run_dir, rows_of) >= 2, "two steps")
    one, other, ready = scaled(run_dir, "rollout=2", "policy=2")
    assert re.fullmatch(r"start another worker by: cosmos-rl worker --role (policy --name policy-1|rollout) .*", one)
    assert re.fullmatch(r"start another worker by: cosmos-rl worker --role (policy --name policy-1|rollout) .*", other)
    assert ready == "ready: 1 policy, 1 rollout"
    [command] = [line.split(": cosmos-rl ")[1] for line in (one, other) if "--role rollout" in line]
    second = start(*command.split(), "--name", "second")
    wait_for(lambda: rows_of(run_dir / "metrics.jsonl")[-1]["members"] == 3.0, "a step with three members")
    address = json.loads((run_dir / "controller.json").read_text())["address"]
    without_directory = ("--controller", address, "--token-file", run_dir / "token")
    lines = scaled(*without_directory, "rollout=1")
    assert lines == ["second leaves", "second has left", "ready: 1 policy, 1 rollout"]
    finished(second)
    out, _ = finished(start("stop", *without_directory))
    assert out.endswith("the run has ended\n")
    finished(process, 130)
    for worker in workers:
        finished(worker)


def test_a_policy_that_waits_for_rollouts_gets_another_one(
    tmp_path, bandit, write_recipe, start, wait_for, rows_of, finished
):
    run_dir = tmp_path / "run"
    tables = bandit(
        run_dir,
        run__max_steps=100_000,
        rollout__options={"delay_s": 0.2},
        elastic__autoscale={"max_rollouts": 2, "cooldown_steps": 1},
        logging__sinks=["console", "jsonl"],
    )
    process = start("run", write_recipe(tmp_path / "run.toml", tables))
    wait_for(
        lambda: (rows := rows_of(run_dir / "metrics.jsonl")) and rows[-1]["members"] == 3.0, "a step with two rollouts"
    )
    process.send_signal(signal.SIGINT)
    out, _ = finished(process, 130)
    assert "autoscaling: policy idle for" in out and "workers wanted: 2 rollout" in out
