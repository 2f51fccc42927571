"""Create a tiny model, warm it up on the grammar of programs, and train it by tests of what it writes.

python cookbook/agent_code/recipe.py [--dir runs/agent_code] [section.key=value ...]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cosmos_rl_core import run
from cosmos_rl_llm import write_tiny_model

HERE = Path(__file__).parent
CHARACTERS = "0123456789*+x,:"
HELD_OUT = 24
ANSWERS = 8
"""Number of sampled answers to each held-out prompt in an evaluation."""
WORKED = 32
"""Number of the warm-up's programs for each prompt."""
RIGHT = 0.3
"""The fraction of them that is right."""


def rows(*, seed: int) -> list[dict[str, Any]]:
    """Prompts such as "3,4:", the slope and the offset of a line, and a hidden test for each of the two."""
    made = []
    for slope in range(1, 10):
        for offset in range(10):
            tests = [f"assert f(0) == {offset}", f"assert f(5) - f(4) == {slope}"]
            made.append({"prompt": f"{slope},{offset}:", "tests": tests})
    random.Random(seed).shuffle(made)
    return made


def worked(prompts: Sequence[dict[str, Any]], *, seed: int) -> list[dict[str, Any]]:
    """Rows for the warm-up. All programs have the right form; most are for another line than the prompt asks for."""
    sampled = random.Random(seed)
    made = []
    for row in [row for row in prompts for _ in range(WORKED)]:
        slope, offset = row["prompt"].rstrip(":").split(",")
        if sampled.random() > RIGHT:
            slope, offset = str(sampled.randint(1, 9)), str(sampled.randint(0, 9))
        made.append({"prompt": row["prompt"], "response": f"{slope}*x+{offset}"})
    return made


def write(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/agent_code"))
    parser.add_argument("--warm-up-steps", type=int, default=None, help="steps of SFT; by default those of sft.toml")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="section.key=value for the GRPO run")
    arguments = parser.parse_args()
    directory: Path = arguments.dir

    made = rows(seed=0)
    test = write(directory / "test.jsonl", made[:HELD_OUT] * ANSWERS)
    train = write(directory / "train.jsonl", made[HELD_OUT:])
    warm_up = write(directory / "worked.jsonl", worked(made[HELD_OUT:], seed=0))
    base = write_tiny_model(
        directory / "base", characters=CHARACTERS, num_layers=2, hidden_size=64, seed=arguments.seed
    )
    overrides = [f"run.output_dir={directory / 'sft'}", f"model.path={base}", f"data.path={warm_up}"]
    overrides += [f"run.seed={arguments.seed}"]
    overrides += [f"run.max_steps={arguments.warm_up_steps}"] if arguments.warm_up_steps else []
    warm = run(HERE / "sft.toml", overrides, overwrite=True)
    if warm.interrupted:  # by Ctrl-C or SIGTERM, which ends one run
        raise SystemExit(130)
    assert warm.checkpoint is not None
    overrides = [f"run.output_dir={directory / 'grpo'}", f"model.path={warm.checkpoint / 'policy'}"]
    overrides += [f"data.path={train}", f"eval.data.path={test}", f"run.seed={arguments.seed}", *arguments.overrides]
    run(HERE / "run.toml", overrides, overwrite=True)
    print(f"\nlook at the programs in a browser:  .venv/bin/cosmos-rl dashboard {directory / 'grpo'}")


if __name__ == "__main__":
    main()
