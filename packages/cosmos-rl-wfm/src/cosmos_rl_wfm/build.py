"""Policies and engines out of a recipe: parts loaded, adapted, spread over the ranks of a replica."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cosmos_rl_core.parallel.lora import merge
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_wfm.conditions import Conditions
from cosmos_rl_wfm.data.cache import TensorCache
from cosmos_rl_wfm.data.clips import ClipReader
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.engines.torch import FlowEngine, TorchEngineOptions
from cosmos_rl_wfm.models.adapters import add_old
from cosmos_rl_wfm.models.base import Size
from cosmos_rl_wfm.models.build import build_model, fill_network, load_parts
from cosmos_rl_wfm.models.config import WFMModelConfig
from cosmos_rl_wfm.models.model import DiffusersModel
from cosmos_rl_wfm.old import OLD, old_weights
from cosmos_rl_wfm.parallel.parallelize import parallelize
from cosmos_rl_wfm.policy import FlowPolicy
from cosmos_rl_wfm.sampling import FlowSampling
from cosmos_rl_wfm.supervised import Clips

if TYPE_CHECKING:
    from torch import Tensor


def build_policy(
    config: WFMModelConfig, *, data: WFMDataConfig, sampling: FlowSampling | None, seed: int, setup: ModelSetup
) -> FlowPolicy:
    """Load the network and spread it as `setup` says. All ranks of a replica call this together.

    Codec and text encoder come with the first real clip, where there is any.
    """
    in_parts = setup.mesh is not None and bool(config.path)
    held = getattr(torch, setup.precision.parameters)
    model = build_model(config, seed=config.seed, held_dtype=held, filled=not in_parts)
    for height, width in {(data.size.height, data.size.width), *data.sizes}:
        model.check(Size(frames=data.size.frames, height=height, width=width))
    guided = sampling is not None and sampling.guidance is not None
    if guided:
        load_parts(model, config, {"text"}, seed=config.seed)
    if sampling is not None and sampling.old_decay is not None and config.lora is not None:
        add_old(model.network)
    if config.lora is None:
        model.network.requires_grad_(True)
    model.network.train()
    computed = getattr(torch, config.dtype)
    parallelize(model.network, setup, compute_dtype=None if held == computed else computed)
    if in_parts:
        fill_network(model, config)
    reader = ClipReader(data, text_width=model.family.text_width)
    conditions = Conditions(model, reader, config.given)

    def with_media() -> DiffusersModel:
        load_parts(model, config, {"codec", "text"}, seed=config.seed)
        return model

    clips = Clips(
        with_media,
        data,
        conditions=conditions,
        reader=reader,
        cache=_cache(config, data),
        fingerprint=f"{config.path}@{config.revision} {config.codec} {config.codec_dtype}",
        seed=seed,
    )
    return FlowPolicy(
        model,
        sampling=sampling,
        unconditional=conditions.unconditional if guided else None,
        clips=clips,
        old=None if sampling is None or sampling.old_decay is None else old_weights(model.network, sampling.old_decay),
        reduce_once=setup.parallel.reduce_once,
    )


def build_engine(config: WFMModelConfig, *, data: WFMDataConfig, options: TorchEngineOptions) -> FlowEngine:
    """Load network, codec and text encoder."""
    model = build_model(config, parts=("network", "codec", "text"), seed=config.seed)
    size = size_of(data)
    model.check(size)
    model.network.requires_grad_(False).eval()
    reader = ClipReader(data, text_width=model.family.text_width)
    return FlowEngine(model, size=size, conditions=Conditions(model, reader, config.given), options=options)


def export_weights(
    config: WFMModelConfig, tensors: Iterable[tuple[str, Tensor]], *, merge_adapters: bool
) -> Iterable[tuple[str, Tensor]]:
    """Yield the trained weights of a checkpoint; with `merge_adapters` those of the base network with its adapters."""
    trained = ((name, tensor) for name, tensor in tensors if not name.startswith(OLD))
    if config.lora is None or not merge_adapters:
        return trained
    base = build_model(config.model_copy(update={"lora": None}), seed=config.seed, device=torch.device("cpu"))
    return merge(base.weights().items(), dict(trained), scaling=config.lora.alpha / config.lora.rank)


def size_of(data: WFMDataConfig) -> Size:
    """Return the size of generated clips."""
    return Size(frames=data.size.frames, height=data.size.height, width=data.size.width)


def _cache(config: WFMModelConfig, data: WFMDataConfig) -> TensorCache | None:
    """Where latents are kept: not where they are as quickly made, nor where no clip comes twice."""
    if config.codec == "pixels" or data.start == "random":
        return None
    folder = data.cache_path or os.path.join("~", ".cache", "cosmos-rl")
    return TensorCache(Path(folder).expanduser(), max_bytes=data.cache_bytes)
