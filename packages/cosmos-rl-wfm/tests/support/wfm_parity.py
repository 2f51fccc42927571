"""Whether a network spread over ranks computes the velocity and the gradients of one process.

    alone = metrics_of("wan", ModelSetup())                                  all samples, in one process
    found = run_ranks(...)  # in each rank: metrics_of("wan", ModelSetup(mesh=mesh, ...), share=mesh.share)
    largest_error(alone, found, dims)                                        relative to the largest element of a tensor

Tiny networks of each class that context parallelism knows, no parameter of which is zero as diffusers starts some.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cosmos_rl_core.parallel.axes.fsdp import reshard
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.dtensor import whole
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.types import Share
from cosmos_rl_wfm.parallel.parallelize import parallelize
from doubles.ranks import largest_difference

BATCH = 4
HEADS = 4
TEXT = (5, 16)
"""Tokens and width."""

Results = dict[str, np.ndarray]


def metrics_of(
    family: str, setup: ModelSetup, *, share: Share | None = None, sizes: Sequence[tuple[int, int, int]] = ((3, 8, 8),)
) -> Results:
    """Return the velocities of this rank's samples, and whole gradients of a loss summed over all of them.

    Args:
        family: of `FAMILIES`, with "-lora" behind it for adapters, "-times" for a time for each token or frame.
        share: which samples; None: all.
        sizes: (f, h, w) of latents; with several, all forward passes come before the one backward pass.
    """
    network = make_tiny(family)
    parallelize(network, setup)
    mine = slice(None) if share is None else slice(share.index, None, share.count)
    metrics: dict[str, Tensor] = {}
    loss = torch.zeros(())
    for frames, height, width in sizes:
        inputs = make_inputs(family, frames=frames, height=height, width=width)
        slopes = torch.linspace(-1, 1, inputs["hidden_states"].numel()).view_as(inputs["hidden_states"])[mine]
        inputs = {name: value[mine] if isinstance(value, Tensor) else value for name, value in inputs.items()}
        velocity = network(**inputs, return_dict=False)[0]
        metrics[f"velocity {frames} {height} {width}"] = velocity
        loss = loss + (velocity * slopes).sum()
    loss.backward()
    reshard(network)
    for name, parameter in network.named_parameters():
        assert parameter.requires_grad == (parameter.grad is not None), name
        if parameter.grad is not None:
            metrics[name] = whole(parameter.grad)
    return {name: tensor.detach().numpy() for name, tensor in metrics.items()}


def largest_error(
    alone: Mapping[str, np.ndarray], ranks: Sequence[Mapping[str, np.ndarray]], dims: ParallelDims
) -> tuple[float, str]:
    """Return how far any rank is from one process, relative to a tensor's largest element, and of which tensor."""
    errors = [(0.0, "")]
    for rank, metrics in enumerate(ranks):
        share = dims.share(rank)
        for name, expected in alone.items():
            expected = expected[share.index :: share.count] if name.startswith("velocity") else expected
            assert metrics[name].shape == expected.shape, name
            scale = float(np.abs(expected).max()) or 1.0  # of what nothing depends on, such as the last text of SD3
            errors.append((largest_difference(metrics[name], expected) / scale, f"rank {rank}: {name}"))
    return max(errors)


def make_tiny(family: str) -> nn.Module:
    """Return a tiny network with random weights, the same for the same family in every process."""
    torch.manual_seed(0)
    network = FAMILIES[family.partition("-")[0]]()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    if family.endswith("-lora"):
        from peft import LoraConfig

        network.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    return network.train()


def make_inputs(family: str, *, frames: int, height: int, width: int) -> dict[str, Any]:
    """Return arguments of `BATCH` samples as the pipelines of diffusers pass them, with another time for each."""
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(BATCH, *shape, generator=generator)

    times = torch.linspace(100.0, 937.5, BATCH)
    shape = (4, height, width) if family.startswith("sd3") else (4, frames, height, width)
    inputs: dict[str, Any] = {"hidden_states": noise(*shape), "timestep": times, "encoder_hidden_states": noise(*TEXT)}
    if family.startswith("sd3"):
        inputs["pooled_projections"] = noise(16)
    if family.startswith("cosmos"):
        inputs["fps"] = 24
    if family == "wan-times":  # Wan 2.2: of each token
        inputs["timestep"] = times[:, None] * torch.linspace(0, 1, frames * height * width // 4)
    if family == "cosmos-times":  # Predict 2.5, where frames are given: of each frame
        inputs["timestep"] = (times[:, None] / 1000 * torch.linspace(0.1, 1, frames))[:, None, :, None, None]
    return inputs


def _wan() -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=HEADS,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=TEXT[1],
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )


def _cosmos() -> Any:
    from diffusers import CosmosTransformer3DModel

    return CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=16,
        num_layers=2,
        mlp_ratio=2,
        text_embed_dim=TEXT[1],
        adaln_lora_dim=4,
        max_size=(4, 16, 16),
        patch_size=(1, 2, 2),
        concat_padding_mask=False,  # needs torchvision, and is long past when tokens are cut
        extra_pos_embed_type="learnable",
    )


def _sd3() -> Any:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT[1],
        caption_projection_dim=8 * HEADS,
        pooled_projection_dim=16,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


FAMILIES: Mapping[str, Callable[[], Any]] = {"wan": _wan, "cosmos": _cosmos, "sd3": _sd3}
