"""Rollouts, rewards and training at the same time: a real run in processes, measured by its own files.

    metrics.jsonl    step_s, the time from one step to the next
    timeline.json    the phases (_overlap.py)

Rollouts and training have one core each; the reward only waits, like the client of a remote service.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import _wfm_ours
from _overlap import read_spans, rollout_s, training_s
from _wfm_work import Model, Work

from cosmos_rl_core import run

HERE = Path(__file__).resolve().parent
MAX_STALENESS = 2
WARM = 4
"""Steps at the start, in which the pipeline fills, that are not counted; likewise those at the end, where it drains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Seconds per step, medians of the steady part of a run."""

    step: float
    rollout: float
    """In which the engine had something to denoise, for the groups of a step."""
    reward: float
    """That a group waits for its reward; all groups of a step wait side by side."""
    train: float

    @property
    def longest(self) -> float:
        return max(self.rollout, self.reward, self.train)


def measure(model: Model, folder: Path, *, work: Work, steps: int, reward_s: float, out: Path) -> Phases:
    """Run `steps` training steps in `out`, with a reward that takes `reward_s`."""
    recipe = _wfm_ours.recipe(model, folder, text="words", work=work)
    recipe["run"] |= {"max_steps": steps, "output_dir": str(out), "placement": "local"}
    recipe["policy"] |= {"threads": 1}
    recipe["rollout"] |= {"threads": 1, "options": {"samples_at_once": work.group_size}}
    recipe["sync"] = {"max_staleness": MAX_STALENESS}
    recipe["reward"] = {"functions": [{"name": "_wfm_reward:Remote", "options": {"seconds": reward_s}}]}
    recipe["logging"] = {"sinks": ["jsonl"], "rollouts_every": 0, "media_every": 0}
    run(recipe, overwrite=True, python_path=[str(HERE)])
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steady = range(WARM, steps - MAX_STALENESS - 1)
    spans = read_spans(out)
    return Phases(
        step=median(metrics[step]["step_s"] for step in steady),
        rollout=rollout_s(spans, steady, groups=work.num_prompts, reward_s=reward_s),
        reward=reward_s,
        train=training_s(spans, steady),
    )
