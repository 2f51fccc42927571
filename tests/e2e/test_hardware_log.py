"""Choices that depend on the machine are in the logs of a run's workers, as a user reads them."""

from cosmos_rl_core import run


def test_the_logs_of_a_run_name_the_path_of_its_weights(tmp_path, recipe_of):
    tables = recipe_of("llm", "rl")
    tables["run"] |= {"placement": "local", "max_steps": 1, "output_dir": str(tmp_path / "run")}
    run(tables)
    policy, rollout = ((tmp_path / "run/logs" / f"{name}-0.log").read_text() for name in ("policy", "rollout"))
    for line in ("weights: pageable", "weights are offered over shm"):
        assert policy.splitlines().count(line) == 1, policy
    assert rollout.splitlines().count("weights are read over shm") == 1, rollout
