"""The [algorithm] section: a name, and the keys that differ from that algorithm's row in the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from cosmos_rl_core.algorithms.aggregation import AggregationName
from cosmos_rl_core.algorithms.table import Algorithm, find_algorithm
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.settings.problems import validated

AdvantageName = Literal["group_std", "group_mean", "global_std", "pooled_std", "leave_one_out", "gae"]
LossName = Literal[
    "clipped",
    "sequence_clipped",
    "sequence_clipped_token",
    "truncated",
    "cispo",
    "sapo",
    "vespo",
    "dppo",
    "supervised",
]
CorrectionName = Literal["truncate", "mask", "none"]
CorrectionLevel = Literal["term", "sequence", "geometric"]
KLName = Literal["k1", "k2", "k3", "exact", "exact_dt"]

READS: Mapping[LossName, frozenset[str]] = {
    "clipped": frozenset({"clip_low", "clip_high", "dual_clip"}),
    "sequence_clipped": frozenset({"clip_low", "clip_high"}),
    "sequence_clipped_token": frozenset({"clip_low", "clip_high"}),
    "truncated": frozenset({"max_ratio"}),
    "cispo": frozenset({"clip_low", "clip_high"}),
    "sapo": frozenset({"sapo_temperature", "sapo_temperature_negative"}),
    "vespo": frozenset({"vespo_k", "vespo_lambda", "vespo_k_negative", "vespo_lambda_negative"}),
    "dppo": frozenset({"clip_low", "clip_high"}),
    "supervised": frozenset(),
}
"""Which of the keys about the ratio each loss reads."""

DIVIDES_BY_STD: frozenset[AdvantageName] = frozenset({"group_std", "global_std", "pooled_std"})
"""Advantages that read std_ddof and std_epsilon."""

_RENAMED = {
    "batch_std": '"batch_std" is now "pooled_std" (deviations around each group\'s own mean); what flow_grpo and '
    'DiffusionNFT call global_std (deviation of all rewards) is "global_std"'
}
_RATIO_KEYS = frozenset().union(*READS.values())
_CRITIC_KEYS = (
    "gamma",
    "gae_lambda",
    "normalize_advantages",
    "value_coef",
    "value_clip",
    "value_huber_delta",
    "critic_warmup_steps",
)
_SUPERVISED_KEYS = frozenset({"name", "loss", "aggregation", "aggregation_constant"})


class AlgorithmConfig(Strict):
    """The algorithm, from rewards to gradient. `name` picks a row of `table.TABLE`; keys beside it override the row."""

    name: str = "grpo"
    """An algorithm of the table, an installed one, or "module:attribute" of your own `Algorithm`."""

    advantage: AdvantageName = "group_std"
    """Baseline and divisor of rewards. All but "leave_one_out" and "gae" subtract the group's
    mean; "group_std" divides by the group's standard deviation, "global_std" by that of all rewards of the step,
    "pooled_std" by that of all rewards around their own group's mean. "gae" takes the rewards of an episode's steps and
    a critic's estimates."""
    std_ddof: Literal[0, 1] = 0
    """The variance's divisor is n - std_ddof: 0 as numpy's std, 1 as torch's."""
    std_epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation before it divides."""
    advantage_clip: float | None = Field(default=None, gt=0)
    """Advantages are kept within plus and minus this."""
    gamma: float = Field(default=0.99, ge=0, le=1)
    """gae: discount of a reward one step later."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """gae: weight of steps further ahead; 0 uses the critic's estimate after one step, 1 the rewards alone."""
    normalize_advantages: bool = True
    """gae: shift and scale the advantages of a step's trained terms to mean 0 and deviation 1."""
    value_coef: float = Field(default=1.0, ge=0)
    """gae: coefficient of the critic's loss, half the squared error. 0: for models without a critic, whose estimates
    count as 0."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """gae: largest change of an estimate from the rollout's that can still lower its loss (PPO2's clip)."""
    value_huber_delta: float | None = Field(default=10.0, gt=0)
    """gae: error from which the critic's loss grows as a straight line."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """gae: first steps in which advantages count as 0, so that the critic alone learns."""

    loss: LossName = "clipped"
    """The policy loss."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped below at 1 - clip_low; 1 means no lower clip. dppo: a bad term is dropped once its
    probability is lower than the rollout's by more than this."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped above at 1 + clip_high. dppo: a good term is dropped once its probability is higher than
    the rollout's by more than this."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Where the advantage A is negative, a term's loss is at most dual_clip * |A|."""
    max_ratio: float = Field(default=2.0, ge=1)
    """Cap of the ratio of loss = "truncated"."""
    sapo_temperature: float = Field(default=1.0, gt=0)
    """sapo: steepness of the gate of terms with a positive advantage."""
    sapo_temperature_negative: float = Field(default=1.05, gt=0)
    """sapo: steepness of the gate of all other terms."""
    vespo_k: float = Field(default=2.0, ge=0)
    """vespo: power of a rollout's weight where the advantage is at least 0; larger ones suppress low weights."""
    vespo_lambda: float = Field(default=3.0, gt=0)
    """vespo: rate of decay with a rollout's weight where the advantage is at least 0; larger ones suppress high
    weights."""
    vespo_k_negative: float = Field(default=3.0, ge=0)
    """vespo: that power for negative advantages."""
    vespo_lambda_negative: float = Field(default=2.0, gt=0)
    """vespo: that rate for negative advantages."""

    old_logprobs: Literal["rollout", "policy"] = "rollout"
    """The ratio's denominator: the engine's log-probs, or (decoupled) the policy's own before the step. The latter is
    1 throughout where a step is one update, and clips nothing; [policy] epochs and minibatches make it several."""
    correction: CorrectionName = "truncate"
    """Correction of the weight policy / rollout that old_logprobs = "policy" needs."""
    correction_cap: float = Field(default=2.0, ge=1)
    """Weights above it are cut to it ("truncate") or drop their term ("mask")."""
    correction_floor: float = Field(default=0.0, ge=0, le=1)
    """Weights below it drop their term ("mask")."""
    correction_level: CorrectionLevel = "term"
    """Terms that share a weight: "term" gives each its own, "sequence" all of a rollout the product of theirs,
    "geometric" all of a rollout the geometric mean of theirs."""
    sequence_mask_delta: float | None = Field(default=None, ge=0)
    """Drops terms with a negative advantage where their rollout's mean log(rollout / policy) exceeds it."""

    rollout_kl_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the square of log(policy / rollout), which keeps the policy near the one that sampled."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Coefficient of KL(policy || reference); above 0 a frozen reference is loaded."""
    kl_estimator: KLName = "k3"
    """Estimator of that divergence from the sampled terms. Where a term is a Gaussian, as in denoising, "exact" is the
    divergence itself, and "exact_dt" that times the step's length in time, as in flow_grpo's scripts for images."""
    kl_unbiased: bool = False
    """Multiply the estimate by the ratio, with its gradient: value and gradient are then the KL's own."""
    kl_ratio: Literal["rollout", "old"] = "rollout"
    """kl_unbiased with old_logprobs = "policy": that ratio's denominator. "rollout" includes the correction weight,
    "old" leaves it out."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the entropy that is added to the objective."""
    entropy_aggregation: AggregationName | None = None
    """Reduction of the terms' entropies to one number; by default that of their losses (`aggregation`)."""
    entropy_target: float | None = Field(default=None, gt=0)
    """Entropy in nats below which the policy is to stay broad: the coefficient starts at entropy_coef, rises by
    entropy_coef_step after a step with an entropy of at most this, falls by as much after any other, and applies only
    while the entropy is at most this."""
    entropy_coef_step: float = Field(default=0.005, gt=0)
    """entropy_target: change of the coefficient after each step."""
    entropy_coef_max: float = Field(default=1.0, gt=0)
    """entropy_target: largest coefficient."""
    top_entropy: float | None = Field(default=None, gt=0, lt=1)
    """Share of a step's terms, those of the highest entropy, whose policy loss and entropy term count; needs one more
    forward pass."""

    aggregation: AggregationName = "term_mean"
    """Reduction of the terms' losses to one number."""
    aggregation_constant: int | None = Field(default=None, ge=1)
    """Divisor of a rollout's sum under aggregation = "constant"; by default the longest rollout of the sampling."""

    filter_zero_variance: bool = False
    """Set groups aside in which every rollout got the same reward, and sample others in their place."""
    filter_low: float | None = None
    """Set groups aside whose mean reward is below this: tasks that are still too hard."""
    filter_high: float | None = None
    """Set groups aside whose mean reward is above this: tasks that are learnt."""
    mask_prefix_terms: int = Field(default=0, ge=0)
    """Rollouts of a prompt that begin with the same tokens, at least this many, and have different rewards are not
    trained on those tokens; 0: on all. For domains whose terms are tokens."""
    mask_truncated: bool = False
    """Rollouts that a limit cut off are not trained on; their rewards still count in their group's."""
    max_variance_rollouts: int | None = Field(default=None, ge=2)
    """Rollouts of each group that are trained on: as many as this, chosen so that the variance of their rewards is
    largest."""
    overlong_buffer_terms: int = Field(default=0, ge=0)
    """The last terms before the limit of length over which a penalty on length rises from 0; 0 switches it off."""
    overlong_penalty: float = Field(default=1.0, gt=0)
    """That penalty at the limit, subtracted from the reward."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keys of the named algorithm's own."""

    @field_validator("advantage", mode="before")
    @classmethod
    def _not_renamed(cls, advantage: Any) -> Any:
        if isinstance(advantage, str) and advantage in _RENAMED:
            raise ValueError(_RENAMED[advantage])
        return advantage

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        find_algorithm(name)
        return name

    @model_validator(mode="wrap")
    @classmethod
    def _filled_from_row(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, Mapping):
            return handler(data)
        row = _row(data.get("name", cls.model_fields["name"].default))
        if row is None:
            return handler(data)
        config = handler({**row.defaults, **data, "options": _own_options(row, data.get("options", {}))})
        defaults = {key: info.get_default(call_default_factory=True) for key, info in cls.model_fields.items()} | dict(
            row.defaults
        )
        chosen = {key for key in data if getattr(config, key) != defaults[key]}
        problems = {key: why for key, why in _idle_keys(config, row).items() if key in chosen} | _conflicts(config)
        if problems:
            raise _problems(problems, data)
        return config


class TeacherSection(Strict):
    """[teacher]: a frozen model in the policy's ranks that the policy learns from, beside rewards or alone."""

    path: str = Field(min_length=1)
    """The teacher: a model as in [model] path, with the same tokenizer."""
    revision: str | None = None
    """As in [model]."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the teacher's forward passes. Not set: [model] dtype."""
    loss: Literal["divergence", "advantage"] = "divergence"
    """"divergence": a loss over the vocabulary, on rollouts or on rows of supervised training. "advantage": the reverse
    KL of the sampled tokens, subtracted from their advantages."""
    coef: float = Field(default=1.0, gt=0)
    """Coefficient of the teacher's loss, or of its part of the advantages."""
    task_coef: float = Field(default=1.0, ge=0)
    """Coefficient of the task: the loss of the rewards, or the likelihood of supervised rows. 0: the teacher alone."""
    beta: float = Field(default=1.0, ge=0, le=1)
    """divergence: 1 is KL(policy || teacher), 0 KL(teacher || policy), in between GKD's generalised JSD."""
    top_k: int = Field(default=0, ge=0)
    """divergence: over the teacher's k most likely tokens, and all others as one; 0: over the whole vocabulary."""
    discount: float = Field(default=0.0, ge=0, le=1)
    """advantage: weight of the KL of the next trained token in the advantage of a token; 0: each has its own alone."""

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        read = ("beta", "top_k") if self.loss == "divergence" else ("discount",)
        fields = type(self).model_fields
        for key in ("beta", "top_k", "discount"):
            if key not in read and getattr(self, key) != fields[key].default:
                other = "advantage" if self.loss == "divergence" else "divergence"
                raise ValueError(f'loss = "{self.loss}" does not read {key}; remove it, or set loss = "{other}"')
        return self


def _row(name: Any) -> Algorithm | None:
    """The named row, or None where the field `name` will itself be the error."""
    if not isinstance(name, str):
        return None
    try:
        return find_algorithm(name)
    except UserError:
        return None


def _own_options(row: Algorithm, options: Any) -> Any:
    """[algorithm.options] as the row's model has them, with its defaults."""
    if not isinstance(options, Mapping):
        return options  # the field itself will be the error
    if row.Options is None:
        if options:
            raise _problems({"options": f"{row.name} has none; remove them"}, {"options": options})
        return {}
    try:
        return validated(row.Options, options).model_dump(mode="json", exclude_none=True)  # TOML has no null
    except ValidationError as error:
        inside = [_inside(each) for each in error.errors()]
        raise ValidationError.from_exception_data("AlgorithmConfig", inside) from error


def _inside(details: ErrorDetails) -> InitErrorDetails:
    """An error of the options, as one of the section."""
    kind: str | PydanticCustomError = details["type"]
    if kind == "value_error":  # it cannot be made again without the exception
        kind = PydanticCustomError("value_error", "{why}", {"why": details["msg"].removeprefix("Value error, ")})
    loc = ("options", *details["loc"])
    return InitErrorDetails(type=kind, loc=loc, input=details["input"], ctx=details.get("ctx", {}))


def _idle_keys(config: AlgorithmConfig, row: Algorithm) -> dict[str, str]:
    """Keys that change nothing under this config, with the reason and the remedy."""
    if row.rows in ("pairs", "labels", "steps"):
        idle = set(AlgorithmConfig.model_fields) - {"name", "options"}
        return {key: "preference training does not read it; remove it" for key in idle}
    if config.loss == "supervised":
        idle = set(AlgorithmConfig.model_fields) - _SUPERVISED_KEYS
        idle -= {"options", "filter_zero_variance", "filter_low", "filter_high"} if row.selects else set()
        return {key: "supervised training does not read it; remove it" for key in idle}
    return _idle_in_loss(config, row) | _idle_in_correction(config) | _idle_elsewhere(config, row)


def _idle_in_loss(config: AlgorithmConfig, row: Algorithm) -> dict[str, str]:
    if row.loss is not None:  # a loss of the user's own may read any key but the one it replaces
        return {"loss": f"{config.name} brings its own loss; remove it"}
    reads = READS[config.loss]
    idle = {}
    for key in _RATIO_KEYS - reads:
        readers = " or ".join(f'"{loss}"' for loss, keys in READS.items() if key in keys)
        idle[key] = f'loss = "{config.loss}" does not read it; remove it, or set loss = {readers}'
    return idle


def _idle_in_correction(config: AlgorithmConfig) -> dict[str, str]:
    if config.old_logprobs == "rollout":
        why = 'the ratio to the rollout is the correction; remove it, or set old_logprobs = "policy"'
        return {key: why for key in ("correction", "correction_cap", "correction_floor", "correction_level")}
    idle = {}
    if config.correction == "none":
        idle["correction_cap"] = 'correction = "none" has no cap; remove it'
        idle["correction_level"] = 'correction = "none" has no weight; remove it'
    if config.correction != "mask":
        idle["correction_floor"] = 'only "mask" has a floor; remove it, or set correction = "mask"'
    return idle


def _idle_elsewhere(config: AlgorithmConfig, row: Algorithm) -> dict[str, str]:
    idle = {}
    if config.advantage != "gae":
        idle |= {key: 'there is no critic; remove it, or set advantage = "gae"' for key in _CRITIC_KEYS}
    if row.advantage is not None:
        idle["advantage"] = f"{config.name} brings its own advantage; remove it"
    if row.advantage is not None or config.advantage not in DIVIDES_BY_STD:
        why = "no standard deviation divides; remove it, or set advantage = "
        why += " or ".join(f'"{name}"' for name in sorted(DIVIDES_BY_STD))
        idle |= {"std_ddof": why, "std_epsilon": why}
    return idle | _idle_regularizers(config)


def _idle_regularizers(config: AlgorithmConfig) -> dict[str, str]:
    idle = {}
    if config.kl_coef == 0:
        why = "there is no KL term; remove it, or set kl_coef above 0"
        idle |= {"kl_estimator": why, "kl_unbiased": why}
    if not (config.kl_coef and config.kl_unbiased and config.old_logprobs == "policy"):
        idle["kl_ratio"] = 'there is one ratio only; remove it, or set kl_unbiased = true and old_logprobs = "policy"'
    if config.entropy_target is None:
        why = "the coefficient is constant; remove it, or set entropy_target"
        idle |= {"entropy_coef_step": why, "entropy_coef_max": why}
    if config.entropy_coef == 0 and config.entropy_target is None:
        idle["entropy_aggregation"] = "there is no entropy term; remove it, or set entropy_coef above 0"
    if "constant" not in (config.aggregation, config.entropy_aggregation):
        idle["aggregation_constant"] = 'remove it, or set aggregation = "constant"'
    if config.overlong_buffer_terms == 0:
        idle["overlong_penalty"] = "there is no penalty on length; remove it, or set overlong_buffer_terms"
    return idle


def _conflicts(config: AlgorithmConfig) -> dict[str, str]:
    """Choices that each make sense and together do not."""
    if config.advantage == "gae" and config.loss == "sequence_clipped":
        why = '"gae" gives terms advantages of their own, which this loss would average over a rollout; take '
        return {"loss": why + '"sequence_clipped_token"'}
    if config.loss in ("vespo", "dppo") and config.old_logprobs == "policy":
        return {"old_logprobs": f'"{config.loss}" bounds the change since the rollout; take "rollout"'}
    if config.advantage == "gae" and config.value_coef == 0 and config.critic_warmup_steps:
        return {"critic_warmup_steps": "value_coef = 0 is for models without a critic; remove it"}
    if config.kl_coef > 0 and config.kl_estimator == "k1" and not config.kl_unbiased:
        return {"kl_estimator": '"k1" alone has no gradient on average; set kl_unbiased = true, or take "k3"'}
    if config.kl_coef > 0 and config.kl_estimator in ("exact", "exact_dt") and config.kl_unbiased:
        return {"kl_unbiased": f'"{config.kl_estimator}" needs no correction; set it to false'}
    if config.kl_coef > 0 and config.kl_estimator == "k2" and config.kl_unbiased:
        return {"kl_unbiased": '"k2" is biased with the ratio too; take "k1" or "k3", or set it to false'}
    if config.entropy_target is not None and config.entropy_coef > config.entropy_coef_max:
        return {"entropy_coef": f"the coefficient starts above entropy_coef_max = {config.entropy_coef_max}; lower it"}
    if config.max_variance_rollouts is not None and config.advantage in ("gae", "global_std", "pooled_std"):
        why = f'"{config.advantage}" compares beyond the group, and a part of it would be chosen by its rewards; '
        return {"max_variance_rollouts": why + 'remove it, or set advantage = "group_std"'}
    low, high = config.filter_low, config.filter_high
    if low is not None and high is not None and low > high:
        return {"filter_low": f"no mean is above it and below filter_high = {high}; lower it"}
    return {}


def _problems(problems: Mapping[str, str], data: Mapping[str, Any]) -> ValidationError:
    """One pydantic error a key, so that a report can name each."""
    details = [
        InitErrorDetails(type=PydanticCustomError("no_effect", "{why}", {"why": why}), loc=(key,), input=data.get(key))
        for key, why in sorted(problems.items())
    ]
    return ValidationError.from_exception_data("AlgorithmConfig", details)
