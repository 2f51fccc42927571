"""Check that a model over ranks computes the same as in one process: on a small model, over the mesh that trains.

    miniature of the policy's model, as wide and deep as the mesh needs
      one process               all sequences             -> log-probabilities, gradients
      the ranks of the mesh     each its part of them     -> equal, or UserError on every rank

`probe` compares one process with transformers. Whether a family's parts fit a way of sharding is seen here, in values
and gradients, and not by names of families.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.device import exact_products
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.parallel.stages import microbatch_multiple, num_stages
from cosmos_rl_core.types import Microbatch, PolicyOutputs, Share
from cosmos_rl_llm.data.collate import TrainSequence, pack_batch
from cosmos_rl_llm.model.miniature import NUM_LAYERS, MiniatureSize, miniature
from cosmos_rl_llm.over_ranks import policy_over
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.probe import TOLERANCE, describe, first_line, probe_samples

GRADIENT_TOLERANCE = 1e-2
"""Relative to the largest value of a parameter's gradient. Rounding gives about 1e-5, a part that is missing or counted
twice 0.3 and more."""
_SMALLEST = 1e-3
"""A gradient counts as at least this part of the model's largest: that of a bias of keys is 0 but for rounding."""

_CHECKED: set[tuple[object, ...]] = set()
"""Families, trained parameters and meshes that were found right in this process."""

Prepare = Callable[[PreTrainedModel], None]
"""Freezes parts of a model and adds adapters, in place."""


def check_ranks(model: PreTrainedModel, setup: ModelSetup, *, prepare: Prepare = lambda _: None) -> None:
    """Raise UserError, on every rank, if the family of `model` is not computed correctly over the mesh of `setup`.

    All ranks of the mesh call it together. `model`'s weights are not used and need not be loaded. A family that is
    right is not checked again in this process, such as for the reference beside a policy.
    """
    mesh = setup.mesh
    if mesh is None or mesh.dims.world_size == 1:
        return
    trained = tuple((name, parameter.requires_grad) for name, parameter in model.named_parameters())
    subject = (*describe(model), trained, str(mesh.dims), setup.parallel.model_dump_json(), str(mesh.device))
    if subject in _CHECKED:
        return
    name = type(model).__name__
    try:
        with exact_products():
            off, slope, parameter = compare_ranks(model, setup, prepare=prepare)
    except UserError:
        raise
    except Exception as error:  # any, from the family's own code
        raise UserError(
            f"[policy.parallel] {name} does not run over {mesh.dims.describe()} ({first_line(error)}); {_advice(mesh)}"
        ) from error
    worst = torch.tensor([off, slope], device=mesh.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    off, slope = worst.tolist()
    if not (off <= TOLERANCE and slope <= GRADIENT_TOLERANCE):
        raise UserError(
            f"[policy.parallel] {name} over {mesh.dims.describe()} differs from one process: log-probabilities by "
            f"{off:.2g} nats, a gradient by {slope:.2g} of its largest value ({parameter}); {_advice(mesh)}"
        )
    _CHECKED.add(subject)


def compare_ranks(
    model: PreTrainedModel,
    setup: ModelSetup,
    *,
    prepare: Prepare = lambda _: None,
    samples: Sequence[TrainSequence] = (),
) -> tuple[float, float, str]:
    """Return this rank's largest errors of a log-probability and of a gradient, and the parameter of the latter.

    All ranks of the mesh call it together. Without `samples` the batch has those of the probe.
    """
    mesh = setup.mesh
    assert mesh is not None
    samples = samples or _weighted(2 * probe_samples())
    size = fitting_size(mesh.dims, stages=num_stages(setup.parallel))
    small, alone = (miniature(type(model), model.config, size) for _ in range(2))
    for each in (small, alone):
        prepare(each)
        each.to(mesh.device)  # pyright: ignore[reportArgumentType] transformers wraps it without `self`
    spread = policy_over(small, setup=ModelSetup(mesh=mesh, parallel=setup.parallel))
    own = CausalLMPolicy(alone)
    share = replace(mesh.share, multiple=microbatch_multiple(setup.parallel))
    computed = _train(spread, samples, share)
    with torch.no_grad():
        expected = [own.forward(microbatch).logprobs for microbatch, _ in computed]
    off = max((_largest(mine - right) for (_, mine), right in zip(computed, expected, strict=True)), default=0.0)
    _train(own, samples, Share())
    return off, *_worst_gradient(_gradients(spread.module), _gradients(own.module))


def fitting_size(dims: ParallelDims, *, stages: int) -> MiniatureSize:
    """The size of a miniature that can be sharded over `dims`: heads, widths, experts and layers divide."""
    shards = dims.dp_shard * dims.cp if dims.tp * dims.ep > 1 else 1
    divided = (4, dims.tp * dims.cp), (2, dims.tp), (8, shards)  # heads, key-value heads, the narrowest latent
    return MiniatureSize(
        layers=NUM_LAYERS if stages == 1 else NUM_LAYERS * stages,  # a vision tower may reach into several layers
        widths=math.lcm(*(ranks // math.gcd(width, ranks) for width, ranks in divided)),
        experts=dims.ep // math.gcd(4, dims.ep),
    )


def _weighted(samples: Sequence[TrainSequence]) -> list[TrainSequence]:
    return [replace(sample, advantage=weight) for sample, weight in zip(samples, (1.0, -0.5, 0.3, 0.7), strict=True)]


def _train(policy: Any, samples: Sequence[TrainSequence], share: Share) -> list[tuple[Microbatch, Tensor]]:
    """Add the gradients of a share of the batch; return the microbatches that this rank computed to the end."""
    batch = pack_batch(samples, microbatch_terms=32, share=share, metrics={})
    computed = []

    def loss(outputs: PolicyOutputs, microbatch: Microbatch) -> Tensor:
        computed.append((microbatch, outputs.logprobs.detach()))
        return (outputs.logprobs * microbatch.terms.advantages * microbatch.terms.loss_mask).sum()

    policy.forward_backward(batch.microbatches, loss=loss, with_entropy=False)
    return computed


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    """Gradients by trained parameter; 0 where there is none, since ranks may leave out what one process trains."""
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    computed = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in trained.items()
    }
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in computed.items()}


def _worst_gradient(computed: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest error relative to a parameter's largest value, and its name. A stage has some of the parameters."""
    floor = _SMALLEST * max(_largest(gradient) for gradient in expected.values())
    errors = {
        name: _largest(gradient - expected[name]) / max(_largest(expected[name]), floor)
        for name, gradient in computed.items()
        if name in expected
    }
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


def _largest(values: Tensor) -> float:
    largest = float(values.abs().max()) if values.numel() else 0.0
    return largest if largest == largest else math.inf


def _advice(mesh: ReplicaMesh) -> str:
    axes = [axis for axis in ("tp", "cp", "pp", "ep") if getattr(mesh.dims, axis) > 1]
    return f"set {' and '.join(f'{axis} = 1' for axis in axes)}" if axes else "choose another model, or one rank"
