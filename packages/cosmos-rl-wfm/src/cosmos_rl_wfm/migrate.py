"""Keys of world and diffusion models in recipes of NVIDIA's Cosmos-RL, for `cosmos-rl migrate`.

Two layouts: [policy.diffusers] of the newer recipes, and the older ones of Cosmos-Predict2.5 with [trainer] and [job].
"""

from __future__ import annotations

from collections.abc import Mapping

from cosmos_rl_core.ops.migrate.common import POLICY, is_supervised
from cosmos_rl_core.ops.migrate.migration import Migration

SIZE, FRAMES, VIDEO = (512, 512), 1, 81
"""Height and width, frames of a picture and of a video where the old recipe names none."""
SOLVER_ORDERS = {"dpm2": 2, "euler": 1}
DECAYS = {0: "none", 1: "slow", 2: "late"}
"""Old weight_copy_decay_type -> [rollout.sampling] old_decay."""
IGNORED: Mapping[str, tuple[str, ...]] = {
    "the memory of encoders is counted by `cosmos-rl plan`": ("policy.diffusers.offload",),
    "the sampler follows from the rule": (
        "policy.diffusers.sample.deterministic_sampling",
        "policy.diffusers.sample.noise_level",
    ),
    "supervised training samples nothing": (
        "policy.diffusers.sample.guidance_scale",
        "policy.diffusers.sample.num_steps",
    ),
    "domain and algorithm say it": ("rollout.backend",),
    "misspelt (timesteps_fraction is meant), so that it had no effect": ("policy.diffusers.timestep_fraction",),
    "[data] names a file": (f"{POLICY}.dataset.split",),
    "see [[reward.functions]]": (
        f"{POLICY}.remote_reward.reward_fns",
        f"{POLICY}.remote_reward.scale",
        f"{POLICY}.use_remote_reward",
    ),
}
"""Reason -> keys of [policy.diffusers] recipes for which nothing is carried over."""
PREDICT: Mapping[str, str] = {
    "job.name": "run.name",
    "trainer.max_iter": "run.max_steps",
    "optimizer.lr": "policy.optimizer.learning_rate",
    "optimizer.weight_decay": "policy.optimizer.weight_decay",
    "optimizer.betas": "policy.optimizer.betas",
    "optimizer.eps": "policy.optimizer.eps",
    "job.project": "logging.project",
    "job.group": "logging.group",
    "model.fsdp_shard_size": "policy.parallel.dp_shard",
    "model.dp_replicate_size": "policy.parallel.dp_replicate",
    "model_parallel.context_parallel_size": "policy.parallel.cp",
    "checkpoint.save_iter": "checkpoint.every_steps",
    "model.rl.num_rollout": "rollout.group_size",
    "model.rl.sample_steps": "rollout.sampling.num_steps",
}
"""Keys of the older layout with the same value."""
NEUTRAL: Mapping[str, tuple[object, str]] = {
    "model.rl.guidance": (0.0, "rollouts are sampled with it off; set [rollout.sampling] guidance"),
    "model.rl.min_num_conditional_frames": (0, "clips are generated from captions alone"),
    "model.rl.update_ref_every_iter": (0, "the reference is the first model, or the average of [model.ema]"),
    "model.rl.use_same_seed": (False, "rollouts of a group have seeds of their own"),
    "dataloader_train.image_dataloader.ratio": (0, "clips and pictures are not mixed"),
    "model_parallel.pipeline_model_parallel_size": (1, "world models have no pipeline stages"),
    "model_parallel.pipeline_parallel_size": (1, "world models have no pipeline stages"),
    "model_parallel.tensor_model_parallel_size": (1, "world models have no tensor parallelism"),
    "trainer.grad_scaler_args.enabled": (False, "gradients are not scaled"),
    "scheduler.f_max": ([1.0], "set [policy.schedule] name and min_ratio"),
    "scheduler.f_min": ([1.0], "set [policy.schedule] name and min_ratio"),
}
"""Keys of the older layout that are left out at this value, and refused at another, with the reason."""
LOADER = ("cache_*", "num_workers", "pin_memory", "use_cache", "webdataset", "concat_size", "batch_size")
"""Keys of the older layout's data loaders about reading ahead; one of a sample each is its batch size."""
PREDICT_IGNORED: Mapping[str, tuple[str, ...]] = {
    "metrics, pictures and the monitor take the place of callbacks": ("trainer.callbacks",),
    "see [logging] sinks": ("job.wandb_mode",),
    "the warm-up starts at 0": ("scheduler.f_start",),
    "the schedule is constant after the warm-up": ("scheduler.cycle_lengths",),
    "the diffusers folder has the network, its encoder and its autoencoder": (
        "model.net.*",
        "model.text_encoder_class",
        "model.text_encoder_config.*",
        "model.conditioner",
        "model.resolution",
        "model.tokenizer.temporal_window",
        "model.use_rf_ckpts",
        "checkpoint.model_id",
        "checkpoint.type",
    ),
    "its share was 0": ("dataloader_train.image_dataloader.dataloader.*",),
    "there is one loader": ("dataloader_train.video_dataloader.ratio", "dataloader_train.type"),
    "held-out clips go into [eval.loss_data], which is yours to add": ("dataloader_val.*",),
    "captions are encoded as [model.text] says": ("dataloader_train.video_dataloader.offline_text_embedding",),
    "see [policy] prompts_per_step; rows are read ahead": tuple(
        f"dataloader_train.video_dataloader.{part}{key}" for part in ("", "dataloader.") for key in LOADER
    ),
    "described a data set of the old loader; see [data]": ("dataloader_train.video_dataloader.dataloader.dataset.*",),
}
"""Reason -> keys of the older layout for which nothing is carried over."""
PREDICT_PATH, PREDICT_SIZE = "nvidia/Cosmos-Predict2.5-2B", {"frames": 93, "height": 432, "width": 768}
JUDGE = {"name": "remote", "options": {"reward": "FILL_IN", "url": "FILL_IN", "token_file": "reward.token"}}
SERVE = "start `cosmos-rl reward-server` with the reward of the old service (docs/wfm_rewards.md)"


def migrate(old: Migration) -> None:
    """Carry over a recipe of [policy.diffusers]. The common keys are done."""
    for key in ("r", "lora_alpha", "target_modules"):
        name = {"r": "rank", "lora_alpha": "alpha"}.get(key, key)
        old.move(f"policy.lora.{key}", f"model.lora.{name}")
    old.ignore("policy.lora.*", because="adapters start at 0, and nft keeps its second copy by itself")
    height, width = old.take("policy.diffusers.inference_size") or SIZE
    is_video = old.take("policy.diffusers.is_video")
    frames = old.take("policy.diffusers.train_frames") or (VIDEO if is_video else FRAMES)
    old.put("data.size", {"frames": frames, "height": height, "width": width})
    old.move("policy.diffusers.max_prompt_length", "model.text.length")
    folder, name = old.take(f"{POLICY}.dataset.local_dir"), old.take(f"{POLICY}.dataset.name")
    rows = old.take(f"{POLICY}.mini_batch")
    old.put("policy.microbatch_terms", rows, f"{rows} samples")
    if is_supervised(old):
        old.ask("data.path", folder, "a folder of pictures or videos with captions (docs/wfm_data.md)")
        old.put("data.noise.density", old.take("policy.diffusers.weighting_scheme"))
    else:
        old.ask("data.path", "", f"a file with the prompts of {name}, one a line")
        old.put("data.kind", "prompts")
        _contrast(old)
    if old.take("train.ema_enable"):
        old.move("train.ema_decay", "model.ema.decay")
    old.ignore("train.ema_*", because="see [model.ema]")
    for because, keys in IGNORED.items():
        old.ignore(*keys, because=because)
    if not old.take("validation.enable"):
        old.ignore("validation.*", because="validation was not enabled")
    else:
        _validation(old)


def _validation(old: Migration) -> None:
    """Held-out clips of supervised training, whose loss is measured, or the prompts of an evaluation."""
    old.move("validation.freq", "eval.every_steps")
    if is_supervised(old):
        folder = old.take("validation.dataset.local_dir")
        old.ask("eval.data.path", folder, "a folder of held-out pictures or videos with captions (docs/wfm_data.md)")
        old.notes.setdefault("eval.data.path", "their loss is measured; `cosmos-rl generate` samples from a checkpoint")
    else:
        old.ask("eval.data.path", "", "a file with held-out prompts, one a line")
        old.put("eval.data.kind", "prompts")
        old.ignore("validation.dataset.name", "validation.dataset.split", because="see [eval.data]")
    old.put("eval.data.size", dict(old.recipe["data"]["size"]))


def _contrast(old: Migration) -> None:
    """DiffusionNFT: sampling, the second copy of the weights, and the reward service."""
    sample = "policy.diffusers.sample"
    if (steps := old.see(f"{sample}.num_steps")) is not None:
        times = max(1, int(steps * (old.take("policy.diffusers.timesteps_fraction") or 1)))
        old.put("rollout.sampling.times_per_rollout", times, "a sample was trained at each time of its steps")
    old.put("algorithm", {"name": "nft"})  # the common keys of [algorithm] are not its own
    old.move("policy.diffusers.nft_beta", "algorithm.options.beta")
    old.move(f"{sample}.num_steps", "rollout.sampling.num_steps")
    old.move(f"{sample}.eval_num_steps", "rollout.sampling.eval_num_steps")
    old.move(f"{sample}.guidance_scale", "rollout.sampling.guidance")
    old.move(f"{sample}.solver", "rollout.sampling.solver_order", SOLVER_ORDERS.get)
    old.put("rollout.sampling.rule", "ode")
    old.move("policy.diffusers.weight_copy_decay_type", "rollout.sampling.old_decay", DECAYS.get)
    old.put("reward.functions", [JUDGE], SERVE)
    old.put("reward.timeout_s", 900.0)


def migrate_predict(old: Migration) -> None:
    """Carry over a recipe of the older layout of Cosmos-Predict2.5, which shares no key with the others."""
    for source, target in PREDICT.items():
        old.move(source, target)
    is_regularized = old.has("model.rl.data_beta")
    old.put("algorithm.name", "ddrl" if is_regularized else "flow_grpo")
    if is_regularized:
        old.move("model.rl.data_beta", "data_regularization.coef")
    path = old.take("checkpoint.load_path")
    if str(path or PREDICT_PATH).startswith("nvidia/Cosmos-Predict2.5-"):
        old.put("model.path", path or PREDICT_PATH, "its folder in the format of diffusers")
        old.put("model.revision", "diffusers/base/post-trained")
    else:
        old.ask("model.path", "", f"was {path}: a folder in the format of diffusers")
    old.move("model.rl.kl_beta", "algorithm.kl_coef", lambda value: value or None)
    clips = [each.get("args", {}) for each in old.see("trainer.callbacks") or () if each.get("name") == "grad_clip"]
    old.put("policy.max_grad_norm", next((clip.get("clip_norm") for clip in clips), None))
    old.put("model.dtype", "bfloat16")
    if (steps := old.take("model.rl.train_on")) is not None:
        old.put("rollout.sampling.window", "fixed")
        old.put("rollout.sampling.steps", steps)
    if (warmup := old.take("scheduler.warm_up_steps")) is not None:
        old.put("policy.schedule.warmup_steps", warmup[0])
    if old.see("trainer.max_iter") is None:
        old.put("run.max_steps", 1000, "the old recipe names no end")
    videos = "dataloader_train.video_dataloader"
    folder = old.take(f"{videos}.dataset_dir") or old.take("dataloader_train.dataset.dataset_dir")
    old.ask("data.path", folder, 'a folder of videos with captions, or `kind = "mock"` (docs/wfm_data.md)')
    size, frames = old.take(f"{videos}.video_size"), old.take(f"{videos}.num_frames")
    width, height = (int(side) // 16 * 16 for side in size) if size else (PREDICT_SIZE["width"], PREDICT_SIZE["height"])
    old.put("data.size", {"frames": frames or PREDICT_SIZE["frames"], "height": height, "width": width})
    old.put("policy.prompts_per_step", 4, "prompts of a step over all ranks: not a key of the old recipe")
    old.put("policy.microbatch_terms", 1)
    old.put("reward.functions", [JUDGE], SERVE)
    old.put("reward.timeout_s", 900.0)
    old.refuse("profiler.*", because="set [logging.profile], which has keys of its own")
    for key, (neutral, because) in NEUTRAL.items():
        if old.see(key) == neutral:
            old.ignore(key, because=f"{because}, as before" if key.startswith("model") else because)
        else:
            old.refuse(key, because=because)
    for because, keys in PREDICT_IGNORED.items():
        old.ignore(*keys, because=because)
    old.finish()
