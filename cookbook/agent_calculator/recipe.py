"""Create a tiny model; warm up by SFT; then train it with a calculator, and without.

python cookbook/agent_calculator/recipe.py [--dir runs/agent_calculator] [section.key=value ...]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cosmos_rl_core import run

HERE = Path(__file__).parent
sys.path.append(str(HERE))
from calculator import write_data, write_model  # noqa: E402  beside this file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/agent_calculator"))
    parser.add_argument("--warm-up-steps", type=int, default=None, help="steps of SFT; by default those of sft.toml")
    parser.add_argument("--seed", type=int, default=0, help="of the model and all runs")
    parser.add_argument("overrides", nargs="*", help="section.key=value for the two GRPO runs")
    arguments = parser.parse_args()
    directory: Path = arguments.dir
    data = directory / "data"

    print("1/4  a tiny Qwen3, and products such as 47*38")
    write_data(data)
    base = write_model(directory / "base", seed=arguments.seed)

    print("2/4  a short supervised warm-up on chats, a third of which call the calculator")
    overrides = [f"run.output_dir={directory / 'sft'}", f"model.path={base}", f"data.path={data / 'chats.jsonl'}"]
    overrides += [f"run.seed={arguments.seed}"]
    overrides += [f"run.max_steps={arguments.warm_up_steps}"] if arguments.warm_up_steps else []
    warm = run(HERE / "sft.toml", overrides, overwrite=True)
    if warm.interrupted:  # by Ctrl-C or SIGTERM, which ends one run
        raise SystemExit(130)
    assert warm.checkpoint is not None

    common = [f"model.path={warm.checkpoint / 'policy'}", f"run.seed={arguments.seed}"]
    common += [f"data.path={data / 'train.jsonl'}", f"eval.data.path={data / 'test.jsonl'}", *arguments.overrides]
    for number, name in ((3, "with_tool"), (4, "without_tool")):
        print(f"{number}/4  GRPO of {name}.toml")
        overrides = [f"run.output_dir={directory / name}", *common]
        result = run(HERE / f"{name}.toml", overrides, overwrite=True, python_path=[str(HERE)])  # calculator.py
        if result.interrupted:
            raise SystemExit(130)
    print(f"\nlook at the runs in a browser:  .venv/bin/cosmos-rl dashboard {directory}")


if __name__ == "__main__":
    main()
