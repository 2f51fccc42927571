"""The controller is killed with SIGKILL and started again in the run's directory, while its workers live.

Every sample is trained once, metrics have neither doubles nor holes, and with max_staleness = 0 weights and optimizer
state equal those of a run of as many policies that nobody disturbed, to the bit: the mesh of policies outlives its
controller, so that as many redo a step as began it.
"""

import json
import random
import signal
import sys
import time

import pytest
from lives import num_lines

from cosmos_rl_core.control.ledger import records
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.launch.takeover import take_over

pytestmark = pytest.mark.ci

STEPS, PROMPTS = 24, 4
CHANGES = {"run__max_steps": STEPS, "sync__max_staleness": 0, "rollout__options": {"delay_s": 0.02}}


def kill_and_start_again(process, run_dir, start, recipe):
    """Return the next controller."""
    process.kill()
    process.wait()
    before = json.loads((run_dir / "controller.json").read_text())
    return start("controller", recipe), before


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kills", "policies"),
    [(3, 1), pytest.param(50, 1, marks=pytest.mark.slow), pytest.param(15, 2, marks=pytest.mark.slow)],
)
def test_kills_of_the_controller_leave_no_trace(
    kills, policies, controller, start, wait_for, rows_of, finished, journal_of, bits_of, bandit, write_recipe, tmp_path
):
    chance, steps = random.Random(kills), max(STEPS, 3 * kills)
    changes = {**CHANGES, "run__max_steps": steps, "checkpoint__every_steps": 5, "policy__replicas": policies}
    process, run_dir, (policy, rollout) = controller(**changes)
    workers = [start(*policy, "--name", f"policy-{i}") for i in range(policies)] + [start(*rollout), start(*rollout)]
    metrics, generations = run_dir / "metrics.jsonl", [0]
    for kill in range(kills):
        wanted = chance.randint(1, 2) + kill * (steps - 6) // kills
        wait_for(lambda: num_lines(metrics) >= wanted, f"step {wanted}")  # noqa: B023
        time.sleep(chance.uniform(0.0, 0.2))  # the moment is the point of the test
        process, before = kill_and_start_again(process, run_dir, start, tmp_path / "run.toml")
        after = wait_for(
            lambda: (found := json.loads((run_dir / "controller.json").read_text())) != before and found,  # noqa: B023
            "the next controller",
        )
        assert after["generation"] == before["generation"] + 1
        assert after["address"] == before["address"]
        generations.append(after["generation"])
    finished(process, timeout_s=300)
    for worker in workers:
        finished(worker)

    assert [line["step"] for line in rows_of(metrics)] == list(range(steps))
    trained = {row["sample"] for step in range(steps) for row in rows_of(run_dir / f"rollouts/step_{step:06d}.jsonl")}
    assert sorted(trained) == list(range(steps * PROMPTS))
    journal = journal_of(run_dir)
    commits = [record for record in journal if isinstance(record, records.Commit)]
    assert [commit.step for commit in commits] == list(range(steps)), "a step was committed twice, or undone"
    assert {len(commit.voters) for commit in commits} == {policies}, "the mesh was changed"
    assert [record.generation for record in journal if isinstance(record, records.Restarted)] == generations[1:]
    whole = bandit(tmp_path / "whole", **{**changes, "run__placement": "inline" if policies == 1 else "local"})
    finished(start("run", write_recipe(tmp_path / "whole.toml", whole)), timeout_s=300)
    assert bits_of(run_dir / f"checkpoints/step_{steps}") == bits_of(tmp_path / f"whole/checkpoints/step_{steps}")
    print(f"kills of the controller: {kills}, with {policies} policies; samples trained twice or lost: 0")


@pytest.mark.timeout(1200)
def test_a_curriculum_draws_the_same_rows_after_a_kill(
    controller, start, wait_for, finished, journal_of, bits_of, bandit, write_recipe, tmp_path
):
    steps, curriculum = 20, {"curriculum": {"solved_reward": 0.8, "min_chance": 0.2}}
    changes = {**CHANGES, "run__max_steps": steps, "checkpoint__every_steps": 8, "prompts": curriculum}
    process, run_dir, (policy, rollout) = controller(**changes)
    workers = [start(*policy), start(*rollout)]
    for wanted in (5, 13):
        steps_done = lambda: num_lines(run_dir / "metrics.jsonl") >= wanted  # noqa: B023, E731
        wait_for(steps_done, f"step {wanted}", timeout_s=300)
        process, _ = kill_and_start_again(process, run_dir, start, tmp_path / "run.toml")
        generation = 1 + (wanted == 13)
        wait_for(
            lambda: json.loads((run_dir / "controller.json").read_text())["generation"] == generation,  # noqa: B023
            "the next controller",
        )
    finished(process, timeout_s=300)
    for worker in workers:
        finished(worker)

    whole = bandit(tmp_path / "whole", **{**changes, "run__placement": "inline"})
    finished(start("run", write_recipe(tmp_path / "whole.toml", whole)), timeout_s=300)
    skipped = {run.name: skipped_in(journal_of(run)) for run in (run_dir, tmp_path / "whole")}
    assert skipped["run"] == skipped["whole"] != []
    assert bits_of(run_dir / f"checkpoints/step_{steps}") == bits_of(tmp_path / f"whole/checkpoints/step_{steps}")

    part = bandit(tmp_path / "part", **{**changes, "run__placement": "inline", "run__max_steps": 8})
    finished(start("run", write_recipe(tmp_path / "part.toml", part)), timeout_s=300)
    part["run"]["max_steps"] = steps
    finished(start("run", write_recipe(tmp_path / "part.toml", part), "--resume", "auto"), timeout_s=300)
    later = skipped_in(journal_of(tmp_path / "part"))
    assert later == skipped["whole"][-len(later) :] != []
    assert bits_of(run_dir / f"checkpoints/step_{steps}") == bits_of(tmp_path / f"part/checkpoints/step_{steps}")


def skipped_in(journal):
    return [record.sample for record in journal if isinstance(record, records.Skipped)]


def test_a_second_controller_is_refused_and_the_run_unharmed(controller, start, wait_for, rows_of, finished, tmp_path):
    process, run_dir, (policy, rollout) = controller(run__max_steps=12)
    _, errors = finished(start("controller", tmp_path / "run.toml"), 2)
    assert "is in use by a live run" in errors
    with pytest.raises(UserError, match="is in use by a live controller"):  # where locks do not reach other machines
        take_over(run_dir, (run_dir / "resolved.toml").read_text())

    def told():
        return sum("another controller was started for this run" in row["text"] for row in rows_of(events))

    events = run_dir / "events.jsonl"
    wait_for(lambda: told() == 2, "the controller's lines on the other ones")
    for worker in [start(*policy), start(*rollout)]:
        finished(worker)
    finished(process)
    assert [line["step"] for line in rows_of(run_dir / "metrics.jsonl")] == list(range(12))


WITHOUT_LOCKS = """
import fcntl
fcntl.flock = lambda *_: None  # as on a file system whose locks do not reach other machines
from cosmos_rl_core.cli.app import main
main()
"""


def test_a_controller_that_was_stopped_and_replaced_leaves_the_run_alone(
    controller, start, wait_for, rows_of, finished, tmp_path
):
    """SIGSTOP, another one takes over, SIGCONT: its messages and files are not those of the run any more."""
    process, run_dir, (policy, rollout) = controller(run__max_steps=STEPS, rollout__options={"delay_s": 0.05})
    workers = [start(*policy), start(*rollout)]
    metrics, contact = run_dir / "metrics.jsonl", run_dir / "controller.json"
    wait_for(lambda: num_lines(metrics) >= 3, "three steps")
    process.send_signal(signal.SIGSTOP)
    following = start("controller", tmp_path / "run.toml", command=[sys.executable, "-c", WITHOUT_LOCKS])
    wait_for(lambda: json.loads(contact.read_text())["generation"] == 1, "the next controller")
    process.send_signal(signal.SIGCONT)
    _, errors = finished(process, 2)
    assert "another controller has taken over the run" in errors and "Traceback" not in errors
    assert not (run_dir / "outcome.json").exists()
    assert json.loads((run_dir / "status.json").read_text())["phase"] != "failed"
    finished(following)
    for worker in workers:
        finished(worker)
    assert [line["step"] for line in rows_of(metrics)] == list(range(STEPS))
    trained = {row["sample"] for step in range(STEPS) for row in rows_of(run_dir / f"rollouts/step_{step:06d}.jsonl")}
    assert sorted(trained) == list(range(STEPS * PROMPTS))
    assert json.loads((run_dir / "outcome.json").read_text())["state"] == "done"
