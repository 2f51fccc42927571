"""Recipes of NVIDIA's Cosmos-RL for diffusion and world models become recipes that load."""

import tomllib

import pytest

from cosmos_rl_core.migrate.command import migrate
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
    assert recipe["model"]["lora"] == {"rank": 32, "alpha": 64}


def test_supervised_training():
    migrated = migrate(SFT)
    load_config(migrated.recipe)
    assert migrated.recipe["algorithm"]["name"] == "sft"
    assert migrated.recipe["data"]["path"] == "videos"
    assert not migrated.refused


@pytest.mark.parametrize(("data_beta", "algorithm"), [("data_beta = 0.01", "ddrl"), ("", "flow_grpo")])
def test_the_older_layout(data_beta, algorithm):
    migrated = migrate(PREDICT.replace("data_beta = 0.01", data_beta))
    load_config(migrated.recipe)
    assert migrated.recipe["algorithm"]["name"] == algorithm
    assert migrated.recipe["run"] == {"domain": "wfm", "name": "ddrl", "max_steps": 2001}
    assert migrated.recipe["rollout"]["sampling"]["steps"] == [0, 2]
    assert not migrated.refused
