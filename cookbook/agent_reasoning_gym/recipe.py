"""Install reasoning-gym into an environment of its own, and train a tiny model on one of its tasks.

python cookbook/agent_reasoning_gym/recipe.py [--dir runs/agent_reasoning_gym] [section.key=value ...]
"""

from __future__ import annotations

import argparse
import string
import subprocess
import sys
from pathlib import Path

from cosmos_rl_core import run
from cosmos_rl_llm import write_tiny_model

HERE = Path(__file__).parent
REQUIREMENTS = ("reasoning-gym==0.1.25", "numpy", "msgspec")
WORKED = """
import json
import reasoning_gym
for each in reasoning_gym.create_dataset("spell_backward", seed=1, size=4096, min_word_len=3, max_word_len=3):
    print(json.dumps({"prompt": each["question"], "response": each["answer"]}))
"""


def interpreter(folder: Path) -> Path:
    """Return the Python of an environment with reasoning-gym, made at the first call."""
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
        (folder / "installed").touch()
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/agent_reasoning_gym"))
    parser.add_argument("--python", type=Path, help="one with reasoning-gym; by default it is made in --dir")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    arguments = parser.parse_args()
    directory: Path = arguments.dir

    python = arguments.python or interpreter(directory / "environment")
    worked = directory / "worked.jsonl"
    base = write_tiny_model(
        directory / "base",
        characters=string.ascii_letters + " ():->",
        num_layers=2,
        hidden_size=64,
        seed=arguments.seed,
    )
    worked.write_bytes(subprocess.run([python, "-c", WORKED], check=True, stdout=subprocess.PIPE).stdout)

    print("1/2  a short supervised warm-up on worked questions, so that some answers are right")
    overrides = [f"run.output_dir={directory / 'sft'}", f"model.path={base}", f"data.path={worked}"]
    warm = run(HERE / "sft.toml", [*overrides, f"run.seed={arguments.seed}"], overwrite=True)
    if warm.interrupted:  # by Ctrl-C or SIGTERM, which ends one run
        raise SystemExit(130)

    print("2/2  GRPO: reasoning-gym asks and scores in a process of its own interpreter")
    assert warm.checkpoint is not None
    overrides = [f"run.output_dir={directory / 'run'}", f"model.path={warm.checkpoint / 'policy'}"]
    overrides += [f"run.seed={arguments.seed}", f"environment.python={python}", *arguments.overrides]
    run(HERE / "run.toml", overrides, overwrite=True, python_path=[str(HERE)])  # the folder of questions.py
    print(f"\nlook at the episodes in a browser:  .venv/bin/cosmos-rl dashboard {directory / 'run'}")


if __name__ == "__main__":
    main()
