"""Runs of the dying domain, and the run that nobody killed, which they must equal."""

from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from live import LiveRun, recipe_of_live_run
from lives import AT, PROMPTS, STEPS, SUPPORT, weights_of

from cosmos_rl_core.checkpoint.manifest import list_steps, read_state


@pytest.fixture(scope="session")
def recipe(bandit, write_recipe):
    """Write the recipe of a run of the dying domain in a directory, and return the path."""

    def write(directory: Path, *, replicas, without=(), **changes):
        usual = {
            "run__max_steps": STEPS,
            "sync__max_staleness": 0,
            "checkpoint__every_steps": 4,
            "rollout__options": {"delay_s": 0.005},
            "logging__sinks": ["console", "jsonl"],
        }
        tables = bandit(
            directory / "run",
            run__domain="dying:DOMAIN",
            policy__prompts_per_step=PROMPTS,
            policy__replicas=replicas,
            **{**usual, **changes},
        )
        for name in without:
            tables.pop(name, None)
        return write_recipe(directory / "run.toml", tables)

    return write


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, recipe, start, finished):
    """The directory of a run with one policy, that nobody kills."""
    found = {}

    def of(**changes):
        key = str(changes)
        if key not in found:
            directory = tmp_path_factory.mktemp("undisturbed")
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PYTHONPATH", SUPPORT)
                patch.delenv("DIE_AT", raising=False)
                file = recipe(directory, replicas=1, run__placement="inline", **changes)
                finished(start("run", file), timeout_s=600)
            found[key] = directory / "run"
        return found[key]

    return of


@pytest.fixture
def dying(tmp_path, monkeypatch, recipe, start):
    """Start a run in which a worker dies at a point; return its process, its directory and the file of the death."""

    def begin(name, point, *, replicas=1, at=AT, paced=False, **changes):
        died = tmp_path / "died"
        monkeypatch.setenv("DIE_AT", f"{name} {point} {at} {died}")
        monkeypatch.setenv("PYTHONPATH", SUPPORT)
        if paced:
            monkeypatch.setenv("GO", str(tmp_path / "go"))
        return start("run", recipe(tmp_path, replicas=replicas, **changes)), tmp_path / "run", died

    return begin


@pytest.fixture(scope="module")
def live(tmp_path_factory, bandit, write_recipe, start, wait_for):
    """A run with faults, for all tests of a module in turn."""
    folder = tmp_path_factory.mktemp("live")
    directory = folder / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", SUPPORT)
        patch.setenv("FAULTS_OF", str(directory))
        process = start("run", write_recipe(folder / "run.toml", recipe_of_live_run(bandit, directory)))
    return LiveRun(process, directory, wait_for=wait_for)


@pytest.fixture
def print_pause(rows_of):
    """Print the longest time between two steps of a run: of the one with the death."""

    def measure(run_dir):
        times = [row["time_s"] for row in rows_of(run_dir / "metrics.jsonl")]
        steps_s = sorted(after - before for before, after in pairwise(times))
        print(f"the longest step took {steps_s[-1]:.2f} s, the median {median(steps_s):.2f} s")

    return measure


def trained(run_dir, rows_of):
    """The samples of each step, and the rewards of all its rollouts."""
    steps = [rows_of(run_dir / "rollouts" / f"step_{step:06d}.jsonl") for step in range(STEPS)]
    return [sorted((row["sample"], row["response"], row["reward"]) for row in rows) for rows in steps]


@pytest.fixture
def must_equal(rows_of):
    """Compare a run with the one that nobody killed. most: maximum difference of weights and optimizer state."""

    def compare(run_dir, whole, *, most=1e-12):
        assert [row["step"] for row in rows_of(run_dir / "metrics.jsonl")] == list(range(STEPS))
        assert trained(run_dir, rows_of) == trained(whole, rows_of)
        mine, other = weights_of(run_dir), weights_of(whole)
        assert mine.keys() == other.keys()
        assert max((mine[name] - other[name]).abs().max().item() for name in mine) <= most
        for step in list_steps(run_dir / "checkpoints"):
            assert read_state(run_dir / "checkpoints" / f"step_{step}").step == step

    return compare
