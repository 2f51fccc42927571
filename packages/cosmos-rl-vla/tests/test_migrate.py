"""Recipes of NVIDIA's Cosmos-RL for robot policies become recipes that load."""

import tomllib

import pytest
import tomli_w

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.launch.check import check
from cosmos_rl_core.ops.migrate.command import migrate
from cosmos_rl_core.recipe.load import load_config

PI05 = """
mode = "colocated"
[train]
train_batch_per_replica = 128
epoch = 10
[train.train_policy]
type = "grpo"
trainer_type = "grpo_pi05"
mini_batch = 8
dataset = { name = "libero", subset = "libero_10" }
[policy]
model_name_or_path = "pi05"
parallelism = { n_init_replicas = 2, tp_size = 1, dp_shard_size = 8 }
[rollout]
n_generation = 8
[vla]
vla_type = "pi05"
num_envs = 16
max_steps = 520
filter_lower_bound = 0.1
save_video = true
[custom.pi05]
num_steps = 5
replan_steps = 10
noise_method = "flow_sde"
noise_level = 0.5
train_expert_only = true
[validation]
enable = true
freq = 10
"""
GYM = """
[train]
[train.train_policy]
type = "grpo"
trainer_type = "gym_pg"
[policy]
model_name_or_path = "self"
[rollout]
n_generation = 1
[model]
obs_dim = 4
action_dim = 2
hidden_dim = 32
discrete = true
[env]
name = "CartPole-v1"
max_steps = 500
"""


def test_a_flow_policy_in_a_simulator():
    migrated = migrate(PI05)
    recipe = tomllib.loads(migrated.text)
    config = load_config(recipe)
    assert (config.run.domain, config.run.colocate, config.sync.max_staleness) == ("vla", True, 0)
    assert (config.policy.replicas, config.policy.parallel.dp_replicate) == (1, 2), "a colocated run has one replica"
    assert recipe["model"]["noise"] == {"kind": "sde", "level": 0.5, "steps": "random"}
    assert (recipe["model"]["num_steps"], recipe["model"]["horizon"], recipe["model"]["train"]) == (5, 10, "expert")
    tasks = [f"libero_10/{i}" for i in range(10)]
    assert recipe["data"] == {"simulator": "libero", "tasks": tasks, "num_inits": 50}, (
        "50 trials a task, as in its script"
    )
    assert recipe["rollout"]["options"] == {"processes": 16}
    assert recipe["rollout"]["sampling"] == {"max_steps": 520, "terms": "chunk"}
    assert recipe["algorithm"]["filter_low"] == 0.1
    assert recipe["eval"]["every_steps"] == 10
    assert "vla.save_video" in migrated.ignored and not migrated.refused


def test_a_gymnasium_example():
    migrated = migrate(GYM + "[custom]\ngamma = 0.99\n")
    config = load_config(migrated.recipe)
    check(config)  # builds the simulator
    assert (config.model.hidden, config.model.discrete, config.rollout.sampling.terms) == ((32, 32), True, "action")
    assert migrated.recipe["reward"]["functions"] == [{"name": "simulator", "options": {"discount": 0.99}}]
    assert migrated.recipe["data"]["num_inits"] == 1024
    assert migrated.recipe["rollout"]["group_size"] == 2
    assert list(migrated.refused) == []


def test_trials_of_a_task_are_initial_states():
    migrated = migrate(PI05 + "[custom]\ntrials_per_task = 20\n")
    load_config(migrated.recipe)
    assert migrated.recipe["eval"]["data"]["num_inits"] == 20
    assert not migrated.refused


def test_a_part_of_rows_that_episodes_do_not_have_is_left_out():
    migrated = migrate(PI05.replace('subset = "libero_10" }', 'subset = "libero_10", test_size = 496 }'))
    assert list(migrated.refused) == []
    assert "train.train_policy.dataset.test_size" in migrated.ignored


def test_a_family_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match=r"vla_type = 'other': there is no such family here; .* openvla-oft, pi05"):
        migrate(PI05.replace('vla_type = "pi05"', 'vla_type = "other"'))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("vla", "surprise", 1),
        ("custom", "surprise", 1),
        ("custom.pi05", "surprise", 1),
        ("custom.pi05", "noise_anneal", True),
        ("custom.pi05", "joint_logprob", True),
        ("rollout", "surprise", 1),
        ("rollout.sampling_config", "surprise", 1),
        ("validation", "surprise", 1),
        ("train.train_policy", "surprise", 1),
    ],
)
def test_a_key_without_a_rule_is_refused_by_name(section, key, value):
    tables = tomllib.loads(PI05)
    here = tables
    for part in section.split("."):
        here = here.setdefault(part, {})
    here[key] = value
    assert list(migrate(tomli_w.dumps(tables)).refused) == [f"{section}.{key}"]


def test_keys_of_the_gymnasium_example():
    recipe = migrate(GYM + "[custom]\nmax_grad_norm = 0.5\n").recipe
    assert recipe["policy"]["max_grad_norm"] == 0.5
    assert "env.surprise" in migrate(GYM.replace("max_steps = 500", "max_steps = 500\nsurprise = 1")).refused
