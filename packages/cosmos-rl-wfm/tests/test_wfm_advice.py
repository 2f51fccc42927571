"""What `cosmos-rl check` says of recipes that are in order, and a run at its start."""

import pytest
from wfm_fixtures import recipe

from cosmos_rl_core import run
from cosmos_rl_core.launch.check import check
from cosmos_rl_core.recipe.load import load_config

RECIPE = recipe(run={"domain": "wfm", "placement": "inline", "max_steps": 1}, logging={"media_every": 0})
MASTER = "model.dtype=bfloat16"
"""Beside float32 weights, the default of [policy.precision]."""


def said(*overrides):
    return check(load_config(RECIPE, overrides)).warnings


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([MASTER], 'parameters = "float32", [model] dtype = "bfloat16" make policy and engine round differently'),
        ([MASTER], '6e-4 where clip_high is 0.0001; policy.precision.parameters = "bfloat16" makes them 1'),
        ([MASTER, "sync.dtype=bfloat16"], 'policy.precision.parameters = "bfloat16" makes them 1'),
        (["sync.dtype=bfloat16"], '[sync] dtype = "bfloat16" make policy and engine round differently'),
        (["sync.dtype=bfloat16"], 'policy.precision.parameters = "float32" and no [sync] dtype makes them 1'),
        (["model.ema.decay=0.9", "model.ema.reference=true", "algorithm.kl_coef=0"], "no effect without a KL term"),
    ],
)
def test_what_is_not_as_one_expects_is_said_once(overrides, says):
    (text,) = said(*overrides)
    assert says in text


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [MASTER, "policy.precision.parameters=bfloat16"],
        [MASTER, "policy.precision.parameters=bfloat16", "sync.dtype=bfloat16"],
        [MASTER, "algorithm.name=nft", "rollout.sampling.rule=ode", "rollout.sampling.old_decay=slow"],
        ["model.ema.decay=0.9", "model.ema.reference=true"],
    ],
)
def test_of_other_recipes_nothing_is_said(overrides):
    assert not said(*overrides)


def test_check_prints_it():
    shown = str(check(load_config(RECIPE, [MASTER]))).splitlines()
    assert len([line for line in shown if line.startswith("  note      ratios are not exactly 1")]) == 1


def test_a_run_says_it_at_its_start(tmp_path, capsys):
    run(RECIPE, [f"run.output_dir={tmp_path}", "sync.dtype=bfloat16"])
    assert capsys.readouterr().out.count("ratios are not exactly 1") == 1
