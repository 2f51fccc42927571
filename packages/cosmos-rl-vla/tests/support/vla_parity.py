"""Log-probabilities and gradients of tiny policies on fixed samples, so that ranks can be compared with one process.

    cases = [("pi05", "ppo", {"checkpointing": "full"}), ("openvla", "sft", {})]
    found = run_ranks(rank_metrics, 2, dims={"dp_shard": 2}, saved="", cases=cases)
    alone = metrics_of("pi05", setup_of({}, {}, None), kind="ppo")          all samples, in one process
    largest_error(alone, metrics_of_case(found, 0))                        relative to the largest element of a tensor

For tests: models are drawn by a seed, and no parameter is zero, as adaptive norms start some.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.objective import build_objective
from cosmos_rl_core.parallel.config import MemorySection, ParallelSection, PrecisionSection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.dtensor import whole
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.types import Microbatch, PolicyOutputs, Share, TermBatch
from cosmos_rl_vla.config import VLAModelConfig, VLASampling
from cosmos_rl_vla.models.base import Acted, Inputs, Randomness
from cosmos_rl_vla.models.families import export_weights, load
from cosmos_rl_vla.models.loaded import LoadedPolicy
from cosmos_rl_vla.policy.parallel import parallelize
from cosmos_rl_vla.policy.policy import VLAPolicy
from doubles.ranks import largest_difference

SAMPLES = 8
"""Decisions of a batch; ranks take them in turn, two microbatches each."""
PPO = AlgorithmConfig(name="ppo", value_coef=0.5)
SIZES: Mapping[str, Any] = {"action_dim": 3, "state_dim": 4, "horizon": 2}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "pi05": {"aux_dim": 2},
    "pi0": {"family": "pi0", "critic": {"place": "expert", "per": "action"}},
    "no critic": {"critic": {"place": "none"}},
    "undetached": {"critic": {"detach": False, "hidden": (8,)}},
    "learned noise": {"noise": {"kind": "learned", "steps": "all"}},
    "openvla": {"family": "openvla", "horizon": None},
    "openvla_oft": {"family": "openvla_oft"},
    "mlp": {"family": "mlp", "horizon": None},
    "bfloat16": {"aux_dim": 2, "dtype": "bfloat16"},
}
"""And "expert": a saved model whose trunk is frozen."""
MODULES = (
    "vla_parity",
    "cosmos_rl_vla.models.pi.model",
    "cosmos_rl_vla.models.openvla.model",
    "transformers.models.paligemma.modeling_paligemma",
    "transformers.models.siglip.modeling_siglip",
    "transformers.models.llama.modeling_llama",
    "transformers.models.dinov2_with_registers.modeling_dinov2_with_registers",
)
"""To be imported before ranks are forked: `doubles.ranks.preload`."""
LOGPROBS = "logprobs "
_TOWERS = ("vision_backbone.", "backbone.paligemma.vision_tower.")

Results = dict[str, np.ndarray]
"""By name: "logprobs <sample>" of this rank's samples; whole gradients, zeros where there is none."""
Case = tuple[str, str, Mapping[str, Any]]
"""Variant, "ppo" or "sft", and options of `setup_of`."""


def metrics_of(variant: str, setup: ModelSetup, *, kind: str, share: Share | None = None, saved: str = "") -> Results:
    """Return log-probs of this rank's samples, and whole gradients of the loss summed over all of them.

    Args:
        kind: "ppo", or "sft" on demonstrations.
        share: which samples; None: all.
        saved: directory of the model that "expert" trains.
    """
    supervised = kind == "sft"
    loaded = loaded_model(variant, saved)
    inputs, acted = decisions(loaded)
    if supervised:
        inputs = demonstrations(loaded)
    parallelize(loaded, setup, compute_dtype=getattr(torch, config_of(variant, saved).dtype))
    sampling = None if supervised else VLASampling(steps="action" if loaded.model.value_dim > 1 else "chunk")
    policy = VLAPolicy(loaded, sampling=sampling, reduce_once=setup.parallel.reduce_once)
    rows = rows_of(share or Share())
    halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    microbatches = [microbatch_of(inputs, acted, half, supervised=supervised) for half in halves]
    with torch.no_grad():
        logprobs = torch.cat([policy.forward(microbatch).logprobs for microbatch in microbatches])
    objective = build_objective(AlgorithmConfig(name="sft") if supervised else PPO, max_terms=10)

    def loss(outputs: PolicyOutputs, microbatch: Microbatch) -> Tensor:
        losses, _ = objective(outputs, microbatch.terms)
        return sum((term.coef * term.values.sum() for term in losses), start=torch.zeros(()))

    policy.forward_backward(microbatches, loss=loss, with_entropy=False)
    metrics = {f"{LOGPROBS}{row}": x for row, x in zip(rows, logprobs.reshape(len(rows), -1), strict=True)}
    metrics |= _gradients(loaded, spread=setup.mesh is not None)
    return {name: tensor.detach().float().numpy() for name, tensor in metrics.items()}


def rank_metrics(rank: int, world_size: int, *, dims: Mapping[str, int], saved: str, cases: Sequence[Case]) -> Results:
    """`metrics_of` each case in one of the ranks of `doubles.ranks.run_ranks`; see `metrics_of_case`."""
    mesh = ReplicaMesh.build(ParallelDims(**dims), device=torch.device("cpu"))
    found: Results = {}
    for number, (variant, kind, options) in enumerate(cases):
        metrics = metrics_of(variant, setup_of(dims, options, mesh), kind=kind, share=mesh.share, saved=saved)
        found |= {f"{number}/{name}": metric for name, metric in metrics.items()}
    return found


def metrics_of_case(ranks: Sequence[Results], number: int) -> list[Results]:
    """Return what each rank found for one of the cases."""
    before = f"{number}/"
    return [{name.removeprefix(before): x for name, x in rank.items() if name.startswith(before)} for rank in ranks]


def largest_error(alone: Results, ranks: Sequence[Results]) -> tuple[float, str]:
    """Return how far any rank is from one process, relative to a tensor's largest element, and of which tensor.

    Raises AssertionError where a rank lacks a gradient, or all of them a sample.
    """
    gradients = {name for name in alone if not name.startswith(LOGPROBS)}
    assert set().union(*ranks) == alone.keys() and all(gradients <= rank.keys() for rank in ranks)
    errors = [
        (largest_difference(metric, alone[name]) / _scale(alone, name), f"rank {number}: {name}")
        for number, rank in enumerate(ranks)
        for name, metric in rank.items()
    ]
    return max(errors)


def setup_of(dims: Mapping[str, int], options: Mapping[str, Any], mesh: ReplicaMesh | None) -> ModelSetup:
    """Return the setup of a case. Options: checkpointing, reduce_once, parameters (the type they are held in)."""
    return ModelSetup(
        mesh=mesh,
        parallel=ParallelSection.model_validate({**dims, "reduce_once": options.get("reduce_once", False)}),
        memory=MemorySection(activation_checkpointing=options.get("checkpointing", "none")),
        precision=PrecisionSection(parameters=options.get("parameters", "float32")),
    )


def config_of(variant: str, saved: str = "") -> VLAModelConfig:
    """Return a tiny model's [model] section."""
    if variant == "expert":
        return VLAModelConfig(path=saved, train="expert")
    return VLAModelConfig(**{**SIZES, **VARIANTS[variant]}, words=("reach the red square",), stats="unit")


def loaded_model(variant: str, saved: str = "") -> LoadedPolicy:
    """Return the same model in every process; no parameter is zero."""
    loaded = load(config_of(variant, saved))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return loaded


def save_model(variant: str, directory: Path) -> LoadedPolicy:
    """Write a variant's model as a directory, and return it."""
    from safetensors.torch import save_file

    loaded = loaded_model(variant)
    loaded.save_config(directory)
    tensors = dict(export_weights(config_of(variant), loaded.weights().items(), merge_adapters=False))
    save_file({name: x.detach().contiguous() for name, x in tensors.items()}, directory / "model.safetensors")
    return loaded


def rows_of(share: Share) -> list[int]:
    """Return the samples of a share."""
    return list(range(share.index, SAMPLES, share.count))


def microbatch_of(inputs: Mapping[str, Tensor], acted: Acted, rows: list[int], *, supervised: bool) -> Microbatch:
    """Return samples `rows` of `decisions` or `demonstrations`, with terms."""
    terms = _terms_of_batch(acted, rows, supervised=supervised)
    return Microbatch(inputs={name: x[rows] for name, x in inputs.items()}, terms=terms)


def decisions(loaded: LoadedPolicy) -> tuple[dict[str, Tensor], Acted]:
    """What the rollout of the model, before any step, leaves to train on; by name, [SAMPLES, ...]."""
    seen = _observations()
    acted = loaded.model.act(seen, randomness=Randomness(seeds=range(SAMPLES), places=[0] * SAMPLES))
    valid = torch.ones(acted.actions.shape[:2], dtype=torch.bool)
    valid[0, 1:] = False
    return {**_inputs_of(seen), "valid": valid, **{f"replay/{name}": x for name, x in acted.replay.items()}}, acted


def demonstrations(loaded: LoadedPolicy) -> dict[str, Tensor]:
    """What supervised training reads; by name, [SAMPLES, ...]."""
    generator = torch.Generator().manual_seed(2)
    model = loaded.model
    mask = torch.ones(SAMPLES, model.model_horizon, dtype=torch.bool)
    mask[1, 1:] = False
    found = {
        **_inputs_of(_observations()),
        "actions": torch.randn(SAMPLES, model.model_horizon, model.action_dim, generator=generator),
        "action_mask": mask,
        "seeds": torch.arange(SAMPLES),
    }
    return found | (
        {"aux": torch.randn(SAMPLES, loaded.model.aux_dim, generator=generator)} if loaded.model.aux_dim else {}
    )


def _observations() -> Inputs:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.arange(3).expand(SAMPLES, -1)
    return Inputs(
        images=torch.randint(0, 256, (SAMPLES, 1, 64, 64, 3), generator=generator, dtype=torch.uint8),
        state=torch.randn(SAMPLES, SIZES["state_dim"], generator=generator),
        tokens=tokens,
        token_mask=torch.tensor([True, True, False]).expand(SAMPLES, -1) | (torch.arange(SAMPLES) % 2 == 0)[:, None],
    )


def _inputs_of(seen: Inputs) -> dict[str, Tensor]:
    return {name: getattr(seen, name) for name in ("images", "state", "tokens", "token_mask")}


def _terms_of_batch(acted: Acted, rows: list[int], *, supervised: bool) -> TermBatch:
    """Advantages, old log-probs and returns of samples `rows`: any that differ from sample to sample."""
    count = len(rows) * (1 if supervised else acted.actions[0].numel())
    per = count // len(rows)
    advantages = (torch.tensor(rows) - 3.3).repeat_interleave(per) / 4
    values = torch.zeros(count)
    return TermBatch(
        rollout_logprobs=torch.zeros(count) if supervised else acted.logprobs[rows].reshape(-1) + 0.1 * advantages,
        advantages=torch.ones(count) if supervised else advantages,
        loss_mask=torch.ones(count),
        rollout_index=torch.arange(len(rows)).repeat_interleave(per),
        num_rollouts=len(rows),
        values=values,
        returns=values + advantages,
    )


def _gradients(loaded: LoadedPolicy, *, spread: bool) -> dict[str, Tensor]:
    found = {}
    for name, parameter in loaded.model.named_parameters():
        assert isinstance(parameter, DTensor) == spread, name
        assert parameter.requires_grad or parameter.grad is None, name
        found[name] = torch.zeros(parameter.shape) if parameter.grad is None else whole(parameter.grad)
    return found


def _scale(alone: Results, name: str) -> float:
    """What errors of a metric are relative to; next to nothing for one that is all zeros, and has to be in ranks too.

    A bias of keys adds one number to all scores of a query, and softmax is invariant to that: where keys are not
    rotated by their positions, as in vision towers, its gradient is 0. What is found is what rounding leaves of a sum
    (1e-7 of the gradient of the same layer's bias of queries, in float64 2e-16) and is as large as its own error: the
    gradient of that bias of queries is its scale.
    """
    if name.startswith(_TOWERS) and name.endswith(".k_proj.bias"):
        name = name.replace(".k_proj.", ".q_proj.")
    return max(float(np.abs(alone[name]).max()), float(np.finfo(np.float32).tiny))
