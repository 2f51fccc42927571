"""GRPO of an untrained model with the rewards of rewards.py.

python cookbook/custom_reward/recipe.py [--dir runs/custom_reward] [section.key=value ...]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cosmos_rl_core import run
from cosmos_rl_llm import write_sums, write_tiny_model

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/custom_reward"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    arguments = parser.parse_args()
    directory: Path = arguments.dir
    train, test = write_sums(directory / "data")
    base = write_tiny_model(directory / "base", num_layers=2, initializer_range=0.06)
    paths = [f"model.path={base}", f"data.path={train}", f"eval.data.path={test}"]
    overrides = [f"run.output_dir={directory / 'grpo'}", f"run.seed={arguments.seed}", *paths, *arguments.overrides]
    run(HERE / "run.toml", overrides, overwrite=True, python_path=[str(HERE)])  # the folder of rewards.py


if __name__ == "__main__":
    main()
