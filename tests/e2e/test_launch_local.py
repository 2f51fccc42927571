"""`cosmos-rl launch --on local`: a run in the background, which the other commands scale and end."""

from functools import partial

import pytest

from cosmos_rl_core.checkpoint.manifest import read_state
from cosmos_rl_core.ops.clusters.launcher import ClusterRun, launch
from cosmos_rl_core.ops.clusters.local import Local
from cosmos_rl_core.testing.conformance import check_launcher

ENDLESS = {"run__max_steps": 100_000, "rollout__options": {"delay_s": 0.05}}


@pytest.mark.slow
def test_this_machine_is_a_platform_with_its_processes_killed_at_the_end(tmp_path, bandit, write_recipe, wait_for):
    recipe = write_recipe(tmp_path / "run.toml", bandit(tmp_path / "run", rollout__replicas=2, **ENDLESS))
    run = ClusterRun.of(recipe, [])
    check_launcher(Local(), run, start=partial(launch, "local", run, resume=False), until=wait_for, now=True)


@pytest.mark.ci
def test_a_launched_run_is_stopped_and_saved(tmp_path, bandit, write_recipe, start, finished, wait_for, rows_of):
    run_dir = tmp_path / "run"
    recipe = write_recipe(tmp_path / "run.toml", bandit(run_dir, **ENDLESS))
    finished(start("launch", recipe, "--on", "local"))
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 2, "two steps")
    out, _ = finished(start("stop", run_dir))
    assert out.startswith("the run ends after the step in work, which is saved\n")
    assert out.endswith("the run has ended\n")
    assert Local().alive(ClusterRun.of(recipe, [])) == {}
    steps = len(rows_of(run_dir / "metrics.jsonl"))
    assert read_state(run_dir / "checkpoints" / f"step_{steps}").step == steps
