"""A policy replica over two machines: two agents on this one, which meet as torchrun's do."""

import os
import shlex
import signal
from pathlib import Path

import pytest

from cosmos_rl_core.checkpoint.manifest import list_steps, read_state

pytestmark = pytest.mark.ci

STEPS = 4


def start_both(recipe, start):
    """Start the run, and its second machine by the command it prints; return both."""
    first = start("run", recipe)
    said = next(line for line in first.stdout if "joins by" in line)
    program, command, *arguments = shlex.split(said.partition("joins by:")[2])
    assert (program, command) == ("cosmos-rl", "worker")
    return first, start(command, *arguments)


def test_a_second_machine_joins_by_the_printed_command(tmp_path, bandit, write_recipe, start, rows_of):
    run_dir = tmp_path / "run"
    tables = bandit(
        run_dir,
        run__max_steps=STEPS,
        policy__num_nodes=2,
        policy__ranks_per_node=1,
        policy__threads=2,
        logging__sinks=["console", "jsonl"],
    )
    first, second = start_both(write_recipe(tmp_path / "run.toml", tables), start)
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 0, errors
    _, errors = second.communicate(timeout=60)
    assert second.returncode == 0, errors
    assert [line["step"] for line in rows_of(run_dir / "metrics.jsonl")] == list(range(STEPS))
    assert read_state(run_dir / "checkpoints" / f"step_{STEPS}").step == STEPS


@pytest.mark.slow
def test_a_rank_killed_on_the_second_machine_ends_the_run_and_is_named(tmp_path, bandit, write_recipe, start, wait_for):
    run_dir = tmp_path / "run"
    tables = bandit(
        run_dir,
        run__max_steps=10_000,
        policy__num_nodes=2,
        policy__parallel__dp_shard=2,
        policy__threads=2,
        logging__sinks=["console", "jsonl"],
    )
    first, second = start_both(write_recipe(tmp_path / "run.toml", tables), start)
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and (run_dir / "metrics.jsonl").read_text(), "the first step")
    children = Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text().split()
    (rank,) = [
        pid for pid in children if b"cosmos_rl_core.workers.rank_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(int(rank), signal.SIGKILL)
    _, errors = first.communicate(timeout=60)
    assert first.returncode == 1
    assert "policy-0, rank 1: died (signal SIGKILL); the run cannot continue without it" in errors
    _, errors = second.communicate(timeout=60)
    assert second.returncode == 1
    assert "policy-0, rank 1: died (signal SIGKILL)" in errors


@pytest.mark.slow
def test_a_signal_on_the_second_machine_lets_all_ranks_leave(
    tmp_path, bandit, write_recipe, start, wait_for, finished, rows_of
):
    run_dir = tmp_path / "run"
    tables = bandit(
        run_dir,
        run__max_steps=10_000,
        policy__num_nodes=2,
        policy__parallel__dp_shard=2,
        policy__threads=2,
        logging__sinks=["console", "jsonl"],
    )
    first, second = start_both(write_recipe(tmp_path / "run.toml", tables), start)
    wait_for(lambda: rows_of(run_dir / "metrics.jsonl"), "the first step")
    second.send_signal(signal.SIGUSR1)
    [saved, *_] = wait_for(lambda: list_steps(run_dir / "checkpoints"), "the checkpoint that SIGUSR1 asks for")
    second.send_signal(signal.SIGTERM)
    finished(first, 130)
    finished(second)
    done = len(rows_of(run_dir / "metrics.jsonl"))
    assert done > saved
    assert read_state(run_dir / "checkpoints" / f"step_{done}").step == done
