"""The memory of a policy rank and of an engine beside the network itself, from config.json. No torch.

    policy    loading over ranks, a teacher, pictures        engine    keys and values, activations, logits, pictures

A token that shows a picture stands for several patches, so that a row of n tokens has at most n x patches_per_token of
them. With h the tower's width, i that of its feed-forward layers and c the bytes of a number, a layer keeps for its
backward pass, for each patch:

    norms         4 c h                  the input of both, and what they return
    attention     7 c h                  queries, keys and values in one, rotated queries and keys, the output twice
    feed-forward  2 c i, gated 4 c i     before and after the activation

Its backward pass adds gradients: c h of its output, and of the feed-forward's inner numbers c i, gated 2 c i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.plan.estimate import MemoryEstimate, estimate
from cosmos_rl_core.plan.layer_bytes import BYTES
from cosmos_rl_core.plan.needs import START, STEP, MemoryPart
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.settings.problems import engine_options
from cosmos_rl_core.storage.json_files import read_json_object
from cosmos_rl_llm.config import LLMModelConfig, LLMTorchOptions
from cosmos_rl_llm.engines.vllm.options import VllmEngineOptions
from cosmos_rl_llm.model.checkpoint import SIZES, expert_width, model_directory, resolve
from cosmos_rl_llm.teacher.check import policy_dims, teacher_shape

PROMPTS, TERMS = "prompts are read", "terms are sampled"
"""Times of the torch engine."""
TEACHES = "the teacher computes"
"""The time of the teacher's passes, which are before the policy's."""
ACTIVATIONS, PIXELS = "activations of the vision tower", "pixels"
SEEN = "pictures pass the tower"
_GATED = {"qwen2_5_vl"}
"""Families whose towers have gated feed-forward layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSizes:
    """The sizes of a tower that decide the memory of its passes."""

    layers: int
    hidden: int
    """h."""
    intermediate: int
    """i."""
    gated: bool
    patch: int
    """Numbers of a patch's pixels."""
    patches_per_token: float
    merged: int
    """Numbers that the projectors take and keep for a patch."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TowerSizes | None:
        """Read config.json; None for a family with other keys."""
        tower, kind = config.get("vision_config"), config.get("model_type", "")
        if not isinstance(tower, Mapping) or (per_token := _patches_per_token(config, tower)) is None:
            return None
        hidden = tower.get("embed_dim") or tower.get("hidden_size")
        layers = tower.get("depth") or tower.get("num_hidden_layers")
        side = tower.get("patch_size")
        side = side[0] if isinstance(side, list) else side
        if not (hidden and layers and side):
            return None
        mergers = 1 + len(tower.get("deepstack_visual_indexes") or ())
        return cls(
            layers=layers,
            hidden=hidden,
            intermediate=tower.get("intermediate_size") or int(hidden * tower.get("mlp_ratio", 4)),
            gated=kind in _GATED,
            patch=3 * tower.get("temporal_patch_size", 1) * side**2,
            patches_per_token=per_token,
            merged=mergers * 4 * hidden,
        )

    def kept(self, *, dtype: str, recomputed: bool) -> float:
        """Bytes a patch from the forward to the backward pass. recomputed: a layer keeps its input alone."""
        size = BYTES[dtype]
        return self.layers * (size * self.hidden if recomputed else self.layer(dtype=dtype))

    def projected(self, *, dtype: str) -> float:
        """Bytes a patch that the projectors keep."""
        return BYTES[dtype] * self.merged

    def layer(self, *, dtype: str) -> float:
        """Bytes a patch of one layer, in training."""
        return BYTES[dtype] * (11 * self.hidden + (4 if self.gated else 2) * self.intermediate)

    def gradients(self, *, dtype: str) -> float:
        """Bytes a patch that the backward pass of one layer adds, at most."""
        return BYTES[dtype] * (self.hidden + (2 if self.gated else 1) * self.intermediate)

    def passing(self, *, dtype: str) -> float:
        """Bytes a patch of a pass without gradients, at its widest layer."""
        return BYTES[dtype] * max(8 * self.hidden, 2 * self.hidden + 2 * self.intermediate)

    @property
    def pixels(self) -> int:
        """Bytes of a patch's pixels."""
        return BYTES["float32"] * self.patch


def held_by_policy(config: RunConfig, rank: MemoryEstimate) -> tuple[MemoryPart, ...]:
    """Return the memory of a policy rank beside `rank`: the start of a rank of several, a teacher, pictures."""
    several = policy_dims(config).world_size > 1
    loading = rank.while_filled(host=config.policy.memory.parameter_offload) if several else ()
    directory = Path(resolve(config.model.path))
    pictures = _of_pictures(directory, config) if directory.is_dir() else ()
    return (*loading, *_of_teacher(config, rank), *pictures)


def held_by_rollout(config: RunConfig) -> tuple[MemoryPart, ...]:
    """Return the memory of a rollout replica beside the network: keys and values, activations, and logits."""
    options = config.rollout.options
    if config.rollout.engine == "vllm":
        chosen = engine_options(VllmEngineOptions, options)
        name = "vLLM's keys, values and activations, within its gpu_memory_utilization"
        share = None if chosen.cache_bytes else chosen.gpu_memory_utilization
        return (MemoryPart(name=name, bytes=chosen.cache_bytes, share=share),)
    return _of_torch_engine(config, engine_options(LLMTorchOptions, options))


def _of_pictures(directory: Path, config: RunConfig) -> tuple[MemoryPart, ...]:
    """Return the memory of a policy rank's pictures: at most a microbatch of them alone; none of text."""
    model_config = read_json_object(directory / "config.json", hint="see model.path")
    if "vision_config" not in model_config:
        return ()
    sizes, policy, model = TowerSizes.of(model_config), config.policy, config.model
    if sizes is None:
        return (MemoryPart(name=ACTIVATIONS, bytes=None),)
    patches = round(policy.microbatch_terms * sizes.patches_per_token)
    in_flight = policy.parallel.pp * patches
    recomputed = policy.memory.activation_checkpointing != "none"
    if "tower" in model.freeze:  # it keeps nothing for the decoder's passes
        entries = [MemoryPart(name=ACTIVATIONS, bytes=round(patches * sizes.passing(dtype=model.dtype)), at=(SEEN,))]
    else:
        kept = in_flight * sizes.kept(dtype=model.dtype, recomputed=recomputed)
        entries = [MemoryPart(name=ACTIVATIONS, bytes=round(kept), at=(STEP, SEEN))]
        gradients = round(patches * sizes.gradients(dtype=model.dtype))
        entries.append(MemoryPart(name="gradients in the vision tower", bytes=gradients, at=(SEEN,)))
        if recomputed:  # after the decoder's backward pass
            layer = round(patches * sizes.layer(dtype=model.dtype))
            entries.append(MemoryPart(name="a layer of the vision tower, computed again", bytes=layer, at=(SEEN,)))
    if {"tower", "projector"} - set(model.freeze):
        projected = round(in_flight * sizes.projected(dtype=model.dtype))
        entries.append(MemoryPart(name="activations of the projector", bytes=projected, at=(STEP, SEEN)))
    return *entries, MemoryPart(name=PIXELS, bytes=in_flight * sizes.pixels)


def _of_teacher(config: RunConfig, rank: MemoryEstimate) -> tuple[MemoryPart, ...]:
    """Return the memory that [teacher] adds to a policy rank; `rank` is the policy's own."""
    if config.teacher is None:
        return ()
    shape, policy, dims = teacher_shape(config), config.policy, policy_dims(config)
    if shape is None:
        return (MemoryPart(name="teacher", bytes=None),)
    spread = dims.world_size > 1
    size, parameter_bytes = BYTES[shape.compute_dtype], BYTES[policy.precision.parameters]
    teacher_memory = estimate(shape, dims=dims, policy=policy, tokens=policy.microbatch_terms)
    parameters = teacher_memory.parameters * (size if spread else parameter_bytes) // parameter_bytes
    offloaded = policy.memory.parameter_offload and spread
    parts = [MemoryPart(name="teacher", bytes=parameters, host=offloaded, away=True)]
    if spread:
        parts += [
            MemoryPart(name="teacher, as it is filled", bytes=parameters, at=(START,), host=offloaded),
            MemoryPart(
                name="teacher's output head", bytes=-(-shape.vocabulary // dims.tp) * shape.hidden * size, away=True
            ),
            MemoryPart(name="teacher's gathered parameters", bytes=teacher_memory.gathered, at=(TEACHES,)),
        ]
    if config.teacher.loss == "divergence":
        parts.append(MemoryPart(name="logits of policy and teacher", bytes=rank.logits, at=(STEP,)))
        if not config.teacher.top_k:
            kept = None if config.is_sft else _terms_per_rank(config, dims) * shape.hidden * size
            parts.append(MemoryPart(name="teacher's hidden states of the step", bytes=kept, at=(STEP,)))
    return tuple(parts)


def _terms_per_rank(config: RunConfig, dims: ParallelDims) -> int:
    """Terms of a step in one rank, with rollouts of maximum length; ranks along cp, tp and pp have the same."""
    rollouts = config.policy.prompts_per_step * config.rollout.group_size
    ranks = dims.dp_shard * dims.dp_replicate * config.policy.replicas
    return -(-rollouts // ranks) * config.rollout.sampling.max_terms


def _of_torch_engine(run: RunConfig, options: LLMTorchOptions) -> tuple[MemoryPart, ...]:
    """Return the memory of the torch engine beside the weights: keys and values, activations, and logits.

    Rollouts are as long as `model.max_length` or the model's context, with `max_terms` terms; the engine is as full as
    its options allow.
    """
    model, rollout = run.model, run.rollout
    group_size, max_terms = rollout.started_rollouts or rollout.group_size, rollout.sampling.max_terms
    model_config = read_json_object(model_directory(model) / "config.json", hint="see model.path")
    config = model_config.get("text_config", model_config)
    if not all(isinstance(config.get(key), int) for key in SIZES):
        return (MemoryPart(name="the engine's caches and activations", bytes=None),)
    layers, hidden, heads, vocabulary = (config[key] for key in SIZES)
    size, head_dim = BYTES[model.dtype], config.get("head_dim") or hidden // heads
    values = 2 * (config.get("num_key_value_heads") or heads) * head_dim
    row = config["kv_lora_rank"] + config["qk_rope_head_dim"] if "kv_lora_rank" in config else values
    longest = model.max_length or config.get("max_position_embeddings")
    cached = options.cache_bytes // (layers * row * size)
    prompt_tokens = cached // group_size  # each prompt is read once and cached for all of its rollouts
    if longest is not None:  # slots and their length are powers of two where that fits
        cached = min(cached, _power_of_two(options.max_sequences) * _power_of_two(longest))
        prompts = -(-options.max_sequences // group_size)
        prompt_tokens = min(prompt_tokens, prompts * max(longest - max_terms, 1))
    inner = max(config.get("intermediate_size") or 0, config.get("num_experts_per_tok", 0) * expert_width(config))
    widest = max(3 * inner, 3 * heads * head_dim + values)
    return (
        MemoryPart(name="keys and values", bytes=cached * layers * row * size),
        MemoryPart(name="activations", bytes=size * prompt_tokens * (3 * hidden + widest), at=(PROMPTS,)),
        MemoryPart(
            name="logits and probabilities",
            bytes=2 * BYTES["float32"] * options.max_sequences * vocabulary,
            at=(PROMPTS, TERMS),
        ),
        *_of_engine_pictures(model_config, model, prompt_tokens=prompt_tokens),
    )


def _of_engine_pictures(
    model_config: Mapping[str, Any], model: LLMModelConfig, *, prompt_tokens: int
) -> tuple[MemoryPart, ...]:
    """Return the memory of pictures in the torch engine while prompts of so many tokens are read."""
    if "vision_config" not in model_config:
        return ()
    sizes = TowerSizes.of(model_config)
    if sizes is None:
        return (MemoryPart(name=ACTIVATIONS, bytes=None),)
    patches = round(prompt_tokens * sizes.patches_per_token)
    passing = round(patches * sizes.passing(dtype=model.dtype))
    return (
        MemoryPart(name=ACTIVATIONS, bytes=passing, at=(PROMPTS,)),
        MemoryPart(name=PIXELS, bytes=patches * sizes.pixels),
    )


def _power_of_two(number: int) -> int:
    """The smallest that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _patches_per_token(config: Mapping[str, Any], tower: Mapping[str, Any]) -> float | None:
    """Patches that become one token of the decoder."""
    if merge := tower.get("spatial_merge_size"):
        return merge**2
    if scale := config.get("scale_factor"):  # Idefics3, SmolVLM
        return scale**2
    if ratio := config.get("downsample_ratio"):  # InternVL
        return 1 / ratio**2
    if tokens := config.get("mm_tokens_per_image"):  # Gemma 3
        return (tower["image_size"] // tower["patch_size"]) ** 2 / tokens
    return 1 if config.get("model_type") == "llava" else None
