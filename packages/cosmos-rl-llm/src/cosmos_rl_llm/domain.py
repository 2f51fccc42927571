"""The language-model domain: `cosmos_rl_core` loads it by the name "llm".

Importing this module loads configs and data only; torch and transformers come with the first policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import quiet_torchao
from cosmos_rl_core.interfaces import RewardFn, RolloutEngine
from cosmos_rl_core.plan.needs import MemoryPart
from cosmos_rl_core.recipe.sections import SamplingSection
from cosmos_rl_core.settings.problems import engine_options
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup, Sampling, Share, TrainBatch, WeightSpec
from cosmos_rl_llm.config import LLMDataConfig, LLMModelConfig, LLMTorchOptions
from cosmos_rl_llm.data.message_parts import attach_files
from cosmos_rl_llm.data.rows import load_rows, prompt_row
from cosmos_rl_llm.engines.long_prompt import engine_tolerance, prompt_beyond_window
from cosmos_rl_llm.engines.vllm.options import VllmEngineOptions, shared, spread
from cosmos_rl_llm.media.source import shows_media
from cosmos_rl_llm.memory import held_by_policy, held_by_rollout
from cosmos_rl_llm.model.checkpoint import (
    checkpoint_of,
    model_directory,
    read_shape,
    read_specs,
    resolve,
)
from cosmos_rl_llm.rewards import REWARDS
from cosmos_rl_llm.teacher.check import check_teacher

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from cosmos_rl_core.algorithms.config import TeacherSection
    from cosmos_rl_core.episodes.agents import AgentGenerator
    from cosmos_rl_core.episodes.interfaces import HoldsSessions
    from cosmos_rl_core.parallel.setup import ModelSetup, SentAdapters
    from cosmos_rl_core.plan.estimate import MemoryEstimate
    from cosmos_rl_core.plan.shape import ModelShape
    from cosmos_rl_core.recipe.run import RunConfig
    from cosmos_rl_core.settings.base import Problem
    from cosmos_rl_llm.data.continuation import ChatContinuation
    from cosmos_rl_llm.media.source import PromptRecorder
    from cosmos_rl_llm.policy.pipelined import PipelinedPolicy
    from cosmos_rl_llm.policy.policy import CausalLMPolicy
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
    trains_on = ("responses", "pairs", "labels", "steps")

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
    ) -> CausalLMPolicy | PipelinedPolicy:
        """Load the model to train, with log-probabilities of the distribution that engines sample from.

        `model.dtype` is the compute dtype, [policy.precision] sets that of the weights.
        """
        return _builders().build_policy(model, data=data, sampling=sampling, seed=seed, setup=setup)

    def check_teacher(self, config: RunConfig) -> None:
        """Compare tokenizers of local directories."""
        check_teacher(config)

    def build_teacher(
        self, teacher: TeacherSection, *, config: RunConfig, policy: CausalLMPolicy | PipelinedPolicy, setup: ModelSetup
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
            chosen = engine_options(LLMTorchOptions, options)
            return _builders().build_torch_engine(model, data=data, options=chosen)
        if name == "vllm":
            chosen = engine_options(VllmEngineOptions, options)
            return _builders().build_vllm_engine(model, data=data, options=chosen)
        known = ", ".join(self.engines)
        raise UserError(f"[rollout] engine = {name!r}: the llm domain has no such engine; known: {known}")

    def build_continuation(self, model: LLMModelConfig, *, data: LLMDataConfig) -> ChatContinuation:
        """The model's chat template, or plain text."""
        return _builders().build_continuation(model, data=data)

    def build_endpoint(
        self, model: LLMModelConfig, agents: AgentGenerator, *, token: str, log: Callable[[str], None]
    ) -> Callable[..., Any]:
        """OpenAI's interfaces."""
        from cosmos_rl_llm.endpoint.app import AgentApp

        decode = cast("ChatContinuation", agents.continuation).decode
        return AgentApp(agents, decode=decode, model=Path(model.path).name, token=token, log=log).asgi

    def build_server(self, config: RunConfig, engine: RolloutEngine, *, name: str, token: str) -> Callable[..., Any]:
        """OpenAI's interfaces."""
        from cosmos_rl_llm.endpoint.served import ServedModel

        assert isinstance(config.data, LLMDataConfig) and isinstance(config.model, LLMModelConfig)
        continuation = _builders().build_continuation(config.model, data=config.data, single_turn=True)
        sampling = Sampling(max_terms=config.rollout.sampling.max_tokens)
        return ServedModel(cast("HoldsSessions", engine), continuation, model=name, sampling=sampling, token=token).asgi

    def choose_engine(self, config: RunConfig, *, gpu: bool, packages_known: bool = True) -> tuple[str, str]:
        """vLLM on GPUs, where it is installed for them and takes the recipe."""
        from cosmos_rl_llm.engines.vllm.choice import choose_engine

        return choose_engine(config, gpu=gpu, packages_known=packages_known)

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
        """The sampled tokens; of a rollout with branches those of the first, which has the prompt of its group."""
        lengths = rollout.arrays.get("branch_lengths")
        return rollout.arrays["tokens"][: None if lengths is None else lengths[0, 1]]

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
        return held_by_policy(config, rank)

    def held_by_rollout(self, config: RunConfig) -> Sequence[MemoryPart]:
        """Keys and values, activations, and logits."""
        return held_by_rollout(config) if config.rollout.engine in self.engines else super().held_by_rollout(config)

    def sent_adapters(self, config: RunConfig) -> SentAdapters:
        """Into vLLM's slots, which have no scale of their own, or merged."""
        lora = config.model.lora
        if lora is None or config.rollout.engine != "vllm":
            return "live"
        return "merged" if lora.serve == "merged" else "scaled"

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
        self,
        prompts: Sequence[Prompt],
        *,
        data: LLMDataConfig,
        policy: CausalLMPolicy,
        microbatch_terms: int,
        share: Share,
    ) -> TrainBatch:
        """Pack rows with their wanted responses, pairs or judged responses; the loss covers the assistant's turns and
        the end of each.
        """
        from cosmos_rl_llm.data.collate import collate_sft

        assert policy.chat is not None
        return collate_sft(prompts, chat=policy.chat, microbatch_terms=microbatch_terms, share=share)

    def reads_slowly(self, row: Mapping[str, Any]) -> bool:
        """Whether it shows pictures or videos."""
        return shows_media(row["prompt"] if "prompt" in row else row.get("messages"))

    def read_ahead(self, prompts: Sequence[Prompt], *, policy: CausalLMPolicy) -> None:
        """Decode pictures and videos beside the step."""
        from cosmos_rl_llm.data.items import begin_reading

        assert policy.chat is not None
        begin_reading(prompts, policy.chat)

    def export_weights(
        self, model: LLMModelConfig, tensors: Iterable[tuple[str, Tensor]], *, merge_adapters: bool
    ) -> Iterable[tuple[str, Tensor]]:
        """The weights unchanged; with `merge_adapters` those of the base model plus the adapters' updates."""
        if model.lora is None or not merge_adapters:
            return tensors
        from cosmos_rl_llm.policy.lora import merge_adapters as merged

        return merged(model_directory(model), tensors, section=model.lora)


def _builders() -> ModuleType:
    """The module that builds policies and engines, with torch and transformers."""
    quiet_torchao()
    from cosmos_rl_llm import build

    return build


def _specs(directory: Path) -> Sequence[WeightSpec]:
    """The weights of a directory; of one with config.json alone by a model on meta, which loads transformers."""
    if specs := read_specs(directory):
        return specs
    from cosmos_rl_llm.model.weights import specs_of_config

    return specs_of_config(directory)


@cache
def _text_of(path_or_id: str) -> Callable[[int], str]:
    """Return a function from a token to its text, which keeps the texts, since tokens recur."""
    from cosmos_rl_llm.model.causal_lm import load_tokenizer

    tokenizer = load_tokenizer(resolve(path_or_id))
    return cache(lambda token: str(tokenizer.decode([token])))


LLM = LLMDomain()
