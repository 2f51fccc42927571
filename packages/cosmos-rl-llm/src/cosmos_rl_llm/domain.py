"""The language-model domain: `cosmos_rl_core` loads it by the name "llm".

Importing this module loads configs and data only; torch and transformers come with the first policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install, quiet_torchao
from cosmos_rl_core.interfaces import RewardFn, RolloutEngine
from cosmos_rl_core.observe.startup import READING, phase
from cosmos_rl_core.plan.needs import MemoryPart
from cosmos_rl_core.recipe.sections import SamplingSection
from cosmos_rl_core.settings.problems import engine_options
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup, Sampling, Share, TrainBatch, WeightSpec
from cosmos_rl_llm.config import LLMDataConfig, LLMModelConfig, LLMTorchOptions
from cosmos_rl_llm.data.message_parts import attach_files
from cosmos_rl_llm.data.rows import load_rows, prompt_row
from cosmos_rl_llm.engines.long_prompt import engine_tolerance, prompt_beyond_window
from cosmos_rl_llm.engines.vllm.options import VllmEngineOptions, no_pictures, shared, spread
from cosmos_rl_llm.media.source import shows_media
from cosmos_rl_llm.model.checkpoint import (
    checkpoint_of,
    fetch,
    legacy_template,
    read_shape,
    read_specs,
    resolve,
    torch_engine_parts,
    while_loading,
)
from cosmos_rl_llm.model.tower_memory import policy_parts
from cosmos_rl_llm.rewards import REWARDS
from cosmos_rl_llm.teacher.check import check_teacher, held_by_teacher

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

    from cosmos_rl_core.algorithms.config import TeacherSection
    from cosmos_rl_core.parallel.setup import ModelSetup
    from cosmos_rl_core.plan.estimate import MemoryEstimate
    from cosmos_rl_core.plan.shape import ModelShape
    from cosmos_rl_core.recipe.run import RunConfig
    from cosmos_rl_core.settings.base import Problem
    from cosmos_rl_llm.data.chat import Chat, Encoded
    from cosmos_rl_llm.media.source import PromptRecorder
    from cosmos_rl_llm.media.vision import Vision
    from cosmos_rl_llm.policy.pipelined import PipelinedPolicy
    from cosmos_rl_llm.policy.policy import TextPolicy
    from cosmos_rl_llm.teacher.teacher import LLMTeacher


class LLMDomain(DomainBase):
    """Text in, text out: a term is a token."""

    name = "llm"
    Model = LLMModelConfig
    Data = LLMDataConfig
    Sampling = SamplingSection
    engines = ("torch", "vllm")
    row_keys = ("path", "rows", "split", "subset")
    has_tokens = True

    def load_rows(self, data: LLMDataConfig) -> tuple[Sequence[Mapping[str, Any]], str]:
        """Read rows with `prompt`, `answer` and `response` in addition to their own columns, and their origin."""
        return load_rows(data)

    def prompt_row(
        self, data: LLMDataConfig, given: str | Mapping[str, Any], *, where: str, folder: Path
    ) -> Mapping[str, Any]:
        """A prompt with the system prompt of [data]."""
        return prompt_row(given, where=where, config=data)

    def attach_files(
        self, data: LLMDataConfig, row: Mapping[str, Any], *, images: Sequence[Path], videos: Sequence[Path]
    ) -> Mapping[str, Any]:
        """Pictures and videos before the text."""
        return attach_files(row, images=images, videos=videos, config=data)

    def problems(
        self, config: RunConfig, rows: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]]
    ) -> Iterable[Problem]:
        """Tokenizer, chat template, lengths of rows, engine."""
        from cosmos_rl_llm.preflight import find_problems

        return find_problems(config, rows, held_out)

    def specimen(self, config: RunConfig, row: Mapping[str, Any], *, origin: str) -> RolloutGroup:
        """Responses equal to the row's answer."""
        from cosmos_rl_llm.preflight import specimen

        return specimen(config, row, origin=origin)

    def prompt_media(
        self, data: LLMDataConfig, row: Mapping[str, Any]
    ) -> tuple[Mapping[str, str], Mapping[str, np.ndarray]]:
        """Pictures and videos of a row's prompt."""
        from cosmos_rl_llm.media.source import PromptMedia

        media = PromptMedia(row, data.media)
        return media.locations, media

    def recorder(self, directory: Path, *, name: str, groups: int, every: int) -> PromptRecorder:
        """A gallery of prompts with pictures and videos beside the answers."""
        from cosmos_rl_llm.media.source import PromptRecorder

        return PromptRecorder(directory, name=name, groups=groups, every=every)

    def build_policy(
        self, model: LLMModelConfig, *, data: LLMDataConfig, sampling: Sampling | None, seed: int, setup: ModelSetup
    ) -> TextPolicy | PipelinedPolicy:
        """Load the model to train, with log-probabilities of the distribution that engines sample from.

        `model.dtype` is the compute dtype, [policy.precision] sets that of the weights. They come from a checkpoint, so
        `seed` determines only the initial values of adapters.
        """
        quiet_torchao()
        from cosmos_rl_llm.build import build_policy
        from cosmos_rl_llm.policy.truncation import Truncation

        phase(READING)
        source = checkpoint_of(model)
        return build_policy(
            model,
            source=source,
            chat=lambda module: _module_chat(source, module, data, max_length=model.max_length),
            temperature=1.0 if sampling is None else sampling.temperature,
            truncation=Truncation.of(sampling),
            seed=seed,
            setup=setup,
        )

    def check_teacher(self, config: RunConfig) -> None:
        """Compare tokenizers of local directories."""
        check_teacher(config)

    def build_teacher(
        self, teacher: TeacherSection, *, config: RunConfig, policy: TextPolicy | PipelinedPolicy, setup: ModelSetup
    ) -> LLMTeacher:
        """Load the teacher like the model."""
        from cosmos_rl_llm.teacher.teacher import build_teacher

        sampling, seed = config.policy_sampling, config.run.seed
        build = partial(self.build_policy, data=config.data, sampling=sampling, seed=seed, setup=setup)
        return build_teacher(teacher, model=config.model, build=build, policy=policy)

    def build_engine(
        self, model: LLMModelConfig, *, data: LLMDataConfig, name: str, options: Mapping[str, Any]
    ) -> RolloutEngine:
        """Load the engine `name` with its own copy of the model.

        Raises:
            UserError: no engine of that name, or an option it does not have.
        """
        if name == "torch":
            return _torch_engine(model, data, engine_options(LLMTorchOptions, options))
        if name == "vllm":
            return _vllm_engine(model, data, engine_options(VllmEngineOptions, options))
        known = ", ".join(self.engines)
        raise UserError(f"[rollout] engine = {name!r}: the llm domain has no such engine; known: {known}")

    def spread_engine(
        self, name: str, options: Mapping[str, Any], *, tp: int | None, pp: int | None
    ) -> Mapping[str, Any]:
        """vLLM shards matrices and layers over GPUs."""
        return spread(name, options, tp=tp, pp=pp)

    def gpus_per_engine(self, name: str, options: Mapping[str, Any]) -> int:
        """vLLM has one worker process per GPU."""
        return engine_options(VllmEngineOptions, options).num_gpus if name == "vllm" else 1

    def share_gpu(self, name: str, options: Mapping[str, Any], *, processes: int) -> Mapping[str, Any]:
        """vLLM reserves a part of the GPU's memory."""
        return shared(options, processes=processes) if name == "vllm" else options

    def sleeping_engine(self, name: str, options: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Both engines sleep."""
        return {**options, "sleep_mode": True} if name == "vllm" else options

    def long_prompt(self, config: RunConfig) -> tuple[Prompt, Sampling]:
        """Random tokens, more of them than the model's attention window has."""
        return prompt_beyond_window(config)

    def engine_tolerance(self, config: RunConfig) -> float:
        """Less where both sides compute in float32."""
        return engine_tolerance(config)

    def term_texts(self, model: LLMModelConfig, rollout: Rollout) -> Sequence[str]:
        """The text of each token."""
        tokens = rollout.arrays.get("tokens")
        if tokens is None:  # an outline
            return ()
        text = _text_of(checkpoint_of(model))
        return [text(token) for token in tokens.tolist()]

    def term_tokens(self, rollout: Rollout) -> np.ndarray:
        """The sampled tokens."""
        return rollout.arrays["tokens"]

    def weight_specs(self, model: LLMModelConfig) -> Sequence[WeightSpec] | None:
        """Names, shapes and dtypes from the headers of a local directory's safetensors, or else its config.json.

        None for a hub id. Raises UserError for a directory that does not exist or has no model.
        """
        directory = Path(resolve(model.path))
        if not directory.is_dir() or model.lora is not None:  # adapters are created with the model
            return None
        return _specs(directory)

    def model_shape(self, model: LLMModelConfig, *, data: LLMDataConfig, sampling: Any) -> ModelShape | None:
        """The shape from config.json and, if they are there, the headers of safetensors; None for a hub id.

        Raises:
            UserError: as `weight_specs`.
        """
        directory = Path(resolve(model.path))
        return read_shape(directory, model, _specs(directory)) if directory.is_dir() else None

    def held_by_policy(self, config: RunConfig, rank: MemoryEstimate) -> Sequence[MemoryPart]:
        """The start of a rank of several, a teacher, pictures."""
        directory = Path(resolve(config.model.path))
        pictures = policy_parts(directory, config) if directory.is_dir() else ()
        return (*while_loading(config, rank), *held_by_teacher(config, rank), *pictures)

    def held_by_rollout(self, config: RunConfig) -> Sequence[MemoryPart]:
        """Keys and values, activations, and logits."""
        options = config.rollout.options
        if config.rollout.engine == "vllm":
            chosen = engine_options(VllmEngineOptions, options)
            name = "vLLM's keys, values and activations, within its gpu_memory_utilization"
            share = None if chosen.cache_bytes else chosen.gpu_memory_utilization
            return (MemoryPart(name=name, bytes=chosen.cache_bytes, share=share),)
        if config.rollout.engine != "torch":
            return super().held_by_rollout(config)
        chosen = engine_options(LLMTorchOptions, options)
        return torch_engine_parts(
            _directory(config.model),
            config.model,
            chosen,
            group_size=config.rollout.group_size,
            max_terms=config.rollout.sampling.max_terms,
        )

    def engine_dtype(self, config: RunConfig, *, computed: str) -> str:
        """vLLM has a dtype of its own."""
        if config.rollout.engine != "vllm":
            return computed
        return engine_options(VllmEngineOptions, config.rollout.options).dtype or computed

    def reward_table(self) -> Mapping[str, Callable[..., RewardFn]]:
        return REWARDS

    def collate(self, groups: Sequence[RolloutGroup], *, microbatch_terms: int, share: Share) -> TrainBatch:
        """Pack rollouts end to end, at most `microbatch_terms` tokens per microbatch, prompts included."""
        from cosmos_rl_llm.data.collate import collate

        return collate(groups, microbatch_terms=microbatch_terms, share=share)

    def collate_sft(
        self, prompts: Sequence[Prompt], *, data: LLMDataConfig, policy: TextPolicy, microbatch_terms: int, share: Share
    ) -> TrainBatch:
        """Pack rows with their wanted responses; the loss covers the assistant's turns and the end of each."""
        from cosmos_rl_llm.data.collate import collate_sft

        return collate_sft(prompts, chat=policy.chat, microbatch_terms=microbatch_terms, share=share)

    def reads_slowly(self, row: Mapping[str, Any]) -> bool:
        """Whether it shows pictures or videos."""
        return shows_media(row["prompt"] if "prompt" in row else row.get("messages"))

    def read_ahead(self, prompts: Sequence[Prompt], *, policy: TextPolicy) -> None:
        """Decode pictures and videos beside the step."""
        from cosmos_rl_llm.data.items import begin_reading

        begin_reading(prompts, policy.chat)

    def export_weights(
        self, model: LLMModelConfig, tensors: Iterable[tuple[str, Tensor]], *, merge_adapters: bool
    ) -> Iterable[tuple[str, Tensor]]:
        """The weights unchanged; with `merge_adapters` those of the base model plus the adapters' updates."""
        if model.lora is None or not merge_adapters:
            return tensors
        from cosmos_rl_llm.policy.lora import merge_adapters as merged

        return merged(_directory(model), tensors, scaling=model.lora.scaling)


def _specs(directory: Path) -> Sequence[WeightSpec]:
    """The weights of a directory; of one with config.json alone by a model on meta, which loads transformers."""
    if specs := read_specs(directory):
        return specs
    from cosmos_rl_llm.model.weights import specs_of_config

    return specs_of_config(directory)


def _torch_engine(model: LLMModelConfig, data: LLMDataConfig, options: LLMTorchOptions) -> RolloutEngine:
    quiet_torchao()
    import torch

    from cosmos_rl_core.parallel.device import own_device
    from cosmos_rl_llm.engines.torch.engine import TorchEngine
    from cosmos_rl_llm.model.causal_lm import load_model
    from cosmos_rl_llm.model.vision_parts import freeze
    from cosmos_rl_llm.policy.kernels import log_kernels
    from cosmos_rl_llm.policy.lora import add_adapters

    phase(READING)
    source, device = checkpoint_of(model), own_device()
    _recommend_vllm(device.type, installed=find_spec("vllm") is not None)
    module = load_model(source, dtype=torch.bfloat16 if model.dtype == "bfloat16" else torch.float32)
    module.to(device)  # pyright: ignore[reportArgumentType] transformers wraps it without `self`
    log_kernels(module, device=device, dtype=module.dtype)
    freeze(module, model.freeze)
    if model.lora is not None:
        add_adapters(module, model.lora, base=model.path, without=model.freeze)
    chat = _module_chat(source, module, data, max_length=model.max_length)

    def encode(prompt: Prompt) -> Encoded:
        return chat.encode_prompt(prompt.row, where=prompt.origin)

    return TorchEngine(
        module,
        encode=encode,
        decode=chat.decode,
        decode_prompt=chat.decode_prompt,
        stop_ids=chat.end_ids,
        max_sequences=options.max_sequences,
        max_length=chat.max_length,
        cache_bytes=options.cache_bytes,
        record_routes=options.record_routes,
        batch_invariant=options.batch_invariant,
        vision=None if chat.vision is None else chat.vision.family,
        version=-1,  # nothing is served before the policy's weights have arrived
    )


def _recommend_vllm(device: str, *, installed: bool) -> None:
    """Log once that "torch" is the slow engine of a GPU."""
    from cosmos_rl_core.hardware_log import log_choice

    if device == "cuda":
        how = "which is installed here" if installed else pip_install("cosmos-rl-llm[vllm]")
        log_choice(f'engine: torch, several times slower than vLLM, {how}: rollout.engine = "vllm"')


def _vllm_engine(model: LLMModelConfig, data: LLMDataConfig, options: VllmEngineOptions) -> RolloutEngine:
    if model.lora is not None:
        raise UserError('rollout.engine = "vllm" takes whole weights; set it to "torch", or remove [model.lora]')
    quiet_torchao()
    from cosmos_rl_llm.engines.vllm.engine import VllmEngine
    from cosmos_rl_llm.engines.vllm.start import check_rope, read_config, start
    from cosmos_rl_llm.model.causal_lm import sees

    source = resolve(checkpoint_of(model))
    config, generation = read_config(source)
    pictures = sees(config)
    if pictures and (why := no_pictures(config.model_type)):
        raise UserError(f'rollout.engine = "vllm" {why}; set it to "torch"')
    chat = _chat(
        source,
        data,
        generation=generation,
        limit=getattr(config.get_text_config(), "max_position_embeddings", None),
        max_length=options.max_model_len or model.max_length,
        seeing=config if pictures else None,
    )
    check_rope(config, chat.max_length)

    def encode(prompt: Prompt) -> Encoded:
        return chat.encode_prompt(prompt.row, where=prompt.origin)

    phase("starting vLLM")
    return VllmEngine(
        start(source, options=options, dtype=model.dtype, max_length=chat.max_length, pictures=pictures),
        encode=encode,
        decode=chat.decode,
        decode_prompt=chat.decode_prompt,
        stop_ids=chat.end_ids,
        vision=None if chat.vision is None else chat.vision.family,
        recompute_kv=options.recompute_kv,
        version=-1,  # nothing is served before the policy's weights have arrived
    )


@cache
def _text_of(path_or_id: str) -> Callable[[int], str]:
    """Return a function from a token to its text, which keeps the texts, since tokens recur."""
    from cosmos_rl_llm.model.causal_lm import load_tokenizer

    tokenizer = load_tokenizer(resolve(path_or_id))
    return cache(lambda token: str(tokenizer.decode([token])))


def _module_chat(source: str, module: PreTrainedModel, data: LLMDataConfig, *, max_length: int | None) -> Chat:
    from cosmos_rl_llm.model.causal_lm import context_length, sees

    return _chat(
        source,
        data,
        generation=module.generation_config,
        limit=context_length(module),
        max_length=max_length,
        seeing=module.config if sees(module.config) else None,
    )


def _chat(
    source: str,
    data: LLMDataConfig,
    *,
    generation: GenerationConfig | None,
    limit: int | None,
    max_length: int | None,
    seeing: PreTrainedConfig | None = None,
) -> Chat:
    """The tokenizer beside the model, with the template of [data] and the context limit: at most the model's own."""
    from cosmos_rl_llm.data.chat import Chat, find_end_ids, set_chat_template
    from cosmos_rl_llm.model.causal_lm import load_tokenizer

    tokenizer = load_tokenizer(source)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = legacy_template(Path(resolve(source)))
    set_chat_template(tokenizer, data.chat_template)
    if max_length is not None and limit is not None and max_length > limit:
        raise UserError(f"model.max_length = {max_length} is above the model's own limit of {limit} tokens")
    return Chat(
        tokenizer=tokenizer,
        end_ids=find_end_ids(tokenizer, None if generation is None else generation.eos_token_id),
        max_length=max_length or limit,
        overlong=data.overlong,
        vision=_vision(source, seeing, data),
    )


def _vision(source: str, config: PreTrainedConfig | None, data: LLMDataConfig) -> Vision | None:
    """Read the processing of a vision-language model. Raises UserError for columns that the model cannot take."""
    from cosmos_rl_llm.media.vision import Vision, find_family

    family = None if config is None else find_family(resolve(source), config)
    for kind, column in (("image", data.image_column), ("video", data.video_column)):
        if column is not None and (family is None or kind not in family.token_ids):
            raise UserError(
                f"data.{kind}_column = {column!r}: the model of model.path = {source!r} takes no {kind}s; choose "
                "another model (docs/vision.md), or remove the column"
            )
    return None if family is None else Vision(family=family, limits=data.media)


def _directory(model: LLMModelConfig) -> Path:
    """The directory of the model's files, fetched from the hub if necessary."""
    source = Path(resolve(checkpoint_of(model)))
    return source if source.is_dir() else Path(fetch(model))


LLM = LLMDomain()
