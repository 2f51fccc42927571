"""Builds policies and engines from a recipe: loads the parts, adds adapters, shards over the ranks of a replica."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from cosmos_rl_core.data.video import ByteCache
from cosmos_rl_core.parallel.device import own_device
from cosmos_rl_core.parallel.lora import merge
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.ema import Follower, average_decay
from cosmos_rl_wfm.engines.torch import FlowEngine, WFMTorchOptions
from cosmos_rl_wfm.models.base import ClipSize, Condition
from cosmos_rl_wfm.models.build import build_model, fill_network, load_parts
from cosmos_rl_wfm.models.config import WFMModelConfig
from cosmos_rl_wfm.models.model import DiffusersModel
from cosmos_rl_wfm.objectives.formulas import OLD_WEIGHT_DECAYS
from cosmos_rl_wfm.parallel.parallelize import parallelize
from cosmos_rl_wfm.policy import FlowPolicy
from cosmos_rl_wfm.sampling import FlowSampling
from cosmos_rl_wfm.supervised import ClipSources, check_sizes, conditions_of

if TYPE_CHECKING:
    from torch import Tensor


def build_policy(
    config: WFMModelConfig, *, data: WFMDataConfig, sampling: FlowSampling | None, seed: int, setup: ModelSetup
) -> FlowPolicy:
    """Load the network and shard it according to `setup`. All ranks of a replica call this together.

    Codec and text encoder are loaded with the first real clip, if there is one.
    """
    in_parts = setup.mesh is not None and bool(config.path)
    parameter_dtype = getattr(torch, setup.precision.parameters)
    device = own_device() if setup.mesh is None else setup.mesh.device
    # With a mesh, a network from scratch is on the host until `fully_shard` has moved and sharded it block by block.
    first = device if setup.mesh is None else torch.device("cpu")
    model = build_model(config, seed=config.seed, parameter_dtype=parameter_dtype, filled=not in_parts, device=first)
    check_sizes(model, data)
    guided = sampling is not None and sampling.guidance is not None
    unconditional = _unconditional(model, config, device=device) if guided else None
    if config.lora is None:
        model.network.requires_grad_(True)
    model.network.eval()  # permanently: no dropout; `parallel.remat` decides what is recomputed
    computed = getattr(torch, config.dtype)
    parallelize(model.network, setup, compute_dtype=None if parameter_dtype == computed else computed)
    if in_parts:
        offloaded = setup.memory.parameter_offload
        fill_network(model, config, device=torch.device("cpu") if offloaded else device, seed=config.seed)
    old, ema = None if sampling is None else sampling.old_decay, config.ema
    return FlowPolicy(
        model,
        sampling=sampling,
        unconditional=unconditional,
        clips=ClipSources(model, config, seed=seed, device=device),
        old=None if old is None else Follower(model.network, decay=OLD_WEIGHT_DECAYS[old].at),
        average=None if ema is None else Follower(model.network, decay=average_decay(ema)),
        average_is_reference=config.pulls_to_average,
        reduce_once=setup.parallel.reduce_once,
    )


def build_engine(config: WFMModelConfig, *, data: WFMDataConfig, options: WFMTorchOptions) -> FlowEngine:
    """Load network, codec and text encoder."""
    model = build_model(config, parts=("network", "codec", "text"), seed=config.seed)
    size = size_of(data)
    model.check(size)
    model.network.requires_grad_(False).eval()
    captions = ByteCache[Condition](config.text.cache_bytes)
    return FlowEngine(model, size=size, conditions=conditions_of(model, config, data, captions), options=options)


def _unconditional(model: DiffusersModel, config: WFMModelConfig, *, device: torch.device) -> Condition:
    """Embed the negative prompt; does not keep the encoder in memory for it."""
    load_parts(model, config, {"text"}, seed=config.seed, device=device)
    condition = model.encode_text([model.traits.negative_prompt])
    model.captions = None
    return condition.to(device)


def export_weights(
    config: WFMModelConfig, tensors: Iterable[tuple[str, Tensor]], *, merge_adapters: bool
) -> Iterable[tuple[str, Tensor]]:
    """Yield the weights unchanged; with `merge_adapters` those of the base network merged with these adapters."""
    if config.lora is None or not merge_adapters:
        return tensors
    base = build_model(config.model_copy(update={"lora": None}), seed=config.seed, device=torch.device("cpu"))
    return merge(base.weights().items(), tensors, scaling=config.lora.scaling)


def size_of(data: WFMDataConfig) -> ClipSize:
    """Return the size of generated clips."""
    return ClipSize(frames=data.size.frames, height=data.size.height, width=data.size.width)
