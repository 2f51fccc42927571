"""Robot policies as a domain: tasks in, episodes out. Torch, transformers and simulators are imported when used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.settings.problems import engine_options
from cosmos_rl_vla.config import VLADataConfig, VLAModelConfig, VLASampling, VLATorchOptions

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from cosmos_rl_core.interfaces import Policy, Recorder, RewardFn, RolloutEngine
    from cosmos_rl_core.parallel.setup import ModelSetup
    from cosmos_rl_core.plan.needs import MemoryPart
    from cosmos_rl_core.plan.shape import ModelShape
    from cosmos_rl_core.recipe.run import RunConfig
    from cosmos_rl_core.settings.base import Problem
    from cosmos_rl_core.types import Prompt, RolloutGroup, Share, TrainBatch
    from cosmos_rl_vla.policy.policy import VLAPolicy


class VLADomain(DomainBase):
    """A term is a dimension of an action, an action, or a chunk of them. Implements `interfaces.Domain`."""

    name = "vla"
    Model = VLAModelConfig
    Data = VLADataConfig
    Sampling = VLASampling
    has_media = True

    def reward_table(self) -> Mapping[str, Callable[..., RewardFn]]:
        from cosmos_rl_vla.rewards import REWARDS

        return REWARDS

    def recorder(self, directory: Path, *, name: str, groups: int, every: int) -> Recorder:
        """A gallery of episodes, whose numbers and cameras `write` stores."""
        from cosmos_rl_vla.trajectory import EpisodeGallery

        return EpisodeGallery(directory, groups_per_step=groups, every_steps=every, name=name)

    def load_rows(self, data: VLADataConfig) -> tuple[Sequence[Mapping[str, Any]], str]:
        """Load tasks with initial states, or frames of demonstrations."""
        from cosmos_rl_vla.data.rows import load_rows

        return load_rows(data)

    def problems(
        self, config: RunConfig, rows: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]]
    ) -> Iterable[Problem]:
        """Model's files, engine options, simulator."""
        from cosmos_rl_vla.preflight import find_problems

        return find_problems(config)

    def build_policy(
        self, model: VLAModelConfig, *, data: VLADataConfig, sampling: Any, seed: int, setup: ModelSetup
    ) -> Policy:
        """Build the model to train, sharded over its ranks."""
        from cosmos_rl_vla.build import build_policy

        return build_policy(model, data=data, sampling=sampling, seed=seed, setup=setup)

    def build_engine(
        self, model: VLAModelConfig, *, data: VLADataConfig, name: str, options: Mapping[str, Any]
    ) -> RolloutEngine:
        """Start simulators in processes of their own, and the model that acts in all of them."""
        from cosmos_rl_vla.build import build_engine

        return build_engine(model, data=data, options=engine_options(VLATorchOptions, options))

    def sleeping_engine(self, name: str, options: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The engine sleeps."""
        return options

    def model_shape(
        self, model: VLAModelConfig, *, data: VLADataConfig, sampling: VLASampling | None
    ) -> ModelShape | None:
        """Read the sizes of a model in a directory; None for one from scratch."""
        from cosmos_rl_vla.shape import read_shape

        return read_shape(model, sampling)

    def held_by_rollout(self, config: RunConfig) -> Sequence[MemoryPart]:
        """The activations of a decision; simulators are not known."""
        from cosmos_rl_vla.memory import held_by_rollout

        return held_by_rollout(config)

    def collate(self, groups: Sequence[RolloutGroup], *, microbatch_terms: int, share: Share) -> TrainBatch:
        """Split the decisions of episodes into microbatches."""
        from cosmos_rl_vla.policy.collate import collate

        return collate(groups, microbatch_terms=microbatch_terms, share=share)

    def collate_sft(
        self, prompts: Sequence[Prompt], *, data: VLADataConfig, policy: VLAPolicy, microbatch_terms: int, share: Share
    ) -> TrainBatch:
        """Collate frames of demonstrations with the chunks of actions that follow."""
        from cosmos_rl_vla.policy.collate import collate_sft

        return collate_sft(prompts, data=data, policy=policy, microbatch_terms=microbatch_terms, share=share)

    def export_weights(
        self, model: VLAModelConfig, tensors: Iterable[tuple[str, Tensor]], *, merge_adapters: bool
    ) -> Iterable[tuple[str, Tensor]]:
        """Yield the weights in the format of public checkpoints; adapters are merged, or kept apart."""
        from cosmos_rl_vla.models.families import export_weights

        return export_weights(model, tensors, merge_adapters=merge_adapters)

    @property
    def export_formats(self) -> Sequence[str]:
        from cosmos_rl_vla.models.pi.export import FORMATS

        return FORMATS

    def export_as(
        self, format: str, directory: Path, tensors: Iterable[tuple[str, Tensor]], *, model: Any, data: Any
    ) -> Iterable[tuple[str, Tensor]]:
        """Write pi0 and pi0.5 in the format of lerobot or openpi. Raises UserError for another model."""
        from cosmos_rl_vla.models.pi.export import camera_names, export_pi

        return export_pi(format, directory, tensors, cameras=camera_names(model, data))


VLA = VLADomain()
