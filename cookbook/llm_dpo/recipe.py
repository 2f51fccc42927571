"""Warm up a tiny model on sums, write pairs of a right and a wrong answer, then run DPO and judge answers by a rule.

python cookbook/llm_dpo/recipe.py [--dir runs/llm_dpo] [section.key=value ...]
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from cosmos_rl_core import Request, evaluate, run
from cosmos_rl_llm import write_sums, write_tiny_model

HERE = Path(__file__).parent
SUMS = HERE.parent / "llm_quickstart"


def write_pairs(sums: Path, path: Path, *, number: int, seed: int) -> Path:
    """Write `number` pairs: the answer, and one that is off by 1 or 10."""
    chance = random.Random(seed)
    rows = [json.loads(line) for line in sums.read_text(encoding="utf-8").splitlines()[:number]]
    pairs = (
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": str(abs(int(row["answer"]) + wrong))}
        for row in rows
        if (wrong := chance.choice((-10, -1, 1, 10)))
    )
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/llm_dpo"))
    parser.add_argument("--warm-up-steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="section.key=value for the DPO run")
    arguments = parser.parse_args()
    directory: Path = arguments.dir
    train, test = write_sums(directory / "data")
    base = write_tiny_model(directory / "base")
    pairs = write_pairs(train, directory / "data/pairs.jsonl", number=4000, seed=arguments.seed)

    overrides = [f"run.output_dir={directory / 'sft'}", f"model.path={base}", f"data.path={train}"]
    overrides += [f"run.seed={arguments.seed}"]
    warm = run(SUMS / "sft.toml", [*overrides, f"run.max_steps={arguments.warm_up_steps}"], overwrite=True)
    if warm.interrupted:  # by Ctrl-C or SIGTERM, which ends one run
        raise SystemExit(130)
    assert warm.checkpoint is not None
    start = warm.checkpoint / "policy"
    overrides = [f"run.output_dir={directory / 'dpo'}", f"model.path={start}", f"data.path={pairs}"]
    overrides += [f"run.seed={arguments.seed}"]
    tuned = run(HERE / "run.toml", [*overrides, *arguments.overrides], overwrite=True)
    if tuned.interrupted:
        raise SystemExit(130)
    assert tuned.checkpoint is not None

    for name, model in (("before", start), ("after", tuned.checkpoint / "policy")):
        judged = [f"model.path={model}", f"data.path={train}", f"eval.data.path={test}"]
        found = evaluate(SUMS / "run.toml", judged, request=Request(out=directory / name))
        print(f"{name}: right answers to held-out sums {found.metrics['reward'].mean:.3f}")


if __name__ == "__main__":
    main()
