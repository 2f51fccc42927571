"""`cosmos-rl eval`: metrics of a checkpoint on [eval.data], with standard errors and confidence intervals.

Rewards are measured over rollouts of `inference.generate`, the same ones as in an evaluation of the run. For a
supervised recipe the loss is measured, in this process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from cosmos_rl_core import assemble
from cosmos_rl_core.algorithms.table import find_algorithm
from cosmos_rl_core.errors import UserError, one_line_errors
from cosmos_rl_core.inference.generate import generate_rows, rows_on_disk
from cosmos_rl_core.inference.request import GenerationWeights, Instances, Request, folder_of
from cosmos_rl_core.inference.rollouts_file import Line
from cosmos_rl_core.launch.open_recipe import Rewards, Rows, open_recipe
from cosmos_rl_core.observe.console import table
from cosmos_rl_core.recipe.load import Recipe, load_domain
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.types import Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over independent values."""

    mean: float
    standard_error: float
    """s / sqrt(n), s with n - 1; NaN for a single value."""
    low: float
    """Lower end of the 95 % confidence interval, by Student's t, or by Wilson's score if all values are 0 or 1; NaN
    for a single value."""
    high: float
    """Upper end."""
    count: int
    """n."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Estimate the mean of the distribution from n >= 1 values."""
        array = np.asarray(values, np.float64)
        count, mean = len(array), float(array.mean())
        error = float(array.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
        if count > 1 and set(array.tolist()) <= {0.0, 1.0}:
            low, high = wilson(mean, count)
            return cls(mean=mean, standard_error=error, low=low, high=high, count=count)
        half = t_quantile(count - 1) * error if count > 1 else math.nan
        return cls(mean=mean, standard_error=error, low=mean - half, high=mean + half, count=count)


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % score interval of a proportion in `count` trials (Wilson, 1927), valid also for small counts."""
    z = 1.959963984540054
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    # without min and max, rounding could put the ends for 0 and 1 slightly inside or beyond the proportion
    return min((middle - half) / scale, share), max((middle + half) / scale, share)


def t_quantile(df: int) -> float:
    """Return the 97.5 % quantile of Student's t with df >= 1 degrees of freedom, to 0.2 %.

    Closed form for 1 and 2; above, the expansion in 1 / df (Abramowitz and Stegun 26.7.5).
    """
    if df == 1:
        return math.tan(math.pi * 0.475)
    if df == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z = 1.959963984540054
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / df**power for power, term in enumerate(terms))


RESULT = "eval.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The metrics of a checkpoint."""

    directory: Path
    weights: GenerationWeights
    metrics: Mapping[str, Estimate]
    """`reward` and each of its parts; or `loss` and `perplexity`, without a standard error."""
    rows: int
    """Number of evaluated rows."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Rows whose generation or scoring failed, with the reason; they are left out of the means."""
    num_samples: int = 1
    interrupted: bool = False

    def __str__(self) -> str:
        """The metrics as a table."""
        header = ("metric", "mean", "std. error", "95 % interval")
        return table([(name, *_cells(metric)) for name, metric in self.metrics.items()], header=header)

    def write(self) -> Path:
        """Write eval.json and return its path."""
        path = self.directory / RESULT
        value = {
            "checkpoint": self.weights.folder,
            "step": self.weights.version,
            "rows": self.rows,
            "failed": len(self.failed),
            "num_samples": self.num_samples,
            "metrics": {name: _json(metric) for name, metric in self.metrics.items()},
        }
        path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return path


@one_line_errors
def evaluate(
    recipe: Recipe,
    overrides: Sequence[str] = (),
    *,
    request: Request | None = None,
    rewards: Rewards | None = None,
    rows: Rows | None = None,
    python_path: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Evaluated:
    """Measure the rewards, or the loss of a supervised recipe, and write eval.json. Raises like `generate`.

    rewards: as in `run`; other processes import and call them. rows: mappings that replace [eval.data] path.
    """
    request = request or Request()
    opened = open_recipe(recipe, overrides, python_path=python_path, rewards=rewards, eval_rows=rows, generating=True)
    with rows_on_disk(opened) as config:
        if config.eval.data is None and not request.prompts:
            raise UserError("the recipe has no [eval.data], the rows to evaluate on; add it, with the keys of [data]")
        if config.agent is not None:
            raise UserError(
                "[agent]: agents are evaluated in their run, on the rows of [eval.data]; see docs/endpoint.md"
            )
        if not config.is_sft and not config.reward.functions:
            raise UserError("the recipe has no [[reward.functions]] to evaluate with; add one with a name")
        if config.is_sft:
            measured = _loss(config, request)
        else:
            for note in opened.notes:
                say(note)
            generated = generate_rows(config, request, scored=True, python_path=opened.python_path, say=say)
            measured = Evaluated(
                directory=generated.directory,
                weights=generated.weights,
                metrics=estimates(generated.lines, labels=generated.labels),
                rows=generated.num_done,
                failed=generated.failed,
                num_samples=request.num_samples,
                interrupted=generated.interrupted,
            )
    if not measured.interrupted:
        measured.write()
    return measured


def estimates(lines: Sequence[Line], *, labels: Mapping[int, Sequence[str]] | None = None) -> dict[str, Estimate]:
    """Return the mean of each reward over rows; a row's rollouts count as one value, as they are not independent.

    labels: labels of each row, by its index; the means of each label's rows follow those of all rows.
    """
    metrics, labels = _estimates(lines), labels or {}
    for label in sorted({label for of_row in labels.values() for label in of_row}):
        own = [line for line in lines if label in labels.get(line["sample"], ())]
        metrics |= {f"{name} {label}": estimate for name, estimate in _estimates(own).items()}
    return metrics


def _estimates(lines: Sequence[Line]) -> dict[str, Estimate]:
    rows: dict[int, list[Line]] = {}
    for line in lines:
        if "rewards" in line:
            rows.setdefault(line["sample"], []).append(line)
    if not rows:
        return {}
    names = next(iter(rows.values()))[0]["rewards"]
    values = {"reward": [fmean(line["reward"] for line in of_row) for of_row in rows.values()]}
    for name in names:
        values[f"reward/{name}"] = [fmean(line["rewards"][name] for line in of_row) for of_row in rows.values()]
    return {name: Estimate.of(column) for name, column in values.items()}


def _loss(config: RunConfig, request: Request) -> Evaluated:
    """Measure the loss on [eval.data]. Raises UserError for options of rollouts."""
    from cosmos_rl_core.checkpoint.restore import load_weights
    from cosmos_rl_core.parallel.setup import ModelSetup

    if request.prompts or request.num_samples > 1 or request.instances != Instances():
        raise UserError(
            "the loss of a supervised recipe is measured on [eval.data] by one process: leave out --prompts, "
            "--num-samples, --num-gpus and --tp-size"
        )
    domain, weights = load_domain(config.run.domain), GenerationWeights.find(request, config)
    setup = ModelSetup(memory=config.policy.memory, precision=config.policy.precision)
    policy = domain.build_policy(config.model, data=config.data, sampling=None, seed=config.run.seed, setup=setup)
    if weights.folder:
        load_weights(weights.folder, policy.weights(), averaged=request.averaged)
    sums = None
    if find_algorithm(config.algorithm.name).reference:
        reference = policy.reference()
        if reference is None:
            reference = domain.build_policy(
                config.model, data=config.data, sampling=None, seed=config.run.seed, setup=setup
            )
        sums = assemble.build_answer_sums(config, policy, reference)
    validation = assemble.build_validation(config, domain, policy, share=Share(), sums=sums)
    assert validation is not None
    metrics = validation.measure()
    directory = folder_of(config, request, weights, command="eval")
    directory.mkdir(parents=True, exist_ok=True)
    single = Estimate(mean=0.0, standard_error=math.nan, low=math.nan, high=math.nan, count=int(metrics["eval/terms"]))
    return Evaluated(
        directory=directory,
        weights=weights,
        metrics={
            name.removeprefix("eval/"): replace(single, mean=value)
            for name, value in metrics.items()
            if name not in ("eval/terms", "eval/rows")
        },
        rows=int(metrics["eval/rows"]),
    )


def _cells(metric: Estimate) -> tuple[str, str, str]:
    if math.isnan(metric.standard_error):
        return f"{metric.mean:.4f}", "", ""
    return f"{metric.mean:.4f}", f"{metric.standard_error:.4f}", f"{metric.low:.4f} .. {metric.high:.4f}"


def _json(metric: Estimate) -> dict[str, float | int | None]:
    return {name: None if math.isnan(value) else value for name, value in asdict(metric).items()}
