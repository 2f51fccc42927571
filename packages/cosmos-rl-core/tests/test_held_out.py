"""[eval] held_out: the first rows of [data] are evaluated and never trained on."""

import json

import pytest

from cosmos_rl_core import run
from cosmos_rl_core.assemble import build_data_term, build_eval_source, build_source, build_validation
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.launch.check import check
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.recipe.load import dump_resolved, load_config
from cosmos_rl_core.settings.base import ConfigError
from cosmos_rl_core.testing.tiny import TINY
from cosmos_rl_core.testing.tiny_model import TinyPolicy
from cosmos_rl_core.types import Share


def recipe(**sections):
    return {
        "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "max_steps": 4, "placement": "inline"},
        "data": {"rows": 10},
        "eval": {"held_out": 3},
        "policy": {"prompts_per_step": 5, "threads": 1},
        "rollout": {"group_size": 2, "threads": 1, "sampling": {"max_tokens": 3}},
        "reward": {"functions": [{"name": "hits"}]},
        "sync": {"backend": "cosmos_rl_core.testing.file_sync:FileSync"},
        **sections,
    }


def contexts(source, count):
    return {source[i].row["context"] for i in range(count)}


def test_a_run_evaluates_the_first_rows_and_trains_on_the_others(tmp_path):
    tables = recipe()
    tables["run"] |= {"output_dir": str(tmp_path / "run")}
    result = run(tables)
    assert result.evaluations[0]["eval/rows"] == result.evaluations[4]["eval/rows"] == 3
    files = (tmp_path / "run/rollouts").glob("step_*.jsonl")
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    trained = {line["prompt"] for line in lines if "prompt" in line}
    assert trained == {f"context {number}" for number in range(3, 10)}, "20 prompts of 7 rows"


@pytest.mark.parametrize(("part", "count"), [(3, 3), (0.25, 2), (0.01, 1)])
def test_a_part_is_a_number_or_a_share(part, count):
    config = load_config(recipe(eval={"held_out": part}))
    evaluated, trained = build_eval_source(config), build_source(config)
    assert contexts(evaluated, count) == set(range(count))
    assert len(evaluated) == count
    assert contexts(trained, 60) == set(range(count, 10))


def test_a_limit_applies_to_the_rows_that_are_held_out():
    config = load_config(recipe(eval={"held_out": 5, "limit": 2}))
    assert len(build_eval_source(config)) == 2
    assert len(build_source(config)) == 5


def test_supervised_training_measures_the_loss_on_them():
    tables = {name: recipe()[name] for name in ("run", "data", "eval", "policy")}
    config = load_config({**tables, "algorithm": {"name": "sft"}})
    policy = TinyPolicy(config.model, temperature=1.0, setup=ModelSetup())
    assert build_validation(config, TINY, policy, share=Share()).measure()["eval/rows"] == 3


@pytest.mark.parametrize(("data", "rows"), [(None, range(3, 10)), ({"rows": 10}, range(10))])
def test_the_data_term_trains_on_no_row_of_data_that_is_held_out(data, rows):
    regularization = {"coef": 0.1, "rows_per_step": 2, **({} if data is None else {"data": data})}
    config = load_config(recipe(data_regularization=regularization))
    policy = TinyPolicy(config.model, temperature=1.0, setup=ModelSetup())
    term = build_data_term(config, TINY, policy, Share())
    assert contexts(term._source, 60) == set(rows)


def test_the_resolved_recipe_holds_out_the_same_rows(tmp_path):
    config = load_config(recipe())
    path = tmp_path / "resolved.toml"
    path.write_text(dump_resolved(config))
    assert load_config(path) == config


def test_a_check_counts_both_parts():
    checked = check(load_config(recipe()))
    assert (len(checked.data.rows), len(checked.evaluation.rows)) == (7, 3)


def test_rows_of_their_own_clash_with_rows_that_are_held_out():
    with pytest.raises(ConfigError, match=r"eval.held_out = 3.0: evaluates rows of \[data\] in place of .* eval.data;"):
        load_config(recipe(eval={"held_out": 3, "data": {"rows": 2}}))


def test_something_must_be_left_to_train_on():
    config = load_config(recipe(eval={"held_out": 10}))
    with pytest.raises(ConfigError, match=r"eval.held_out.* of 10 rows leaves none to train on"):
        check(config)
    with pytest.raises(UserError, match="leaves none to train on"):
        build_source(config)
