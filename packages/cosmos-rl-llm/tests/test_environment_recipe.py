"""The section [environment] of a recipe: its defaults, and keys that do not fit it."""

import pytest

from cosmos_rl_core.recipe.load import dump_resolved, load_config
from cosmos_rl_core.settings.base import ConfigError

RECIPE = """
[run]
domain = "llm"
name = "episodes"
max_steps = 1
[model]
path = "base"
[data]
path = "rows.jsonl"
[environment]
name = "game:Game"
[rollout]
engine = "torch"
[rollout.sampling]
max_tokens = 64
"""


def loaded(tmp_path, text):
    file = tmp_path / "run.toml"
    file.write_text(text)
    return load_config(file)


def test_without_rewards_those_of_the_environment_are_trained_on(tmp_path):
    config = loaded(tmp_path, RECIPE)
    assert [function.name for function in config.reward.functions] == ["environment"]
    (tmp_path / "resolved.toml").write_text(dump_resolved(config))
    assert load_config(tmp_path / "resolved.toml") == config
    own = loaded(tmp_path, RECIPE + '[[reward.functions]]\nname = "boxed"\n')
    assert [function.name for function in own.reward.functions] == ["boxed"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "game:Game"', 'name = "game:Game"\nmax_turn_tokens = 65', "must be at most that of the whole episode"),
        ('[model]\npath = "base"\n', '[algorithm]\nname = "sft"\n[model]\npath = "base"\n', "does not apply with"),
        ('name = "game:Game"', 'name = "game:Game"\nmax_turn = 2', 'did you mean "max_turns"'),
    ],
)
def test_keys_that_do_not_fit(tmp_path, old, new, message):
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path, RECIPE.replace(old, new))
