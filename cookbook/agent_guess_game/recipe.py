"""Create a tiny model with random weights, and train it to guess numbers in several turns.

python cookbook/agent_guess_game/recipe.py [--dir runs/agent_guess_game] [section.key=value ...]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cosmos_rl_core import run
from cosmos_rl_llm import write_tiny_model

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/agent_guess_game"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    arguments = parser.parse_args()
    directory: Path = arguments.dir

    base = write_tiny_model(
        directory / "base", characters="01234567<>?", num_layers=2, hidden_size=64, seed=arguments.seed
    )
    overrides = [f"run.output_dir={directory / 'run'}", f"model.path={base}", f"run.seed={arguments.seed}"]
    overrides += arguments.overrides
    run(HERE / "run.toml", overrides, overwrite=True, python_path=[str(HERE)])  # the folder of game.py
    print(f"\nlook at the episodes in a browser:  .venv/bin/cosmos-rl dashboard {directory / 'run'}")


if __name__ == "__main__":
    main()
