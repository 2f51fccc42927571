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
HELD_OUT = 12


def rows(*, seed: int) -> list[dict[str, Any]]:
    """Prompts such as "3,4:", the slope and the offset of a line, and a hidden test for each of the two.

    `response` is a program of the right form for a random line: the warm-up teaches the grammar, and no solution.
    """
    random_numbers = random.Random(seed)
    made = []
    for slope in range(1, 9):
        for offset in range(9):
            tests = [f"assert f(0) == {offset}", f"assert f(5) - f(4) == {slope}"]
            program = f"{random_numbers.randint(1, 8)}*x+{random_numbers.randint(0, 8)}"
            made.append({"prompt": f"{slope},{offset}:", "response": program, "tests": tests})
    random_numbers.shuffle(made)
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
    test, train = write(directory / "test.jsonl", made[:HELD_OUT]), write(directory / "train.jsonl", made[HELD_OUT:])
    base = write_tiny_model(
        directory / "base", characters=CHARACTERS, num_layers=2, hidden_size=64, seed=arguments.seed
    )
    overrides = [f"run.output_dir={directory / 'sft'}", f"model.path={base}", f"data.path={train}"]
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
