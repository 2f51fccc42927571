"""The families' own models, given frames, pixels' masks and all, with their networks spread over ranks."""

import numpy as np
import torch

from cosmos_rl_core.parallel.config import MemorySection, ParallelSection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.dtensor import whole
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_wfm.models.base import Condition
from cosmos_rl_wfm.models.build import build_model
from cosmos_rl_wfm.models.config import WFMModelConfig
from cosmos_rl_wfm.parallel.parallelize import parallelize
from doubles import ranks
from doubles.ranks import run_ranks

ranks.preload("diffusers.models.transformers.transformer_wan", "cosmos_rl_wfm.models.build")


def metrics_of(family, setup):
    """The velocity of two samples, the first of which has a frame given, and whole gradients."""
    config = WFMModelConfig.model_validate({"family": family, "tiny": True, "text": {"encoder": "cached"}})
    model = build_model(config, device=torch.device("cpu"))
    parallelize(model.network, setup)
    generator = torch.Generator().manual_seed(2)
    video = family != "sd3"
    frames = 3 if video else 1
    latents = torch.randn(2, model.family.channels, frames, 6, 6, generator=generator)
    pooled = getattr(model.family, "pooled_width", None)
    condition = Condition(
        text=torch.randn(2, 5, model.family.text_width, generator=generator),
        text_mask=torch.ones(2, 5, dtype=torch.bool),
        pooled=None if pooled is None else torch.randn(2, pooled, generator=generator),
        given=torch.randn(latents.shape, generator=generator) if video else None,
        given_mask=torch.tensor([[True, False, False], [False] * 3]) if video else None,
    )
    velocity = model.velocity(latents, torch.tensor([0.3, 0.9]), condition)
    (velocity * torch.linspace(-1, 1, velocity.numel()).view_as(velocity)).sum().backward()
    gradients = {name: whole(p.grad) for name, p in model.network.named_parameters() if p.grad is not None}
    return {name: tensor.detach().numpy() for name, tensor in {"velocity": velocity, **gradients}.items()}


def rank_figures(rank, world_size, *, families, cp):
    dims = {"cp": cp, "dp_shard": 1}
    mesh = ReplicaMesh.build(ParallelDims(**dims), device=torch.device("cpu"))
    memory = MemorySection(activation_checkpointing="full")
    setup = ModelSetup(mesh=mesh, parallel=ParallelSection(**dims), memory=memory)
    return {f"{family}/{name}": value for family in families for name, value in metrics_of(family, setup).items()}


def test_velocity_and_gradients_of_each_family_over_cp():
    families = ("wan", "cosmos", "sd3")
    for rank in run_ranks(rank_figures, 2, families=families, cp=2):
        for family in families:
            for name, expected in metrics_of(family, ModelSetup()).items():
                scale = np.abs(expected).max() or 1.0
                np.testing.assert_allclose(rank[f"{family}/{name}"], expected, rtol=0, atol=1e-5 * scale, err_msg=name)
