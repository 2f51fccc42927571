"""Estimates the memory of a robot policy's rollout replica beside its weights, for `cosmos-rl plan`.

One decision of all slots is run on fake tensors. Loads torch.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from cosmos_rl_core.parallel.lora import adapter_weights
from cosmos_rl_core.parallel.offload.swap import tensors_of
from cosmos_rl_core.plan.layer_bytes import BYTES
from cosmos_rl_core.plan.live_bytes import LiveBytes, tensors_without_memory
from cosmos_rl_core.plan.needs import MemoryPart
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.settings.problems import engine_options
from cosmos_rl_vla.config import VLAModelConfig, VLATorchOptions
from cosmos_rl_vla.models.base import Inputs, Randomness
from cosmos_rl_vla.models.families import make
from cosmos_rl_vla.models.loaded import LoadedPolicy
from cosmos_rl_vla.preflight import spec_of
from cosmos_rl_vla.shape import read_weights
from cosmos_rl_vla.sims.base import SimSpec

ACTS = "the policy acts"


def held_by_rollout(config: RunConfig) -> list[MemoryPart]:
    """Return the memory of a rollout replica beside its weights, for a model in a directory."""
    if config.rollout.engine != "torch":
        return [MemoryPart(name="the engine's caches and activations", bytes=None)]
    loaded, options = make(config.model, on_meta=True), engine_options(VLATorchOptions, config.rollout.options)
    loaded.cast_parameters(getattr(torch, config.model.dtype))
    spec = None if options.python is not None else spec_of(config.data)
    rows = options.slots if options.steady else options.slots * options.processes
    return [
        MemoryPart(name="parameters in float32, tables, heads", bytes=_beside(loaded, config.model), away=True),
        MemoryPart(name="a decision", bytes=None if spec is None else _decision(loaded, spec, rows=rows), at=(ACTS,)),
        MemoryPart(name="simulators", bytes=None),
    ]


def _beside(loaded: LoadedPolicy, model: VLAModelConfig) -> int:
    """Bytes of the module beside those of the directory's weights, and of adapters, in the model's dtype."""
    counted = sum(math.prod(spec.shape) for spec in read_weights(Path(model.path).expanduser()))
    counted += sum(tensor.numel() for tensor in adapter_weights(loaded.model).values())
    return max(0, sum(tensor.nbytes for tensor in tensors_of(loaded.model)) - BYTES[model.dtype] * counted)


def _decision(loaded: LoadedPolicy, spec: SimSpec, *, rows: int) -> int:
    """Peak bytes of a decision for `rows` observations at once, with instructions of the largest length.

    Raises UserError for a model of other states or actions than the simulator's.
    """
    loaded.stats.check(action_dim=spec.action_dim, state_dim=spec.state_dim)
    module, length = loaded.model.requires_grad_(False), loaded.instructions.max_length
    height, width = next(iter(spec.cameras.values()), (1, 1))
    with tensors_without_memory():
        module._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))  # from meta and from real memory
        with LiveBytes(without=tensors_of(module)) as live:
            inputs = Inputs(
                images=torch.zeros(rows, len(spec.cameras), height, width, 3, dtype=torch.uint8),
                state=torch.zeros(rows, spec.state_dim),
                tokens=torch.zeros(rows, length, dtype=torch.int64),
                token_mask=torch.ones(rows, length, dtype=torch.bool),
            )
            loaded.model.act(inputs, randomness=Randomness(seeds=range(rows), places=[0] * rows))
    return live.peak
