"""Configurations of pi0 and pi0.5 by lerobot and openpi: each of their fields is used, has its default, or is refused.

lerobot     config.json and the two pipelines of processors beside it
openpi      config.json; the rest of its TrainConfig, such as delta actions, is not in a checkpoint
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.json_files import check_fields, read_json_object
from cosmos_rl_vla.models.checkpoint import shapes_in, weight_files
from cosmos_rl_vla.models.pi.checkpoint import family_of
from cosmos_rl_vla.models.pi.config import MAX_TOKENS, Family, PiConfig, full
from cosmos_rl_vla.published import LEROBOT_FILE, lerobot_modes

VARIANTS = ("gemma_2b", "gemma_300m")
"""Names of the two supported sizes in lerobot and openpi."""
_VARIANT_FIELDS = {"paligemma_variant": VARIANTS[:1], "action_expert_variant": VARIANTS[1:]}

_LEROBOT_USED = (
    *("type", "chunk_size", "n_action_steps", "max_state_dim", "max_action_dim", "num_inference_steps", "num_steps"),
    *("image_resolution", "input_features", "output_features", "tokenizer_max_length", "normalization_mapping"),
)
_LEROBOT_FIXED: Mapping[str, tuple[Any, ...]] = {
    **_VARIANT_FIELDS,
    "n_obs_steps": (1,),
    "use_relative_actions": (False,),
    "min_period": (4e-3,),
    "max_period": (4.0,),
    "time_sampling_beta_alpha": (1.5,),
    "time_sampling_beta_beta": (1.0,),
    "time_sampling_scale": (0.999,),
    "time_sampling_offset": (0.001,),
    "use_peft": (False, None),
    # of pi0 before lerobot 0.4
    "resize_imgs_with_padding": ([224, 224], None),
    "adapt_to_pi_aloha": (False,),
    "use_delta_joint_actions_aloha": (False,),
    "proj_width": (1024,),
}
_LEROBOT_WITHOUT_EFFECT = (
    # the recipe decides
    *("dtype", "device", "use_amp", "gradient_checkpointing", "compile_model", "compile_mode"),
    *("freeze_vision_encoder", "train_expert_only", "train_state_proj"),
    *(f"optimizer_{name}" for name in ("lr", "betas", "eps", "weight_decay", "grad_clip_norm")),
    *(f"scheduler_{name}" for name in ("warmup_steps", "decay_steps", "decay_lr")),
    # of relative actions, which are refused; a camera without images is masked out there and left out here
    *("relative_exclude_joints", "action_feature_names", "empty_cameras"),
    # of the hub, and of the speed of inference
    *("push_to_hub", "repo_id", "private", "tags", "license", "pretrained_path", "pretrained_revision"),
    *("use_cache", "attention_implementation"),
)
_LEROBOT_STEPS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "rename_observations_processor": {},
    "to_batch_processor": {},
    "device_processor": {},
    "pi0_new_line_processor": {},
    "pi05_prepare_state_tokenizer_processor_step": {},
    "tokenizer_processor": {"padding_side": ("right",)},
    "normalizer_processor": {"normalize_observation_keys": (None,)},
    "unnormalizer_processor": {"normalize_observation_keys": (None,)},
    "relative_actions_processor": {"enabled": (False,)},
    "absolute_actions_processor": {"enabled": (False,)},
}
"""Steps of a pipeline, with those of their fields that have one value here."""
_OPENPI_USED = ("action_dim", "action_horizon", "pi05", "discrete_state_input", "max_token_len")
_OPENPI_WITHOUT_EFFECT = ("precision", "dtype", "pytorch_compile_mode")


def from_lerobot(config: Mapping[str, Any], path: Path) -> PiConfig:
    """Convert lerobot's PI0Config or PI05Config, in the file `path`. Raises UserError that names the field."""
    _check_lerobot(config, path)
    family: Family = config["type"]
    outputs = config.get("output_features") or {}
    shape = (outputs.get("action") or {}).get("shape") or [config.get("max_action_dim", 32)]
    model_horizon = config.get("chunk_size", 50)
    size = full(family, horizon=config.get("n_action_steps", model_horizon), action_dim=shape[0])
    return replace(
        size,
        model_horizon=model_horizon,
        model_action_dim=config.get("max_action_dim", 32),
        max_state_dim=config.get("max_state_dim", 32),
        num_steps=config.get("num_inference_steps", config.get("num_steps", 10)),
        vision=replace(size.vision, image_size=config.get("image_resolution", (size.vision.image_size,))[0]),
        prompt_tokens=_prompt_tokens(size, config.get("tokenizer_max_length")),
    )


def from_openpi(config: Mapping[str, Any], directory: Path) -> PiConfig:
    """Convert openpi's config.json in a directory. Raises UserError that names the field."""
    path = directory / "config.json"
    fields = {"used": _OPENPI_USED, "fixed": _VARIANT_FIELDS, "without_effect": _OPENPI_WITHOUT_EFFECT}
    check_fields(config, **fields, where=str(path))
    family = family_of(shapes_in(weight_files(directory)).keys())
    if config.get("pi05", family == "pi05") != (family == "pi05"):
        raise UserError(f"{path}: pi05 = {str(config['pi05']).lower()}, but the weights are of {family}")
    if family == "pi0" and config.get("discrete_state_input"):
        raise UserError(f"{path}: discrete_state_input = true is not supported for pi0, whose state is no text")
    horizon, dim = config["action_horizon"], config["action_dim"]
    size = full(family, horizon=horizon, action_dim=dim)
    if family == "pi05" and config.get("discrete_state_input") is False:  # as openpi trained pi05_libero
        size = replace(size, state="none", prompt="pi0")
    tokens = config.get("max_token_len", MAX_TOKENS[family])
    return replace(
        size,
        model_horizon=horizon,
        model_action_dim=dim,
        max_state_dim=dim,
        prompt_tokens=_prompt_tokens(size, tokens) if "max_token_len" in config else None,
    )


def _prompt_tokens(size: PiConfig, given: int | None) -> int | None:
    return None if given == MAX_TOKENS[size.prompt] else given


def _check_lerobot(config: Mapping[str, Any], path: Path) -> None:
    rtc = config.get("rtc_config") or {}
    if rtc.get("enabled", bool(rtc)):
        raise UserError(f"{path}: rtc_config is not supported: chunks do not overlap; set it to null")
    fields = {name: value for name, value in config.items() if name != "rtc_config"}
    check_fields(
        fields, used=_LEROBOT_USED, fixed=_LEROBOT_FIXED, without_effect=_LEROBOT_WITHOUT_EFFECT, where=str(path)
    )
    lerobot_modes(config.get("normalization_mapping") or {}, where=f"{path}, normalization_mapping")
    if len(set(config.get("image_resolution", ()))) > 1:
        raise UserError(f"{path}: image_resolution = {config['image_resolution']} is not supported; only squares are")
    for name in (LEROBOT_FILE, LEROBOT_FILE.replace("pre", "post", 1)):
        file = path.parent / name
        for step in read_json_object(file).get("steps", ()) if file.is_file() else ():
            kind, options = step.get("registry_name", step.get("class")), step.get("config") or {}
            if kind not in _LEROBOT_STEPS:
                raise UserError(f"{file}: the step {kind!r} is not supported; only {', '.join(_LEROBOT_STEPS)} are")
            fixed = _LEROBOT_STEPS[kind]
            check_fields(options, fixed=fixed, without_effect=options.keys() - fixed.keys(), where=f"{file}, {kind}")
            if "norm_map" in options:
                lerobot_modes(options["norm_map"], where=f"{file}, {kind}")
