"""Recipes of NVIDIA's Cosmos-RL for diffusion and world models become recipes that load."""

import tomllib

import pytest
import tomli_w

from cosmos_rl_core.ops.migrate.command import migrate
from cosmos_rl_core.recipe.load import load_config

COMMON = """
[train]
train_batch_per_replica = 32
transfer_dtype = "float32"
[train.train_policy]
mini_batch = 4
{policy}
[policy]
is_diffusers = true
model_name_or_path = "sana"
parallelism = {{ tp_size = 1 }}
[policy.lora]
r = 32
lora_alpha = 64
lora_names = ["default", "old"]
[policy.diffusers]
inference_size = [480, 832]
is_video = true
max_prompt_length = 300
{diffusers}
"""
NFT = COMMON.format(
    policy='type = "grpo"\ntrainer_type = "diffusion_nft"\nuse_remote_reward = true',
    diffusers='nft_beta = 0.5\nweight_copy_decay_type = 1\nsample = { num_steps = 10, solver = "dpm2" }',
)
SFT = COMMON.format(
    policy='type = "sft"\ndataset = { local_dir = "videos" }', diffusers='weighting_scheme = "logit_normal"'
)
PREDICT = """
[job]
name = "ddrl"
[trainer]
max_iter = 2001
[[trainer.callbacks]]
name = "grad_clip"
[optimizer]
lr = 1e-5
[model]
fsdp_shard_size = 8
[model.rl]
num_rollout = 8
data_beta = 0.01
train_on = [0, 2]
"""


def test_nft_samples_with_a_second_copy_of_the_weights():
    recipe = tomllib.loads(migrate(NFT).text)
    load_config(recipe)
    assert recipe["algorithm"] == {"name": "nft", "options": {"beta": 0.5}}
    assert recipe["data"]["size"] == {"frames": 81, "height": 480, "width": 832}
    sampling = recipe["rollout"]["sampling"]
    assert (sampling["rule"], sampling["old_decay"], sampling["solver_order"]) == ("ode", "slow", 2)
    assert sampling["times_per_rollout"] == 10, "trained at each time of its 10 steps"
    assert recipe["model"]["lora"] == {"rank": 32, "alpha": 64}


def test_supervised_training():
    migrated = migrate(SFT)
    load_config(migrated.recipe)
    assert migrated.recipe["algorithm"]["name"] == "sft"
    assert migrated.recipe["data"]["path"] == "videos"
    assert not migrated.refused


@pytest.mark.parametrize(
    ("key", "times"),
    [("timesteps_fraction = 0.5", 5), ("timesteps_fraction = 0.99", 9), ("timestep_fraction = 0.5", 10)],
)
def test_a_fraction_of_the_times_is_trained(key, times):
    migrated = migrate(NFT.replace("nft_beta = 0.5", f"nft_beta = 0.5\n{key}"))
    load_config(migrated.recipe)
    assert migrated.recipe["rollout"]["sampling"]["times_per_rollout"] == times
    assert not migrated.refused, "without an s the old framework does not know the key"


def test_validation_of_supervised_training():
    validation = '[validation]\nenable = true\nfreq = 10\ndataset = { local_dir = "held" }\n'
    migrated = migrate(SFT + validation)
    config = load_config(migrated.recipe)
    assert (config.eval.every_steps, config.eval.data.path) == (10, "held")
    assert config.eval.data.size == config.data.size
    assert not migrated.refused


@pytest.mark.parametrize(("data_beta", "algorithm"), [("data_beta = 0.01", "ddrl"), ("", "flow_grpo")])
def test_the_older_layout(data_beta, algorithm):
    migrated = migrate(PREDICT.replace("data_beta = 0.01", data_beta))
    load_config(migrated.recipe)
    assert migrated.recipe["algorithm"]["name"] == algorithm
    assert migrated.recipe["run"] == {"domain": "wfm", "name": "ddrl", "max_steps": 2001}
    assert migrated.recipe["rollout"]["sampling"]["steps"] == [0, 2]
    assert not migrated.refused


def test_the_older_layout_keeps_clipping_betas_and_the_kl_term():
    old = PREDICT.replace("lr = 1e-5", "lr = 1e-5\nbetas = [0.9, 0.95]").replace("data_beta = 0.01", "kl_beta = 0.02")
    old = old.replace('name = "grad_clip"', 'name = "grad_clip"\nargs = { clip_norm = 0.1 }')
    recipe = migrate(old).recipe
    load_config(recipe)
    assert recipe["policy"]["optimizer"]["betas"] == [0.9, 0.95]
    assert recipe["policy"]["max_grad_norm"] == 0.1
    assert recipe["algorithm"]["kl_coef"] == 0.02


@pytest.mark.parametrize(
    ("load_path", "path"),
    [("nvidia/Cosmos-Predict2.5-14B", "nvidia/Cosmos-Predict2.5-14B"), ("s3://mine/step_10", "FILL_IN")],
)
def test_the_older_layout_keeps_the_model_or_asks_for_it(load_path, path):
    migrated = migrate(PREDICT + f'[checkpoint]\nload_path = "{load_path}"\n')
    assert migrated.recipe["model"]["path"] == path


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("model.rl", "clip_ratio_high = 0.2"),
        ("model.rl", "guidance = 3.0"),
        ("model", "freeze = true"),
        ("optimizer", "fused = true"),
        ("scheduler", "f_min = [0.1]"),
        ("checkpoint", "load_training_state = true"),
        ("job", "cluster = 'x'"),
        ("trainer", "max_val_iter = 3"),
        ("dataloader_train.image_dataloader", "ratio = 1"),
        ("dataloader_train.video_dataloader", "surprise = 1"),
        ("model_parallel", "tensor_model_parallel_size = 2"),
    ],
)
def test_a_key_of_the_older_layout_without_a_rule_is_refused_by_name(section, key):
    tables = tomllib.loads(PREDICT)
    here = tables
    for part in section.split("."):
        here = here.setdefault(part, {})
    here.update(tomllib.loads(key))
    assert list(migrate(tomli_w.dumps(tables)).refused) == [f"{section}.{key.partition(' ')[0]}"]


def test_held_out_prompts_are_asked_for():
    recipe = migrate(NFT + "[validation]\nenable = true\nfreq = 10\n").recipe
    load_config(recipe)
    assert recipe["eval"]["every_steps"] == 10
    assert recipe["eval"]["data"]["path"] == "FILL_IN"


@pytest.mark.parametrize(
    ("section", "key"),
    [("policy.diffusers", "surprise"), ("rollout", "surprise"), ("train.train_policy", "surprise")],
)
def test_a_key_without_a_rule_is_refused_by_name(section, key):
    tables = tomllib.loads(NFT)
    here = tables
    for part in section.split("."):
        here = here.setdefault(part, {})
    here[key] = 1
    assert list(migrate(tomli_w.dumps(tables)).refused) == [f"{section}.{key}"]
