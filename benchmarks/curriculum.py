"""The difficulty curriculum beside the plain order of rows, on a bandit with rows that teach nothing.

    .venv/bin/python benchmarks/curriculum.py [--quick]

Rows of three kinds, a third each: every answer is right, no answer is right, and those that can be learned. Both sides
generate the same number of groups, with the same seeds; the figure is the mean reward of the rows that can be learned
after each number of steps, by the run's own evaluations. Beside it the same where all rows can be learned, so that what
is skipped is not worthless.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _metrics import Figure, report

from cosmos_rl_core import run
from cosmos_rl_core.testing.tiny_task import hits
from cosmos_rl_core.types import RolloutGroup

ROWS, SEEDS, STEPS, EVERY = 30, (0, 1, 2), 45, 15


def mixed(group: RolloutGroup) -> list[float]:
    """1 in the first third of the rows, 0 in the second, and the fraction of right actions in the third."""
    kind = int(group.prompt.row["context"]) % 3
    return hits(group) if kind == 2 else [float(kind == 0)] * len(group.rollouts)


def measure(
    directory: Path, *, curriculum: bool, reward: Callable[[RolloutGroup], list[float]], seed: int, steps: int
) -> dict[int, float]:
    """Return the mean reward of the rows that can be learned, by version."""
    recipe: dict[str, Any] = {
        "run": {
            "domain": "cosmos_rl_core.testing.tiny:TINY",
            "output_dir": str(directory),
            "placement": "inline",
            "max_steps": steps,
            "seed": seed,
        },
        "model": {"contexts": ROWS, "seed": seed},
        "data": {"rows": ROWS},
        "prompts": {"curriculum": {}} if curriculum else {},
        "algorithm": {"name": "grpo"},
        "policy": {"prompts_per_step": 10, "threads": 1, "optimizer": {"learning_rate": 0.03}},
        "rollout": {"group_size": 8, "threads": 1, "sampling": {"max_tokens": 3}},
        "sync": {"backend": "cosmos_rl_core.testing.file_sync:FileSync", "max_staleness": 0},
        "eval": {"every_steps": EVERY, "data": {"rows": ROWS}},
        "logging": {"sinks": ["jsonl"]},
    }
    evaluations = run(recipe, rewards={"reward": reward}).evaluations
    means = {version: values["eval/reward_mean"] for version, values in evaluations.items()}
    return means if reward is hits else {version: 3 * mean - 1 for version, mean in means.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed and fewer steps")
    quick = parser.parse_args().quick
    seeds, steps = (SEEDS[:1], EVERY) if quick else (SEEDS, STEPS)
    figures = []
    for title, reward in (("a third can be learned", mixed), ("all can be learned", hits)):
        for curriculum in (False, True):
            runs = []
            for seed in seeds:
                with tempfile.TemporaryDirectory() as folder:
                    at = Path(folder) / "run"
                    runs.append(measure(at, curriculum=curriculum, reward=reward, seed=seed, steps=steps))
            for version in range(EVERY, steps + 1, EVERY):
                values = [each[version] for each in runs]
                name = f"{title}, {'curriculum' if curriculum else 'plain order'}, {version} steps"
                note = f"{name}: {', '.join(f'{value:.3f}' for value in values)} with seeds {list(seeds)}"
                figures.append(Figure(metric=name, value=statistics.mean(values), unit="reward", note=note))
    report("curriculum", figures)


if __name__ == "__main__":
    main()
