"""A policy replica over two machines: two agents on this one, which meet as torchrun's do."""

import contextlib
import os
import re
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
        elastic__restart_workers=0,
        logging__sinks=["console", "jsonl"],
    )
    first, second = start_both(write_recipe(tmp_path / "run.toml", tables), start)
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and (run_dir / "metrics.jsonl").read_text(), "the first step")
    os.kill(child(second.pid, "rank_main"), signal.SIGKILL)
    said, errors = first.communicate(timeout=120)
    assert first.returncode == 1
    assert "policy-0, rank 1: died (signal SIGKILL)" in said
    # By itself, or killed as silent where the agent takes long to end its own rank.
    assert re.search(r"policy-0 died \((exit code 1|signal SIGKILL)\); the run cannot continue without it", errors)
    _, errors = second.communicate(timeout=60)
    assert second.returncode == 1
    assert "policy-0, rank 1: died (signal SIGKILL)" in errors


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_policy_over_two_machines_is_started_again(
    tmp_path, bandit, write_recipe, start, wait_for, finished, rows_of
):
    """After the death of a rank of each machine, and of the first machine's agent; the last weights are the same."""
    steps = 12

    def begin(name):
        tables = bandit(
            tmp_path / name,
            run__max_steps=steps,
            run__bind="127.0.0.2",
            policy__num_nodes=2,
            policy__parallel__dp_shard=2,
            policy__threads=2,
            policy__prompts_per_step=2,
            rollout__options={"delay_s": 0.2},
            sync__max_staleness=0,
            checkpoint__every_steps=1,
            logging__sinks=["console", "jsonl"],
        )
        return start_both(write_recipe(tmp_path / f"{name}.toml", tables), start)

    def trained(name):
        lines = rows_of(tmp_path / name / "metrics.jsonl")
        return [(line["step"], line["loss"], line["grad_norm"], line["reward_mean"]) for line in lines]

    for process in begin("whole"):
        finished(process)
    first, second = begin("killed")
    agent = lambda: child(first.pid, "main")  # noqa: E731
    victims = [lambda: child(second.pid, "rank_main"), lambda: child(agent(), "rank_main"), agent]
    for number, victim in enumerate(victims):
        done = 2 + 3 * number
        wait_for(lambda done=done: len(trained("killed")) >= done, f"{done} steps", timeout_s=180)
        os.kill(wait_for(victim, "the process to kill"), signal.SIGKILL)
    said, errors = first.communicate(timeout=300)
    assert first.returncode == 0, errors
    assert said.count("starting it again") == len(victims)
    finished(second)
    assert trained("killed") == trained("whole")


def child(process, module):
    """The child of a process that runs a module of the workers for policy-0; None while it has none."""
    wanted = {f"cosmos_rl_core.workers.{module}", "policy-0"}
    with contextlib.suppress(OSError):  # it ended while we looked
        for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split():
            if wanted <= set(Path(f"/proc/{pid}/cmdline").read_text().split("\0")):
                return int(pid)
    return None


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
