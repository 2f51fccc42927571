"""Exports a trained pi0 or pi0.5 in the formats of lerobot and of openpi for PyTorch.

                    lerobot                                             openpi
config.json         of PI0Config, PI05Config: `lerobot --policy.path`   for reference: openpi's TrainConfig decides
model.safetensors   "model." before the public names                    the public names
statistics          policy_preprocessor.json, policy_postprocessor.json assets/cosmos_rl/norm_stats.json
                    and their safetensors

Written as lerobot 0.4.4 writes them, which 0.6.2 reads too, and as openpi's convert_jax_model_to_pytorch.py does.
Heads that reinforcement learning adds (critic, learned noise, auxiliary targets) are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.json_files import read_json_object
from cosmos_rl_vla.actions import FILE, ActionStats
from cosmos_rl_vla.config import VLADataConfig, VLAModelConfig
from cosmos_rl_vla.data.lerobot import read_dataset
from cosmos_rl_vla.models.pi.checkpoint import EXPERT_OUTPUT, LANGUAGE_OUTPUT, OURS_ALONE
from cosmos_rl_vla.models.pi.config import MODEL_TYPE, PiConfig, full
from cosmos_rl_vla.models.pi.family import read_config
from cosmos_rl_vla.models.pi.public_config import VARIANTS
from cosmos_rl_vla.normalise import Spread, narrowest
from cosmos_rl_vla.published import LEROBOT_FILE, OPENPI_EPSILON, OPENPI_FILE, lerobot_cameras

FORMATS = ("lerobot", "openpi")

_CAMERA = "observation.images."
_ASSET = "cosmos_rl"
_TOKENIZER = "google/paligemma-3b-pt-224"
_SIZES = ("vocab_size", "vision", "language", "expert")
_MODES = {"quantile": "QUANTILES", "mean_std": "MEAN_STD"}


def export_pi(
    format: str, directory: Path, tensors: Iterable[tuple[str, Tensor]], *, cameras: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """Rewrite an export in `directory` in `format`, and yield its weights by that format's names.

    Args:
        tensors: whole weights by their public names.
        cameras: lerobot's image keys in the model's order; without any lerobot uses those of its dataset.

    Raises UserError for a model that the format cannot express.
    """
    stored = read_json_object(directory / "config.json")
    if stored.get("model_type") != MODEL_TYPE:
        raise UserError(f"--format {format} is for pi0 and pi0.5; export this model without --format")
    dtype = stored.get("dtype", "float32")
    config, stats = read_config(directory), ActionStats.load(directory)
    _check(config, stats, format=format)
    if format == "lerobot" and dtype not in ("float32", "bfloat16"):
        raise UserError(f"--dtype {dtype}: --format lerobot has float32 and bfloat16")
    (directory / FILE).unlink()
    if format == "lerobot":
        write_lerobot(config, stats, directory, cameras=cameras, dtype=dtype)
    else:
        write_openpi(config, stats, directory, dtype=dtype)
    return public_tensors(tensors, prefix="model." if format == "lerobot" else "")


def camera_names(model: VLAModelConfig, data: VLADataConfig) -> Sequence[str]:
    """Return lerobot's names of the model's cameras, in order; () if the recipe has none.

    Sources, in order: the demonstrations, the lerobot model that training began with, the simulator's options.
    """
    if data.cameras:
        return data.cameras
    if data.demos and Path(data.demos).expanduser().is_dir():
        return read_dataset(Path(data.demos).expanduser()).cameras
    config = Path(model.path).expanduser() / "config.json"
    if model.path and config.is_file() and (images := lerobot_cameras(read_json_object(config))):
        return images
    return tuple(f"{_CAMERA}{name}" for name in data.options.get("cameras", ()))


def public_tensors(tensors: Iterable[tuple[str, Tensor]], *, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield exactly the weights of openpi's and lerobot's classes: both load strictly.

    Their expert has an unused output layer, which is filled with zeros.
    """
    output = torch.zeros(0, 0)
    width = 0
    for name, tensor in tensors:
        if name.startswith(OURS_ALONE):
            continue
        if name == LANGUAGE_OUTPUT:
            output = tensor
        if name == "action_out_proj.weight":
            width = tensor.shape[1]
        yield prefix + name, tensor
    yield prefix + EXPERT_OUTPUT, output.new_zeros(len(output), width)


def write_lerobot(
    config: PiConfig, stats: ActionStats, directory: Path, *, cameras: Sequence[str] = (), dtype: str = "float32"
) -> None:
    """Write config.json, the two pipelines of processors and their statistics."""
    side = config.vision.image_size
    action = {"action": {"type": "ACTION", "shape": [config.action_dim]}}
    state_dim = config.max_state_dim if stats.state is None else len(stats.state)
    state = {"observation.state": {"type": "STATE", "shape": [state_dim]}}
    images = {name: {"type": "VISUAL", "shape": [3, side, side]} for name in cameras}
    modes = {
        "VISUAL": "IDENTITY",
        "STATE": "IDENTITY" if stats.state is None else _MODES[stats.state.kind],
        "ACTION": _MODES[stats.action.kind],
    }
    written = {
        "type": config.family,
        "n_obs_steps": 1,
        "input_features": {**images, **state} if cameras else {},
        "output_features": action,
        "device": None,
        **dict(zip(("paligemma_variant", "action_expert_variant"), VARIANTS, strict=True)),
        "dtype": dtype,
        "chunk_size": config.model_horizon,
        "n_action_steps": config.horizon,
        "max_state_dim": config.max_state_dim,
        "max_action_dim": config.model_action_dim,
        "num_inference_steps": config.num_steps,
        "image_resolution": [side, side],
        "tokenizer_max_length": config.max_prompt_tokens,
        "normalization_mapping": modes,
    }
    _write_json(directory / "config.json", written)
    step = {"eps": 1e-8, "features": {**images, **state, **action}, "norm_map": modes}
    _write_pipeline(directory / LEROBOT_FILE, _preprocessor(config, step, state_dim=state_dim), stats)
    unnormalize = _step("unnormalizer_processor", **{**step, "features": action})
    to_cpu = _step("device_processor", device="cpu", float_dtype=None)
    _write_pipeline(directory / LEROBOT_FILE.replace("pre", "post", 1), [unnormalize, to_cpu], stats)


def write_openpi(config: PiConfig, stats: ActionStats, directory: Path, *, dtype: str = "float32") -> None:
    """Write config.json and assets/cosmos_rl/norm_stats.json."""
    written: dict[str, Any] = {
        "action_dim": config.model_action_dim,
        "action_horizon": config.model_horizon,
        **dict(zip(("paligemma_variant", "action_expert_variant"), VARIANTS, strict=True)),
        "precision": dtype,
    }
    if config.family == "pi05":
        written["discrete_state_input"] = config.state == "text"
    _write_json(directory / "config.json", written)
    spreads = {"state": stats.state, "actions": stats.action}
    norm_stats = {name: _openpi_numbers(spread) for name, spread in spreads.items() if spread is not None}
    path = directory / "assets" / _ASSET / OPENPI_FILE
    path.parent.mkdir(parents=True)
    _write_json(path, {"norm_stats": norm_stats})


def _check(config: PiConfig, stats: ActionStats, *, format: str) -> None:
    """Raise UserError for a model outside the format's fixed sizes and processing."""
    public = full(config.family, horizon=config.horizon, action_dim=config.action_dim)
    differ = [name for name in _SIZES if getattr(config, name) != getattr(public, name)]
    if differ:
        raise UserError(
            f"--format {format}: only models of the public size fit ({', '.join(VARIANTS)}), this one differs in "
            f"{', '.join(differ)}; export it without --format"
        )
    read = {"pi0": ("suffix", "pi0"), "pi05": ("text", "pi05")}[config.family]
    stateless = format == "openpi" and config.family == "pi05" and (config.state, config.prompt) == ("none", "pi0")
    if (config.state, config.prompt) != read and not stateless:
        raise UserError(
            f"--format {format}: its {config.family} reads the state as {read[0]!r} and prompts of {read[1]!r}, this "
            f"model {config.state!r} and {config.prompt!r}"
        )
    if format == "openpi" and config.max_state_dim != config.model_action_dim:
        raise UserError(
            f"--format openpi has one width for states and actions; this model has {config.max_state_dim} and "
            f"{config.model_action_dim}"
        )
    if stats.gripper is not None:
        raise UserError(f"--format {format} has no step for the gripper of {FILE}")


def _preprocessor(config: PiConfig, normalize: dict[str, Any], *, state_dim: int) -> list[dict[str, Any]]:
    tokenizer = _step(
        "tokenizer_processor",
        max_length=config.max_prompt_tokens,
        task_key="task",
        padding_side="right",
        padding="max_length",
        truncation=True,
        tokenizer_name=_TOKENIZER,
    )
    begin = [_step("rename_observations_processor", rename_map={}), _step("to_batch_processor")]
    to_device = _step("device_processor", device="cpu", float_dtype=None)
    normalized = _step("normalizer_processor", **normalize)
    if config.family == "pi0":
        return [*begin, _step("pi0_new_line_processor"), tokenizer, to_device, normalized]
    # lerobot 0.4 writes zeros into the prompt up to this many numbers; later ones, and training here, do not
    prompt = _step("pi05_prepare_state_tokenizer_processor_step", max_state_dim=state_dim)
    return [*begin, normalized, prompt, tokenizer, to_device]


def _step(name: str, **config: Any) -> dict[str, Any]:
    return {"registry_name": name, "config": config}


def _write_pipeline(path: Path, steps: list[dict[str, Any]], stats: ActionStats) -> None:
    """Write a pipeline, and its statistics beside it under the file name in its normalising step."""
    for place, step in enumerate(steps):
        if "norm_map" in step["config"]:
            step["state_file"] = f"{path.stem}_step_{place}_{step['registry_name']}.safetensors"
            spreads = {"action": stats.action, "observation.state": stats.state}
            numbers = {
                f"{name}.{key}": values
                for name, spread in spreads.items()
                if spread is not None
                for key, values in _lerobot_numbers(spread).items()
            }
            save_file(numbers, path.parent / step["state_file"])
    _write_json(path, {"name": path.stem, "steps": steps})


def _lerobot_numbers(spread: Spread) -> dict[str, np.ndarray]:
    """Return percentiles, and mean and std, that give the spread's own map in lerobot: either pair is enough.

    For equal percentiles lerobot returns -1, not 0: they are moved apart by the least that float32 resolves.
    """
    centre, scale = spread.affine()
    narrow = narrowest(centre)
    moves = scale > narrow
    scale = np.where(moves, scale, narrow).astype(np.float32)
    measured = moves & spread.mask & (spread.kind == "quantile")
    return {
        "q01": np.where(measured, spread.q01, centre - scale).astype(np.float32),
        "q99": np.where(measured, spread.q99, centre + scale).astype(np.float32),
        "mean": centre,
        "std": scale,
    }


def _openpi_numbers(spread: Spread) -> dict[str, list[float]]:
    """Return the same for openpi, which adds an epsilon to the denominators of both."""
    centre, scale = (values.astype(np.float64) for values in spread.affine())
    measured = spread.mask & (spread.kind == "quantile") & (spread.q99 - spread.q01 > 2 * OPENPI_EPSILON)
    low = np.where(measured, spread.q01.astype(np.float64), centre - scale)
    high = np.where(measured, spread.q99.astype(np.float64), centre + scale)
    numbers = {"mean": centre, "std": scale - OPENPI_EPSILON, "q01": low, "q99": high - OPENPI_EPSILON}
    return {name: values.tolist() for name, values in numbers.items()}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
