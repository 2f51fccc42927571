"""Workers that leave in good order: SIGTERM. SIGUSR1 saves."""

import json
import signal
import socket
import subprocess

import pytest

from cosmos_rl_core.checkpoint.manifest import list_steps, read_state

pytestmark = pytest.mark.ci

STEPS, PROMPTS, LEFT = 30, 4, 75
PATIENT = """
import os
import time

from cosmos_rl_core.testing.tiny import Tiny

class Patient(Tiny):
    def collate(self, groups, **keywords):
        while not os.path.exists(os.environ["GO"]):
            time.sleep(0.01)
        return super().collate(groups, **keywords)

DOMAIN = Patient()
"""
SPOOLED = {"rollout__spool": {"threshold_bytes": 1}}


def samples_by_step(run_dir, rows_of, steps=STEPS):
    return [
        [row["sample"] for row in rows_of(run_dir / "rollouts" / f"step_{step:06d}.jsonl")] for step in range(steps)
    ]


def steps_done(run_dir, rows_of):
    return len(rows_of(run_dir / "metrics.jsonl"))


@pytest.mark.parametrize("changes", [{}, SPOOLED], ids=["in memory", "spooled"])
def test_a_rollout_worker_that_leaves_finishes_its_groups(controller, start, wait_for, rows_of, finished, changes):
    process, run_dir, (policy, rollout) = controller(
        run__max_steps=STEPS, rollout__options={"delay_s": 0.05}, sync__max_staleness=2, **changes
    )
    first = start(*rollout, "--name", "first")
    workers = [start(*policy), start(*rollout)]
    wait_for(lambda: steps_done(run_dir, rows_of) >= 3, "three steps")
    first.send_signal(signal.SIGTERM)
    finished(first)
    left_at = steps_done(run_dir, rows_of)
    out, _ = finished(process)
    for worker in workers:
        finished(worker)
    assert left_at < STEPS, "the run was over before the worker left"
    assert "first has left" in out
    assert "lost" not in out
    trained = [set(samples) for samples in samples_by_step(run_dir, rows_of)]
    assert [len(samples) for samples in trained] == [PROMPTS] * STEPS
    assert set().union(*trained) == set(range(STEPS * PROMPTS)), "a sample was lost, or trained twice"


def test_spooled_groups_of_a_worker_that_leaves_within_a_long_step_are_not_lost(
    controller, start, wait_for, rows_of, finished, tmp_path, monkeypatch
):
    """The policy is in the first step, and the groups of the next two wait in the spool."""
    (tmp_path / "patient.py").write_text(PATIENT)
    monkeypatch.setenv("GO", str(tmp_path / "go"))
    process, run_dir, (policy, rollout) = controller(
        run__domain="patient:DOMAIN", run__max_steps=6, elastic__leave_s=2.0, sync__max_staleness=2, **SPOOLED
    )
    first, trainer = start(*rollout, "--name", "first"), start(*policy)

    def samples():
        return json.loads((run_dir / "status.json").read_text())["samples"]

    wait_for(lambda: (run_dir / "status.json").exists() and samples().get("ready") == 2 * PROMPTS, "two steps' groups")
    first.send_signal(signal.SIGTERM)
    finished(first)
    (tmp_path / "go").touch()
    second = start(*rollout)
    out, _ = finished(process)
    for worker in (trainer, second):
        finished(worker)
    assert "groups lost" not in out and "to be leased again" not in out
    assert set().union(*samples_by_step(run_dir, rows_of, 6)) == set(range(6 * PROMPTS))


def test_a_rollout_worker_that_leaves_while_the_controller_is_away_waits_for_the_next_one(
    controller, start, wait_for, rows_of, finished, tmp_path, journal_of
):
    process, run_dir, (policy, rollout) = controller(
        run__max_steps=STEPS, rollout__options={"delay_s": 0.05}, elastic__leave_s=60.0
    )
    first, trainer = start(*rollout, "--name", "first"), start(*policy)
    wait_for(lambda: steps_done(run_dir, rows_of) >= 3, "three steps")
    process.kill()
    process.wait()
    first.send_signal(signal.SIGTERM)
    following = start("controller", tmp_path / "run.toml")
    finished(first)
    second = start(*rollout)
    out, _ = finished(following)
    for worker in (trainer, second):
        finished(worker)
    assert "first has left" in out
    assert "lost" not in out
    assert set().union(*samples_by_step(run_dir, rows_of)) == set(range(STEPS * PROMPTS))


def test_what_is_not_finished_within_leave_s_is_generated_by_others(controller, start, wait_for, rows_of, finished):
    process, run_dir, (policy, rollout) = controller(
        run__max_steps=8, rollout__options={"delay_s": 1.0}, elastic__leave_s=0.1, rollout__max_attempts=1
    )
    first = start(*rollout, "--name", "first")
    start(*policy)
    wait_for(lambda: steps_done(run_dir, rows_of) >= 1, "a step")
    second = start(*rollout)
    first.send_signal(signal.SIGTERM)
    finished(first)
    out, _ = finished(process)
    finished(second)
    assert "dropped" not in out, "leaving counted as a failed attempt"
    assert set().union(*samples_by_step(run_dir, rows_of, 8)) == set(range(8 * PROMPTS))


def leave_and_continue(process, run_dir, policy, start, rows_of, finished, *, first):
    """Send SIGTERM to a policy, which saves and leaves; another one does the remaining steps, and none again."""
    first.send_signal(signal.SIGTERM)
    finished(first, LEFT)
    left_at = steps_done(run_dir, rows_of)
    assert 3 <= left_at < STEPS
    assert read_state(run_dir / "checkpoints" / f"step_{left_at}").step == left_at
    second = start(*policy)
    out, _ = finished(process)
    finished(second)
    assert "policy-0 has left" in out
    assert [row["step"] for row in rows_of(run_dir / "metrics.jsonl")] == list(range(STEPS)), "a step was done again"


def test_a_policy_that_leaves_saves_and_another_one_continues(controller, start, wait_for, rows_of, finished):
    process, run_dir, (policy, rollout) = controller(run__max_steps=STEPS, rollout__options={"delay_s": 0.05})
    first, other = start(*policy, "--left-code", LEFT), start(*rollout)
    wait_for(lambda: steps_done(run_dir, rows_of) >= 3, "three steps")
    leave_and_continue(process, run_dir, policy, start, rows_of, finished, first=first)
    finished(other)
    assert [len(set(samples)) for samples in samples_by_step(run_dir, rows_of)] == [PROMPTS] * STEPS
    assert len(set().union(*samples_by_step(run_dir, rows_of))) == STEPS * PROMPTS


def test_without_another_policy_the_run_ends_like_an_interrupt(controller, start, wait_for, rows_of, finished):
    process, run_dir, (policy, rollout) = controller(run__max_steps=10_000, elastic__policy_wait_s=0.5)
    first, other = start(*policy), start(*rollout)
    wait_for(lambda: steps_done(run_dir, rows_of) >= 3, "three steps")
    first.send_signal(signal.SIGUSR1)
    saved = wait_for(lambda: list_steps(run_dir / "checkpoints"), "the checkpoint that SIGUSR1 asks for")
    wait_for(lambda: steps_done(run_dir, rows_of) > saved[0] + 1, "training to continue")
    first.send_signal(signal.SIGTERM)
    finished(first)
    _, errors = finished(process, 130)
    assert errors == ""
    finished(other)
    done = steps_done(run_dir, rows_of)
    assert read_state(run_dir / "checkpoints" / f"step_{done}").step == done


def test_a_policy_of_two_ranks_saves_and_leaves_together(controller, start, wait_for, rows_of, finished):
    process, run_dir, (policy, rollout) = controller(
        run__max_steps=STEPS, policy__parallel__dp_shard=2, rollout__options={"delay_s": 0.05}
    )
    first, other = start(*policy, "--left-code", LEFT), start(*rollout)
    wait_for(lambda: steps_done(run_dir, rows_of) >= 3, "three steps")
    first.send_signal(signal.SIGUSR1)
    wait_for(lambda: list_steps(run_dir / "checkpoints"), "the checkpoint that SIGUSR1 asks for")
    leave_and_continue(process, run_dir, policy, start, rows_of, finished, first=first)
    finished(other)


def two_policies(controller, start, wait_for, rows_of):
    """A run with two policies that both train."""
    process, run_dir, (policy, rollout) = controller(
        run__max_steps=10_000, policy__replicas=2, elastic__policy_wait_s=0.5, rollout__options={"delay_s": 0.02}
    )
    policies = [start(*policy, "--name", name, "--left-code", LEFT) for name in ("a", "b")]
    policies.append(start(*rollout))
    wait_for(lambda: steps_done(run_dir, rows_of) >= 3, "three steps", timeout_s=300)
    return process, run_dir, policies


def ends_with_a_checkpoint(process, run_dir, rows_of, finished):
    finished(process, 130)
    done = steps_done(run_dir, rows_of)
    assert read_state(run_dir / "checkpoints" / f"step_{done}").step == done
    assert [row["step"] for row in rows_of(run_dir / "metrics.jsonl")] == list(range(done))


@pytest.mark.timeout(600)
def test_a_policy_that_leaves_others_saves_nothing_and_the_last_one_does(
    controller, start, wait_for, rows_of, finished
):
    process, run_dir, (first, second, rollout) = two_policies(controller, start, wait_for, rows_of)
    first.send_signal(signal.SIGTERM)
    finished(first, LEFT)
    at = steps_done(run_dir, rows_of)
    wait_for(lambda: steps_done(run_dir, rows_of) > at + 2, "steps of the second one")
    assert list_steps(run_dir / "checkpoints") == [], "the others waited for a save"
    second.send_signal(signal.SIGTERM)
    finished(second, LEFT)
    ends_with_a_checkpoint(process, run_dir, rows_of, finished)
    finished(rollout)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL], ids=["all leave at once", "the first is killed"])
def test_the_last_of_several_policies_saves(controller, start, wait_for, rows_of, finished, sent):
    process, run_dir, (first, second, rollout) = two_policies(controller, start, wait_for, rows_of)
    first.send_signal(sent)
    second.send_signal(signal.SIGTERM)
    finished(first, LEFT if sent == signal.SIGTERM else -sent)
    finished(second, LEFT)
    ends_with_a_checkpoint(process, run_dir, rows_of, finished)
    finished(rollout)


def test_a_second_signal_ends_a_worker_at_once(controller, start, wait_for, rows_of, finished):
    process, run_dir, (policy, rollout) = controller(run__max_steps=10_000, rollout__options={"delay_s": 60.0})
    worker = start(*rollout, "--name", "slow")
    start(*policy)
    status = run_dir / "status.json"
    wait_for(lambda: status.exists() and "leased to slow" in status.read_text(), "the first lease")
    worker.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(2.0)
    worker.send_signal(signal.SIGTERM)
    finished(worker, 143)
    process.send_signal(signal.SIGINT)


def test_a_controller_that_moves_leaves_the_run_to_the_next_one(
    controller, start, wait_for, rows_of, finished, monkeypatch
):
    """As on a platform that moves processes: the token is given, workers start first, SIGTERM ends the controller."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setenv("COSMOS_RL_TOKEN", "5a" * 32)
    reach = ("--controller", f"tcp://127.0.0.1:{port}", "--wait-s", "60", "--left-code", LEFT)
    workers = [start("worker", "--role", role, *reach) for role in ("policy", "rollout")]
    settings = {"run__max_steps": 10_000, "rollout__options": {"delay_s": 0.05}, "elastic__controller_moves": True}
    process, run_dir, _ = controller("--port", port, **settings)
    assert (run_dir / "token").read_text().strip() == "5a" * 32
    wait_for(lambda: steps_done(run_dir, rows_of) >= 3, "three steps")
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: steps_done(run_dir, rows_of) >= 6, "steps while the policy stays")
    process.kill()
    process.communicate(timeout=60)
    second = start("controller", run_dir.parent / "run.toml", "--port", port)
    wait_for(lambda: json.loads((run_dir / "controller.json").read_text())["generation"] == 1, "the next controller")
    at = steps_done(run_dir, rows_of)
    wait_for(lambda: steps_done(run_dir, rows_of) >= at + 3, "steps with the next controller")
    for one in (second, *workers):
        one.send_signal(signal.SIGTERM)
    finished(workers[0], LEFT)
    finished(second, 128 + signal.SIGTERM)
    workers[1].communicate(timeout=60)
    assert workers[1].returncode in (LEFT, 1)  # 1: the controller was gone before its Goodbye was answered
    done = steps_done(run_dir, rows_of)
    assert read_state(run_dir / "checkpoints" / f"step_{done}").step == done
    assert (run_dir / "controller.json").exists(), "no further controller would take over"
