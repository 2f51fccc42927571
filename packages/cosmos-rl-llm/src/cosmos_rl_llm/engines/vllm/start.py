"""Starts vLLM: its engine core and workers are separate processes, spawned and connected through sockets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.gpus import machine_gpus
from cosmos_rl_core.storage.json_files import read_json_object
from cosmos_rl_llm.config import ROUTES
from cosmos_rl_llm.engines.vllm import towers
from cosmos_rl_llm.engines.vllm.installed import vllm_platform, why_unfit
from cosmos_rl_llm.engines.vllm.options import PLAIN_WEIGHTS, SLOT_RANKS, VllmEngineOptions, install_vllm, no_longrope
from cosmos_rl_llm.engines.vllm.plugin import OWNER, WEIGHT_BACKEND
from cosmos_rl_llm.model.rope import original_length

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

CPU_CACHE_BYTES = 1 << 30
LOGGING_LEVEL = "WARNING"
_NO_ROUTES = ("AuxOutput Connector", "return-routed-experts")
"""Names of the recording of experts in vLLM's errors."""
QUANTISED = ("quantization_config", "compression_config")
"""Keys of config.json by which vLLM knows a quantised checkpoint."""


def start(
    source: str,
    *,
    options: VllmEngineOptions,
    dtype: str,
    max_length: int | None,
    pictures: bool = False,
    adapters: Mapping[str, int] | None = None,
) -> AsyncLLM:
    """Start vLLM with the model of `source`; takes from seconds to minutes.

    dtype, max_length: those of [model], defaults of the options. pictures: whether prompts may have some.
    adapters: ranks by the names of the layers whose adapters are served.

    Raises UserError without vLLM, for a build that does not fit this process's GPUs, for arguments that it rejects, and
    for stages of layers without a GPU, and where vLLM records no experts.
    """
    if find_spec("vllm") is None:
        raise UserError(f'rollout.engine = "vllm" needs vLLM: {install_vllm()}')
    gpus = machine_gpus(os.environ)
    on_gpu = computes_on_gpu(gpus)
    if on_gpu and torch.cuda.device_count() < options.num_gpus:
        raise UserError(
            f"a replica of this size (tp x pp of [rollout.parallel], or the options of vLLM) needs {options.num_gpus} "
            f"GPUs, and this one has only {torch.cuda.device_count()}"
        )
    arguments = engine_arguments(
        source, options=options, dtype=dtype, max_length=max_length, pictures=pictures, on_gpu=on_gpu
    ) | slot_arguments(adapters or {})
    if arguments.get("pipeline_parallel_size", 1) > 1 and arguments["enforce_eager"] and not on_gpu:
        raise UserError(  # only its warm-up allocates what a stage receives, and here it makes none
            "vLLM without a GPU runs no stages of layers: set [rollout.parallel] tp instead of pp, which works"
        )
    with environment(_defaults(on_gpu=on_gpu)):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            parsed = AsyncEngineArgs(**arguments)
        except TypeError as error:
            raise UserError(f"rollout.options.extra: vLLM rejects it: {error}") from error
        if adapters:
            _check_slots(parsed, on_gpu=on_gpu)
        try:
            return AsyncLLM.from_engine_args(parsed)
        except ValueError as error:
            why = next((line for line in str(error).splitlines() if any(name in line for name in _NO_ROUTES)), None)
            if why is None:
                raise
            why = why.strip().removeprefix("Value error, ").partition(" [type=")[0]
            raise UserError(f'{ROUTES}: vLLM records no experts here ({why}); set rollout.engine = "torch"') from error


def computes_on_gpu(gpus: Sequence[str]) -> bool:
    """Return whether vLLM computes on GPUs in this process, by its own choice of a platform.

    gpus: those of this process. Raises UserError if vLLM's build does not fit them, or two builds are mixed.
    """
    vllm_platform()
    with environment({"VLLM_LOGGING_LEVEL": LOGGING_LEVEL}):  # which vLLM reads when it is imported
        from vllm.platforms import current_platform
    if wrong := why_unfit(current_platform.device_type, gpus):
        raise UserError(f'rollout.engine = "vllm": {wrong}')
    return current_platform.device_type == "cuda"


def check_rope(config: PreTrainedConfig, max_length: int | None) -> None:
    """Raise UserError where vLLM rotates short sequences in another way than the policy: longrope above its length."""
    text = config.get_text_config()
    kinds = str(getattr(text, "rope_parameters", None))
    if why := no_longrope(kinds, original=original_length(text), max_length=max_length):
        raise UserError(f'rollout.engine = "vllm" {why}, or rollout.engine = "torch"')


def engine_arguments(
    source: str,
    *,
    options: VllmEngineOptions,
    dtype: str,
    max_length: int | None,
    pictures: bool = False,
    on_gpu: bool,
) -> dict[str, Any]:
    """Return the arguments of vLLM's AsyncEngineArgs. on_gpu: see `computes_on_gpu`."""
    arguments: dict[str, Any] = {
        "model": source,
        "skip_tokenizer_init": not pictures,  # tokens in, tokens out; vLLM sizes its memory with a picture's text
        "mm_processor_cache_gb": 0 if pictures else None,  # pictures arrive processed
        "skip_mm_profiling": True if pictures and towers.needed() else None,  # it would process a picture
        "generation_config": "vllm",  # only the recipe's sampling parameters
        "trust_remote_code": False,
        "dtype": options.dtype or dtype,
        "max_model_len": options.max_model_len or max_length,
        "max_num_seqs": options.max_sequences,
        "tensor_parallel_size": options.tensor_parallel_size,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "kv_cache_memory_bytes": options.cache_bytes or (None if on_gpu else CPU_CACHE_BYTES),
        "enable_prefix_caching": options.prefix_caching,
        "enable_return_routed_experts": options.record_routes or None,
        "enforce_eager": not on_gpu if options.enforce_eager is None else options.enforce_eager,
        "enable_sleep_mode": True if options.sleep_mode and on_gpu else None,
        "moe_backend": _experts_in_place(source, options) if on_gpu else None,
        "quantization": options.quantization or (None if on_gpu else PLAIN_WEIGHTS),
        "logprobs_mode": "processed_logprobs",  # of the sampling distribution
        "weight_transfer_config": {"backend": WEIGHT_BACKEND},
        "disable_log_stats": True,
        "enable_log_requests": False,
        **options.extra,
    }
    return {name: value for name, value in arguments.items() if value is not None}


def _check_slots(arguments: Any, *, on_gpu: bool) -> None:
    """Raise UserError for a family without adapter slots, and for experts without a GPU."""
    from vllm.model_executor.model_loader.utils import get_model_cls
    from vllm.model_executor.models import supports_lora

    config = arguments.create_model_config()
    family = get_model_cls(config)
    if config.is_moe and not on_gpu:  # its kernel for experts with adapters is written in Triton
        raise UserError(
            '[model.lora] serve = "adapter": vLLM without a GPU has no adapter slots for a mixture of experts; set it '
            'to "merged"'
        )
    if not supports_lora(family):
        raise UserError(
            f'[model.lora] serve = "adapter": vLLM has no adapter slots for {family.__name__}; set it to "merged"'
        )


def slot_arguments(adapters: Mapping[str, int]) -> dict[str, Any]:
    """Return the arguments of one adapter slot. adapters: as `start`; empty: none."""
    if not adapters:
        return {}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in SLOT_RANKS if rank >= max(adapters.values())),
        "lora_target_modules": sorted({layer.rpartition(".")[2] for layer in adapters}),
    }


def _experts_in_place(source: str, options: VllmEngineOptions) -> str | None:
    """Return vLLM's kernel for experts that computes with the weights as loaded; None for quantised ones.

    vLLM's choice for Blackwell rearranges them, so that each new version of every such layer would go through the host.
    Quantised experts are processed again with every kernel.
    """
    file = Path(source) / "config.json"
    config = read_json_object(file, hint="see model.path") if file.is_file() else {}
    parts = (config, config.get("text_config") or {})
    quantised = options.quantization or any(key in part for part in parts for key in QUANTISED)
    return None if quantised else "triton"


def _defaults(*, on_gpu: bool) -> dict[str, str]:
    """Environment variables for vLLM, unless set by the user."""
    defaults = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would lose this process's threads
        "VLLM_LOGGING_LEVEL": LOGGING_LEVEL,
        "VLLM_NO_USAGE_STATS": "1",
        OWNER: str(os.getpid()),
    }
    if not on_gpu:
        # otherwise vLLM binds its threads to all cores, including the trainer's
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return defaults


@contextmanager
def environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set variables that are not set, for processes started within the context."""
    missing = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)
