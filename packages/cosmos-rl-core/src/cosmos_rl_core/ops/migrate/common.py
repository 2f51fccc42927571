"""Keys of NVIDIA's Cosmos-RL that all domains share: run, sizes, optimizer, algorithm, checkpoints, metrics.

Keys and defaults are those of its `policy/config` and its public recipes at commit 89f2e5b5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from cosmos_rl_core.ops.migrate.migration import DEFAULT, Migration

POLICY = "train.train_policy"
DEFAULTS: Mapping[str, object] = {
    "mode": "disaggregated",
    "train.epoch": 1,
    "train.optm_name": "AdamW",
    "train.optm_lr": 1e-6,
    "train.optm_betas": [0.9, 0.999],
    "train.optm_weight_decay": 0.01,
    "train.optm_warmup_steps": 20,
    "train.optm_grad_norm_clip": 1.0,
    "train.epsilon": 1e-6,
    "train.param_dtype": "bfloat16",
    "train.master_dtype": "float32",
    "train.sync_weight_interval": 1,
    "train.train_batch_per_replica": 8,
    "train.ckpt.save_freq": 20,
    "train.ckpt.save_mode": "async",
    f"{POLICY}.variant": "grpo",
    f"{POLICY}.epsilon_low": 0.2,
    f"{POLICY}.epsilon_high": 0.2,
    f"{POLICY}.kl_beta": 0.0,
    f"{POLICY}.lower_bound_ratio": 3.0,
    f"{POLICY}.loss_type": "token-mean",
    f"{POLICY}.entropy_coeff": 0.0,
    f"{POLICY}.mini_batch": 2,
    f"{POLICY}.allowed_outdated_steps": 4,
    f"{POLICY}.use_rollout_logprobs_for_loss": False,
    "policy.model_gradient_checkpointing": True,
    "policy.parallelism.n_init_replicas": 1,
    "policy.parallelism.tp_size": 2,
    "policy.parallelism.dp_shard_size": 1,
    "rollout.n_generation": 16,
    "rollout.parallelism.n_init_replicas": 1,
    "rollout.parallelism.dp_shard_size": 1,
    "rollout.backend": "vllm",
}
"""Values of keys that a recipe does not name."""

MOVED: Mapping[str, str] = {
    "train.output_dir": "run.output_dir",
    "train.max_num_steps": "run.max_steps",
    "train.optm_lr": "policy.optimizer.learning_rate",
    "train.optm_betas": "policy.optimizer.betas",
    "train.epsilon": "policy.optimizer.eps",
    "train.optm_weight_decay": "policy.optimizer.weight_decay",
    "train.optm_warmup_steps": "policy.schedule.warmup_steps",
    "train.optm_grad_norm_clip": "policy.max_grad_norm",
    "train.param_dtype": "model.dtype",
    "train.master_dtype": "policy.precision.parameters",
    "train.deterministic": "run.deterministic",
    "train.fsdp_reduce_dtype": "policy.precision.reduce",
    "train.fsdp_offload": "policy.memory.parameter_offload",
    "train.compile": "policy.memory.compile",
    "train.activation_offload": "policy.memory.activation_offload",
    "train.ckpt.max_keep": "checkpoint.keep",
    f"{POLICY}.mu_iterations": "policy.epochs",
    f"{POLICY}.dataloader_shuffle": "prompts.shuffle",
    "policy.parallelism.n_init_replicas": "policy.replicas",
    "policy.parallelism.dp_replicate_size": "policy.parallel.dp_replicate",
    "policy.parallelism.dp_shard_size": "policy.parallel.dp_shard",
    "policy.parallelism.tp_size": "policy.parallel.tp",
    "policy.parallelism.cp_size": "policy.parallel.cp",
    "policy.parallelism.pp_size": "policy.parallel.pp",
    "policy.parallelism.ep_size": "policy.parallel.ep",
    "policy.model_name_or_path": "model.path",
    "policy.model_revision": "model.revision",
    "logging.log_interval": "run.log_every",
    "logging.project_name": "logging.project",
    "logging.group_name": "logging.group",
    "logging.multi_modal_log_interval": "logging.media_every",
}
"""Old key -> new key with the same value."""

IGNORED: Mapping[str, str] = {
    "redis": "no broker is needed",
    "eth_ip": "no broker is needed",
    "train.resume": "`cosmos-rl run FILE --resume auto`",
    "train.optm_impl": "torch's fused optimizer is used where there is one",
    "train.ckpt.*": "see [checkpoint]",
    "train.force_use_hf": "models are always those of transformers or diffusers",
    "train.non_text": "the domain says it",
    "train.fp8.*": "see [policy.precision] fp8",
    "policy.is_diffusers": "the domain says it",
    "policy.parallelism.cp_rotate_method": "context parallelism exchanges heads (Ulysses)",
    "policy.parallelism.pp_micro_batch_size": "see policy.microbatch_terms",
    "policy.parallelism.pp_layers_per_stage": "layers are dealt evenly over the stages",
    "rollout.parallelism.*": "see [rollout] replicas and [rollout.parallel]",
    "rollout.n_generation": "supervised training has no rollouts",
    "rollout.batch_size": "the engine limits its own batches",
    "rollout.seed": "run.seed determines all randomness",
    "custom.payload_transfer": "large groups are read where they were generated",
    "custom.seed": "run.seed determines all randomness",
    f"{POLICY}.trainer_type": "domain and algorithm say it",
    f"{POLICY}.uncentralized_training": "large groups are read where they were generated",
    f"{POLICY}.max_retry_for_on_policy": "prompts are requested until a step has enough groups",
    f"{POLICY}.enable_dataset_cache": "rows are read by their offsets",
    f"{POLICY}.dataloader_*": "rows are read ahead",
    f"{POLICY}.min_filter_prefix_tokens": "had no effect on rollouts without text, or without rewards",
    "validation.batch_size": "the engine limits its own batches",
    "validation.val_before_train": "a run evaluates before its first step",
}
"""Old key -> the reason for which nothing is carried over."""

AGGREGATIONS: Mapping[str, tuple[str, str]] = {
    "token-mean": ("term_mean", ""),
    "seq-mean-token-mean": ("sequence_mean_of_means", ""),
    "seq-mean-token-sum": ("sequence_mean_of_sums", ""),
    "token-sum": ("term_mean", "was a sum without a divisor: choose the learning rate anew"),
}


def migrate_common(old: Migration) -> None:
    """Carry over the keys that all domains share."""
    _run(old)
    _sizes(old)
    for source, target in MOVED.items():
        old.move(source, target)
    _training(old)
    if is_supervised(old):
        old.put("algorithm.name", "sft")
    else:
        _algorithm(old)
        _rollouts(old)
    if old.take("train.ckpt.enable_checkpoint"):
        old.move("train.ckpt.save_freq", "checkpoint.every_steps")
        old.put("checkpoint.asynchronous", old.take("train.ckpt.save_mode") == "async")


def migrate_rest(old: Migration) -> None:
    """Decide on the keys that neither `migrate_common` nor the domain has taken."""
    for key, because in IGNORED.items():
        old.ignore(key, because=because)
    _profile(old)
    if is_supervised(old):
        old.ignore(
            f"{POLICY}.*",
            "train.sync_weight_interval",
            "train.transfer_dtype",
            because="supervised training has no rollouts",
        )
    old.finish()


def _profile(old: Migration) -> None:
    window = "profiler.sub_profiler_config"
    if not old.take("profiler.enable_profiler"):
        return old.ignore("profiler.*", because="the profiler was not enabled")
    old.put("logging.profile.steps", old.take(f"{window}.active_steps") or 1)
    old.put("logging.profile.wait_steps", old.take(f"{window}.wait_steps"))
    old.put("logging.profile.ranks", old.take(f"{window}.rank_filter") or None)
    for key, name in {"record_shape": "shapes", "profile_memory": "memory", "with_stack": "stack"}.items():
        old.move(f"{window}.{key}", f"logging.profile.{name}")
    old.move(f"{window}.with_modules", "logging.profile.modules")
    old.ignore(f"{window}.warmup_steps", because="one step of warm-up is recorded and thrown away")
    old.refuse("profiler.*", because="[logging.profile] has no such key")


def is_supervised(old: Migration) -> bool:
    return old.take(f"{POLICY}.type") == "sft"


def _run(old: Migration) -> None:
    epochs = old.take("train.epoch")
    if old.see("train.max_num_steps") is None:
        old.put("prompts.epochs", epochs)
    seeds = [seed for key in ("train.seed", "custom.seed", "rollout.seed") if (seed := old.see(key)) is not None]
    old.take("train.seed")
    old.put("run.seed", seeds[0] if seeds else None)
    name = old.take("logging.experiment_name")
    old.put("run.name", None if name in (None, "", "None") else name)
    if (sinks := old.take("logging.logger")) is not None:
        old.put("logging.sinks", ["console", "jsonl", *(["wandb"] if "wandb" in sinks else [])])


def _sizes(old: Migration) -> None:
    """The old batch counts the samples of one replica, the new one the prompts of a step."""
    replicas, batch = old.see("policy.parallelism.n_init_replicas"), old.take("train.train_batch_per_replica")
    if is_supervised(old):
        old.put("policy.prompts_per_step", batch * replicas)
        return
    group = old.take("rollout.n_generation")
    sizes = f"{batch} samples of each of {replicas} replicas, {group} a prompt"
    old.put("policy.prompts_per_step", max(1, math.ceil(batch * replicas / group)), sizes)
    if group > 1:
        old.put("rollout.group_size", group)
    else:
        old.put("rollout.group_size", 2, "was 1, which has no advantage; `cosmos-rl eval` only evaluates")


def _training(old: Migration) -> None:
    old.move("train.optm_name", "policy.optimizer.name", str.lower)
    old.move("policy.parallelism.pp_schedule", "policy.parallel.pipeline_schedule", str.lower)
    _schedule(old)
    misspelt = "policy.model_gradient_checkpointig"
    old.ignore(misspelt, because="misspelt, so that it had no effect")
    if old.take("policy.model_gradient_checkpointing"):
        old.put("policy.memory.activation_checkpointing", "full")
    if old.take("train.fp8.enable_fp8"):
        old.move("train.fp8.quant_recipe", "policy.precision.fp8")
    if old.take("train.fsdp_reshard_after_forward") == "never":
        old.put("policy.parallel.reshard_after_forward", False)
    if old.take("train.async_tp_enabled"):
        old.refused["train.async_tp_enabled"] = "there is no asynchronous tensor parallelism"


def _schedule(old: Migration) -> None:
    """The decay of the learning rate, which here begins after the warm-up and ends at [run] max_steps."""
    keys = ("train.optm_decay_type", "train.optm_decay_ratio", "train.optm_min_lr_factor")
    kind, ratio, least = map(old.see, keys)
    if kind in (None, "none") or ratio == 0:
        return old.ignore(*keys, because="without both a type and a ratio the learning rate did not decay")
    steps, warmup = old.see("train.max_num_steps"), old.see("train.optm_warmup_steps")
    if kind == "sqrt" or steps is None or (ratio is not None and warmup + round(steps * ratio) < steps):
        because = "[policy.schedule] decays linearly or by a cosine from the warm-up to [run] max_steps"
        return old.refuse(*keys, because=because)
    old.ignore("train.optm_decay_ratio", because="the decay begins after the warm-up")
    old.put("policy.schedule.name", old.take("train.optm_decay_type"))
    old.put("policy.schedule.min_ratio", old.take("train.optm_min_lr_factor") if least else None)


def _algorithm(old: Migration) -> None:
    old.move(f"{POLICY}.variant", "algorithm.name")
    low, high = old.see(f"{POLICY}.epsilon_low"), old.see(f"{POLICY}.epsilon_high")
    if low >= 0 and high >= 0:
        old.move(f"{POLICY}.epsilon_low", "algorithm.clip_low")
        old.move(f"{POLICY}.epsilon_high", "algorithm.clip_high")
    else:
        old.ignore(f"{POLICY}.epsilon_low", f"{POLICY}.epsilon_high", because="negative: the ratio was not clipped")
    old.move(f"{POLICY}.kl_beta", "algorithm.kl_coef", lambda value: value or None)
    old.move(f"{POLICY}.entropy_coeff", "algorithm.entropy_coef", lambda value: value or None)
    bound = old.take(f"{POLICY}.clip_ratio_c")
    old.put("algorithm.dual_clip", bound)
    if bound is None:
        old.move(f"{POLICY}.lower_bound_ratio", "algorithm.dual_clip")
    old.put("algorithm.aggregation", *AGGREGATIONS[old.take(f"{POLICY}.loss_type")])
    old.put("algorithm.advantage_clip", old.take(f"{POLICY}.advantage_high"))
    old.take(f"{POLICY}.advantage_low")
    if not old.take(f"{POLICY}.use_rollout_logprobs_for_loss"):
        old.put("algorithm.old_logprobs", "policy", "computed again by the policy, as the old recipe does")
        old.put("algorithm.correction", "none")


def _rollouts(old: Migration) -> None:
    mode, outdated = old.take("mode"), old.see(f"{POLICY}.allowed_outdated_steps")
    on_policy = old.take(f"{POLICY}.on_policy")
    if mode != "disaggregated":
        old.put("run.colocate", True, f"was mode = {mode!r}: policy and rollouts take turns on the same GPUs")
        copies = old.recipe["policy"].pop("replicas") * old.recipe["policy"]["parallel"].get("dp_replicate", 1)
        old.put("policy.parallel.dp_replicate", copies, "a colocated run has one policy replica")
        old.put("sync.max_staleness", 0)
        old.take(f"{POLICY}.allowed_outdated_steps")
    elif on_policy:
        old.put("sync.max_staleness", 0)
        old.take(f"{POLICY}.allowed_outdated_steps")
    else:
        old.move(f"{POLICY}.allowed_outdated_steps", "sync.max_staleness")
    assert outdated is not None
    if old.see("train.sync_weight_interval") > old.recipe["sync"]["max_staleness"] + 1:
        old.refuse("train.sync_weight_interval", because="weights would be older than sync.max_staleness")
    old.move("train.sync_weight_interval", "sync.interval", lambda value: None if value == 1 else value)
    old.move("train.transfer_dtype", "sync.dtype")
    replicas, shards = (old.take(f"rollout.parallelism.{key}") for key in ("n_init_replicas", "dp_shard_size"))
    note = DEFAULT if not old.has("rollout.parallelism.n_init_replicas") else ""
    old.put("rollout.replicas", replicas * max(1, shards), note)
