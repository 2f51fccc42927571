"""Create a tiny model with random weights, and train it with an agent that is a client of OpenAI's interface.

python cookbook/agent_openai_client/recipe.py [--dir runs/agent_openai_client] [section.key=value ...]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from cosmos_rl_core import run
from cosmos_rl_llm import write_tiny_model

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/agent_openai_client"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    arguments = parser.parse_args()
    directory: Path = arguments.dir
    output = directory / "run"

    base = write_tiny_model(directory / "base", characters="012<>?", num_layers=2, hidden_size=64, seed=arguments.seed)
    shutil.rmtree(output, ignore_errors=True)  # the agent waits for the address of this run
    agent = subprocess.Popen([sys.executable, str(HERE / "agent.py"), str(output)])
    try:
        overrides = [f"run.output_dir={output}", f"model.path={base}", f"run.seed={arguments.seed}"]
        run(HERE / "run.toml", [*overrides, *arguments.overrides], python_path=[str(HERE)])  # the folder of rows.py
    finally:
        agent.terminate()
        agent.wait()


if __name__ == "__main__":
    main()
