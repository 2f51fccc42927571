"""Rows 8 to 12 and 15 to 18 of the failure matrix: a policy is killed at a named point, and nothing is lost or doubled.

every step has the samples of a run with one policy that nobody kills
weights and optimizer agree with it to 1e-12, in float64: a sum over fewer replicas has another order
the step of the death was committed by the survivors alone, or by all of them
"""

import os
import signal

import pytest
from lives import AT, PROMPTS, STEPS, journal_of, processes_of, weights_of

from cosmos_rl_core.control.ledger import records

pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]

SEVERAL_UPDATES = {"policy__minibatches": 2, "policy__epochs": 2}
slow = pytest.mark.slow


def voters_of(run_dir, step):
    [commit] = [record for record in journal_of(run_dir) if isinstance(record, records.Commit) and record.step == step]
    return commit.voters


ALONE, BOTH = ("policy-0",), ("policy-0", "policy-1")


@pytest.mark.parametrize(
    ("name", "point", "voters", "changes"),
    [
        pytest.param("policy-1", "forward", ALONE, {}, id="row 8: in the forward pass", marks=slow),
        pytest.param("policy-0", "forward", ("policy-1",), {}, id="row 8: the first of the mesh", marks=slow),
        pytest.param("policy-1", "reduce", ALONE, {}, id="row 9: in the sum of the gradients"),
        pytest.param("policy-1", "voted", ALONE, {}, id="row 10: after its vote, before the commit"),
        pytest.param("policy-0", "committed", BOTH, {}, id="row 11: after the commit, before the step", marks=slow),
        pytest.param("policy-1", "update", ALONE, SEVERAL_UPDATES, id="row 12: between two updates of a step"),
        pytest.param("policy-0", "serving", None, {}, id="while it serves weights", marks=slow),
        pytest.param("policy-0", "saving", None, {}, id="while it saves", marks=slow),
    ],
)
def test_a_policy_that_dies_at(dying, undisturbed, finished, must_equal, print_pause, name, point, voters, changes):
    process, run_dir, died = dying(name, point, replicas=2, **changes)
    out, _ = finished(process, timeout_s=240)
    assert died.exists(), "it did not die"
    assert f"{name} died (signal SIGKILL); starting it again" in out
    print_pause(run_dir)
    if voters is not None:
        assert voters_of(run_dir, AT) == voters
    must_equal(run_dir, undisturbed(**changes))
    assert not any(isinstance(record, records.RolledBack) for record in journal_of(run_dir))


@slow
def test_a_policy_that_dies_in_supervised_fine_tuning(dying, undisturbed, finished, rows_of):
    supervised = {"algorithm__name": "sft", "without": ("rollout", "reward", "sync")}
    process, run_dir, died = dying("policy-1", "reduce", replicas=2, **supervised)
    finished(process, timeout_s=240)
    assert died.exists(), "it did not die"
    assert voters_of(run_dir, AT) == ALONE
    assert [row["step"] for row in rows_of(run_dir / "metrics.jsonl")] == list(range(STEPS))
    mine, other = weights_of(run_dir), weights_of(undisturbed(**supervised))
    assert mine.keys() == other.keys()
    assert max((mine[name] - other[name]).abs().max().item() for name in mine) < 1e-12


@slow
@pytest.mark.parametrize("replicas", [2, 1], ids=["another policy publishes", "the policy is started again"])
def test_a_policy_that_dies_while_weights_are_written_in_place(
    tmp_path, dying, finished, rows_of, monkeypatch, replicas
):
    """The engine holds weights of two versions: it waits for whole ones, with groups in work."""
    torn = tmp_path / "torn"
    monkeypatch.setenv("TORN", str(torn))
    in_place = {"sync__staging": "in_place", "sync__bucket_bytes": 4096, "model__hidden": 1024}
    slowly = {"sync__max_staleness": 2, "rollout__options": {"delay_s": 0.05}}
    process, run_dir, died = dying("policy-0", "half", replicas=replicas, **in_place, **slowly)
    finished(process, timeout_s=300)
    assert died.exists(), "it did not die"
    seen = torn.read_text().split("\n")[:-1]
    assert "switch failed" in seen
    assert "term sampled" not in seen
    assert [row["step"] for row in rows_of(run_dir / "metrics.jsonl")] == list(range(STEPS))
    trained = [row["sample"] for step in range(STEPS) for row in rows_of(run_dir / f"rollouts/step_{step:06d}.jsonl")]
    assert len(set(trained)) == STEPS * PROMPTS, "a sample was trained twice"


def kill(run_dir, name):
    [pid] = processes_of(run_dir, name=name)
    os.kill(pid, signal.SIGKILL)


def votes(run_dir, name):
    """Number of commits that a replica voted for."""
    return sum(name in record.voters for record in journal_of(run_dir) if isinstance(record, records.Commit))


@pytest.mark.parametrize(
    ("name", "point", "newcomer", "replicas"),
    [
        pytest.param("policy-1", "healing", "policy-1", 2, id="row 17: the newcomer dies while it takes the state"),
        pytest.param("policy-0", "sending", "policy-2", 3, id="row 18: the source of the state dies", marks=slow),
    ],
)
def test_a_newcomer_joins_although(
    tmp_path, dying, undisturbed, wait_for, rows_of, finished, must_equal, name, point, newcomer, replicas
):
    process, run_dir, died = dying(name, point, replicas=replicas, at=0, paced=True)
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= AT + 1, "the steps before the kill")
    kill(run_dir, newcomer)
    before = votes(run_dir, newcomer)
    wait_for(died.exists, "the death while state is sent", timeout_s=300)
    wait_for(lambda: votes(run_dir, newcomer) > before, "a vote of the newcomer", timeout_s=300)
    (tmp_path / "go").touch()
    finished(process, timeout_s=240)
    must_equal(run_dir, undisturbed())


def test_a_newcomer_has_the_state_of_the_others(
    tmp_path, dying, undisturbed, wait_for, start, rows_of, finished, must_equal
):
    """Row 16. It trains alone after the death of the policy that it took its state from."""
    process, run_dir, _ = dying("nobody", "nowhere", replicas=1, paced=True)
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= AT, "the steps before it joins")
    newcomer = start("worker", "--role", "policy", "--name", "newcomer", "--run", run_dir)
    wait_for(lambda: votes(run_dir, "newcomer"), "a vote of the newcomer", timeout_s=300)
    kill(run_dir, "policy-0")
    (tmp_path / "go").touch()
    finished(process, timeout_s=240)
    finished(newcomer)
    alone = [r.voters for r in journal_of(run_dir) if isinstance(r, records.Commit)].count(("newcomer",))
    assert alone > 0
    assert not any(isinstance(record, records.RolledBack) for record in journal_of(run_dir))
    must_equal(run_dir, undisturbed())


def test_a_policy_that_begins_with_other_weights_takes_those_of_the_first(
    dying, undisturbed, finished, must_equal, monkeypatch
):
    """And publishes no others, though it could be asked for them: no process ends."""
    monkeypatch.setenv("OTHER_WEIGHTS", "policy-1")
    process, run_dir, _ = dying("nobody", "nowhere", replicas=2)
    out, _ = finished(process, timeout_s=240)
    assert "died" not in out and "could not start" not in out
    assert {record.voters for record in journal_of(run_dir) if isinstance(record, records.Commit)} == {BOTH}
    must_equal(run_dir, undisturbed())


@slow
def test_a_newcomer_that_loses_its_peer_does_not_train_alone(
    tmp_path, dying, undisturbed, wait_for, start, rows_of, finished, must_equal
):
    """The peer dies while it sends the state: nobody has the weights, and the run continues from the checkpoint."""
    process, run_dir, died = dying("policy-0", "sending", replicas=1, at=0, paced=True)
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= AT + 1, "the steps before it joins")
    newcomer = start("worker", "--role", "policy", "--name", "newcomer", "--run", run_dir)
    wait_for(died.exists, "the death while state is sent", timeout_s=300)
    (tmp_path / "go").touch()
    finished(process, timeout_s=240)
    newcomer.communicate(timeout=240)
    journal = journal_of(run_dir)
    [rollback] = [record for record in journal if isinstance(record, records.RolledBack)]
    assert rollback.version > 0
    before = journal[: journal.index(rollback)]
    assert not any(isinstance(record, records.Commit) and record.voters == ("newcomer",) for record in before)
    must_equal(run_dir, undisturbed())


@slow
def test_all_of_several_policies_die(tmp_path, dying, undisturbed, wait_for, rows_of, finished, must_equal):
    """Row 15. The steps after the newest checkpoint are done again, on a new lineage."""
    process, run_dir, _ = dying("nobody", "nowhere", replicas=2, paced=True)
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= AT + 1, "the steps before the kill")
    for name in BOTH:
        kill(run_dir, name)
    (tmp_path / "go").touch()
    out, _ = finished(process, timeout_s=240)
    assert "could not start" not in out
    [rollback] = [record for record in journal_of(run_dir) if isinstance(record, records.RolledBack)]
    assert rollback.version == 4
    must_equal(run_dir, undisturbed())
