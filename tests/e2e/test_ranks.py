"""A policy replica of two ranks, as a user meets it: errors that name the rank, kill -9, Ctrl-C, another layout."""

import os
import signal
from pathlib import Path

import pytest

from cosmos_rl_core import run
from cosmos_rl_core.checkpoint.manifest import read_origin, read_state

pytestmark = pytest.mark.ci

STEPS, PROMPTS = 12, 4
FAILING = """
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.testing.tiny import Tiny

class Failing(Tiny):
    def collate(self, groups, *, microbatch_terms, share):
        print("share", share.index)
        if share.index == 1:
            raise {error}
        return super().collate(groups, microbatch_terms=microbatch_terms, share=share)

DOMAIN = Failing()
"""


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        pytest.param(
            "UserError('row 3 is too long')", 2, "error: policy-0, rank 1: row 3 is too long", marks=pytest.mark.slow
        ),
        ("KeyError('answer')", 1, "error: policy-0, rank 1: KeyError: 'answer'; the run cannot continue without it"),
    ],
)
def test_an_error_of_one_rank_is_told_with_its_number(
    error, code, told, tmp_path, bandit, write_recipe, start, rank_pids
):
    run_dir = tmp_path / "run"
    (tmp_path / "failing.py").write_text(FAILING.format(error=error))
    tables = bandit(run_dir, run__domain="failing:DOMAIN", policy__parallel__dp_shard=2)
    process = start("run", write_recipe(tmp_path / "run.toml", tables))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors
    assert told in errors
    assert "Traceback" not in errors
    assert rank_pids(run_dir) == {}
    log = (run_dir / "logs" / "policy-0.log").read_text().splitlines()
    assert "[rank 0] share 0" in log
    assert "[rank 1] share 1" in log


@pytest.mark.parametrize("killed", ["rank 1", "the agent"])
def test_a_killed_rank_or_agent_ends_its_replica_which_starts_again(
    killed, tmp_path, bandit, write_recipe, start, wait_for, rank_pids, rows_of
):
    run_dir = tmp_path / "run"
    tables = bandit(
        run_dir,
        run__max_steps=STEPS,
        policy__parallel__dp_shard=2,
        rollout__options={"delay_s": 0.02},
        checkpoint__every_steps=2,
        logging__sinks=["console", "jsonl"],
    )
    process = start("run", write_recipe(tmp_path / "run.toml", tables))
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 5, "five steps")
    ranks = rank_pids(run_dir)
    agent = int(Path(f"/proc/{ranks[1]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(ranks[1] if killed == "rank 1" else agent, signal.SIGKILL)
    wait_for(lambda: not set(ranks.values()) & set(rank_pids(run_dir).values()), "the end of all ranks")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    told = " ".join(output.split())
    if killed == "rank 1":
        assert "policy-0 died (exit code 1); starting it again" in told
        assert "policy-0, rank 1: died (signal SIGKILL)" in told
    else:
        assert "policy-0 died (signal SIGKILL); starting it again" in told
    assert [line["step"] for line in rows_of(run_dir / "metrics.jsonl")] == list(range(STEPS))
    assert read_state(run_dir / "checkpoints" / f"step_{STEPS}").step == STEPS


@pytest.mark.slow
def test_a_run_of_two_ranks_goes_on_as_one_process(tmp_path, bandit, write_recipe, start, wait_for, rows_of):
    run_dir = tmp_path / "run"
    tables = bandit(
        run_dir,
        run__max_steps=STEPS,
        policy__prompts_per_step=PROMPTS,
        policy__parallel__dp_shard=2,
        rollout__options={"delay_s": 0.05},
    )
    recipe = write_recipe(tmp_path / "run.toml", tables)
    first = start("run", recipe, start_new_session=True)
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 3, "three steps")
    os.killpg(first.pid, signal.SIGINT)
    _, errors = first.communicate(timeout=120)
    assert (first.returncode, errors) == (130, "")
    done = len(rows_of(run_dir / "metrics.jsonl"))
    checkpoint = run_dir / "checkpoints" / f"step_{done}"
    assert read_state(checkpoint).step == done
    assert read_origin(checkpoint).layout == "dp_shard 2"

    second = start("run", recipe, "policy.parallel.dp_shard=1", "--resume", "auto")
    _, errors = second.communicate(timeout=120)
    assert second.returncode == 0, errors
    assert [line["step"] for line in rows_of(run_dir / "metrics.jsonl")] == list(range(STEPS))
    trained = [
        {rollout["sample"] for rollout in rows_of(run_dir / "rollouts" / f"step_{step:06d}.jsonl")}
        for step in range(STEPS)
    ]
    assert [len(samples) for samples in trained] == [PROMPTS] * STEPS
    assert len(set().union(*trained)) == STEPS * PROMPTS, "a sample was trained twice"


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"pp": 2}, {"cp": 2}, {"dp_replicate": 2, "dp_shard": 2}], ids=str)
def test_a_spread_model_trains_and_is_synced_as_one_process_does(parallel, tmp_path, sums):
    def metrics(name, **changes):
        lines = run(sums(tmp_path / name, run__max_steps=3, sync__max_staleness=0, **changes)).metrics
        return [line["reward_mean"] for line in lines], [line["grad_norm"] for line in lines]

    rewards, norms = metrics("spread", policy__parallel=parallel)
    expected_rewards, expected_norms = metrics("alone")
    assert rewards == expected_rewards, "the engine drew from other weights"
    assert norms == pytest.approx(expected_norms, rel=1e-4)
