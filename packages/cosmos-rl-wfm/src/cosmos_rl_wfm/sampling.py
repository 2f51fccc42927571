"""[rollout.sampling] of world models: the denoising of a sample and the choice of its trained steps. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_wfm.samplers import DensityName, RuleName, ScheduleName
from cosmos_rl_wfm.samplers.window import WindowChoice, WindowSection

if TYPE_CHECKING:
    from cosmos_rl_wfm.samplers.sampler import DenoisingPlan

OldDecay = Literal["none", "slow", "late"]


class FlowSampling(WindowSection):
    """[rollout.sampling]: the denoising of a sample and the choice of its trained steps."""

    unit: ClassVar[str] = "terms"
    length_key: ClassVar[str] = "num_steps"

    num_steps: int = Field(default=10, ge=1)
    """Denoising steps of a rollout; training needs fewer than inference."""
    eval_num_steps: int = Field(default=40, ge=1)
    """ODE steps in an evaluation."""
    rule: RuleName = "flow_sde"
    """Rule of a stochastic step; "ode" for objectives that need clean samples only, such as nft."""
    noise_level: float = Field(default=0.7, gt=0)
    """Noise of a stochastic step: FlowGRPO's a, DanceGRPO's eta, or the noise level of CPS."""
    schedule: ScheduleName = "flow"
    """Times of the steps: equally spaced from 1 to 0 and shifted ("flow"), those of diffusers'
    FlowMatchEulerDiscreteScheduler, as SD3's pipeline and flow_grpo use them ("flow_match_euler"), or EDM's noise
    levels ("edm")."""
    solver_order: Literal[1, 2] = 1
    """Order of ODE steps, in rollouts and evaluations: 2 also uses the previous velocity, without additional passes."""
    guidance: float | None = Field(default=None, ge=0)
    """Scale of classifier-free guidance, in rollouts and in training, in the convention of the model's pipeline;
    without it there is no unconditional pass."""
    same_noise: bool = False
    """Start all rollouts of a group from the same noise."""
    times_per_rollout: int = Field(default=2, ge=1)
    """rule = "ode": times at which each clean sample is trained."""
    density: DensityName = "uniform"
    """rule = "ode": distribution of those times."""
    old_decay: OldDecay | None = None
    """Sample rollouts with a second copy of the weights that follows the trained ones; nft contrasts the two. "none":
    the weights of the previous step, "slow": a decay that grows to 0.5, "late": after 75 steps to 0.999."""

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        if self.trains_steps:
            self.choose_steps(self.num_steps)  # raises ValueError with the mismatch
        if self.rule == "cps" and self.noise_level > 1:
            raise ValueError(f"noise_level = {self.noise_level}: cps takes at most 1")
        return self

    @property
    def trains_steps(self) -> bool:
        """Whether terms are steps of a rollout, instead of times at which its clean sample is noised again."""
        return self.rule != "ode"

    @property
    def max_terms(self) -> int:
        """Trained terms of a rollout."""
        return len(self.choose_steps(self.num_steps).trained) if self.trains_steps else self.times_per_rollout

    @property
    def least_microbatch_terms(self) -> int:
        """1: each term is one forward pass."""
        return 1

    def evaluation(self, *, temperature: float, max_terms: int | None) -> FlowSampling:
        """Follow the ODE in `eval_num_steps`."""
        if temperature or max_terms is not None:
            raise UserError(
                "[eval] temperature and max_length do not apply to world models, evaluated without noise; remove "
                "them, and set [rollout.sampling] eval_num_steps"
            )
        return self.model_copy(update={"rule": "ode", "num_steps": self.eval_num_steps, "times_per_rollout": 1})

    def build(self) -> FlowSampling:
        return self

    def plan(self, *, shift: float, version: int = 0, seed: int = 0) -> DenoisingPlan:
        """Return the steps of a rollout sampled with weights `version`; `shift` is the model's."""
        from cosmos_rl_wfm.samplers.sampler import DenoisingPlan
        from cosmos_rl_wfm.samplers.times import edm_times, flow_match_euler_times, flow_times

        if self.schedule == "edm":
            times = edm_times(self.num_steps)
        else:
            build = flow_times if self.schedule == "flow" else flow_match_euler_times
            times = build(self.num_steps, shift=shift)
        steps = self.choose_steps(self.num_steps, version=version, seed=seed) if self.trains_steps else WindowChoice()
        return DenoisingPlan(
            times=times, rule=self.rule, noise_level=self.noise_level, steps=steps, order=self.solver_order
        )


class WFMTorchOptions(Strict):
    """[rollout.options] of engine = "torch"."""

    samples_at_once: int = Field(default=8, ge=1)
    """Samples in one forward pass: larger groups take several passes, smaller ones share one."""
