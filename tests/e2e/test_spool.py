"""Groups that lie in spools: they outlive the process that made them, and what is lost is generated again."""

import json
import os
import signal
from pathlib import Path

import pytest

from cosmos_rl_core import run
from cosmos_rl_core.errors import UserError

pytestmark = [pytest.mark.ci, pytest.mark.xdist_group("spool")]  # one process makes what they share

STEPS, PROMPTS, GROUP = 4, 4, 4
PATIENT = """
import os
import time

from cosmos_rl_core.testing.tiny import Tiny

class Patient(Tiny):
    '''The policy says which samples are its first batch, and takes it only when the test says so.'''

    def collate(self, groups, **keywords):
        go = os.environ["GO"]
        if not os.path.exists(go + ".first"):
            with open(go + ".part", "w") as file:
                file.write(" ".join(str(group.prompt.sample_id) for group in groups))
            os.replace(go + ".part", go + ".first")
        while not os.path.exists(go):
            time.sleep(0.01)
        return super().collate(groups, **keywords)

DOMAIN = Patient()
"""


@pytest.fixture
def held(tmp_path, bandit, write_recipe, start, wait_for, monkeypatch):
    """A run whose first step waits in the policy until the file `go` is there, with the groups of the second ready."""
    (tmp_path / "patient.py").write_text(PATIENT)
    monkeypatch.setenv("GO", str(tmp_path / "go"))
    run_dir = tmp_path / "run"
    tables = bandit(
        run_dir,
        run__domain="patient:DOMAIN",
        run__max_steps=STEPS,
        policy__prompts_per_step=PROMPTS,
        rollout__group_size=GROUP,
        rollout__spool={"threshold_bytes": 0},
        sync__max_staleness=1,
        logging__sinks=["console", "jsonl"],
    )
    process = start("run", write_recipe(tmp_path / "run.toml", tables))
    wait_for(lambda: samples_of(run_dir).get("ready") == PROMPTS, "the groups of the second step")
    assert samples_of(run_dir)["assigned"] == PROMPTS
    wait_for((tmp_path / "go.first").exists, "the first batch in the policy")
    return process


def samples_of(run_dir):
    status = run_dir / "status.json"
    return json.loads(status.read_text())["samples"] if status.exists() else {}


def finish(process, tmp_path):
    """Let the policy go on; return what was printed."""
    (tmp_path / "go").touch()
    told, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return told


def must_have_trained_each_sample_once(run_dir, rows_of):
    trained = []
    for step in range(STEPS):
        rollouts = rows_of(run_dir / "rollouts" / f"step_{step:06d}.jsonl")
        assert len(rollouts) == PROMPTS * GROUP
        trained += {rollout["sample"] for rollout in rollouts}
    assert sorted(trained) == list(range(STEPS * PROMPTS))
    counts = samples_of(run_dir)
    assert counts["issued"] == sum(number for state, number in counts.items() if state != "issued")


def test_what_a_killed_process_had_delivered_is_trained_on(held, tmp_path, rows_of, pid_of):
    run_dir = tmp_path / "run"
    files = sorted((run_dir / "spool" / "rollout-0").iterdir())
    assert len(files) == 2 * PROMPTS
    os.kill(pid_of(run_dir, "rollout-0"), signal.SIGKILL)
    assert "rollout-0 died (signal SIGKILL); starting it again" in finish(held, tmp_path)
    must_have_trained_each_sample_once(run_dir, rows_of)
    lines = rows_of(run_dir / "metrics.jsonl")
    assert all(line["spooled_bytes"] > 0 and line["spool_lost"] == 0 for line in lines)
    assert not (run_dir / "spool").exists()


def flip(path):
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(Path.unlink, "tcp://127.0.0.1:", id="gone"),
        pytest.param(flip, "{file} is damaged: tcp://127.0.0.1:", id="a bit flipped"),
    ],
)
def test_a_group_whose_file_is_damaged_is_generated_again_and_trained_once(held, tmp_path, rows_of, damage, said):
    run_dir = tmp_path / "run"
    first = (tmp_path / "go.first").read_text().split()
    [file] = [f for f in (run_dir / "spool" / "rollout-0").iterdir() if f.name.partition("-")[0] not in first][:1]
    damage(file)
    told = finish(held, tmp_path)
    assert f"groups lost and generated again: 1 (policy-0: {said.format(file=file)}" in "".join(told.split("\n"))
    must_have_trained_each_sample_once(run_dir, rows_of)
    assert [line["spool_lost"] for line in rows_of(run_dir / "metrics.jsonl")] == [0, 1, 0, 0]


def test_a_spool_that_is_full_holds_generation_back_and_not_the_run(bandit, tmp_path):
    tables = bandit(tmp_path / "run", run__max_steps=6, sync__max_staleness=3, rollout__group_size=4)
    spooled = run(tables, ["rollout.spool.threshold_bytes=0", "rollout.spool.capacity_bytes=4000"])
    assert [line["step"] for line in spooled.metrics] == list(range(6))
    assert spooled.samples["committed"] + spooled.samples["checkpointed"] == 6 * 4


def test_a_spool_that_is_too_small_for_a_step_ends_the_run_with_what_to_set(bandit, tmp_path):
    tables = bandit(tmp_path / "run", rollout__spool={"threshold_bytes": 0, "capacity_bytes": 2000})
    with pytest.raises(UserError, match=r"\[rollout.spool\] capacity_bytes = 2000 is too small: .* 4 groups"):
        run(tables)
