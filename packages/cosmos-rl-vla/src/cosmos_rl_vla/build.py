"""Builds policies and engines from a recipe."""

from __future__ import annotations

import torch

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.observe.startup import READING, SIMULATORS, phase
from cosmos_rl_core.parallel.device import own_device
from cosmos_rl_core.parallel.dtensor import materialise
from cosmos_rl_core.parallel.lora import fill_adapters
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_vla.config import VLADataConfig, VLAModelConfig, VLASampling
from cosmos_rl_vla.engines.torch import SimulationEngine, VLATorchOptions
from cosmos_rl_vla.models.families import make
from cosmos_rl_vla.models.loaded import LoadedPolicy
from cosmos_rl_vla.policy.parallel import parallelize
from cosmos_rl_vla.policy.policy import VLAPolicy
from cosmos_rl_vla.sims.pool.pool import SimulatorPool


def build_policy(
    config: VLAModelConfig, *, data: VLADataConfig, sampling: VLASampling | None, seed: int, setup: ModelSetup
) -> VLAPolicy:
    """Load the model and shard it by `setup`. Collective over the ranks of a replica."""
    measured = None
    if data.demos:
        from cosmos_rl_vla.data.demos import Demonstrations  # pyarrow and PyAV, for imitation alone

        measured = Demonstrations.open(data)
    loaded = make(
        config,
        stats=None if measured is None else measured.stats,
        words=() if measured is None else measured.instructions,
        on_meta=setup.mesh is not None,
    )
    _check_terms(loaded, sampling)
    loaded.model.eval()  # permanently: no dropout; `parallel.remat` decides activation checkpointing
    if setup.mesh is None:
        loaded.model.to(own_device())
    parallelize(loaded, setup, compute_dtype=getattr(torch, config.dtype))
    if setup.mesh is not None:
        materialise(loaded.model, device=torch.device("cpu") if setup.memory.parameter_offload else setup.mesh.device)
        fill_adapters(loaded.model, seed=config.seed)
    phase(READING)
    loaded.fill()
    return VLAPolicy(
        loaded,
        sampling=sampling,
        opened=measured,
        aux_coef=config.aux_coef,
        seed=seed,
        reduce_once=setup.parallel.reduce_once,
    )


def build_engine(config: VLAModelConfig, *, data: VLADataConfig, options: VLATorchOptions) -> SimulationEngine:
    """Load the model and start the simulators."""
    loaded = make(config)
    loaded.cast_parameters(getattr(torch, config.dtype))
    loaded.model.to(own_device())
    phase(READING)
    loaded.fill()
    phase(SIMULATORS)
    pool = SimulatorPool(
        data.simulator,
        options=data.options,
        groups=options.processes,
        slots_per_group=options.slots,
        python=options.python,
        limits=options,
    )
    try:
        loaded.stats.check(action_dim=pool.spec.action_dim, state_dim=pool.spec.state_dim)
        if loaded.model.action_dim != pool.spec.action_dim:
            raise UserError(
                f"the model gives actions of {loaded.model.action_dim} dimensions, {data.simulator} takes "
                f"{pool.spec.action_dim}; use a model made for it, or set [model] action_dim"
            )
        return SimulationEngine(loaded, pool=pool, options=options)
    except BaseException:
        pool.close()
        raise


def _check_terms(loaded: LoadedPolicy, sampling: VLASampling | None) -> None:
    """Raise UserError if rewards are per action and the model's values are not, or terms are parts of a choice."""
    if sampling is None:
        return
    if loaded.model.is_choice and sampling.terms == "token":
        raise UserError(
            '[rollout.sampling] terms = "token": a choice of one of several actions is one term; set terms = "action"'
        )
    if sampling.steps == "chunk":
        return
    if loaded.model.value_dim not in (0, loaded.model.horizon):
        raise UserError(
            '[rollout.sampling] steps = "action" needs a value per action; set [model.critic] per = "action"'
        )
