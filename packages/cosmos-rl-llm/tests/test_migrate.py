"""Recipes of NVIDIA's Cosmos-RL for language models become recipes that load."""

import tomllib

import pytest

from cosmos_rl_core.cli.app import app
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.ops.migrate.command import migrate
from cosmos_rl_core.recipe.load import load_config

GRPO = """
redis = "1"
[train]
output_dir = "out"
optm_lr = 2e-6
optm_warmup_steps = 5
train_batch_per_replica = 64
async_tp_enabled = true
[train.ckpt]
enable_checkpoint = true
save_freq = 7
[train.train_policy]
type = "grpo"
reward_function = "gsm8k"
prompt_column_name = "question"
response_column_name = "answer"
mini_batch = 4
min_filter_prefix_tokens = 1
surprise = 3
dataset = { name = "openai/gsm8k", subset = "main", split = "train" }
[policy]
model_name_or_path = "Qwen/Qwen2.5-3B-Instruct"
model_max_length = 1024
parallelism = { n_init_replicas = 2, tp_size = 1, dp_shard_size = 4 }
[rollout]
n_generation = 16
max_response_length = 512
parallelism = { n_init_replicas = 3, tp_size = 2 }
sampling_config = { top_k = -1 }
[validation]
enable = true
freq = 30
dataset = { name = "openai/gsm8k", split = "test" }
"""
SFT = """
[train]
[train.train_policy]
type = "sft"
conversation_column_name = "messages"
dataset = { name = "chats", test_size = 10 }
[policy]
model_name_or_path = "Qwen/Qwen2.5-3B-Instruct"
"""


def value(recipe, key):
    for part in key.split("."):
        recipe = recipe[part]
    return recipe


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("run.domain", "llm"),
        ("policy.prompts_per_step", 8),  # 64 samples of each of 2 replicas, 16 a prompt
        ("policy.replicas", 2),
        ("policy.parallel", {"dp_shard": 4, "tp": 1}),
        ("policy.optimizer.learning_rate", 2e-6),
        ("policy.optimizer.weight_decay", 0.01),  # a default of theirs that is another one here
        ("policy.schedule.warmup_steps", 5),
        ("policy.microbatch_terms", 4096),
        ("policy.precision.parameters", "float32"),
        ("algorithm.aggregation", "term_mean"),
        ("algorithm.dual_clip", 3.0),
        ("algorithm.mask_prefix_terms", 1),
        ("algorithm.old_logprobs", "policy"),
        ("sync.max_staleness", 4),
        ("rollout.group_size", 16),
        ("rollout.replicas", 3),
        ("rollout.parallel.tp", 2),
        ("rollout.sampling", {"max_tokens": 512, "top_k": 0}),
        ("reward.functions", [{"name": "numeric"}]),
        ("data.answer_pattern", "#### (.*)"),
        ("eval.data.answer_pattern", "#### (.*)"),
        ("eval.every_steps", 30),
        ("checkpoint.every_steps", 7),
        ("prompts.epochs", 1),
    ],
)
def test_values_keep_their_meaning(key, expected):
    assert value(migrate(GRPO).recipe, key) == expected


def test_the_file_is_the_recipe_and_loads():
    migrated = migrate(GRPO)
    assert tomllib.loads(migrated.text) == migrated.recipe
    config = load_config(migrated.recipe)
    assert (config.policy.prompts_per_step, config.sync.max_staleness) == (8, 4)
    assert "prompts_per_step = 8  # 64 samples of each of 2 replicas, 16 a prompt\n" in migrated.text
    assert "weight_decay = 0.01  # the default of the old recipe\n" in migrated.text


def test_every_key_is_carried_over_left_out_or_refused():
    migrated = migrate(GRPO)
    assert set(migrated.ignored) == {"redis"}
    assert set(migrated.refused) == {
        "train.async_tp_enabled",
        "train.train_policy.surprise",
    }
    assert migrated.refused["train.train_policy.surprise"] == "no rule for this key"


@pytest.mark.parametrize(
    ("backend", "engine"), [("vllm_async", "vllm"), ("trtllm", "vllm"), ("example_hf", "torch"), ("mine", "FILL_IN")]
)
def test_another_engine_samples_from_the_same_distribution(backend, engine):
    migrated = migrate(
        GRPO.replace("n_generation = 16", f'n_generation = 16\nenforce_eager = true\nbackend = "{backend}"')
    )
    load_config(migrated.recipe)
    assert migrated.recipe["rollout"]["engine"] == engine
    assert f"was {backend}: " in migrated.text
    assert ("options" in migrated.recipe["rollout"]) == (engine != "torch"), "its options are those of vLLM"
    assert "rollout.backend" not in migrated.refused


@pytest.mark.parametrize("size", [0.01, 50])
def test_a_part_of_the_validation_rows_is_a_limit(size):
    migrated = migrate(GRPO.replace('split = "test" }', f'split = "test", test_size = {size} }}'))
    assert load_config(migrated.recipe).eval.limit == size
    assert "validation.dataset.test_size" not in migrated.refused


def test_chats_of_supervised_training():
    migrated = migrate(SFT)
    config = load_config(migrated.recipe)
    assert (config.algorithm.name, config.policy.prompts_per_step) == ("sft", 8)
    assert migrated.recipe["data"] == {"path": "chats", "messages_column": "messages"}
    assert list(migrated.refused) == []
    assert "train.train_policy.dataset.test_size" in migrated.ignored, "validation was not enabled"


@pytest.mark.parametrize(("size", "part"), [(", test_size = 10", 10), (", test_size = 0.2", 0.2), ("", 0.1)])
def test_a_part_of_the_rows_of_supervised_training_is_held_out(size, part):
    validation = "[validation]\nenable = true\nfreq = 30\n"
    migrated = migrate(SFT.replace(", test_size = 10", size) + validation)
    config = load_config(migrated.recipe)
    assert (config.eval.held_out, config.eval.every_steps, config.eval.data) == (part, 30, config.data)
    assert list(migrated.refused) == []


@pytest.mark.parametrize(
    ("keys", "schedule"),
    [
        ('optm_decay_type = "cosine"\noptm_min_lr_factor = 0.1', {"name": "cosine", "min_ratio": 0.1}),
        ('optm_decay_type = "linear"\noptm_decay_ratio = 0.9', {"name": "linear"}),  # 5 of warm-up and 45 of decay
        ("optm_decay_ratio = 0.5", {}),
        ('optm_decay_type = "linear"\noptm_decay_ratio = 0.0', {}),
    ],
)
def test_a_decay_after_the_warm_up_is_carried_over(keys, schedule):
    migrated = migrate(GRPO.replace("[train]", f"[train]\nmax_num_steps = 50\n{keys}"))
    load_config(migrated.recipe)
    assert migrated.recipe["policy"]["schedule"] == {"warmup_steps": 5, **schedule}
    assert not any("optm" in key for key in migrated.refused)


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ('max_num_steps = 50\noptm_decay_type = "sqrt"', {"train.optm_decay_type"}),
        ('optm_decay_type = "linear"\noptm_min_lr_factor = 0.1', {"train.optm_decay_type", "train.optm_min_lr_factor"}),
        (
            'max_num_steps = 50\noptm_decay_type = "linear"\noptm_decay_ratio = 0.5',
            {"train.optm_decay_type", "train.optm_decay_ratio"},
        ),
    ],
)
def test_another_decay_is_refused(keys, refused):
    migrated = migrate(GRPO.replace("[train]", f"[train]\n{keys}"))
    assert {key for key in migrated.refused if "optm" in key} == refused
    assert migrated.recipe["policy"]["schedule"] == {"warmup_steps": 5}


@pytest.mark.parametrize("penalty", [1.0, 1.05])
def test_penalties_on_repetition_are_of_rollouts_and_of_evaluations(penalty):
    old = GRPO.replace("top_k = -1", f"top_k = -1, repetition_penalty = {penalty}").replace(
        "async_tp_enabled = true", ""
    )
    migrated = migrate(old.replace("surprise = 3", "").replace("freq = 30", "freq = 30\nrepetition_penalty = 1.2"))
    assert not migrated.refused
    config = load_config(migrated.recipe)
    assert config.rollout.sampling.build().repetition_penalty == penalty
    assert config.eval.sampling(config.rollout.sampling).repetition_penalty == 1.2


def test_a_window_of_the_profiler():
    keys = (
        "wait_steps = 6\nactive_steps = 2\nrank_filter = [1]\nwarmup_steps = 3\nrecord_shape = true\nwith_stack = false"
    )
    migrated = migrate(f"{GRPO}[profiler]\nenable_profiler = true\n[profiler.sub_profiler_config]\n{keys}\n")
    section = load_config(migrated.recipe).logging.profile
    assert (section.wait_steps, section.steps, section.ranks, section.shapes, section.stack) == (
        6,
        2,
        (1,),
        True,
        False,
    )
    off = migrate(f"{GRPO}[profiler]\nenable_profiler = false\n[profiler.sub_profiler_config]\n{keys}\n")
    assert load_config(off.recipe).logging.profile.steps == 0
    assert not any("profiler" in key for key in {**migrated.refused, **off.refused})


@pytest.mark.parametrize(("key", "top_k"), [("top_k = -1", 0), ("top_k = 5", 5), ("", 1)])
def test_validation_samples_as_it_did(key, top_k):
    keys = f"freq = 30\ntemperature = 0.6\ntop_p = 0.95\n{key}"
    config = load_config(migrate(GRPO.replace("freq = 30", keys)).recipe)
    sampling = config.eval.sampling(config.rollout.sampling)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.95, top_k)


def test_a_part_of_the_rows_is_not_held_out_beside_other_rows():
    migrated = migrate(GRPO.replace('split = "train" }', 'split = "train", test_size = 10 }'))
    assert load_config(migrated.recipe).eval.held_out is None
    assert "train.train_policy.dataset.test_size" in migrated.ignored


@pytest.mark.parametrize(
    ("keys", "loss"),
    [
        ("top_k = 0\nkl_discount_factor = 0.5", {"loss": "advantage", "discount": 0.5}),
        ("top_k = 8", {"loss": "divergence", "top_k": 8, "beta": 0.5}),
    ],
)
def test_a_teacher_alone(keys, loss):
    distillation = f'[distillation]\nenable = true\nmodel_name_or_path = "teacher"\n{keys}\n'
    migrated = migrate(GRPO.replace('reward_function = "gsm8k"', "") + distillation)
    load_config(migrated.recipe)
    assert migrated.recipe["teacher"] == {"path": "teacher", "task_coef": 0.0, **loss}
    assert "reward" not in migrated.recipe


@pytest.mark.parametrize(
    ("keys", "environment", "max_tokens"),
    [
        ("enable_tools = true", {"name": "tools", "options": {"functions": ["FILL_IN"]}, "max_turns": 5}, 1024),
        ("max_assistant_turns = 1", {"name": "FILL_IN", "max_turns": 1}, 512),
    ],
)
def test_episodes_of_several_turns(keys, environment, max_tokens):
    migrated = migrate(GRPO + f"[rollout.multi_turn_config]\nenable = true\nenable_thinking = false\n{keys}\n")
    load_config(migrated.recipe)
    assert migrated.recipe["environment"] == {**environment, "max_turn_tokens": 512}
    assert migrated.recipe["rollout"]["sampling"]["max_tokens"] == max_tokens
    assert not any("multi_turn" in key for key in migrated.refused)


def test_episodes_that_were_not_enabled_are_left_out():
    migrated = migrate(GRPO + "[rollout.multi_turn_config]\nenable = false\nmax_assistant_turns = 3\n")
    assert "environment" not in migrated.recipe
    assert not any("multi_turn" in key for key in migrated.refused)


def test_a_reward_of_a_script_must_be_filled_in():
    migrated = migrate(GRPO.replace('reward_function = "gsm8k"', ""))
    assert migrated.recipe["reward"]["functions"] == [{"name": "FILL_IN:reward"}]
    assert "fill in: 1 values" in str(migrated)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a = ", "not valid TOML"), ("[run]\ndomain = 'llm'\n", "it has no .train. and no .policy.")],
)
def test_something_else_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        migrate(text)


def test_the_command(tmp_path):
    from typer.testing import CliRunner

    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    old.write_text(GRPO)
    found = CliRunner().invoke(app, ["migrate", str(old), "--out", str(new)])
    assert found.exit_code == 3, "keys have no equivalent"
    assert load_config(new).run.domain == "llm"
    assert "left out: redis (no broker is needed)" in found.stderr
    assert "not available: train.train_policy.surprise: no rule for this key" in found.stderr
    again = CliRunner().invoke(app, ["migrate", str(old), "--out", str(new)])
    assert isinstance(again.exception, UserError)
