"""Trains a tiny model for a few steps on fixed random batches, spread over ranks or not, so that both can be compared.

    one = train("qwen3", algorithm="grpo")                                                      # this process, alone
    spread = run_ranks(train_rank, 4, family="qwen3", algorithm="grpo", dims={"dp_shard": 2, "tp": 2})
    assert_equal(one, spread)

For tests: the model is made from a seed, and batches hold rollouts of ragged lengths that share prompts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.objective import build_objective
from cosmos_rl_core.algorithms.table import TABLE
from cosmos_rl_core.interfaces import Policy
from cosmos_rl_core.parallel.config import MemorySection, ParallelSection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.parallel.stages import microbatch_multiple
from cosmos_rl_core.train.answer_sums import AnswerSumsStage
from cosmos_rl_core.train.optimizers.build import build_optimizer
from cosmos_rl_core.train.trainer import Trainer
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup, Share, TrainBatch
from cosmos_rl_llm.config import LLMLoraSection, Part
from cosmos_rl_llm.data.collate import TrainSequence, collate, pack_batch
from cosmos_rl_llm.media.item import View, VisionFamily, view_of
from cosmos_rl_llm.model.causal_lm import make_model
from cosmos_rl_llm.model.vision_parts import freeze
from cosmos_rl_llm.policy.lora import add_adapters
from cosmos_rl_llm.policy.pipelined import PipelinedPolicy
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.token_model import TermOptions
from doubles.ranks import largest_difference

Results = dict[str, np.ndarray]
"""By name: "loss", "grad_norm" [steps], "grad/<parameter>" of the first step, "weight/<parameter>" after the last."""

VOCABULARY = 61
"""Odd, so that ranks hold parts of different sizes."""
_FIRST_WORD = 32
"""Tokens before it are placeholders of pictures and their like in the tiny vision-language models."""
NUM_STEPS = 5
VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "idefics3", "smolvlm", "internvl", "llava", "gemma3")
"""Vision-language families, see `tiny_vision`."""

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_COMMON, "model_type": "llama", "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "qwen3": {**_COMMON, "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3-moe": {**_COMMON, **_EXPERTS, "model_type": "qwen3_moe", "tie_word_embeddings": False},
    "gemma3_text": {**_COMMON, **_WINDOWS, "model_type": "gemma3_text", "final_logit_softcapping": 3.0},
    "gpt-oss": {**_COMMON, **_WINDOWS, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek-v3": {
        **{key: value for key, value in _COMMON.items() if key != "head_dim"},
        "model_type": "deepseek_v3",
        "num_key_value_heads": 8,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}
_WITH_STATES: Mapping[str, Mapping[str, Any]] = {
    "qwen3.5": {
        **_COMMON,
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
"""Families that run unpacked."""
"""Biases, tied matrices, windows, sinks and shared experts where a family has them."""


def train(
    family: str,
    *,
    algorithm: str = "grpo",
    packed: bool = True,
    num_layers: int = 2,
    num_steps: int = NUM_STEPS,
    mesh: ReplicaMesh | None = None,
    parallel: ParallelSection | None = None,
    memory: MemorySection | None = None,
    lora: LLMLoraSection | None = None,
    copies_reference: bool = False,
    frozen: Sequence[Part] = (),
) -> Results:
    """Train `num_steps` steps and return what happened, gathered; with a mesh all of its ranks call this.

    Args:
        algorithm: "grpo" (with an entropy bonus, which reads the whole vocabulary), "sft" or a preference loss.
        copies_reference: the reference of preferences is a second model, even where adapters need none.
        packed: several rollouts a microbatch; otherwise one.
        frozen: parts of a vision-language model that are not trained.
    """
    setup = ModelSetup(mesh=mesh, parallel=parallel or ParallelSection(), memory=memory or MemorySection())
    model = make_tiny(family, num_layers=num_layers)
    vision = vision_of(model) if family in VISION else None
    freeze(model, frozen)
    if lora is not None:
        add_adapters(model, lora, base=family, without=frozen)
    pipelined = mesh is not None and mesh.dims.pp > 1
    kind = PipelinedPolicy if pipelined else CausalLMPolicy
    policy = kind(model, TermOptions(vision=vision), setup=setup)
    trainer = _trainer(policy, algorithm, mesh)
    sums = None
    if trainer.needs_reference:
        reference = None if copies_reference else policy.reference()
        if reference is None:
            frozen_model = make_tiny(family, num_layers=num_layers).requires_grad_(False)
            reference = kind(frozen_model, TermOptions(vision=vision), setup=replace(setup, frozen=True))
        sums = AnswerSumsStage(policy, reference, mesh)
    metrics: Results = {}
    results = []
    share = Share() if mesh is None else replace(mesh.share, multiple=microbatch_multiple(setup.parallel))
    rows = TABLE[algorithm].rows
    for step in range(num_steps):
        batch = make_batch(
            step,
            share=share,
            supervised=bool(rows),
            pairs=rows == "pairs",
            microbatch_terms=48 if packed else 1,
            vision=vision,
        )
        batch = batch if sums is None else sums.complete(batch)
        trainer.begin(batch)
        trainer.forward_backward(batch.microbatches)
        if step == 0:
            metrics |= {f"grad/{name}": array for name, array in _arrays(_gradients(policy))}
        results.append(trainer.optim_step().metrics)
    metrics |= {f"weight/{name}": array for name, array in _arrays(policy.module.named_parameters())}
    return metrics | {key: np.array([result[key] for result in results]) for key in ("loss", "grad_norm")}


def train_rank(
    rank: int,
    world_size: int,
    *,
    dims: Mapping[str, int],
    parallel: Mapping[str, Any] | None = None,
    memory: Mapping[str, Any] | None = None,
    lora: Mapping[str, Any] | None = None,
    **options: Any,
) -> Results:
    """`train` in one of the ranks of `doubles.ranks.run_ranks`, with plain values for mesh and sections."""
    mesh = ReplicaMesh.build(ParallelDims(**dims), device=torch.device("cpu"))
    section = ParallelSection.model_validate({**dims, **(parallel or {})})
    adapters = None if lora is None else LLMLoraSection.model_validate(lora)
    held = MemorySection.model_validate(memory or {})
    return train(**options, mesh=mesh, parallel=section, memory=held, lora=adapters)


def make_tiny(family: str, *, num_layers: int = 2) -> PreTrainedModel:
    """Make the model of a family, with biases and sinks that are not zero."""
    if family in VISION:
        from tiny_vision import make  # needs Pillow

        return make(family, num_layers=num_layers)
    model = make_model(
        {**{**FAMILIES, **_WITH_STATES}[family], "num_hidden_layers": num_layers}, dtype=torch.float32, seed=0
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and not name.endswith("norm.weight"):
                parameter.copy_(torch.linspace(-0.2, 0.3, len(parameter)))
    return model


def vision_of(model: PreTrainedModel) -> VisionFamily:
    """The processing of a tiny vision-language model."""
    from tiny_vision import family_of

    with tempfile.TemporaryDirectory() as directory:
        return family_of(model, Path(directory))


def make_batch(
    seed: int,
    *,
    share: Share,
    supervised: bool,
    microbatch_terms: int,
    pairs: bool = False,
    vision: VisionFamily | None = None,
) -> TrainBatch:
    """Three prompts with a group of four rollouts each, of ragged lengths, with random advantages or as two pairs.

    With `vision` the first shows a picture, and in even batches the second a video.
    """
    rng = np.random.default_rng(seed)
    groups = []
    for index in range(3):
        prompt = rng.integers(_FIRST_WORD, VOCABULARY, rng.integers(1, 10), dtype=np.int32)
        shown = {} if vision is None else _show(index, seed, prompt, vision)
        rollouts = tuple(_rollout(rng, prompt, supervised=supervised, shown=shown) for _ in range(4))
        groups.append(RolloutGroup(prompt=Prompt(sample_id=index, row={}), rollouts=rollouts))
    if not pairs:
        return collate(groups, microbatch_terms=microbatch_terms, share=share)
    halves = [group.rollouts[start : start + 2] for group in groups for start in (0, 2)]
    samples = [_pair(10 * seed + place, half) for place, half in enumerate(halves, start=1)]  # key 0 is padding
    return pack_batch(samples, microbatch_terms=microbatch_terms, share=share, metrics={})


def _pair(key: int, rollouts: Sequence[Rollout]) -> TrainSequence:
    """Two rollouts as a chosen and a rejected answer."""
    chosen, rejected = (
        TrainSequence(
            prompt_tokens=rollout.arrays["prompt_tokens"],
            tokens=rollout.arrays["tokens"],
            logprobs=rollout.rollout_logprobs,
            loss_mask=np.ones_like(rollout.loss_mask),
            advantage=1.0,
            view=View.of_arrays(rollout.arrays),
            preference=sign,
            key=2 * key + (sign > 0),
        )
        for rollout, sign in zip(rollouts, (1.0, -1.0), strict=True)
    )
    return replace(chosen, others=(rejected,))


def _show(index: int, seed: int, prompt: np.ndarray, vision: VisionFamily) -> dict[str, np.ndarray]:
    """Arrays of rollouts whose prompt shows a picture or a video before its own tokens; none for text."""
    from tiny_vision import picture, video

    if index == 0:
        item = vision.image(picture(16, 24, seed=seed))
    elif index == 1 and seed % 2 == 0 and "video" in vision.token_ids:
        item = vision.video(video(frames=4, seed=seed))
    else:
        return {}
    tokens = np.concatenate([np.full(vision.num_tokens(item), vision.token_ids[item.kind], np.int32), prompt])
    return {"prompt_tokens": tokens, **view_of(tokens, [item], vision).arrays}


def differences(expected: Results, ranks: Sequence[Results]) -> dict[str, float]:
    """Return the largest absolute difference of each metric over all ranks, relative where values exceed 1.

    Raises AssertionError where no rank has a metric, or one has another shape.
    """
    found: dict[str, float] = {}
    for name, wanted in expected.items():
        values = [metrics[name] for metrics in ranks if name in metrics]
        assert values, f"no rank has {name}"
        scale = max(1.0, float(np.abs(wanted).max(initial=0.0)))
        for value in values:
            assert value.shape == wanted.shape, f"{name}: {value.shape} for {wanted.shape}"
            error = largest_difference(value, wanted) / scale
            found[name] = max(found.get(name, 0.0), error)
    return found


def assert_equal(expected: Results, ranks: Sequence[Results], *, tolerance: float = 1e-5) -> None:
    """Raise AssertionError, naming the worst metrics, where any rank differs by more than `tolerance`."""
    worst = sorted(differences(expected, ranks).items(), key=lambda item: -item[1])
    assert worst[0][1] <= tolerance, ", ".join(f"{name}: {error:.2e}" for name, error in worst[:8])


def _trainer(policy: Policy, algorithm: str, mesh: ReplicaMesh | None) -> Trainer:
    options = {"entropy_coef": 0.01} if algorithm == "grpo" else {}
    return Trainer(
        policy,
        objective=build_objective(AlgorithmConfig.model_validate({"name": algorithm, **options}), max_terms=32),
        optimizer=build_optimizer(
            # A large eps: updates stay smooth in gradients that are near zero, where rounding decides their sign.
            "adamw",
            policy.module,
            learning_rate=1e-2,
            betas=(0.9, 0.99),
            eps=1e-2,
            weight_decay=0.01,
        ),
        lr_factor=lambda _: 1.0,
        max_grad_norm=1.0,
        mesh=mesh,
    )


def _rollout(
    rng: np.random.Generator, prompt: np.ndarray, *, supervised: bool, shown: Mapping[str, np.ndarray]
) -> Rollout:
    size = int(rng.integers(1, 30))
    logprobs = -np.log(VOCABULARY) + 0.3 * rng.standard_normal(size)
    return Rollout(
        arrays={
            "prompt_tokens": prompt,
            **shown,
            "tokens": rng.integers(_FIRST_WORD, VOCABULARY, size, dtype=np.int32),
        },
        rollout_logprobs=np.zeros(size, np.float32) if supervised else logprobs.astype(np.float32),
        versions=np.zeros(size, np.int32),
        loss_mask=rng.random(size) < 0.9,
        advantage=1.0 if supervised else float(rng.standard_normal()),
    )


def _gradients(policy: Policy) -> Iterable[tuple[str, Tensor]]:
    found = ((name, parameter.grad) for name, parameter in policy.module.named_parameters())
    return ((name, gradient) for name, gradient in found if gradient is not None)


def _arrays(tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, np.ndarray]]:
    for name, tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield name, whole.detach().numpy().copy()
