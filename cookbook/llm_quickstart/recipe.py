"""Create a tiny model, a tokenizer and arithmetic problems; warm up by SFT; then run asynchronous GRPO.

python cookbook/llm_quickstart/recipe.py [--dir runs/llm_quickstart] [section.key=value ...]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cosmos_rl_core import run
from cosmos_rl_llm import write_sums, write_tiny_model

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/llm_quickstart"))
    parser.add_argument("--warm-up-steps", type=int, default=None, help="steps of SFT; by default those of sft.toml")
    parser.add_argument("--seed", type=int, default=0, help="of both runs")
    parser.add_argument("overrides", nargs="*", help="section.key=value for the GRPO run")
    arguments = parser.parse_args()
    directory: Path = arguments.dir

    print("1/3  a tiny Qwen3, a tokenizer of 15 characters, and problems such as 47+38=")
    train, test = write_sums(directory / "data")
    base = write_tiny_model(directory / "base")

    print("2/3  a short supervised warm-up, so that some answers are right")
    overrides = [f"run.output_dir={directory / 'sft'}", f"model.path={base}", f"data.path={train}"]
    overrides += [f"run.seed={arguments.seed}"]
    overrides += [f"run.max_steps={arguments.warm_up_steps}"] if arguments.warm_up_steps else []
    warm = run(HERE / "sft.toml", overrides, overwrite=True)
    if warm.interrupted:  # by Ctrl-C or SIGTERM, which ends one run
        raise SystemExit(130)

    print("3/3  asynchronous GRPO: controller, policy and rollout as separate processes")
    assert warm.checkpoint is not None
    overrides = [f"run.output_dir={directory / 'grpo'}", f"model.path={warm.checkpoint / 'policy'}"]
    overrides += [f"data.path={train}", f"eval.data.path={test}", f"run.seed={arguments.seed}", *arguments.overrides]
    run(HERE / "run.toml", overrides, overwrite=True)
    print(f"\nlook at both runs in a browser:  .venv/bin/cosmos-rl dashboard {directory}")


if __name__ == "__main__":
    main()
