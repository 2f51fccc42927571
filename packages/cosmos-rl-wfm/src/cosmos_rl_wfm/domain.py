"""The domain of world foundation models: captions in, images and videos out. Imports torch and diffusers lazily."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.settings.problems import engine_options
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.models.config import WFMModelConfig
from cosmos_rl_wfm.sampling import FlowSampling, WFMTorchOptions

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import Tensor

    from cosmos_rl_core.interfaces import Policy, RewardFn, RolloutEngine
    from cosmos_rl_core.parallel.setup import ModelSetup
    from cosmos_rl_core.plan.estimate import MemoryEstimate
    from cosmos_rl_core.plan.needs import MemoryPart
    from cosmos_rl_core.plan.shape import ModelShape
    from cosmos_rl_core.recipe.run import RunConfig
    from cosmos_rl_core.settings.base import Problem
    from cosmos_rl_core.types import Prompt, RolloutGroup, Share, TrainBatch
    from cosmos_rl_wfm.models.config import WFMModelConfig
    from cosmos_rl_wfm.policy import FlowPolicy


class WFMDomain(DomainBase):
    """A term is a denoising step."""

    name = "wfm"
    Model = WFMModelConfig
    Data = WFMDataConfig
    Sampling = FlowSampling
    row_keys = ("path", "rows", "kind")
    has_media = True

    def reward_table(self) -> Mapping[str, Callable[..., RewardFn]]:
        from cosmos_rl_wfm.rewards import REWARDS

        return REWARDS

    def warnings(self, config: RunConfig) -> Sequence[str]:
        """Warn of inexact ratios."""
        return recipe_warnings(config)

    def check_model(self, model: WFMModelConfig) -> None:
        """Call a network of an unlisted class once on the meta device."""
        from cosmos_rl_wfm.models.classes import network_class
        from cosmos_rl_wfm.models.folder import is_here, network_of, open_source

        if not is_here(model):
            return
        class_name, config = network_of(model, open_source(model))
        if network_class(class_name) is None:  # torch and diffusers take seconds to load, needed in this case only
            from cosmos_rl_wfm.models.dry_run import try_forward

            try_forward(class_name, config)

    def problems(
        self, config: RunConfig, rows: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]]
    ) -> Iterable[Problem]:
        """Parts of the model, sizes, engine options."""
        from cosmos_rl_wfm.preflight import find_problems

        return find_problems(config)

    def specimen(self, config: RunConfig, row: Mapping[str, Any], *, origin: str) -> RolloutGroup:
        """A group of made-up clips."""
        from cosmos_rl_wfm.preflight import specimen

        return specimen(config, row, origin=origin)

    def load_rows(self, data: WFMDataConfig) -> tuple[Sequence[Mapping[str, Any]], str]:
        """Find captions and clips; nothing is decoded."""
        from cosmos_rl_wfm.data.rows import load_rows

        return load_rows(data)

    def prompt_row(
        self, data: WFMDataConfig, given: str | Mapping[str, Any], *, where: str, folder: Path
    ) -> Mapping[str, Any]:
        """A caption alone, or with other columns."""
        from cosmos_rl_wfm.data.rows import prompt_row

        columns = {data.caption_column: given} if isinstance(given, str) else given
        return prompt_row(data, columns, where=where, folder=str(folder))

    def row_media(self, data: WFMDataConfig, row: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        """A row's clip, cut as for training."""
        import numpy as np

        from cosmos_rl_wfm.data.clips import ClipReader

        return {"video": ClipReader(data).clip(row, np.random.default_rng(0)).video}

    def build_policy(
        self, model: WFMModelConfig, *, data: WFMDataConfig, sampling: Any, seed: int, setup: ModelSetup
    ) -> Policy:
        """The network to train, sharded over its ranks."""
        from cosmos_rl_wfm.build import build_policy

        return build_policy(model, data=data, sampling=sampling, seed=seed, setup=setup)

    def build_engine(
        self, model: WFMModelConfig, *, data: WFMDataConfig, name: str, options: Mapping[str, Any]
    ) -> RolloutEngine:
        """An engine with network, codec and text encoder."""
        from cosmos_rl_wfm.build import build_engine

        return build_engine(model, data=data, options=engine_options(WFMTorchOptions, options))

    def sleeping_engine(self, name: str, options: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The engine sleeps."""
        return options

    def model_shape(self, model: WFMModelConfig, *, data: WFMDataConfig, sampling: Any) -> ModelShape | None:
        """The sizes of a local network or one from scratch; None for one on a hub."""
        from cosmos_rl_wfm.parallel.shape import read_shape

        return read_shape(model, data)

    def is_own_reference(self, config: RunConfig) -> bool:
        """Whether the average of the weights is the reference."""
        return config.model.pulls_to_average

    def held_by_policy(self, config: RunConfig, rank: MemoryEstimate) -> Sequence[MemoryPart]:
        """Averages, old weights, and memory for real clips."""
        from cosmos_rl_wfm.memory import held_by_policy

        return held_by_policy(config, rank)

    def held_by_rollout(self, config: RunConfig) -> Sequence[MemoryPart]:
        """Encoders, autoencoder and their activations."""
        from cosmos_rl_wfm.memory import held_by_rollout

        return held_by_rollout(config)

    def collate(self, groups: Sequence[RolloutGroup], *, microbatch_terms: int, share: Share) -> TrainBatch:
        """Split rollouts into denoising steps, `microbatch_terms` per forward pass."""
        from cosmos_rl_wfm.collate import collate

        return collate(groups, microbatch_terms=microbatch_terms, share=share)

    def collate_sft(
        self,
        prompts: Sequence[Prompt],
        *,
        data: WFMDataConfig,
        policy: FlowPolicy,
        microbatch_terms: int,
        share: Share,
    ) -> TrainBatch:
        """Real clips, cut as configured in `data`, each noised at one time."""
        from cosmos_rl_wfm.supervised import collate_sft

        assert policy.clips is not None, "a policy of real data has clips"
        return collate_sft(prompts, clips=policy.clips.of(data), microbatch_terms=microbatch_terms, share=share)

    def export_weights(
        self, model: WFMModelConfig, tensors: Iterable[tuple[str, Tensor]], *, merge_adapters: bool
    ) -> Iterable[tuple[str, Tensor]]:
        """The trained weights; with `merge_adapters` those of the base network plus the adapters' updates."""
        from cosmos_rl_wfm.build import export_weights

        return export_weights(model, tensors, merge_adapters=merge_adapters)

    def complete_export(self, model: WFMModelConfig, directory: Path, *, merged: bool) -> None:
        """The other parts of a pipeline, or adapters for diffusers."""
        from cosmos_rl_wfm.models.folder import open_folder
        from cosmos_rl_wfm.models.weights import write_diffusers_adapters

        if not merged:
            if model.lora is not None:
                write_diffusers_adapters(directory)
        elif model.path and (source := open_folder(model.path, revision=model.revision)).is_pipeline:
            source.copy_others(directory, weights=True)


WFM = WFMDomain()


def recipe_warnings(config: RunConfig) -> Sequence[str]:
    """Return a warning for each unexpected effect of a valid recipe."""
    if config.is_sft:
        return ()
    return [text for text in (_of_ratios(config), _of_the_average(config)) if text]


def _of_ratios(config: RunConfig) -> str:
    """Warn if policy and engine round differently: ratios of denoising steps are clipped at 1e-4 from 1."""
    model: WFMModelConfig = config.model
    trained, sampled = config.policy.precision.parameters, model.dtype
    sent = config.sync.dtype or trained
    if not config.rollout.sampling.trains_steps or trained == sampled == sent:
        return ""
    other = [] if config.sync.dtype in (None, sampled) else [f'[sync] dtype = "{sent}"']
    keys = [f'[policy.precision] parameters = "{trained}"', f'[model] dtype = "{sampled}"', *other]
    also = " and no [sync] dtype" if other else ""
    return (
        f"ratios are not exactly 1 before the first update: {', '.join(keys)} make policy and engine round "
        f"differently, which moved single ratios by 6e-4 where clip_high is {config.algorithm.clip_high:g}; "
        f'policy.precision.parameters = "{sampled}"{also} makes them 1'
    )


def _of_the_average(config: RunConfig) -> str:
    """Warn of a reference without a KL term."""
    model: WFMModelConfig = config.model
    if model.ema is None or not model.ema.reference or config.algorithm.kl_coef:
        return ""
    return "[model.ema] reference = true has no effect without a KL term: set algorithm.kl_coef above 0, or remove it"
