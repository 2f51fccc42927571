"""What a newcomer does first: the example in this package's README, and `cosmos-rl init wfm`."""

import re
from pathlib import Path

import pytest

from cosmos_rl_core import run
from cosmos_rl_core.cli.init import init
from cosmos_rl_core.launch.check import check
from cosmos_rl_core.observe.metrics import metric
from cosmos_rl_core.recipe.load import load_config

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.ci
def test_the_example_in_the_readme_makes_clips_brighter(tmp_path, monkeypatch, capsys):
    example = README.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    found = re.search(r"brightness ([\d.]+) -> ([\d.]+)\n$", capsys.readouterr().out)
    assert found
    assert float(found[2]) > float(found[1]) + 0.02
    assert list((tmp_path / "runs/brighter/media").rglob("*.mp4"))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm.name=ddrl", "data_regularization={coef=0.01, rows_per_step=4}"],
        ["algorithm.name=nft", "rollout.sampling.rule=ode", "rollout.sampling.old_decay=slow"],
    ],
    ids=["flow_grpo", "ddrl", "nft"],
)
def test_the_recipe_of_init_runs_as_it_is_written_and_as_its_comments_say(tmp_path, monkeypatch, overrides):
    recipe = init("wfm", tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    config = load_config(recipe, [*overrides, "run.placement=inline", "run.max_steps=2", "checkpoint.every_steps=0"])
    assert "64 rows of mock" in str(check(config))
    result = run(config)
    assert result.run_dir == tmp_path / "runs/mine"
    assert {"reward/brightness", "reward/contrast"} <= result.metrics[-1].keys()
    assert all(line["grad_norm"] > 0 for line in result.metrics)
    assert {name for line in result.metrics for name in line if metric(name) is None} == set()
