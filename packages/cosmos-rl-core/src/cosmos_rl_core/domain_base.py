"""DomainBase: defaults for the methods of `interfaces.Domain` that most domains share. Imports no torch.

    class MyDomain(DomainBase):
        name = "mine"
        Model, Data, Sampling = MyModel, MyData, SamplingSection

        def load_rows(self, data): ...
        def build_policy(self, model, *, data, sampling, seed, setup): ...    # a `train.policy_base.PolicyBase`
        def build_engine(self, model, *, data, name, options): ...            # a `rollout.engine_thread.ThreadedEngine`
        def collate(self, groups, *, microbatch_terms, share): ...
        def collate_sft(self, prompts, *, data, policy, microbatch_terms, share): ...

`testing.tiny` is a complete example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from cosmos_rl_core.interfaces import Recorder, RewardFn
    from cosmos_rl_core.parallel.shape import ModelShape
    from cosmos_rl_core.types import WeightSpec


class DomainBase:
    """Defaults of `interfaces.Domain`; override those that do not fit."""

    engines: Sequence[str] = ("torch",)
    has_media = False
    """Whether rollouts hold images or videos, which [logging] media_every keeps in the run's gallery."""

    def reward_table(self) -> Mapping[str, Callable[..., RewardFn]]:
        """Return the factories of this domain's rewards by name, each called with the reward's options by keyword."""
        return {}

    @property
    def rewards(self) -> Sequence[str]:
        return tuple(self.reward_table())

    def reward(self, name: str) -> Callable[..., RewardFn] | None:
        """Return a reward of the table; None for any other name."""
        return self.reward_table().get(name)

    def weight_specs(self, model: Any) -> Sequence[WeightSpec] | None:
        """None: only a built model has its weights."""
        return None

    def model_shape(self, model: Any, *, data: Any, sampling: Any) -> ModelShape | None:
        """None: only a built model has its sizes."""
        return None

    def recorder(self, directory: Path, *, name: str, groups: int, every: int) -> Recorder | None:
        """A gallery of images and videos; None where rollouts are text."""
        if not self.has_media:
            return None
        from cosmos_rl_core.observe.gallery import Gallery

        return Gallery(directory, groups_per_step=groups, every_steps=every, name=name)

    def export_weights(
        self, model: Any, tensors: Iterable[tuple[str, Tensor]], *, merge_adapters: bool
    ) -> Iterable[tuple[str, Tensor]]:
        """Return the weights unchanged, by the policy's names."""
        return tensors
