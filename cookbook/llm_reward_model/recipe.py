"""Train a reward model on pairs that a rule decided, then RL against it, while the rule itself only watches.

python cookbook/llm_reward_model/recipe.py [--dir runs/llm_reward_model] [section.key=value ...]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from cosmos_rl_core import RolloutGroup, run
from cosmos_rl_llm import write_tiny_model

HERE = Path(__file__).parent
LENGTH = 4


def rule(text: str) -> float:
    """The true reward: sevens among the first four digits, minus 1 for each further digit."""
    return text[:LENGTH].count("7") - max(0, len(text) - LENGTH)


def true_reward(group: RolloutGroup) -> list[float]:
    """The rule, for weight = 0: it is recorded and not trained on."""
    return [rule(rollout.text) for rollout in group.rollouts]


def pairs(number: int, *, seed: int) -> Iterator[dict[str, str]]:
    """Answers of four digits alone: nothing shows that longer ones are bad."""
    chance = random.Random(seed)
    while number:
        prompt, one, other = ("".join(chance.choices("0123456789", k=k)) for k in (3, LENGTH, LENGTH))
        if rule(one) != rule(other):
            chosen, rejected = (one, other) if rule(one) > rule(other) else (other, one)
            yield {"prompt": f"{prompt}=", "chosen": chosen, "rejected": rejected}
            number -= 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/llm_reward_model"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="section.key=value for the RL run")
    arguments = parser.parse_args()
    directory: Path = arguments.dir
    base = write_tiny_model(directory / "base", num_layers=2, hidden_size=64, initializer_range=0.06)
    train, test = directory / "pairs.jsonl", directory / "held_out.jsonl"
    for path, number, seed in ((train, 2000, 2 * arguments.seed), (test, 64, 2 * arguments.seed + 1)):
        path.write_text("".join(json.dumps(row) + "\n" for row in pairs(number, seed=seed)), encoding="utf-8")
    common = [f"data.path={train}", f"eval.data.path={test}", f"model.path={base}"]

    overrides = [f"run.output_dir={directory / 'reward_model'}", f"run.seed={arguments.seed}"]
    scored = run(HERE / "reward_model.toml", [*common, *overrides], overwrite=True)
    if scored.interrupted:  # by Ctrl-C or SIGTERM, which ends one run
        raise SystemExit(130)
    assert scored.checkpoint is not None
    overrides = [
        f"run.output_dir={directory / 'rl'}",
        f"run.seed={arguments.seed}",
        f"reward.functions.0.options.path={scored.checkpoint / 'policy'}",
    ]
    run(HERE / "run.toml", [*common, *overrides, *arguments.overrides], overwrite=True, python_path=[str(HERE)])


if __name__ == "__main__":
    main()
