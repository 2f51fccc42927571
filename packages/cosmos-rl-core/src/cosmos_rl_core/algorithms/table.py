"""Algorithms by name: the paper, and where its parts differ from the defaults of `AlgorithmConfig`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from cosmos_rl_core.algorithms import preference
from cosmos_rl_core.algorithms.preference import PreferenceObjective
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.settings.base import Strict

if TYPE_CHECKING:
    import numpy as np
    from pydantic import BaseModel

GROUP = "cosmos_rl.algorithms"
"""Entry point group in which a package may offer an `Algorithm`."""

Rows = Literal["", "responses", "pairs", "labels", "steps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One row: a named choice of advantage, loss, aggregation and filters."""

    name: str
    title: str
    paper: str
    """Its source: authors or report, year, arXiv number."""
    summary: str
    """Its main idea, in one line."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys of [algorithm] whose default differs here; the recipe's own keys come last."""
    advantage: Callable[[np.ndarray], np.ndarray] | None = None
    """Replaces the named advantage: rewards [G] float64 -> advantages [G] float64."""
    shaping: Callable[..., np.ndarray] | None = None
    """Transforms a group's advantages [G] before advantage_clip: (advantages, config) -> advantages."""
    loss: Callable[..., Any] | None = None
    """Replaces the named loss: a `losses.LossFn`. Import torch inside it: the controller loads this row."""
    objective: Callable[..., Any] | None = None
    """Replaces the whole objective: (config, *, aggregation) -> `interfaces.Objective`. Import torch inside it."""
    Options: type[BaseModel] | None = None
    """Strict model of [algorithm.options]; None: there are none."""
    rows: Rows = ""
    """Trains on the rows of [data], without rollouts: on their responses, on pairs of a chosen and a rejected answer,
    on responses with a label, or on steps with one each. "": on rollouts."""
    selects: bool = False
    """Whether advantages are weights, and rollouts of weight 0 are left out."""
    reference: bool = False
    """Whether `objective` reads `TermBatch.ref_sums`."""

    @classmethod
    def of_preferences(
        cls,
        loss: preference.PreferenceLoss,
        Options: type[preference.PreferenceOptions | preference.ScoreOptions],
        **fields: Any,
    ) -> Algorithm:
        """Return the row of a preference loss."""
        fields = {"rows": "pairs", "reference": False, **fields}
        objective = partial(
            PreferenceObjective,
            loss=loss,
            options=Options,
            reference=fields["reference"],
            in_pairs=fields["rows"] == "pairs",
        )
        defaults = {"aggregation": "sequence_mean_of_means"}
        return cls(objective=objective, Options=Options, defaults=defaults, **fields)


class SelectionOptions(Strict):
    """[algorithm.options] of "raft"."""

    above: float | None = None
    """Train on every rollout with at least this reward, which may be none of a group. Not set: on the best of each
    group, of equal ones the first."""


def selected(rewards: np.ndarray, config: Any) -> np.ndarray:
    """Return the weight of each rollout of a group, 1 or 0, from its rewards [G]; config: `AlgorithmConfig`."""
    import numpy as np

    above = config.options.get("above")
    chosen = np.arange(len(rewards)) == np.argmax(rewards) if above is None else rewards >= above
    return chosen.astype(np.float64)


def _own_rewards(rewards: np.ndarray) -> np.ndarray:
    return rewards


_ROWS = (
    Algorithm(
        name="grpo",
        title="Group Relative Policy Optimization",
        paper="DeepSeekMath, 2024, arXiv 2402.03300",
        summary="rewards standardised in their group, PPO's clipped ratio, every rollout weighs the same",
        defaults={"advantage": "group_std", "loss": "clipped", "aggregation": "sequence_mean_of_means"},
    ),
    Algorithm(
        name="dr_grpo",
        title="GRPO done right",
        paper="Liu et al., 2025, arXiv 2503.20783",
        summary="GRPO without division by the group's deviation and by the rollout's length",
        defaults={"advantage": "group_mean", "loss": "clipped", "aggregation": "constant"},
    ),
    Algorithm(
        name="dapo",
        title="Decoupled clip and dynamic sampling",
        paper="Yu et al., 2025, arXiv 2503.14476",
        summary="GRPO with a wider upper clip, a mean over terms, and no groups without signal",
        defaults={
            "advantage": "group_std",
            "std_ddof": 1,  # as its code, verl's
            "loss": "clipped",
            "clip_high": 0.28,
            "aggregation": "term_mean",
            "filter_zero_variance": True,
        },
    ),
    Algorithm(
        name="gspo",
        title="Group Sequence Policy Optimization",
        paper="Zheng et al., 2025, arXiv 2507.18071",
        summary="one ratio a rollout, the geometric mean over its terms, clipped as a whole",
        defaults={
            "advantage": "group_std",
            "loss": "sequence_clipped",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "aggregation": "sequence_mean_of_means",
        },
    ),
    Algorithm(
        name="luspo",
        title="Length-Unbiased Sequence Policy Optimization",
        paper="2026, arXiv 2602.05261",
        summary="GSPO with every rollout weighed by its length: terms count the same in long and in short ones",
        defaults={
            "advantage": "group_std",
            "loss": "sequence_clipped",
            "clip_low": 2e-3,
            "clip_high": 2.5e-3,
            "aggregation": "sequence_mean_of_sums",
        },
    ),
    Algorithm(
        name="rloo",
        title="REINFORCE leave-one-out",
        paper="Ahmadian et al., 2024, arXiv 2402.14740",
        summary="REINFORCE on whole rollouts; the baseline is the mean reward of the others",
        defaults={"advantage": "leave_one_out", "loss": "truncated", "aggregation": "sequence_mean_of_sums"},
    ),
    Algorithm(
        name="aipo",
        title="Asynchronous importance-weighted policy optimization",
        paper="LlamaRL, 2025, arXiv 2505.24034",
        summary="REINFORCE weighted by the ratio to the rollout policy, cut above at max_ratio",
        defaults={"advantage": "group_std", "loss": "truncated", "aggregation": "term_mean"},
    ),
    Algorithm(
        name="cispo",
        title="Clipped importance-sampling policy optimization",
        paper="MiniMax-M1, 2025, arXiv 2506.13585",
        summary="the ratio is clipped as a weight, so that no term loses its gradient",
        defaults={
            "advantage": "group_std",
            "loss": "cispo",
            "clip_low": 1.0,
            "clip_high": 4.0,
            "aggregation": "term_mean",
        },
    ),
    Algorithm(
        name="sapo",
        title="Soft Adaptive Policy Optimization",
        paper="Gao et al., 2025, arXiv 2511.20347",
        summary="a sigmoid gate around ratio 1 in place of the clip, steeper for bad rollouts",
        defaults={"advantage": "group_std", "loss": "sapo", "aggregation": "sequence_mean_of_means"},
    ),
    Algorithm(
        name="vespo",
        title="Variational sEquence-level Soft Policy Optimization",
        paper="2026, arXiv 2602.10693",
        summary="REINFORCE with a soft window over each rollout's weight, without division by its length",
        defaults={"advantage": "group_std", "loss": "vespo", "aggregation": "term_mean"},
    ),
    Algorithm(
        name="dppo",
        title="Divergence Proximal Policy Optimization",
        paper="Qi et al., 2026, arXiv 2602.04879",
        summary="terms are dropped by the change of their probability, not of the ratio",
        defaults={
            "advantage": "group_mean",
            "loss": "dppo",
            "rollout_kl_coef": 1e-3,  # as in prime-rl
            "aggregation": "term_mean",
        },
    ),
    Algorithm(
        name="ppo",
        title="Proximal Policy Optimization",
        paper="Schulman et al., 2017, arXiv 1707.06347; GAE, arXiv 1506.02438",
        summary="advantages of single steps from a critic that is trained beside the policy, clipped ratio and value",
        defaults={"advantage": "gae", "loss": "clipped", "aggregation": "term_mean"},
    ),
    Algorithm(
        name="raft",
        title="Reward-ranked fine-tuning",
        paper="Dong et al., 2023, arXiv 2304.06767",
        summary="maximum likelihood of the best own rollouts: of a group, or all above a bar",
        defaults={"loss": "supervised", "aggregation": "term_mean"},
        advantage=_own_rewards,
        shaping=selected,
        Options=SelectionOptions,
        selects=True,
    ),
    Algorithm(
        name="sft",
        title="Supervised fine-tuning",
        paper="maximum likelihood",
        summary="minus the log-probability of the wanted terms",
        defaults={"loss": "supervised", "aggregation": "term_mean"},
        rows="responses",
    ),
    Algorithm.of_preferences(
        preference.dpo_loss,
        preference.PreferenceOptions,
        name="dpo",
        title="Direct Preference Optimization",
        paper="Rafailov et al., 2023, arXiv 2305.18290",
        summary="logistic loss of the difference between two answers' log-ratios to the reference",
        reference=True,
    ),
    Algorithm.of_preferences(
        preference.cdpo_loss,
        preference.SmoothedOptions,
        name="cdpo",
        title="Conservative DPO",
        paper="Mitchell, 2023, A note on DPO with noisy preferences",
        summary="DPO for labels of which a share is wrong",
        reference=True,
    ),
    Algorithm.of_preferences(
        preference.ipo_loss,
        preference.PreferenceOptions,
        name="ipo",
        title="Identity Preference Optimization",
        paper="Azar et al., 2023, arXiv 2310.12036",
        summary="squared loss: the difference of mean log-ratios is to be 1 / (2 beta), not as large as possible",
        reference=True,
    ),
    Algorithm.of_preferences(
        preference.simpo_loss,
        preference.MarginOptions,
        name="simpo",
        title="Simple Preference Optimization",
        paper="Meng et al., 2024, arXiv 2405.14734",
        summary="logistic loss of mean log-probabilities with a margin, without a reference",
    ),
    Algorithm.of_preferences(
        preference.orpo_loss,
        preference.PreferenceOptions,
        name="orpo",
        title="Odds Ratio Preference Optimization",
        paper="Hong et al., 2024, arXiv 2403.07691",
        summary="likelihood of the chosen answer, and the odds ratio of both, without a reference",
    ),
    Algorithm.of_preferences(
        preference.kto_loss,
        preference.JudgedOptions,
        name="kto",
        title="Kahneman-Tversky Optimization",
        paper="Ethayarajh et al., 2024, arXiv 2402.01306",
        summary="single answers that are good or bad, against the mean log-ratio of mismatched ones",
        rows="labels",
        reference=True,
    ),
    Algorithm.of_preferences(
        preference.score_loss,
        preference.ScoreOptions,
        name="reward_model",
        title="Reward model of pairs",
        paper="Bradley and Terry, 1952; Ouyang et al., 2022, arXiv 2203.02155",
        summary="a scalar head at the last token; logistic loss of the difference of two answers' scores",
    ),
    Algorithm(
        name="process_reward_model",
        title="Reward model of steps",
        paper="Lightman et al., 2023, arXiv 2305.20050",
        summary="a scalar head at the end of each step; binary cross-entropy with the step's label",
        objective=preference.StepObjective,
        defaults={"aggregation": "term_mean"},
        rows="steps",
    ),
)

TABLE: Mapping[str, Algorithm] = {row.name: row for row in _ROWS}


def find_algorithm(name: str) -> Algorithm:
    """Return the row called `name`: one of ours, an installed one, or "module:attribute".

    Raises UserError for an unknown name and for a plug-in that is not an `Algorithm`.
    """
    if name in TABLE:
        return TABLE[name]
    from cosmos_rl_core import plugins  # reads installed metadata: only when the name is not ours

    plugins.locate(GROUP, name, beside=tuple(TABLE))  # names those of the table among the known ones
    algorithm = plugins.load(GROUP, name)
    if not isinstance(algorithm, Algorithm):
        raise UserError(f"algorithm {name!r} is a {type(algorithm).__name__}; it has to be a cosmos_rl_core.Algorithm")
    return algorithm
