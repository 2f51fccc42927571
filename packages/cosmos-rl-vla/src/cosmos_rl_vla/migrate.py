"""Keys of robot policies in recipes of NVIDIA's Cosmos-RL, for `cosmos-rl migrate`."""

from __future__ import annotations

from collections.abc import Mapping

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.ops.migrate.common import POLICY, is_supervised
from cosmos_rl_core.ops.migrate.migration import FILL_IN, Migration

MAX_STEPS, NUM_ENVS, CHUNKS = 512, 1, 16
"""The old defaults of vla.max_steps, vla.num_envs and vla.training_chunk_size."""
TERMS = 56
"""Action tokens of one chunk of OpenVLA-OFT: 8 actions of 7 dimensions."""
FAMILIES = {"openvla-oft": "openvla_oft", "pi05": "pi05"}
SIMULATORS = {"libero": "libero", "robotwin": "robotwin", "b1k": "behavior"}
UNWANTED = ("noise_anneal", "joint_logprob", "safe_get_logprob")
"""Keys about noise that have no equivalent where they are true."""
NOISE = (*UNWANTED, "noise_params", "noise_logvar_range")
SHAPE = ("discrete_state_input", "max_token_len", "action_chunk", "action_dim", "action_horizon", "model_type")
IGNORED: Mapping[str, tuple[str, ...]] = {
    "[model.noise] has the parameters of its own kind": tuple(
        f"custom.{prefix}{key}" for prefix in ("pi05.", "") for key in NOISE
    ),
    "the model's folder has its shape": (
        *(f"custom.{prefix}{key}" for prefix in ("pi05.", "") for key in SHAPE),
        "custom.image_size",
        "custom.skip_norm_stats",
        "policy.model_max_length",
        "vla.continuous",
        "vla.num_images_in_input",
        "vla.proprio_dim",
        "vla.use_proprio",
    ),
    "see [data] demos, episodes and instructions": (
        "custom.action_sequence_keys",
        "custom.modalities",
        "custom.prompt_from_task",
        "custom.tasks",
        f"{POLICY}.conversation_column_name",
        f"{POLICY}.dataset.name",
        f"{POLICY}.dataset.split",
        f"{POLICY}.dataset.subset",
    ),
    "algorithm.dual_clip is that of clip_ratio_c": (f"{POLICY}.lower_bound_ratio",),
    "see [eval.data]": ("validation.dataset.name", "validation.dataset.split", "validation.dataset.subset"),
    "see [logging] media_every": ("vla.save_video",),
    "one engine serves all families": (
        "rollout.backend",
        "rollout.enable_chunked_prefill",
        "rollout.enforce_eager",
        "rollout.gpu_memory_utilization",
        "rollout.quantization",
    ),
    "an episode ends by [rollout.sampling] max_steps": ("rollout.max_response_length",),
    "actions are sampled from the whole distribution, with [model] temperature or noise": (
        "rollout.sampling_config.temperature",
        "rollout.sampling_config.top_k",
        "rollout.sampling_config.top_p",
        f"{POLICY}.temperature",
    ),
}
"""Reason -> keys for which nothing is carried over."""
NUM_TASKS = 10
"""Tasks of a LIBERO suite."""
SEEDS = 1024
"""Seeds of the Gymnasium example's entry script."""
TRIALS: Mapping[str, tuple[int, int]] = {"libero": (50, 50), "robotwin": (50, 1024), "behavior": (50, 20)}
"""Simulator -> initial states of a task in the old entry script's rows, for training and for validation."""


def migrate(old: Migration) -> None:
    """Carry over model, demonstrations or simulator, and sampling. The common keys are done."""
    if old.take(f"{POLICY}.trainer_type") == "gym_pg":
        return _gymnasium(old)
    family = str(old.take("vla.vla_type") or "pi05")
    if family not in FAMILIES:
        raise UserError(f"vla.vla_type = {family!r}: there is no such family here; there are {', '.join(FAMILIES)}")
    old.put("model.family", FAMILIES[family])
    old.put("model.unnorm_key", old.take("vla.unnorm_key"))
    if family == "pi05":
        _flow_policy(old)
    if is_supervised(old):
        _demonstrations(old)
    else:
        _episodes(old, family)
    old.put("model.critic.place", "none")
    old.ignore("policy.model_max_length", because="the model's shape says it")
    prefix = "custom.pi05." if old.has("custom.pi05.*") else "custom."
    for key in UNWANTED:
        if old.see(prefix + key):
            old.refuse(prefix + key, because="there is no such key of [model.noise]")
    if not old.take("validation.enable"):
        old.ignore("validation.*", "custom.trials_per_task", because="validation was not enabled")
    old.move("custom.norm_stats", "model.stats")
    split = f"{POLICY}.dataset.test_size"
    if is_supervised(old) and old.see("validation.enable"):
        old.move(split, "eval.held_out")
    else:
        old.ignore(split, because="had no effect: validation had rows of its own, or was not enabled")
    _leave_out(old)


def _gymnasium(old: Migration) -> None:
    """The example of a small network in a Gymnasium environment."""
    old.recipe["model"] = {"family": "mlp"}
    old.take("policy.model_name_or_path")
    old.put("model.action_dim", old.take("model.action_dim"))
    old.put("model.state_dim", old.take("model.obs_dim"))
    old.put("model.critic.place", "none")
    if hidden := old.take("model.hidden_dim"):
        old.put("model.hidden", [hidden, hidden])
    old.put("model.discrete", old.take("model.discrete") or None)
    name, steps = old.take("env.name"), old.take("env.max_steps")
    old.put("data", {"simulator": "gymnasium", "options": {"id": name, "max_steps": steps}, "tasks": [name]})
    old.put("data.num_inits", SEEDS, "those of the old entry script")
    discount = old.take("custom.gamma")
    options = {} if discount is None else {"options": {"discount": discount}}
    old.put("reward.functions", [{"name": "simulator", **options}], "the return of an episode")
    old.put("rollout.sampling.max_steps", steps)
    old.put("rollout.sampling.terms", "action")
    episodes = old.take(f"{POLICY}.mini_batch")
    old.put("policy.microbatch_terms", episodes * steps, f"{episodes} episodes")
    old.move("custom.max_grad_norm", "policy.max_grad_norm")
    old.ignore("custom.env_name", "custom.max_steps", because="see [data] tasks and [rollout.sampling] max_steps")
    if not old.take("validation.enable"):
        old.ignore("validation.*", because="validation was not enabled")
    _leave_out(old)


def _leave_out(old: Migration) -> None:
    for because, keys in IGNORED.items():
        old.ignore(*keys, because=because)


def _flow_policy(old: Migration) -> None:
    """pi0.5: denoising steps, horizon, noise. The keys are in [custom] or [custom.pi05]."""
    prefix = "custom.pi05" if old.has("custom.pi05.*") else "custom"
    old.move(f"{prefix}.num_steps", "model.num_steps")
    old.put("model.horizon", old.take(f"{prefix}.replan_steps") or old.take(f"{prefix}.action_chunk"))
    old.move(f"{prefix}.action_env_dim", "model.action_dim")
    method, level = old.take(f"{prefix}.noise_method"), old.take(f"{prefix}.noise_level")
    if method == "flow_sde":
        old.put("model.noise.kind", "sde")
        old.put("model.noise.level", level)
        old.put("model.noise.steps", "random")
        old.move(f"{prefix}.ignore_last", "model.noise.ignore_last")
    if old.take(f"{prefix}.train_expert_only"):
        old.put("model.train", "expert")


def _demonstrations(old: Migration) -> None:
    demos = old.take(f"{POLICY}.dataset.local_dir")
    old.ask("data.demos", demos, "a LeRobot dataset")
    old.move("custom.episodes_index", "data.episodes")
    chunks = old.take(f"{POLICY}.mini_batch")
    old.put("policy.microbatch_terms", chunks, f"{chunks} chunks")


def _episodes(old: Migration, family: str) -> None:
    training, held_out = f"{POLICY}.dataset", "validation.dataset"
    name = old.see(f"{training}.name") or old.see(f"{held_out}.name")
    suite = old.see(f"{training}.subset") or old.see(f"{held_out}.subset")
    simulator = SIMULATORS.get(str(name), str(name or "libero"))
    tasks = [f"{suite}/{i}" for i in range(NUM_TASKS)] if str(suite).startswith("libero") else [suite or FILL_IN]
    old.put("data.simulator", simulator)
    old.put("data.tasks", tasks)
    trained, evaluated = TRIALS.get(simulator, TRIALS["libero"])
    old.put("data.num_inits", trained, "those of the old entry script")
    old.put("reward.functions", [{"name": "success"}])
    if family == "openvla-oft":
        temperature = old.take("rollout.sampling_config.temperature") or old.take(f"{POLICY}.temperature")
        old.put("model.temperature", temperature)
    old.move("vla.filter_lower_bound", "algorithm.filter_low")
    old.move("vla.filter_upper_bound", "algorithm.filter_high")
    old.put("rollout.sampling.max_steps", old.take("vla.max_steps") or MAX_STEPS)
    old.put("rollout.sampling.terms", "token" if family == "openvla-oft" else "chunk")
    old.put("rollout.options.processes", old.take("vla.num_envs") or NUM_ENVS, "environments")
    chunks = old.take("vla.training_chunk_size") or CHUNKS
    rows = old.take(f"{POLICY}.mini_batch")
    terms = chunks * TERMS if family == "openvla-oft" else chunks * rows
    old.put("policy.microbatch_terms", terms, f"{chunks} chunks of an episode")
    if old.take("validation.enable"):
        old.move("validation.freq", "eval.every_steps")
        trials = old.take("custom.trials_per_task") or evaluated
        old.put("eval.data", {"simulator": simulator, "tasks": tasks, "split": "held_out", "num_inits": trials})
        old.notes["eval.data.num_inits"] = "trials of a task, from states that training never uses"
