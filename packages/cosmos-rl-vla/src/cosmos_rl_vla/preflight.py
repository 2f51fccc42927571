"""Checks of a robot recipe before the start: engine options, the model's files, its sizes against the simulator's.

No torch. A simulator that runs in this interpreter is built once, to read its sizes; others are left to the run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.settings.base import ConfigError, Problem
from cosmos_rl_core.settings.problems import as_toml, engine_options, missing_package, neighbour
from cosmos_rl_core.storage.json_files import read_json_object
from cosmos_rl_vla.config import UNIT, VLADataConfig, VLAModelConfig, VLATorchOptions
from cosmos_rl_vla.published import lerobot_cameras
from cosmos_rl_vla.shape import read_weights
from cosmos_rl_vla.sims.base import GROUP, BatchSimulator, SimSpec, Worded

if TYPE_CHECKING:
    from cosmos_rl_core.recipe.run import RunConfig

MODEL_TYPES = ("openvla", "cosmos_rl_mlp", "cosmos_rl_pi", "pi0", "pi05")


def find_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield problems of engine, model and simulator."""
    model: VLAModelConfig = config.model
    yield from model_problems(model)
    if model.discrete and not model.path and not config.is_sft and config.rollout.sampling.terms == "token":
        wrong = "divides the log-probability of a choice, which is one term under model.discrete = true"
        yield Problem(key="rollout.sampling.terms", given='"token"', wrong=wrong, suggestion='set it to "action"')
    if config.is_sft or config.rollout.engine != "torch":
        return
    try:
        options = engine_options(VLATorchOptions, config.rollout.options)
    except ConfigError as error:
        yield from error.problems
        return
    if options.python is not None and shutil.which(options.python) is None:
        wrong = "is no program that can be started"
        yield Problem(key="rollout.options.python", given=as_toml(options.python), wrong=wrong)
    elif options.python is None and (spec := spec_of(config.data)) is not None:
        yield from _of_sizes(model, config.data.simulator, spec)


def model_problems(model: VLAModelConfig) -> Iterator[Problem]:
    """The model's folder and the file of its statistics."""
    if model.stats not in ("", UNIT) and not Path(model.stats).expanduser().exists():
        yield Problem(key="model.stats", given=as_toml(model.stats), wrong="no such file")
    if not model.path:
        return
    directory, given = Path(model.path).expanduser(), as_toml(model.path)
    if not directory.is_dir():
        hint = neighbour(directory) or "give a folder with config.json, weights and statistics"
        yield Problem(key="model.path", given=given, wrong="is not a directory", suggestion=hint)
        return
    try:
        config = read_json_object(directory / "config.json", hint="give a folder with config.json and weights")
        weights = read_weights(directory)
    except UserError as error:
        yield Problem(key="model.path", given=given, wrong=str(error))
        return
    if config.get("model_type", config.get("type")) not in MODEL_TYPES and "action_horizon" not in config:
        wrong = "has a config.json of no model that is known here"
        yield Problem(key="model.path", given=given, wrong=wrong, suggestion=f"known: {', '.join(MODEL_TYPES)}")
    elif not weights:
        yield Problem(key="model.path", given=given, wrong="has no weights in *model*.safetensors")
    elif model.lora is not None:
        yield from _of_adapters(model, [spec.name.removesuffix(".weight") for spec in weights if len(spec.shape) == 2])


def _of_adapters(model: VLAModelConfig, layers: list[str]) -> Iterator[Problem]:
    """Names of adapted layers that the model does not have."""
    assert model.lora is not None
    yield from missing_package("peft", key="model.lora", install=pip_install("cosmos-rl-vla[lora]"))
    if not model.lora.unmatched(layers):
        return
    from cosmos_rl_vla.models.families import make  # exact, and slow: files may have other names than modules

    try:
        make(model, on_meta=True)
    except UserError as error:
        yield Problem(key="model.lora.target_modules", given=as_toml(model.lora.target_modules), wrong=str(error))


def spec_of(data: VLADataConfig) -> SimSpec | None:
    """Return the sizes of a simulator of this interpreter; None for others."""
    try:
        factory = plugins.load(GROUP, data.simulator)
        if isinstance(factory, type) and issubclass(factory, Worded | BatchSimulator):
            return None
        sim = factory(**data.options)
    except (TypeError, OSError, UserError):  # a problem of [data], which is reported there, or of rendering
        return None
    try:
        return sim.spec
    finally:
        sim.close()


def _of_sizes(model: VLAModelConfig, simulator: str, spec: SimSpec) -> Iterator[Problem]:
    """Sizes of a model from scratch, which the recipe has, and cameras of one that lerobot wrote."""
    sizes = {"action_dim": (model.action_dim, spec.action_dim), "state_dim": (model.state_dim, spec.state_dim)}
    for key, (given, needed) in sizes.items():
        if not model.path and given != needed:
            yield Problem(
                key=f"model.{key}",
                given=str(given),
                wrong=f"does not fit {simulator}, which has {needed}",
                suggestion=f"set it to {needed}",
            )
    file = Path(model.path).expanduser() / "config.json"
    if model.path and file.is_file():
        cameras = lerobot_cameras(read_json_object(file, hint="see model.path"))
        if cameras and len(cameras) != len(spec.cameras):
            yield Problem(
                key="model.path",
                given=as_toml(model.path),
                wrong=f"was trained on {len(cameras)} cameras ({', '.join(cameras)}), and {simulator} has "
                f"{len(spec.cameras)} ({', '.join(spec.cameras) or 'none'})",
                is_note=True,
            )
