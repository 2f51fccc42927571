"""Checks of a world model's recipe before the start: engine options, the parts of the model's folder, sizes, adapters.

No torch, no weights. Of a model on a hub it is only asked whether it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmos_rl_core.algorithms.rules import needs_episodes
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.reward.specimen import text_specimen
from cosmos_rl_core.settings.base import ConfigError, Problem
from cosmos_rl_core.settings.problems import as_toml, engine_options, missing_package, neighbour, problems_of
from cosmos_rl_core.storage import hub
from cosmos_rl_wfm.models.classes import compression
from cosmos_rl_wfm.models.config import WFMModelConfig
from cosmos_rl_wfm.models.folder import (
    INDEX,
    NETWORK,
    ModelFolder,
    is_here,
    must_be_hub_id,
    network_of,
    open_source,
    vae_of,
)
from cosmos_rl_wfm.parallel.shape import network_files, parameter_shapes
from cosmos_rl_wfm.rewards.ocr import DISTRIBUTIONS
from cosmos_rl_wfm.sampling import WFMTorchOptions

if TYPE_CHECKING:
    from cosmos_rl_core.recipe.run import RunConfig
    from cosmos_rl_core.recipe.sections import RewardSection
    from cosmos_rl_core.types import RolloutGroup
    from cosmos_rl_wfm.data.config import WFMDataConfig

SPECIMEN_PIXELS = 64
"""Maximum height and width of a made-up clip."""


def find_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield problems of algorithm, engine and model."""
    if not config.is_sft:
        yield from needs_episodes(config.algorithm, rollouts="a world model's rollouts")
        if config.rollout.engine == "torch":
            try:
                engine_options(WFMTorchOptions, config.rollout.options)
            except ConfigError as error:
                yield from error.problems
        yield from _of_readers(config.reward)
    model: WFMModelConfig = config.model
    try:
        if not is_here(model):
            must_be_hub_id(model.path)
            if wrong := hub.model_problem(model.path, model.revision, files=(INDEX, "config.json")):
                hint = neighbour(Path(model.path)) or "give a folder that diffusers wrote"
                yield Problem(key="model.path", given=as_toml(model.path), wrong=wrong, suggestion=hint)
            return
        folder = open_source(model)
        class_name, network = network_of(model, folder)
    except UserError as error:
        yield from _of_model(error, model)
        return
    if folder is not None:
        yield from _of_parts(model, folder)
    yield from _of_sizes(model, folder, config.data)
    if model.lora is not None:
        yield from _of_adapters(model, parameter_shapes(class_name, network, network_files(folder)))


def _of_readers(reward: RewardSection) -> Iterator[Problem]:
    """Packages of text readers."""
    for place, function in enumerate(reward.functions):
        reader = function.options.get("reader", "easyocr")
        if function.name == "ocr" and reader in DISTRIBUTIONS:
            key = f"reward.functions.{place}.name"
            yield from missing_package(reader, key=key, given='"ocr"', install=pip_install(*DISTRIBUTIONS[reader]))


def _of_parts(model: WFMModelConfig, folder: ModelFolder) -> Iterator[Problem]:
    """The parts that policy and engine load, with their weights."""
    parts: list[Callable[[], object]] = [lambda: folder.weights(NETWORK)]
    if model.codec == "vae":
        parts.append(lambda: vae_of(model, folder) and folder.weights("vae"))
    if model.text.encoder == "model":
        parts += [lambda: folder.part("tokenizer"), lambda: folder.weights("text_encoder")]
    for check in parts:
        try:
            check()
        except UserError as error:
            yield from _of_model(error, model)


def _of_model(error: UserError, model: WFMModelConfig) -> Iterator[Problem]:
    """The problem in an error about the model's folder."""
    for problem in problems_of(error, key="model.path"):
        yield replace(problem, given=problem.given or as_toml(model.path)) if problem.key == "model.path" else problem


def _of_sizes(model: WFMModelConfig, folder: ModelFolder | None, data: WFMDataConfig) -> Iterator[Problem]:
    """Sizes of clips that the autoencoder cannot divide; the patches of the network are left to the run."""
    try:
        _, frames, pixels = (1, 1, 1) if model.codec == "pixels" else compression(*vae_of(model, folder))
    except UserError:
        return  # a problem of the parts
    size = data.size
    if (size.frames - 1) % frames:
        wrong = f"does not fit the autoencoder, which takes 1 frame and multiples of {frames} more"
        nearest = size.frames - (size.frames - 1) % frames
        yield Problem(key="data.size.frames", given=str(size.frames), wrong=wrong, suggestion=f"set it to {nearest}")
    for key, given in (("height", size.height), ("width", size.width)):
        if given % pixels:
            wrong = f"is not divisible by the {pixels} pixels of a latent pixel"
            nearest = max(pixels, given - given % pixels)
            yield Problem(key=f"data.size.{key}", given=str(given), wrong=wrong, suggestion=f"set it to {nearest}")


def _of_adapters(model: WFMModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
    """Names of adapted layers that the network does not have."""
    assert model.lora is not None
    yield from missing_package("peft", key="model.lora", install=pip_install("cosmos-rl-wfm[lora]"))
    layers = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
    if model.lora.target_modules == "family":
        return
    if unmatched := model.lora.unmatched(layers):
        known = sorted({layer.rpartition(".")[2] for layer in layers})
        yield Problem(
            key="model.lora.target_modules",
            given=as_toml(model.lora.target_modules),
            wrong=f"no layer's name ends in {', '.join(unmatched)}",
            suggestion=f"the network's layers end in {', '.join(known)}",
        )


def specimen(config: RunConfig, row: Mapping[str, Any], *, origin: str) -> RolloutGroup:
    """A group of small grey clips, as short as those of the run."""
    size = config.data.size
    shape = (size.frames, min(size.height, SPECIMEN_PIXELS), min(size.width, SPECIMEN_PIXELS), 3)
    video = np.full(shape, 128, np.uint8)
    caption = str(row.get("caption", ""))
    group = text_specimen(row, texts=[caption] * config.rollout.group_size, origin=origin, arrays={})
    rollouts = tuple(replace(rollout, media={"video": video}) for rollout in group.rollouts)
    return replace(group, rollouts=rollouts, prompt_text=caption)
